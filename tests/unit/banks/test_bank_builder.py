"""The builder: right records in right rows, all or nothing, and damage refused by name."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from services.banks.builder import build
from shared.core import placement as placements
from shared.core.errors import BankError, CheckpointError, DigestMismatch, MeshError, PlacementError
from shared.core.placement import PlacedNode, Placement
from shared.core.record import RecordLayout
from shared.core.shape import ExpertShape
from shared.io.arena import load_arena
from shared.io.bank_file import BankFile, verify
from station.model.checkpoint import Checkpoint
from tests.support.expert_records import tensor
from tests.support.tiny_checkpoint import write_tiny_checkpoint
from tests.unit.banks.conftest import SHAPE, RandomExperts

ROOT = Path(__file__).parents[3]


def test_header_says_what_was_built(bank_path: Path, placement: Placement) -> None:
    """Names, digests, shape and the placement's row order are in the file."""
    with BankFile.open(bank_path) as bank:
        header = bank.header
    assert (header.name, header.node, header.tier) == ("spark0", "spark0", "spark")
    assert header.model_digest == "model-a"
    assert header.placement_digest == placement.digest
    assert header.shape == SHAPE.expert
    assert header.rows == placement.node("spark0").rows
    assert header.row_of()[header.rows[5]] == 5


def test_equal_inputs_give_equal_files(
    tmp_path: Path, bank_path: Path, source: RandomExperts, placement: Placement
) -> None:
    """A bank can be compared by its bytes; another node's differs."""
    again = tmp_path / "again" / "spark0.k3bank"
    again.parent.mkdir()
    build(source, placement, "spark0", again)
    assert again.read_bytes() == bank_path.read_bytes()
    other = tmp_path / "grace.k3bank"
    build(source, placement, "grace", other)
    with BankFile.open(bank_path) as a, BankFile.open(other) as b:
        assert a.digest != b.digest


def test_records_are_mapped_by_name(tmp_path: Path) -> None:
    """B1: 12 experts stored as 0, 1, 10, 11, 2, ... in several shards: every record is its own."""
    write_tiny_checkpoint(tmp_path, seed=3, layers=3, experts=12, latent=32, width=48)
    with Checkpoint.open(tmp_path) as checkpoint:
        shape = checkpoint.config.shape
        rows = tuple((layer, expert) for layer in shape.moe_layers for expert in range(12))
        node = PlacedNode(name="all", tier="hbm", rows=rows)
        plan = Placement(
            version=2, model_digest=checkpoint.digest, shape=shape, policy="all", nodes=(node,)
        )
        path = tmp_path / "all.k3bank"
        build(checkpoint, plan, "all", path)
        with BankFile.open(path) as bank:
            arena, layout = load_arena(bank).records, bank.layout
    stored = stored_tensors(tmp_path)
    for row, (layer, expert) in enumerate(rows):
        prefix = f"language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}"
        for field in layout.fields:
            ours = arena[row, field.offset : field.offset + field.length].tobytes()
            assert ours == stored[f"{prefix}.{field.name}"], (layer, expert, field.name)


def stored_tensors(checkpoint: Path) -> dict[str, bytes]:
    """Bytes of every tensor by name, read here without the product's reader."""
    found: dict[str, bytes] = {}
    for shard in checkpoint.glob("*.safetensors"):
        data = shard.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                low, high = entry["data_offsets"]
                found[name] = data[start + low : start + high]
    return found


@pytest.mark.parametrize("backwards", [False, True])
def test_order_of_directory_entries_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backwards: bool
) -> None:
    """B2: listed forwards or backwards, a checkpoint gives the bank with these bytes."""
    folder = write_tiny_checkpoint(tmp_path / "c", seed=4, layers=3, experts=4, latent=32, width=32)
    listdir, scandir = os.listdir, os.scandir

    def sorted_scandir(path: Path) -> contextlib.AbstractContextManager:
        entries = sorted(scandir(path), key=lambda entry: entry.name, reverse=backwards)
        return contextlib.nullcontext(iter(entries))

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", sorted_scandir)
        patched.setattr(os, "listdir", lambda path: sorted(listdir(path), reverse=backwards))
        with Checkpoint.open(folder) as checkpoint:
            plan = placements.balanced(
                checkpoint.digest, checkpoint.config.shape, [("n", "spark", 1.0)]
            )
            build(checkpoint, plan, "n", tmp_path / "n.k3bank")
    with BankFile.open(tmp_path / "n.k3bank") as bank:
        arena = load_arena(bank).records
    stored = stored_tensors(folder)
    for row, (layer, expert) in enumerate(bank.header.rows):
        name = f"language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight"
        assert arena[row, : len(stored[name])].tobytes() == stored[name]


