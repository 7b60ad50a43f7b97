"""How one matrix is stored, decided from the dtypes that are there.

Owns the companions of each storage format (scales) and their shapes. Pure: it looks at header
entries, never at data. The alias lists in the release's quantisation config are not consulted,
because the dtypes say the same thing and cannot go stale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from shared.core.errors import CheckpointError
from shared.kernels.codecs import FP8_TILE, MXFP4_BLOCK, NVFP4_BLOCK
from station.model.safetensors_file import TensorEntry
from station.model.tensor_table import ExpectedTensor, Kind

_FLOATS: Final = frozenset({"BF16", "F16", "F32"})
_REMEDY: Final = "the checkpoint does not match its config.json; fetch both again"


class Format(Enum):
    """Storage of one tensor."""

    PLAIN = "plain"
    FP8_BLOCK = "fp8_block"  # E4M3, one F32 scale per 128 x 128 tile
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the model and the stored tensors it is made of, in reading order."""

    expected: ExpectedTensor
    format: Format
    parts: tuple[TensorEntry, ...]


def stored_tensor(expected: ExpectedTensor, entries: Mapping[str, TensorEntry]) -> StoredTensor:
    """Find and check everything `expected` is stored as; CheckpointError names the tensor."""
    base = expected.name.removesuffix(".weight")
    if expected.kind is Kind.EXPERT and f"{base}.weight_packed" in entries:
        return _mxfp4(expected, base, entries)
    entry = _entry(expected.name, entries)
    if expected.kind is Kind.EXPERT:
        return _nvfp4(expected, base, entries)
    if expected.kind is Kind.LINEAR and entry.dtype == "F8_E4M3":
        rows, columns = expected.shape
        tiles = (-(-rows // FP8_TILE), 1, -(-columns // FP8_TILE), 1)
        scale = _part(f"{base}.weight_scale", "F32", tiles, entries)
        weight = _part(expected.name, "F8_E4M3", expected.shape, entries)
        return StoredTensor(expected, Format.FP8_BLOCK, (weight, scale))
    if entry.dtype not in _FLOATS:
        raise CheckpointError(
            f"tensor {entry.name} is stored as {entry.dtype}, expected one of {sorted(_FLOATS)}; "
            f"{_REMEDY}"
        )
    _check_plain_shape(expected, entry)
    return StoredTensor(expected, Format.PLAIN, (entry,))


def _nvfp4(expected: ExpectedTensor, base: str, entries: Mapping[str, TensorEntry]) -> StoredTensor:
    rows, columns = expected.shape
    parts = (
        _part(f"{base}.weight", "U8", (rows, columns // 2), entries),
        _part(f"{base}.weight_scale", "F8_E4M3", (rows, columns // NVFP4_BLOCK), entries),
        _part(f"{base}.weight_scale_2", "F32", (), entries),
        _part(f"{base}.input_scale", "F32", (), entries),
    )
    return StoredTensor(expected, Format.NVFP4, parts)


def _mxfp4(expected: ExpectedTensor, base: str, entries: Mapping[str, TensorEntry]) -> StoredTensor:
    rows, columns = expected.shape
    if columns % MXFP4_BLOCK:
        raise CheckpointError(
            f"tensor {base}.weight_packed: {columns} inputs do not divide into MXFP4 blocks of "
            f"{MXFP4_BLOCK}; {_REMEDY}"
        )
    parts = (
        _part(f"{base}.weight_packed", "U8", (rows, columns // 2), entries),
        _part(f"{base}.weight_scale", "U8", (rows, columns // MXFP4_BLOCK), entries),
    )
    return StoredTensor(expected, Format.MXFP4, parts)


def _entry(name: str, entries: Mapping[str, TensorEntry]) -> TensorEntry:
    entry = entries.get(name)
    if entry is None:
        raise CheckpointError(f"tensor {name} is missing; {_REMEDY}")
    return entry


def _part(
    name: str, dtype: str, shape: tuple[int, ...], entries: Mapping[str, TensorEntry]
) -> TensorEntry:
    entry = _entry(name, entries)
    if entry.dtype != dtype or entry.shape != shape:
        raise CheckpointError(
            f"tensor {name} is {entry.dtype} {list(entry.shape)}, expected {dtype} {list(shape)}; "
            f"{_REMEDY}"
        )
    return entry


def _check_plain_shape(expected: ExpectedTensor, entry: TensorEntry) -> None:
    padded = expected.kind is Kind.PADDED
    fits = entry.shape[1:] == expected.shape[1:] and entry.shape[:1] >= expected.shape[:1]
    if entry.shape != expected.shape and not (padded and fits):
        raise CheckpointError(
            f"tensor {entry.name} has shape {list(entry.shape)}, expected "
            f"{list(expected.shape)}{' or longer' if padded else ''}; {_REMEDY}"
        )
