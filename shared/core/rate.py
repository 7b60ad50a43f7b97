"""How many bytes may pass at a time: a token bucket. Pure: times are passed in."""

from __future__ import annotations

from typing import Final

_US_PER_S: Final = 1_000_000


class TokenBucket:
    """At most `burst_bytes` at once and `rate_bytes_per_s` over time.

    What does not fit yet is granted as a debt that the taker pays by waiting: takers that ask in
    turn are served in turn, and a request larger than the burst is slow but never stuck.
    """

    def __init__(self, rate_bytes_per_s: int, burst_bytes: int) -> None:
        """A full bucket; a rate of 0 means no limit. ValueError for sizes that cannot be meant."""
        if rate_bytes_per_s < 0 or burst_bytes < 1:
            raise ValueError(
                f"a token bucket needs rate_bytes_per_s >= 0 and burst_bytes >= 1, not "
                f"{rate_bytes_per_s} and {burst_bytes}"
            )
        self._rate = rate_bytes_per_s
        self._full = burst_bytes * _US_PER_S  # in bytes x us per s: whole numbers lose nothing
        self._level = self._full
        self._seen_us: int | None = None

    def take(self, count_bytes: int, now_us: int) -> int:
        """Take `count_bytes` and return how many microseconds to wait before passing them.

        `now_us` is of one monotonic clock; a step backwards counts as no time. ValueError for a
        negative count.
        """
        if count_bytes < 0:
            raise ValueError(f"cannot take {count_bytes} bytes")
        if self._rate == 0:
            return 0
        if self._seen_us is not None and now_us > self._seen_us:
            self._level = min(self._full, self._level + (now_us - self._seen_us) * self._rate)
        self._seen_us = now_us if self._seen_us is None else max(now_us, self._seen_us)
        self._level -= count_bytes * _US_PER_S
        return max(0, -(self._level // self._rate))
