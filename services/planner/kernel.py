"""The optimiser's inner loops, compiled: the cost of a token, copies by gain, swaps that pay.

Owns the loops that numpy cannot express, over one layer at a time: a layer's arrays are its own, so
layers run side by side on threads (the loops release the GIL). Follows shared/core/copy_choice.py
to the letter; a test compares the two. Must not know clocks, seeds, pods or other layers. The only
module that imports numba, so nothing but a planner that optimises should import it.

Arrays of one layer, everywhere: ids uint16 [N, K]; home and copy int16 [E], copy -1 where there is
none; table float64 [P, K + 1], us of each place for 0 to K experts; first int64 [E + 1] and tokens
int32 [N * K]: the tokens that chose expert e are tokens[first[e]:first[e + 1]], ascending.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

Ids = npt.NDArray[np.uint16]
Places = npt.NDArray[np.int16]
Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]


@njit(nogil=True)
def _slowest_us(table: Floats, counts: Indices) -> float:
    slowest = 0.0
    for place in range(len(counts)):
        slowest = max(slowest, table[place, counts[place]])
    return slowest


@njit(nogil=True)
def _token_us(ids: Ids, home: Places, copy: Places, table: Floats, counts: Indices) -> float:
    """Cost of one token's experts ids [K]; counts [P] is scratch and holds the choice after."""
    counts[:] = 0
    for expert in ids:
        counts[home[expert]] += 1
    slowest = _slowest_us(table, counts)
    for expert in ids:
        here, there = home[expert], copy[expert]
        # a place never gets slower by losing an expert, so only the copy's place can be too slow
        if there < 0 or table[there, counts[there] + 1] > slowest:
            continue
        before = table[here, counts[here]]
        counts[here] -= 1
        counts[there] += 1
        if before == slowest:
            slowest = _slowest_us(table, counts)
    return slowest


@njit(nogil=True)
def layer_us(ids: Ids, home: Places, copy: Places, table: Floats, out: Floats) -> float:
    """Fill out [N] with the cost of every token; returns the mean."""
    counts = np.zeros(len(table), np.int64)
    total = 0.0
    for token in range(len(ids)):
        out[token] = _token_us(ids[token], home, copy, table, counts)
        total += out[token]
    return total / len(ids)


@njit(nogil=True)
def _copy_gain_us(
    ids: Ids,
    tokens: Tokens,
    home: Places,
    copy: Places,
    table: Floats,
    spent: Floats,
    expert: int,
    place: int,
    counts: Indices,
) -> float:
    """What all of `tokens` together save when `expert` has its copy at `place`."""
    before = copy[expert]
    copy[expert] = place
    gain = 0.0
    for token in tokens:
        gain += spent[token] - _token_us(ids[token], home, copy, table, counts)
    copy[expert] = before
    return gain


@njit(nogil=True)
def _relief_us(
    ids: Ids,
    tokens: Tokens,
    home: Places,
    table: Floats,
    spent: Floats,
    expert: int,
    counts: Indices,
) -> float:
    """What `tokens` would save if `expert` cost nothing anywhere: no copy of it gains more."""
    gain = 0.0
    for token in tokens:
        counts[:] = 0
        for other in ids[token]:
            counts[home[other]] += 1
        counts[home[expert]] -= 1
        gain += spent[token] - _slowest_us(table, counts)
    return gain


@njit(nogil=True)
def place_copies(
    ids: Ids,
    first: Indices,
    tokens: Tokens,
    home: Places,
    copy: Places,
    table: Floats,
    room: Indices,
) -> None:
    """Fill `copy` (all -1) greedily: the copy that saves most comes next, until room or gain ends.

    room int64 [P]: copies that each place can take; used up in place. A gain is looked at again
    only when it is the largest known one: gains rarely grow as other copies are placed.
    """
    experts, places = len(home), len(table)
    counts, spent = np.zeros(places, np.int64), np.empty(len(ids))
    layer_us(ids, home, copy, table, spent)
    gains, target = np.empty(experts), np.full(experts, -1, np.int16)
    for expert in range(experts):
        hits = tokens[first[expert] : first[expert + 1]]
        gains[expert] = _relief_us(ids, hits, home, table, spent, expert, counts)
    is_fresh = np.zeros(experts, np.bool_)
    while room.sum() > 0:
        expert = int(np.argmax(gains))
        if gains[expert] <= 0.0:
            return
        hits = tokens[first[expert] : first[expert + 1]]
        if is_fresh[expert] and room[target[expert]] > 0:
            copy[expert] = target[expert]
            room[target[expert]] -= 1
            gains[expert] = 0.0
            is_fresh[:] = False
            for token in hits:
                spent[token] = _token_us(ids[token], home, copy, table, counts)
            continue
        best = 0.0
        for place in range(places):
            if room[place] > 0 and place != home[expert]:
                gain = _copy_gain_us(ids, hits, home, copy, table, spent, expert, place, counts)
                if gain > best:
                    best, target[expert] = gain, place
        gains[expert], is_fresh[expert] = best, True


@njit(nogil=True)
def _add_change(
    ids: Ids,
    tokens: Tokens,
    request: Tokens,
    home: Places,
    copy: Places,
    table: Floats,
    spent: Floats,
    skipped: int,
    change: Floats,
    counts: Indices,
) -> None:
    """Add the change of the tokens' cost to change[0], squares of its sums by request to [1].

    Tokens that also chose the expert `skipped` are left out: another call counts them.
    """
    last, of_request = -1, 0.0
    for token in tokens:
        is_skipped = False
        for expert in ids[token]:
            is_skipped |= expert == skipped
        if is_skipped:
            continue
        if request[token] != last:
            change[0] += of_request
            change[1] += of_request * of_request
            last, of_request = request[token], 0.0
        of_request += _token_us(ids[token], home, copy, table, counts) - spent[token]
    change[0] += of_request
    change[1] += of_request * of_request


@njit(nogil=True)
def swap_experts(
    ids: Ids,
    first: Indices,
    tokens: Tokens,
    request: Tokens,
    home: Places,
    copy: Places,
    table: Floats,
    pairs: Indices,
    t_min: float,
) -> int:
    """Let pairs [n, 2] of experts exchange homes where that pays; returns how many did.

    An exchange is kept when its saving is above t_min times its standard error over requests:
    what a few tokens of one request like does not last. The number of experts of each place stays
    as it was. request int32 [N]; home is changed in place.
    """
    counts, spent = np.zeros(len(table), np.int64), np.empty(len(ids))
    layer_us(ids, home, copy, table, spent)
    change = np.zeros(2)
    kept = 0
    for pair in pairs:
        one, other = pair[0], pair[1]
        here, there = home[one], home[other]
        if here == there or copy[one] == there or copy[other] == here:
            continue
        of_one = tokens[first[one] : first[one + 1]]
        of_other = tokens[first[other] : first[other + 1]]
        home[one], home[other] = there, here
        change[:] = 0.0
        _add_change(ids, of_one, request, home, copy, table, spent, -1, change, counts)
        _add_change(ids, of_other, request, home, copy, table, spent, one, change, counts)
        if change[0] < 0.0 and -change[0] > t_min * np.sqrt(change[1]):
            kept += 1
            for token in of_one:
                spent[token] = _token_us(ids[token], home, copy, table, counts)
            for token in of_other:
                spent[token] = _token_us(ids[token], home, copy, table, counts)
        else:
            home[one], home[other] = here, there
    return kept
