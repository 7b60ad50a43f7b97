"""What a layer costs when its experts are spread over places: the slowest place decides. Pure.

Owns the one formula. Must not know where experts live or how they got there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.planner.pod import PodNode

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PlaceCosts:
    """fixed_us and per_expert_us, both float64 [P], in the order of the pod's nodes."""

    fixed_us: Floats
    per_expert_us: Floats

    @classmethod
    def of(cls, nodes: Sequence[PodNode]) -> PlaceCosts:
        """The costs that a pod states."""
        return cls(
            np.array([node.fixed_us for node in nodes], np.float64),
            np.array([node.per_expert_us for node in nodes], np.float64),
        )

    def place_us(self, counts: npt.NDArray[np.integer]) -> Floats:
        """counts [..., P] -> float64 [..., P]: time of each place, 0 where it has no expert."""
        return (self.fixed_us + self.per_expert_us * counts) * (counts > 0)

    def layer_us(self, counts: npt.NDArray[np.integer]) -> Floats:
        """counts [..., P] -> float64 [...]: the slowest place; 0 where nothing is to be done."""
        slowest: Floats = self.place_us(counts).max(axis=-1)
        return slowest
