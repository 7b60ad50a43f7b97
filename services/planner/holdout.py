"""What a plan is worth on requests that it has not seen: split, plan, score, compare. Pure.

Owns the order that keeps the proof honest: requests are split before anything is planned, both
plans see the same part, both are scored on the other, and the interval comes from drawing requests,
because tokens of one request resemble each other. Must not know how plans are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from services.planner.assignment import Assignment
from services.planner.cost import PlaceCosts
from services.planner.interval import RESAMPLES, Interval
from services.planner.pod import Pod
from services.planner.score import score
from services.routing.trace import Trace, split_requests

Planner: TypeAlias = Callable[[Trace], Assignment]
Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Paired:
    """Expert path of every request under two plans: sums over its tokens, ms; float64 [R] each."""

    ours_ms: Floats
    base_ms: Floats

    @property
    def gain(self) -> float:
        """Share of the time that ours saves; negative when it is slower, 0 where none is spent."""
        return float(_saved(self.ours_ms.sum(), self.base_ms.sum()))

    def resampled(self, rng: np.random.Generator) -> Floats:
        """The gain over requests drawn with replacement: float64 [RESAMPLES]."""
        count = len(self.ours_ms)
        drawn = rng.multinomial(count, np.full(count, 1.0 / count), size=RESAMPLES)
        return _saved(drawn @ self.ours_ms, drawn @ self.base_ms)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Both plans of the first part, and what they cost on the second."""

    planned_on: Trace
    held_out: Trace
    ours: Assignment
    base: Assignment
    paired: Paired


def hold_out(
    trace: Trace, pod: Pod, ours: Planner, base: Planner, *, fraction: float, seed: int
) -> HeldOut:
    """Plan on about `fraction` of the tokens and score on the other requests.

    TraceError when the trace has fewer than two requests.
    """
    planned_on, held_out = split_requests(trace, fraction, seed)
    plans = ours(planned_on), base(planned_on)
    return HeldOut(planned_on, held_out, *plans, paired=compare_on(held_out, pod, *plans))


def compare_on(trace: Trace, pod: Pod, ours: Assignment, base: Assignment) -> Paired:
    """Two plans on one trace, request by request."""
    costs = PlaceCosts.of(pod.nodes)
    sparks = np.array([node.tier == "spark" for node in pod.nodes])
    _, owner = np.unique(trace.request, return_inverse=True)

    def by_request(plan: Assignment) -> Floats:
        token_ms = score(trace, plan, costs, sparks=sparks).token_ms
        return np.bincount(owner, weights=token_ms).astype(np.float64)

    return Paired(by_request(ours), by_request(base))


def mean_gain(runs: Sequence[Paired], *, seed: int = 0) -> tuple[float, Interval]:
    """Mean gain over runs, and its 95 % interval: runs are drawn, and requests within each.

    Runs are traces and plans of their own and differ by more than their requests do, so an interval
    over requests alone would claim to know the next run too well. One run speaks for itself only.
    """
    rng = np.random.default_rng(seed)
    gains = np.stack([paired.resampled(rng) for paired in runs])
    chosen = rng.integers(0, len(runs), gains.shape)
    drawn = np.take_along_axis(gains, chosen, axis=0).mean(axis=0)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(np.mean([paired.gain for paired in runs])), Interval(float(low), float(high))


def _saved(ours_ms: npt.ArrayLike, base_ms: npt.ArrayLike) -> Floats:
    """1 - ours / base, 0 where base is 0: a pod whose places cost nothing has nothing to save."""
    ours, base = np.asarray(ours_ms, np.float64), np.asarray(base_ms, np.float64)
    return 1.0 - np.divide(ours, base, out=np.ones_like(ours), where=base > 0)
