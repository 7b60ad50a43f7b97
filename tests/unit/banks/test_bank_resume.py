"""B10: a build that died anywhere is continued, and ends in the very same file."""

from __future__ import annotations

import fcntl
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from services.banks.builder import build, journal_path
from shared.core.errors import BankError, CheckpointError
from shared.core.placement import Placement
from shared.io.partial_file import partial_path
from shared.io.record_journal import Finished, Journal, count_finished
from tests.unit.banks.conftest import RandomExperts

ROOT = Path(__file__).parents[3]
ROWS = 12


class Counting(RandomExperts):
    """Counts the records that are read."""

    def __init__(self) -> None:
        self.read: list[tuple[int, int]] = []

    def read_expert_record(self, layer: int, expert: int, buffer: memoryview) -> None:
        self.read.append((layer, expert))
        super().read_expert_record(layer, expert, buffer)


class FailingAt(Counting):
    """Fails at one expert, once all that come before it were read."""

    def __init__(self, key: tuple[int, int], error: BaseException) -> None:
        super().__init__()
        self.key, self.error = key, error

    def read_expert_record(self, layer: int, expert: int, buffer: memoryview) -> None:
        if (layer, expert) == self.key:
            raise self.error
        super().read_expert_record(layer, expert, buffer)


class Killed:
    """Writes that end in SIGKILL at byte `budget` of all that is written, whatever the file."""

    def __init__(self, budget: int) -> None:
        self.left, self.count = budget, 0
        self.lock = threading.Lock()
        self.pwrite, self.write = os.pwrite, os.write

    def at(self, fd: int, data: memoryview, offset: int) -> int:
        with self.lock:
            self.spend(len(data), lambda n: self.pwrite(buffered(fd), data[:n], offset))
            return self.pwrite(fd, data, offset)

    def append(self, fd: int, data: bytes) -> int:
        with self.lock:
            self.spend(len(data), lambda n: self.write(fd, data[:n]))
            return self.write(fd, data)

    def spend(self, size: int, torn: Callable[[int], int]) -> None:
        self.count += size
        if self.count > self.left:
            torn(size - (self.count - self.left))
            os.kill(os.getpid(), signal.SIGKILL)


def buffered(fd: int) -> int:
    """The same descriptor, able to write any number of bytes."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
    return fd


def patched(monkeypatch: pytest.MonkeyPatch, budget: int) -> Killed:
    killed = Killed(budget)
    monkeypatch.setattr(os, "pwrite", killed.at)
    monkeypatch.setattr(os, "write", killed.append)
    return killed


def build_and_die(placement: Placement, path: Path, budget: int, *, workers: int = 4) -> None:
    """Build in a child process that is killed after `budget` written bytes."""
    child = os.fork()
    if child == 0:
        status = 3
        try:
            with pytest.MonkeyPatch.context() as monkeypatch:
                patched(monkeypatch, budget)
                build(RandomExperts(), placement, "spark0", path, workers=workers)
        finally:
            os._exit(status)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def written_bytes(placement: Placement, path: Path) -> int:
    """All bytes that an undisturbed build writes, journal included."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        killed = patched(monkeypatch, 2**62)
        build(RandomExperts(), placement, "spark0", path)
    return killed.count


def test_killed_at_random_bytes_then_resumed(tmp_path: Path, placement: Placement) -> None:
    """SIGKILL at 20 random bytes, in records, header and journal: no bank, and the next build reads
    only what the journal does not have and gives the same file."""
    whole = tmp_path / "whole" / "spark0.k3bank"
    whole.parent.mkdir()
    total = written_bytes(placement, whole)
    resumed = 0
    for number, budget in enumerate(random.Random(5).sample(range(total), 20)):
        path = tmp_path / str(number) / "spark0.k3bank"
        path.parent.mkdir()
        build_and_die(placement, path, budget)
        assert not path.exists()
        finished = count_finished(journal_path(path))
        resumed += finished
        source = Counting()
        build(source, placement, "spark0", path)
        assert path.read_bytes() == whole.read_bytes(), budget
        assert len(source.read) == ROWS - finished, budget
        assert os.listdir(path.parent) == ["spark0.k3bank"]
    assert resumed > 20, "the kills came too early to prove much"


