"""Which of an expert's holders computes it, token by token: its home or a copy. Pure.

Owns who holds what and which of them serve now. The choice between two that serve is the planner's
own rule (shared/core/copy_choice.py) with the costs the plan reckoned with; without costs a copy is
used only when the home does not serve. Must not know leases, rings or why a place does not serve.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from shared.core.copy_choice import choose_of_token, place_table
from shared.core.placement import NOWHERE, Placement

PlacesOf = npt.NDArray[np.int32]


class Copies:
    """Holders of every expert of a placement; home and copies are places of it."""

    def __init__(self, placement: Placement) -> None:
        """Nobody serves yet. `home` int32 [layers, experts]: place of each expert."""
        self._holders: PlacesOf = placement.holders()
        self.home: PlacesOf = self._holders[0]
        nodes = placement.nodes
        self._table = (
            place_table(
                [node.fixed_us for node in nodes],
                [node.per_expert_us for node in nodes],
                placement.shape.top_k,
            )
            if placement.has_costs
            else None
        )
        is_copied = (self._holders[1:] != NOWHERE).any(axis=0)
        self._copied = np.nonzero(is_copied)
        self._is_in: list[bool] = is_copied.any(axis=1).tolist()
        # one entry more than places, for NOWHERE, which never serves
        self._serves = np.zeros(len(nodes) + 1, np.bool_)
        self._first = self.home.copy()  # the home, or the copy that stands in for it
        self._second: PlacesOf = np.full_like(self.home, NOWHERE)  # what may be chosen instead

    def is_in(self, layer: int) -> bool:
        """Whether an expert of the layer has a copy; where none has, homes are all there is."""
        return self._is_in[layer]

    def serve(self, places: Iterable[int]) -> None:
        """From now on these places serve, and no others."""
        self._serves[:] = False
        self._serves[list(places)] = True
        held = self._holders[:, self._copied[0], self._copied[1]]
        serves = self._serves[held]
        at = np.arange(held.shape[1])
        first = serves.argmax(axis=0)  # the home, where nobody serves
        serves[first, at] = False
        second = serves.argmax(axis=0)
        self._first[self._copied] = held[first, at]
        self._second[self._copied] = np.where(serves[second, at], held[second, at], NOWHERE)

    def choose(self, layer: int, ids: npt.NDArray[np.int64]) -> PlacesOf:
        """Place of every pair of expert ids [T, K]: int32 [T * K], each token by itself."""
        first: PlacesOf = self._first[layer][ids]
        if self._table is None:
            return first.reshape(-1)
        second = self._second[layer][ids]
        chosen = [
            choose_of_token(homes, copies, self._table)
            for homes, copies in zip(first.tolist(), second.tolist(), strict=True)
        ]
        return np.array(chosen, np.int32).reshape(-1)

    def other(
        self, layer: int, experts: npt.NDArray[np.int64], asked: npt.NDArray[np.bool_]
    ) -> PlacesOf:
        """A holder that serves and was not asked, of each of experts [N]: int32 [N], -1 where none.

        asked bool [N, places]. Homes come first, then copies in the order of the nodes.
        """
        held = self._holders[:, layer, experts]
        at = np.arange(len(experts))
        can = self._serves[held] & ~asked[at, held]
        rank = can.argmax(axis=0)
        found: PlacesOf = np.where(can[rank, at], held[rank, at], np.int32(NOWHERE))
        return found

    def are_copies(
        self, layer: int, experts: npt.NDArray[np.int64], places: PlacesOf
    ) -> npt.NDArray[np.bool_]:
        """Whether places [N], holders of experts [N], hold them as copies: bool [N]."""
        elsewhere: npt.NDArray[np.bool_] = self.home[layer][experts] != places
        return elsewhere
