"""What `k3 plan` found, as one object: the ledger, the power, and each policy on a trace. Pure.

Owns the shape of the JSON and the comparison with published figures, including which agreement is
no proof because parameters were chosen to bring it about. Must not know how it is printed.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from services.planner.assignment import Assignment
from services.planner.interval import Interval, mean_interval
from services.planner.ledger import (
    FeedLine,
    Ledger,
    LedgerLine,
    feed_lines,
    padding_note,
    published_differences,
)
from services.planner.pod import Pod, PublishedPolicy
from services.planner.score import Score


class LayerFigures(msgspec.Struct, frozen=True):
    """The place that most often decides a layer's time, and for which share of the tokens."""

    layer: int
    slowest: str
    share: float


class PathFigures(msgspec.Struct, frozen=True):
    """One assignment on one trace. `ci95_ms` is over resampled requests; shares are per tier."""

    tokens: int
    requests: int
    expert_path_ms: float
    ci95_ms: Interval | None
    tokens_per_s: float
    spark_touch: float
    load: dict[str, float]
    slowest: dict[str, float]
    layers: tuple[LayerFigures, ...]


class SearchFigures(msgspec.Struct, frozen=True):
    """How the policy "measured" came about.

    `objective_ms[s]` is the best expert path after s + 1 seconds. `trial_gain` is what the search
    over single experts saved on requests it had not seen, None when that was not tried.
    """

    budget_s: float
    objective_ms: tuple[float, ...]
    trial_gain: float | None
    exchanges: int


class PolicyFigures(msgspec.Struct, frozen=True):
    """One policy. `agreement` says what meeting the published figure proves, "" without one."""

    policy: str
    plan_s: float
    experts: dict[str, int]
    copies: int
    feeds: tuple[FeedLine, ...]
    in_sample: PathFigures
    held_out: PathFigures | None = None
    published: PublishedPolicy | None = None
    agreement: str = ""
    search: SearchFigures | None = None


class GainFigures(msgspec.Struct, frozen=True):
    """Share of the expert path that one policy saves over another on requests kept out."""

    policy: str
    base: str
    gain: float
    ci95: Interval


class BoundFigures(msgspec.Struct, frozen=True):
    """No placement without copies has a shorter expert path on the trace planned on.

    Clairvoyant, in-sample and loose. `far_touch_share`: least share of token-layers that touch one
    of the places `far`, which the bound follows from.
    """

    expert_path_ms: float
    far_touch_share: float
    far: tuple[str, ...]


class SlotFigures(msgspec.Struct, frozen=True):
    """ms per token that one more slot at one of `nodes` would save; in-sample."""

    tier: str
    nodes: tuple[str, ...]
    ms_per_token: float


class TraceFigures(msgspec.Struct, frozen=True):
    """What was planned on."""

    source: str
    digest: str
    model_digest: str
    synthetic: bool
    tokens: int
    requests: int
    notices: tuple[str, ...] = ()


class LedgerFigures(msgspec.Struct, frozen=True):
    """Budgets, and whatever about them does not follow from anything."""

    expert_bytes: int
    experts: int
    nodes: tuple[LedgerLine, ...]
    slots_total: int
    slots_spare: int
    total_gib: float
    spare_gib: float
    published_differences: tuple[str, ...]
    not_measured: tuple[str, ...]
    padding: str | None
    feeds: tuple[FeedLine, ...]


