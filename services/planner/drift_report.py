"""What `k3 plan drift` found, as one object, and how it comes about from routing and a placement.

Owns the order of the steps: compare, predict, plan again, keep what can stay, list moves, judge.
Pure: the planner is passed in. Must not know files, clocks or printing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from services.planner import drift
from services.planner.assignment import Assignment
from services.planner.cost import PlaceCosts
from services.planner.drift import Gain, Limits, PathDrift, RoutingDrift, Verdict
from services.planner.keep import keep_nodes, keep_rows
from services.planner.ledger import GIB, Ledger, check_power
from services.planner.moves import MovePlan, NodeTraffic, plan_moves
from services.planner.partial import exchanged, exchanges, records_in
from services.planner.pod import Pod
from services.planner.policies import kinds_of
from services.planner.proposal import Proposal
from services.planner.score import score
from services.routing.trace import Counts, Trace, split_requests
from shared.core.errors import PlacementError
from shared.core.placement import Placement

Replan: TypeAlias = Callable[[Trace], Assignment]
_Score: TypeAlias = Callable[[Trace, Assignment], npt.NDArray[np.float64]]  # ms per token
_SHARES: Final = (1.0, 0.5, 0.25, 0.1)  # of a new plan's exchanges


@dataclass(frozen=True, slots=True)
class Sides:
    """What is compared. Counts int64 [layers, experts] of the plan and of live routing, and the
    traces to predict with; `notes` say how these came about.
    """

    plan_counts: Counts
    live_counts: Counts
    plan: Trace
    live: Trace
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """How to judge: `policy` names the planner that makes the new plan."""

    policy: str
    limits: Limits
    holdout: float
    seed: int
    bytes_per_s: float


class Traffic(msgspec.Struct, frozen=True):
    """What a new plan would move, without the list; all 0 when nothing is to be moved."""

    records: int
    bytes_moved: int
    swaps: int
    staging_records: int
    seconds_longest: float
    nodes: tuple[NodeTraffic, ...]


class DriftReport(msgspec.Struct, frozen=True):
    """Everything `k3 plan drift` says. `tried` is what the new plan would move, `moves` how many
    steps are proposed: 0 unless the verdict is to re-plan. Entry l of routing.layers is model
    layer first_layer + l. `share`: what was tried is that share of the new plan's exchanges, the
    most valuable ones; None is the whole plan.
    """

    pod: str
    placement: str
    policy: str
    first_layer: int
    routing: RoutingDrift
    path: PathDrift
    gain: Gain | None
    tried: Traffic | None
    share: float | None
    moves: int
    verdict: Verdict
    notes: tuple[str, ...]

    def to_json(self) -> str:
        """One line of JSON."""
        return msgspec.json.encode(self).decode()


@dataclass(frozen=True, slots=True)
class Replanned:
    """A new plan made on a part of the live requests, and what it gains on the others.

    `share`: of its exchanges, the most valuable ones; None is the whole plan.
    """

    assignment: Assignment
    share: float | None
    planned_on: Trace
    gain: Gain


@dataclass(frozen=True, slots=True)
class Found:
    """The report, and what there is to write when the verdict is to re-plan."""

    report: DriftReport
    proposal: Proposal | None
    placement: Placement | None


def judge(
    placement: Placement,
    pod: Pod,
    ledger: Ledger,
    sides: Sides,
    settings: Settings,
    *,
    replan: Replan,
) -> Found:
    """Compare live routing with the plan's and say whether a new plan is worth its bytes.

    `pod` has the placement's nodes in the placement's order (`pod_in_order`). Identical histograms
    give no moves and never ask `replan`. PlacementError when the placement does not fit the pod,
    PodError when the new plan exceeds a feed, TraceError when traces are of another shape.
    """
    placed = Assignment.of_placement(placement, ledger.slots.tolist())
    placed.check(layer_max=ledger.layer_max)
    token_ms = _scorer(pod)
    routing = drift.routing_drift(sides.plan_counts, sides.live_counts, pod, ledger)
    path = drift.path_drift(
        token_ms(sides.plan, placed), sides.plan, token_ms(sides.live, placed), sides.live
    )
    tried: Replanned | None = None
    notes = list(sides.notes)
    if not routing.is_identical:
        if len(sides.live.starts()) < 2:
            notes.append("live routing is one request, so no gain can be proved: record more")
        else:
            tried = _try(placed, pod, ledger, sides.live, settings, replan, token_ms)
    moves, moved_to = _moves(placement, pod, ledger, tried, settings)
    gain = None if tried is None else tried.gain
    bytes_moved = 0 if moves is None else moves.bytes_moved
    verdict = drift.decide(routing, path, gain, bytes_moved, settings.limits)
    proposal = None
    if verdict.replan and moves is not None and moved_to is not None and tried is not None:
        proposal = _proposal(placement, moved_to, ledger, tried, settings, verdict, moves)
    report = DriftReport(
        pod=pod.name,
        placement=placement.digest,
        policy=settings.policy,
        first_layer=placement.shape.first_moe_layer,
        routing=routing,
        path=path,
        gain=gain,
        tried=None if moves is None else _traffic(moves),
        share=None if tried is None else tried.share,
        moves=0 if proposal is None else len(proposal.plan.moves),
        verdict=verdict,
        notes=tuple(notes),
    )
    return Found(report, proposal, None if proposal is None else moved_to)


def pod_in_order(pod: Pod, placement: Placement) -> Pod:
    """The pod with its nodes as the placement has them; PlacementError when they are others."""
    described = {(node.name, node.tier): node for node in pod.nodes}
    placed = [(node.name, node.tier) for node in placement.nodes]
    if sorted(placed) != sorted(described):
        raise PlacementError(
            f"pod {pod.name} has the nodes {_named(described)}, the placement {_named(placed)}: "
            "give the pod description that the placement was made for"
        )
    return msgspec.structs.replace(pod, nodes=tuple(described[key] for key in placed))


def _scorer(pod: Pod) -> _Score:
    costs = PlaceCosts.of(pod.nodes)
    sparks = np.array([node.tier == "spark" for node in pod.nodes])

    def token_ms(trace: Trace, assignment: Assignment) -> npt.NDArray[np.float64]:
        return score(trace, assignment, costs, sparks=sparks).token_ms

    return token_ms


def _try(
    placed: Assignment,
    pod: Pod,
    ledger: Ledger,
    live: Trace,
    settings: Settings,
    replan: Replan,
    token_ms: _Score,
) -> Replanned:
    """Plan again on a part of the live requests, and compare on those that were kept out.

    The plan keeps what can stay, and is within every bound and feed.
    """
    planned_on, held_out = split_requests(live, 1.0 - settings.holdout, settings.seed)
    whole = keep_nodes(placed, replan(planned_on), kinds_of(pod), ledger.layer_max)
    assignment, share = _worth_most(placed, whole, pod, ledger, planned_on, settings, token_ms)
    check_power(pod, assignment.used().tolist())
    gain = drift.gain_of(token_ms(held_out, placed), token_ms(held_out, assignment), held_out)
    return Replanned(assignment, share, planned_on, gain)


def _worth_most(
    placed: Assignment,
    whole: Assignment,
    pod: Pod,
    ledger: Ledger,
    planned_on: Trace,
    settings: Settings,
    token_ms: _Score,
) -> tuple[Assignment, float | None]:
    """The whole plan, or the share of its exchanges that is worth most after paying for bytes.

    Judged on the routing planned on, with the least gain per GiB as the price of a GiB.
    """
    swaps = exchanges(placed, whole, kinds_of(pod), planned_on.histogram(), top_k=planned_on.top_k)
    tried: list[tuple[Assignment, float | None]] = [(whole, None)]
    tried += [(exchanged(placed, swaps, int(share * len(swaps))), share) for share in _SHARES]
    before_ms = float(token_ms(planned_on, placed).mean())

    def worth(assignment: Assignment) -> float:
        gib = records_in(placed, assignment) * ledger.expert_bytes / GIB
        gain_ms = before_ms - float(token_ms(planned_on, assignment).mean())
        return gain_ms - settings.limits.min_gain_ms_per_gib * gib

    return max(tried, key=lambda one: worth(one[0]))


def _moves(
    placement: Placement, pod: Pod, ledger: Ledger, tried: Replanned | None, settings: Settings
) -> tuple[MovePlan | None, Placement | None]:
    if tried is None:
        return None, None
    new = tried.assignment.to_placement(
        pod,
        placement.shape,
        model_digest=placement.model_digest,
        policy=settings.policy,
        trace_digest=tried.planned_on.digest,
    )
    new = keep_rows(placement, new)
    moves = plan_moves(
        placement,
        new,
        ledger.slots.tolist(),
        record_bytes=ledger.expert_bytes,
        bytes_per_s=settings.bytes_per_s,
    )
    return moves, new


def _proposal(
    placement: Placement,
    moved_to: Placement,
    ledger: Ledger,
    tried: Replanned,
    settings: Settings,
    verdict: Verdict,
    moves: MovePlan,
) -> Proposal:
    return Proposal(
        model_digest=placement.model_digest,
        old_placement=placement.digest,
        new_placement=moved_to.digest,
        planned_on=tried.planned_on.digest,
        policy=settings.policy,
        record_bytes=ledger.expert_bytes,
        bytes_per_s=settings.bytes_per_s,
        verdict=verdict,
        gain=tried.gain,
        plan=moves,
    )


def _traffic(moves: MovePlan) -> Traffic:
    return Traffic(
        records=sum(node.records_in for node in moves.nodes),
        bytes_moved=moves.bytes_moved,
        swaps=moves.swaps,
        staging_records=moves.staging_records,
        seconds_longest=moves.seconds_longest,
        nodes=moves.nodes,
    )


def _named(keys: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{name} ({tier})" for name, tier in sorted(keys))
