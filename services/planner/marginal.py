"""What one more slot would be worth, kind of place by kind of place. Pure.

Owns a finite difference: every layer in turn gets a few more slots of a kind, the hottest experts
of each slower kind move one kind up, and the last kind has so many more slots for copies. The
value is the mean over layers; after the boundaries were optimised layers are worth the same but for
noise, so the mean stands for the best. In-sample, with copies of the hottest experts instead of the
best copies. Must not know clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from services.planner import sizes
from services.planner.assignment import NOWHERE, Assignment
from services.planner.policies import kinds_of
from services.planner.problem import Problem
from shared.core.placement import Tier

_STEP: Final = 8  # experts: fewer drown in the noise of what they happen to be


@dataclass(frozen=True, slots=True)
class SlotValue:
    """ms per token that one more slot of a kind saves; places are the kind's nodes."""

    tier: Tier
    places: tuple[int, ...]
    ms_per_token: float


def slot_values(problem: Problem, assignment: Assignment) -> list[SlotValue]:
    """The value of a slot in each kind, in the order that kinds are filled."""
    key_of = {kind: (kind.per_expert_us, kind.fixed_us) for kind in kinds_of(problem.pod)}
    kinds = tuple(sorted(key_of, key=key_of.__getitem__))
    homes = replace(assignment, copy=np.full_like(assignment.copy, NOWHERE))
    shares = sizes.shares_of(problem, homes, kinds)
    layers = list(range(len(problem.layers)))
    before = sizes.values_us(problem, shares, layers, _one_by_one)
    sink = shares.spare if shares.spare >= 0 else len(kinds) - 1
    values = []
    for index, kind in enumerate(kinds):
        moved = np.minimum(_STEP, shares.counts[:, sink])
        if index < sink:
            counts = shares.counts.copy()
            counts[:, index] += moved
            counts[:, sink] -= moved
            more = replace(shares, counts=counts)
        else:
            # homes have all the slots they need here: one more holds a copy, if it is in reach
            moved = np.full(len(layers), _STEP)
            more = replace(shares, extra=_STEP if index == shares.spare else 0)
        after = sizes.values_us(problem, more, layers, _one_by_one)
        saved_us = (before - after).sum() / max(int(moved.sum()), 1)
        # one slot serves one layer: a token saves what that layer saves
        values.append(SlotValue(kind.tier, kind.places, float(saved_us) / 1e3))
    return values


def _one_by_one(action: Callable[[int], float], layers: list[int]) -> list[float]:
    return [action(layer) for layer in layers]
