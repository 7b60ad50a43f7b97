"""The block scales of all experts, read in full: a tenth of a checkpoint.

Owns the search for scales that no kernel accepts: E4M3 bytes that are negative or NaN, E8M0 bytes
that are NaN. One piece of a few megabytes per reader is in memory at a time. Must not know headers
or figures.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from services.census.ledger import LayerPart
from services.census.report import BlockScales
from services.progress import ByteProgress
from shared.core.errors import CheckpointError
from shared.kernels.codecs import U8
from station.model.safetensors_header import I64, REMEDY, read_exactly
from station.model.tensor_table import expert_prefix

_READERS: Final = 4
_PIECE_BYTES: Final = 8 * 2**20
_FORMATS: Final = {
    f"w{n}.weight_scale {dtype}": dtype for n in (1, 2, 3) for dtype in ("F8_E4M3", "U8")
}
_E4M3_NAN: Final = 0x7F
_E8M0_NAN: Final = 0xFF
_SIGN: Final = 0x80


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive bytes of one shard that are all scales of one format."""

    path: Path
    offset: int  # in the file
    length: int
    dtype: str


@dataclass(frozen=True, slots=True)
class _Found:
    """What one piece holds; `first_bad` is an offset in the file."""

    negative: int
    nan: int
    first_bad: int | None


@dataclass(frozen=True, slots=True)
class ScaleShard:
    """What this module needs to know of a shard."""

    path: Path
    data_start: int
    layers: Mapping[int, LayerPart]


def read_block_scales(shards: Sequence[ScaleShard], progress: ByteProgress) -> BlockScales:
    """Count all bad block scales; CheckpointError names the shard that cannot be read."""
    pieces = [piece for shard in shards for piece in _pieces(shard)]
    total = sum(piece.length for piece in pieces)
    done = negative = nan = 0
    bad: list[tuple[Path, int]] = []
    with ThreadPoolExecutor(_READERS, thread_name_prefix="scales") as pool:
        reads = {pool.submit(_inspect, piece): piece for piece in pieces}
        try:
            for read in as_completed(reads):
                found, piece = read.result(), reads[read]
                negative += found.negative
                nan += found.nan
                if found.first_bad is not None:
                    bad.append((piece.path, found.first_bad))
                done += piece.length
                progress(done, total)
        finally:
            pool.shutdown(cancel_futures=True)
    first = _name(shards, *min(bad)) if bad else None
    return BlockScales(scales=total, negative=negative, nan=nan, first_bad=first)


def _pieces(shard: ScaleShard) -> Iterator[_Piece]:
    """Runs of neighbouring scale tensors, cut to _PIECE_BYTES."""
    for dtype in dict.fromkeys(_FORMATS.values()):
        starts, lengths = _places(shard, dtype)
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], (starts + lengths)[order]
        cuts = (np.flatnonzero(starts[1:] != ends[:-1]) + 1).tolist()
        for first, last in zip([0, *cuts], [*cuts, len(starts)], strict=True):
            if first == last:
                continue
            start, end = int(starts[first]), int(ends[last - 1])
            for offset in range(start, end, _PIECE_BYTES):
                length = min(_PIECE_BYTES, end - offset)
                yield _Piece(shard.path, shard.data_start + offset, length, dtype)


def _places(shard: ScaleShard, dtype: str) -> tuple[I64, I64]:
    """Start and length of every scale tensor of one format."""
    starts, lengths = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for part in shard.layers.values():
        wanted = [_FORMATS.get(text.rsplit(" [", 1)[0]) == dtype for text in part.parts]
        chosen = np.array(wanted)[part.part]
        starts.append(part.start[chosen])
        lengths.append(part.length[chosen])
    return np.concatenate(starts), np.concatenate(lengths)


def _inspect(piece: _Piece) -> _Found:
    data = bytearray(piece.length)
    try:
        file = os.open(piece.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(
            f"{piece.path}: cannot be opened ({error.strerror}); {REMEDY}"
        ) from error
    try:
        read_exactly(piece.path, file, piece.offset, [memoryview(data)])
        # Or a census would push out of the page cache what the machine is working with.
        os.posix_fadvise(file, piece.offset, piece.length, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)
    return _judged(np.frombuffer(data, np.uint8), piece)


def _judged(codes: U8, piece: _Piece) -> _Found:
    if piece.dtype == "U8":
        nan = codes == _E8M0_NAN
        negative = np.zeros_like(nan)
    else:
        if codes.max(initial=0) < _E4M3_NAN:  # the usual case
            return _Found(0, 0, None)
        nan = codes & _E4M3_NAN == _E4M3_NAN
        negative = (codes >= _SIGN) & ~nan
    bad = np.flatnonzero(nan | negative)
    first = piece.offset + int(bad[0]) if len(bad) else None
    return _Found(int(negative.sum()), int(nan.sum()), first)


def _name(shards: Sequence[ScaleShard], path: Path, offset: int) -> str:
    """Name of the tensor at a byte of a shard."""
    for shard in shards:
        if shard.path != path:
            continue
        place = offset - shard.data_start
        for layer, part in shard.layers.items():
            hit = np.flatnonzero((part.start <= place) & (place < part.start + part.length))
            if len(hit):
                name = part.parts[part.part[hit[0]]].split(" ", 1)[0]
                return f"{expert_prefix(layer, int(part.expert[hit[0]]))}{name}"
    raise AssertionError("a bad scale lies in a tensor of its own shard")
