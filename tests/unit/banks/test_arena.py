"""Arenas: loaded in steps, never twice the bytes, never below the floor, and gone after a failure
(case B4)."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import blake3
import numpy as np
import pytest

from shared.core.errors import EXIT_TEMPFAIL, BankError, MemoryFloorReached
from shared.core.loading import MemoryFloor
from shared.core.shape import ExpertShape
from shared.io import arena, memory
from shared.io.arena import LoadPlan, LoadProgress, LoadStopped, load_arena
from shared.io.bank_file import BankFile
from tests.support.large_bank import build_large_bank
from tests.unit.banks.conftest import RandomExperts

MIB = 2**20
K3 = ExpertShape(latent=3584, width=3072)
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def big_bank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bank of 409 MB on a disk, nothing of it in the page cache; module wide, never changed."""
    path = tmp_path_factory.mktemp("big") / "spark0.k3bank"
    build_large_bank(path, K3, 22)
    return path


def cached_bytes(path: Path) -> int:
    """How much of a file the page cache holds."""
    size = path.stat().st_size
    with path.open("r+b") as file:  # mincore(2) tells only those who may write
        mapping = mmap.mmap(file.fileno(), size)
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    block = np.frombuffer(mapping, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mincore(ctypes.c_void_p(block.ctypes.data), ctypes.c_size_t(size), pages)
    assert failed == 0, os.strerror(ctypes.get_errno())
    return int((np.frombuffer(pages, np.uint8) & 1).sum()) * mmap.PAGESIZE


LOADER = """
import json, sys, time
from pathlib import Path
from shared.io.arena import load_arena
from shared.io.bank_file import BankFile
import blake3
with BankFile.open(Path(sys.argv[1])) as bank:
    began = time.monotonic()
    arena = load_arena(bank)
    seconds = time.monotonic() - began
    digest = blake3.blake3(arena.records.data.cast('B')).hexdigest()
status = Path("/proc/self/status").read_text()
peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
print(json.dumps({"digest": digest, "peak": peak, "pages": arena.pages, "seconds": seconds}))
"""


@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "just staged"])
def test_a_load_takes_the_bytes_once(big_bank: Path, is_warm: bool) -> None:
    """The arena is the file, bit by bit; process and page cache together never hold 1.3 times its
    size, and of what the page cache held before nothing is left."""
    with BankFile.open(big_bank) as bank:
        offset, size = bank.records_offset, bank.arena_bytes
    with big_bank.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if is_warm:
            file.read()
    before = cached_bytes(big_bank)
    samples = []
    with subprocess.Popen(
        [sys.executable, "-c", LOADER, str(big_bank)], stdout=subprocess.PIPE, cwd=ROOT
    ) as child:
        while child.poll() is None:
            samples.append(cached_bytes(big_bank))
            time.sleep(0.1)
        assert child.stdout is not None
        told = json.loads(child.stdout.read())
    after = cached_bytes(big_bank)

    data = np.fromfile(big_bank, np.uint8, offset=offset)
    assert told["digest"] == blake3.blake3(data.data).hexdigest()
    if told["pages"] != "hugetlb":
        assert told["peak"] > size
    if not is_warm:
        assert max(samples) + told["peak"] < 1.3 * size
    else:
        assert before > 0.9 * size
    assert after < 0.05 * size


needs_no_huge_pages = pytest.mark.skipif(
    memory.allocate(22 * 18_579_480)[1] == "hugetlb",
    reason="this machine has set huge pages aside: they need neither room nor a lock",
)


class Meminfo:
    """A machine's free memory as a script: each value once, the last for ever."""

    def __init__(self, *values: int) -> None:
        self.values = list(values)
        self.looks = 0

    def __call__(self) -> int:
        self.looks += 1
        return self.values.pop(0) if len(self.values) > 1 else self.values[0]


def plan_of(bank: BankFile, meminfo: Callable[[], int | None], *, wait_us: int = 10**7) -> LoadPlan:
    """Two records a step, a floor of 1000 bytes."""
    return LoadPlan(
        step_bytes=2 * bank.layout.stride_bytes,
        batch_bytes=1,
        floor=MemoryFloor(1000, wait_us),
        available_bytes=meminfo,
    )


