"""How an unfinished file gets its final name: its own bytes or nothing, and nothing by accident."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from shared.core.errors import BankError
from shared.io.partial_file import PartialFile, partial_path, refuse_existing

SIZE = 4096


def written(final: Path, byte: bytes) -> PartialFile:
    """An unfinished file full of one byte."""
    partial = PartialFile.open(final)
    partial.reserve(SIZE, keep=False)
    block = mmap.mmap(-1, SIZE)
    block[:] = byte * SIZE
    partial.write(memoryview(block), 0)
    return partial


def test_another_writers_file_is_never_published(tmp_path: Path) -> None:
    """Somebody deletes the unfinished file and a second writer begins: the first must not give the
    second's half-written file the final name."""
    final = tmp_path / "spark0.k3bank"
    first = written(final, b"a")
    partial_path(final).unlink()
    second = PartialFile.open(final)

    with pytest.raises(BankError, match="was deleted or replaced while it was written"):
        first.publish(replace=True)
    assert not final.exists()

    first.remove()
    assert partial_path(final).exists(), "it was the second's"
    first.close()
    second.close()
    whole = written(final, b"b")
    whole.publish(replace=False)
    whole.close()
    assert final.read_bytes() == b"b" * SIZE


def test_a_deleted_file_is_not_published(tmp_path: Path) -> None:
    """What is gone is named, as a thing that a person did."""
    final = tmp_path / "spark0.k3bank"
    partial = written(final, b"a")
    partial_path(final).unlink()

    with pytest.raises(BankError, match="deleted or replaced"):
        partial.publish(replace=False)
    partial.close()


def test_a_link_to_nowhere_is_something(tmp_path: Path) -> None:
    """A bank that is a link to a disk which is not mounted is not overwritten unasked."""
    final = tmp_path / "spark0.k3bank"
    final.symlink_to(tmp_path / "unmounted" / "spark0.k3bank")

    with pytest.raises(BankError, match="link that leads nowhere"):
        refuse_existing(final, replace=False)
    refuse_existing(final, replace=True)


def test_a_folder_is_never_replaced(tmp_path: Path) -> None:
    """It is refused before the work, also with --replace."""
    with pytest.raises(BankError, match="is a folder"):
        refuse_existing(tmp_path, replace=True)
