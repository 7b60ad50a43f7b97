"""The file that becomes a bank: locked, allocated, written in whole pages, renamed when complete.

Owns how bytes reach the disk (past the page cache where the file system allows it) and how the
final name appears. Must not know what the bytes are.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from pathlib import Path
from typing import Final, Self

from shared.core.errors import BankError

SUFFIX: Final = ".partial"
_UNSYNCED_BYTES_MAX: Final = 256 * 2**20


def refuse_existing(path: Path, *, replace: bool) -> None:
    """BankError when something has the final name and nobody asked to replace it.

    A link that leads nowhere is something, e.g. to a disk that is not mounted; a folder is never
    replaced.
    """
    if path.is_dir():
        raise BankError(f"{path}: is a folder: choose another name")
    if os.path.lexists(path) and not replace:
        state = "exists already" if path.exists() else "is a link that leads nowhere now"
        raise BankError(
            f"{path}: {state}: choose another name, or ask to replace it with --replace"
        )


class PartialFile:
    """The open file `NAME.partial`; at most one builder has it."""

    def __init__(self, final: Path, fd: int) -> None:
        """Use `open`; takes over `fd`."""
        self.final: Final = final
        self.path: Final = partial_path(final)
        self._fd = fd
        self._direct = False
        self._lock = threading.Lock()
        self._unsynced_bytes = 0

    @classmethod
    def open(cls, final: Path) -> Self:
        """Open or create and lock it; BankError when another builder writes it, or OSError."""
        path = partial_path(final)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            _lock(fd, path)
        except BaseException:
            os.close(fd)
            raise
        return cls(final, fd)

    def reserve(self, size: int, *, keep: bool) -> None:
        """Allocate `size` bytes, zeros unless `keep`; BankError when the disk has no room."""
        if not keep:
            os.ftruncate(self._fd, 0)
        folder = os.fstatvfs(self._fd)
        missing = size - os.fstat(self._fd).st_blocks * 512
        free = folder.f_bavail * folder.f_frsize
        if missing > free:
            raise BankError(
                f"{self.path}: the bank needs {missing} more bytes, {self.path.parent} has {free}: "
                "free space, or name another folder"
            )
        os.posix_fallocate(self._fd, 0, size)
        os.ftruncate(self._fd, size)
        # after the allocation, which C libraries emulate with one-byte writes where they must
        self._set_direct(True)

    def write(self, data: memoryview, offset: int) -> None:
        """Write whole pages from a page-aligned buffer; thread-safe. Raises OSError."""
        done = 0
        while done < len(data):
            direct = self._direct
            try:
                done += os.pwrite(self._fd, data[done:], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._set_direct(False)  # the device wants another alignment than a page
        if not self._direct:
            self._drop_behind(len(data))

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill a page-aligned buffer of whole pages; thread-safe. Raises OSError."""
        done = 0
        while done < len(buffer):
            count = os.preadv(self._fd, [buffer[done:]], offset + done)
            if count == 0:
                raise OSError(errno.EIO, "the file is shorter than it was allocated")
            done += count

    def publish(self, *, replace: bool) -> None:
        """Make it durable, then give it its final name in one step.

        BankError when the unfinished file is not ours any more, or as `refuse_existing`; OSError.
        """
        os.fsync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        refuse_existing(self.final, replace=replace)
        if not _is_at(self._fd, self.path):  # what lies there now may be another's half-written one
            raise BankError(
                f"{self.path}: was deleted or replaced while it was written: leave it alone and "
                "start again"
            )
        self.path.rename(self.final)
        _sync_folder(self.final.parent)

    def remove(self) -> None:
        """Delete the unfinished file, but not one that another writer put in its place."""
        if _is_at(self._fd, self.path):
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file and release its lock."""
        os.close(self._fd)

    def _set_direct(self, wanted: bool) -> None:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT
        with contextlib.suppress(
            OSError
        ):  # a file system without direct I/O: slower, equally right
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | (os.O_DIRECT if wanted else 0))
        self._direct = bool(fcntl.fcntl(self._fd, fcntl.F_GETFL) & os.O_DIRECT)

    def _drop_behind(self, count: int) -> None:
        """Keep what waits in the page cache bounded."""
        with self._lock:
            self._unsynced_bytes += count
            if self._unsynced_bytes < _UNSYNCED_BYTES_MAX:
                return
            self._unsynced_bytes = 0
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)


def partial_path(final: Path) -> Path:
    """Where the bank `final` is while it is unfinished."""
    return final.with_name(final.name + SUFFIX)


def _lock(fd: int, path: Path) -> None:
    """Refuse a second builder, also one that renames the file between our open and our lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        alone = _is_at(fd, path)
    except BlockingIOError:
        alone = False
    if not alone:
        raise BankError(f"{path}: another builder is writing it: wait for it, or stop it")


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
