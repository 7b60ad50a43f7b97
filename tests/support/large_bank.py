"""Banks of many bytes that are made quickly: their records are valid, but they are no experts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from services.banks.builder import build
from shared.core.placement import balanced
from shared.core.record import RecordLayout
from shared.core.shape import ExpertShape, ModelShape

_SCALARS = np.full(6, 0.01, "<f4").tobytes()  # random ones would give rows that are not finite


class BlockExperts:
    """Experts whose records are pieces of one random block of valid bytes."""

    digest = "block-model"

    def __init__(self, shape: ExpertShape) -> None:
        self.layout = RecordLayout(shape)
        size = self.layout.record_bytes + 4096
        self.block = np.random.default_rng(3).integers(1, 0x7F, size, np.uint8).tobytes()

    def read_expert_record(self, layer: int, expert: int, buffer: memoryview) -> None:
        """The record of one expert, into a buffer."""
        size = self.layout.record_bytes - len(_SCALARS)
        buffer[:] = self.block[expert : expert + size] + _SCALARS

    def stored_hash(self, layer: int, expert: int) -> None:
        """Records are stored as they are."""

    def position(self, layer: int, expert: int) -> tuple[str, int]:
        """All at one place: any order is as good as another."""
        return "", 0

    def release(self, experts: Sequence[tuple[int, int]]) -> None:
        """Nothing is cached."""


def build_large_bank(path: Path, shape: ExpertShape, records: int) -> None:
    """The bank of node spark0, which holds `records` experts of `shape`; not in the page cache."""
    model = ModelShape(2, 1, records, 2, shape)
    placement = balanced(BlockExperts.digest, model, [("spark0", "spark", 1.0)])
    build(BlockExperts(shape), placement, "spark0", path)
