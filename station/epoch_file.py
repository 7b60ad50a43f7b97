"""The Station's memory of epochs: a restarted Station never grants an epoch twice."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from shared.core.errors import ConfigError

EPOCHS_PER_START: Final = 1 << 32  # a node that asks without pause cannot use them up
_STARTS_MAX: Final = 2**63 // EPOCHS_PER_START - 2


def next_base(directory: Path) -> int:
    """Epochs of this start are above the returned number; written durably before it is used."""
    path = directory / "epoch"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        starts = _read(path) + 1
        _replace(path, str(starts))
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; the Station's state directory must be writable"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{path}: not a count of starts; delete it only after all nodes were restarted"
        ) from error
    return starts * EPOCHS_PER_START


def _read(path: Path) -> int:
    if not path.exists():
        return 0
    starts = int(path.read_text(encoding="ascii"))
    if not 0 <= starts <= _STARTS_MAX:
        raise ValueError(starts)
    return starts


def _replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(".partial")
    with ExitStack() as undo:
        file = undo.enter_context(temporary.open("w", encoding="ascii"))
        undo.callback(temporary.unlink, missing_ok=True)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
        temporary.replace(path)
    # without this a power cut may bring the old name back, and with it the old epochs
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
