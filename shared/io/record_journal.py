"""The journal of an unfinished bank: which records are written, and their hashes.

Owns its lines and what a torn or foreign journal is worth (nothing). A line is the XXH3-64 of its
JSON in hex, a space, the JSON, a newline; the first one identifies the bank. A record is appended
after it was written, and whoever resumes compares it with its hash again: the journal may promise
more than reached the disk.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Self

import msgspec
import xxhash

from shared.core.bank_header import JSON_BYTES_MAX, Blake3Hex, TensorChecks

SUFFIX: Final = ".journal"
_CHECK_CHARS: Final = 16


class _Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The bank that is being built: BLAKE3 (hex) of its header without hashes."""

    bank: Blake3Hex


class Finished(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One written record; `golden` is the row of its golden where the bank has one."""

    row: Annotated[int, msgspec.Meta(ge=0)]
    record_hash: Blake3Hex
    source_hash: Blake3Hex
    tensor_checks: TensorChecks
    golden: bytes | None = None


class Journal:
    """An open journal. `finished` is what it held when it was opened, `discarded` how many records
    of another bank it promised until then."""

    def __init__(
        self, path: Path, fd: int, finished: dict[int, Finished], *, discarded: int
    ) -> None:
        """Use `open`; takes over `fd`."""
        self.path: Final = path
        self.finished: Final = finished
        self.discarded: Final = discarded
        self._fd = fd
        self._lock = threading.Lock()
        self._appended = 0

    @classmethod
    def open(cls, path: Path, bank: str, *, rows: int) -> Self:
        """Open or begin the journal of `bank` (see _Identity) with `rows` records.

        What belongs to another bank is discarded; a torn tail is cut off. Raises OSError.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o644)
        try:
            head = _line(_Identity(bank=bank))
            data = os.pread(fd, JSON_BYTES_MAX, 0)
            finished: dict[int, Finished] = {}
            discarded = 0
            if data.startswith(head):
                valid = len(head)
                for entry, end in _entries(data, valid):
                    if entry.row < rows:
                        finished[entry.row] = entry
                    valid = end
                os.ftruncate(fd, valid)
            else:
                discarded = _count(data)
                os.ftruncate(fd, 0)
                _append(fd, head)
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, finished, discarded=discarded)

    @property
    def is_empty(self) -> bool:
        """Nothing in it that a later build could use."""
        return not self.finished and not self._appended

    def append(self, entry: Finished) -> None:
        """Add a record that was written; thread-safe. Raises OSError, e.g. for a full disk."""
        with self._lock:
            _append(self._fd, _line(entry))
            self._appended += 1

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _append(fd: int, line: bytes) -> None:
    while line:
        line = line[os.write(fd, line) :]


def _line(entry: _Identity | Finished) -> bytes:
    text = msgspec.json.encode(entry)
    return f"{xxhash.xxh3_64_intdigest(text):016x} ".encode() + text + b"\n"


def _entries(data: bytes, start: int) -> Iterator[tuple[Finished, int]]:
    """(entry, where its line ends) up to the first line that is not whole."""
    decoder = msgspec.json.Decoder(Finished)
    while (end := data.find(b"\n", start)) >= 0:
        text = data[start + _CHECK_CHARS + 1 : end]
        check = f"{xxhash.xxh3_64_intdigest(text):016x} ".encode()
        if data[start : start + _CHECK_CHARS + 1] != check:
            return
        try:
            entry = decoder.decode(text)
        except msgspec.DecodeError:
            return
        start = end + 1
        yield entry, start


def count_finished(path: Path) -> int:
    """Records that a journal promises; 0 without one. Changes nothing."""
    try:
        # O_NONBLOCK: a FIFO in its place must not hang whoever looks
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            data = file.read(JSON_BYTES_MAX) or b""
    except OSError:
        return 0
    return _count(data)


def _count(data: bytes) -> int:
    """Records that the lines after the first one promise."""
    return len({entry.row for entry, _ in _entries(data, data.find(b"\n") + 1)})
