"""Opening and loading banks: what is damaged is named, each kind of damage by its own words."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shared.core.errors import BankError
from shared.io.arena import LoadPlan, load_arena
from shared.io.bank_file import BankFile, FaultKind, verify
from tests.unit.banks.conftest import RandomExperts


def patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def record_offset(path: Path, row: int) -> int:
    with BankFile.open(path) as bank:
        return bank.records_offset + row * bank.layout.stride_bytes


def record_of(path: Path, row: int) -> bytes:
    with BankFile.open(path) as bank:
        buffer = bytearray(bank.layout.record_bytes)
        bank.read_into(row, memoryview(buffer))
    return bytes(buffer)


def kinds(path: Path) -> dict[int, FaultKind]:
    with BankFile.open(path) as bank:
        return {row: fault.kind for row, fault in verify(bank) if fault is not None}


def refusal(path: Path) -> str:
    with BankFile.open(path) as bank, pytest.raises(BankError) as caught:
        load_arena(bank)
    return str(caught.value)


@pytest.mark.parametrize(
    ("step_bytes", "batch_bytes"), [(1, 1), (7 * 4096, 4096), (7 * 4096, 3 * 4096), (2**28, 2**23)]
)
def test_arena_holds_every_record(
    bank_path: Path, source: RandomExperts, step_bytes: int, batch_bytes: int
) -> None:
    """Row r of the arena is the record of header.rows[r], however a load is cut."""
    plan = LoadPlan(step_bytes=step_bytes, batch_bytes=batch_bytes)
    with BankFile.open(bank_path) as bank:
        arena = load_arena(bank, plan).records
        assert arena.shape == (bank.rows, bank.layout.stride_bytes)
        for row, (layer, expert) in enumerate(bank.header.rows):
            record = source.expert_record(layer, expert)
            assert arena[row, : len(record)].tobytes() == record
        assert kinds(bank_path) == {}
    assert arena.flags.c_contiguous
    assert not arena.flags.writeable
    assert arena.ctypes.data % 4096 == 0
    assert arena.sum() > 0, "the arena outlives the file"


def test_flipped_byte_is_named_by_tensor(bank_path: Path) -> None:
    """B10: one changed byte names layer, expert and tensor, for each of the 12 tensors."""
    with BankFile.open(bank_path) as bank:
        fields, (layer, expert) = bank.layout.fields, bank.header.rows[3]
    for field in fields:
        where = record_offset(bank_path, 3) + field.offset + field.length // 2
        byte = record_of(bank_path, 3)[field.offset + field.length // 2]
        patch(bank_path, where, bytes([byte ^ 0x40]))
        said = refusal(bank_path)
        assert f"row 3 (layer {layer}, expert {expert}): the bytes of {field.name} changed" in said
        assert kinds(bank_path) == {3: FaultKind.CHANGED}
        patch(bank_path, where, bytes([byte]))
    assert kinds(bank_path) == {}


def test_duplicate_swap_and_hole_are_told_apart(bank_path: Path) -> None:
    """B10: a copied record, two swapped records and a record never written are different errors."""
    first, second = record_of(bank_path, 1), record_of(bank_path, 4)
    with BankFile.open(bank_path) as bank:
        keys = bank.header.rows

    patch(bank_path, record_offset(bank_path, 4), first)
    assert kinds(bank_path) == {4: FaultKind.DUPLICATE}
    named = f"row 1 (layer {keys[1][0]}, expert {keys[1][1]})"
    assert f"holds a copy of the record of {named}" in refusal(bank_path)

    patch(bank_path, record_offset(bank_path, 1), second)
    assert kinds(bank_path) == {1: FaultKind.SWAPPED, 4: FaultKind.SWAPPED}
    assert "are swapped" in refusal(bank_path)

    patch(bank_path, record_offset(bank_path, 1), first)
    patch(bank_path, record_offset(bank_path, 4), second[:100] + bytes(len(second) - 100))
    assert kinds(bank_path) == {4: FaultKind.UNWRITTEN}
    assert "only zeros from byte" in refusal(bank_path)


def test_unverified_load_does_not_look(bank_path: Path) -> None:
    """Verification can be left to somebody who did it already."""
    patch(bank_path, record_offset(bank_path, 0), b"\xff" * 8)
    with BankFile.open(bank_path) as bank:
        assert load_arena(bank, LoadPlan(verify=False)).records[0, :8].tobytes() == b"\xff" * 8


def cut(count: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, path.stat().st_size - count)


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (cut(1), r"truncated: .* first incomplete record is row 11 \(layer 2, expert 0\)"),
        (cut(3 * 4096), r"first incomplete record is row 9 \(layer 2, expert 2\)"),
        (lambda path: os.truncate(path, 4096), "header|truncated"),
        (lambda path: os.truncate(path, 40), "ends at byte 40, inside the 52-byte prefix"),
        (lambda path: os.truncate(path, 0), "ends at byte 0"),
        (lambda path: os.truncate(path, path.stat().st_size + 1), "1 bytes follow the last record"),
        (lambda path: path.write_bytes(b"GGUF" * 4096), "is not the magic of a bank file"),
        (lambda path: patch(path, 100, b"#"), "the header does not match its BLAKE3"),
        (lambda path: path.unlink(), "cannot open the bank: No such file"),
        (lambda path: (path.unlink(), path.mkdir()), "not a regular file"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "not a regular file"),
    ],
)
def test_damaged_files_are_refused_at_open(
    bank_path: Path, harm: Callable[[Path], object], named: str
) -> None:
    """Too short, too long, foreign, missing: one BankError with the path, at once."""
    harm(bank_path)
    with pytest.raises(BankError, match=named) as caught:
        BankFile.open(bank_path)
    assert str(bank_path) in str(caught.value)
    assert caught.value.exit_status == 78


def test_shrinking_file_is_an_error(bank_path: Path) -> None:
    """A file cut while it is open ends the load; no arena with zeros comes out."""
    with BankFile.open(bank_path) as bank:
        cut(5000)(bank_path)
        with pytest.raises(BankError, match="became shorter"):
            load_arena(bank, LoadPlan(verify=False))


def test_open_gives_back_its_descriptor(bank_path: Path) -> None:
    """A refused file is closed again."""
    before = len(os.listdir("/proc/self/fd"))
    cut(1)(bank_path)
    for _ in range(3):
        with pytest.raises(BankError):
            BankFile.open(bank_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_arena_that_does_not_fit_is_an_error(
    bank_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More memory than there is addresses for: the sizes are named, not a traceback."""
    with BankFile.open(bank_path) as bank:
        monkeypatch.setattr(
            BankFile, "arena_bytes", property(lambda _self: sys.maxsize // 4096 * 4096)
        )
        with pytest.raises(BankError, match="bytes of memory for its arena"):
            load_arena(bank)


def test_records_start_on_pages(bank_path: Path) -> None:
    """An address is base + row x stride, and both are whole pages."""
    with BankFile.open(bank_path) as bank:
        assert bank.records_offset % 4096 == 0
        assert bank.layout.stride_bytes % 4096 == 0
        assert bank_path.stat().st_size == bank.records_offset + bank.arena_bytes
        assert np.array_equal(
            np.frombuffer(record_of(bank_path, 2), np.uint8),
            np.fromfile(
                bank_path,
                np.uint8,
                bank.layout.record_bytes,
                offset=bank.records_offset + 2 * bank.layout.stride_bytes,
            ),
        )
