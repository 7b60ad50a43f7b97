"""Bytes on the data plane: ring geometry, slot headers, payload layouts, and what to refuse.

Theory. A ring is registered memory that exactly one peer writes. It starts with one 8-byte bell
per slot, then the slots. A sender writes payload and header, then the slot's generation into its
bell. A bell is a wake-up, never a proof: a reader copies the slot once, verifies the copy (magic,
version, epoch, generation, length, checksum) and uses the copy, because a late writer may
overwrite the slot at any moment. Everything is little endian.

Pure: knows no memory mapping and no hash implementation.
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import Annotated, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from shared.core.errors import LocalProtocolError

MAGIC: Final = 0x5244334B  # "K3DR"
VERSION: Final = 1
HEADER: Final = struct.Struct("<IHHQQQIIIIIIQ")
HEADER_BYTES: Final = 64
BELL_BYTES: Final = 8
ALIGN_BYTES: Final = 16
PAGE_BYTES: Final = 4096
PAIR_BYTES: Final = 4

assert HEADER.size == HEADER_BYTES

_EXPONENT: Final = 0x7F80  # all exponent bits set in a bf16: infinity or NaN
_MAGNITUDE: Final = 0x7FFF  # all bits but the sign

Pairs = npt.NDArray[np.uint16]  # [R, 2]: (token index, expert id)
Rows = npt.NDArray[np.uint16]  # bf16 bits


class Header(NamedTuple):
    """The 64 bytes before a payload; `checksum` covers them (itself zero) and the payload."""

    layer: int
    epoch: int
    generation: int
    ticket: int
    tokens: int
    rows: int
    payload_bytes: int
    time_us: int  # dispatch: budget left when sent; reply: time the dispatch waited in the node
    compute_us: int  # reply only
    kernel_id: int  # dispatch: the Station's kernel; reply: the one that computed the rows
    checksum: int = 0

    def pack(self) -> bytes:
        """64 bytes as they lie in a slot."""
        return HEADER.pack(
            MAGIC,
            VERSION,
            self.layer,
            self.epoch,
            self.generation,
            self.ticket,
            self.tokens,
            self.rows,
            self.payload_bytes,
            self.time_us,
            self.compute_us,
            self.kernel_id,
            self.checksum,
        )


class Verdict(Enum):
    """Why a copied slot may or may not be used."""

    ACCEPTED = "accepted"
    CORRUPT = "corrupt"  # magic, version, length or checksum: torn or damaged
    STALE_EPOCH = "stale_epoch"
    STALE_GENERATION = "stale_generation"


def unpack(data: bytes) -> Header | None:
    """Parse 64 header bytes; None when magic or version are not ours."""
    magic, version, *fields = HEADER.unpack(data)
    if magic != MAGIC or version != VERSION:
        return None
    return Header(*fields)


def judge(header: Header, *, epoch: int, generation: int, checksum: int) -> Verdict:
    """Decide on a private copy; `checksum` was computed over that copy."""
    if header.checksum != checksum:
        return Verdict.CORRUPT
    if header.epoch != epoch:
        return Verdict.STALE_EPOCH
    if header.generation != generation:
        return Verdict.STALE_GENERATION
    return Verdict.ACCEPTED


class RingShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Geometry of a request ring and of its reply ring; both ends compute the same offsets."""

    slots: Annotated[int, msgspec.Meta(ge=1, le=64)]  # one wait watches at most 64 bells
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    max_rows: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    latent: Annotated[int, msgspec.Meta(ge=16, le=2**16)]

    @property
    def request_slot_bytes(self) -> int:
        """Bytes of one dispatch slot."""
        return _page(HEADER_BYTES + dispatch_bytes(self.max_tokens, self.max_rows, self.latent))

    @property
    def reply_slot_bytes(self) -> int:
        """Bytes of one reply slot."""
        return _page(HEADER_BYTES + reply_bytes(self.max_rows, self.latent))

    @property
    def request_ring_bytes(self) -> int:
        """Bytes of the ring a node registers."""
        return self.bells_bytes + self.slots * self.request_slot_bytes

    @property
    def reply_ring_bytes(self) -> int:
        """Bytes of the ring the Station registers per node."""
        return self.bells_bytes + self.slots * self.reply_slot_bytes

    @property
    def bells_bytes(self) -> int:
        """Bytes before the first slot."""
        return _page(self.slots * BELL_BYTES)

    def slot_offset(self, slot: int, slot_bytes: int) -> int:
        """Offset of a slot in its ring; LocalProtocolError outside the ring."""
        if not 0 <= slot < self.slots:
            raise LocalProtocolError(f"slot {slot} is outside a ring of {self.slots}")
        return self.bells_bytes + slot * slot_bytes


