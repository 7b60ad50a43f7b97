"""One safetensors file: where each tensor lies, and its bytes read by position.

Reads are positional (`preadv`), so one open file serves any number of threads. The header and its
checks are `safetensors_header`'s. Must not know the model, tensor names, torch, or what a dtype is
good for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shared.core.errors import CheckpointError
from station.model.safetensors_header import REMEDY, parse_header, read_exactly, read_header

_AHEAD_BYTES: Final = 2**23  # as far as usual disks read ahead; folios are smaller


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: safetensors dtype name, shape, and where its bytes lie in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


class SafetensorsFile:
    """An open, validated safetensors file. `entries` maps tensor name to TensorEntry."""

    def __init__(self, path: Path, file: int, entries: dict[str, TensorEntry]) -> None:
        """Use `SafetensorsFile.open`; `file` is a file descriptor this object now owns."""
        self.path = path
        self.entries = entries
        self._file = file

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        """Open and validate; CheckpointError names the file, the tensor and the remedy."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be opened ({error.strerror}); {REMEDY}"
            ) from error
        try:
            return cls(path, file, _read_entries(path, file))
        except BaseException:
            os.close(file)
            raise

    def read_into(self, entry: TensorEntry, buffer: memoryview) -> None:
        """Fill `buffer` (exactly `entry.length` bytes) with a tensor's bytes. Thread-safe."""
        read_exactly(self.path, self._file, entry.offset, [buffer])

    def read_together(self, parts: Sequence[tuple[TensorEntry, memoryview]]) -> None:
        """Fill each buffer with its tensor; neighbours in the file are one read. Thread-safe."""
        buffers = {entry.offset: buffer for entry, buffer in parts}
        for run in contiguous_runs([entry for entry, _ in parts]):
            read_exactly(
                self.path, self._file, run[0].offset, [buffers[entry.offset] for entry in run]
            )

    def release(self, entries: Sequence[TensorEntry]) -> None:
        """Let the page cache drop these tensors and what was read ahead of them. Thread-safe."""
        for run in contiguous_runs(entries):
            start = max(0, run[0].offset - _AHEAD_BYTES)
            length = run[-1].offset + run[-1].length + _AHEAD_BYTES - start
            os.posix_fadvise(self._file, start, length, os.POSIX_FADV_DONTNEED)

    def read(self, entry: TensorEntry) -> bytearray:
        """A tensor's bytes, row-major, little endian. Thread-safe."""
        data = bytearray(entry.length)
        self.read_into(entry, memoryview(data))
        return data

    def close(self) -> None:
        """Release the file; reads are over."""
        os.close(self._file)


def contiguous_runs(entries: Sequence[TensorEntry]) -> list[list[TensorEntry]]:
    """Tensors of one file in file order, those that follow each other without a gap together."""
    runs: list[list[TensorEntry]] = []
    end = -1
    for entry in sorted(entries, key=lambda entry: entry.offset):
        if entry.offset != end:
            runs.append([])
        runs[-1].append(entry)
        end = entry.offset + entry.length
    return runs


def _read_entries(path: Path, file: int) -> dict[str, TensorEntry]:
    """Entries in file order."""
    header = read_header(path, file)
    table = parse_header(header)
    starts, lengths = (column.tolist() for column in (table.starts, table.lengths))
    return {
        name: TensorEntry(name, dtype, shape, header.data_start + start, length)
        for name, (dtype, shape), start, length in zip(
            table.names, table.types, starts, lengths, strict=True
        )
    }
