"""Who computes what: a layer's chosen experts grouped by the place that holds them. Pure."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Share(NamedTuple):
    """The pairs of one place: `positions` are flat indices token * top_k + k, ascending."""

    place: int
    positions: npt.NDArray[np.int64]


def split(ids: npt.NDArray[np.int64], owner: npt.NDArray[np.int32]) -> list[Share]:
    """Group expert ids [T, K] by `owner` [experts]; every position lands in exactly one Share.

    Shares come in ascending place order, so the same routing always splits the same way.
    """
    return group(owner[ids.reshape(-1)])


def group(places: npt.NDArray[np.integer]) -> list[Share]:
    """Group flat positions by `places` [N], the place of each; N > 0, order as of `split`."""
    order = np.argsort(places, kind="stable").astype(np.int64, copy=False)
    ordered = places[order]
    edges = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    bounds = [0, *edges.tolist(), len(order)]
    return [Share(int(ordered[low]), order[low:high]) for low, high in pairwise(bounds)]


def chunks(
    positions: npt.NDArray[np.int64], top_k: int, *, max_rows: int, max_tokens: int
) -> list[npt.NDArray[np.int64]]:
    """Cut one place's positions into dispatches that fit a slot; a token is never cut in two.

    Within a chunk tokens are renumbered by `local_tokens`.
    """
    if len(positions) <= max_rows and len(positions) <= max_tokens:
        return [positions]
    tokens = positions // top_k
    edges = np.flatnonzero(np.diff(tokens)) + 1
    groups = np.split(positions, edges)
    pieces: list[npt.NDArray[np.int64]] = []
    start, rows = 0, 0
    for index, group in enumerate(groups):
        if rows and (rows + len(group) > max_rows or index - start >= max_tokens):
            pieces.append(np.concatenate(groups[start:index]))
            start, rows = index, 0
        rows += len(group)
    pieces.append(np.concatenate(groups[start:]))
    return pieces


def local_tokens(
    positions: npt.NDArray[np.int64], top_k: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint16]]:
    """(distinct tokens of a dispatch, per pair the index into them): each token travels once.

    `positions` ascend, so equal tokens are neighbours.
    """
    tokens = positions // top_k
    if tokens[0] == tokens[-1]:
        return tokens[:1], np.zeros(len(tokens), np.uint16)
    is_first = np.ones(len(tokens), np.bool_)
    np.not_equal(tokens[1:], tokens[:-1], out=is_first[1:])
    return tokens[is_first], (np.cumsum(is_first) - 1).astype(np.uint16)
