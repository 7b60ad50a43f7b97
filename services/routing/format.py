"""The bytes of a trace file: head, blocks of tokens, totals. Pure: files are somebody else's.

Layout, little endian:

    0    8   magic "K3TRACE\\1"
    8    4   u32 format version
    12   4   u32 length of the JSON
    16   n   JSON of TraceMeta
    16+n 8   XXH3-64 of everything before

then blocks, one after the other until the end of the file:

    0    4   magic "BLK\\1"
    4    4   u32 kind: 1 tokens, 2 totals
    8    4   u32 tokens (0 for totals)
    12   4   u32 length of the payload
    16   8   XXH3-64 of the payload
    24   8   XXH3-64 of bytes 0..23
    32       payload: fixed-size records (request i32, step i32, ids u16 [layers, top_k]), or JSON

A file grows by whole blocks at its end, so what a crash leaves is good blocks and a torn last one.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import Meta

from shared.core.errors import TraceError

MAGIC: Final = b"K3TRACE\1"
FORMAT_VERSION: Final = 1
PREFIX_BYTES: Final = 16
CHECK_BYTES: Final = 8
META_BYTES_MAX: Final = 64 * 1024
BLOCK_MAGIC: Final = b"BLK\1"
BLOCK_HEADER_BYTES: Final = 32
BLOCK_TOKENS: Final = 256
BLOCK_BYTES_MAX: Final = 64 * 1024 * 1024  # what a hostile header may make a reader allocate
KIND_TOKENS: Final = 1
KIND_TOTALS: Final = 2

_PREFIX: Final = struct.Struct("<8sII")
_BLOCK: Final = struct.Struct("<4sIIIQ")
_CHECK: Final = struct.Struct("<Q")

Parameter: TypeAlias = int | float | str
Records: TypeAlias = npt.NDArray[np.void]


class TraceMeta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a trace is of. `layers` counts the layers with routed experts, from `first_layer` on.

    `recording` names the run that made the file and `part` counts its files from 1: request numbers
    mean the same in all parts of one recording. `parameters` say how a synthetic trace was made.
    """

    model_digest: Annotated[str, Meta(min_length=1, max_length=128)]
    first_layer: Annotated[int, Meta(ge=0, lt=2**16)]
    layers: Annotated[int, Meta(ge=1, lt=2**16)]
    experts: Annotated[int, Meta(ge=1, le=2**16 - 1)]
    top_k: Annotated[int, Meta(ge=1, le=64)]
    source: Literal["recorded", "synthetic"]
    created_s: Annotated[int, Meta(ge=0)]  # unix time
    recording: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
    part: Annotated[int, Meta(ge=1)] = 1
    parameters: dict[Annotated[str, Meta(max_length=64)], Parameter] = {}

    @property
    def record(self) -> np.dtype[np.void]:
        """One token: request, step, ids."""
        fields: list[Any] = [
            ("request", "<i4"),
            ("step", "<i4"),
            ("ids", "<u2", (self.layers, self.top_k)),
        ]
        return np.dtype(fields)


class LossTotals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens of the recording so far that are not in it: the recorder was slow, or they ended."""

    dropped: Annotated[int, Meta(ge=0)] = 0
    incomplete: Annotated[int, Meta(ge=0)] = 0


class BlockHeader(msgspec.Struct, frozen=True):
    """A checked block header; `check` is the payload's XXH3-64."""

    kind: int
    tokens: int
    payload_bytes: int
    check: int


def head_bytes(meta: TraceMeta) -> bytes:
    """The head of a file."""
    body = msgspec.json.encode(meta)
    head = _PREFIX.pack(MAGIC, FORMAT_VERSION, len(body)) + body
    return head + _CHECK.pack(xxhash.xxh3_64_intdigest(head))


def rest_of_head(prefix: bytes, *, source: str) -> int:
    """How many bytes of the head follow its first PREFIX_BYTES; TraceError when it is no trace."""
    if len(prefix) < PREFIX_BYTES or not prefix.startswith(MAGIC):
        raise TraceError(
            f"{source}: no trace file: give one of `k3 trace record` or `k3 trace synth`"
        )
    _, version, length = _PREFIX.unpack(prefix)
    if version != FORMAT_VERSION:
        raise TraceError(
            f"{source}: trace format {version}, this k3 reads {FORMAT_VERSION}: use the k3 that "
            "made it"
        )
    if length > META_BYTES_MAX:
        raise TraceError(f"{source}: the head is damaged ({length} bytes); record it again")
    return int(length) + CHECK_BYTES


def parse_head(head: bytes, *, source: str) -> TraceMeta:
    """The metadata of a whole head; TraceError when it is damaged."""
    body, check = head[:-CHECK_BYTES], head[-CHECK_BYTES:]
    if check != _CHECK.pack(xxhash.xxh3_64_intdigest(body)):
        raise TraceError(f"{source}: the head is damaged (its checksum differs); record it again")
    try:
        meta = msgspec.json.decode(body[PREFIX_BYTES:], type=TraceMeta)
    except msgspec.DecodeError as error:
        raise TraceError(
            f"{source}: the head is not understood: {error}; record it again"
        ) from error
    if meta.record.itemsize > BLOCK_BYTES_MAX:
        raise TraceError(f"{source}: {meta.layers} layers x {meta.top_k} experts are too many")
    return meta


def block_bytes(kind: int, tokens: int, payload: bytes) -> bytes:
    """A block as it is appended."""
    header = _BLOCK.pack(BLOCK_MAGIC, kind, tokens, len(payload), xxhash.xxh3_64_intdigest(payload))
    return header + _CHECK.pack(xxhash.xxh3_64_intdigest(header)) + payload


def token_block(records: Records) -> bytes:
    """A block of tokens."""
    return block_bytes(KIND_TOKENS, len(records), records.tobytes())


def totals_block(totals: LossTotals) -> bytes:
    """A block that says what the recording lacks so far."""
    return block_bytes(KIND_TOTALS, 0, msgspec.json.encode(totals))


def parse_block_header(data: bytes, meta: TraceMeta) -> BlockHeader | None:
    """A block's header, or None when these bytes are none that this format would hold."""
    fields, check = data[: _BLOCK.size], data[_BLOCK.size : BLOCK_HEADER_BYTES]
    if len(data) < BLOCK_HEADER_BYTES or check != _CHECK.pack(xxhash.xxh3_64_intdigest(fields)):
        return None
    magic, kind, tokens, payload_bytes, payload_check = _BLOCK.unpack(fields)
    fits = {
        KIND_TOKENS: payload_bytes == tokens * meta.record.itemsize and tokens > 0,
        KIND_TOTALS: tokens == 0,
    }.get(kind, False)
    if magic != BLOCK_MAGIC or not fits or payload_bytes > BLOCK_BYTES_MAX:
        return None
    return BlockHeader(kind, tokens, payload_bytes, payload_check)


def is_intact(header: BlockHeader, payload: bytes) -> bool:
    """Whether the payload is what was written."""
    return (
        len(payload) == header.payload_bytes and xxhash.xxh3_64_intdigest(payload) == header.check
    )


def parse_totals(payload: bytes, *, source: str) -> LossTotals:
    """The totals of an intact block; TraceError when they are not understood."""
    try:
        return msgspec.json.decode(payload, type=LossTotals)
    except msgspec.DecodeError as error:
        raise TraceError(
            f"{source}: totals are not understood: {error}; record it again"
        ) from error