class PlanReport(msgspec.Struct, frozen=True):
    """Everything `k3 plan` says."""

    pod: str
    ledger: LedgerFigures
    trace: TraceFigures | None = None
    policies: tuple[PolicyFigures, ...] = ()
    held_out_gain: GainFigures | None = None
    bound: BoundFigures | None = None
    slot_values: tuple[SlotFigures, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """One line of JSON."""
        return msgspec.json.encode(self).decode()


def ledger_figures(pod: Pod, ledger: Ledger) -> LedgerFigures:
    """The part that needs no trace; feeds are shown with experts on every node."""
    return LedgerFigures(
        expert_bytes=ledger.expert_bytes,
        experts=ledger.experts,
        nodes=ledger.lines,
        slots_total=ledger.slots_total,
        slots_spare=ledger.slots_spare,
        total_gib=ledger.total_gib,
        spare_gib=ledger.spare_gib,
        published_differences=tuple(published_differences(pod, ledger)),
        not_measured=tuple(not_measured(pod)),
        padding=padding_note(ledger),
        feeds=feed_lines(pod, ledger.slots.tolist()),
    )


def path_figures(
    score: Score, request: npt.NDArray[np.int32], pod: Pod, *, first_layer: int
) -> PathFigures:
    """A score in the words of the pod."""
    path_ms = score.expert_path_ms
    layers = score.layer_us.shape[1]
    token_ms = layers * pod.serial_us / 1e3 + path_ms + pod.rest_ms
    decided = score.slowest / np.maximum(score.slowest.sum(axis=1, keepdims=True), 1)
    return PathFigures(
        tokens=len(score.layer_us),
        requests=len(np.unique(request)),
        expert_path_ms=path_ms,
        ci95_ms=mean_interval(score.token_ms, request),
        tokens_per_s=1e3 / token_ms if token_ms else 0.0,
        spark_touch=score.spark_touch,
        load=_by_tier(pod, score.load),
        slowest=_by_tier(pod, decided.mean(axis=0)),
        layers=tuple(
            LayerFigures(first_layer + index, pod.nodes[place].name, float(line[place]))
            for index, line in enumerate(decided)
            for place in [int(line.argmax())]
        ),
    )


def policy_figures(
    policy: str,
    assignment: Assignment,
    pod: Pod,
    *,
    plan_s: float,
    in_sample: PathFigures,
    held_out: PathFigures | None,
    synthetic: bool,
    search: SearchFigures | None = None,
) -> PolicyFigures:
    """One line of the comparison."""
    used = assignment.used()
    known = pod.published.policies if pod.published is not None else ()
    published = next((line for line in known if line.name == policy), None)
    return PolicyFigures(
        policy=policy,
        plan_s=plan_s,
        experts={node.name: int(count) for node, count in zip(pod.nodes, used, strict=True)},
        copies=assignment.copies,
        feeds=feed_lines(pod, used.tolist()),
        in_sample=in_sample,
        held_out=held_out,
        published=published,
        agreement="" if published is None else _agreement(policy, pod, synthetic=synthetic),
        search=search,
    )


def agreement_notes(pod: Pod, policies: Sequence[PolicyFigures], *, synthetic: bool) -> list[str]:
    """What the agreement with published figures proves, in whole sentences."""
    if pod.published is None or not any(policy.published for policy in policies):
        return []
    fitted = _fitted_costs(pod)
    notes = []
    if fitted:
        notes.append(f"costs of {', '.join(fitted)} were fitted to the published figures")
    if pod.token.rest_basis == "fitted":
        notes.append(
            f"the {pod.rest_ms:g} ms beside layers and experts follow from the published rates: "
            "tok/s agree by construction where ms do"
        )
    if synthetic:
        notes.append(
            "the trace is synthetic and its parameters were chosen to meet the published figures: "
            "where a line says fitted, agreement is by construction and proves nothing (the fit "
            "was made with seed 0; that other seeds agree too is not by construction)"
        )
        if any(policy.policy == "contiguous" for policy in policies):
            notes.append(
                "contiguous does not look at the trace's popularity, so only costs and counts "
                "enter: its agreement was not brought about by the trace"
            )
    if pod.published.spark_touch is not None:
        ours = [p for p in policies if p.policy == "cost-ranked"]
        notes += [
            f"share of token-layers that touch a Spark: {pod.published.spark_touch:.0%} published, "
            f"{policy.in_sample.spark_touch:.1%} here under cost-ranked; not fitted"
            for policy in ours
        ]
    return notes


def not_measured(pod: Pod) -> list[str]:
    """Every figure of the pod whose mark is not `measured`; like nodes are said once."""
    found: dict[str, list[str]] = {}

    def note(what: str, basis: str, who: str) -> None:
        if basis != "measured":
            found.setdefault(f"{what} ({basis})", []).append(who)

    note("serial part", pod.token.serial_basis, "token")
    note("rest", pod.token.rest_basis, "token")
    for node in pod.nodes:
        note("memory", node.memory_basis, node.name)
        for item in node.reservations:
            note(f"{item.what} {item.bytes / 2**30:.2f} GiB", item.basis, node.name)
        note(f"fixed cost {node.fixed_us:g} us", node.cost.fixed_basis, node.name)
        note(f"{node.per_expert_us:g} us per expert", node.cost.per_expert_basis, node.name)
        if node.power is not None:
            note("power", node.power.basis, node.name)
    for load in pod.loads:
        note("power", load.basis, load.name)
    for feed in pod.feeds:
        note(f"{feed.continuous_w:g} W", feed.basis, f"feed {feed.name}")
    return [f"{', '.join(_ranges(who))}: {what}" for what, who in found.items()]


def _ranges(names: Sequence[str]) -> list[str]:
    """["a", "b0", "b1", "b2"] -> ["a", "b0 to b2"]."""
    stems: dict[str, list[str]] = {}
    for name in names:
        stems.setdefault(name.rstrip("0123456789"), []).append(name)
    return [
        group[0] if len(group) == 1 else f"{group[0]} to {group[-1]}" for group in stems.values()
    ]


def _agreement(policy: str, pod: Pod, *, synthetic: bool) -> str:
    if policy == "contiguous":
        return "costs fitted" if _fitted_costs(pod) else "not fitted"
    if synthetic:
        return "fitted"
    return "costs fitted" if _fitted_costs(pod) else "not fitted"


def _fitted_costs(pod: Pod) -> list[str]:
    return [
        node.name
        for node in pod.nodes
        if "fitted" in (node.cost.fixed_basis, node.cost.per_expert_basis)
    ]


def _by_tier(pod: Pod, shares: npt.NDArray[np.float64]) -> dict[str, float]:
    sums: dict[str, float] = dict.fromkeys(pod.tiers, 0.0)
    for node, share in zip(pod.nodes, shares.tolist(), strict=True):
        sums[node.tier] += share
    return sums
