"""Who computes what: a layer's chosen experts grouped by the place that holds them. Pure."""

from __future__ import annotations

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
    places = owner[ids.reshape(-1)]
    order = np.argsort(places, kind="stable")
    found, starts = np.unique(places[order], return_index=True)
    parts = np.split(order, starts[1:])
    return [
        Share(int(place), part.astype(np.int64)) for place, part in zip(found, parts, strict=True)
    ]


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
    """(distinct tokens of a dispatch, per pair the index into them): each token travels once."""
    tokens, index = np.unique(positions // top_k, return_inverse=True)
    return tokens, index.astype(np.uint16)
