"""Bank files on disk: opening, reading and checking them.

Owns how records are read and how damage is recognised and named. Must not know what becomes of the
records in memory, or how a bank is made.

A bank's own faults are told apart: too short (named by its first missing record), too long, a
record whose bytes changed (named by tensor), a record never written, a record that is a copy of
another, two records swapped.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import blake3
import numpy as np
import numpy.typing as npt
import xxhash

from shared.core.bank_header import (
    PREFIX_BYTES,
    BankHeader,
    decode,
    header_block_bytes,
    stored_digest,
)
from shared.core.errors import BankError
from shared.core.loading import steps
from shared.core.record import RecordLayout

READ_BYTES: Final = 64 * 2**20


class FaultKind(Enum):
    """What happened to a record."""

    CHANGED = "changed"
    UNWRITTEN = "unwritten"
    DUPLICATE = "duplicate"
    SWAPPED = "swapped"
    SOURCE_CHANGED = "source_changed"  # the bank is as it was built, its checkpoint is not
    MISBUILT = "misbuilt"  # right by its own hash, but never what the checkpoint holds


@dataclass(frozen=True, slots=True)
class RecordFault:
    """One damaged record; `detail` is a clause for a person."""

    row: int
    layer: int
    expert: int
    kind: FaultKind
    detail: str

    def __str__(self) -> str:
        """Where and what, for a person."""
        return f"row {self.row} (layer {self.layer}, expert {self.expert}): {self.detail}"


class BankFile:
    """An open bank whose header and size are right. Close it, or use it as a context manager."""

    def __init__(self, path: Path, fd: int, header: BankHeader, block: bytes) -> None:
        """Takes over `fd`; use `open`."""
        self.path: Final = path
        self.header: Final = header
        self.layout: Final = header.record_layout
        self.records_offset: Final = len(block)
        self.digest: Final = stored_digest(block).hex()
        self._fd = fd
        self._direct_fd: int | None = None

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open and check header and size; BankError says what is wrong where."""
        try:
            # O_NONBLOCK: a FIFO in the bank's place must not hang the daemon
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise BankError(
                f"{path}: cannot open the bank: {error.strerror}: "
                "check the path, or make the bank with `k3 bank build`"
            ) from error
        try:
            block = _read_header(path, fd)
            header = decode(block, hasher=blake3_digest, source=str(path))
            bank = cls(path, fd, header, block)
            _check_size(bank, os.fstat(fd).st_size)
        except BaseException:
            os.close(fd)
            raise
        return bank

    def fileno(self) -> int:
        """The descriptor, for positional reads; closed with the bank."""
        return self._fd

    def close(self) -> None:
        """Give back the file."""
        os.close(self._fd)
        if self._direct_fd is not None:
            os.close(self._direct_fd)

    def __enter__(self) -> Self:
        """The bank itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()

    @property
    def rows(self) -> int:
        """Number of records."""
        return len(self.header.rows)

    @property
    def arena_bytes(self) -> int:
        """Memory that all records take."""
        return self.rows * self.layout.stride_bytes

    def read_into(self, row: int, buffer: memoryview) -> None:
        """Fill `buffer` from record `row` on; it may span several records."""
        offset = self.records_offset + row * self.layout.stride_bytes
        done = 0
        while done < len(buffer):
            count = self._read(buffer[done:], offset + done)
            if count == 0:
                raise BankError(
                    f"{self.path}: the file became shorter than {offset + len(buffer)} bytes "
                    "while it was read: do not write to a bank in place"
                )
            done += count

    def read_directly(self) -> None:
        """Read past the page cache from now on, where the file system allows it.

        Buffers must then start on a page and span whole pages, as records in an arena do; any other
        buffer still works and costs what it always did.
        """
        try:
            # the same file again: a descriptor that shares its flags could not read both ways
            self._direct_fd = os.open(
                f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT
            )
        except OSError:
            self._direct_fd = None

    def forget(self, first: int, last: int) -> None:
        """Let the page cache drop what it holds of the records [first, last)."""
        stride = self.layout.stride_bytes
        os.posix_fadvise(
            self._fd,
            self.records_offset + first * stride,
            (last - first) * stride,
            os.POSIX_FADV_DONTNEED,
        )

    def _read(self, buffer: memoryview, offset: int) -> int:
        try:
            if self._direct_fd is not None:
                try:
                    return os.preadv(self._direct_fd, [buffer], offset)
                except OSError as error:
                    if error.errno != errno.EINVAL:  # the device wants another alignment
                        raise
            return os.preadv(self._fd, [buffer], offset)
        except OSError as error:
            raise BankError(
                f"{self.path}: offset {offset}: cannot read: {error.strerror}: "
                "check the disk, or build the bank again"
            ) from error


def verify(bank: BankFile) -> Iterator[tuple[int, RecordFault | None]]:
    """Check every record of the file in row order, in constant memory: (row, its fault or None)."""
    stride = bank.layout.stride_bytes
    buffer = np.empty((max(1, READ_BYTES // stride), stride), np.uint8)
    for first, last in steps(bank.rows, stride_bytes=stride, step_bytes=READ_BYTES):
        records = buffer[: last - first]
        bank.read_into(first, records.data.cast("B"))
        for row in range(first, last):
            yield row, find_fault(bank, row, records[row - first])


def find_fault(bank: BankFile, row: int, record: npt.NDArray[np.uint8]) -> RecordFault | None:
    """Compare the bytes of record `row` (uint8 [>= record_bytes]) with the header."""
    layer, expert = bank.header.rows[row]
    data = record[: bank.layout.record_bytes]
    found = blake3_digest(data.data).hex()
    if found == bank.header.record_hashes[row]:
        return None
    kind, detail = _diagnose(bank, row, data, found)
    return RecordFault(row, layer, expert, kind, detail)


def refuse_damage(bank: BankFile, row: int, record: npt.NDArray[np.uint8]) -> None:
    """BankError naming record `row` when its bytes are not the header's."""
    fault = find_fault(bank, row, record)
    if fault is not None:
        raise BankError(
            f"{bank.path}: {fault}: build the bank again; `k3 bank verify` lists every damaged "
            "record"
        )


