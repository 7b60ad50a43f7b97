"""Which folder a bank goes to: the first of a list that has room.

Owns that choice. Must not know what a bank holds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from shared.core.errors import BankError
from shared.io.partial_file import partial_path, refuse_existing


def choose_target(folders: Sequence[Path], name: str, size: int, *, replace: bool) -> Path:
    """Path of the file `name` of `size` bytes in one of `folders`, at least one.

    A finished bank of that name comes first (it is refused, or replaced where it is), then an
    unfinished one (to be resumed), then the first folder with room. BankError when none has room.
    """
    free = {folder: _free_bytes(folder) for folder in folders}
    for folder in folders:
        if _exists(folder / name):
            refuse_existing(folder / name, replace=replace)
            return folder / name
    for folder in folders:
        if _exists(partial_path(folder / name)):
            return folder / name
    for folder, count in free.items():
        if count >= size:
            return folder / name
    listed = ", ".join(f"{folder} has {count}" for folder, count in free.items())
    raise BankError(f"{name} needs {size} bytes, but {listed}: free space, or name another folder")


def _free_bytes(folder: Path) -> int:
    try:
        found = os.statvfs(folder)
    except OSError as error:
        raise _unusable(folder, error) from error
    return found.f_bavail * found.f_frsize


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:  # e.g. a folder that may not be searched
        raise _unusable(path.parent, error) from error


def _unusable(folder: Path, error: OSError) -> BankError:
    return BankError(
        f"{folder}: cannot use it for banks: {error.strerror}: make it, check its permissions, or "
        "name another folder"
    )
