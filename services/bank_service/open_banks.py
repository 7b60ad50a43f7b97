"""The banks that are being pulled: found by name, then read by digest from an open descriptor.

Owns the descriptors and which of them stay open. A bank that is replaced while a node pulls it
keeps its old bytes until nobody reads them any more. Must not know who pulls, or how fast.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from structlog.typing import FilteringBoundLogger

from services.bank_service.refusal import Refusal, gone, out_of_range
from shared.core.errors import BankError
from shared.io.bank_file import BankFile

SUFFIX: Final = ".k3bank"
OPEN_BANKS_MAX: Final = 64
IDLE_US: Final = 600_000_000  # then a bank's descriptor is closed; a replaced one frees its disk
AHEAD_BYTES: Final = 32 * 2**20  # more than a kernel reads ahead of what was asked for
_SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})  # they pass

Identity = tuple[int, int, int, int]


@dataclass(slots=True)
class OpenBank:
    """What a node is told of a bank, and where its bytes are. Mutable: `used_us` moves."""

    name: str
    path: Path
    digest: str
    file_bytes: int
    header_bytes: int
    identity: Identity
    fd: int
    used_us: int


class OpenBanks:
    """Finds banks in `folders`, the first folder that has a usable one first; thread-safe."""

    def __init__(
        self,
        folders: Sequence[Path],
        log: FilteringBoundLogger,
        *,
        open_max: int = OPEN_BANKS_MAX,
        idle_us: int = IDLE_US,
    ) -> None:
        """At most `open_max` stay open, and none that was not read for `idle_us`."""
        self._folders: Final = tuple(folders)
        self._log = log
        self._open_max: Final = open_max
        self._idle_us: Final = idle_us
        self._lock = threading.Lock()
        self._banks: OrderedDict[str, OpenBank] = OrderedDict()  # by digest, longest unused first

    def __len__(self) -> int:
        """How many are open."""
        return len(self._banks)

    def find(self, name: str, now_us: int) -> OpenBank | Refusal:
        """The bank `name`, open and with a right header; the file is looked at every time."""
        fault: Refusal | None = None
        for folder in self._folders:
            path = folder / f"{name}{SUFFIX}"
            try:
                known = self._unchanged(name, path, now_us)
                return known if known is not None else self._opened(name, path, now_us)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (BankError, OSError) as error:
                found = _unusable(path, error)
                self._log.warning("bank_unusable", bank=name, error=found.text)
                fault = fault or found
        if fault is not None:
            return fault
        where = ", ".join(map(str, self._folders))
        return Refusal(
            "bank_unknown",
            f"there is no bank {name}{SUFFIX} in {where}: build it there with `k3 bank build`",
            permanent=True,
        )

    def read(self, digest: str, offset: int, length: int, now_us: int) -> bytes | Refusal:
        """Bytes of a bank that was found, past the page cache as far as it goes."""
        with self._lock:
            bank = self._banks.get(digest)
            if bank is None:
                return gone(digest)
            if offset + length > bank.file_bytes:
                return out_of_range(digest, bank.file_bytes)
            bank.used_us = now_us
            self._banks.move_to_end(digest)
            try:
                fd = os.dup(bank.fd)  # our own: the bank's may be closed while we read
            except OSError as error:
                return _read_failed(bank, error.strerror)
        try:
            return self._read(fd, bank, offset, length)
        finally:
            os.close(fd)

    def name_of(self, digest: str) -> str | None:
        """The name of an open bank."""
        bank = self._banks.get(digest)
        return None if bank is None else bank.name

    def close_idle(self, now_us: int) -> None:
        """Close what was not read for long; whoever still wants it asks for its name again."""
        with self._lock:
            for bank in list(self._banks.values()):
                if now_us - bank.used_us > self._idle_us:
                    os.close(self._banks.pop(bank.digest).fd)

    def close(self) -> None:
        """Close all."""
        with self._lock:
            while self._banks:
                os.close(self._banks.popitem()[1].fd)

    def _unchanged(self, name: str, path: Path, now_us: int) -> OpenBank | None:
        """The open bank that is still this file; FileNotFoundError when there is no file."""
        identity = identity_of(path.stat())
        with self._lock:
            for bank in self._banks.values():
                if bank.path == path and bank.name == name and bank.identity == identity:
                    bank.used_us = now_us
                    self._banks.move_to_end(bank.digest)
                    return bank
        return None

    def _opened(self, name: str, path: Path, now_us: int) -> OpenBank:
        with BankFile.open(path) as file:
            fd = os.dup(file.fileno())
            bank = OpenBank(
                name=name,
                path=path,
                digest=file.digest,
                file_bytes=file.records_offset + file.arena_bytes,
                header_bytes=file.records_offset,
                identity=identity_of(os.fstat(fd)),
                fd=fd,
                used_us=now_us,
            )
        with self._lock:
            # of the same digest, yet another file: built again because its bytes were damaged
            earlier = self._banks.pop(bank.digest, None)
            if earlier is not None:
                os.close(earlier.fd)
            self._banks[bank.digest] = bank
            while len(self._banks) > self._open_max:
                os.close(self._banks.popitem(last=False)[1].fd)
        return bank

    def _read(self, fd: int, bank: OpenBank, offset: int, length: int) -> bytes | Refusal:
        parts: list[bytes] = []
        at, end = offset, offset + length
        try:
            while at < end:
                part = os.pread(fd, end - at, at)
                if not part:
                    return _read_failed(bank, f"the file became shorter than {end} bytes")
                parts.append(part)
                at += len(part)
            # A bank is read once by each node: it must not push the model out of memory. Together
            # with what lies before, which was read ahead in pieces that end behind their range.
            start = max(0, offset - AHEAD_BYTES)
            os.posix_fadvise(fd, start, offset + length - start, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            self._log.warning("bank_unreadable", bank=bank.name, error=str(error))
            return _read_failed(bank, error.strerror)
        return b"".join(parts)


def identity_of(status: os.stat_result) -> Identity:
    """Equal for two looks at a file that was neither replaced nor written in between."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _unusable(path: Path, error: BankError | OSError) -> Refusal:
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(cause, OSError) and cause.errno in _SHORTAGES:
        text = f"{path}: cannot open: {cause.strerror}: free some on the Station"
        return Refusal("read_failed", text, permanent=False)
    if isinstance(error, OSError):  # e.g. links in a circle
        text = f"{path}: cannot look for the bank: {error.strerror}: correct the path"
        return Refusal("bank_invalid", text, permanent=True)
    return Refusal("bank_invalid", str(error), permanent=True)


def _read_failed(bank: OpenBank, cause: str | None) -> Refusal:
    return Refusal(
        "read_failed", f"{bank.path}: cannot read: {cause}: check the disk", permanent=False
    )
