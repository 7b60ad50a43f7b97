"""What a hop takes by how many experts it asks for: sums that a simulator is fed with. Pure.

Only dispatches of one token are counted: with more, rows and experts are not the same number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

EXPERTS_MAX: Final = 64  # of one token; ModelShape allows no larger top_k


class HopTable:
    """Sums by experts since the Station started."""

    def __init__(self) -> None:
        """Empty."""
        self._count = [0] * (EXPERTS_MAX + 1)
        self._hop_us = [0] * (EXPERTS_MAX + 1)
        self._node_us = [0] * (EXPERTS_MAX + 1)
        self._node_us_squared = [0] * (EXPERTS_MAX + 1)

    def observe(self, experts: int, hop_us: int, node_us: int) -> None:
        """One answered dispatch; `node_us` is the node's own share of the hop."""
        self._count[experts] += 1
        self._hop_us[experts] += hop_us
        self._node_us[experts] += node_us
        self._node_us_squared[experts] += node_us * node_us

    def points(self) -> Sequence[dict[str, float | int]]:
        """Means by experts, where there was any, fewest experts first; `sd` is one hop's."""
        return [self._point(experts) for experts, count in enumerate(self._count) if count]

    def _point(self, experts: int) -> dict[str, float | int]:
        count = self._count[experts]
        mean_us = self._node_us[experts] / count
        variance = max(0.0, self._node_us_squared[experts] / count - mean_us * mean_us)
        return {
            "experts": experts,
            "dispatches": count,
            "hop_us": round(self._hop_us[experts] / count, 1),
            "node_us": round(mean_us, 1),
            "node_us_sd": round(math.sqrt(variance), 1),
        }
