"""The orders of a record: the permutation by value, and its inverse."""

from __future__ import annotations

import numpy as np
import pytest

from shared.core.record import RecordLayout, RecordOrder, can_interleave
from shared.core.record_order import reorder
from shared.core.shape import K3, ExpertShape

ROW_MAJOR: RecordOrder = "row-major"
INTERLEAVED: RecordOrder = "interleaved-4"


def moved(record: np.ndarray, shape: ExpertShape, have: RecordOrder, want: RecordOrder):
    """The record in another order."""
    out = np.full(len(record), 0xA5, np.uint8)
    reorder(record, RecordLayout(shape, have), out, RecordLayout(shape, want))
    return out


def interleaved_byte(layout: RecordLayout, offset: int) -> int:
    """Where byte `offset` of a row-major record lies in an interleaved one, from the definition."""
    field = next(f for f in layout.fields if f.offset <= offset < f.offset + f.length)
    if not field.shape:
        return offset
    output, column = divmod(offset - field.offset, field.shape[1])
    unit = 64 if field.name.endswith(".weight") else 8
    chunk, inside = divmod(column, unit)
    chunks = field.shape[1] // unit
    return field.offset + ((output // 4 * chunks + chunk) * 4 + output % 4) * unit + inside


@pytest.mark.parametrize("sizes", [(256, 128), (128, 384), (384, 256)])
def test_every_byte_goes_where_the_definition_says(sizes: tuple[int, int]) -> None:
    """Byte by byte, both ways; no byte is lost or doubled."""
    shape = ExpertShape(*sizes)
    layout = RecordLayout(shape)
    record = np.random.default_rng(1).integers(0, 256, layout.record_bytes, np.uint8)
    places = [interleaved_byte(layout, offset) for offset in range(layout.record_bytes)]

    ours = moved(record, shape, ROW_MAJOR, INTERLEAVED)

    assert sorted(places) == list(range(layout.record_bytes))
    assert np.array_equal(ours[places], record)
    assert not np.array_equal(ours, record), "with one chunk in every matrix both orders are one"
    assert np.array_equal(moved(ours, shape, INTERLEAVED, ROW_MAJOR), record)


@pytest.mark.parametrize("skew", [0, 1])
def test_k3_record_round_trip(skew: int) -> None:
    """All 18,579,480 bytes, also from a buffer that is not aligned; nothing around is touched."""
    size = RecordLayout(K3.expert).record_bytes
    buffer = np.random.default_rng(2).integers(0, 256, size + 1, np.uint8)
    record = buffer[skew : skew + size]

    there = moved(record, K3.expert, ROW_MAJOR, INTERLEAVED)
    back = np.zeros(size + 16, np.uint8)
    reorder(
        there, RecordLayout(K3.expert, INTERLEAVED), back[8 : 8 + size], RecordLayout(K3.expert)
    )

    assert np.array_equal(back[8 : 8 + size], record)
    assert not back[:8].any()
    assert not back[8 + size :].any()
    # output 1, first chunk, follows output 0's; the second chunk of output 0 comes after output 3's
    assert np.array_equal(there[64:128], record[1792:1856])
    assert np.array_equal(there[256:320], record[64:128])


@pytest.mark.parametrize("order", [ROW_MAJOR, INTERLEAVED])
def test_same_order_is_a_copy(order: RecordOrder) -> None:
    """Also for shapes that have only one order."""
    shape = ExpertShape(128, 128) if order == INTERLEAVED else ExpertShape(48, 32)
    record = np.random.default_rng(3).integers(0, 256, RecordLayout(shape).record_bytes, np.uint8)
    assert np.array_equal(moved(record, shape, order, order), record)


@pytest.mark.parametrize("sizes", [(144, 128), (128, 16), (64, 128)])
def test_shapes_that_cannot_be_interleaved_are_refused(sizes: tuple[int, int]) -> None:
    """Sizes and remedy are named; the same shape row-major is fine."""
    shape = ExpertShape(*sizes)
    assert not can_interleave(shape)
    RecordLayout(shape)
    with pytest.raises(
        ValueError,
        match=f"latent {sizes[0]} and width {sizes[1]} cannot be stored interleaved-4, which needs "
        "multiples of 128: use row-major",
    ):
        RecordLayout(shape, INTERLEAVED)


def test_orders_have_the_same_fields() -> None:
    """Only bytes inside a tensor move, so sizes and offsets do not depend on the order."""
    row_major, interleaved = RecordLayout(K3.expert), RecordLayout(K3.expert, INTERLEAVED)
    assert row_major.fields == interleaved.fields
    assert row_major.record_bytes == interleaved.record_bytes
    assert row_major != interleaved


def test_records_of_other_sizes_are_refused() -> None:
    """Another shape, or a buffer that is too short or padded."""
    a, b = ExpertShape(128, 128), ExpertShape(128, 256)
    record = np.zeros(RecordLayout(a).record_bytes, np.uint8)
    for source, target, want in (
        (record, record.copy(), RecordLayout(b)),
        (record[:-1], record.copy(), RecordLayout(a)),
        (record, np.zeros(4096 * 8, np.uint8), RecordLayout(a)),
    ):
        with pytest.raises(ValueError, match="give both the same shape and 27672 bytes"):
            reorder(source, RecordLayout(a), target, want)
