"""How many experts of each layer go to which kind of place: exchanges between layers that pay.

Theory. Cost-ranked fills kinds of places by calls, whatever the layer. That is right for a sum of
costs; the time of a layer is a maximum, so a slot of a fast kind is worth more in one layer than in
another. Here experts of a layer stay in the order of their calls, and only the boundaries between
kinds move. A layer's time is its own, so within one round the best set of moves, at most one per
layer, every kind getting as much as it gives, is a small integer program with exact coefficients:
HiGHS solves it. That leaves a few numbers per layer to choose on thousands of tokens, which is why
these moves last on other requests where moves of single experts mostly do not.

Owns the boundaries, and from them homes and first copies. Must not know clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Final, TypeAlias

import numpy as np

from services.planner import kernel
from services.planner.assignment import NOWHERE, Assignment
from services.planner.policies import Kind
from services.planner.problem import Counts, Floats, Places, Problem, copy_rooms
from services.planner.programs import solve_binary
from services.planner.spread import share_out

Move: TypeAlias = tuple[int, int]  # (kind that gives, kind that gets)
Each: TypeAlias = Callable[
    [Callable[[int], float], list[int]], list[float]
]  # map, maybe on threads

_STEPS: Final = (24, 12, 6)
_WORTH: Final = 5e-5  # a round that saves a smaller share than this is the last of its step
_ROUNDS_MAX: Final = 12  # of one step


@dataclass(frozen=True, slots=True)
class Shares:
    """counts int64 [layers, kinds]: homes of each layer in each kind, in the order of `kinds`.

    Copies of the hottest experts of kind `relieved` go to what kind `spare` has left; `filling` is
    the share of a layer's free places there that its budget can fill, `extra` a few more per layer.
    `spare` is -1 without room.
    """

    kinds: tuple[Kind, ...]
    counts: Counts
    relieved: int
    spare: int
    filling: float
    extra: int = 0


def shares_of(problem: Problem, start: Assignment, kinds: tuple[Kind, ...]) -> Shares:
    """The boundaries of an assignment, and which kind copies would relieve most on its trace."""
    by_place = start.layer_counts()
    counts = np.stack([by_place[:, list(kind.places)].sum(axis=1) for kind in kinds], axis=1)
    free = [int((problem.ledger.slots - by_place.sum(axis=0))[list(k.places)].sum()) for k in kinds]
    spare = next((index for index, left in enumerate(free) if left > 0), -1)
    if spare < 0 or len(kinds) == 1:
        return Shares(kinds, counts, 0, -1, 0.0)
    left = np.maximum(_bound(problem, kinds[spare]) - counts[:, spare], 0).sum()
    lost = _lost_us(problem, start, kinds)
    lost[spare] = -1.0
    return Shares(kinds, counts, int(np.argmax(lost)), spare, min(1.0, free[spare] / max(left, 1)))


def exchange(
    problem: Problem, shares: Shares, *, each: Each, steps: tuple[int, ...] = _STEPS
) -> Iterator[Shares]:
    """Better and better shares, a round at a time, by steps of so many experts."""
    every = list(range(len(problem.layers)))
    moves = list(permutations(range(len(shares.kinds)), 2))
    now = values_us(problem, shares, every, each)
    for step in steps:
        tried = np.full((len(every), len(moves)), np.inf)
        stale = every
        for _ in range(_ROUNDS_MAX):
            for index, move in enumerate(moves):
                moved = _moved(shares, move, step)
                possible = [layer for layer in stale if _fits(problem, shares, moved, layer)]
                tried[stale, index] = np.inf
                tried[possible, index] = values_us(problem, moved, possible, each)
            chosen = _best_moves(tried - now[:, None], moves)
            saved = sum(now[layer] - tried[layer, index] for layer, index in chosen)
            if saved <= _WORTH * now.sum():
                break
            counts = shares.counts.copy()
            for layer, index in chosen:
                counts[layer] = _moved(shares, moves[index], step).counts[layer]
                now[layer] = tried[layer, index]
            shares = replace(shares, counts=counts)
            stale = [layer for layer, _ in chosen]
            yield shares


def settle(problem: Problem, shares: Shares) -> Assignment | None:
    """Homes at places of their own, in every layer hot and cold ones in turn; no copies.

    None when the nodes of a kind cannot share its experts within their bounds.
    """
    home = np.full(problem.calls.shape, NOWHERE, np.int16)
    ends = shares.counts.cumsum(axis=1)
    for index, kind in enumerate(shares.kinds):
        places = np.array(kind.places)
        taken = shares.counts[:, index]
        dealt = share_out(taken, problem.ledger.slots[places], problem.ledger.layer_max[places])
        if dealt is None:
            return None
        for layer, line in enumerate(dealt):
            end = int(ends[layer, index])
            experts = problem.layers[layer].order[end - int(taken[layer]) : end]
            home[layer, experts] = places[_in_turn(line)]
    return Assignment.without_copies(home, problem.ledger.slots.tolist())


def first_copies(problem: Problem, shares: Shares, start: Assignment) -> Places:
    """Copies of the hottest experts of the relieved kind in all free slots: int16 [layers, E]."""
    copy = np.full(start.home.shape, NOWHERE, np.int16)
    if shares.spare < 0:
        return copy
    rooms = copy_rooms(start.layer_counts(), problem.ledger)
    relieved = np.array(shares.kinds[shares.relieved].places)
    rooms[:, relieved] = 0
    for layer, room in enumerate(rooms):
        order = problem.layers[layer].order
        hottest = order[np.isin(start.home[layer][order], relieved)][: int(room.sum())]
        copy[layer, hottest] = _in_turn(room)[: len(hottest)]
    return copy


def _in_turn(line: Counts) -> Counts:
    """Owners of experts from hot to cold, line[i] of them i: the j-th of m at (j + 1/2) / m."""
    owners = np.repeat(np.arange(len(line)), line)
    before = np.repeat(np.cumsum(line) - line, line)
    return owners[np.lexsort((owners, (np.arange(len(owners)) - before + 0.5) / line[owners]))]


def values_us(problem: Problem, shares: Shares, layers: list[int], each: Each) -> Floats:
    """Mean time of each of the layers, with the copies that its boundaries leave room for."""

    def value(layer: int) -> float:
        ids = problem.layers[layer].ids
        home, copy = layout(problem, shares, layer)
        return float(kernel.layer_us(ids, home, copy, problem.table, np.empty(len(ids))))

    return np.array(each(value, layers), np.float64)


def layout(problem: Problem, shares: Shares, layer: int) -> tuple[Places, Places]:
    """Homes and copies of one layer, each kind's experts dealt round its places."""
    order = problem.layers[layer].order
    home, copy = np.empty(len(order), np.int16), np.full(len(order), NOWHERE, np.int16)
    ends = shares.counts[layer].cumsum()
    for kind, end, count in zip(shares.kinds, ends, shares.counts[layer], strict=True):
        places = np.array(kind.places, np.int16)
        home[order[end - count : end]] = places[np.arange(count) % len(places)]
    if shares.spare >= 0:
        kind = shares.kinds[shares.spare]
        held = int(shares.counts[layer, shares.spare])
        free = int(shares.filling * max(_bound(problem, kind) - held, 0)) + shares.extra
        count = int(shares.counts[layer, shares.relieved])
        hottest = order[ends[shares.relieved] - count :][: min(count, free)]
        places = np.array(kind.places, np.int16)
        copy[hottest] = places[(held + np.arange(len(hottest))) % len(places)]
    return home, copy


