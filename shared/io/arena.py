"""Arenas: all records of a bank in memory, brought there in steps.

Owns the order of a step - room, pages, lock, read, check - and what a failure leaves behind:
nothing. Must not know who serves from an arena or who is told how far a load is.

Never twice the bytes: records are read past the page cache, and what another program left of them
there is dropped behind each step.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from shared.core.errors import BankError, MemoryFloorReached
from shared.core.loading import STEP_BYTES, MemoryFloor, Phase, Verdict, part_of, steps
from shared.io import memory
from shared.io.bank_file import BankFile, refuse_damage
from shared.io.threads import DaemonThreads

BATCH_BYTES: Final = 8 * 2**20  # what one thread reads and checks at a time
READERS_MAX: Final = 4  # a disk answers several reads together; more only take cores from others
# so little is faster from the page cache when a node starts again, and twice of it is nothing
CACHED_BYTES_MAX: Final = 64 * 2**20
NO_FLOOR: Final = MemoryFloor(0)
_LOOK_S: Final = 0.1


class LoadStopped(Exception):
    """The load ended because its `LoadProgress` was told to stop."""


@dataclass(slots=True)
class LoadProgress:
    """What a load shows while it runs on another thread, and how it is told to stop.

    The loading thread writes the fields, each whole; anybody may read them and set `stop`.
    """

    phase: Phase = "loading"
    done_bytes: int = 0
    total_bytes: int = 0
    waits_for: str = ""  # what a load that stands still waits for, for a person
    stop: threading.Event = field(default_factory=threading.Event)

    def move(self, done_bytes: int, total_bytes: int) -> None:
        """`done_bytes` of `total_bytes` are there."""
        self.total_bytes = total_bytes
        self.done_bytes = done_bytes

    def text(self, name: str) -> str:
        """`loading bank spark0: 12.3 of 98.7 GiB`, and what it waits for."""
        waits = f"; {self.waits_for}" if self.waits_for else ""
        return f"{self.phase} bank {name}: {part_of(self.done_bytes, self.total_bytes)}{waits}"


@dataclass(frozen=True, slots=True)
class Arena:
    """The records of a bank: read-only uint8 [rows, stride_bytes], page aligned.

    The memory is freed with the last view of the array.
    """

    records: npt.NDArray[np.uint8]
    pages: memory.Pages


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """How to load: what must stay free, whether to lock, the size of a step, who says what is free.

    `verify` compares every record with its BLAKE3 while it is still in the processor's cache.
    """

    verify: bool = True
    pin: bool = False
    floor: MemoryFloor = NO_FLOOR
    step_bytes: int = STEP_BYTES
    batch_bytes: int = BATCH_BYTES
    available_bytes: Callable[[], int | None] = memory.available_bytes
    clock_ns: Callable[[], int] = time.monotonic_ns


def load_arena(
    bank: BankFile, plan: LoadPlan | None = None, progress: LoadProgress | None = None
) -> Arena:
    """Copy all records of `bank` into anonymous memory.

    Raises BankError that names the first damaged record, or says that the memory does not exist;
    ConfigError when it may not be locked, before a byte is read; MemoryFloorReached when the floor
    stayed out of reach; LoadStopped when `progress` was told to stop. Then nothing is left.
    """
    plan = plan or LoadPlan()
    progress = progress or LoadProgress()
    progress.move(0, bank.arena_bytes)
    try:
        mapping, pages = memory.allocate(bank.arena_bytes)
    except OSError as error:
        raise _no_memory(bank, error) from error
    try:
        if plan.pin and pages != "hugetlb":  # those are never swapped, and count for no limit
            memory.refuse_low_limit(bank.arena_bytes)
        return _Load(bank, plan, progress, mapping, pages).run()
    except BaseException:
        # a reader that hangs may still write there: then the memory goes with its last view
        with contextlib.suppress(BufferError):
            mapping.close()
        raise


class _Load:
    """One load."""

    def __init__(
        self,
        bank: BankFile,
        plan: LoadPlan,
        progress: LoadProgress,
        mapping: mmap.mmap,
        pages: memory.Pages,
    ) -> None:
        self._bank = bank
        self._plan = plan
        self._progress = progress
        self._pages: Final = pages
        self._stride = bank.layout.stride_bytes
        self._is_cached = bank.arena_bytes <= CACHED_BYTES_MAX
        self._records = np.frombuffer(mapping, np.uint8, bank.arena_bytes).reshape(
            bank.rows, self._stride
        )

    def run(self) -> Arena:
        """All steps. After an error this object holds no view of the memory."""
        try:
            self._load()
        except BaseException:
            del self._records
            raise
        self._records.flags.writeable = False
        return Arena(self._records, self._pages)

    def _load(self) -> None:
        bank = self._bank
        if not self._is_cached:
            bank.read_directly()
        with DaemonThreads(min(READERS_MAX, os.cpu_count() or 1), "k3-load") as readers:
            for first, last in steps(
                bank.rows, stride_bytes=self._stride, step_bytes=self._plan.step_bytes
            ):
                self._await_room((last - first) * self._stride)
                self._make_resident(first, last)
                self._read_step(first, last, readers)
                if not self._is_cached:
                    bank.forget(first, last)

    def _await_room(self, step_bytes: int) -> None:
        """Wait, bounded, until a step leaves the floor untouched; what was read stays."""
        plan, progress = self._plan, self._progress
        began_ns = plan.clock_ns()
        while True:
            if progress.stop.is_set():
                raise LoadStopped
            if self._pages == "hugetlb":
                return  # this memory was set aside before
            available = plan.available_bytes()
            verdict = plan.floor.judge(
                available,
                step_bytes=step_bytes,
                waited_us=(plan.clock_ns() - began_ns) // 1000,
            )
            if verdict is Verdict.PROCEED:
                progress.waits_for = ""
                return
            assert available is not None, "an unknown amount of memory holds nothing back"
            missing = plan.floor.missing_bytes(available, step_bytes)
            if verdict is Verdict.GIVE_UP:
                raise MemoryFloorReached(
                    f"{self._bank.path}: cannot load {step_bytes} more bytes",
                    available_bytes=available,
                    floor_bytes=plan.floor.floor_bytes,
                    missing_bytes=missing,
                )
            progress.waits_for = (
                f"waiting for {missing / 2**30:.2f} GiB of memory, above the floor of "
                f"{plan.floor.floor_bytes / 2**30:.2f} GiB"
            )
            progress.stop.wait(_LOOK_S)

    def _make_resident(self, first: int, last: int) -> None:
        address = self._records.ctypes.data + first * self._stride
        size = (last - first) * self._stride
        try:
            memory.populate(address, size)
        except OSError as error:
            raise _no_memory(self._bank, error) from error
        if self._plan.pin and self._pages != "hugetlb":
            memory.lock(address, size, needed_bytes=self._bank.arena_bytes)

    def _read_step(self, first: int, last: int, readers: DaemonThreads) -> None:
        batches = [
            (first + start, first + end)
            for start, end in steps(
                last - first, stride_bytes=self._stride, step_bytes=self._plan.batch_bytes
            )
        ]
        if len(batches) == 1:  # a small bank needs no threads
            self._read(*batches[0])
            self._progress.move(last * self._stride, self._bank.arena_bytes)
            return
        reads = [readers.submit(partial(self._read, *batch)) for batch in batches]
        try:
            for (_, end), read in zip(batches, reads, strict=True):
                self._await(read)
                self._progress.move(end * self._stride, self._bank.arena_bytes)
        finally:
            for read in reads:
                read.cancel()

    def _await(self, read: Future[None]) -> None:
        """Wait for a read, or for `stop`: a disk that hangs must not outlast it."""
        while not read.done():
            with contextlib.suppress(TimeoutError):
                read.exception(_LOOK_S)
            if self._progress.stop.is_set():
                raise LoadStopped
        read.result()

    def _read(self, first: int, last: int) -> None:
        records = self._records[first:last]
        self._bank.read_into(first, records.data.cast("B"))
        if self._plan.verify:
            for row in range(first, last):
                refuse_damage(self._bank, row, records[row - first])


def _no_memory(bank: BankFile, error: OSError) -> BankError:
    return BankError(
        f"{bank.path}: no {bank.arena_bytes} bytes of memory for its arena ({error.strerror}): "
        "free memory, or give this node fewer experts"
    )
