"""Which of its two copies computes an expert: one rule for planner and Station. Pure.

Owns the rule. A token's experts are taken in the router's order, all at their homes at first; an
expert that has a copy moves to it when that does not make the slowest place of the layer slower.
Rows are the same bytes wherever they are computed, so the choice changes time and nothing else.
Must not know leases, traces or how copies were chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Final

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int16]
Costs = npt.NDArray[np.float64]
NO_COPY: Final = -1
_ROWS: Final = 1 << 15  # at once: bounds the memory of the counts
PlaceTable = Sequence[Sequence[float]]  # [P][K + 1]: us of a place with 0 to K experts of a token


def place_table(
    fixed_us: Sequence[float], per_expert_us: Sequence[float], top_k: int
) -> PlaceTable:
    """What `choose_of_token` looks up instead of reckoning, for at most `top_k` experts a token."""
    return [
        [0.0, *(fixed + each * count for count in range(1, top_k + 1))]
        for fixed, each in zip(fixed_us, per_expert_us, strict=True)
    ]


def choose_of_token(homes: list[int], copies: list[int], table: PlaceTable) -> list[int]:
    """`choose_copies` for one token, without numpy: a layer of decoding has no time for arrays.

    homes and copies [K], -1 where there is no copy. Costs never fall with the count, so an expert
    that leaves its home makes no place slower, and only the copy's place has to be looked at.
    """
    if max(copies) == NO_COPY:
        return homes
    chosen, counts = homes.copy(), [0] * len(table)
    for home in homes:
        counts[home] += 1
    spent = list(map(getitem, table, counts))
    slowest = max(spent)
    for k, copy in enumerate(copies):
        if copy == NO_COPY or (after := table[copy][counts[copy] + 1]) > slowest:
            continue
        home = chosen[k]
        before = spent[home]
        chosen[k] = copy
        counts[copy] += 1
        counts[home] -= 1
        spent[copy], spent[home] = after, table[home][counts[home]]
        if before == slowest:
            slowest = max(spent)
    return chosen


def choose_copies(homes: Places, copies: Places, fixed_us: Costs, per_expert_us: Costs) -> Places:
    """Place of every (token, expert): int16 [R, K].

    Rows are tokens of one layer, independent of each other: a prefill chunk is decided as its
    tokens would be alone. homes int16 [R, K]: place where each chosen expert lives. copies, the
    same shape: place of its copy, -1 where there is none. fixed_us and per_expert_us float64 [P]:
    a place with k > 0 of a token's experts takes fixed_us + per_expert_us x k.
    """
    chosen = homes.copy()
    rows = np.flatnonzero((copies != NO_COPY).any(axis=1))
    for first in range(0, len(rows), _ROWS):
        part = rows[first : first + _ROWS]
        chosen[part] = _choose(homes[part], copies[part], fixed_us, per_expert_us)
    return chosen


def _choose(homes: Places, copies: Places, fixed_us: Costs, per_expert_us: Costs) -> Places:
    """`choose_copies` for rows that each have a copy."""
    width = len(fixed_us)
    keys = np.arange(len(homes))[:, None] * width + homes
    counts = np.bincount(keys.ravel(), minlength=len(homes) * width).reshape(-1, width)
    spent = (fixed_us + per_expert_us * counts) * (counts > 0)
    slowest = spent.max(axis=1)
    chosen = homes.copy()
    for k in range(homes.shape[1]):
        at = np.flatnonzero(copies[:, k] != NO_COPY)
        home, copy = homes[at, k], copies[at, k]
        lines = np.arange(len(at))
        tried = spent[at]
        left = counts[at, home] - 1
        tried[lines, home] = (fixed_us[home] + per_expert_us[home] * left) * (left > 0)
        tried[lines, copy] = fixed_us[copy] + per_expert_us[copy] * (counts[at, copy] + 1)
        after = tried.max(axis=1)
        taken = after <= slowest[at]
        moved = at[taken]
        chosen[moved, k] = copy[taken]
        counts[moved, home[taken]] -= 1
        counts[moved, copy[taken]] += 1
        spent[moved] = tried[taken]
        slowest[moved] = after[taken]
    return chosen
