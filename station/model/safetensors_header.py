"""The table at the head of a safetensors file: read within limits, checked in full.

Owns the format's rules: an 8-byte header length, a JSON table, and data that tiles the rest of the
file without gap or overlap. A sound table is checked by whole columns; only a damaged one is looked
at row by row, to name what is wrong. Must not know the model, what a tensor is for, or torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

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
LENGTH_BYTES: Final = 8
# A header of the release has 2 MB. Decoded JSON can be ten times its text, so this is also what
# keeps a hostile file's allocations near 100 MB; the reference implementation's limit is 100 MB.
HEADER_BYTES_MAX: Final = 2**24
REMEDY: Final = "fetch the file again"
_BUFFERS_MAX: Final = 1024  # IOV_MAX
_SHOWN_MAX: Final = 200
_RANK_MAX: Final = 16
_METADATA: Final = "__metadata__"

I64 = npt.NDArray[np.int64]
TensorType = tuple[str, tuple[int, ...]]


class _Row(msgspec.Struct, frozen=True):
    """One line of the table. Fields unknown to us are ignored, as the reference does."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Line(msgspec.Struct, frozen=True, gc=False):
    """A `_Row`, or the metadata, which decodes to defaults that no sound row has."""

    dtype: str = ""
    shape: tuple[int, ...] = (-1,)
    data_offsets: tuple[int, int] = (0, -1)


@dataclass(frozen=True, slots=True)
class HeaderText:
    """The JSON text of a header, unparsed, and the size of the file around it."""

    path: Path
    text: bytes | bytearray
    file_bytes: int

    @property
    def data_start(self) -> int:
        """Where the tensors' bytes begin in the file."""
        return LENGTH_BYTES + len(self.text)

    @property
    def payload_bytes(self) -> int:
        """Bytes behind the header."""
        return self.file_bytes - self.data_start


@dataclass(frozen=True, slots=True)
class HeaderTable:
    """A sound table in file order: tensor i has names[i], types[i] = (dtype, shape) and lies at
    bytes starts[i] .. starts[i] + lengths[i] of the data (int64 arrays)."""

    names: list[str]
    types: list[TensorType]
    starts: I64
    lengths: I64


class _Unsound(Exception):
    """The columns do not add up; the rows must be asked which one is to blame."""


class _Sizes(dict[TensorType, int]):
    """Bytes of each (dtype, shape) seen so far: a file has few of them."""

    def __missing__(self, key: TensorType) -> int:
        dtype, shape = key
        if dtype not in DTYPE_BYTES or not _is_shape(shape):
            raise _Unsound
        self[key] = size = math.prod(shape) * DTYPE_BYTES[dtype]
        return size


def _is_shape(shape: Sequence[int]) -> bool:
    """Whether these are dimensions; without the limit a product could take hours."""
    return len(shape) <= _RANK_MAX and all(size >= 0 for size in shape)


def read_header(path: Path, file: int) -> HeaderText:
    """Read the header of the open `file`; CheckpointError names `path`. Nothing is allocated for a
    header that the file cannot hold or that is over the limit. Thread-safe."""
    file_bytes = os.fstat(file).st_size
    if file_bytes < LENGTH_BYTES:
        raise CheckpointError(f"{path}: {file_bytes} bytes are no safetensors file; {REMEDY}")
    prefix = bytearray(LENGTH_BYTES)
    read_exactly(path, file, 0, [memoryview(prefix)])
    header_bytes = int.from_bytes(prefix, "little")
    if header_bytes > min(HEADER_BYTES_MAX, file_bytes - LENGTH_BYTES):
        raise CheckpointError(
            f"{path}: header of {header_bytes} bytes at byte 0 does not fit a file of {file_bytes} "
            f"(limit {HEADER_BYTES_MAX}); truncated or not safetensors: {REMEDY}"
        )
    text = bytearray(header_bytes)
    read_exactly(path, file, LENGTH_BYTES, [memoryview(text)])
    return HeaderText(path, text, file_bytes)


