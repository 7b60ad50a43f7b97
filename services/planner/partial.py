"""The part of a new plan that pays most for its bytes: exchanges between kinds of nodes. Pure.

Theory. A new plan moves experts for large and for tiny gains alike. Here its moves are paired
within a layer: an expert that comes to a cheaper kind takes the row of one that leaves it. Such an
exchange keeps every count that a bound is on, so any set of exchanges is a placement, and those
worth most can be taken alone. What an exchange is worth is estimated as calls x cost; the exact
objective then judges a set of them. Must not know traces or files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.planner.assignment import NOWHERE, Assignment
from services.planner.policies import Kind

_Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Exchanges:
    """int64 [E] each, the most valuable first: experts `coming` and `leaving` a cheaper kind."""

    layer: _Index
    coming: _Index
    leaving: _Index

    def __len__(self) -> int:
        """E."""
        return len(self.layer)


def exchanges(
    old: Assignment,
    new: Assignment,
    kinds: Sequence[Kind],
    calls: npt.NDArray[np.integer],
    *,
    top_k: int,
) -> Exchanges:
    """Those of the moves from `old` to `new` that pair up within a layer and two kinds.

    calls int64 [layers, experts] weigh them. Experts with a second copy in either are left alone:
    their copy may be where they would go.
    """
    # a place's fixed part is shared by the experts of a token that go there, at best by all
    cost_us = [kind.per_expert_us + kind.fixed_us / top_k for kind in kinds]
    kind_of = np.zeros(old.places, np.int64)
    for index, kind in enumerate(kinds):
        kind_of[list(kind.places)] = index
    single = (old.copy == NOWHERE) & (new.copy == NOWHERE)
    before = np.where(single, kind_of[old.home], NOWHERE)
    after = np.where(single, kind_of[new.home], NOWHERE)
    found = []
    for cheap, dear in _pairs(cost_us):
        saved_us = cost_us[dear] - cost_us[cheap]
        comes = (before == dear) & (after == cheap)
        leaves = (before == cheap) & (after == dear)
        for layer in range(len(calls)):
            hot, cold = np.flatnonzero(comes[layer]), np.flatnonzero(leaves[layer])
            count = min(len(hot), len(cold))
            line = calls[layer]
            hot = hot[np.argsort(-line[hot], kind="stable")][:count]
            cold = cold[np.argsort(line[cold], kind="stable")][:count]
            worth = (line[hot] - line[cold]) * saved_us
            found.append((np.full(count, layer), hot, cold, worth))
    if not found:
        none = np.empty(0, np.int64)
        return Exchanges(none, none, none)
    layers, coming, leaving, value = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.argsort(-value, kind="stable")[: int((value > 0).sum())]
    return Exchanges(*(part[order].astype(np.int64) for part in (layers, coming, leaving)))


def records_in(old: Assignment, new: Assignment) -> int:
    """Records that have to be read into nodes that do not have them."""
    total = 0
    for place in (new.home, new.copy):
        total += int(((place != NOWHERE) & (place != old.home) & (place != old.copy)).sum())
    return total


def exchanged(old: Assignment, swaps: Exchanges, count: int) -> Assignment:
    """`old` with the first `count` exchanges made: each pair trades places, copies stay."""
    layer, coming, leaving = (part[:count] for part in (swaps.layer, swaps.coming, swaps.leaving))
    home = old.home.copy()
    home[layer, coming] = old.home[layer, leaving]
    home[layer, leaving] = old.home[layer, coming]
    return Assignment(home, old.copy, old.slots)


def _pairs(cost_us: Sequence[float]) -> Iterator[tuple[int, int]]:
    """(cheaper, dearer) kinds."""
    order = sorted(range(len(cost_us)), key=lambda index: cost_us[index])
    for at, cheap in enumerate(order):
        for dear in order[at + 1 :]:
            yield cheap, dear
