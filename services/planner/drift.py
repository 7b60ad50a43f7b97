"""How far live routing has moved from what a placement was planned on, and whether to plan again.

Owns the distances, the predicted milliseconds with their intervals, what a new plan would gain on
requests it has not seen, and the verdict. A verdict needs a reason that outlives chance: the gain's
lower bound must be above 0 and the gain worth its bytes, so noise moves nothing. Pure. Must not
know files, clocks, or how a plan is made.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from services.planner.interval import Interval, mean_interval, middle, resampled_means
from services.planner.ledger import GIB, Ledger
from services.planner.pod import Pod
from services.planner.policies import kinds_of
from services.routing.trace import Counts, Trace

Floats = npt.NDArray[np.float64]


class Overlap(msgspec.Struct, frozen=True):
    """Share of the plan's `slots` hottest experts that are among the `slots` hottest now."""

    what: str
    slots: int
    kept: float


class RoutingDrift(msgspec.Struct, frozen=True):
    """Distance between two histograms; 0 is the same routing, 1 nothing in common.

    `by_chance` is the distance that independent draws of these sizes would show without any drift;
    tokens of one request resemble each other, so real samples of one workload differ by more.
    """

    total_variation: float
    by_chance: float
    layers: tuple[float, ...]
    overlaps: tuple[Overlap, ...]
    is_identical: bool


class Mean(msgspec.Struct, frozen=True):
    """Predicted expert path of a token and its interval over resampled requests."""

    ms: float
    ci95_ms: Interval | None
    tokens: int
    requests: int


class PathDrift(msgspec.Struct, frozen=True):
    """The placement on the plan's routing and on live routing; `worse` is a share of the plan's."""

    planned: Mean
    live: Mean
    worse: float
    worse_ci95: Interval | None


class Gain(msgspec.Struct, frozen=True):
    """A new plan against the placement, on live requests that it was not planned on."""

    placement: Mean
    replanned: Mean
    gain_ms: float
    ci95_ms: Interval | None


class Limits(msgspec.Struct, frozen=True):
    """When to say something; `worse_max` is a share, the others are per token."""

    min_gain_ms: float
    min_gain_ms_per_gib: float
    worse_max: float


class Verdict(msgspec.Struct, frozen=True):
    """What to do. `alert`: the placement has become worse than allowed. `replan`: moving pays."""

    alert: bool
    replan: bool
    reasons: tuple[str, ...]


def routing_drift(plan: Counts, live: Counts, pod: Pod, ledger: Ledger) -> RoutingDrift:
    """Compare two histograms int64 [layers, experts], each with at least one selection.

    Only shares count: a histogram and its double are identical.
    """
    shares = plan / plan.sum(), live / live.sum()
    apart = np.abs(shares[0] - shares[1])
    of_layer = [_by_layer(counts) for counts in (plan, live)]
    return RoutingDrift(
        total_variation=float(apart.sum() / 2),
        by_chance=_by_chance(plan, live),
        layers=tuple((np.abs(of_layer[0] - of_layer[1]).sum(axis=1) / 2).tolist()),
        overlaps=tuple(
            Overlap(what, slots, top_overlap(plan, live, slots))
            for what, slots in _tops(pod, ledger, plan.size)
        ),
        # a quotient of whole numbers is rounded once, so equal shares are equal numbers
        is_identical=bool(np.array_equal(*shares)),
    )


def top_overlap(plan: Counts, live: Counts, slots: int) -> float:
    """Share of the plan's hottest `slots` experts that are among the hottest `slots` of live.

    Equal calls are ordered by layer and expert in both; 1 when `slots` is 0.
    """
    is_top = np.zeros((2, plan.size), np.bool_)
    for line, counts in zip(is_top, (plan, live), strict=True):
        line[np.argsort(-counts.ravel(), kind="stable")[:slots]] = True
    size = int(is_top[0].sum())
    return int(is_top.all(axis=0).sum()) / size if size else 1.0


def path_drift(
    planned_ms: Floats, planned: Trace, live_ms: Floats, live: Trace, *, seed: int = 0
) -> PathDrift:
    """Milliseconds per token [N] of one placement on two traces.

    The interval draws the requests of both traces, each with replacement; None when one of them
    has a single request.
    """
    before, after = float(planned_ms.mean()), float(live_ms.mean())
    drawn = (
        resampled_means(planned_ms, planned.request, seed=seed),
        resampled_means(live_ms, live.request, seed=seed + 1),
    )
    interval = None
    if drawn[0] is not None and drawn[1] is not None and before:
        interval = middle(drawn[1] / drawn[0] - 1.0)
    return PathDrift(
        planned=mean_of(planned_ms, planned),
        live=mean_of(live_ms, live),
        worse=after / before - 1.0 if before else 0.0,
        worse_ci95=interval,
    )


