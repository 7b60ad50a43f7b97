"""Steps of a load and the verdict about the next one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.loading import (
    FLOOR_BYTES_MAX,
    MemoryFloor,
    Verdict,
    default_floor_bytes,
    part_of,
    steps,
)

GIB = 2**30


@given(
    rows=st.integers(0, 300), stride_bytes=st.integers(1, 5000), step_bytes=st.integers(1, 20_000)
)
def test_steps_cover_every_record_once_and_stay_small(
    rows: int, stride_bytes: int, step_bytes: int
) -> None:
    """In order, without gap or overlap; more than `step_bytes` only where one record is more."""
    cut = list(steps(rows, stride_bytes=stride_bytes, step_bytes=step_bytes))

    assert [row for first, last in cut for row in range(first, last)] == list(range(rows))
    for first, last in cut:
        assert (last - first) * stride_bytes <= step_bytes or last - first == 1


@pytest.mark.parametrize(
    ("available_bytes", "waited_us", "verdict"),
    [
        (2256, 0, Verdict.PROCEED),
        (2256, 99, Verdict.PROCEED),
        (2255, 0, Verdict.WAIT),
        (2255, 9, Verdict.WAIT),
        (2255, 10, Verdict.GIVE_UP),
        (0, 11, Verdict.GIVE_UP),
        (None, 99, Verdict.PROCEED),
    ],
)
def test_a_step_begins_only_above_the_floor(
    available_bytes: int | None, waited_us: int, verdict: Verdict
) -> None:
    """Case B4: floor + step must be available; a wait is bounded; memory that came back counts at
    the last moment; a kernel that says nothing holds nothing back."""
    floor = MemoryFloor(floor_bytes=2000, wait_us=10)

    assert floor.judge(available_bytes, step_bytes=256, waited_us=waited_us) is verdict


def test_what_is_missing_is_floor_and_step() -> None:
    """The number an operator has to free."""
    floor = MemoryFloor(floor_bytes=2000)

    assert floor.missing_bytes(1900, 256) == 356
    assert floor.missing_bytes(2256, 256) == 0


@pytest.mark.parametrize(
    ("memory_bytes", "floor_bytes"),
    [(121 * GIB, FLOOR_BYTES_MAX), (16 * GIB, 16 * GIB // 20), (512 * 2**20, 512 * 2**20 // 20)],
)
def test_a_small_machine_keeps_a_small_floor(memory_bytes: int, floor_bytes: int) -> None:
    """2 GiB on a Spark; the embedded pod starts in half a GiB too."""
    assert default_floor_bytes(memory_bytes) == floor_bytes


def test_progress_reads_like_a_sentence() -> None:
    """The unit stands once, and fits the whole."""
    assert part_of(13_207_024_435, 105_978_273_792) == "12.3 of 98.7 GiB"
    assert part_of(2**20, 2**30 - 1) == "1.0 of 1024.0 MiB"
