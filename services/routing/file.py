"""Trace files: reading one or several as a trace, and writing a whole trace.

Owns the rules for damage: a torn last block is dropped and named, any other damage is one
TraceError. Must not know who recorded or asks. The bytes are format.py's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from services.routing import format as layout
from services.routing.format import BlockHeader, LossTotals, Records, TraceMeta
from services.routing.trace import Trace, check
from shared.core.errors import TraceError

SUFFIX: Final = ".k3trace"


@dataclass(frozen=True, slots=True)
class LoadedTrace:
    """A trace and what its files said about it.

    `meta` is that of the first file, `losses` the sum over recordings, `notices` whole sentences
    about what was dropped on reading.
    """

    trace: Trace
    meta: TraceMeta
    losses: LossTotals
    notices: tuple[str, ...]


@dataclass(slots=True)
class _Scanned:
    """One file's blocks as far as their headers tell."""

    path: Path
    meta: TraceMeta
    blocks: list[tuple[int, BlockHeader]] = field(default_factory=list)  # payload offset, header
    torn: str | None = None

    @property
    def tokens(self) -> int:
        return sum(header.tokens for _, header in self.blocks)


def load(paths: Sequence[Path]) -> LoadedTrace:
    """Read files of one model as one trace, in any order; parts of a recording find each other.

    TraceError for a file that is missing, foreign, damaged before its last block, of another model
    than the first, given twice, or when no token is left.
    """
    if not paths:
        raise TraceError("no trace file given: give one or more FILE" + SUFFIX)
    scanned = [_scan(path) for path in paths]
    _check_together(scanned)
    scanned.sort(key=lambda one: (one.meta.created_s, one.meta.recording, one.meta.part))
    records = np.empty(sum(one.tokens for one in scanned), scanned[0].meta.record)
    losses: dict[str, LossTotals] = {}
    recordings: list[tuple[str, int]] = []
    filled = 0
    for one in scanned:
        last = filled
        for header, payload in _payloads(one):
            if header.kind == layout.KIND_TOKENS:
                records[filled : filled + header.tokens] = np.frombuffer(payload, records.dtype)
                filled += header.tokens
            else:
                # cumulative, so the last of a recording counts
                losses[one.meta.recording] = layout.parse_totals(payload, source=str(one.path))
        recordings.append((one.meta.recording, filled - last))
    trace = _trace(scanned[0].meta, records[:filled], recordings)
    check(trace, source=_named(paths))
    return LoadedTrace(
        trace,
        scanned[0].meta,
        LossTotals(
            dropped=sum(totals.dropped for totals in losses.values()),
            incomplete=sum(totals.incomplete for totals in losses.values()),
        ),
        tuple(one.torn for one in scanned if one.torn is not None),
    )


