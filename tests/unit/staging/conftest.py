"""Built banks of three sizes, and a service that serves copies of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from services.banks.builder import build
from shared.core.placement import PlacedNode, Placement
from shared.core.record import RecordLayout
from shared.core.shape import ExpertShape, ModelShape
from tests.support.bank_host import BankHost
from tests.support.expert_records import expert_record

MODEL = "model-a"
SMALL = ExpertShape(latent=256, width=128)  # 55 kB a record, 24 records
WIDE = ExpertShape(latent=1024, width=1024)  # 1.8 MB, more than one range


class Experts:
    """An ExpertSource of random records; one random record and its row's number in front."""

    digest = MODEL

    def __init__(self, shape: ExpertShape) -> None:
        self.layout = RecordLayout(shape)
        self._record = expert_record(shape, 1)

    def read_expert_record(self, layer: int, expert: int, buffer: memoryview) -> None:
        record = self._record.copy()
        record[:4] = np.frombuffer(np.uint32(1000 * layer + expert).tobytes(), np.uint8)
        buffer[:] = record.tobytes()

    def stored_hash(self, layer: int, expert: int) -> None:
        """Records are stored as they are."""

    def position(self, layer: int, expert: int) -> tuple[str, int]:
        return "", 0

    def release(self, experts: Sequence[tuple[int, int]]) -> None:
        """Nothing is cached."""


def placement(shape: ExpertShape, experts: int) -> Placement:
    """Every expert of two layers on spark0, the last ones first."""
    rows = tuple((layer, expert) for expert in reversed(range(experts)) for layer in (2, 1))
    return Placement(
        version=1,
        model_digest=MODEL,
        shape=ModelShape(layers=3, first_moe_layer=1, experts=experts, top_k=2, expert=shape),
        policy="test",
        nodes=(PlacedNode(name="spark0", tier="spark", rows=rows),),
    )


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of banks of node spark0: NAME/spark0.k3bank for small, other, interleaved, wide."""
    root = tmp_path_factory.mktemp("built")
    for name, shape, experts, layout, producer in (
        ("small", SMALL, 12, "row-major", "test"),
        ("other", SMALL, 12, "row-major", "another build"),
        ("interleaved", SMALL, 12, "interleaved-4", "test"),
        ("wide", WIDE, 2, "row-major", "test"),
    ):
        path = root / name / "spark0.k3bank"
        path.parent.mkdir()
        build(
            Experts(shape),
            placement(shape, experts),
            "spark0",
            path,
            layout=layout,
            producer=producer,
        )
    return root


@pytest.fixture
def host(tmp_path: Path, built: Path) -> Iterator[BankHost]:
    """A running service with the small bank."""
    folder = tmp_path / "served"
    folder.mkdir()
    shutil.copy(built / "small" / "spark0.k3bank", folder)
    made = BankHost(tmp_path, folder)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Where the node wants its bank."""
    folder = tmp_path / "node"
    folder.mkdir()
    return folder / "spark0.k3bank"
