"""The Station's memory of epochs: a restarted Station never grants an epoch twice."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from shared.core.errors import ConfigError

EPOCHS_PER_START: Final = 1 << 20


def next_base(directory: Path) -> int:
    """Epochs of this start are above the returned number; written durably before it is used."""
    path = directory / "epoch"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        starts = int(path.read_text(encoding="ascii")) if path.exists() else 0
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; the Station's state directory must be writable"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{path}: not a number; delete it only after all nodes were restarted"
        ) from error
    temporary = path.with_suffix(".partial")
    with temporary.open("w", encoding="ascii") as file:
        file.write(str(starts + 1))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return (starts + 1) * EPOCHS_PER_START
