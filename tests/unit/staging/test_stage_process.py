"""`k3 bank stage` as a process: killed, interrupted, out of disk, and its exit statuses."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from services.banks.progress import byte_line
from services.cli import run
from shared.core.bank_wire import FromBankService, ReadRange, ToBankService
from shared.io import keys
from shared.io.record_journal import count_finished
from spark_daemon.staging.puller import journal_path
from spark_daemon.staging.receipt import ReceiptBook
from tests.support.bank_host import BankHost

pytestmark = pytest.mark.timeout(240)  # several processes one after the other

ROOT = Path(__file__).resolve().parents[3]
ROWS = 24
PATIENCE_S = 60.0


class Command:
    """`k3 bank stage spark0` into the folder of `target`."""

    def __init__(self, host: BankHost, target: Path) -> None:
        self.host, self.target = host, target

    def words(self, *extra: str) -> list[str]:
        return [
            *(sys.executable, "-m", "services.cli", "bank", "stage", "spark0"),
            *("--service", self.host.address, "--out-dir", str(self.target.parent)),
            *("--station-key", str(self.host.station_key)),
            *("--node-key", str(self.host.node_key()), *extra),
        ]

    def run(self, *extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.words(*extra),
            cwd=ROOT,
            timeout=PATIENCE_S,
            check=False,
            capture_output=True,
            text=True,
        )

    def stopped_at(self, ranges: int, number: int) -> tuple[int, str]:
        """Send signal `number` once so many ranges were answered, one by one; (status, stderr)."""
        reached = threading.Event()
        seen, turn = 0, asyncio.Lock()

        async def hook(asked: ToBankService, answer: FromBankService) -> FromBankService | None:
            nonlocal seen
            async with turn:
                await asyncio.sleep(0.02)
                seen += isinstance(asked, ReadRange)
                if seen > ranges:
                    reached.set()
                return answer

        self.host.hook = hook
        with subprocess.Popen(
            self.words(), cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        ) as process:
            try:
                assert reached.wait(PATIENCE_S)
                process.send_signal(number)
                _, said = process.communicate(timeout=PATIENCE_S)
            finally:
                process.kill()
        self.host.hook = None
        return process.returncode, said

    def outcomes(self) -> list[str]:
        """Of all receipts, oldest first."""
        book = ReceiptBook(self.target)
        return [getattr(book.read(attempt), "outcome", "gone") for attempt in book.attempts()]

    def is_equal(self) -> bool:
        served = self.host.folder / self.target.name
        return self.target.read_bytes() == served.read_bytes()


@pytest.fixture
def stage(host: BankHost, target: Path) -> Command:
    return Command(host, target)


def test_killed_and_resumed(stage: Command) -> None:
    """SIGKILL at three random moments: nothing has the bank's name, what was finished is not pulled
    again, the end is the very same file, and every killed attempt is closed as interrupted."""
    finished = 0
    for ranges in random.Random(7).sample(range(3, 9), 3):
        status, _ = stage.stopped_at(ranges, signal.SIGKILL)
        assert status == -signal.SIGKILL
        assert not stage.target.exists()
        assert stage.outcomes()[-1] == "running"
        assert count_finished(journal_path(stage.target)) >= finished
        finished = count_finished(journal_path(stage.target))
    assert 0 < finished < ROWS, "the kills came too early or too late to prove much"
    stage.host.asked.clear()

    ended = stage.run("--json")

    assert ended.returncode == 0, ended.stderr
    receipt = json.loads(ended.stdout)
    assert stage.is_equal()
    assert receipt["records_kept"] == finished
    assert receipt["records_pulled"] == ROWS - finished
    assert len(stage.host.ranges()) == 1 + ROWS - finished
    assert f"{finished} of {ROWS} records are there and will be checked" in ended.stderr
    assert stage.outcomes() == ["interrupted"] * 3 + ["complete"]
    assert sorted(os.listdir(stage.target.parent)) == ["receipts", "spark0.k3bank"]


def test_interrupted_from_the_keyboard(stage: Command) -> None:
    """Ctrl-C ends it at once with status 130, says what is kept, and the receipt knows."""
    status, said = stage.stopped_at(10, signal.SIGINT)
    assert status == 130
    assert said.strip() == "interrupted: finished records are kept for the next attempt"
    assert stage.outcomes() == ["interrupted"]
    again = stage.run()
    assert again.returncode == 0, again.stderr
    assert re.search(r"24 records \(\d+ pulled, [1-9]\d* kept\)", again.stdout)
    assert stage.is_equal()


def test_exit_statuses(stage: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Case D7 and its neighbours: one line and the status that systemd and scripts go by."""
    words = stage.words()[3:]
    assert run(words) == 0
    assert run(words) == 78
    said = capsys.readouterr().err
    assert "error[bank_invalid]" in said
    assert "exists already" in said
    assert stage.outcomes() == ["complete", "refused_exists"]
    assert run([*words, "--rate", "fast"]) == 2
    assert run([*words, "--replace", "--rate", "500M"]) == 0
    keys.create(tmp_path / "foreign", "spark0")
    foreign = str(tmp_path / "foreign" / "spark0.key_secret")
    assert run([*words, "--replace", "--node-key", foreign]) == 78
    assert "error[key_refused]" in capsys.readouterr().err
    nowhere = tmp_path / "none.toml"
    nowhere.write_text("")
    assert run(["bank", "stage", "spark0", "--config", str(nowhere)]) == 78
    assert "has no bank_service" in capsys.readouterr().err
    assert stage.is_equal()


