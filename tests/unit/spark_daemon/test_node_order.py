"""A real node process whose bank has the CPU kernel's record order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from services.banks.builder import build
from services.banks.goldens import check_goldens
from shared.core import wire
from shared.core.placement import balanced
from shared.core.record import RecordLayout, RecordOrder
from shared.core.ring_layout import RingShape
from shared.core.shape import ExpertShape, ModelShape
from shared.io import keys
from shared.io.bank_file import BankFile
from shared.kernels import canary
from shared.kernels.select import select_kernel
from tests.support.expert_records import activations, arena_of, expert_record
from tests.support.fake_station import Home, NodeProcess, station
from tests.support.tampered_bank import rewrite_header

SHAPE = ModelShape(2, 1, 4, 2, ExpertShape(latent=256, width=384))
RING = RingShape(slots=2, max_tokens=4, max_rows=8, latent=256)


class Experts:
    """Four experts as a checkpoint stores them."""

    digest = "wide-model"
    layout = RecordLayout(SHAPE.expert)

    def read_expert_record(self, _layer: int, expert: int, buffer: memoryview) -> None:
        buffer[:] = expert_record(SHAPE.expert, expert).tobytes()

    def stored_hash(self, _layer: int, _expert: int) -> None:
        """Records are stored as they are."""

    def position(self, _layer: int, _expert: int) -> tuple[str, int]:
        return "", 0

    def release(self, experts: Sequence[tuple[int, int]]) -> None:
        """Nothing is cached."""


def thread_names(pid: int) -> list[str]:
    return [comm.read_text().strip() for comm in Path(f"/proc/{pid}/task").glob("*/comm")]


@pytest.mark.asyncio
@pytest.mark.parametrize("threads", [1, 3])
async def test_rows_of_an_interleaved_bank_are_those_of_the_checkpoint(
    tmp_path: Path, threads: int
) -> None:
    """Canary and rows equal what the kernel makes of the stored order on one thread; the node's own
    canary, which asks the reference kernel, lets it serve."""
    keys.create(tmp_path / "station", "station")
    keys.create(tmp_path / "nodes", "spark0")
    home = Home(tmp_path, "spark0")
    placement = balanced(Experts.digest, SHAPE, [("spark0", "spark", 1.0)])
    header = build(Experts(), placement, "spark0", home.bank, layout="interleaved-4")
    arena = arena_of(SHAPE.expert, [expert_record(SHAPE.expert, e) for _, e in header.rows])
    kernel = select_kernel(SHAPE.expert)
    z = activations(2, 256, seed=1)
    pairs = np.array([(token, expert) for token in range(2) for expert in range(4)], np.uint16)
    row_of = header.row_of()
    bank_rows = np.array([row_of[1, int(expert)] for expert in pairs[:, 1]], np.int32)
    expected = np.zeros((8, 256), np.uint16)
    kernel.rows(arena, bank_rows, pairs[:, 0].astype(np.int32), z, expected)
    async with station(home) as fake:
        command = home.command(fake.link.address, "--kernel-threads", str(threads))
        node = NodeProcess.start(command, tmp_path / "node.log")
        try:
            await fake.expect(wire.Hello)
            lease = fake.offer(1, ring_shape=RING)
            await fake.grant(lease)
            lease.dispatch(0, 1, 1, pairs, z)
            _, got_pairs, status, rows = await fake.answer(lease, 0, 1)
            names = thread_names(node.process.pid)
        finally:
            node.kill()

    assert header.layout == "interleaved-4"
    assert lease.canary_row == canary.canary_row(kernel, arena, 0, 5).tobytes()
    assert np.array_equal(got_pairs, pairs)
    assert not status.any()
    assert np.array_equal(rows, expected)
    assert names.count("k3-kernel") == threads - 1


@pytest.mark.asyncio
@pytest.mark.parametrize("built", ["row-major", "interleaved-4"])
async def test_a_bank_that_names_the_wrong_order_fails_its_canary(
    tmp_path: Path, built: RecordOrder
) -> None:
    """A header changed by hand, digest and all: every hash is right, and kernel and reference agree
    with each other. The goldens, which the checkpoint's bytes gave, do not: the node ends before a
    Station hears of it, and `k3 bank verify` would have said so."""
    keys.create(tmp_path / "station", "station")
    keys.create(tmp_path / "nodes", "spark0")
    home = Home(tmp_path, "spark0")
    placement = balanced(Experts.digest, SHAPE, [("spark0", "spark", 1.0)])
    build(Experts(), placement, "spark0", home.bank, layout=built)
    other: RecordOrder = "row-major" if built == "interleaved-4" else "interleaved-4"
    header = rewrite_header(home.bank, lambda old: msgspec.structs.replace(old, layout=other))
    with BankFile.open(home.bank) as opened:
        assert opened.header.layout == other, "nothing but the header says so"
        assert {fault.row for fault in check_goldens(opened)} == set(range(len(header.rows)))
    async with station(home) as fake:
        node = NodeProcess.start(home.command(fake.link.address), tmp_path / "node.log")
        try:
            assert await node.wait() == 78
            assert fake.inbox.empty()
        finally:
            node.kill()
    assert "the record has its hash but not its golden" in node.events()[1]["error"]