def test_assumed_stride_takes_the_wrong_expert(tmp_path: Path) -> None:
    """B1, by value: base + id x stride finds expert 10 where 2 was asked for; the bank has 2."""
    folder = write_tiny_checkpoint(
        tmp_path / "c", seed=8, layers=2, experts=12, latent=32, width=48
    )
    with Checkpoint.open(folder) as checkpoint:
        plan = placements.balanced(
            checkpoint.digest, checkpoint.config.shape, [("n", "spark", 1.0)]
        )
        build(checkpoint, plan, "n", tmp_path / "n.k3bank")
    with BankFile.open(tmp_path / "n.k3bank") as bank:
        arena, row_of = load_arena(bank).records, bank.header.row_of()
    stored = stored_tensors(folder)
    name = "language_model.model.layers.1.block_sparse_moe.experts.{}.{}.weight"
    size = len(stored[name.format(0, "w1")])
    shard = next(
        p for p in folder.glob("*.safetensors") if stored[name.format(0, "w1")] in p.read_bytes()
    )
    data = shard.read_bytes()
    base = data.index(stored[name.format(0, "w1")])
    # w1, w2 and w3 of an expert lie side by side, and all experts are of one size
    stride = sum(len(stored[name.format(0, matrix)]) for matrix in ("w1", "w2", "w3"))
    lexicographic = sorted(range(12), key=str)
    for expert in range(12):
        at = base + expert * stride
        strided = data[at : at + size]
        assert strided == stored[name.format(lexicographic[expert], "w1")]
        assert (strided == stored[name.format(expert, "w1")]) == (expert < 2)
        ours = arena[row_of[1, expert], :size].tobytes()
        assert ours == stored[name.format(expert, "w1")]


class Striding(RandomExperts):
    """Takes the n-th stored record for expert n, as if shards were in numeric order."""

    def expert_record(self, layer: int, expert: int) -> bytes:
        return super().expert_record(layer, sorted(range(12), key=str)[expert])


def test_assumed_order_is_refused(bank_path: Path, placement: Placement, tmp_path: Path) -> None:
    """B1: records laid down by position instead of by name do not pass for the bank."""
    wrong = tmp_path / "wrong.k3bank"
    build(Striding(), placement, "spark0", wrong)
    with BankFile.open(bank_path) as right, BankFile.open(wrong) as bank:
        offset = right.records_offset
        records = wrong.read_bytes()[bank.records_offset :]
    bank_path.write_bytes(bank_path.read_bytes()[:offset] + records)
    with BankFile.open(bank_path) as bank:
        damaged = {bank.header.rows[row][1] for row, fault in verify(bank) if fault is not None}
    assert damaged == {2, 3, 4, 5, 6, 7, 8, 9, 10, 11}


def test_progress_counts_every_record(
    tmp_path: Path, source: RandomExperts, placement: Placement
) -> None:
    """The callback sees each record once, and the total from the start."""
    seen: list[tuple[int, int]] = []
    build(source, placement, "grace", tmp_path / "g.k3bank", lambda *step: seen.append(step))
    assert seen == [(done, 12) for done in range(1, 13)]


def test_existing_bank_is_kept(
    bank_path: Path, source: RandomExperts, placement: Placement
) -> None:
    """Nothing is overwritten unasked; with `replace` the new file takes the old one's place."""
    bank_path.write_bytes(b"precious")
    with pytest.raises(BankError, match="exists already"):
        build(source, placement, "spark0", bank_path)
    assert bank_path.read_bytes() == b"precious"
    build(source, placement, "spark0", bank_path, replace=True)
    with BankFile.open(bank_path) as bank:
        assert bank.rows == 12