def read_exactly(path: Path, file: int, offset: int, buffers: Sequence[memoryview]) -> None:
    """Fill `buffers`, one after the other, from byte `offset` of the open `file`.

    CheckpointError names the byte where the disk or the file ends it. Thread-safe.
    """
    left = [buffer for buffer in buffers if len(buffer)]
    while left:
        try:
            count = os.preadv(file, left[:_BUFFERS_MAX], offset)
        except OSError as error:
            raise CheckpointError(
                f"{path}: read failed at byte {offset} ({error.strerror}); check the disk"
            ) from error
        if count == 0:
            raise CheckpointError(f"{path}: ends at byte {offset}; {REMEDY}")
        offset += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]


def parse_header(header: HeaderText) -> HeaderTable:
    """The checked table. CheckpointError names the file, the tensor, the bytes and the remedy."""
    table = _sound_table(header)
    if table is None:
        raise _diagnosis(header)
    return table


def _sound_table(header: HeaderText) -> HeaderTable | None:
    """None for whatever does not add up; the decoded text is free again before it is diagnosed."""
    try:
        lines = msgspec.json.decode(header.text, type=dict[str, _Line])
        lines.pop(_METADATA, None)
        return _checked_columns(lines, header.payload_bytes)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError, _Unsound):
        return None


def _checked_columns(lines: Mapping[str, _Line], payload_bytes: int) -> HeaderTable:
    """Raises _Unsound, or OverflowError for numbers beyond 63 bits."""
    names = list(lines)
    types: list[TensorType] = list(map(attrgetter("dtype", "shape"), lines.values()))
    offsets = map(attrgetter("data_offsets"), lines.values())
    flat = np.fromiter(chain.from_iterable(offsets), np.int64, count=2 * len(names))
    starts, stops = flat[0::2], flat[1::2]
    lengths = np.fromiter(map(_Sizes().__getitem__, types), np.int64, count=len(names))
    if np.any(starts[1:] < stops[:-1]):  # not listed in file order
        order = np.lexsort((stops, starts))
        names, types = [names[i] for i in order], [types[i] for i in order]
        starts, stops, lengths = starts[order], stops[order], lengths[order]
    edges = np.concatenate(([0], stops))
    sound = (
        np.array_equal(starts, edges[:-1])
        and np.array_equal(lengths, stops - starts)
        and edges[-1] == payload_bytes
    )
    if not sound:
        raise _Unsound
    return HeaderTable(names, types, starts.copy(), lengths)


def _diagnosis(header: HeaderText) -> CheckpointError:
    """What is wrong with an unsound header, row by row."""
    path = header.path
    try:
        raw = msgspec.json.decode(header.text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return CheckpointError(f"{path}: header is damaged ({error}); {REMEDY}")
    raw.pop(_METADATA, None)
    rows: dict[str, _Row] = {}
    for name, line in raw.items():
        try:
            rows[name] = msgspec.json.decode(line, type=_Row)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return CheckpointError(
                f"{path}: header is damaged: tensor {_shown(name)}: {error}; {REMEDY}"
            )
    expected = 0
    for name, row in sorted(rows.items(), key=lambda item: item[1].data_offsets):
        complaint = _complaint(row, expected)
        if complaint is not None:
            return CheckpointError(f"{path}: tensor {_shown(name)} {complaint}; {REMEDY}")
        expected = row.data_offsets[1]
    return CheckpointError(
        f"{path}: {header.file_bytes} bytes on disk, header describes "
        f"{header.data_start + expected}; truncated or appended to: {REMEDY}"
    )


def _complaint(row: _Row, expected: int) -> str | None:
    """What is wrong with a row whose data should start at byte `expected` of the data."""
    start, stop = row.data_offsets
    if start != expected or stop < start:
        return (
            f"lies at bytes {_shown(start)}..{_shown(stop)} of the data, expected to start at "
            f"{expected} "
            "(gap or overlap)"
        )
    shape = _shown(list(row.shape[:_RANK_MAX]))
    if row.dtype not in DTYPE_BYTES or not _is_shape(row.shape):
        return f"has unknown dtype {row.dtype[:20]!r} or bad shape {shape}"
    length = math.prod(row.shape) * DTYPE_BYTES[row.dtype]
    if length != stop - start:
        return (
            f"holds {_shown(stop - start)} bytes, but {row.dtype} {shape} needs {_shown(length)}, "
            f"at byte {start} of the data"
        )
    return None


def _shown(value: object) -> str:
    """Hostile text or numbers, cut to a line's length."""
    try:
        text = str(value)
    except ValueError:  # a product with more digits than Python is willing to print
        return "a huge number of"
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."
