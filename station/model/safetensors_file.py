"""One safetensors file: its header checked in full, its bytes read by position.

Owns the format's rules (8-byte header length, JSON table, data that tiles the rest of the file
without gap or overlap). Reads are positional (`preadv`), so one open file serves any number of
threads. Must not know the model, tensor names, torch, or what a dtype is good for.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from shared.core.errors import CheckpointError

DTYPE_BYTES: Final = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
_LENGTH_BYTES: Final = 8
_HEADER_BYTES_MAX: Final = 100_000_000  # the limit of the reference implementation
_REMEDY: Final = "fetch the file again"


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the header, as stored."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


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
                f"{path}: cannot be opened ({error.strerror}); {_REMEDY}"
            ) from error
        try:
            return cls(path, file, _read_entries(path, file))
        except BaseException:
            os.close(file)
            raise

    def read_into(self, entry: TensorEntry, buffer: memoryview) -> None:
        """Fill `buffer` (exactly `entry.length` bytes) with a tensor's bytes. Thread-safe."""
        _read_exactly(self.path, self._file, entry.offset, buffer)

    def read(self, entry: TensorEntry) -> bytearray:
        """A tensor's bytes, row-major, little endian. Thread-safe."""
        data = bytearray(entry.length)
        self.read_into(entry, memoryview(data))
        return data

    def close(self) -> None:
        """Release the file; reads are over."""
        os.close(self._file)


def _read_exactly(path: Path, file: int, offset: int, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(file, [buffer[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(
                f"{path}: read failed at byte {offset + done} ({error.strerror}); check the disk"
            ) from error
        if count == 0:
            raise CheckpointError(f"{path}: ends at byte {offset + done}; {_REMEDY}")
        done += count


def _read_entries(path: Path, file: int) -> dict[str, TensorEntry]:
    file_bytes = os.fstat(file).st_size
    if file_bytes < _LENGTH_BYTES:
        raise CheckpointError(f"{path}: {file_bytes} bytes are no safetensors file; {_REMEDY}")
    prefix = bytearray(_LENGTH_BYTES)
    _read_exactly(path, file, 0, memoryview(prefix))
    header_bytes = int.from_bytes(prefix, "little")
    if header_bytes > min(_HEADER_BYTES_MAX, file_bytes - _LENGTH_BYTES):
        raise CheckpointError(
            f"{path}: header of {header_bytes} bytes does not fit a file of {file_bytes}; "
            f"truncated or not safetensors: {_REMEDY}"
        )
    header = bytearray(header_bytes)
    _read_exactly(path, file, _LENGTH_BYTES, memoryview(header))
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        table = {name: msgspec.json.decode(row, type=_Row) for name, row in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: header is damaged ({error}); {_REMEDY}") from error
    return _checked_entries(path, table, _LENGTH_BYTES + header_bytes, file_bytes)


def _checked_entries(
    path: Path, table: dict[str, _Row], data_start: int, file_bytes: int
) -> dict[str, TensorEntry]:
    """Entries in file order; the data must tile [data_start, file_bytes) exactly."""
    entries: dict[str, TensorEntry] = {}
    expected = 0
    for name, row in sorted(table.items(), key=lambda item: item[1].data_offsets):
        start, stop = row.data_offsets
        if start != expected or stop < start:
            raise CheckpointError(
                f"{path}: tensor {name} lies at bytes {start}..{stop}, expected to start at "
                f"{expected} (gap or overlap); {_REMEDY}"
            )
        if row.dtype not in DTYPE_BYTES or any(size < 0 for size in row.shape):
            raise CheckpointError(
                f"{path}: tensor {name} has unknown dtype {row.dtype!r} or bad shape {row.shape}; "
                f"{_REMEDY}"
            )
        length = math.prod(row.shape) * DTYPE_BYTES[row.dtype]
        if length != stop - start:
            raise CheckpointError(
                f"{path}: tensor {name} holds {stop - start} bytes, but {row.dtype} "
                f"{list(row.shape)} needs {length}; {_REMEDY}"
            )
        entries[name] = TensorEntry(name, row.dtype, row.shape, data_start + start, length)
        expected = stop
    if data_start + expected != file_bytes:
        raise CheckpointError(
            f"{path}: {file_bytes} bytes on disk, header describes {data_start + expected}; "
            f"truncated or appended to: {_REMEDY}"
        )
    return entries