def test_a_load_waits_at_the_floor_and_goes_on(bank_path: Path, source: RandomExperts) -> None:
    """Memory that comes back is used with the step that waited; the reason was shown meanwhile."""
    with BankFile.open(bank_path) as bank:
        step = 2 * bank.layout.stride_bytes
        progress = LoadProgress()
        shown: list[tuple[int, str]] = []
        values = Meminfo(step + 1000, step + 999, step + 999, step + 1000)

        def meminfo() -> int:
            shown.append((progress.done_bytes, progress.waits_for))
            return values()

        loaded = load_arena(bank, plan_of(bank, meminfo), progress)

        assert [done // step for done, _ in shown] == [0, 1, 1, 1, 2, 3, 4, 5]
        assert [bool(waits) for _, waits in shown] == [False, False, True, True, *[False] * 4]
        assert "waiting for 0.00 GiB of memory" in shown[2][1]
        assert (progress.done_bytes, progress.waits_for) == (bank.arena_bytes, "")
        for row, (layer, expert) in enumerate(bank.header.rows):
            record = source.expert_record(layer, expert)
            assert loaded.records[row, : len(record)].tobytes() == record


@needs_no_huge_pages
def test_a_load_gives_up_at_the_floor_and_leaves_nothing(big_bank: Path) -> None:
    """The error has every number; all memory is free again before it is handled."""

    def rss_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before, held = rss_bytes(), []

    def meminfo() -> int:
        held.append(rss_bytes() - before)
        return 10**12 if len(held) == 1 else 5 * MIB

    with BankFile.open(big_bank) as bank:
        step = 8 * bank.layout.stride_bytes
        plan = LoadPlan(
            step_bytes=step, floor=MemoryFloor(10 * MIB, 150_000), available_bytes=meminfo
        )
        with pytest.raises(MemoryFloorReached) as caught:
            load_arena(bank, plan)

        assert max(held) >= 0.9 * step, "one step was taken"
        assert rss_bytes() - before < 0.3 * step
    error = caught.value
    assert (error.available_bytes, error.floor_bytes) == (5 * MIB, 10 * MIB)
    assert error.missing_bytes == 5 * MIB + step
    assert error.exit_status == EXIT_TEMPFAIL == 75
    for part in (str(error.missing_bytes), str(5 * MIB), "memory_floor_bytes", "spark0.k3bank"):
        assert part in str(error)


@needs_no_huge_pages
def test_a_step_takes_at_most_256_mib(big_bank: Path) -> None:
    """Case B4: 409 MB are two steps, and each asks for its own room first."""
    meminfo, progress = Meminfo(2**60), LoadProgress()
    with BankFile.open(big_bank) as bank:
        load_arena(bank, LoadPlan(verify=False, available_bytes=meminfo), progress)
    assert meminfo.looks == 2
    assert progress.done_bytes == progress.total_bytes > 256 * MIB


def test_a_wait_can_be_stopped(bank_path: Path) -> None:
    """A load that waits for memory ends when it is told to, with what it says for that."""
    progress = LoadProgress()
    threading.Timer(0.2, progress.stop.set).start()
    with BankFile.open(bank_path) as bank, pytest.raises(LoadStopped):
        load_arena(bank, plan_of(bank, lambda: 0), progress)


def test_a_stop_interrupts_reading(big_bank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a disk hangs in the middle of a read: the load ends, and the memory outlives it
    for as long as the read may still write there."""
    released = threading.Event()
    progress = LoadProgress()
    read_into = BankFile.read_into

    def hang(bank: BankFile, row: int, buffer: memoryview) -> None:
        if row >= 3:
            progress.stop.set()
            released.wait(20)
        read_into(bank, row, buffer)

    monkeypatch.setattr(BankFile, "read_into", hang)
    bank = BankFile.open(big_bank)
    began = time.monotonic()
    try:
        with pytest.raises(LoadStopped):
            load_arena(bank, LoadPlan(verify=False), progress)
        assert time.monotonic() - began < 5
        assert progress.done_bytes <= 4 * bank.layout.stride_bytes
    finally:
        released.set()
        for thread in threading.enumerate():
            if thread.name == "k3-load":
                thread.join(10)
                assert not thread.is_alive()
        bank.close()


def test_the_first_damaged_record_is_named(bank_path: Path) -> None:
    """Of two damaged records the lower row is the error, whichever thread is done first."""
    with BankFile.open(bank_path) as bank:
        offset, stride = bank.records_offset, bank.layout.stride_bytes
        rows = bank.header.rows
    with bank_path.open("r+b") as file:
        for row in (9, 4):
            file.seek(offset + row * stride + 5)
            file.write(b"\xee\xee")
    for batch in (1, 3 * stride, 100 * stride):
        with BankFile.open(bank_path) as bank, pytest.raises(BankError) as caught:
            load_arena(bank, LoadPlan(batch_bytes=batch))
        assert f"row 4 (layer {rows[4][0]}, expert {rows[4][1]})" in str(caught.value)


LOCKER = """
import sys
from pathlib import Path
from shared.io.arena import LoadPlan, LoadProgress, load_arena
from shared.io.bank_file import BankFile
progress = LoadProgress()
with BankFile.open(Path(sys.argv[1])) as bank:
    try:
        load_arena(bank, LoadPlan(pin=True, step_bytes=1), progress)
    except Exception as error:
        print(progress.done_bytes, type(error).__name__, error)
"""


def test_a_limit_that_is_too_low_is_found_before_a_byte_is_read(bank_path: Path) -> None:
    """Case B7: a limit that only a later step would exceed is compared with the whole arena."""
    with BankFile.open(bank_path) as bank:
        limit = bank.arena_bytes // 2

    def confine() -> None:
        ctypes.CDLL(None).prctl(24, 14, 0, 0, 0)  # root exceeds limits by CAP_IPC_LOCK
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))

    done = subprocess.run(
        [sys.executable, "-c", LOCKER, str(bank_path)],
        preexec_fn=confine, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True,
    )  # fmt: skip

    assert done.stdout.startswith("0 ConfigError")
    assert f"RLIMIT_MEMLOCK is {limit} bytes" in done.stdout


def test_a_pinned_arena_is_locked(bank_path: Path) -> None:
    """Every step is locked, where the limit allows it."""

    def locked_bytes() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmLck:")[1].split()[0]) * 1024

    before = locked_bytes()
    with BankFile.open(bank_path) as bank:
        loaded = load_arena(bank, LoadPlan(pin=True, step_bytes=1))
        assert locked_bytes() - before == bank.arena_bytes
    del loaded
    assert locked_bytes() == before


def test_a_small_bank_stays_in_the_page_cache(bank_path: Path) -> None:
    """A node of the embedded pod starts again without its disk."""
    assert bank_path.stat().st_size < arena.CACHED_BYTES_MAX
    data = bank_path.read_bytes()
    with BankFile.open(bank_path) as bank:
        load_arena(bank)

    assert cached_bytes(bank_path) >= len(data)
