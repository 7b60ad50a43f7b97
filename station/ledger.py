"""Exactly-once accounting of one layer of one lane. Pure: no clock, no I/O.

Theory. A layer opens with the exact set of (token, expert) pairs that the router chose. Each pair
goes PENDING -> ACCOUNTED once, whoever delivers it: the first valid row wins, later ones are
duplicates. The layer may close only when nothing is pending. Pairs are addressed by their flat
position token * top_k + k, so the combine can later sum them in top-k order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shared.core.errors import LocalProtocolError

Positions = npt.NDArray[np.int64]


class PairState(IntEnum):
    """State of one (token, expert) pair."""

    PENDING = 0
    ACCOUNTED = 1


_PENDING: Final = int(PairState.PENDING)  # numpy compares with an int ten times faster
_ACCOUNTED: Final = int(PairState.ACCOUNTED)


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
        self._flat_ids = ids.reshape(-1)
        self._state = np.zeros(ids.size, np.uint8)
        self._pending = ids.size

    @property
    def is_complete(self) -> bool:
        """Whether every pair is accounted."""
        return self._pending == 0

    @property
    def pending(self) -> Positions:
        """Flat positions that are still owed, ascending."""
        return np.flatnonzero(self._state == _PENDING)

    def experts(self, positions: Positions) -> npt.NDArray[np.int64]:
        """Expert ids at flat positions."""
        return self._flat_ids[positions]

    def pending_of(self, positions: Positions) -> Positions:
        """Those of `positions` that are still owed."""
        owed: Positions = positions[self._state[positions] == _PENDING]
        return owed

    def account(self, positions: Positions) -> Delivery:
        """Move pending positions to ACCOUNTED; each is accepted at most once, ever."""
        if not len(positions):
            return Delivery(np.zeros(0, np.bool_), 0)
        ascends = bool((positions[1:] > positions[:-1]).all())
        lowest, highest = (
            (positions[0], positions[-1]) if ascends else (positions.min(), positions.max())
        )
        if lowest < 0 or highest >= self._state.size:
            raise LocalProtocolError(f"{self.key}: position outside the layer's pairs")
        accepted = self._state[positions] == _PENDING
        if not ascends:  # ascending ones cannot repeat
            first = np.zeros(len(positions), np.bool_)
            first[np.unique(positions, return_index=True)[1]] = True
            accepted &= first
        taken = positions[accepted]
        self._state[taken] = _ACCOUNTED
        self._pending -= len(taken)
        return Delivery(accepted, len(positions) - len(taken))
