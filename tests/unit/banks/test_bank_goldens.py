"""Goldens of banks: chosen, computed from the checkpoint, kept by a resumed build, checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result

import services.banks.records
from services.banks.builder import build, journal_path
from services.banks.goldens import check_goldens, draft_goldens
from services.cli import k3
from shared.core.errors import BankError, CheckpointError
from shared.core.placement import PlacedNode, Placement
from shared.core.record import RecordLayout
from shared.core.shape import K3
from shared.io.bank_file import BankFile, FaultKind, verify
from shared.io.record_journal import Journal
from shared.kernels.golden import golden_row
from tests.support.expert_records import tensor
from tests.support.tampered_bank import rewrite_header, tamper
from tests.unit.banks.conftest import SHAPE, RandomExperts
from tests.unit.banks.test_bank_order import ROWS, Experts
from tests.unit.banks.test_bank_order import SHAPE as WIDE


def run(*arguments: object) -> Result:
    return CliRunner().invoke(k3, ["bank", *(str(argument) for argument in arguments)])


def test_goldens_are_the_rows_of_the_checkpoints_records(
    tmp_path: Path, source: RandomExperts, placement: Placement, bank_path: Path
) -> None:
    """Eight, from the source's bytes; equal in every build of the same bank."""
    with BankFile.open(bank_path) as bank:
        header = bank.header
        assert list(check_goldens(bank)) == []
    assert len(header.goldens) == 8
    for golden in header.goldens:
        record = np.frombuffer(source.expert_record(*header.rows[golden.bank_row]), np.uint8)
        expected = golden_row(source.layout, record, golden.seed)
        assert np.array_equal(golden.bits, expected)
        assert golden.bits.any()
    again = tmp_path / "again" / "spark0.k3bank"
    again.parent.mkdir()
    build(source, placement, "spark0", again, workers=1)
    assert again.read_bytes() == bank_path.read_bytes()


@pytest.mark.parametrize("layout", ["row-major", "interleaved-4"])
def test_goldens_do_not_depend_on_the_order(tmp_path: Path, layout: Any) -> None:
    """Both orders hold the rows of the stored records, and prove them from their own bytes."""
    node = PlacedNode(name="grace", tier="grace", rows=ROWS)
    placement = Placement(
        version=2, model_digest="model-o", shape=WIDE, policy="test", nodes=(node,)
    )
    path = tmp_path / "grace.k3bank"
    header = build(Experts(), placement, "grace", path, layout=layout)
    assert len(header.goldens) == 8
    for golden in header.goldens:
        record = Experts().expert_record(ROWS[golden.bank_row][1])
        assert np.array_equal(
            golden.bits, golden_row(RecordLayout(WIDE.expert), record, golden.seed)
        )
    with BankFile.open(path) as bank:
        assert list(check_goldens(bank)) == []


def test_goldens_are_spread_over_layers_and_bounded_by_what_they_cost() -> None:
    """Layers get their share whatever the order of rows; large records have fewer until there are
    many; a small bank has one for each record at most."""
    layout, wide = RecordLayout(SHAPE.expert), RecordLayout(K3.expert)
    keys = [(layer, expert) for layer in range(1, 9) for expert in range(40)]
    shuffled = [keys[at] for at in np.random.default_rng(1).permutation(len(keys))]
    chosen = [shuffled[golden.bank_row] for golden in draft_goldens(shuffled, layout)]
    assert sorted(layer for layer, _ in chosen) == list(range(1, 9))
    assert draft_goldens(shuffled, layout) == draft_goldens(tuple(shuffled), layout)
    plain = [(layer, expert) for layer in range(1, 93) for expert in range(62)]
    found = draft_goldens(plain, wide)
    assert [plain[golden.bank_row][0] for golden in found] == [6, 18, 29, 41, 52, 64, 75, 87]
    assert [len(draft_goldens(keys[:n], wide)) for n in (1, 54, 256)] == [1, 1, 2]
    assert [len(draft_goldens(keys[:n], layout)) for n in (1, 5, 8, 320)] == [1, 5, 8, 8]


def test_a_record_without_a_finite_row_is_refused(tmp_path: Path, placement: Placement) -> None:
    """A scale that passes alone and overflows with the others is named before a bank exists."""

    class Loud(RandomExperts):
        def expert_record(self, layer: int, expert: int) -> bytes:
            record = np.frombuffer(super().expert_record(layer, expert), np.uint8).copy()
            if (layer, expert) == (2, 11):
                tensor(self.layout, record, "w2.weight_scale_2").view("<f4")[:] = 3e38
            return record.tobytes()

    path = tmp_path / "spark0.k3bank"
    with pytest.raises(CheckpointError, match=r"layer 2 expert 11: its row .* is not finite"):
        build(Loud(), placement, "spark0", path)
    assert list(tmp_path.iterdir()) == []


