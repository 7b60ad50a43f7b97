"""The token bucket in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.rate import TokenBucket


def test_burst_passes_at_once_then_the_rate_holds() -> None:
    """The burst is free; after it every taker waits for exactly its own bytes."""
    bucket = TokenBucket(1_000_000, 500_000)
    waits = [bucket.take(250_000, 0) for _ in range(4)]
    assert waits == [0, 0, 250_000, 500_000]
    assert bucket.take(250_000, 500_000) == 250_000


def test_idle_time_fills_no_more_than_the_burst() -> None:
    """An hour of silence is worth one burst, not an hour of bytes."""
    bucket = TokenBucket(1_000_000, 1_000)
    assert bucket.take(1_000, 0) == 0
    assert bucket.take(1_000, 3_600_000_000) == 0
    assert bucket.take(1_000, 3_600_000_000) == 1_000


def test_request_beyond_the_burst_is_slow_but_never_stuck() -> None:
    """It is granted as a debt."""
    bucket = TokenBucket(1_000, 10)
    assert bucket.take(1_010, 0) == 1_000_000


def test_no_rate_is_no_limit() -> None:
    """Zero means unlimited."""
    assert TokenBucket(0, 1).take(2**62, 0) == 0


def test_clock_that_steps_back_gives_nothing() -> None:
    """Time that was counted once is not counted again."""
    bucket = TokenBucket(1_000_000, 1)
    bucket.take(1, 1_000)
    assert bucket.take(0, 0) == 0
    assert bucket.take(1_001, 1_000) == 1_001


@pytest.mark.parametrize(("rate", "burst"), [(-1, 1), (1, 0)])
def test_sizes_that_cannot_be_meant(rate: int, burst: int) -> None:
    """A negative rate or no burst at all is a bug of the caller, as is a negative take."""
    with pytest.raises(ValueError, match="token bucket"):
        TokenBucket(rate, burst)
    with pytest.raises(ValueError, match="cannot take -1"):
        TokenBucket(1, 1).take(-1, 0)


@given(
    rate=st.integers(1, 2**40),
    burst=st.integers(1, 2**24),
    steps=st.lists(st.tuples(st.integers(0, 2**21), st.integers(0, 10**7)), max_size=50),
)
def test_never_more_than_burst_and_rate_allow(
    rate: int, burst: int, steps: list[tuple[int, int]]
) -> None:
    """Whoever waits as told passes at most burst + rate x time in any window from the start."""
    bucket, now_us, passed = TokenBucket(rate, burst), 0, 0
    for count_bytes, pause_us in steps:
        now_us += pause_us
        passes_us = now_us + bucket.take(count_bytes, now_us)
        passed += count_bytes
        assert passed * 10**6 <= burst * 10**6 + rate * passes_us
