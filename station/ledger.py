"""Exactly-once accounting of one layer of one lane. Pure: no clock, no I/O.

Theory. A layer opens with the exact set of (token, expert) pairs that the router chose. Each pair
goes PENDING -> ACCOUNTED once, whoever delivers it: the first valid row wins, later ones are
duplicates. The layer may close only when nothing is pending. Pairs are addressed by their flat
position token * top_k + k, so the combine can later sum them in top-k order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shared.core.errors import LocalProtocolError

Positions = npt.NDArray[np.int64]


class PairState(IntEnum):
    """State of one (token, expert) pair."""

    PENDING = 0
    ACCOUNTED = 1


class WorkKey(NamedTuple):
    """What a layer's rows are accounted against."""

    request_id: str
    step: int
    layer: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """What `account` decided: which of the offered rows to keep, how many were duplicates."""

    accepted: npt.NDArray[np.bool_]
    duplicates: int


class LayerLedger:
    """The account of one (request, step, layer)."""

    def __init__(self, key: WorkKey, ids: npt.NDArray[np.int64]) -> None:
        """`ids` int64 [T, K]: the router's choice; ids of one token are distinct."""
        ordered = np.sort(ids, axis=1)
        if ids.size == 0 or (ordered[:, 1:] == ordered[:, :-1]).any():
            raise LocalProtocolError(f"{key}: a layer opens with distinct experts per token")
        self.key = key
        self._ids = ids
        self._state = np.zeros(ids.size, np.uint8)
        self._pending = ids.size

    @property
    def is_complete(self) -> bool:
        """Whether every pair is accounted."""
        return self._pending == 0

    @property
    def pending(self) -> Positions:
        """Flat positions that are still owed, ascending."""
        return np.flatnonzero(self._state == PairState.PENDING)

    def experts(self, positions: Positions) -> npt.NDArray[np.int64]:
        """Expert ids at flat positions."""
        return self._ids.reshape(-1)[positions]

    def pending_of(self, positions: Positions) -> Positions:
        """Those of `positions` that are still owed."""
        owed: Positions = positions[self._state[positions] == PairState.PENDING]
        return owed

    def account(self, positions: Positions) -> Delivery:
        """Move pending positions to ACCOUNTED; each is accepted at most once, ever."""
        if len(positions) and (positions.min() < 0 or positions.max() >= self._state.size):
            raise LocalProtocolError(f"{self.key}: position outside the layer's pairs")
        accepted = self._state[positions] == PairState.PENDING
        first = np.zeros(len(positions), np.bool_)
        first[np.unique(positions, return_index=True)[1]] = True
        accepted &= first
        taken = positions[accepted]
        self._state[taken] = PairState.ACCOUNTED
        self._pending -= len(taken)
        return Delivery(accepted, len(positions) - len(taken))