class Interrupted(RandomExperts):
    """A checkpoint whose disk fails after a while."""

    def __init__(self, after: int) -> None:
        self.left = after

    def read_expert_record(self, layer: int, expert: int, buffer: memoryview) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(5, "Input/output error")
        super().read_expert_record(layer, expert, buffer)


def test_a_resumed_build_keeps_goldens(
    tmp_path: Path,
    source: RandomExperts,
    placement: Placement,
    bank_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are in the journal: only those of the missing records are computed, and the file is
    that of an undisturbed build. A journal's record without its golden is made again."""
    path = tmp_path / "again" / "spark0.k3bank"
    path.parent.mkdir()
    with pytest.raises(CheckpointError):
        build(Interrupted(9), placement, "spark0", path, keep_partial=True, workers=1)
    computed: list[int] = []
    compute = services.banks.records.compute_golden

    def counted(layout: RecordLayout, record: memoryview, seed: int, key: Any) -> bytes:
        computed.append(seed)
        return compute(layout, record, seed, key)

    monkeypatch.setattr(services.banks.records, "compute_golden", counted)
    with BankFile.open(bank_path) as bank:
        goldens = {golden.bank_row for golden in bank.header.goldens}
    drop_golden(path, row := min(goldens))
    build(source, placement, "spark0", path)
    assert sorted(computed) == sorted({row, *(g for g in goldens if g >= 9)})
    assert path.read_bytes() == bank_path.read_bytes()


def drop_golden(path: Path, row: int) -> None:
    """Make the journal of an unfinished bank forget one golden."""
    journal_file = journal_path(path)
    head = journal_file.read_bytes().split(b"\n")[0]
    bank = json.loads(head.split(b" ", 1)[1])["bank"]
    journal = Journal.open(journal_file, bank, rows=12)
    entry = journal.finished[row]
    assert entry.golden is not None
    journal.append(msgspec.structs.replace(entry, golden=None))
    journal.close()


def test_a_record_whose_hash_was_made_right_is_found_by_its_golden(bank_path: Path) -> None:
    """`k3 bank verify` names it; the hashes alone, and with no golden of that row, do not."""
    assert run("verify", bank_path).exit_code == 0
    with BankFile.open(bank_path) as bank:
        row = bank.header.goldens[3].bank_row
        free = next(r for r in range(12) if r not in {g.bank_row for g in bank.header.goldens})
    tamper(bank_path, free)
    assert run("verify", bank_path).exit_code == 0
    header = tamper(bank_path, row)
    with BankFile.open(bank_path) as bank:
        assert [fault for _, fault in verify(bank) if fault] == []
        assert [(fault.row, fault.kind) for fault in check_goldens(bank)] == [
            (row, FaultKind.MISBUILT)
        ]
    result = run("verify", bank_path)
    assert result.exit_code == 78
    named = f"row {row} (layer {header.rows[row][0]}, expert {header.rows[row][1]})"
    assert f"{named}: has the hash that the header states, but not its golden row" in result.output


def test_a_changed_golden_is_found(bank_path: Path) -> None:
    """The header's own damage, behind a right digest."""

    def change(header: Any) -> Any:
        first, *others = header.goldens
        bits = first.bits.copy()
        bits[5] += 2  # one step more than two ways of rounding can differ
        return msgspec.structs.replace(
            header, goldens=(msgspec.structs.replace(first, row=bits.tobytes()), *others)
        )

    header = rewrite_header(bank_path, change)
    result = run("verify", bank_path)
    assert result.exit_code == 78
    assert f"row {header.goldens[0].bank_row} (" in result.output


def test_a_flipped_byte_is_the_hashs_affair(bank_path: Path) -> None:
    """One fault, not two, for a record that is damaged and has a golden."""
    with BankFile.open(bank_path) as bank:
        row = bank.header.goldens[0].bank_row
        at = bank.records_offset + row * bank.layout.stride_bytes
    data = bytearray(bank_path.read_bytes())
    data[at + 5] ^= 1
    bank_path.write_bytes(data)
    result = run("verify", bank_path)
    assert result.exit_code == 78
    assert "1 of 12 records are damaged" in result.output
    assert "the bytes of w1.weight changed" in result.output


def test_show_says_how_many(bank_path: Path) -> None:
    """From the header alone."""
    assert json.loads(run("show", "--json", bank_path).output)["goldens"] == 8


def test_a_bank_of_the_format_before_is_refused(bank_path: Path) -> None:
    """With the remedy, by every reader."""
    data = bytearray(bank_path.read_bytes())
    data[8] = 2
    bank_path.write_bytes(data)
    with pytest.raises(BankError, match=r"bank format 2, this program reads 3: build the bank ag"):
        BankFile.open(bank_path)