def save(path: Path, trace: Trace, meta: TraceMeta) -> None:
    """Write a whole trace in one durable step; TraceError when it cannot be written."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with ExitStack() as undo:
            stream = undo.enter_context(partial.open("wb"))
            undo.callback(partial.unlink, missing_ok=True)
            stream.write(layout.head_bytes(meta))
            for start in range(0, trace.tokens, layout.BLOCK_TOKENS):
                stream.write(layout.token_block(_records(trace, meta, start)))
            stream.flush()
            os.fsync(stream.fileno())
            partial.replace(path)
    except OSError as error:
        raise TraceError(
            f"{path}: cannot write the trace: {error.strerror}; choose a folder with room"
        ) from error


def _records(trace: Trace, meta: TraceMeta, start: int) -> Records:
    stop = min(start + layout.BLOCK_TOKENS, trace.tokens)
    records = np.empty(stop - start, meta.record)
    records["request"] = trace.request[start:stop]
    records["step"] = trace.step[start:stop]
    records["ids"] = trace.ids[start:stop]
    return records


def _scan(path: Path) -> _Scanned:
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(layout.PREFIX_BYTES)
            if not size:
                raise TraceError(f"{path}: the file is empty; record it again")
            rest = stream.read(layout.rest_of_head(prefix, source=str(path)))
            one = _Scanned(path, layout.parse_head(prefix + rest, source=str(path)))
            _scan_blocks(stream, one, size)
            return one
    except OSError as error:
        raise TraceError(
            f"{path}: cannot read the trace: {error.strerror}; give a FILE{SUFFIX}"
        ) from error


def _scan_blocks(stream: BinaryIO, one: _Scanned, size: int) -> None:
    offset = stream.tell()
    while offset < size:
        header = layout.parse_block_header(stream.read(layout.BLOCK_HEADER_BYTES), one.meta)
        start = offset + layout.BLOCK_HEADER_BYTES
        if header is None:
            stream.seek(offset)
            # a crash can leave the file's length without its data
            if size - start >= 0 and not _is_zero(stream, size - offset):
                raise _damaged(one.path, offset)
            one.torn = _torn(one, offset, size)
            return
        end = start + header.payload_bytes
        if end > size:
            one.torn = _torn(one, offset, size)
            return
        if end == size:
            stream.seek(start)
            if not layout.is_intact(header, stream.read(header.payload_bytes)):
                one.torn = _torn(one, offset, size)
                return
        one.blocks.append((start, header))
        stream.seek(end)
        offset = end


def _payloads(one: _Scanned) -> Iterator[tuple[BlockHeader, bytes]]:
    try:
        with one.path.open("rb") as stream:
            for offset, header in one.blocks:
                stream.seek(offset)
                payload = stream.read(header.payload_bytes)
                if not layout.is_intact(header, payload):
                    raise _damaged(one.path, offset - layout.BLOCK_HEADER_BYTES)
                yield header, payload
    except OSError as error:
        raise TraceError(f"{one.path}: cannot read the trace: {error.strerror}") from error


def _is_zero(stream: BinaryIO, length: int) -> bool:
    while length > 0:
        piece = stream.read(min(length, 2**20))
        if not piece or piece.strip(b"\0"):
            return not piece
        length -= len(piece)
    return True


def _check_together(scanned: Sequence[_Scanned]) -> None:
    first = scanned[0]
    seen: dict[tuple[str, int], Path] = {}
    for one in scanned:
        if _model(one.meta) != _model(first.meta):
            raise TraceError(
                f"{one.path}: of another model than {first.path}; give traces of one model"
            )
        key = (one.meta.recording, one.meta.part)
        if key in seen:
            raise TraceError(
                f"{one.path}: the same part of a recording as {seen[key]}; give it once"
            )
        seen[key] = one.path


def _model(meta: TraceMeta) -> tuple[str, int, int, int, int]:
    return (meta.model_digest, meta.first_layer, meta.layers, meta.experts, meta.top_k)


def _trace(meta: TraceMeta, records: Records, recordings: list[tuple[str, int]]) -> Trace:
    """Tokens in the order of requests and steps: lanes that run at once are recorded mixed."""
    request = records["request"].astype(np.int32)
    names = list(dict.fromkeys(name for name, _ in recordings))
    if len(names) > 1:
        owner = np.repeat([names.index(name) for name, _ in recordings], [n for _, n in recordings])
        key = owner.astype(np.int64) << 32 | request.astype(np.int64) & 0xFFFFFFFF
        request = np.unique(key, return_inverse=True)[1].astype(np.int32)
    trace = Trace(
        model_digest=meta.model_digest,
        first_layer=meta.first_layer,
        experts=meta.experts,
        request=request,
        step=records["step"].astype(np.int32),
        ids=records["ids"].astype(np.uint16),
    )
    return trace if _is_ordered(trace) else _ordered(trace)


def _is_ordered(trace: Trace) -> bool:
    runs = trace.request[trace.starts()]
    same = np.diff(trace.request) == 0
    return len(np.unique(runs)) == len(runs) and bool((np.diff(trace.step)[same] > 0).all())


def _ordered(trace: Trace) -> Trace:
    order = np.lexsort((trace.step, trace.request))
    return Trace(
        model_digest=trace.model_digest,
        first_layer=trace.first_layer,
        experts=trace.experts,
        request=trace.request[order],
        step=trace.step[order],
        ids=trace.ids[order],
    )


def _damaged(path: Path, offset: int) -> TraceError:
    return TraceError(f"{path}: the block at byte {offset} is damaged; copy or record it again")


def _torn(one: _Scanned, offset: int, size: int) -> str:
    return (
        f"{one.path}: the last block is torn: {size - offset} bytes from byte {offset} on dropped, "
        f"{one.tokens} tokens before it kept"
    )


def _named(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"{paths[0]}{more}"