def test_killed_again_and_again(tmp_path: Path, placement: Placement) -> None:
    """Every attempt keeps what the attempts before it finished."""
    whole, path = tmp_path / "w" / "spark0.k3bank", tmp_path / "p" / "spark0.k3bank"
    for folder in (whole.parent, path.parent):
        folder.mkdir()
    total = written_bytes(placement, whole)
    finished = [0]
    for _ in range(3):
        build_and_die(placement, path, total // 4, workers=1)
        finished.append(count_finished(journal_path(path)))
    assert finished == sorted(set(finished)), "an attempt finished nothing"
    build(RandomExperts(), placement, "spark0", path)
    assert path.read_bytes() == whole.read_bytes()


def failed_build(path: Path, placement: Placement, *, keep: bool = True) -> None:
    """A build that fails at its last row."""
    source = FailingAt(placement.node("spark0").rows[-1], CheckpointError("shard 3 is damaged"))
    with pytest.raises(CheckpointError, match="shard 3"):
        build(source, placement, "spark0", path, keep_partial=keep, workers=1)


@pytest.mark.parametrize("error", [OSError(5, "bad"), KeyboardInterrupt()])
def test_failed_build_keeps_its_records_when_asked(
    tmp_path: Path, bank_path: Path, placement: Placement, error: BaseException
) -> None:
    """A read error or Ctrl-C late in a long build costs nothing but the record it hit."""
    path = tmp_path / "again" / "spark0.k3bank"
    path.parent.mkdir()
    last = placement.node("spark0").rows[-1]
    with pytest.raises((CheckpointError, KeyboardInterrupt)):
        build(FailingAt(last, error), placement, "spark0", path, keep_partial=True, workers=1)
    assert not path.exists()
    source, lines = Counting(), list[str]()
    build(source, placement, "spark0", path, notice=lines.append)
    assert source.read == [last]
    assert lines == ["11 of 12 records are there and will be checked"]
    assert path.read_bytes() == bank_path.read_bytes()


def test_failure_before_the_first_record_leaves_nothing(
    tmp_path: Path, placement: Placement
) -> None:
    """There is nothing to keep: no file."""
    source = FailingAt(placement.node("spark0").rows[0], CheckpointError("x"))
    with pytest.raises(CheckpointError):
        build(source, placement, "spark0", tmp_path / "a.k3bank", keep_partial=True, workers=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["byte", "zeros", "padding"])
def test_records_are_not_trusted_on_the_journals_word(
    tmp_path: Path, bank_path: Path, placement: Placement, damage: str
) -> None:
    """A power cut can leave a promise without its data: that record, and only it, is made again."""
    path = tmp_path / "again" / "spark0.k3bank"
    path.parent.mkdir()
    failed_build(path, placement)
    partial = partial_path(path)
    stride = RandomExperts.layout.stride_bytes
    start = partial.stat().st_size - ROWS * stride + 5 * stride
    end = start + RandomExperts.layout.record_bytes
    at, data = {
        "byte": (start + 100, b"\xee"),
        "zeros": (start, b"\0" * 1000),
        "padding": (end + 3, b"\1"),
    }[damage]
    with partial.open("r+b") as file:
        file.seek(at)
        file.write(data)
    source = Counting()
    build(source, placement, "spark0", path, workers=1)
    rows = placement.node("spark0").rows
    assert source.read == [rows[5], rows[-1]]
    assert path.read_bytes() == bank_path.read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: data[:50],
        lambda data: b"\0" * len(data),
        lambda data: b"\xff" + data[1:],
        lambda data: data.replace(b"row", b"raw"),
        lambda data: re.sub(
            rb'(?<="tensor_checks":").', lambda m: b"1" if m[0] == b"0" else b"0", data
        ),
        lambda data: data[: data.index(b"\n") + 1] + b"[]\n" * 3,
        lambda data: data[: data.index(b"\n") + 1] + data[data.index(b"\n") + 2 :],
    ],
)
def test_damaged_journal_costs_time_only(
    tmp_path: Path, bank_path: Path, placement: Placement, change: Callable[[bytes], bytes]
) -> None:
    """Whatever a journal holds, the bank is right; lines that are not whole count for nothing."""
    path = tmp_path / "again" / "spark0.k3bank"
    path.parent.mkdir()
    failed_build(path, placement)
    journal = journal_path(path)
    journal.write_bytes(change(journal.read_bytes()))
    source = Counting()
    build(source, placement, "spark0", path)
    assert len(source.read) == ROWS
    assert path.read_bytes() == bank_path.read_bytes()


def test_rows_beyond_the_bank_are_ignored(tmp_path: Path) -> None:
    """A journal cannot name a row that the bank does not have."""
    path = tmp_path / "j"
    for row in (2, 3):
        journal = Journal.open(path, "a" * 64, rows=4)
        journal.append(Finished(row, "b" * 64, "c" * 64, "d" * 96))
        journal.close()
    journal = Journal.open(path, "a" * 64, rows=3)
    journal.close()
    assert list(journal.finished) == [2]


def test_another_bank_does_not_resume_it(
    tmp_path: Path, bank_path: Path, placement: Placement
) -> None:
    """Records of another node, or of another placement, are never taken over."""
    path = tmp_path / "again" / "spark0.k3bank"
    path.parent.mkdir()
    failed_build(path, placement)
    left = count_finished(journal_path(path))
    source, notices = Counting(), list[str]()
    build(source, placement, "grace", path, notice=notices.append)
    assert len(source.read) == ROWS
    (said,) = notices
    assert said.startswith(f"{left} records that were there belong to another bank")
    assert left > 0
    again = tmp_path / "grace" / "spark0.k3bank"
    again.parent.mkdir()
    build(RandomExperts(), placement, "grace", again)
    assert path.read_bytes() == again.read_bytes() != bank_path.read_bytes()