def blake3_digest(data: bytes | memoryview) -> bytes:
    """BLAKE3, 32 bytes: the hash of records and headers."""
    return blake3.blake3(data).digest()


def tensor_checks(layout: RecordLayout, record: bytes | memoryview) -> str:
    """Hex of one u32 per tensor of a record: the low half of its XXH3-64, in layout order."""
    view = memoryview(record)
    hashes = (xxhash.xxh3_64_intdigest(view[f.offset : f.offset + f.length]) for f in layout.fields)
    return "".join(f"{value & 0xFFFFFFFF:08x}" for value in hashes)


def _read_header(path: Path, fd: int) -> bytes:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise BankError(f"{path}: not a regular file: name a file made by `k3 bank build`")
    try:
        size = header_block_bytes(os.pread(fd, PREFIX_BYTES, 0), source=str(path))
        return os.pread(fd, size, 0)
    except OSError as error:
        raise BankError(
            f"{path}: cannot read the header: {error.strerror}: check the disk"
        ) from error


def _check_size(bank: BankFile, size: int) -> None:
    expected = bank.records_offset + bank.arena_bytes
    if size == expected:
        return
    if size > expected:
        raise BankError(
            f"{bank.path}: offset {expected}: {size - expected} bytes follow the last record: "
            "this is not the file that was built, build it again"
        )
    row = max(0, size - bank.records_offset) // bank.layout.stride_bytes
    layer, expert = bank.header.rows[row]
    raise BankError(
        f"{bank.path}: truncated: {size} of {expected} bytes, the first incomplete record is row "
        f"{row} (layer {layer}, expert {expert}): copy or build the bank again"
    )


def _diagnose(
    bank: BankFile, row: int, record: npt.NDArray[np.uint8], found: str
) -> tuple[FaultKind, str]:
    header = bank.header
    if found in header.record_hashes:
        other = header.record_hashes.index(found)
        named = "row {} (layer {}, expert {})".format(other, *header.rows[other])
        theirs = np.empty(len(record), np.uint8)
        bank.read_into(other, theirs.data)
        if blake3_digest(theirs.data).hex() == header.record_hashes[row]:
            return FaultKind.SWAPPED, f"its record and that of {named} are swapped"
        return FaultKind.DUPLICATE, f"holds a copy of the record of {named}"
    written = np.flatnonzero(record)
    end = int(written[-1]) + 1 if len(written) else 0
    if (
        end < len(record) - 4
    ):  # the last tensor is a scale of four bytes; one zero byte proves nothing
        return FaultKind.UNWRITTEN, f"only zeros from byte {end} of {len(record)} on: never written"
    now, then = tensor_checks(bank.layout, record.data), header.tensor_checks[row]
    changed = [
        field.name
        for index, field in enumerate(bank.layout.fields)
        if now[8 * index : 8 * index + 8] != then[8 * index : 8 * index + 8]
    ]
    return FaultKind.CHANGED, f"the bytes of {', '.join(changed)} changed since the bank was built"
