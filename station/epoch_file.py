"""The Station's memory of epochs: a restarted Station never grants an epoch twice."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from shared.core.errors import ConfigError
from shared.io.files import replace_file

EPOCHS_PER_START: Final = 1 << 32  # a node that asks without pause cannot use them up
_STARTS_MAX: Final = 2**63 // EPOCHS_PER_START - 2


def next_base(directory: Path) -> int:
    """Epochs of this start are above the returned number; written durably before it is used."""
    path = directory / "epoch"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        starts = _read(path) + 1
        replace_file(path, str(starts).encode("ascii"))
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
