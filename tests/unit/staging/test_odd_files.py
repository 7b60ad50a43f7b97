"""What lies in the node's folder and has no business there, and ends that nobody planned."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from services.cli import run
from shared.core.errors import BankError
from shared.io.partial_file import PartialFile, partial_path
from spark_daemon.staging import stage as staging
from spark_daemon.staging.puller import Wanted, journal_path
from spark_daemon.staging.receipt import Receipt, ReceiptBook
from tests.support.bank_host import BankHost
from tests.unit.staging.conftest import MODEL

ROOT = Path(__file__).resolve().parents[3]


def staged(host: BankHost, target: Path, *, fails: bool = False) -> Receipt:
    """Stage spark0; `fails` breaks the caller's own progress display."""

    def progress(_done: int, _total: int) -> None:
        if fails:
            raise ZeroDivisionError("a bug")

    service = staging.service_of(
        host.address, node_key=host.node_key(), station_key=host.station_key
    )
    wanted = Wanted("spark0", "spark0", "spark")
    return asyncio.run(staging.stage(service, wanted, target, progress=progress))


def test_a_fifo_as_journal_does_not_hang(host: BankHost, target: Path) -> None:
    """One error that names it; it is removed like any journal that is worth nothing."""
    os.mkfifo(journal_path(target))
    with pytest.raises(BankError, match="cannot write the bank: Illegal seek"):
        staged(host, target)
    assert staged(host, target).outcome == "complete"


def test_a_fifo_among_receipts_does_not_hang(host: BankHost, target: Path) -> None:
    """It counts as a damaged receipt: passed over, and its number is not used again."""
    book = ReceiptBook(target)
    book.folder.mkdir()
    os.mkfifo(book.path(1))
    assert staged(host, target).attempt == 2


FULL = """
    import sys
    from pathlib import Path
    from shared.core.errors import BankError
    from spark_daemon.staging.receipt import ReceiptBook

    book = ReceiptBook(Path(sys.argv[1]) / "spark0.k3bank")
    book.begin(service="tcp://h:1", node="spark0", started="2026-01-01T00:00:00+00:00")
    filler = (Path(sys.argv[1]) / "filler").open("ab", buffering=0)
    try:
        while filler.write(b"x" * 4096):
            pass
    except OSError:
        pass
    try:
        book.begin(service="tcp://h:1", node="spark0", started="2026-01-01T00:00:00+00:00")
    except BankError as error:
        print(book.attempts(), error)
"""


def test_a_full_disk_leaves_no_empty_receipt(tmp_path: Path) -> None:
    """The attempt that cannot even leave a receipt is refused, and earlier receipts stay alone."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=64k none {disk}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], check=False, timeout=20).returncode:
        pytest.skip("this machine lets nobody mount a small disk in a namespace of his own")
    ended = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh",
         sys.executable, "-c", textwrap.dedent(FULL), str(disk)],
        cwd=ROOT, timeout=30, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.stdout.startswith("[1] "), ended
    assert "cannot write a receipt: No space left on device" in ended.stdout


def test_a_bug_is_in_the_receipt(host: BankHost, target: Path) -> None:
    """An end that nobody planned is not left as "running"."""
    with pytest.raises(ExceptionGroup):
        staged(host, target, fails=True)
    receipt = ReceiptBook(target).read(1)
    assert receipt is not None
    assert (receipt.outcome, receipt.code) == ("failed", "internal_error")
    assert receipt.text == "ZeroDivisionError: a bug"


def test_cancelled_while_it_is_published(
    host: BankHost, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bank is there, so the receipt says so, and nothing is left beside it."""
    publish = PartialFile.publish
    cancel: list[Callable[[], object]] = []

    def published(partial: PartialFile, *, replace: bool) -> None:
        publish(partial, replace=replace)
        cancel[0]()
        time.sleep(0.1)  # until the caller has seen it

    monkeypatch.setattr(PartialFile, "publish", published)
    service = staging.service_of(
        host.address, node_key=host.node_key(), station_key=host.station_key
    )

    async def cancelled() -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        cancel.append(lambda: loop.call_soon_threadsafe(task.cancel))
        wanted = Wanted("spark0", "spark0", "spark")
        await staging.stage(service, wanted, target, progress=lambda _done, _total: None)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    receipt = ReceiptBook(target).read(1)
    assert receipt is not None
    assert receipt.outcome == "complete"
    assert target.read_bytes() == (host.folder / target.name).read_bytes()
    assert sorted(os.listdir(target.parent)) == ["receipts", "spark0.k3bank"]


def test_killed_just_after_it_published(host: BankHost, target: Path) -> None:
    """The next attempt is refused, for the bank is there, and still closes the killed one's
    receipt; one that may be under way is left alone."""
    book = ReceiptBook(target)
    book.begin(service="tcp://h:1", node="spark0", started="2026-01-01T00:00:00+00:00")
    target.write_bytes(b"a bank")
    partial_path(target).touch()
    for outcome in ("running", "interrupted"):
        with pytest.raises(BankError, match="exists already"):
            staged(host, target)
        receipt = book.read(1)
        assert receipt is not None
        assert receipt.outcome == outcome
        partial_path(target).unlink(missing_ok=True)
    assert target.read_bytes() == b"a bank"


def test_an_error_names_the_file(host: BankHost, target: Path) -> None:
    """What is in the way is said, not only which bank was wanted."""
    journal_path(target).mkdir()
    with pytest.raises(BankError, match=r"spark0\.k3bank\.journal: cannot write the bank: Is a d"):
        staged(host, target)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["stage", "spark0", "--rate", "200"], "too slow to be meant: at least 100k"),
        (["stage", "spark0", "--rate", "0"], "too slow"),
        (["record", "1", "0", "--model-digest", ""], "--model-digest"),
        (["record", "1", "0", "--model-digest", MODEL * 50], "--model-digest"),
    ],
)
def test_what_would_wait_for_ever_is_wrong_usage(
    words: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rate of bytes where megabytes were meant, and a digest that the service cannot decode."""
    out = ["--out", str(tmp_path / "r.bin")] if words[0] == "record" else []
    assert run(["bank", *words, *out]) == 2
    assert complaint in capsys.readouterr().err