class Failing(RandomExperts):
    """Fails at the n-th record."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.left, self.error = at, error

    def expert_record(self, layer: int, expert: int) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return super().expert_record(layer, expert)


@pytest.mark.parametrize("at", [0, 7, 11])
@pytest.mark.parametrize(
    "error", [CheckpointError("x"), KeyboardInterrupt(), OSError(5, "bad disk")]
)
def test_failure_leaves_nothing(
    tmp_path: Path, placement: Placement, at: int, error: BaseException
) -> None:
    """A build that fails at any record leaves no file, and an old bank as it was."""
    path = tmp_path / "spark0.k3bank"
    path.write_bytes(b"old")
    with pytest.raises((CheckpointError, KeyboardInterrupt)):
        build(Failing(at, error), placement, "spark0", path, replace=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["spark0.k3bank"]
    assert path.read_bytes() == b"old"


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from services.banks.builder import build
    from shared.core import placement
    from tests.unit.banks.conftest import RandomExperts

    plan = placement.decode(Path(sys.argv[1]).read_bytes(), source="plan")

    def progress(done, total):
        if done == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)

    build(RandomExperts(), plan, "spark0", Path(sys.argv[2]), progress)
"""


@pytest.mark.parametrize("at", [1, 6, 12])
def test_killed_build_can_be_repeated(
    tmp_path: Path, bank_path: Path, source: RandomExperts, placement: Placement, at: int
) -> None:
    """B10: after SIGKILL anywhere there is no bank; the next build equals an undisturbed one."""
    plan, path = tmp_path / "plan.json", tmp_path / "again" / "spark0.k3bank"
    plan.write_bytes(placements.encode(placement))
    path.parent.mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(plan), str(path), str(at)],
        cwd=ROOT,
        timeout=30,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    assert not path.exists()
    assert path.with_name("spark0.k3bank.partial").exists(), "it was killed too early to prove much"
    build(source, placement, "spark0", path)
    assert path.read_bytes() == bank_path.read_bytes()
    assert [entry.name for entry in path.parent.iterdir()] == ["spark0.k3bank"]


def test_leftovers_of_another_build_do_not_leak(
    tmp_path: Path, bank_path: Path, source: RandomExperts, placement: Placement
) -> None:
    """A longer partial file of an older placement leaves no byte behind, padding included."""
    path = tmp_path / "again" / "spark0.k3bank"
    path.parent.mkdir()
    path.with_name("spark0.k3bank.partial").write_bytes(b"\xff" * 200_000)
    build(source, placement, "spark0", path)
    assert path.read_bytes() == bank_path.read_bytes()


def test_second_builder_is_refused(
    tmp_path: Path, source: RandomExperts, placement: Placement
) -> None:
    """Two builders of one bank do not write into each other's file."""
    path = tmp_path / "spark0.k3bank"
    with path.with_name("spark0.k3bank.partial").open("wb") as held:
        held.write(b"theirs")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BankError, match="another builder is writing it"):
            build(source, placement, "spark0", path)
        assert path.with_name("spark0.k3bank.partial").read_bytes() == b"theirs"


class Tampered(RandomExperts):
    """Changes the record of layer 2 expert 7."""

    def __init__(self, change: Callable[[np.ndarray], None]) -> None:
        self.change = change

    def expert_record(self, layer: int, expert: int) -> bytes:
        record = super().expert_record(layer, expert)
        if (layer, expert) != (2, 7):
            return record
        data = np.frombuffer(record, np.uint8).copy()
        self.change(data)
        return data.tobytes()