def test_journal_left_after_the_last_rename_goes(tmp_path: Path, placement: Placement) -> None:
    """Killed between rename and clean-up: a journal without its records proves nothing."""
    path = tmp_path / "spark0.k3bank"
    failed_build(path, placement)
    partial_path(path).unlink()
    source = Counting()
    build(source, placement, "spark0", path)
    assert len(source.read) == ROWS
    assert os.listdir(tmp_path) == ["spark0.k3bank"]


class Hanging(RandomExperts):
    """Does not come back from one expert until somebody noticed."""

    def __init__(self, key: tuple[int, int]) -> None:
        self.key, self.noticed = key, threading.Event()

    def read_expert_record(self, layer: int, expert: int, buffer: memoryview) -> None:
        if (layer, expert) == self.key:
            assert self.noticed.wait(20)
        super().read_expert_record(layer, expert, buffer)


def test_stall_is_reported_by_name(tmp_path: Path, placement: Placement) -> None:
    """No record for a while: what is being done to which expert, and for how long."""
    rows = placement.node("spark0").rows
    source = Hanging(rows[3])
    lines: list[str] = []

    def notice(line: str) -> None:
        lines.append(line)
        if f"reading layer {rows[3][0]} expert {rows[3][1]} for" in line:
            source.noticed.set()

    build(source, placement, "spark0", tmp_path / "a.k3bank", notice=notice, stall_s=0.02)
    assert lines[0].startswith("no record was finished for 0.")
    assert source.noticed.is_set()


FULL_DISK = """
    import os, sys
    from pathlib import Path
    from services.banks.builder import build
    from services.banks.target import choose_target
    from shared.core.errors import BankError
    from shared.core.placement import balanced
    from tests.unit.banks.conftest import SHAPE, RandomExperts

    disk, other = Path(sys.argv[1]), Path(sys.argv[2])
    plan = balanced("model-a", SHAPE, [("all", "spark", 1.0)])
    path = disk / "all.k3bank"

    class Filling(RandomExperts):
        "Somebody else fills the disk once the bank has its place."

        def read_expert_record(self, layer, expert, buffer):
            try:
                with (disk / "filler").open("ab", buffering=0) as file:
                    while file.write(b"x" * 4096):
                        pass
            except OSError:
                pass
            super().read_expert_record(layer, expert, buffer)

    def attempt(source):
        try:
            build(source, plan, "all", path, keep_partial=True, workers=1)
        except BankError as error:
            print("refused", error)

    attempt(Filling())
    print("left", sorted(os.listdir(disk)))
    (disk / "filler").unlink()
    reads = []
    class Counting(RandomExperts):
        def read_expert_record(self, layer, expert, buffer):
            reads.append(expert)
            super().read_expert_record(layer, expert, buffer)
    attempt(Counting())
    build(RandomExperts(), plan, "all", other / "all.k3bank")
    print("equal", path.read_bytes() == (other / "all.k3bank").read_bytes(), len(reads))
    path.unlink()
    (disk / "filler").write_bytes(b"x" * 200_000)
    attempt(RandomExperts())
    print("left", os.listdir(disk))
    chosen = choose_target([disk, other], "new.k3bank", 100_000, replace=False)
    print("spill", chosen == other / "new.k3bank")
"""


def test_full_disk_is_survived(tmp_path: Path) -> None:
    """ENOSPC on a real file system of 256 KiB: late, the records stay and the build resumes; early,
    it is refused with both sizes before a byte; a list of folders spills to the next."""
    disk, other = tmp_path / "disk", tmp_path / "other"
    disk.mkdir()
    other.mkdir()
    mount = f"mount -t tmpfs -o size=256k none {disk}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], check=False, timeout=20).returncode:
        pytest.skip("this machine lets nobody mount a small disk in a namespace of his own")
    ended = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh",
         sys.executable, "-c", textwrap.dedent(FULL_DISK), str(disk), str(other)],
        cwd=ROOT, timeout=30, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert "cannot write the bank: No space left on device" in lines[0]
    assert lines[0].endswith("then build again: finished records are kept")
    assert lines[1] == "left ['all.k3bank.journal', 'all.k3bank.partial', 'filler']"
    assert lines[2].startswith("equal True")
    assert 0 < int(lines[2].split()[-1]) < 24, "nothing was kept"
    assert "more bytes" in lines[3]
    assert lines[4] == "left ['filler']"
    assert lines[5] == "spill True"


def test_failed_build_without_keeping_leaves_nothing(tmp_path: Path, placement: Placement) -> None:
    """Callers that rebuild anyway are not left with gigabytes of partial files."""
    failed_build(tmp_path / "a.k3bank", placement, keep=False)
    assert list(tmp_path.iterdir()) == []


def test_second_builder_does_not_touch_the_firsts_journal(
    tmp_path: Path, placement: Placement
) -> None:
    """It is refused before it opens anything that the first one writes."""
    path = tmp_path / "spark0.k3bank"
    failed_build(path, placement)
    before = journal_path(path).read_bytes()
    with partial_path(path).open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BankError, match="another builder is writing it"):
            build(RandomExperts(), placement, "spark0", path)
    assert journal_path(path).read_bytes() == before
