"""Single records: from any bank, from the checkpoint, in either order, and never damaged ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from services.bank_service.records import FoundRecord, Records
from services.bank_service.refusal import Refusal
from services.banks.builder import build
from services.banks.source import ExpertSource
from shared.core.errors import CheckpointError
from shared.core.record import RecordLayout
from shared.core.record_order import reorder
from shared.io.bank_file import BankFile, blake3_digest
from tests.unit.bank_service.world import MODEL, SHAPE, RandomExperts, TestLog, World, placement

SOURCE = RandomExperts()


@pytest.fixture
def log() -> TestLog:
    return TestLog()


@pytest.fixture
def records(world: World, log: TestLog) -> Records:
    """Banks only."""
    return Records(world.folders, None, log.log)


def with_checkpoint(world: World, log: TestLog, source: ExpertSource) -> Records:
    """Banks and a checkpoint."""
    return Records(world.folders, lambda: source, log.log, kept_max=2)


def found(answer: FoundRecord | Refusal) -> FoundRecord:
    """A record that was found, whose hash is right."""
    assert isinstance(answer, FoundRecord), answer
    assert answer.record_hash == blake3_digest(answer.data.data).hex()
    return answer


def code(answer: object) -> str:
    """Why there is none."""
    assert isinstance(answer, Refusal), answer
    assert answer.permanent == (answer.code not in ("gone", "read_failed"))
    return answer.code


def damage(path: Path, layer: int, expert: int) -> None:
    """Flip one byte in the middle of a record."""
    with BankFile.open(path) as bank:
        row = bank.header.row_of()[layer, expert]
        at = bank.records_offset + row * bank.layout.stride_bytes + bank.layout.record_bytes // 2
    with path.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 4]))


def test_every_expert_of_every_bank_is_found(records: Records) -> None:
    """Whichever bank holds it, the bytes are the model's."""
    for node in placement().nodes:
        for layer, expert in node.rows:
            record = found(records.find(MODEL, layer, expert, "row-major"))

            assert record.data.tobytes() == SOURCE.expert_record(layer, expert)
            assert record.origin.endswith(f"{node.name}.k3bank")
            assert record.shape == SHAPE.expert


def test_a_record_is_handed_out_in_the_order_asked_for(records: Records, world: World) -> None:
    """Row-major bank, interleaved node, and the other way round: the same tensors."""
    row_major, interleaved = RecordLayout(SHAPE.expert), RecordLayout(SHAPE.expert, "interleaved-4")
    expected = np.empty(row_major.record_bytes, np.uint8)
    plain = np.frombuffer(SOURCE.expert_record(2, 0), np.uint8)
    reorder(plain, row_major, expected, interleaved)

    there = found(records.find(MODEL, 2, 0, "interleaved-4"))
    back = found(records.find(MODEL, 2, 0, "row-major"))

    assert there.data.tobytes() == expected.tobytes() != plain.tobytes()
    assert back.data.tobytes() == plain.tobytes()
    assert there.record_hash != back.record_hash


def test_ranges_of_a_record(records: Records) -> None:
    """Byte for byte, never beyond the end, and only of records that were found."""
    record = found(records.find(MODEL, 1, 1, "row-major"))
    data = SOURCE.expert_record(1, 1)

    assert records.has(record.record_hash)
    assert records.read(record.record_hash, 5, 1000) == data[5:1005]
    assert records.read(record.record_hash, len(data) - 1, 1) == data[-1:]
    assert code(records.read(record.record_hash, len(data) - 1, 2)) == "out_of_range"
    assert code(records.read("0" * 64, 0, 1)) == "gone"


def test_who_has_nothing_says_so(records: Records) -> None:
    """A foreign model and an expert that no bank holds are told apart."""
    assert code(records.find("model-b", 1, 1, "row-major")) == "model_unknown"
    assert code(records.find(MODEL, 1, 5, "row-major")) == "expert_unknown"
    assert code(records.find(MODEL, 99, 0, "row-major")) == "expert_unknown"


def test_an_order_the_shape_does_not_allow_is_refused(tmp_path: Path, log: TestLog) -> None:
    """Small experts cannot be interleaved."""
    from tests.support.fake_station import TinyExperts, tiny_placement

    build(TinyExperts(), tiny_placement(), "spark0", tmp_path / "spark0.k3bank")
    records = Records([tmp_path], None, log.log)
    layer, expert = tiny_placement().node("spark0").rows[0]

    assert code(records.find("tiny-model", layer, expert, "interleaved-4")) == "order_unsupported"
    found(records.find("tiny-model", layer, expert, "row-major"))


