"""How popular the experts of one layer are: the law, a shift of it, and a fit to a histogram.

Theory. A token draws its experts one after the other without replacement, each with a probability
in proportion to its weight: so the k experts with the smallest E / weight are chosen, E being
exponential. An expert is chosen when E < weight * t for a threshold t that hardly depends on the
draw, hence with probability 1 - exp(-weight * t), t being the number that makes these sum to k.
That is exact enough (within 1 % for 16 of 896) to fit weights without drawing a single token.
Pure; one layer at a time, so memory stays small.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Weights: TypeAlias = npt.NDArray[np.float64]  # [experts], or [contexts, experts]

_THRESHOLD_STEPS: Final = 40
_FIT_STEPS: Final = 30
_NEVER: Final = 1e-12  # weight of an expert that the histogram never saw
_QUADRATURE: Final = 512


def zipf(experts: int, *, exponent: float, offset: float, cold: float, penalty: float) -> Weights:
    """Weights by rank, hottest first: (rank + offset) ^ -exponent, the coldest share lowered.

    `cold` is the share of experts, from the end, whose weight is divided by e ^ penalty.
    """
    rank = np.arange(experts)
    log_weights = -exponent * np.log(rank + offset)
    log_weights[rank >= experts * (1.0 - cold)] -= penalty
    weights: Weights = np.exp(log_weights - log_weights[0])
    return weights


def shifted(weights: Weights, *, kept: float, top: float, rng: np.random.Generator) -> Weights:
    """The same weights on partly other experts: of the `top` share, `kept` stays at the top.

    Ranks of before and after are joined by a Gaussian copula, so an expert just below the top is
    likelier to rise than a cold one. 1 changes nothing; `top` itself (as if drawn anew) is the
    least that can be kept.
    """
    if kept >= 1.0:
        return weights
    experts = len(weights)
    rho = copula_correlation(kept, top)
    # a permutation breaks ties at random; equal weights would otherwise keep their order
    tie = rng.permutation(experts)
    order = np.lexsort((tie, weights))
    normal = NormalDist()
    score = np.empty(experts)
    score[order] = [normal.inv_cdf((i + 0.5) / experts) for i in range(experts)]
    score = rho * score + math.sqrt(1.0 - rho * rho) * rng.standard_normal(experts)
    moved = np.empty_like(weights)
    moved[np.argsort(score)] = np.sort(weights)
    return moved


def copula_correlation(kept: float, top: float) -> float:
    """Correlation of two normal scores whose upper `top` shares have `kept` of them in common."""
    if kept <= top:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _kept(middle, top) < kept else (low, middle)
    return low


def _kept(rho: float, top: float) -> float:
    """P(after is in the top | before is in the top), by the midpoint rule over the top's share."""
    normal = NormalDist()
    edge = normal.inv_cdf(1.0 - top)
    spread = math.sqrt(max(1e-12, 1.0 - rho * rho))
    share = (np.arange(_QUADRATURE) + 0.5) / _QUADRATURE * top
    before = [normal.inv_cdf(1.0 - p) for p in share]
    return float(np.mean([1.0 - normal.cdf((edge - rho * x) / spread) for x in before]))


def chances(weights: Weights, k: int) -> Weights:
    """Chance of each expert to be among the k of a token; weights and result [..., experts]."""
    # exact when all weights are equal; Newton on a concave function then rises to the root
    scaled = weights / weights.sum(axis=-1, keepdims=True)
    threshold = np.full((*weights.shape[:-1], 1), float(k))
    for _ in range(_THRESHOLD_STEPS):
        left = np.exp(-scaled * threshold)
        missing = k - (1.0 - left).sum(axis=-1, keepdims=True)
        slope = (scaled * left).sum(axis=-1, keepdims=True)
        step = missing / np.maximum(slope, 1e-300)
        threshold += step
        if (np.abs(step) <= 1e-6 * threshold).all():
            break
    chosen: Weights = 1.0 - np.exp(-scaled * threshold)
    return chosen


def fit(shares: Weights, factors: npt.NDArray[np.float32], contexts: Weights, k: int) -> Weights:
    """Weights under which an average token chooses each expert with probability `shares` * k.

    shares [experts] sum to 1, each at most 1/k. factors [C, experts] multiply the weights in C
    contexts (topic, active clusters) that occur with the probabilities `contexts` [C].
    """
    target = np.maximum(shares * k, _NEVER)
    weights = target.copy()
    for _ in range(_FIT_STEPS):
        reached = contexts @ chances(weights * factors, k)
        ratio = target / np.maximum(reached, _NEVER)
        weights *= ratio
        if float(np.abs(ratio - 1.0)[shares > 0].max(initial=0.0)) < 1e-3:
            break
    return weights
