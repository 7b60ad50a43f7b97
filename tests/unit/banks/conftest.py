"""A small model without a checkpoint: random records by (layer, expert), and one built bank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from services.banks.builder import build
from shared.core.placement import PlacedNode, Placement
from shared.core.record import RecordLayout
from shared.core.shape import ExpertShape, ModelShape
from tests.support.expert_records import expert_record

SHAPE = ModelShape(
    layers=3, first_moe_layer=1, experts=12, top_k=2, expert=ExpertShape(latent=48, width=32)
)


class RandomExperts:
    """An ExpertSource whose records follow from their names, in any order of asking."""

    digest = "model-a"
    layout = RecordLayout(SHAPE.expert)

    def expert_record(self, layer: int, expert: int) -> bytes:
        """The record of one expert."""
        return expert_record(SHAPE.expert, 1000 * layer + expert).tobytes()

    def read_expert_record(self, layer: int, expert: int, buffer: memoryview) -> None:
        """The same into a buffer."""
        buffer[:] = self.expert_record(layer, expert)

    def stored_hash(self, layer: int, expert: int) -> None:
        """Records are stored as they are."""

    def position(self, layer: int, expert: int) -> tuple[str, int]:
        """All at one place: any order is as good as another."""
        return "", 0

    def release(self, experts: Sequence[tuple[int, int]]) -> None:
        """Nothing is cached."""


@pytest.fixture
def source() -> RandomExperts:
    """The model."""
    return RandomExperts()


@pytest.fixture
def placement() -> Placement:
    """Two nodes; rows neither in numeric nor in lexicographic order."""
    keys = [(layer, expert) for expert in reversed(range(12)) for layer in (2, 1)]
    return Placement(
        version=2,
        model_digest="model-a",
        shape=SHAPE,
        policy="test",
        nodes=(
            PlacedNode(name="spark0", tier="spark", rows=tuple(keys[0::2])),
            PlacedNode(name="grace", tier="grace", rows=tuple(keys[1::2])),
        ),
    )


@pytest.fixture
def bank_path(tmp_path: Path, source: RandomExperts, placement: Placement) -> Path:
    """The bank of node spark0."""
    path = tmp_path / "spark0.k3bank"
    build(source, placement, "spark0", path)
    return path
