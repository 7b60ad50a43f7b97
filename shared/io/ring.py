"""Frames in ring slots: write payload, header, bell; copy once, verify the copy, use the copy."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import xxhash

from shared.core.errors import LocalProtocolError
from shared.core.ring_layout import (
    HEADER_BYTES,
    Header,
    RingShape,
    Verdict,
    bell_offset,
    judge,
    unpack,
)
from shared.io.fabric import Memory, Region, RemoteRegion


class Frame(NamedTuple):
    """A private copy of a slot that passed verification."""

    header: Header
    payload: bytes


_CHECKSUM_BYTES: Final = 8  # the last field of a header
_NO_CHECKSUM: Final = bytes(_CHECKSUM_BYTES)


def checksum(header: Header, payload: bytes | Memory) -> int:
    """XXH3-64 over the header (its checksum field zero) and the payload."""
    return _checksum(header.pack(), payload)


def _checksum(packed: bytes, payload: bytes | Memory) -> int:
    digest = xxhash.xxh3_64(packed[:-_CHECKSUM_BYTES] + _NO_CHECKSUM)
    digest.update(payload if isinstance(payload, bytes) else payload.data)
    return digest.intdigest()


def send(
    remote: RemoteRegion,
    shape: RingShape,
    slot: int,
    slot_bytes: int,
    header: Header,
    payload: Memory,
) -> None:
    """One-sided write of a frame into a slot, then its bell.

    Raises LocalProtocolError when the payload does not fit the slot or its header.
    """
    if len(payload) != header.payload_bytes or len(payload) > slot_bytes - HEADER_BYTES:
        raise LocalProtocolError(
            f"payload of {len(payload)} bytes (header says {header.payload_bytes}) does not fit "
            f"a slot of {slot_bytes}"
        )
    packed = header.pack()
    seal = _checksum(packed, payload).to_bytes(_CHECKSUM_BYTES, "little")
    offset = shape.slot_offset(slot, slot_bytes)
    remote.write(offset + HEADER_BYTES, payload)
    remote.write(offset, packed[:-_CHECKSUM_BYTES] + seal)
    remote.ring(bell_offset(slot), header.generation)


def receive(
    region: Region,
    shape: RingShape,
    slot: int,
    slot_bytes: int,
    *,
    epoch: int,
    generation: int,
) -> Frame | Verdict:
    """Copy a slot, verify the copy; the frame, or why it was refused."""
    offset = shape.slot_offset(slot, slot_bytes)
    memory = region.memory
    packed = memory[offset : offset + HEADER_BYTES].tobytes()
    header = unpack(packed)
    if header is None or header.payload_bytes > slot_bytes - HEADER_BYTES:
        return Verdict.CORRUPT
    start = offset + HEADER_BYTES
    payload = memory[start : start + header.payload_bytes].tobytes()
    verdict = judge(header, epoch=epoch, generation=generation, checksum=_checksum(packed, payload))
    return Frame(header, payload) if verdict is Verdict.ACCEPTED else verdict


def bells(region: Region, shape: RingShape) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Live view of a ring's bells, uint64 [slots]."""
    return region.memory[: bell_offset(shape.slots)].view(np.uint64)
