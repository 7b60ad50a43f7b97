"""Epochs survive restarts: no two starts may ever grant the same one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.core.errors import ConfigError
from station.epoch_file import EPOCHS_PER_START, next_base

NODE_HELLOS_PER_S = 100_000  # more than one Station can read


def test_every_start_begins_above_the_last(tmp_path: Path) -> None:
    """The folder is made when it is missing."""
    bases = [next_base(tmp_path / "state") for _ in range(3)]

    assert bases == [EPOCHS_PER_START, 2 * EPOCHS_PER_START, 3 * EPOCHS_PER_START]


def test_a_start_cannot_run_out_of_epochs() -> None:
    """A node that asks without pause for an hour must not reach the epochs of the next start."""
    assert EPOCHS_PER_START > NODE_HELLOS_PER_S * 3600


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", str(2**31), "9" * 5000, "\u0663"])
def test_a_spoilt_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    """Guessing would risk an epoch twice; an epoch beyond 63 bits could not be sent."""
    (tmp_path / "epoch").write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError, match="epoch: not a count of starts"):
        next_base(tmp_path)


def test_a_folder_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    """Also when only the new file cannot be made: here its name is taken by a folder."""
    (tmp_path / "epoch.partial").mkdir()

    with pytest.raises(ConfigError, match="must be writable"):
        next_base(tmp_path)


def test_a_full_disk_is_refused_and_keeps_the_old_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number is durable, name and all, before it is used."""
    next_base(tmp_path)
    synced: list[str] = []

    def note(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", note)
        next_base(tmp_path)
    assert synced == [str(tmp_path / "epoch.partial"), str(tmp_path)]

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(ConfigError, match="No space left"):
            next_base(tmp_path)
    assert os.listdir(tmp_path) == ["epoch"]
    assert next_base(tmp_path) == 3 * EPOCHS_PER_START
