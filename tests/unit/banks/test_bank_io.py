"""How bytes travel: few reads, several threads, nothing left in the page cache, any file system."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.banks.builder import build
from services.banks.plan import READS_PER_EXPERT
from shared.core import placement as placements
from shared.core.placement import Placement
from shared.io.bank_file import BankFile, verify
from station.model.checkpoint import Checkpoint
from tests.support.tiny_checkpoint import write_tiny_checkpoint
from tests.unit.banks.conftest import RandomExperts


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of 0.4 MB, so that a page more or less does not matter."""
    return write_tiny_checkpoint(
        tmp_path_factory.mktemp("checkpoint"), seed=2, layers=2, experts=11, latent=512, width=512
    )


def build_all(checkpoint: Path, path: Path) -> None:
    """The bank of all experts."""
    with Checkpoint.open(checkpoint) as source:
        nodes: Sequence[tuple[str, placements.Tier, float]] = [("n", "spark", 1.0)]
        plan = placements.balanced(source.digest, source.config.shape, nodes)
        build(source, plan, "n", path)


def cached_share(path: Path) -> float:
    """Share of a file's pages that are in memory (mincore(2))."""
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    with path.open("rb") as file:
        view = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE)
    resident = (ctypes.c_ubyte * pages)()
    first = ctypes.c_char.from_buffer(view)
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(ctypes.addressof(first))
    assert libc.mincore(address, ctypes.c_size_t(size), resident) == 0
    del first
    view.close()
    return sum(page & 1 for page in resident) / pages


def test_an_expert_takes_three_reads(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scalars, scales and weights of an expert are one contiguous piece each, as in the release."""
    reads: list[int] = []
    preadv = os.preadv

    def counted(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        reads.append(offset)
        return preadv(fd, buffers, offset)

    with Checkpoint.open(checkpoint) as source:
        buffer = bytearray(source.layout.record_bytes)
        monkeypatch.setattr(os, "preadv", counted)
        source.read_expert_record(1, 10, memoryview(buffer))
        monkeypatch.undo()
        assert bytes(buffer) == source.expert_record(1, 10)
    assert len(reads) == READS_PER_EXPERT


def test_page_cache_is_left_as_it_was(checkpoint: Path, tmp_path: Path) -> None:
    """Neither the checkpoint nor the bank stays in memory: other processes keep their pages."""
    path = tmp_path / "n.k3bank"
    shard = max(checkpoint.glob("*.safetensors"), key=lambda shard: shard.stat().st_size)
    with shard.open("r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_share(shard) > 0:
        pytest.skip("this file system lives in memory")
    shard.read_bytes()
    assert cached_share(shard) == 1
    build_all(checkpoint, path)
    assert cached_share(shard) < 0.1
    assert cached_share(path) < 0.1


class Crowded(RandomExperts):
    """Lets records through in pairs, and counts how many are read at a time."""

    def __init__(self) -> None:
        self.pair, self.lock = threading.Barrier(2), threading.Lock()
        self.now = self.most = 0

    def read_expert_record(self, layer: int, expert: int, buffer: memoryview) -> None:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self.pair.wait(20)
        super().read_expert_record(layer, expert, buffer)
        with self.lock:
            self.now -= 1


def test_memory_is_a_record_per_thread(
    tmp_path: Path, bank_path: Path, placement: Placement
) -> None:
    """Two workers make two records at a time, never a third, and the same file as four."""
    source = Crowded()
    path = tmp_path / "two" / "spark0.k3bank"
    path.parent.mkdir()
    build(source, placement, "spark0", path, workers=2)
    assert source.most == 2
    assert path.read_bytes() == bank_path.read_bytes()


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def takes_direct_io(folder: Path) -> bool:
    """Whether a file there may be opened for it."""
    try:
        os.close(os.open(folder / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    finally:
        (folder / "probe").unlink(missing_ok=True)
    return True


def test_file_systems_without_direct_io(
    tmp_path: Path, bank_path: Path, placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that refuses the flag, and one that takes it and then refuses our alignment."""
    pwrite = os.pwrite
    direct: list[bool] = []

    def strict(fd: int, data: memoryview, offset: int) -> int:
        direct.append(is_direct(fd))
        if direct[-1]:
            raise OSError(errno.EINVAL, "aligned to 64 KiB, please")
        return pwrite(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", strict)
        build(RandomExperts(), placement, "spark0", bank_path, replace=True)
    assert direct[0] == takes_direct_io(tmp_path)
    assert not direct[-1]
    with BankFile.open(bank_path) as bank:
        digest = bank.digest
        assert all(fault is None for _, fault in verify(bank))
    with monkeypatch.context() as patch:
        patch.setattr(os, "O_DIRECT", 0)
        build(RandomExperts(), placement, "spark0", bank_path, replace=True)
    with BankFile.open(bank_path) as bank:
        assert bank.digest == digest


def test_buffered_writes_do_not_pile_up(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without direct I/O what waits for the disk is flushed and dropped as the build goes."""
    flushed: list[int] = []
    fdatasync = os.fdatasync

    def counted(fd: int) -> None:
        flushed.append(fd)
        fdatasync(fd)

    monkeypatch.setattr(os, "O_DIRECT", 0)
    monkeypatch.setattr(os, "fdatasync", counted)
    monkeypatch.setattr("shared.io.partial_file._UNSYNCED_BYTES_MAX", 10**6)
    build_all(checkpoint, tmp_path / "n.k3bank")
    # 11 records of 0.44 MB: every third one reaches the limit
    assert len(flushed) == 3


def test_a_bank_is_on_disk_before_it_has_its_name(
    tmp_path: Path, source: RandomExperts, placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes, then name, then folder: after a power cut there is no bank with holes."""
    steps: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def sync(fd: int) -> None:
        steps.append(("fsync", Path(os.readlink(f"/proc/self/fd/{fd}")).name))
        fsync(fd)

    def name(old: Path, new: Path) -> None:
        steps.append(("rename", Path(new).name))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", name)
    build(source, placement, "spark0", tmp_path / "spark0.k3bank")

    assert steps == [
        ("fsync", "spark0.k3bank.partial"), ("rename", "spark0.k3bank"), ("fsync", tmp_path.name),
    ]  # fmt: skip


def test_no_thread_outlives_the_build(tmp_path: Path, placement: Placement) -> None:
    """Whoever stops it, here the progress bar: its files are closed after the last write."""

    def interrupted(done: int, _total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped:
        build(RandomExperts(), placement, "spark0", tmp_path / "a.k3bank", interrupted)
    assert stopped.traceback
    assert [t.name for t in threading.enumerate() if t.name.startswith("bank")] == []
    assert list(tmp_path.iterdir()) == []
