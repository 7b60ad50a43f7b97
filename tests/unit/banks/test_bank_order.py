"""Banks in either record order: built, verified by tensor, resumed, shown, and never confused."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from services.banks.builder import build, journal_path
from services.banks.plan import ORDER_OF_TIER, LayoutChoice, bank_plan, record_order
from services.banks.verify import verify_against
from services.cli import k3
from shared.core.errors import BankError, CheckpointError
from shared.core.placement import PlacedNode, Placement
from shared.core.record import RecordLayout
from shared.core.record_order import reorder
from shared.core.shape import K3, ExpertShape, ModelShape
from shared.io.bank_file import BankFile, FaultKind, blake3_digest, verify
from shared.io.record_journal import count_finished
from shared.kernels.select import select_kernel
from tests.support.expert_records import activations, expert_record, tensor
from tests.support.tiny_checkpoint import Layout, write_tiny_checkpoint

# several chunks and several groups in every matrix: with one chunk both orders would be one
SHAPE = ModelShape(
    layers=2, first_moe_layer=1, experts=8, top_k=2, expert=ExpertShape(latent=256, width=384)
)
STORED, WANTED = RecordLayout(SHAPE.expert), RecordLayout(SHAPE.expert, "interleaved-4")
ROWS = tuple((1, expert) for expert in (5, 0, 7, 2, 1, 6, 3, 4))


class Experts:
    """An ExpertSource of records in the checkpoint's order; counts what was read."""

    digest = "model-o"
    layout = STORED

    def __init__(self, *, stop_after: int | None = None) -> None:
        self.read: list[int] = []
        self.stop_after = stop_after
        self.lock = threading.Lock()

    def expert_record(self, expert: int) -> np.ndarray:
        return expert_record(SHAPE.expert, 100 + expert)

    def read_expert_record(self, _layer: int, expert: int, buffer: memoryview) -> None:
        with self.lock:
            if len(self.read) == self.stop_after:
                os.kill(os.getpid(), signal.SIGKILL)
            self.read.append(expert)
        buffer[:] = self.expert_record(expert).tobytes()

    def stored_hash(self, _layer: int, _expert: int) -> None:
        """Records are stored as they are."""

    def position(self, _layer: int, _expert: int) -> tuple[str, int]:
        return "", 0

    def release(self, experts: Sequence[tuple[int, int]]) -> None:
        """Nothing is cached."""


@pytest.fixture
def placement() -> Placement:
    """The same experts on a GPU node's and on a CPU node's terms."""
    return Placement(
        version=2, model_digest="model-o", shape=SHAPE, policy="test",
        nodes=(
            PlacedNode(name="grace", tier="grace", rows=ROWS[:7]),
            PlacedNode(name="spark0", tier="spark", rows=ROWS[7:]),
        ),
    )  # fmt: skip


@pytest.fixture
def bank(tmp_path: Path, placement: Placement) -> Path:
    """The interleaved bank of node grace."""
    path = tmp_path / "grace.k3bank"
    build(Experts(), placement, "grace", path)
    return path


def records_of(path: Path) -> np.ndarray:
    """All records of a bank, uint8 [rows, stride_bytes]."""
    with BankFile.open(path) as opened:
        arena = np.empty((opened.rows, opened.layout.stride_bytes), np.uint8)
        opened.read_into(0, arena.data.cast("B"))
    return arena


def test_auto_asks_the_kind_of_the_node(placement: Placement) -> None:
    """GPUs read rows, the CPU kernel groups of four; a shape that has no such groups stays as it
    is unless the order was asked for by name."""
    assert ORDER_OF_TIER == {
        "hbm": "row-major", "rtx": "row-major", "spark": "row-major", "grace": "interleaved-4",
    }  # fmt: skip
    assert record_order("auto", "grace", K3.expert) == "interleaved-4"
    assert record_order("auto", "spark", K3.expert) == "row-major"
    assert record_order("interleaved-4", "spark", K3.expert) == "interleaved-4"
    assert record_order("row-major", "grace", K3.expert) == "row-major"
    small = ExpertShape(latent=128, width=64)
    assert record_order("auto", "grace", small) == "row-major"
    with pytest.raises(BankError, match=r"latent 128 and width 64 .* use row-major, or auto"):
        record_order("interleaved-4", "grace", small)
    plans = [bank_plan(placement, node, hasher=blake3_digest) for node in placement.nodes]
    assert [plan.layout for plan in plans] == ["interleaved-4", "row-major"]