def test_a_damaged_record_is_never_handed_out(world: World, records: Records, log: TestLog) -> None:
    """The next bank is tried, with a line that names the damage; without another it is refused."""
    path = world.folders[0] / "grace.k3bank"
    shutil.copy(path, world.folders[1] / "copy.k3bank")
    layer, expert = placement().node("grace").rows[2]
    damage(path, layer, expert)

    record = found(records.find(MODEL, layer, expert, "row-major"))

    assert record.origin == str(world.folders[1] / "copy.k3bank")
    assert record.data.tobytes() == SOURCE.expert_record(layer, expert)
    (line,) = log.events("bank_record_skipped")
    assert f"layer {layer}, expert {expert}" in line["error"]
    assert "grace.k3bank" in line["error"]
    damage(world.folders[1] / "copy.k3bank", layer, expert)
    answer = Records(world.folders, None, log.log).find(MODEL, layer, expert, "row-major")
    assert code(answer) == "record_damaged"


def test_the_checkpoint_replaces_a_damaged_record(world: World, log: TestLog) -> None:
    """And serves what no bank holds; its own model only."""
    layer, expert = placement().node("grace").rows[2]
    damage(world.folders[0] / "grace.k3bank", layer, expert)
    records = with_checkpoint(world, log, RandomExperts())

    for key in ((layer, expert), (1, 5)):
        record = found(records.find(MODEL, *key, "row-major"))
        assert record.origin == "checkpoint"
        assert record.data.tobytes() == SOURCE.expert_record(*key)
    foreign = with_checkpoint(world, log, RandomExperts("model-b"))
    assert code(foreign.find(MODEL, layer, expert, "row-major")) == "record_damaged"
    assert code(foreign.find("model-c", 1, 1, "row-major")) == "model_unknown"
    found(foreign.find("model-b", 1, 1, "row-major"))


class BrokenCheckpoint(RandomExperts):
    """A checkpoint with a NaN among its scales."""

    def read_expert_record(self, layer: int, expert: int, buffer: memoryview) -> None:
        """A right record with one bad scale."""
        super().read_expert_record(layer, expert, buffer)
        scale = next(field for field in self.layout.fields if field.name == "w1.weight_scale")
        buffer[scale.offset] = 0x7F


def test_a_bad_checkpoint_is_refused_by_name(world: World, log: TestLog) -> None:
    """Neither a bad record nor a folder that does not open ends the service."""
    broken = with_checkpoint(world, log, BrokenCheckpoint())

    answer = broken.find(MODEL, 1, 5, "row-major")

    assert code(answer) == "checkpoint_invalid"
    assert isinstance(answer, Refusal)
    assert "layer 1 expert 5: w1.weight_scale[0, 0]" in answer.text

    def refuse() -> ExpertSource:
        raise CheckpointError("model: no config.json")

    unopened = Records(world.folders, refuse, log.log)
    assert code(unopened.find(MODEL, 1, 5, "row-major")) == "checkpoint_invalid"
    found(unopened.find(MODEL, 1, 4, "row-major"))  # banks go on


def test_records_in_memory_are_bounded(world: World, log: TestLog) -> None:
    """The one that was not read for longest goes; asking for it again finds it again."""
    records = with_checkpoint(world, log, RandomExperts())
    first = found(records.find(MODEL, 1, 0, "row-major"))
    second = found(records.find(MODEL, 1, 1, "row-major"))
    records.read(first.record_hash, 0, 1)

    records.find(MODEL, 1, 2, "row-major")

    assert records.has(first.record_hash)
    assert not records.has(second.record_hash)
    assert code(records.read(second.record_hash, 0, 1)) == "gone"
    assert found(records.find(MODEL, 1, 1, "row-major")).record_hash == second.record_hash


def test_the_index_follows_the_folders(world: World, records: Records, log: TestLog) -> None:
    """New, removed, replaced and unreadable banks count from the next question on."""
    assert code(records.find("model-b", 1, 1, "row-major")) == "model_unknown"

    path = world.folders[1] / "grace.k3bank"
    build(RandomExperts("model-b"), placement("model-b"), "grace", path)
    layer, expert = placement().node("grace").rows[0]
    assert found(records.find("model-b", layer, expert, "row-major")).origin == str(path)

    path.unlink()
    path.write_bytes(b"no bank")
    other = placement().node("grace").rows[1]
    for _ in range(3):
        assert code(records.find("model-b", *other, "row-major")) == "model_unknown"
    assert len(log.events("bank_unusable")) == 1  # once, not with every question
