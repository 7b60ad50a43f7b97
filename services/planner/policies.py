"""The four policies of the original plan: contiguous, global, layer-balanced, cost-ranked. Pure.

Owns the rules. All of them fill kinds of nodes in an order; they differ in the order of the kinds,
in what makes an expert come first, and in how a kind's slots are shared over the layers:

    contiguous      kinds as the pod lists them; expert ids; the same slice of every layer
    global          HBM, Grace, RTX, Sparks; calls, whatever the layer
    layer-balanced  HBM, Grace, RTX, Sparks; calls; quotas scaled by each layer's calls
    cost-ranked     by measured us per expert (HBM, RTX, Grace, Sparks); calls, whatever the layer

With a cost that is linear in the calls a place serves, cost-ranked is optimal: it pairs the most
calls with the cheapest slots, which is what the linear program over all experts and kinds gives
(checked against one: the same objective). A bound per layer keeps that true, because sets that
take at most so many of each layer are a matroid. The true cost is no sum but a maximum, and there
none of the four is optimal. Must not know traces, files or clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from services.planner.assignment import Assignment
from services.planner.ledger import Ledger
from services.planner.pod import Pod
from services.planner.spread import apportion, share_out
from shared.core.errors import PodError
from shared.core.placement import Tier

PolicyName: TypeAlias = Literal["contiguous", "global", "layer-balanced", "cost-ranked"]
POLICIES: Final[tuple[PolicyName, ...]] = get_args(PolicyName)

_Ids = npt.NDArray[np.int64]
_TIER_ORDER: Final[tuple[Tier, ...]] = ("hbm", "grace", "rtx", "spark")


@dataclass(frozen=True, slots=True)
class Kind:
    """Nodes of one tier with one cost; they share what the kind gets."""

    tier: Tier
    per_expert_us: float
    fixed_us: float
    places: tuple[int, ...]


def kinds_of(pod: Pod) -> list[Kind]:
    """Kinds of nodes in the order in which the pod first names them."""
    found: dict[tuple[Tier, float, float], list[int]] = {}
    for place, node in enumerate(pod.nodes):
        found.setdefault((node.tier, node.per_expert_us, node.fixed_us), []).append(place)
    return [
        Kind(tier, per_expert_us, fixed_us, tuple(places))
        for (tier, per_expert_us, fixed_us), places in found.items()
    ]


def plan(policy: PolicyName, histogram: _Ids, pod: Pod, ledger: Ledger) -> Assignment:
    """Home of every expert by one of the four policies; no copies.

    histogram int64 [layers, experts]: how often each was chosen. PodError when no way is found
    within the bounds per layer although there are slots enough; no pod is known where that happens.
    """
    for layer_max, weights in _attempts(policy, histogram, ledger):
        home = _homes(policy, histogram, pod, ledger.slots, layer_max, weights)
        if home is not None:
            assignment = Assignment.without_copies(home, ledger.slots.tolist())
            assignment.check(layer_max=ledger.layer_max)
            return assignment
    raise PodError(
        f"pod {pod.name}: policy {policy} finds no way to share {ledger.experts:,} experts over "
        f"{ledger.slots_total:,} slots within the bounds per layer: raise layer_experts_max"
    )


def _attempts(
    policy: PolicyName, histogram: _Ids, ledger: Ledger
) -> Iterator[tuple[_Ids, npt.NDArray[np.float64] | None]]:
    """Bounds per layer, and weights of the layers where a policy has quotas: the rule itself first.

    Kinds are filled one by one. With unlike Sparks, budgets and bounds that leave hardly a choice,
    an early kind can take what a later one needs; then first no node takes more of a layer than it
    could of all layers alike, and at last every layer is shared in the same way.
    """
    even = np.ones(len(histogram))
    match policy:
        case "global" | "cost-ranked":
            weights = None
        case "contiguous":
            weights = even
        case "layer-balanced":
            weights = histogram.sum(axis=1).astype(np.float64)
    every_layer = -(-ledger.slots // len(histogram))
    yield ledger.layer_max, weights
    yield np.minimum(ledger.layer_max, every_layer), weights
    yield ledger.layer_max, even


def _homes(
    policy: PolicyName,
    histogram: _Ids,
    pod: Pod,
    slots: _Ids,
    layer_max: _Ids,
    weights: npt.NDArray[np.float64] | None,
) -> npt.NDArray[np.int16] | None:
    """Place of every expert; None when kind after kind there is no way within the bounds."""
    ranks = _RANKS[policy](histogram)
    filled = _fill(_ordered(policy, pod), ranks, weights, slots, layer_max)
    if filled is None:
        return None
    home = np.full(histogram.shape, -1, np.int16)
    for kind, is_taken in filled:
        places = np.array(kind.places)
        counts = share_out(is_taken.sum(axis=1), slots[places], layer_max[places])
        if counts is None:
            return None
        _deal(home, places, counts, is_taken, ranks, sliced=policy == "contiguous")
    return home


def _by_id(histogram: _Ids) -> _Ids:
    return np.broadcast_to(np.arange(histogram.shape[1]), histogram.shape)


def _by_calls(histogram: _Ids) -> _Ids:
    """Position of each expert when all are sorted by calls; equal calls in layer, expert order."""
    order = np.argsort(-histogram.ravel(), kind="stable")
    ranks = np.empty(order.size, np.int64)
    ranks[order] = np.arange(order.size)
    return ranks.reshape(histogram.shape)


_RANKS: Final[Mapping[PolicyName, Callable[[_Ids], _Ids]]] = {
    "contiguous": _by_id,
    "global": _by_calls,
    "layer-balanced": _by_calls,
    "cost-ranked": _by_calls,
}


def _ordered(policy: PolicyName, pod: Pod) -> list[Kind]:
    kinds = kinds_of(pod)
    match policy:
        case "contiguous":
            return kinds
        case "global" | "layer-balanced":
            return sorted(kinds, key=lambda kind: (_TIER_ORDER.index(kind.tier), _cost(kind)))
        case "cost-ranked":
            return sorted(kinds, key=_cost)


def _cost(kind: Kind) -> tuple[float, float]:
    return kind.per_expert_us, kind.fixed_us


def _fill(
    kinds: list[Kind],
    ranks: _Ids,
    weights: npt.NDArray[np.float64] | None,
    slots: _Ids,
    layer_max: _Ids,
) -> list[tuple[Kind, npt.NDArray[np.bool_]]] | None:
    """Which experts each kind takes: bool [layers, experts], disjoint, all experts together.

    From the last kind backwards: the kinds before it keep what comes first, as much as their slots
    hold and at least what the bound of the last kind leaves over in a layer; the rest is its.
    """
    room = [int(slots[list(kind.places)].sum()) for kind in kinds]
    bounds = [min(int(layer_max[list(k.places)].sum()), ranks.shape[1]) for k in kinds]
    is_left = np.ones(ranks.shape, np.bool_)
    filled = []
    for index in range(len(kinds) - 1, -1, -1):
        left = is_left.sum(axis=1)
        lower = np.maximum(left - bounds[index], 0)
        upper = np.minimum(left, sum(bounds[:index]))
        total = min(int(left.sum()), sum(room[:index]))
        keeps = _first(ranks, is_left, total, lower, upper, weights)
        if keeps is None:
            return None
        filled.append((kinds[index], is_left & ~keeps))
        is_left = keeps
    return filled


def _first(
    ranks: _Ids,
    is_left: npt.NDArray[np.bool_],
    total: int,
    lower: _Ids,
    upper: _Ids,
    weights: npt.NDArray[np.float64] | None,
) -> npt.NDArray[np.bool_] | None:
    """The `total` experts that come first, from lower to upper of each layer; None if impossible.

    Without weights first means by rank alone, with them each layer has its own quota.
    """
    if not lower.sum() <= total <= upper.sum():
        return None
    beyond = np.iinfo(np.int64).max
    order = np.argsort(np.where(is_left, ranks, beyond), axis=1, kind="stable")
    within = np.empty_like(order)  # how many of its layer come before an expert
    np.put_along_axis(within, order, np.arange(order.shape[1])[None, :], axis=1)
    if weights is not None:
        quotas = apportion(total, weights, lower, upper)
        return None if quotas is None else is_left & (within < quotas[:, None])
    must = is_left & (within < lower[:, None])
    may = is_left & (within < upper[:, None]) & ~must
    candidates = np.flatnonzero(may)
    by_rank = candidates[np.argsort(ranks.ravel()[candidates], kind="stable")]
    kept = must.ravel().copy()
    kept[by_rank[: total - int(must.sum())]] = True
    return kept.reshape(ranks.shape)


def _deal(
    home: npt.NDArray[np.int16],
    places: npt.NDArray[np.int64],
    counts: _Ids,
    is_taken: npt.NDArray[np.bool_],
    ranks: _Ids,
    *,
    sliced: bool,
) -> None:
    """Write a kind's experts to its nodes: slices of ids, or hot and cold ones in turn.

    counts int64 [layers, nodes]: how many of each layer every node gets.
    """
    for layer, line in enumerate(counts):
        experts = np.flatnonzero(is_taken[layer])
        experts = experts[np.argsort(ranks[layer, experts], kind="stable")]
        owners = np.repeat(np.arange(len(places)), line)
        if not sliced:
            # the j-th of m experts of a node comes at (j + 1/2) / m of the way down
            before = np.repeat(np.cumsum(line) - line, line)
            turn = (np.arange(len(owners)) - before + 0.5) / line[owners]
            owners = owners[np.lexsort((owners, turn))]
        home[layer, experts] = places[owners]
