"""Bytes of the data plane."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.errors import LocalProtocolError
from shared.core.ring_layout import (
    HEADER_BYTES,
    Header,
    RingShape,
    RowStatus,
    Verdict,
    bell_offset,
    build_dispatch,
    build_reply,
    dispatch_bytes,
    judge,
    parse_dispatch,
    parse_reply,
    reply_bytes,
    unpack,
)

u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
headers = st.builds(Header, u16, u64, u64, u64, u32, u32, u32, u32, u32, u32, u64)


def header(tokens: int, rows: int, payload_bytes: int) -> Header:
    return Header(3, 1, 2, 4, tokens, rows, payload_bytes, 0, 0, 0)


@given(headers)
def test_headers_round_trip_in_64_bytes(value: Header) -> None:
    """Every field at full width survives; the checksum is the last 8 bytes and only they."""
    packed = value.pack()

    assert len(packed) == HEADER_BYTES
    assert unpack(packed) == value
    assert value._replace(checksum=0).pack() == packed[:-8] + bytes(8)


@given(headers, st.integers(0, 8 * 6 - 1))
def test_a_foreign_magic_or_version_is_no_header(value: Header, bit: int) -> None:
    """The first six bytes are ours to the bit."""
    packed = bytearray(value.pack())
    packed[bit // 8] ^= 1 << bit % 8

    assert unpack(bytes(packed)) is None


def test_judging_tells_damage_from_age() -> None:
    """Damage first, then epoch, then generation: a stale frame is only called stale when whole."""
    value = header(1, 1, 0)._replace(checksum=9)

    assert judge(value, epoch=1, generation=2, checksum=9) is Verdict.ACCEPTED
    assert judge(value, epoch=5, generation=6, checksum=8) is Verdict.CORRUPT
    assert judge(value, epoch=5, generation=6, checksum=9) is Verdict.STALE_EPOCH
    assert judge(value, epoch=1, generation=6, checksum=9) is Verdict.STALE_GENERATION


shapes = st.builds(
    RingShape,
    slots=st.integers(1, 64),
    max_tokens=st.integers(1, 200),
    max_rows=st.integers(1, 4000),
    latent=st.integers(1, 256).map(lambda blocks: 16 * blocks),
)


@given(shapes)
def test_slots_do_not_overlap_and_hold_the_largest_frame(shape: RingShape) -> None:
    """Bells, then page-aligned slots, in both rings."""
    for slot_bytes, ring_bytes, largest in (
        (
            shape.request_slot_bytes,
            shape.request_ring_bytes,
            dispatch_bytes(shape.max_tokens, shape.max_rows, shape.latent),
        ),
        (
            shape.reply_slot_bytes,
            shape.reply_ring_bytes,
            reply_bytes(shape.max_rows, shape.latent),
        ),
    ):
        assert slot_bytes >= HEADER_BYTES + largest
        assert bell_offset(shape.slots) <= shape.slot_offset(0, slot_bytes)
        assert shape.slot_offset(0, slot_bytes) % 4096 == 0
        assert shape.slot_offset(shape.slots - 1, slot_bytes) + slot_bytes == ring_bytes
        for outside in (-1, shape.slots):
            with pytest.raises(LocalProtocolError, match="outside a ring"):
                shape.slot_offset(outside, slot_bytes)


@given(st.integers(0, 40), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_dispatches_round_trip(rows: int, tokens: int, seed: int) -> None:
    """Pairs and activations come back; each token travels once however many rows use it."""
    rng = np.random.default_rng(seed)
    latent = 16
    pairs = np.stack([rng.integers(0, tokens, rows), rng.integers(0, 2**16, rows)], 1)
    pairs = pairs.astype(np.uint16)
    activations = rng.integers(0, 2**16, (tokens, latent)).astype(np.uint16)
    payload = build_dispatch(pairs, activations).tobytes()
    value = header(tokens, rows, len(payload))

    parsed = parse_dispatch(value, payload, latent)

    assert parsed is not None
    assert np.array_equal(parsed[0], pairs)
    assert np.array_equal(parsed[1], activations)
    for wrong in (
        value._replace(tokens=tokens + 1),
        value._replace(rows=rows + 8),
        value._replace(rows=2**32 - 1),
    ):
        assert parse_dispatch(wrong, payload, latent) is None
    assert parse_dispatch(value, payload[:-1], latent) is None


def test_a_token_index_without_activation_is_refused() -> None:
    """An index into the activations is checked before anything uses it."""
    pairs = np.array([[0, 5], [2, 6]], np.uint16)
    payload = build_dispatch(pairs, np.zeros((2, 16), np.uint16)).tobytes()

    assert parse_dispatch(header(2, 2, len(payload)), payload, 16) is None


@given(st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_replies_round_trip(rows: int, seed: int) -> None:
    """The same pairs in the same order, a status byte per row, then the rows."""
    rng = np.random.default_rng(seed)
    pairs = rng.integers(0, 2**16, (rows, 2)).astype(np.uint16)
    status = rng.integers(0, len(RowStatus), rows).astype(np.uint8)
    values = rng.integers(0, 2**16, (rows, 32)).astype(np.uint16)
    payload = build_reply(pairs, status, values).tobytes()

    parsed = parse_reply(header(1, rows, len(payload)), payload, 32)

    assert parsed is not None
    for got, sent in zip(parsed, (pairs, status, values), strict=True):
        assert np.array_equal(got, sent)
    assert parse_reply(header(1, rows + 16, len(payload)), payload, 32) is None
    assert parse_reply(header(1, rows, len(payload)), payload + b"\0", 32) is None
