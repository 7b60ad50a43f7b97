"""How numbers of experts are shared out: over layers, and over the nodes of one kind. Pure.

Owns two small problems of whole numbers: quotas in proportion to weights, and even shares under
bounds. Must not know which experts they are.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]


def apportion(
    total: int, weights: npt.NDArray[np.float64], lower: Counts, upper: Counts
) -> Counts | None:
    """Whole numbers between lower and upper that sum to `total`, as near `weights` as may be.

    All int64 [L]; float64 [L]. The shares are total x weight / sum with one common factor, found by
    bisection, then cut to the bounds; what rounding leaves goes to the largest remainders. None
    when the bounds leave no room for `total`.
    """
    if not lower.sum() <= total <= upper.sum():
        return None
    low, high = 0.0, 1.0
    flat = np.maximum(weights, 1e-12 * max(float(weights.max(initial=0.0)), 1.0))
    while np.clip(high * flat, lower, upper).sum() < total:
        high *= 2.0
    for _ in range(100):
        middle = (low + high) / 2.0
        if np.clip(middle * flat, lower, upper).sum() < total:
            low = middle
        else:
            high = middle
    exact = np.clip(high * flat, lower, upper)
    quotas = np.floor(exact).astype(np.int64)
    # the factor makes the sum right but for rounding, so one pass up, or down, is enough
    missing = total - int(quotas.sum())
    order = np.argsort(-(exact - quotas), kind="stable")
    room = order[quotas[order] < upper[order]]
    if missing > len(room):
        return None
    quotas[room[: max(missing, 0)]] += 1
    spare = order[::-1][quotas[order[::-1]] > lower[order[::-1]]]
    quotas[spare[: max(-missing, 0)]] -= 1
    return quotas


def share_out(demand: Counts, slots: Counts, layer_max: Counts) -> Counts | None:
    """Experts of each layer for each node of one kind: int64 [L, S]; None when they do not fit.

    demand int64 [L] of each layer; slots int64 [S] in all and layer_max int64 [S] of one layer for
    each node. Nodes share every layer in proportion to their slots, the remainders carried over to
    the next layer so that the sums are even too, and no node goes without an expert of a layer that
    has enough for all. Only when that runs into a bound are shares uneven.
    """
    even = _proportional(demand, slots, layer_max)
    return even if even is not None else _tightest_last(demand, slots, layer_max)


def _proportional(demand: Counts, slots: Counts, layer_max: Counts) -> Counts | None:
    shares = slots / max(int(slots.sum()), 1)
    credit = np.zeros(len(slots))
    left = slots.copy()
    taken = np.zeros((len(demand), len(slots)), np.int64)
    for layer, wanted in enumerate(demand.tolist()):
        credit += wanted * shares
        room = np.minimum(layer_max, left)
        least = np.minimum(room, 1 if wanted >= len(slots) else 0)
        line = np.clip(np.floor(credit).astype(np.int64), least, room)
        _adjust(line, wanted, credit, least, room)
        if line.sum() != wanted:
            return None
        credit -= line
        left -= line
        taken[layer] = line
    return taken


def _adjust(
    line: Counts, wanted: int, credit: npt.NDArray[np.float64], least: Counts, room: Counts
) -> None:
    """Bring the sum of `line` to `wanted` in place, one by one, if the bounds let it."""
    while (missing := wanted - int(line.sum())) != 0:
        step = 1 if missing > 0 else -1
        movable = line < room if step > 0 else line > least
        if not movable.any():
            return
        owed = np.where(movable, step * (credit - line), -np.inf)
        line[int(np.argmax(owed))] += step


def _tightest_last(demand: Counts, slots: Counts, layer_max: Counts) -> Counts | None:
    """Full layers first, each from the nodes that could still serve the most layers.

    What counts for the layers still to come is how many of them a node can serve to its bound, so
    nothing else is worth saving.
    """
    taken = np.zeros((len(demand), len(slots)), np.int64)
    left = slots.copy()
    for layer in np.argsort(-demand, kind="stable").tolist():
        for _ in range(int(demand[layer])):
            movable = (taken[layer] < layer_max) & (left > 0)
            if not movable.any():
                return None
            node = int(np.argmax(np.where(movable, left / np.maximum(layer_max, 1), -np.inf)))
            taken[layer, node] += 1
            left[node] -= 1
    return taken