def mean_of(token_ms: Floats, trace: Trace) -> Mean:
    """Mean of milliseconds per token [N] with its interval over resampled requests."""
    return Mean(
        float(token_ms.mean()),
        mean_interval(token_ms, trace.request),
        trace.tokens,
        len(trace.starts()),
    )


def gain_of(before_ms: Floats, after_ms: Floats, unseen: Trace) -> Gain:
    """What a new plan gains on live tokens that it was not made on: float64 [N] each.

    It is a difference token by token, so what both plans share falls out of its interval.
    """
    saved_ms = before_ms - after_ms
    return Gain(
        placement=mean_of(before_ms, unseen),
        replanned=mean_of(after_ms, unseen),
        gain_ms=float(saved_ms.mean()),
        ci95_ms=mean_interval(saved_ms, unseen.request),
    )


def decide(
    routing: RoutingDrift,
    path: PathDrift,
    gain: Gain | None,
    bytes_moved: int,
    limits: Limits,
) -> Verdict:
    """Alert and re-plan, or not, and why. Without a gain nothing is moved.

    An alert needs a worsening beyond the limit that chance does not explain: where there is an
    interval, its lower bound must be above 0.
    """
    chance = path.worse_ci95 is not None and path.worse_ci95.low <= 0
    alert = path.worse > limits.worse_max and not chance
    reasons = [_worse_words(path, limits, alert=alert, chance=chance)]
    if routing.is_identical:
        return Verdict(alert, False, (*reasons, "routing is identical: nothing to gain"))
    if gain is None:
        return Verdict(alert, False, (*reasons, "no new plan was tried"))
    against = list(_against(gain, bytes_moved, limits))
    if against:
        return Verdict(alert, False, (*reasons, *against))
    worth = (
        f"a new plan gains {gain.gain_ms:.2f} ms per token on requests it has not seen, "
        f"for {size_words(bytes_moved)}"
    )
    return Verdict(alert, True, (*reasons, worth))


def size_words(count: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} B"


def _against(gain: Gain, bytes_moved: int, limits: Limits) -> Sequence[str]:
    """What speaks against moving."""
    found = []
    if gain.ci95_ms is None:
        found.append("too few requests were kept out to tell a gain from chance: record more")
    elif gain.ci95_ms.low <= 0:
        found.append(
            f"the gain of {gain.gain_ms:.3f} ms may be chance: 95 % of the resampled gains are "
            f"from {gain.ci95_ms.low:.3f} to {gain.ci95_ms.high:.3f} ms"
        )
    if gain.gain_ms < limits.min_gain_ms:
        found.append(f"the gain of {gain.gain_ms:.3f} ms is below {limits.min_gain_ms:g} ms")
    if not bytes_moved:
        found.append("the new plan moves nothing")
    elif gain.gain_ms * GIB < limits.min_gain_ms_per_gib * bytes_moved:
        found.append(
            f"{gain.gain_ms * GIB / bytes_moved:.5f} ms per GiB moved is below "
            f"{limits.min_gain_ms_per_gib:g}"
        )
    return found


def _worse_words(path: PathDrift, limits: Limits, *, alert: bool, chance: bool) -> str:
    change = f"{abs(path.worse):.1%} {'worse' if path.worse > 0 else 'better'} than"
    if change.startswith("0.0%"):
        change = "the same as"
    told = f"the placement is predicted {change} on the routing it was planned on"
    if alert:
        return f"{told}, more than {limits.worse_max:.1%}"
    if chance and path.worse > limits.worse_max:
        return f"{told}, but that may be chance"
    return told


def _tops(pod: Pod, ledger: Ledger, experts: int) -> Sequence[tuple[str, int]]:
    """(name, slots): the cheapest kind of node, and all kinds but the dearest."""
    kinds = sorted(kinds_of(pod), key=lambda kind: (kind.per_expert_us, kind.fixed_us))
    room = [int(ledger.slots[list(kind.places)].sum()) for kind in kinds]
    tops: list[tuple[str, int]] = [(kinds[0].tier, room[0])]
    if len(kinds) > 2:
        tops.append((", ".join(kind.tier for kind in kinds[:-1]), sum(room[:-1])))
    return [(what, min(slots, experts)) for what, slots in tops]


def _by_layer(counts: Counts) -> Floats:
    """Shares within each layer; a layer without selections has none."""
    shares: Floats = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return shares


def _by_chance(plan: Counts, live: Counts) -> float:
    """Expected total variation of two samples of the pooled histogram, by the normal law."""
    pooled = (plan + live) / (plan.sum() + live.sum())
    deviation = np.sqrt(pooled * (1.0 / plan.sum() + 1.0 / live.sum()))
    return float(min(1.0, np.sqrt(2.0 / np.pi) * deviation.sum() / 2))
