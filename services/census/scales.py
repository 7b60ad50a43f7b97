"""The second scales and input scales of all experts: gathered from the shards, and judged.

Owns which bytes beyond the headers a census reads: only these scalars, a few kilobytes per shard in
the release, fetched in few reads. Must not know who asks or what is published.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from services.census.ledger import LayerPart
from services.census.report import ScaleCensus
from shared.core.errors import CheckpointError
from shared.kernels.codecs import F32
from station.model.safetensors_header import I64, REMEDY, read_exactly
from station.model.tensor_table import expert_prefix

SCALE_2: Final = ("w1.weight_scale_2", "w2.weight_scale_2", "w3.weight_scale_2")
INPUT_SCALE: Final = ("w1.input_scale", "w2.input_scale", "w3.input_scale")
_WANTED: Final = {f"{name} F32 []": name for name in (*SCALE_2, *INPUT_SCALE)}
_GAP_BYTES_MAX: Final = 64 * 2**10
_SPAN_BYTES_MAX: Final = 4 * 2**20
_SCALAR_BYTES: Final = 4
_EXPERTS_MAX: Final = 10**5  # of a layer; a name holds at most five digits


@dataclass(frozen=True, slots=True)
class Scalars:
    """Values of one scalar tensor, e.g. `w1.input_scale`, of many experts; `key` is layer x 10^5 +
    expert."""

    name: str
    key: I64
    value: F32


def read_scalars(path: Path, data_start: int, layers: Mapping[int, LayerPart]) -> list[Scalars]:
    """All scale scalars of one shard; CheckpointError names the shard."""
    wanted: list[tuple[str, I64, I64]] = []
    for layer, part in layers.items():
        for number, text in enumerate(part.parts):
            if text in _WANTED:
                chosen = part.part == number
                keys = part.expert[chosen] + layer * _EXPERTS_MAX
                wanted.append((_WANTED[text], keys, part.start[chosen]))
    if not wanted:
        return []
    offsets = np.concatenate([starts for _, _, starts in wanted])
    values = _gather(path, data_start, offsets)
    edges = np.cumsum([len(keys) for _, keys, _ in wanted])
    pieces = np.split(values, edges[:-1])
    return [
        Scalars(name, keys, piece) for (name, keys, _), piece in zip(wanted, pieces, strict=True)
    ]


def judge(scalars: Sequence[Scalars]) -> ScaleCensus | None:
    """Count what a kernel would trip over; None when there are no such scalars (MXFP4)."""
    if not scalars:
        return None
    inputs = [piece for piece in scalars if piece.name in INPUT_SCALE]
    bad = [piece for piece in scalars if np.any(_negative(piece.value) | _odd(piece.value))]
    return ScaleCensus(
        scalars=sum(len(piece.value) for piece in scalars),
        unequal_w1_w3=_unequal(scalars),
        negative=sum(int(_negative(piece.value).sum()) for piece in scalars),
        not_finite=sum(int(_odd(piece.value).sum()) for piece in scalars),
        first_bad=_first_bad(bad),
        input_scales=sum(len(piece.value) for piece in inputs),
        input_scales_not_one=sum(int((piece.value != 1).sum()) for piece in inputs),
    )


def _unequal(scalars: Sequence[Scalars]) -> int:
    """Experts whose w1 and w3 do not share one second scale, bit for bit."""
    w1, w3 = (
        (
            np.concatenate([np.zeros(0, np.int64), *(p.key for p in scalars if p.name == name)]),
            np.concatenate(
                [np.zeros(0, np.float32), *(p.value for p in scalars if p.name == name)]
            ),
        )
        for name in ("w1.weight_scale_2", "w3.weight_scale_2")
    )
    _, first, second = np.intersect1d(w1[0], w3[0], assume_unique=True, return_indices=True)
    return int((w1[1][first].view(np.uint32) != w3[1][second].view(np.uint32)).sum())


def _negative(values: F32) -> npt.NDArray[np.bool_]:
    return values < 0


def _odd(values: F32) -> npt.NDArray[np.bool_]:
    return ~np.isfinite(values)


def _first_bad(bad: Sequence[Scalars]) -> str | None:
    names: list[tuple[int, str]] = []
    for piece in bad:
        key = int(piece.key[_negative(piece.value) | _odd(piece.value)].min())
        layer, expert = divmod(key, _EXPERTS_MAX)
        names.append((key, f"{expert_prefix(layer, expert)}{piece.name}"))
    return min(names)[1] if names else None


def _gather(path: Path, data_start: int, offsets: I64) -> F32:
    """The float32 at each of `offsets` of the data; neighbours come in one read."""
    order = np.argsort(offsets)
    ordered = offsets[order]
    found = np.empty((len(ordered), _SCALAR_BYTES), np.uint8)
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened ({error.strerror}); {REMEDY}") from error
    try:
        for start, stop in _spans(ordered):
            low = int(ordered[start])
            data = bytearray(int(ordered[stop - 1]) - low + _SCALAR_BYTES)
            read_exactly(path, file, data_start + low, [memoryview(data)])
            places = (ordered[start:stop] - low)[:, None] + np.arange(_SCALAR_BYTES)
            found[start:stop] = np.frombuffer(data, np.uint8)[places]
    finally:
        os.close(file)
    values = np.empty(len(ordered), np.float32)
    values[order] = found.view("<f4")[:, 0]
    return values


def _spans(ordered: I64) -> list[tuple[int, int]]:
    """Runs of ascending offsets without a large gap, none longer than _SPAN_BYTES_MAX."""
    cuts = (np.flatnonzero(np.diff(ordered) > _GAP_BYTES_MAX) + 1).tolist()
    spans: list[tuple[int, int]] = []
    for start, stop in zip([0, *cuts], [*cuts, len(ordered)], strict=True):
        while start < stop:
            reach = int(np.searchsorted(ordered, ordered[start] + _SPAN_BYTES_MAX, side="right"))
            end = min(stop, reach)
            spans.append((start, end))
            start = end
    return spans
