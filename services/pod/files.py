"""Files of a pod: written whole or not at all, and one owner per state folder.

Owns atomic writing and the lock. Must not know what the files contain.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from shared.core.errors import ConfigError
from shared.io.files import replace_file


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> bool:
    """Write `data` under `path` in one step; False when the file already holds exactly that.

    Raises ConfigError when the folder cannot be written.
    """
    try:
        if path.exists() and path.read_bytes() == data:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data, mode=mode)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; make the folder writable or choose another"
        ) from error
    return True


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Hold the folder's lock; ConfigError when another process has it.

    The lock is the kernel's (flock): it ends with the process, so nothing stale is ever left.
    """
    path = directory / "lock"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"cannot use state folder {directory}: {error.strerror}; choose another with "
            "--state-dir"
        ) from error
    try:
        _take(descriptor, directory)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, directory: Path) -> None:
    """Lock the opened file and note who holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
        raise ConfigError(
            f"state folder {directory} is in use by process {holder}: stop that `k3 up` first, "
            "or give this one another --state-dir"
        ) from None
    with contextlib.suppress(OSError):  # a full disk costs the name of the holder, not the lock
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
