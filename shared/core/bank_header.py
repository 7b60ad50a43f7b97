"""The header of a bank file: what the bank holds, for which model, and how to recognise damage.

Owns the header's fields and its bytes. Pure: the hash function is passed in, files are somebody
else's. Layout, little endian:

    0   8   magic "K3BANK\\0\\1"
    8   4   u32 format version
    12  8   u64 length of the JSON
    20  32  BLAKE3 of bytes 0..19 followed by the JSON: the digest of the bank
    52  n   JSON of BankHeader, then zeros up to a multiple of 4096

The records follow at once, `RecordLayout.stride_bytes` apart. Every string of the JSON has a fixed
width once rows and goldens are chosen, so a builder can reserve the block before it knows the
hashes and the goldens' values.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
import numpy as np

from shared.core.errors import BankError
from shared.core.names import NodeName
from shared.core.placement import ExpertKey, Tier
from shared.core.record import PAGE_BYTES, RecordLayout, RecordOrder
from shared.core.ring_layout import Rows, all_finite
from shared.core.shape import ExpertShape

MAGIC: Final = b"K3BANK\0\1"
# 2: source_hashes. The order interleaved-4 came without a new number: a reader that does not know
# it refuses the header's `layout` by name. 3: goldens.
FORMAT_VERSION: Final = 3
PREFIX_BYTES: Final = 52
JSON_BYTES_MAX: Final = 64 * 2**20  # every expert of K3 in one bank takes 20 MB
GOLDENS_MAX: Final = 64
_BF16_BYTES: Final = 2

_FIELDS: Final = struct.Struct("<8sIQ")
_HASH_BYTES: Final = 32

Hasher: TypeAlias = Callable[[bytes], bytes]
Layer: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
Expert: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
Blake3Hex: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
TensorChecks: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{96}$")]
Digest: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
U32: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class Golden(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the expert at `bank_row` makes of the canary activation of `seed`.

    `row` holds bf16 values, little endian, [latent]; computed in float64 when the bank was built.
    """

    bank_row: U32
    seed: U32
    row: Annotated[bytes, msgspec.Meta(max_length=2**17)]

    @property
    def bits(self) -> Rows:
        """The row as bf16 bits, uint16 [latent]."""
        return np.frombuffer(self.row, "<u2")


class BankHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Metadata of one bank. Row r is the expert `rows[r]`.

    `record_hashes[r]` is the BLAKE3 (hex) of the record without its padding and decides whether
    it is intact. `source_hashes[r]` is the BLAKE3 of the tensors it was made from, as the
    checkpoint stores them: the same hash where a record is a plain copy, another one where it was
    cast or laid out anew, and the way to recognise a checkpoint that changed. `tensor_checks[r]`
    is 12 u32 (hex, tensors in RecordLayout order: the low half of XXH3-64 of the tensor as the
    record holds it) and only tells which tensor of a damaged record changed. `layout` is the order
    of the bytes inside the tensors of every record. `goldens` let a node prove kernel, memory and
    bank against rows that no code of today has a part in.
    """

    version: Literal[3]
    name: NodeName
    node: NodeName
    tier: Tier
    model_digest: Digest
    placement_digest: Digest
    shape: ExpertShape
    layout: RecordOrder
    rows: Annotated[tuple[tuple[Layer, Expert], ...], msgspec.Meta(min_length=1)]
    record_hashes: tuple[Blake3Hex, ...]
    source_hashes: tuple[Blake3Hex, ...]
    tensor_checks: tuple[TensorChecks, ...]
    goldens: Annotated[tuple[Golden, ...], msgspec.Meta(min_length=1, max_length=GOLDENS_MAX)]
    producer: Annotated[str, msgspec.Meta(max_length=128)]

    def __post_init__(self) -> None:
        """Two hashes and one set of checks per row; no expert twice; an order its shape allows;
        goldens of rows that exist, each once, whole and finite."""
        RecordLayout(self.shape, self.layout)  # ValueError
        count = len(self.rows)
        lengths = (len(self.record_hashes), len(self.source_hashes), len(self.tensor_checks))
        if lengths != (count, count, count):
            raise ValueError(
                f"{count} rows have {lengths[0]} record hashes, {lengths[1]} source hashes "
                f"and {lengths[2]} tensor checks"
            )
        if len(set(self.rows)) != count:
            raise ValueError("an expert has two rows")
        for index, golden in enumerate(self.goldens):
            self._check_golden(golden, f"golden {index}")
        if len({golden.bank_row for golden in self.goldens}) != len(self.goldens):
            raise ValueError("a bank row has two goldens")

    def _check_golden(self, golden: Golden, which: str) -> None:
        if golden.bank_row >= len(self.rows):
            raise ValueError(f"{which} is of bank row {golden.bank_row} of {len(self.rows)}")
        expected = _BF16_BYTES * self.shape.latent
        if len(golden.row) != expected:
            raise ValueError(f"{which} has {len(golden.row)} bytes, not {expected}")
        if not all_finite(golden.bits[None]):
            raise ValueError(f"{which} is not finite")

    @property
    def record_layout(self) -> RecordLayout:
        """Where the tensors of each record lie."""
        return RecordLayout(self.shape, self.layout)

    def row_of(self) -> dict[ExpertKey, int]:
        """Bank row of every (layer, expert)."""
        return {key: row for row, key in enumerate(self.rows)}


def header_block_bytes(prefix: bytes, *, source: str) -> int:
    """Size of the header block, a multiple of 4096, from the first PREFIX_BYTES of a file.

    Raises BankError when this is no bank of our format, before anything of that size is read.
    """
    if len(prefix) < PREFIX_BYTES:
        raise BankError(
            f"{source}: the file ends at byte {len(prefix)}, inside the {PREFIX_BYTES}-byte prefix "
            "of a bank: build it again"
        )
    magic, version, json_bytes = _FIELDS.unpack_from(prefix)
    if magic != MAGIC:
        raise BankError(
            f"{source}: offset 0: {magic!r} is not the magic of a bank file {MAGIC!r}: "
            "name a file made by `k3 bank build`"
        )
    if version != FORMAT_VERSION:
        raise BankError(
            f"{source}: offset 8: bank format {version}, this program reads {FORMAT_VERSION}: "
            "build the bank again with this version"
        )
    if not 2 <= json_bytes <= JSON_BYTES_MAX:
        raise BankError(
            f"{source}: offset 12: header of {json_bytes} bytes, allowed are 2 to "
            f"{JSON_BYTES_MAX}: the file is damaged, build it again"
        )
    return _block_bytes(json_bytes)


def decode(block: bytes, *, hasher: Hasher, source: str) -> BankHeader:
    """Parse a whole header block; any defect is one BankError with its file offset.

    `hasher` gives the 32-byte BLAKE3 of its argument.
    """
    size = header_block_bytes(block[:PREFIX_BYTES], source=source)
    if len(block) < size:
        raise BankError(
            f"{source}: the file ends at byte {len(block)}, inside its {size}-byte header: "
            "it was cut off, build it again"
        )
    json_bytes = _FIELDS.unpack_from(block)[2]
    text = block[PREFIX_BYTES : PREFIX_BYTES + json_bytes]
    if hasher(block[: _FIELDS.size] + text) != stored_digest(block):
        raise BankError(
            f"{source}: offset {_FIELDS.size}: the header does not match its BLAKE3: "
            "it was changed after it was written, build the bank again"
        )
    if block[PREFIX_BYTES + json_bytes : size].strip(b"\0"):
        raise BankError(
            f"{source}: offset {PREFIX_BYTES + json_bytes}: the padding after the header is not "
            "zero: the file is damaged, build it again"
        )
    try:
        return msgspec.json.decode(text, type=BankHeader)
    except msgspec.DecodeError as error:
        raise BankError(
            f"{source}: offset {PREFIX_BYTES}: not the header of a bank: {error}: build it again"
        ) from error


def encode(header: BankHeader, *, hasher: Hasher) -> bytes:
    """Bytes of the header block; equal headers give equal bytes."""
    text = msgspec.json.encode(header)
    if len(text) > JSON_BYTES_MAX:
        raise BankError(
            f"bank {header.name}: {len(header.rows)} rows need a header of {len(text)} bytes, "
            f"more than {JSON_BYTES_MAX}: split the node's experts over several banks"
        )
    fields = _FIELDS.pack(MAGIC, FORMAT_VERSION, len(text))
    block = fields + hasher(fields + text) + text
    return block.ljust(_block_bytes(len(text)), b"\0")


def stored_digest(prefix: bytes) -> bytes:
    """The bank's digest (32 bytes) as its header states it."""
    return prefix[_FIELDS.size : _FIELDS.size + _HASH_BYTES]


def _block_bytes(json_bytes: int) -> int:
    return -(-(PREFIX_BYTES + json_bytes) // PAGE_BYTES) * PAGE_BYTES
