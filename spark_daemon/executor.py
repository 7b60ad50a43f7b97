"""Turns one dispatch into rows and a status per row.

Owns which bank row holds which expert and what is said about a pair that cannot be computed. Must
not know rings, sockets, clocks or threads: rows are a function of (bank, kernel, dispatch).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from shared.core.ring_layout import Pairs, Rows, RowStatus, finite_rows
from shared.kernels.expert import ExpertKernel

_NOWHERE: Final = -1


@dataclass(frozen=True, slots=True)
class Outcome:
    """Status uint8 [R] (values of RowStatus) and rows uint16 (bf16 bits) [R, latent]."""

    status: npt.NDArray[np.uint8]
    rows: Rows

    @property
    def refused(self) -> int:
        """Rows that are not OK."""
        return int(np.count_nonzero(self.status))


class BankIndex:
    """(layer, expert) -> bank row. Ids come from a peer and index nothing before a bounds check."""

    def __init__(self, rows: Sequence[tuple[int, int]]) -> None:
        """`rows` are the (layer, expert) of each bank row, in row order."""
        sizes: dict[int, int] = {}
        for layer, expert in rows:
            sizes[layer] = max(sizes.get(layer, 0), expert + 1)
        self._row_of = {layer: np.full(size, _NOWHERE, np.int32) for layer, size in sizes.items()}
        for row, (layer, expert) in enumerate(rows):
            self._row_of[layer][expert] = row

    def rows(self, layer: int, experts: npt.NDArray[np.uint16]) -> npt.NDArray[np.int32]:
        """Bank row int32 [R] of each expert id, -1 where this bank does not hold it."""
        table = self._row_of.get(layer)
        found = np.full(len(experts), _NOWHERE, np.int32)
        if table is not None:
            inside = experts < len(table)
            found[inside] = table[experts[inside]]
        return found


@dataclass(frozen=True, slots=True)
class Executor:
    """The bank in memory and the kernel that reads it in place."""

    kernel: ExpertKernel
    arena: npt.NDArray[np.uint8]
    index: BankIndex

    def run(self, layer: int, pairs: Pairs, activations: Rows) -> Outcome:
        """Compute pairs uint16 [R, 2] (token, expert) over activations bf16 bits [T, latent].

        Tokens are in range (ring_layout.parse_dispatch checked them); unknown experts and rows that
        are not finite get a status and a row of zeros.
        """
        bank_rows = self.index.rows(layer, pairs[:, 1])
        tokens = pairs[:, 0].astype(np.int32)
        rows = np.zeros((len(pairs), activations.shape[1]), np.uint16)
        self.kernel.rows(self.arena, bank_rows, tokens, activations, rows)

        status = np.where(bank_rows == _NOWHERE, RowStatus.UNKNOWN_EXPERT.value, 0).astype(np.uint8)
        broken = ~finite_rows(rows)
        if broken.any():
            status[broken] = RowStatus.NOT_FINITE.value
            rows[broken] = 0
        return Outcome(status, rows)