def bell_offset(slot: int) -> int:
    """Offset of a slot's bell in its ring."""
    return slot * BELL_BYTES


def dispatch_bytes(tokens: int, rows: int, latent: int) -> int:
    """Payload of a dispatch: pairs, then each token's activation once."""
    return _aligned(rows * PAIR_BYTES) + tokens * latent * 2


def reply_bytes(rows: int, latent: int) -> int:
    """Payload of a reply: the same pairs, a status byte per row, then the rows."""
    return _aligned(rows * PAIR_BYTES) + _aligned(rows) + rows * latent * 2


class RowStatus(Enum):
    """What a node says about one pair."""

    OK = 0
    UNKNOWN_EXPERT = 1  # not in this node's bank
    NOT_FINITE = 2  # computed NaN or infinity; the row is zero


def finite_rows(rows: Rows) -> npt.NDArray[np.bool_]:
    """Per row of uint16 [R, latent] (bf16 bits): no infinity, no NaN."""
    good: npt.NDArray[np.bool_] = ((rows & _EXPONENT) != _EXPONENT).all(axis=1)
    return good


def all_finite(rows: Rows) -> bool:
    """Whether no value of uint16 [R, latent] (bf16 bits) is infinite or NaN; one pass."""
    return not rows.size or int((rows & _MAGNITUDE).max()) < _EXPONENT


def build_dispatch(pairs: Pairs, activations: Rows) -> npt.NDArray[np.uint8]:
    """Payload from pairs uint16 [R, 2] and activations uint16 (bf16 bits) [T, latent]."""
    payload = np.zeros(dispatch_bytes(len(activations), len(pairs), activations.shape[1]), np.uint8)
    head = len(pairs) * PAIR_BYTES
    payload[:head] = _as_bytes(pairs)
    payload[_aligned(head) :] = _as_bytes(activations)
    return payload


def parse_dispatch(header: Header, payload: bytes, latent: int) -> tuple[Pairs, Rows] | None:
    """Views into a verified copy; None when the counts do not fit the length."""
    if len(payload) != dispatch_bytes(header.tokens, header.rows, latent):
        return None
    pairs = np.frombuffer(payload, np.uint16, header.rows * 2).reshape(-1, 2)
    offset = _aligned(header.rows * PAIR_BYTES)
    activations = np.frombuffer(payload, np.uint16, header.tokens * latent, offset)
    if header.rows and int(pairs[:, 0].max()) >= header.tokens:
        return None
    return pairs, activations.reshape(header.tokens, latent)


def build_reply(pairs: Pairs, status: npt.NDArray[np.uint8], rows: Rows) -> npt.NDArray[np.uint8]:
    """Payload from pairs [R, 2], status uint8 [R] and rows uint16 (bf16 bits) [R, latent]."""
    count, latent = rows.shape
    payload = np.zeros(reply_bytes(count, latent), np.uint8)
    head = count * PAIR_BYTES
    status_at = _aligned(head)
    payload[:head] = _as_bytes(pairs)
    payload[status_at : status_at + count] = status
    payload[status_at + _aligned(count) :] = _as_bytes(rows)
    return payload


def parse_reply(
    header: Header, payload: bytes, latent: int
) -> tuple[Pairs, npt.NDArray[np.uint8], Rows] | None:
    """Views (pairs, status, rows) into a verified copy; None when counts do not fit the length."""
    if len(payload) != reply_bytes(header.rows, latent):
        return None
    pairs = np.frombuffer(payload, np.uint16, header.rows * 2).reshape(-1, 2)
    status_at = _aligned(header.rows * PAIR_BYTES)
    status = np.frombuffer(payload, np.uint8, header.rows, status_at)
    rows_at = status_at + _aligned(header.rows)
    rows = np.frombuffer(payload, np.uint16, header.rows * latent, rows_at)
    return pairs, status, rows.reshape(header.rows, latent)


def _as_bytes(array: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1)


def _aligned(length: int) -> int:
    return -(-length // ALIGN_BYTES) * ALIGN_BYTES


def _page(length: int) -> int:
    return -(-length // PAGE_BYTES) * PAGE_BYTES
