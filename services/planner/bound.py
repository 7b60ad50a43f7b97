"""A lower bound: no placement without copies can be faster than this on this trace. Pure.

Theory. Split the places in two: near ones, and far ones whose first expert already costs more than
a whole token would if all its experts were near. A token that touches a far place in a layer pays
at least the cheapest first expert there; one that does not pays at least what its K experts cost,
shared in the best way over the near places. So the bound needs only the largest number of
token-layers that can do without the far places, when these hold so many experts: choose experts to
be near, no more than the near places have slots, such that as many tokens as possible find all of
theirs among them. With a price per near expert in place of the limit (Lagrange), this falls apart
into layers, each a project selection: a maximum flow from tokens through their experts to a sink,
an expert taking at most the price. Any price gives a valid bound; the best of several is taken.

What it is: clairvoyant (the placement may know these very tokens), in-sample, without copies, and
loose: it knows neither that the near places have unlike budgets nor how many experts meet on one
far place, and the price lets experts be near by halves. Every layer is used: nothing is sampled.
Must not know policies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from services.planner.problem import Floats, Problem

_SCALE: Final = 1000  # flows are whole numbers: one token is this many units, or fewer if many
_FLOW_MAX: Final = 2**31 - 1  # of SciPy's maximum flow
_PRICES: Final = 12  # looked at before the last is tried on every layer
_SAMPLE: Final = 8  # layers that the price is chosen on; the bound itself uses all


@dataclass(frozen=True, slots=True)
class Bound:
    """expert_path_ms: no placement is below it. touch_share: least share of token-layers that
    touch one of the `far` places, which the bound follows from.
    """

    expert_path_ms: float
    touch_share: float
    far: tuple[int, ...]


def lower_bound(problem: Problem) -> Bound:
    """The best bound over the ways to call places near and far, by the cost of a first expert."""
    first_us = problem.table[:, 1]
    layers, top_k = len(problem.layers), problem.table.shape[1] - 1
    everywhere = _shared_us(problem.table, top_k)
    best = Bound(layers * everywhere / 1e3, 0.0, ())
    for edge in np.unique(first_us)[1:]:
        far = first_us >= edge
        near_us = _shared_us(problem.table[~far], top_k)
        far_us = max(float(edge), everywhere)
        if near_us >= far_us:
            continue  # a token that stays near pays more: touching a far place proves nothing
        share = 1.0 - _untouched_share(problem, int(problem.ledger.slots[~far].sum()))
        path_us = layers * (near_us + share * (far_us - near_us))
        if path_us / 1e3 > best.expert_path_ms:
            best = Bound(path_us / 1e3, share, tuple(np.flatnonzero(far).tolist()))
    return best


def _shared_us(table: Floats, experts: int) -> float:
    """Least time in which places can compute so many experts of one token, however shared.

    Within a time, each place takes the most it can; the least time is one of the table's entries.
    """
    for limit in np.unique(table):
        if int((table[:, 1:] <= limit).sum()) >= experts:
            return float(limit)
    raise AssertionError("a place can take all experts of a token")


def _untouched_share(problem: Problem, near_slots: int) -> float:
    """No more than this share of token-layers finds all its experts among the near ones."""
    layers, tokens = len(problem.layers), len(problem.request)
    scale = max(1, min(_SCALE, _FLOW_MAX // tokens))
    if near_slots >= layers * problem.experts:
        return 1.0
    mean_slots = near_slots / layers
    sample = range(0, layers, -(-layers // _SAMPLE))

    def value(price: int, chosen: range) -> float:
        """Untouched tokens per layer, at most, with this price in units."""
        ids = (problem.layers[layer].ids for layer in chosen)
        flows = [_flow(part, problem.experts, price=price, scale=scale) for part in ids]
        return tokens + (price * mean_slots - float(np.mean(flows))) / scale

    # convex in the price: halve the interval around the least
    low, high = 0, int(np.ceil(scale * tokens / max(mean_slots, 1.0)))
    for _ in range(_PRICES):
        if high - low < 3:
            break
        left, right = low + (high - low) // 3, high - (high - low) // 3
        if value(left, sample) <= value(right, sample):
            high = right
        else:
            low = left
    return float(np.clip(value((low + high) // 2, range(layers)) / tokens, 0.0, 1.0))


def _flow(ids: npt.NDArray[np.uint16], experts: int, *, price: int, scale: int) -> int:
    """Most units that tokens ids [N, K] can send to their experts, `price` units to each at most.

    Tokens have `scale` units each. N x scale less this flow is the most that untouched tokens, at
    `scale` each, can bring above the price of the near experts that they need.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    tokens, top_k = ids.shape
    source, sink = tokens + experts, tokens + experts + 1
    every = np.arange(tokens)
    tails = [np.full(tokens, source), np.repeat(every, top_k), tokens + np.arange(experts)]
    heads = [every, tokens + ids.ravel().astype(np.int64), np.full(experts, sink)]
    limits = [
        np.full(tokens, scale),
        np.full(tokens * top_k, scale),
        np.full(experts, min(price, tokens * scale)),
    ]
    ends = np.concatenate(tails), np.concatenate(heads)
    graph = csr_array((np.concatenate(limits).astype(np.int32), ends), shape=(sink + 1, sink + 1))
    return int(maximum_flow(graph, source, sink).flow_value)