def put(name: str, index: int, value: int | float) -> Callable[[np.ndarray], None]:
    """A change of one element of a tensor."""

    def change(record: np.ndarray) -> None:
        data = tensor(RecordLayout(SHAPE.expert), record, name)
        (data.view("<f4") if isinstance(value, float) else data)[index] = value

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (put("w1.weight_scale", 4, 0x7F), r"w1\.weight_scale\[1, 1\] is E4M3 byte 0x7f"),
        (put("w3.weight_scale", 0, 0xFF), r"w3\.weight_scale\[0, 0\] is E4M3 byte 0xff"),
        (put("w2.weight_scale", 95, 0x81), r"w2\.weight_scale\[47, 1\] is E4M3 byte 0x81"),
        (put("w1.weight_scale_2", 0, float("nan")), r"w1\.weight_scale_2 is nan"),
        (put("w2.weight_scale_2", 0, -1.0), r"w2\.weight_scale_2 is -1\.0"),
        (put("w3.input_scale", 0, float("inf")), r"w3\.input_scale is inf"),
    ],
)
def test_bad_scales_are_named(
    tmp_path: Path,
    placement: Placement,
    change: Callable[[np.ndarray], None],
    named: str,
) -> None:
    """NaN, negative and infinite scales and wrong lengths name layer, expert and tensor."""
    with pytest.raises(CheckpointError, match=f"layer 2 expert 7: .*{named}"):
        build(Tampered(change), placement, "spark0", tmp_path / "spark0.k3bank")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("node", "name", "digest", "kind", "named"),
    [
        ("spark9", "a.k3bank", "model-a", PlacementError, "no node 'spark9'"),
        ("spark0", "a.bank", "model-a", BankError, "a bank's file is called NAME.k3bank"),
        ("spark0", "A b.k3bank", "model-a", MeshError, "bank name 'A b' is not allowed"),
        ("spark0", "a.k3bank", "model-b", DigestMismatch, "the checkpoint is model-b"),
        ("spark0", "none/a.k3bank", "model-a", BankError, "cannot write the bank: No such file"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path,
    placement: Placement,
    node: str,
    name: str,
    digest: str,
    kind: type[MeshError],
    named: str,
) -> None:
    """Wrong node, name, model or folder: one error before anything is written."""
    source = RandomExperts()
    source.digest = digest
    with pytest.raises(kind, match=named):
        build(source, placement, node, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_placement_of_another_shape_is_refused(tmp_path: Path, placement: Placement) -> None:
    """A placement whose experts have other sizes than the checkpoint's is named before any work."""
    source = RandomExperts()
    source.layout = RecordLayout(ExpertShape(latent=64, width=32))
    with pytest.raises(CheckpointError, match="latent 48 and width 32, the checkpoint's 64 and 32"):
        build(source, placement, "spark0", tmp_path / "spark0.k3bank")
    assert list(tmp_path.iterdir()) == []


def test_node_without_experts_is_refused(tmp_path: Path, source: RandomExperts) -> None:
    """An empty bank would make a node that can answer nothing."""
    empty = PlacedNode(name="spark0", tier="spark", rows=())
    plan = Placement(version=2, model_digest="model-a", shape=SHAPE, policy="test", nodes=(empty,))
    with pytest.raises(PlacementError, match="gives node spark0 no experts"):
        build(source, plan, "spark0", tmp_path / "spark0.k3bank")


FULL = """
    import resource, signal, sys
    from pathlib import Path
    from services.banks.builder import build
    from shared.core import placement
    from shared.core.errors import BankError
    from tests.unit.banks.conftest import RandomExperts

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    plan = placement.decode(Path(sys.argv[1]).read_bytes(), source="plan")
    try:
        build(RandomExperts(), plan, "spark0", Path(sys.argv[2]))
    except BankError as error:
        sys.exit(f"refused: {error}")
"""


def test_full_disk_is_named_and_leaves_nothing(tmp_path: Path, placement: Placement) -> None:
    """A file that cannot grow (here by a limit) is found before the first record is written."""
    plan, path = tmp_path / "plan.json", tmp_path / "full" / "spark0.k3bank"
    plan.write_bytes(placements.encode(placement))
    path.parent.mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FULL), str(plan), str(path)],
        cwd=ROOT,
        timeout=30,
        check=False,
        capture_output=True,
        text=True,
    )
    assert f"refused: {path}: cannot write the bank: File too large" in ended.stderr
    assert list(path.parent.iterdir()) == []
