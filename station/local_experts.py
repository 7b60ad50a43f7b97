"""Experts that the Station computes itself: its own tier, and the cold store of last resort.

Both run the nodes' kernel on the checkpoint's own bytes, so a row is the same whoever computed it.
Used by the engine thread alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shared.core.record import RecordLayout
from shared.core.ring_layout import Rows
from shared.core.shape import ExpertShape
from shared.kernels.expert import ExpertKernel

Ids = npt.NDArray[np.int64]


class RecordSource(Protocol):
    """Where an expert's bytes can always be had: the original checkpoint."""

    def expert_record(self, layer: int, expert: int) -> bytes:
        """The 12 tensors in RecordLayout order."""


class LocalTier:
    """Resident experts of the Station: one arena, filled once."""

    def __init__(
        self,
        kernel: ExpertKernel,
        shape: ExpertShape,
        source: RecordSource,
        experts: Iterable[tuple[int, int]],
    ) -> None:
        """Read every (layer, expert) of `experts` into the arena."""
        keys = list(experts)
        self._kernel = kernel
        self._arena = np.zeros((len(keys), RecordLayout(shape).stride_bytes), np.uint8)
        self._row = {key: row for row, key in enumerate(keys)}
        for key, row in self._row.items():
            record = source.expert_record(*key)
            self._arena[row, : len(record)] = np.frombuffer(record, np.uint8)

    def __len__(self) -> int:
        """Experts held."""
        return len(self._row)

    def rows(self, layer: int, experts: Ids, tokens: Ids, activations: Rows) -> Rows:
        """Unweighted rows uint16 [P, latent] (bf16 bits) of P (expert, token) pairs."""
        arena_rows = np.array([self._row[layer, int(expert)] for expert in experts], np.int32)
        return _run(self._kernel, self._arena, arena_rows, tokens, activations)


class ColdStore:
    """Any expert of the model, read from the checkpoint when it is needed; keeps the latest few."""

    def __init__(
        self, kernel: ExpertKernel, shape: ExpertShape, source: RecordSource, *, capacity: int
    ) -> None:
        """`capacity` bounds the records kept: capacity x stride bytes of memory."""
        self._kernel = kernel
        self._source = source
        self._arena = np.zeros((capacity, RecordLayout(shape).stride_bytes), np.uint8)
        self._row: OrderedDict[tuple[int, int], int] = OrderedDict()
        self.records_read = 0

    def rows(self, layer: int, experts: Ids, tokens: Ids, activations: Rows) -> Rows:
        """Unweighted rows uint16 [P, latent] (bf16 bits) of P (expert, token) pairs."""
        out = np.empty((len(experts), activations.shape[1]), np.uint16)
        wanted = np.unique(experts)
        for start in range(0, len(wanted), len(self._arena)):
            part = wanted[start : start + len(self._arena)]
            row_of = {int(expert): self._fetch(layer, int(expert)) for expert in part}
            chosen = np.flatnonzero(np.isin(experts, part))
            arena_rows = np.array([row_of[int(expert)] for expert in experts[chosen]], np.int32)
            out[chosen] = _run(self._kernel, self._arena, arena_rows, tokens[chosen], activations)
        return out

    def _fetch(self, layer: int, expert: int) -> int:
        key = (layer, expert)
        if key in self._row:
            self._row.move_to_end(key)
            return self._row[key]
        # read before anything is evicted: a read that fails must not cost a row of the arena
        record = self._source.expert_record(layer, expert)
        if len(self._row) < len(self._arena):
            row = len(self._row)
        else:
            _, row = self._row.popitem(last=False)
        self._arena[row, : len(record)] = np.frombuffer(record, np.uint8)
        self._row[key] = row
        self.records_read += 1
        return row


def _run(
    kernel: ExpertKernel,
    arena: npt.NDArray[np.uint8],
    arena_rows: npt.NDArray[np.int32],
    tokens: Ids,
    activations: Rows,
) -> Rows:
    out = np.empty((len(arena_rows), activations.shape[1]), np.uint16)
    kernel.rows(arena, arena_rows, tokens.astype(np.int32), activations, out)
    return out
