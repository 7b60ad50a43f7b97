"""The records of one bank, made by several threads: read, checked, ordered, hashed, written, noted.

A few of them get a golden too, from the checkpoint's bytes before they are put in order.

Owns the threads, their buffers and the report of a stall. Memory is one record per thread, two when
the bank's records are not in the checkpoint's order, however large the bank. Must not know how a
file begins or gets its name.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from services.banks.goldens import compute_golden
from services.banks.source import ExpertSource, read_record
from shared.core.bank_header import BankHeader
from shared.core.placement import ExpertKey
from shared.core.record_order import reorder
from shared.io.bank_file import blake3_digest, tensor_checks
from shared.io.partial_file import PartialFile
from shared.io.record_journal import Finished, Journal

_CACHED_BYTES_MAX: Final = 512 * 2**20

Progress: TypeAlias = Callable[[int, int], None]  # (records done, records in all)
Notice: TypeAlias = Callable[[str], None]  # one line for a person


@dataclass(frozen=True, slots=True)
class Watch:
    """Who is told how a build goes; `stall_s` without a finished record is worth a notice."""

    progress: Progress
    notice: Notice
    stall_s: float


@dataclass(frozen=True, slots=True)
class _Buffers:
    """What one thread works in: the block to write, and where to read when the order changes."""

    block: mmap.mmap
    source: mmap.mmap | None


class RecordMaker:
    """Makes single records; every method may run in any thread."""

    def __init__(
        self,
        source: ExpertSource,
        header: BankHeader,
        partial: PartialFile,
        journal: Journal,
        *,
        start: int,
        buffers: int,
    ) -> None:
        """Records start at byte `start` of `partial`; at most `buffers` are made at a time."""
        self._source = source
        self._rows = header.rows
        self._layout = header.record_layout
        self._seed_of = {golden.bank_row: golden.seed for golden in header.goldens}
        self._partial = partial
        self._journal = journal
        self._start = start
        self._buffers: queue.Queue[_Buffers] = queue.Queue(buffers)
        size, reordered = self._layout.stride_bytes, self._layout != source.layout
        for _ in range(buffers):
            self._buffers.put(_Buffers(_buffer(size), _buffer(size) if reordered else None))
        self._doing: dict[int, tuple[str, int]] = {}  # row: (what, since when in ns)
        self._lock = threading.Lock()
        self._cached: list[ExpertKey] = []  # read, and still in the page cache
        # together, because neighbours in a shard are dropped whole, and one alone is not
        self._release_every = max(1, _CACHED_BYTES_MAX // self._layout.record_bytes)

    def make(self, row: int) -> Finished:
        """The record of `row` in its place, and its hashes; one that is there already is kept."""
        buffers = self._buffers.get()
        try:
            with memoryview(buffers.block) as block:
                return self._kept(row, block) or self._made(row, block, buffers.source)
        finally:
            self._doing.pop(row, None)
            self._buffers.put(buffers)

    def reading_order(self) -> list[int]:
        """All rows as their experts lie on disk: read forwards, the cache dropped behind."""
        return sorted(
            range(len(self._rows)), key=lambda row: self._source.position(*self._rows[row])
        )

    def release(self) -> None:
        """Let the page cache forget what was read; to be called when no record is being made."""
        self._source.release(self._cached)
        self._cached = []

    def pending(self) -> str:
        """What the threads are doing, the longest first, for a person."""
        now = time.monotonic_ns()
        doing = sorted(self._doing.copy().items(), key=lambda item: item[1][1])
        return "; ".join(
            f"{what} layer {self._rows[row][0]} expert {self._rows[row][1]} "
            f"for {(now - since) / 1e9:.1f} s"
            for row, (what, since) in doing
        )

    def _kept(self, row: int, block: memoryview) -> Finished | None:
        """The record an earlier builder left, if it is there and whole."""
        entry = self._journal.finished.get(row)
        if entry is None or (row in self._seed_of) != (entry.golden is not None):
            return None
        self._doing[row] = ("checking", time.monotonic_ns())
        self._partial.read(block, self._offset(row))
        size = self._layout.record_bytes
        padded = not any(block[size:])
        block[size:] = bytes(len(block) - size)
        if padded and blake3_digest(block[:size]).hex() == entry.record_hash:
            return entry
        return None

    def _made(self, row: int, block: memoryview, source: mmap.mmap | None) -> Finished:
        layer, expert = self._rows[row]
        record = block[: self._layout.record_bytes]
        self._doing[row] = ("reading", time.monotonic_ns())
        source_hash, golden = self._read(row, record, source)
        entry = Finished(
            row=row,
            record_hash=(record_hash := blake3_digest(record)).hex(),
            source_hash=(source_hash or record_hash).hex(),
            tensor_checks=tensor_checks(self._layout, record),
            golden=golden,
        )
        self._doing[row] = ("writing", time.monotonic_ns())
        self._partial.write(block, self._offset(row))
        self._journal.append(entry)
        with self._lock:
            self._cached.append((layer, expert))
            behind = self._cached if len(self._cached) >= self._release_every else []
            if behind:
                self._cached = []
        self._source.release(behind)
        return entry

    def _read(
        self, row: int, record: memoryview, source: mmap.mmap | None
    ) -> tuple[bytes | None, bytes | None]:
        """Fill `record` in the bank's order; the source hash, None when it is the record's own, and
        the golden where the bank has one of this row."""
        layer, expert = self._rows[row]
        if source is None:
            read_record(self._source, layer, expert, record)
            return self._source.stored_hash(layer, expert), self._golden(row, record)
        with memoryview(source) as whole:
            stored = whole[: len(record)]
            read_record(self._source, layer, expert, stored)
            reorder(
                np.frombuffer(stored, np.uint8),
                self._source.layout,
                np.frombuffer(record, np.uint8),
                self._layout,
            )
            source_hash = self._source.stored_hash(layer, expert) or blake3_digest(stored)
            return source_hash, self._golden(row, stored)

    def _golden(self, row: int, stored: memoryview) -> bytes | None:
        seed = self._seed_of.get(row)
        if seed is None:
            return None
        self._doing[row] = ("computing the golden of", time.monotonic_ns())
        return compute_golden(self._source.layout, stored, seed, self._rows[row])

    def _offset(self, row: int) -> int:
        return self._start + row * self._layout.stride_bytes


def _buffer(size: int) -> mmap.mmap:
    """Page-aligned zeros; in huge pages, which a disk takes in fewer and larger requests."""
    buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them: slower, equally right
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


def make_records(maker: RecordMaker, rows: int, workers: int, watch: Watch) -> list[Finished]:
    """All records in row order; the first failure ends it once the others in flight have ended."""
    made: dict[int, Finished] = {}
    # closed at once, whoever fails: no thread may outlive the file it writes to
    with contextlib.closing(_results(maker, workers, watch)) as results:
        for entry in results:
            made[entry.row] = entry
            watch.progress(len(made), rows)
    return [made[row] for row in range(rows)]


def _results(maker: RecordMaker, workers: int, watch: Watch) -> Generator[Finished, None, None]:
    """Records as they are finished."""
    ahead: Final = 2 * workers
    pool = ThreadPoolExecutor(workers, thread_name_prefix="bank")
    pending: set[Future[Finished]] = set()
    left = iter(maker.reading_order())
    waited_since = time.monotonic()
    try:
        while True:
            while len(pending) < ahead and (row := next(left, None)) is not None:
                pending.add(pool.submit(maker.make, row))
            if not pending:
                return
            done, pending = wait(pending, timeout=watch.stall_s, return_when=FIRST_COMPLETED)
            if not done:
                idle = time.monotonic() - waited_since
                watch.notice(f"no record was finished for {idle:.1f} s: {maker.pending()}")
                continue
            waited_since = time.monotonic()
            for future in done:
                yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)
        maker.release()