def test_line_for_a_log() -> None:
    """Bytes done and in all, their rate, and the time that is left at it."""
    line = byte_line("stage spark0", done=25 * 10**9, total=100 * 10**9, elapsed_s=50.0)
    assert line == "stage spark0: 25.0 of 100.0 GB, 0.50 GB/s, 150 s left"


FULL_DISK = """
    import asyncio, os, sys
    from pathlib import Path
    from shared.core.errors import BankError
    from spark_daemon.staging import stage
    from spark_daemon.staging.puller import Wanted

    disk, address, node_key, station_key = Path(sys.argv[1]), *sys.argv[2:5]
    path = disk / "spark0.k3bank"
    service = stage.service_of(address, node_key=Path(node_key), station_key=Path(station_key))

    def fill(done, total):
        "Somebody else fills the disk once the bank has its place."
        with (disk / "filler").open("ab", buffering=0) as file:
            try:
                while file.write(b"x" * 4096):
                    pass
            except OSError:
                pass

    def attempt(progress):
        try:
            receipt = asyncio.run(stage.stage(
                service, Wanted("spark0", "spark0", "spark"), path, progress=progress,
                notice=lambda line: print("notice", line),
            ))
            print("staged", receipt.records_pulled, receipt.records_kept)
        except BankError as error:
            print("refused", error)

    attempt(fill)
    print("left", sorted(os.listdir(disk)))
    (disk / "filler").unlink()
    attempt(lambda done, total: None)
    Path(sys.argv[5]).write_bytes(path.read_bytes())
    path.unlink()
    (disk / "filler").write_bytes(b"x" * 1_000_000)
    attempt(lambda done, total: None)
    print("left", sorted(os.listdir(disk)))
"""


def test_full_disk_is_survived(stage: Command, tmp_path: Path) -> None:
    """ENOSPC on a real file system: late, the records stay and the pull resumes; early, it is
    refused with both sizes before a record is pulled."""
    disk, copied = tmp_path / "disk", tmp_path / "copied"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=2m none {disk}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], check=False, timeout=20).returncode:
        pytest.skip("this machine lets nobody mount a small disk in a namespace of his own")
    host = stage.host
    ended = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh",
         sys.executable, "-c", textwrap.dedent(FULL_DISK), str(disk), host.address,
         str(host.node_key()), str(host.station_key), str(copied)],
        cwd=ROOT, timeout=30, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    full = next(line for line in lines if line.startswith("refused"))
    assert "cannot write the bank: No space left on device" in full
    assert full.endswith("then stage it again: finished records are kept")
    assert "spark0.k3bank.partial" in " ".join(line for line in lines if line.startswith("left"))
    staged = next(line.split() for line in lines if line.startswith("staged"))
    assert 0 < int(staged[2]) < ROWS
    assert int(staged[1]) + int(staged[2]) == ROWS
    assert copied.read_bytes() == (host.folder / "spark0.k3bank").read_bytes()
    assert "more bytes" in lines[-2]
    assert "partial" not in lines[-1]


KILLED = """
    import asyncio, fcntl, os, signal, sys, threading
    from pathlib import Path
    from spark_daemon.staging import stage
    from spark_daemon.staging.puller import Wanted

    path, address, node_key, station_key = Path(sys.argv[1]), *sys.argv[2:5]
    budget = int(sys.argv[5])
    pwrite, write, lock, count = os.pwrite, os.write, threading.Lock(), 0

    def spend(fd, size, torn):
        global count
        count += size
        if 0 <= budget < count:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            torn(size - (count - budget))
            os.kill(os.getpid(), signal.SIGKILL)

    def at(fd, data, offset):
        with lock:
            spend(fd, len(data), lambda n: pwrite(fd, data[:n], offset))
            return pwrite(fd, data, offset)

    def append(fd, data):
        with lock:
            spend(fd, len(data), lambda n: write(fd, data[:n]))
            return write(fd, data)

    os.pwrite, os.write = at, append
    service = stage.service_of(address, node_key=Path(node_key), station_key=Path(station_key))
    receipt = asyncio.run(stage.stage(
        service, Wanted("spark0", "spark0", "spark"), path, progress=lambda done, total: None
    ))
    print(count, receipt.records_pulled, receipt.records_kept)
"""


def test_killed_at_any_byte(stage: Command) -> None:
    """SIGKILL inside a record, inside a line of the journal and inside the header block, which is
    written last: no bank, and the next attempt ends in the very same file."""

    def attempt(budget: int) -> subprocess.CompletedProcess[str]:
        host = stage.host
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(KILLED), str(stage.target), host.address,
             str(host.node_key()), str(host.station_key), str(budget)],
            cwd=ROOT, timeout=PATIENCE_S, check=False, capture_output=True, text=True,
        )  # fmt: skip

    whole = attempt(-1)
    total = int(whole.stdout.split()[0])
    stage.target.unlink()
    for budget in (random.Random(3).randrange(total // 2), total - 5_000, total - 100):
        assert attempt(budget).returncode == -signal.SIGKILL, budget
        assert not stage.target.exists()
        finished = count_finished(journal_path(stage.target))
        resumed = attempt(-1)
        assert resumed.stdout.split()[1:] == [str(ROWS - finished), str(finished)], resumed.stderr
        assert stage.is_equal()
        stage.target.unlink()
    assert finished == ROWS, "the last kill was meant to hit the header"
