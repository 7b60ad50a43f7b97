"""Second copies on their way from a placement to a node: bank, memory, executor."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from services.banks.builder import build
from services.banks.plan import bank_plan
from shared.core.placement import Placement, balanced
from shared.core.ring_layout import RowStatus
from shared.io.arena import load_arena
from shared.io.bank_file import BankFile, blake3_digest
from shared.kernels.select import select_kernel
from spark_daemon.executor import BankIndex, Executor
from tests.unit.banks.conftest import SHAPE, RandomExperts


def placed() -> Placement:
    """Two Sparks and Grace; spark1 also holds four experts that live in Grace."""
    placement = balanced(
        "model-a", SHAPE, [("grace", "grace", 2.0), ("spark0", "spark", 1), ("spark1", "spark", 1)]
    )
    grace, spark0, spark1 = placement.nodes
    copies = (grace.rows[5], grace.rows[0], grace.rows[-1], grace.rows[2])
    return msgspec.structs.replace(
        placement, nodes=(grace, spark0, msgspec.structs.replace(spark1, copies=copies))
    )


def executor(bank: BankFile) -> Executor:
    """The node's own executor over a bank in memory."""
    kernel = select_kernel(SHAPE.expert, "reference")
    return Executor(kernel, load_arena(bank).records, BankIndex(bank.header.rows))


def test_a_copy_computes_the_same_bytes_as_the_home(tmp_path: Path) -> None:
    """The bank has the copies after its own rows, and answers for both; others it refuses."""
    placement, source = placed(), RandomExperts()
    for name in ("grace", "spark1"):
        build(source, placement, name, tmp_path / f"{name}.k3bank")
    spark1, grace = placement.node("spark1"), placement.node("grace")
    size = bank_plan(placement, spark1, hasher=blake3_digest)
    assert (size.experts, size.file_bytes) == (
        len(spark1.rows) + 4, (tmp_path / "spark1.k3bank").stat().st_size,
    )  # fmt: skip

    rng = np.random.default_rng(0)
    activations = rng.integers(0x3F00, 0x3FFF, (2, SHAPE.expert.latent)).astype(np.uint16)
    with (
        BankFile.open(tmp_path / "grace.k3bank") as home_bank,
        BankFile.open(tmp_path / "spark1.k3bank") as copy_bank,
    ):
        assert copy_bank.header.rows == spark1.rows + spark1.copies
        home, copy = executor(home_bank), executor(copy_bank)
        for layer, expert in spark1.copies:
            pairs = np.array([[0, expert], [1, expert]], np.uint16)
            ours = copy.run(layer, pairs, activations)
            assert not ours.status.any()
            assert ours.rows.any()
            assert (ours.rows == home.run(layer, pairs, activations).rows).all()
        layer, expert = next(key for key in grace.rows if key not in spark1.copies)
        refused = copy.run(layer, np.array([[0, expert]], np.uint16), activations)
        assert refused.status.tolist() == [RowStatus.UNKNOWN_EXPERT.value]
