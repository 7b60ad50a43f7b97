"""How long a layer may take: from each node's measured hop curve. Pure: times are passed in.

hop_us = everything between posting a dispatch and having verified rows. The deadline of a layer is
p99 x factor of the slowest node it talks to, within a floor (noise of a busy host) and a ceiling
(how long a user may wait for a frozen node).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final

import msgspec
import numpy as np

WINDOW: Final = 512
REFRESH: Final = 32  # observations between two looks at the window
WARM: Final = 32  # observations before a curve is believed


class DeadlinePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the per-layer deadline."""

    factor: Annotated[float, msgspec.Meta(ge=1.0, le=1000.0)] = 4.0
    floor_us: Annotated[int, msgspec.Meta(ge=100, le=60_000_000)] = 250_000
    ceiling_us: Annotated[int, msgspec.Meta(ge=100, le=600_000_000)] = 2_000_000

    def __post_init__(self) -> None:
        """A floor above the ceiling would silently not be one."""
        if self.floor_us > self.ceiling_us:
            raise ValueError(f"floor_us {self.floor_us} is above ceiling_us {self.ceiling_us}")


class HopCurve:
    """Sliding window of one node's hops, and its quantiles."""

    def __init__(self) -> None:
        """Empty window."""
        self._hops = np.zeros(WINDOW, np.int64)
        self._count = 0
        self.p50_us: int | None = None
        self.p99_us: int | None = None

    def observe(self, hop_us: int) -> None:
        """Add one hop; quantiles move every REFRESH observations (sorting costs microseconds)."""
        self._hops[self._count % WINDOW] = hop_us
        self._count += 1
        if self._count % REFRESH == 0 or self._count <= 4:
            window = np.sort(self._hops[: min(self._count, WINDOW)])
            self.p50_us = int(window[len(window) // 2])
            self.p99_us = int(window[min(len(window) - 1, len(window) * 99 // 100)])

    @property
    def is_warm(self) -> bool:
        """Whether there are enough observations to judge a node by."""
        return self._count >= WARM


def budget_us(policy: DeadlinePolicy, curves: Iterable[HopCurve]) -> int:
    """Microseconds a layer may take that talks to the nodes of `curves`.

    A node without a warm curve gets the ceiling: nothing is known about it yet.
    """
    budget = policy.floor_us
    for curve in curves:
        if not curve.is_warm or curve.p99_us is None:
            return policy.ceiling_us
        budget = max(budget, round(curve.p99_us * policy.factor))
    return min(budget, policy.ceiling_us)
