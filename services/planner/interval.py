"""Intervals over resampled requests: how far a mean over tokens can be trusted. Pure.

Owns the resampling. Tokens of one request resemble each other, so requests are drawn, not tokens:
drawing tokens would claim a precision that is not there. Must not know what was measured.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

RESAMPLES: Final = 2000


class Interval(NamedTuple):
    """Bounds between which 95 % of the resampled means lie."""

    low: float
    high: float


def mean_interval(
    values: npt.NDArray[np.floating], request: npt.NDArray[np.integer], *, seed: int = 0
) -> Interval | None:
    """95 % interval of the mean of values [N], requests [N] drawn with replacement.

    None with fewer than two requests: one request says nothing about the next.
    """
    means = resampled_means(values, request, seed=seed)
    return None if means is None else middle(means)


def resampled_means(
    values: npt.NDArray[np.floating], request: npt.NDArray[np.integer], *, seed: int = 0
) -> npt.NDArray[np.float64] | None:
    """float64 [RESAMPLES]: means of values [N], requests [N] drawn with replacement; None as above.

    What compares means of two traces draws each with a seed of its own.
    """
    _, owner = np.unique(request, return_inverse=True)
    lengths = np.bincount(owner)
    if len(lengths) < 2:
        return None
    sums = np.bincount(owner, weights=values)
    chance = np.full(len(lengths), 1.0 / len(lengths))
    drawn = np.random.default_rng(seed).multinomial(len(lengths), chance, size=RESAMPLES)
    means: npt.NDArray[np.float64] = (drawn @ sums) / (drawn @ lengths)
    return means


def middle(resampled: npt.NDArray[np.float64]) -> Interval:
    """The 95 % in the middle of resampled values."""
    low, high = np.quantile(resampled, (0.025, 0.975))
    return Interval(float(low), float(high))