def test_interleaved_bank_holds_the_permuted_records(bank: Path) -> None:
    """Each record is the checkpoint's, permuted; each hash is of the bytes it stands for."""
    arena = records_of(bank)
    with BankFile.open(bank) as opened:
        header = opened.header
        assert [fault for _, fault in verify(opened) if fault] == []
        assert [fault for _, fault in verify_against(opened, Experts()) if fault] == []
    assert header.layout == "interleaved-4"
    for row, (_, expert) in enumerate(ROWS[:7]):
        stored = Experts().expert_record(expert)
        expected = np.empty_like(stored)
        reorder(stored, STORED, expected, WANTED)
        assert np.array_equal(arena[row, : len(stored)], expected)
        assert not arena[row, len(stored) :].any()
        assert header.record_hashes[row] == blake3_digest(expected.data).hex()
        assert header.source_hashes[row] == blake3_digest(stored.data).hex()


def test_both_orders_give_the_same_rows(tmp_path: Path, placement: Placement, bank: Path) -> None:
    """End to end: a bank in either order under the kernel its header asks for, bit for bit."""
    plain = tmp_path / "plain" / "grace.k3bank"
    plain.parent.mkdir()
    build(Experts(), placement, "grace", plain, layout="row-major")
    found = []
    for path in (bank, plain):
        with BankFile.open(path) as opened:
            kernel = select_kernel(opened.header.shape, "int16", opened.header.layout)
        out = np.empty((14, 256), np.uint16)
        pairs = np.arange(14, dtype=np.int32)
        kernel.rows(records_of(path), pairs % 7, pairs // 7, activations(2, 256, seed=1), out)
        found.append(out)
    assert np.array_equal(found[0], found[1])
    assert not np.array_equal(records_of(bank), records_of(plain))


@pytest.fixture(params=["nvfp4", "mxfp4"])
def built(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint and an interleaved bank of it, by the command."""
    stored: Layout = request.param
    folder = tmp_path / "checkpoint"
    write_tiny_checkpoint(folder, seed=5, layout=stored, layers=2, experts=3, latent=256, width=128)
    made = run(
        "build", "--checkpoint", folder, "--split", "plain", "--sparks", 1, "--node", "spark0",
        "--layout", "interleaved-4", "--out-dir", tmp_path,
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    assert "interleaved-4)" in made.output
    return folder, tmp_path / "spark0.k3bank"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(k3, ["bank", *(str(argument) for argument in arguments)])


def test_the_command_builds_verifies_and_shows_it(built: tuple[Path, Path]) -> None:
    """From real shards of either format; show, ls and plan name the order."""
    checkpoint, path = built
    verified = run("verify", path, "--source", checkpoint)
    assert verified.exit_code == 0, verified.output
    assert f"intact and equal to {checkpoint}" in verified.output
    assert json.loads(run("show", "--json", path).output)["layout"] == "interleaved-4"
    assert json.loads(run("ls", "--json", path.parent).output)[0]["layout"] == "interleaved-4"
    assert "3 interleaved-4 records for node spark0" in run("ls", path.parent).output
    planned = run("plan", "--split", "plain", "--layout", "interleaved-4")
    assert planned.output.splitlines()[1].split()[-1] == "interleaved-4"
    with BankFile.open(path) as opened:
        header = opened.header
    assert set(header.source_hashes).isdisjoint(header.record_hashes)


def test_flipped_byte_is_named_in_the_checkpoints_terms(built: tuple[Path, Path]) -> None:
    """Byte 64 of an interleaved w1.weight is the first byte of output 1: byte 128 of the stored
    tensor, which has 128 bytes an output."""
    checkpoint, path = built
    with BankFile.open(path) as opened:
        at = opened.records_offset + opened.layout.stride_bytes + 64
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)
    result = run("verify", path, "--source", checkpoint)
    assert result.exit_code == 78
    assert "row 1 (layer 1, expert 1): the bytes of w1.weight changed" in result.output
    assert "differs from the checkpoint in w1.weight (1 bytes, first 128)" in result.output


class Changed(Experts):
    """One byte of a stored scale is not what it was."""

    def expert_record(self, expert: int) -> np.ndarray:
        record = super().expert_record(expert)
        if expert == 2:
            tensor(STORED, record, "w3.weight_scale")[37] ^= 1
        return record


def test_changed_checkpoint_is_told_from_a_damaged_bank(bank: Path) -> None:
    """The source hash is of the stored order, so a checkpoint is recognised whatever the bank's."""
    with BankFile.open(bank) as opened:
        found = [fault for _, fault in verify_against(opened, Changed()) if fault]
    assert [(fault.expert, fault.kind) for fault in found] == [(2, FaultKind.SOURCE_CHANGED)]
    assert "w3.weight_scale (1 bytes, first 37)" in found[0].detail


def killed_build(placement: Placement, path: Path, layout: LayoutChoice) -> int:
    """Build in a child that is killed at its sixth record; how many its journal promises."""
    child = os.fork()
    if child == 0:
        try:
            source = Experts(stop_after=5)
            build(source, placement, "grace", path, layout=layout, keep_partial=True, workers=1)
        finally:
            os._exit(3)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    return count_finished(journal_path(path))


def test_killed_build_is_resumed(tmp_path: Path, placement: Placement, bank: Path) -> None:
    """SIGKILL in the sixth record: five are kept, and the file is that of an undisturbed build."""
    path = tmp_path / "again" / "grace.k3bank"
    path.parent.mkdir()
    assert killed_build(placement, path, "interleaved-4") == 5
    source = Experts()
    build(source, placement, "grace", path)
    assert source.read == [ROWS[5][1], ROWS[6][1]]
    assert path.read_bytes() == bank.read_bytes()


def test_records_of_another_order_are_not_resumed(
    tmp_path: Path, placement: Placement, bank: Path
) -> None:
    """The journal of a row-major build is of no use to an interleaved one."""
    path = tmp_path / "again" / "grace.k3bank"
    path.parent.mkdir()
    assert killed_build(placement, path, "row-major") == 5
    source = Experts()
    build(source, placement, "grace", path)
    assert len(source.read) == 7
    assert path.read_bytes() == bank.read_bytes()


def test_failed_build_names_the_scale_in_the_checkpoints_terms(
    tmp_path: Path, placement: Placement
) -> None:
    """Scales are checked before they are permuted, and the second buffer goes with a failure."""

    class Negative(Experts):
        def expert_record(self, expert: int) -> np.ndarray:
            record = super().expert_record(expert)
            tensor(STORED, record, "w1.weight_scale")[16 + 3] = 0x81
            return record

    with pytest.raises(CheckpointError, match=r"w1\.weight_scale\[1, 3\] is E4M3 byte 0x81"):
        build(Negative(), placement, "grace", tmp_path / "grace.k3bank")
    assert list(tmp_path.iterdir()) == []


def test_order_is_covered_by_the_digest(bank: Path) -> None:
    """Naming another order in place is a damaged header, never other rows."""
    data = bank.read_bytes()
    at = data.index(b'"layout":"interleaved-4"')
    forged = b'"layout":"row-major"' + b"    "  # JSON allows the blanks
    bank.write_bytes(data[:at] + forged + data[at + len(forged) :])
    with pytest.raises(BankError, match="the header does not match its BLAKE3"):
        BankFile.open(bank)