def _bound(problem: Problem, kind: Kind) -> int:
    """Experts of one layer that a kind's nodes may hold together."""
    return int(problem.ledger.layer_max[list(kind.places)].sum())


def _moved(shares: Shares, move: Move, step: int) -> Shares:
    """Every layer with `step` experts fewer in one kind and more in another."""
    counts = shares.counts.copy()
    counts[:, move[0]] -= step
    counts[:, move[1]] += step
    return replace(shares, counts=counts)


def _fits(problem: Problem, before: Shares, after: Shares, layer: int) -> bool:
    """Whether a layer keeps its bounds and no node is emptied that need not be."""
    for index, kind in enumerate(after.kinds):
        count = int(after.counts[layer, index])
        least = min(int(before.counts[layer, index]), len(kind.places))
        if not least <= count <= _bound(problem, kind):
            return False
    return True


def _best_moves(change: Floats, moves: list[Move]) -> list[tuple[int, int]]:
    """(layer, move) that change the sum most for the better; +inf where a move is impossible.

    At most one move per layer, and every kind gets as much as it gives.
    """
    layers, indices = np.nonzero(np.isfinite(change))
    if not len(layers):
        return []
    kinds = 1 + max(to for _, to in moves)
    ends = np.array(moves)[indices]
    rows = np.concatenate([layers[:, None], len(change) + ends], axis=1)
    values = np.broadcast_to([1.0, -1.0, 1.0], rows.shape)
    taken = solve_binary(
        cost=change[layers, indices],
        rows=rows,
        values=values,
        lower=np.concatenate([np.zeros(len(change)), np.zeros(kinds)]),
        upper=np.concatenate([np.ones(len(change)), np.zeros(kinds)]),
    )
    return list(zip(layers[taken].tolist(), indices[taken].tolist(), strict=True))


def _lost_us(problem: Problem, start: Assignment, kinds: tuple[Kind, ...]) -> Floats:
    """Sum over token-layers of the time that each kind, when it is the slowest, costs beyond the
    second slowest: float64 [kinds].
    """
    lost = np.zeros(len(kinds))
    for layer, routing in enumerate(problem.layers):
        keys = np.arange(len(routing.ids))[:, None] * len(problem.table)
        keys = keys + start.home[layer][routing.ids]
        counts = np.bincount(keys.ravel(), minlength=len(routing.ids) * len(problem.table))
        counts = counts.reshape(len(routing.ids), -1)
        spent = problem.table[np.arange(len(problem.table)), counts]
        by_kind = np.stack([spent[:, list(kind.places)].max(axis=1) for kind in kinds], axis=1)
        ordered = np.sort(by_kind, axis=1)
        lost += np.bincount(
            by_kind.argmax(axis=1), weights=ordered[:, -1] - ordered[:, -2], minlength=len(kinds)
        )
    return lost
