"""What a dispatch to a place costs, by how many experts it reads. Pure.

Owns the curve and its arithmetic: a straight line, or measured points with lines between them.
Must not know queues, lanes or where the points come from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from shared.core.errors import ConfigError

SIGMAS_OF_P99: Final = 2.326  # of a normal distribution

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Microseconds by experts: rising points, straight lines between and beyond them.

    `us` are means. `spread` is p99 over p50 of one dispatch; 1 means that all take the mean.
    """

    experts: tuple[float, ...]
    us: tuple[float, ...]
    spread: float = 1.0

    def __post_init__(self) -> None:
        """ConfigError for points that no dispatch can have."""
        rises = all(left < right for left, right in pairwise(self.experts))
        if not self.experts or len(self.experts) != len(self.us) or not rises:
            raise ConfigError(f"hop curve {self.experts}: give rising expert counts, each with us")
        if not all(math.isfinite(us) and us >= 0 for us in self.us) or not self.spread >= 1:
            raise ConfigError(f"hop curve {self.us}: microseconds from 0, a spread from 1")

    @classmethod
    def linear(cls, fixed_us: float, per_expert_us: float, *, spread: float = 1.0) -> CostCurve:
        """fixed + per_expert x experts."""
        return cls((0.0, 1.0), (fixed_us, fixed_us + per_expert_us), spread)

    @classmethod
    def measured(
        cls,
        points: Mapping[int, float],
        *,
        weights: Mapping[int, int] | None = None,
        spread: float = 1.0,
    ) -> CostCurve:
        """From mean microseconds by experts; `weights` says of how many dispatches each is.

        Noise that falls with more experts is levelled to the mean of the points in question by
        weight, so that a point of one unlucky dispatch does not raise all beyond it.
        """
        experts = sorted(points)
        levels: list[tuple[float, float, int]] = []  # mean, weight, points
        for count in experts:
            us, weight, merged = points[count], 1.0 if weights is None else weights[count], 1
            while levels and levels[-1][0] > us:
                other_us, other_weight, others = levels.pop()
                total = weight + other_weight
                us = (us * weight + other_us * other_weight) / total
                weight, merged = total, merged + others
            levels.append((us, weight, merged))
        levelled = [us for us, _, merged in levels for _ in range(merged)]
        return cls(tuple(map(float, experts)), tuple(map(float, levelled)), spread)

    @property
    def fixed_us(self) -> float:
        """What a dispatch would cost with no expert, at least 0: the first line drawn back."""
        return max(0.0, float(self.at(np.zeros(1))[0]))

    def at(self, experts: Floats) -> Floats:
        """Microseconds of dispatches of so many experts each, float64 of the same shape."""
        if len(self.experts) == 1:
            return np.full(experts.shape, self.us[0])
        x, y = np.array(self.experts), np.array(self.us)
        right = np.clip(np.searchsorted(x, experts), 1, len(x) - 1)
        slope = (y[right] - y[right - 1]) / (x[right] - x[right - 1])
        line: Floats = y[right - 1] + slope * (experts - x[right - 1])
        return np.maximum(line, 0.0)

    def sampled(self, experts: Floats, rng: np.random.Generator) -> Floats:
        """As `at`, each dispatch with its own luck: log-normal around the same mean."""
        us = self.at(experts)
        if self.spread == 1.0:
            return us
        sigma = math.log(self.spread) / SIGMAS_OF_P99
        luck: Floats = rng.lognormal(-sigma * sigma / 2, sigma, us.shape)
        return us * luck

    def scaled(self, *, fixed: float = 1.0, slope: float = 1.0) -> CostCurve:
        """The same curve with its fixed part and what lies above it times a factor."""
        base = self.fixed_us
        us = tuple(max(0.0, base * fixed + (value - base) * slope) for value in self.us)
        return replace(self, us=us)
