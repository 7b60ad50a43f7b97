"""`k3 bank verify --source`: every difference by name, and whose fault it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from services.banks.builder import build
from services.banks.verify import verify_against
from services.cli import k3
from shared.core.bank_header import encode
from shared.core.errors import CheckpointError, DigestMismatch
from shared.core.placement import Placement
from shared.io.bank_file import BankFile, FaultKind, RecordFault, blake3_digest, verify
from station.model.checkpoint import Checkpoint
from station.model.tensor_table import expert_prefix
from tests.support.tiny_checkpoint import Layout, write_tiny_checkpoint
from tests.unit.banks.conftest import RandomExperts


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(k3, ["bank", *(str(argument) for argument in arguments)])


@pytest.fixture(params=["nvfp4", "mxfp4"])
def built(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint of two MoE layers and the bank of its only Spark."""
    layout: Layout = request.param
    folder = tmp_path / "checkpoint"
    write_tiny_checkpoint(folder, seed=5, layout=layout, layers=3, experts=11, latent=32, width=64)
    made = run(
        "build", "--checkpoint", folder, "--split", "plain", "--sparks", 1, "--node", "spark0",
        "--out-dir", tmp_path,
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    return folder, tmp_path / "spark0.k3bank"


def faults(checkpoint: Path, path: Path) -> list[RecordFault]:
    with Checkpoint.open(checkpoint) as source, BankFile.open(path) as opened:
        found = list(verify_against(opened, source))
    assert [row for row, _ in found] == list(range(22))
    return [fault for _, fault in found if fault is not None]


def edit(path: Path, changes: dict[int, Callable[[bytes], bytes]]) -> None:
    """Change records of a bank in place."""
    with BankFile.open(path) as opened:
        start, stride, size = (
            opened.records_offset, opened.layout.stride_bytes, opened.layout.record_bytes,
        )  # fmt: skip
    data = bytearray(path.read_bytes())
    for row, change in changes.items():
        at = start + row * stride
        data[at : at + size] = change(bytes(data[at : at + size]))
    path.write_bytes(data)


def stored_at(checkpoint: Path, name: str) -> tuple[Path, int]:
    """Shard and file offset of a tensor."""
    with Checkpoint.open(checkpoint) as source:
        file = source._files[name]
        return file.path, file.entries[name].offset


def weight_of(checkpoint: Path, layer: int, expert: int, matrix: str) -> str:
    """The full name of a packed weight in either layout."""
    name = f"{expert_prefix(layer, expert)}{matrix}.weight"
    with Checkpoint.open(checkpoint) as source:
        return name if name in source._files else f"{name}_packed"


def test_rows_that_the_checkpoint_does_not_have(built: tuple[Path, Path]) -> None:
    """A header that was made by hand: the file and the row, with what to do."""
    checkpoint, path = built
    with BankFile.open(path) as opened:
        rows = list(opened.header.rows)
        rows[3] = (2, 65535)
        header = msgspec.structs.replace(opened.header, rows=tuple(rows))
    with path.open("r+b") as file:
        file.write(encode(header, hasher=blake3_digest))
    result = run("verify", path, "--source", checkpoint)
    assert result.exit_code == 78
    assert f"{path}: row 3: {checkpoint}: no expert 65535 in layer 2" in result.output
    assert "build the bank again" in result.output


def test_equal_to_the_checkpoint(built: tuple[Path, Path]) -> None:
    """Both layouts: what was just built is intact, and equal to its source."""
    checkpoint, path = built
    assert faults(checkpoint, path) == []
    result = run("verify", path, "--source", checkpoint)
    assert result.exit_code == 0, result.output
    assert f"intact and equal to {checkpoint}" in result.output


def test_source_hashes_are_of_the_stored_tensors(built: tuple[Path, Path]) -> None:
    """NVFP4 is copied, so both hashes are one; MXFP4 is cast, so they differ."""
    checkpoint, path = built
    with BankFile.open(path) as opened, Checkpoint.open(checkpoint) as source:
        header = opened.header
        for row, (layer, expert) in enumerate(header.rows):
            stored = source.stored_hash(layer, expert)
            expected = header.record_hashes[row] if stored is None else stored.hex()
            assert header.source_hashes[row] == expected
            assert (stored is None) == (header.source_hashes[row] == header.record_hashes[row])


def test_damage_is_named_by_tensor(built: tuple[Path, Path]) -> None:
    """A flipped byte and a lost record: layer, expert, tensor, and that the bank is to blame."""
    checkpoint, path = built

    def flip(record: bytes) -> bytes:
        return record[:40] + bytes([record[40] ^ 1]) + record[41:]

    edit(path, {7: flip, 20: lambda record: bytes(len(record))})
    flipped, lost = faults(checkpoint, path)
    assert (flipped.row, flipped.layer, flipped.expert) == (7, 1, 7)
    assert flipped.kind is FaultKind.CHANGED
    assert flipped.detail.startswith("the bytes of w1.weight changed since the bank was built")
    assert flipped.detail.endswith("differs from the checkpoint in w1.weight (1 bytes, first 40)")
    assert (lost.layer, lost.expert, lost.kind) == (2, 9, FaultKind.UNWRITTEN)
    assert "w2.weight_scale (" in lost.detail


def test_swapped_and_duplicated_records_are_told_apart(built: tuple[Path, Path]) -> None:
    """Both are whole records in wrong places."""
    checkpoint, path = built
    with BankFile.open(path) as opened:
        size = opened.layout.record_bytes
        records = {row: bytearray(size) for row in (3, 4, 12)}
        for row, record in records.items():
            opened.read_into(row, memoryview(record))
    edit(path, {
        3: lambda _: bytes(records[4]), 4: lambda _: bytes(records[3]),
        15: lambda _: bytes(records[12]),
    })  # fmt: skip
    found = faults(checkpoint, path)
    assert [(fault.row, fault.kind) for fault in found] == [
        (3, FaultKind.SWAPPED), (4, FaultKind.SWAPPED), (15, FaultKind.DUPLICATE),
    ]  # fmt: skip
    assert "that of row 4 (layer 1, expert 4) are swapped" in found[0].detail
    assert "a copy of the record of row 12 (layer 2, expert 1)" in found[2].detail
    result = run("verify", path, "--source", checkpoint)
    assert result.exit_code == 78
    assert "3 of 22 records are damaged" in result.output


def test_checkpoint_that_changed_is_told_from_a_damaged_bank(built: tuple[Path, Path]) -> None:
    """One byte of one stored weight changed after the build: the bank is not blamed."""
    checkpoint, path = built
    shard, offset = stored_at(checkpoint, weight_of(checkpoint, 2, 10, "w3"))
    data = bytearray(shard.read_bytes())
    data[offset + 9] ^= 0x33
    shard.write_bytes(data)
    (fault,) = faults(checkpoint, path)
    assert (fault.layer, fault.expert, fault.kind) == (2, 10, FaultKind.SOURCE_CHANGED)
    assert "w3.weight (1 bytes, first 9); the bank's record is as it was built" in fault.detail


class Misreading(RandomExperts):
    """Assembles the record of expert 5 from the tensors of expert 0."""

    def read_expert_record(self, layer: int, expert: int, buffer: memoryview) -> None:
        buffer[:] = self.expert_record(layer, 0 if expert == 5 else expert)

    def stored_hash(self, layer: int, expert: int) -> bytes:
        return blake3_digest(self.expert_record(layer, expert))


def test_record_that_was_wrong_from_the_start(tmp_path: Path, placement: Placement) -> None:
    """Intact by its own hash, made from the right tensors, and yet not what they say."""
    path = tmp_path / "spark0.k3bank"
    build(Misreading(), placement, "spark0", path)
    with BankFile.open(path) as opened:
        assert all(fault is None for _, fault in verify(opened))
        found = [fault for _, fault in verify_against(opened, RandomExperts()) if fault]
    assert {(fault.expert, fault.kind) for fault in found} == {(5, FaultKind.MISBUILT)}
    assert "the bank's record was wrong from the start" in found[0].detail


def test_foreign_model_is_refused(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Another model is one error with both digests, not a list of differences."""
    _, path = built
    other = write_tiny_checkpoint(
        tmp_path / "other", seed=6, layers=3, experts=11, latent=32, width=64
    )
    with (
        Checkpoint.open(other) as source,
        BankFile.open(path) as opened,
        pytest.raises(DigestMismatch, match=f"made from model {opened.header.model_digest}"),
    ):
        next(verify_against(opened, source))
    result = run("verify", path, "--source", other)
    assert result.exit_code == 78
    assert "the checkpoint is" in result.output


def test_truncated_bank_and_missing_source_are_named(built: tuple[Path, Path]) -> None:
    """A cut file names its first incomplete record; a missing checkpoint its path."""
    checkpoint, path = built
    missing = run("verify", path, "--source", checkpoint / "no")
    assert missing.exit_code == 78
    assert str(checkpoint / "no") in missing.output
    path.write_bytes(path.read_bytes()[:-5000])
    cut = run("verify", path, "--source", checkpoint)
    assert cut.exit_code == 78
    assert "truncated" in cut.output
    assert "first incomplete record is row 20 (layer 2, expert 9)" in cut.output


def test_shard_that_ends_early_is_named_at_open(built: tuple[Path, Path], tmp_path: Path) -> None:
    """The source's own damage is the source's error."""
    checkpoint, path = built
    shutil.copytree(checkpoint, tmp_path / "cut")
    shard = sorted((tmp_path / "cut").glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    result = run("verify", path, "--source", tmp_path / "cut")
    assert result.exit_code == CheckpointError.exit_status
    assert shard.name in result.output
