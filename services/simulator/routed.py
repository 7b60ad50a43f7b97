"""Which place computes which expert of which token: a trace laid over an assignment. Pure arrays.

Owns the choice of copies, the union of experts of a batch, and what changes when a place is lost.
Must not know time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from services.planner.assignment import NOWHERE, Assignment, Places
from services.planner.cost import PlaceCosts
from services.routing.trace import SYNTHETIC, Ids, Trace
from shared.core.copy_choice import choose_copies
from shared.core.errors import ConfigError, TraceError

_TOKENS = 256  # at once: bounds the memory of the copy choice

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Visits:
    """What one step asks of the places, in layer order. All int64 [V].

    `experts` are distinct experts (read once however many tokens chose them), `rows` are (token,
    expert) pairs.
    """

    layer: Counts
    place: Counts
    experts: Counts
    rows: Counts


@dataclass(frozen=True, slots=True)
class Routed:
    """`ids` uint16 [N, layers, top_k] and the place that serves each, int16 of the same shape."""

    ids: Ids
    place: Places
    assignment: Assignment
    costs: PlaceCosts

    @classmethod
    def of(cls, trace: Trace, assignment: Assignment, costs: PlaceCosts) -> Routed:
        """Lay a trace over an assignment; TraceError when they are of different models."""
        if (trace.layers, trace.experts) != assignment.home.shape:
            raise TraceError(
                f"the trace has {trace.layers} layers of {trace.experts} experts, the placement is "
                f"of {assignment.home.shape}: give a trace of this model"
            )
        return cls(trace.ids, _chosen(trace.ids, assignment, costs), assignment, costs)

    def relaid(self, assignment: Assignment, costs: PlaceCosts) -> Routed:
        """The same tokens over another assignment."""
        return Routed(self.ids, _chosen(self.ids, assignment, costs), assignment, costs)

    @property
    def tokens(self) -> int:
        """N."""
        return len(self.ids)

    @property
    def layers(self) -> int:
        """MoE layers."""
        return int(self.ids.shape[1])

    def visits(self, tokens: npt.NDArray[np.int64]) -> Visits:
        """What a batch of tokens (indices into the trace, repeats allowed) asks for."""
        place = self.place[tokens]
        width = self.assignment.places
        lines = np.arange(self.layers)[:, None] * width
        rows = np.bincount((lines + place).ravel(), minlength=self.layers * width)
        touched = np.flatnonzero(rows)
        experts = rows if len(tokens) == 1 else self._distinct(self.ids[tokens], place)
        return Visits(touched // width, touched % width, experts[touched], rows[touched])

    def without(self, lost: int) -> Routed:
        """Pairs of a lost place move to the other copy where there is one; the rest stay put."""
        flat = _flat(self.ids, self.assignment.home.shape[1])
        home, copy = self.assignment.home.ravel()[flat], self.assignment.copy.ravel()[flat]
        other = np.where(home == lost, copy, home)
        moves = (self.place == lost) & (other != NOWHERE) & (other != lost)
        return replace(self, place=np.where(moves, other, self.place))

    def rehomed(
        self, lost: int, heirs: npt.NDArray[np.int64], *, still_lost: Iterable[int] = ()
    ) -> Routed:
        """The experts of a lost place, dealt over `heirs` within each layer.

        Places `still_lost` stay without tokens that another copy can take. ConfigError when there
        is nobody to take them.
        """
        if not len(heirs):
            raise ConfigError("the lost place was the only one of its tier: nobody inherits")
        home, copy = self.assignment.home.copy(), self.assignment.copy.copy()
        home = np.where((home == lost) & (copy != NOWHERE), copy, home)
        copy[(copy == lost) | (copy == home)] = NOWHERE
        layers, _ = orphans = np.nonzero(home == lost)
        home[orphans] = heirs[_rank_in_group(layers) % len(heirs)]
        moved = replace(self.assignment, home=home, copy=copy)
        routed = replace(self, place=_chosen(self.ids, moved, self.costs), assignment=moved)
        for place in still_lost:
            routed = routed.without(place)
        return routed

    def _distinct(self, ids: Ids, place: Places) -> Counts:
        """Distinct experts per (layer, place), flat; one that serves at both its places is two."""
        home, copy = self.assignment.home.ravel(), self.assignment.copy.ravel()
        flat = _flat(ids, self.assignment.home.shape[1])
        seen = np.zeros(2 * home.size, np.bool_)
        seen[2 * flat + (place != home[flat])] = True
        found = np.flatnonzero(seen)
        expert = found >> 1
        where = np.where(found & 1, copy[expert], home[expert])
        width = self.assignment.places
        keys = expert // self.assignment.home.shape[1] * width + where
        return np.bincount(keys, minlength=self.layers * width)


def respread(assignment: Assignment, group: npt.NDArray[np.int64], count: int) -> Assignment:
    """The same assignment with the places of `group` (the last ones) replaced by `count` places.

    What the group held is dealt evenly over the new places within each layer; copies that lived
    there are dropped, and budgets are not looked at.
    """
    first = int(group[0])
    if list(group) != list(range(first, assignment.places)):
        raise ConfigError("the Sparks must be the last nodes of the pod to vary their number")
    home = assignment.home.copy()
    layers, _ = held = np.nonzero(home >= first)
    home[held] = first + _rank_in_group(layers) % count
    slots = np.concatenate([assignment.slots[:first], np.full(count, home.size)])
    return Assignment.without_copies(home, slots.tolist())


def drawn(histogram: Counts, *, tokens: int, top_k: int, seed: int) -> Trace:
    """A trace of independent tokens whose experts come up in proportion to a histogram.

    histogram int64 [layers, experts]; experts that were never chosen come up last.
    """
    layers, experts = histogram.shape
    rng = np.random.default_rng(seed)
    ids = np.empty((tokens, layers, top_k), np.uint16)
    for layer in range(layers):
        weight = np.log(np.maximum(histogram[layer], 1e-9))
        luck = weight + rng.gumbel(size=(tokens, experts))  # the largest k: without replacement
        ids[:, layer] = np.argsort(-luck, axis=1)[:, :top_k]
    zeros = np.zeros(tokens, np.int32)
    return Trace(SYNTHETIC, 0, experts, zeros, np.arange(tokens, dtype=np.int32), ids)


def _chosen(ids: Ids, assignment: Assignment, costs: PlaceCosts) -> Places:
    home, copy = assignment.home.ravel(), assignment.copy.ravel()
    place = np.empty(ids.shape, np.int16)
    for first in range(0, len(ids), _TOKENS):
        flat = _flat(ids[first : first + _TOKENS], assignment.home.shape[1])
        homes = home[flat]
        if assignment.copies:
            rows, top_k = homes.reshape(-1, ids.shape[2]), ids.shape[2]
            copies = copy[flat].reshape(-1, top_k)
            homes = choose_copies(rows, copies, costs.fixed_us, costs.per_expert_us)
        place[first : first + _TOKENS] = homes.reshape(flat.shape)
    return place


def _flat(ids: Ids, experts: int) -> Counts:
    """Index into [layers, experts] of every pair."""
    flat: Counts = np.arange(ids.shape[1])[:, None] * experts + ids.astype(np.int64)
    return flat


def _rank_in_group(groups: Counts) -> Counts:
    """0, 1, 2, ... within each run of equal values."""
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    ranks: Counts = np.arange(len(groups)) - np.repeat(starts, np.diff(starts, append=len(groups)))
    return ranks
