"""Pulling a bank over the real link: whole or not at all, and every attempt leaves a receipt."""

from __future__ import annotations

import asyncio
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from shared.core.bank_wire import (
    CHUNK_BYTES_MAX,
    WINDOW_MAX,
    BankFound,
    FindBank,
    FromBankService,
    Range,
    ReadRange,
    ToBankService,
)
from shared.core.errors import BankError, ConfigError, KeyRefused, RemoteProtocolError
from shared.core.record import RecordLayout
from shared.io import keys
from shared.io.bank_file import BankFile
from shared.io.link import StationUnreachable
from shared.io.record_journal import count_finished
from spark_daemon import config as configs
from spark_daemon.staging import stage as staging
from spark_daemon.staging.client import Patience, open_client
from spark_daemon.staging.puller import Wanted, journal_path
from spark_daemon.staging.receipt import KEPT_MAX, Receipt, ReceiptBook
from tests.support.bank_host import BankHost, refused
from tests.unit.staging.conftest import SMALL

STRIDE = RecordLayout(SMALL).stride_bytes
RECORD = RecordLayout(SMALL).record_bytes
ROWS = 24
QUICK = Patience(
    connect_us=500_000,
    answer_us=1_000_000,
    give_up_us=1_500_000,
    pause_us_min=10_000,
    pause_us_max=50_000,
)
CALM = Patience(connect_us=1_000_000, pause_us_min=10_000, pause_us_max=50_000)


class Pull:
    """Stages spark0 as often as asked, and remembers what was said."""

    def __init__(self, host: BankHost, target: Path) -> None:
        self.host, self.target = host, target
        self.notices: list[str] = []
        self.progress: list[tuple[int, int]] = []

    def __call__(
        self,
        *,
        wanted: Wanted | None = None,
        station_key: Path | None = None,
        node_key: Path | None = None,
        replace: bool = False,
        rate: int = 0,
        patience: Patience = CALM,
    ) -> Receipt:
        service = staging.service_of(
            self.host.address,
            node_key=node_key or self.host.node_key(),
            station_key=station_key or self.host.station_key,
        )
        return asyncio.run(
            staging.stage(
                service,
                wanted or Wanted("spark0", "spark0", "spark"),
                self.target,
                replace=replace,
                rate_bytes_per_s=rate,
                progress=lambda done, total: self.progress.append((done, total)),
                notice=self.notices.append,
                patience=patience,
            )
        )

    def receipts(self) -> list[Receipt]:
        """All of them, oldest first."""
        book = ReceiptBook(self.target)
        found = [book.read(attempt) for attempt in book.attempts()]
        assert None not in found
        return [receipt for receipt in found if receipt is not None]

    def served(self) -> Path:
        """The service's file."""
        return self.host.folder / self.target.name

    def pulled_rows(self) -> list[int]:
        """Rows whose bytes were asked for, in order of asking."""
        with BankFile.open(self.served()) as bank:
            start = bank.records_offset
        offsets = [asked.offset for asked in self.host.ranges()]
        return [(offset - start) // STRIDE for offset in offsets if offset >= start]

    def files(self) -> list[str]:
        """What lies beside the bank."""
        return sorted(path.name for path in self.target.parent.iterdir())


@pytest.fixture
def pull(host: BankHost, target: Path) -> Pull:
    return Pull(host, target)


def damage(host: BankHost, *, offset: int, times: int) -> None:
    """Flip a byte of the range that begins at `offset`, `times` times."""
    left = times

    async def hook(asked: ToBankService, answer: FromBankService) -> FromBankService | None:
        nonlocal left
        if isinstance(answer, Range) and answer.offset == offset and left:
            left -= 1
            data = bytearray(answer.data)
            data[len(data) // 2] ^= 1
            return msgspec.structs.replace(answer, data=bytes(data))
        return answer

    host.hook = hook


def start_of(path: Path) -> int:
    """Where the records of a bank begin."""
    with BankFile.open(path) as bank:
        return bank.records_offset


def test_bank_is_byte_identical(pull: Pull) -> None:
    """Every record once, in row order; the receipt and the service's log say the same numbers."""
    receipt = pull()

    assert pull.target.read_bytes() == pull.served().read_bytes()
    assert pull.pulled_rows() == list(range(ROWS))
    assert pull.files() == ["receipts", "spark0.k3bank"]
    with BankFile.open(pull.target) as bank:
        assert receipt.digest == bank.digest
        assert receipt.pulled_bytes == bank.records_offset + ROWS * RECORD
    assert [receipt] == pull.receipts()
    assert (receipt.outcome, receipt.attempt, receipt.code) == ("complete", 1, None)
    assert (receipt.records, receipt.records_pulled, receipt.records_kept) == (ROWS, ROWS, 0)
    size = pull.target.stat().st_size
    assert receipt.file_bytes == size
    assert pull.progress[-1] == (size, size)
    assert pull.progress == sorted(pull.progress)
    assert receipt.started <= str(receipt.ended)
    pull.host.stop()
    (end,) = pull.host.ends()
    assert (end.complete, end.pulled_bytes) == (True, receipt.pulled_bytes)


def test_records_larger_than_a_range(pull: Pull, built: Path) -> None:
    """They are put together from ranges, never more than the window of them at a time."""
    shutil.copy(built / "wide" / "spark0.k3bank", pull.served())
    waiting, most = 0, 0

    async def hook(asked: ToBankService, answer: FromBankService) -> FromBankService | None:
        nonlocal waiting, most
        waiting, most = waiting + 1, max(most, waiting + 1)
        await asyncio.sleep(0.01)
        waiting -= 1
        return answer

    pull.host.hook = hook
    receipt = pull()

    assert pull.target.read_bytes() == pull.served().read_bytes()
    assert receipt.records == 4
    assert max(asked.length for asked in pull.host.ranges()) == CHUNK_BYTES_MAX
    assert 2 < most <= WINDOW_MAX
    size = pull.target.stat().st_size
    assert len(set(pull.progress)) > 2 * receipt.records, "a slow record shows no progress"
    assert pull.progress[-1] == (size, size)
    assert pull.progress == sorted(pull.progress)


def test_window_bounds_what_is_asked_for(pull: Pull) -> None:
    """However much is read at once: WINDOW_MAX ranges are asked for, and no more."""
    waiting, most = 0, 0

    async def hook(asked: ToBankService, answer: FromBankService) -> FromBankService | None:
        nonlocal waiting, most
        assert isinstance(asked, ReadRange)
        waiting, most = waiting + 1, max(most, waiting + 1)
        await asyncio.sleep(0.01)
        waiting -= 1
        data = bytes(asked.length)
        return Range(ticket=asked.ticket, source=asked.source, offset=asked.offset, data=data)

    pull.host.hook = hook
    service = staging.service_of(
        pull.host.address, node_key=pull.host.node_key(), station_key=pull.host.station_key
    )
    counts: list[int] = []

    async def read() -> None:
        async with open_client(service, patience=CALM) as client:
            buffer = memoryview(bytearray(2 * WINDOW_MAX * CHUNK_BYTES_MAX + 5))
            await client.read("a" * 64, 0, buffer, counts.append)

    asyncio.run(read())
    assert most == WINDOW_MAX
    assert sorted(counts) == [5] + 2 * WINDOW_MAX * [CHUNK_BYTES_MAX]


@pytest.mark.parametrize("part", ["record", "header"])
def test_flipped_byte_is_asked_for_again(pull: Pull, part: str) -> None:
    """What arrives damaged is never written; one more answer sets it right, and is counted."""
    offset = start_of(pull.served()) + 5 * STRIDE if part == "record" else 0
    damage(pull.host, offset=offset, times=2)

    receipt = pull()

    assert pull.target.read_bytes() == pull.served().read_bytes()
    assert receipt.records_retried == 2
    assert (receipt.outcome, receipt.records_pulled) == ("complete", ROWS)


def test_record_that_stays_damaged_is_named(pull: Pull) -> None:
    """Three answers, then an error with layer and expert; nothing has the bank's name."""
    damage(pull.host, offset=start_of(pull.served()) + 5 * STRIDE, times=10**6)
    with BankFile.open(pull.served()) as bank:
        layer, expert = bank.header.rows[5]

    with pytest.raises(BankError, match=rf"row 5 \(layer {layer}, expert {expert}\).*3 times"):
        pull()

    assert pull.files() == ["receipts", "spark0.k3bank.journal", "spark0.k3bank.partial"]
    (receipt,) = pull.receipts()
    assert (receipt.outcome, receipt.code, receipt.records_retried) == ("failed", "bank_invalid", 3)
    assert f"layer {layer}, expert {expert}" in str(receipt.text)

    pull.host.hook = None
    again = pull()
    assert pull.target.read_bytes() == pull.served().read_bytes()
    assert again.records_kept == receipt.records_pulled > 0
    assert again.records_pulled == ROWS - receipt.records_pulled


def test_header_that_stays_damaged_leaves_nothing(pull: Pull) -> None:
    """Before the first record there is nothing to keep."""
    damage(pull.host, offset=0, times=10**6)
    with pytest.raises(BankError, match="does not match its BLAKE3"):
        pull()
    assert pull.files() == ["receipts"]


def test_bank_that_is_not_the_promised_one_is_refused(pull: Pull) -> None:
    """The header decides: a size that is not the promised one ends the pull before a record."""

    async def hook(asked: ToBankService, answer: FromBankService) -> FromBankService | None:
        if isinstance(answer, BankFound):
            return msgspec.structs.replace(answer, file_bytes=answer.file_bytes + STRIDE)
        return answer

    pull.host.hook = hook
    with pytest.raises(BankError, match="was promised with digest"):
        pull()
    assert pull.pulled_rows() == []


def test_service_that_restarts_costs_time_only(pull: Pull) -> None:
    """Stopped and started again in the middle: the pull goes on, no record is pulled twice."""
    start = start_of(pull.served())
    reached = False

    async def hook(asked: ToBankService, answer: FromBankService) -> FromBankService | None:
        nonlocal reached
        if isinstance(asked, ReadRange) and asked.offset >= start + 8 * STRIDE and not reached:
            reached = True
            asyncio.get_running_loop().call_soon(restart_soon)
            return None
        return None if reached and pull.host.hook is hook else answer

    def restart_soon() -> None:
        pull.host.hook = None
        threading.Thread(target=restart).start()

    def restart() -> None:
        pull.host.stop()
        pull.host.start()

    pull.host.hook = hook
    receipt = pull()

    assert pull.target.read_bytes() == pull.served().read_bytes()
    assert reached
    assert (receipt.outcome, receipt.records_pulled) == ("complete", ROWS)
    assert receipt.superseded == ()
    assert any("trying again" in line for line in pull.notices)


def test_long_pull_survives_a_restart(pull: Pull) -> None:
    """How long a service gave nothing is counted from its last answer, not from the first."""
    turn, answered = asyncio.Lock(), 0

    async def slowly(asked: ToBankService, answer: FromBankService) -> FromBankService | None:
        nonlocal answered
        async with turn:
            await asyncio.sleep(0.2)
            answered += 1
        if answered == 20:
            pull.host.hook = None
            threading.Thread(target=restart).start()
        return answer

    def restart() -> None:
        pull.host.stop()
        pull.host.start()

    pull.host.hook = slowly
    receipt = pull(patience=replace(QUICK, give_up_us=3_500_000))
    assert receipt.seconds > 3.5
    assert receipt.records_pulled == ROWS
    assert any("trying again" in line for line in pull.notices)


def test_digest_that_is_gone_is_asked_for_again(pull: Pull) -> None:
    """A service that closed the bank meanwhile gives the same one: what is there stays there."""
    start = start_of(pull.served())
    was_gone = False

    async def hook(asked: ToBankService, answer: FromBankService) -> FromBankService | None:
        nonlocal was_gone
        if isinstance(asked, ReadRange) and asked.offset >= start + 20 * STRIDE and not was_gone:
            was_gone = True
            pull.host.forget()
            return refused(asked.ticket, "gone", "closed", permanent=False)
        return answer

    pull.host.hook = hook
    receipt = pull()

    assert pull.target.read_bytes() == pull.served().read_bytes()
    assert sum(isinstance(asked, FindBank) for asked in pull.host.asked) == 2
    assert receipt.records_pulled == ROWS
    assert receipt.pulled_bytes == start + ROWS * RECORD, "a record was pulled twice"


def test_bank_that_is_always_gone_ends(pull: Pull) -> None:
    """No endless loop of finding and losing."""

    async def hook(asked: ToBankService, answer: FromBankService) -> FromBankService | None:
        if isinstance(asked, ReadRange):
            return refused(asked.ticket, "gone", "closed", permanent=False)
        return answer

    pull.host.hook = hook
    with pytest.raises(Exception, match="closed") as caught:
        pull()
    assert caught.value.exit_status == 75


def test_bank_replaced_meanwhile_is_pulled_anew(pull: Pull, built: Path) -> None:
    """Another digest under the same name: all of the new one, none of the old, and it is said."""
    start = start_of(pull.served())
    with BankFile.open(pull.served()) as bank:
        old = bank.digest
    replaced = False

    async def hook(asked: ToBankService, answer: FromBankService) -> FromBankService | None:
        nonlocal replaced
        if isinstance(asked, ReadRange) and asked.offset >= start + 20 * STRIDE and not replaced:
            replaced = True
            shutil.copy(built / "other" / "spark0.k3bank", pull.served())
            pull.host.forget()
            return refused(asked.ticket, "gone", "replaced", permanent=False)
        return answer

    pull.host.hook = hook
    receipt = pull()

    assert pull.target.read_bytes() == (built / "other" / "spark0.k3bank").read_bytes()
    assert receipt.superseded == (old,)
    assert receipt.digest != old
    assert any("starting over" in line for line in pull.notices)


def test_bank_replaced_between_attempts_is_pulled_anew(pull: Pull, built: Path) -> None:
    """An unfinished bank of another digest is worth nothing; the receipt names it."""
    damage(pull.host, offset=start_of(pull.served()) + 20 * STRIDE, times=3)
    with pytest.raises(BankError):
        pull()
    old = pull.receipts()[0].digest
    shutil.copy(built / "other" / "spark0.k3bank", pull.served())

    receipt = pull()

    assert pull.target.read_bytes() == pull.served().read_bytes()
    assert (receipt.superseded, receipt.records_kept) == ((old,), 0)


def test_kept_records_are_not_trusted(pull: Pull) -> None:
    """A byte that rots in the unfinished file costs its record, and no other, a second pull."""
    start = start_of(pull.served())
    damage(pull.host, offset=start + 20 * STRIDE, times=3)
    with pytest.raises(BankError):
        pull()
    kept = pull.receipts()[0].records_pulled
    with (pull.target.parent / "spark0.k3bank.partial").open("r+b") as file:
        file.seek(start + 2 * STRIDE + 100)
        file.write(b"\xee\xee\xee\xee")
        file.seek(start + 3 * STRIDE + RECORD)
        file.write(b"\1")  # padding
    pull.host.asked.clear()

    receipt = pull()

    assert pull.target.read_bytes() == pull.served().read_bytes()
    assert receipt.records_kept == kept - 2
    assert {2, 3} < set(pull.pulled_rows())
    assert len(pull.pulled_rows()) == ROWS - kept + 2


def test_existing_bank_is_refused_and_recorded(pull: Pull, built: Path) -> None:
    """Case D7: nobody's bank is overwritten without being asked, and every attempt is recorded."""
    pull()
    before = pull.target.stat().st_ino
    with pytest.raises(BankError, match=r"exists already.*--replace"):
        pull()
    assert pull.target.stat().st_ino == before
    same = pull(replace=True)
    shutil.copy(built / "other" / "spark0.k3bank", pull.served())
    other = pull(replace=True)

    assert pull.target.read_bytes() == pull.served().read_bytes()
    outcomes = [(receipt.attempt, receipt.outcome) for receipt in pull.receipts()]
    assert outcomes == [(1, "complete"), (2, "refused_exists"), (3, "complete"), (4, "complete")]
    assert (same.records_pulled, other.records_pulled) == (ROWS, ROWS)
    assert same.superseded == other.superseded == ()


def test_failed_replacement_leaves_the_old_bank(pull: Pull) -> None:
    """Until the last record is right the old bank stays."""
    pull()
    before = pull.target.read_bytes()
    damage(pull.host, offset=start_of(pull.served()) + 5 * STRIDE, times=10**6)
    with pytest.raises(BankError):
        pull(replace=True)
    assert pull.target.read_bytes() == before


def test_wrong_keys_are_refused(pull: Pull, tmp_path: Path) -> None:
    """A Station with another key, and a node that nobody admitted: KeyRefused, exit status 78."""
    keys.create(tmp_path / "foreign", "station")
    keys.create(tmp_path / "foreign", "spark0")
    for wrong in (
        {"station_key": tmp_path / "foreign" / "station.key"},
        {"node_key": tmp_path / "foreign" / "spark0.key_secret"},
    ):
        with pytest.raises(KeyRefused) as caught:
            pull(**wrong)
        assert caught.value.exit_status == 78
    assert [receipt.code for receipt in pull.receipts()] == ["key_refused"] * 2
    assert pull.files() == ["receipts"]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (Wanted("spark0", "spark1", "spark"), "built for node spark0"),
        (Wanted("spark0", "spark0", "rtx"), "tier spark"),
        (Wanted("spark9", "spark9", "spark"), "bank_unknown"),
    ],
)
def test_bank_that_does_not_fit_is_refused(pull: Pull, wanted: Wanted, message: str) -> None:
    """Another node's bank, another tier's, or none: before a record is pulled."""
    with pytest.raises(BankError, match=message):
        pull(wanted=wanted)
    assert pull.files() == ["receipts"]
    assert pull.pulled_rows() == []


def test_service_that_is_not_there(pull: Pull) -> None:
    """A bounded wait, an error that names the service, exit status 75, said once."""
    pull.host.stop()
    with pytest.raises(StationUnreachable, match=r"bank service at tcp://127\.0\.0\.1") as caught:
        pull(patience=QUICK)
    assert caught.value.exit_status == 75
    assert len(pull.notices) == 1
    assert pull.receipts()[0].code == "station_unreachable"


def test_busy_service_is_waited_for_within_bounds(pull: Pull) -> None:
    """A refusal that is not for good is asked again; one that never ends is an error."""
    refusals = 3

    async def hook(asked: ToBankService, answer: FromBankService) -> FromBankService | None:
        nonlocal refusals
        if refusals:
            refusals -= 1
            return refused(asked.ticket, "too_many_requests", "busy", permanent=False)
        return answer

    pull.host.hook = hook
    assert pull(patience=QUICK).outcome == "complete"
    refusals = 10**6
    with pytest.raises(StationUnreachable, match="too_many_requests: busy"):
        pull(replace=True, patience=QUICK)


def test_lost_answer_is_asked_for_again(pull: Pull) -> None:
    """A connection that says nothing is given up; the question is asked on the next one."""
    lost = 1

    async def hook(asked: ToBankService, answer: FromBankService) -> FromBankService | None:
        nonlocal lost
        if isinstance(asked, ReadRange) and lost:
            lost -= 1
            return None
        return answer

    pull.host.hook = hook
    receipt = pull(patience=QUICK)
    assert receipt.outcome == "complete"
    assert any("no answer for" in line for line in pull.notices)


def test_wrong_answers_end_the_pull(pull: Pull) -> None:
    """A range of another place or size, or an answer of another kind, is never taken for data."""

    async def shifted(asked: ToBankService, answer: FromBankService) -> FromBankService | None:
        if isinstance(answer, Range):
            return msgspec.structs.replace(answer, offset=answer.offset + 1)
        return answer

    async def other_kind(asked: ToBankService, answer: FromBankService) -> FromBankService | None:
        if isinstance(asked, ReadRange):
            return BankFound(
                ticket=asked.ticket, name="spark0", digest="a" * 64, file_bytes=1, header_bytes=1
            )
        return answer

    async def short(asked: ToBankService, answer: FromBankService) -> FromBankService | None:
        if isinstance(answer, Range):
            return msgspec.structs.replace(answer, data=answer.data[:-1])
        return answer

    for hook in (shifted, other_kind, short):
        pull.host.hook = hook
        with pytest.raises(RemoteProtocolError, match="bank service at"):
            pull()
    assert pull.files() == ["receipts"]


def test_rate_is_kept(pull: Pull, built: Path) -> None:
    """It takes at least the time of the bytes beyond the first burst."""
    shutil.copy(built / "wide" / "spark0.k3bank", pull.served())
    receipt = pull(rate=8_000_000)
    assert receipt.seconds >= (receipt.pulled_bytes - CHUNK_BYTES_MAX) / 8e6 > 0.5
    assert pull.target.read_bytes() == pull.served().read_bytes()


def test_folder_that_is_missing(pull: Pull) -> None:
    """One clear error, nothing made."""
    pull.target = pull.target.parent / "none" / "spark0.k3bank"
    with pytest.raises(BankError, match="cannot write a receipt: No such file"):
        pull()


def test_receipts_are_closed_and_pruned(pull: Pull) -> None:
    """What a killed attempt left open is closed by the next; only the newest are kept."""
    book = ReceiptBook(pull.target)
    for _ in range(KEPT_MAX + 3):
        book.begin(service="tcp://h:1", node="spark0", started="2026-01-01T00:00:00+00:00")
    (book.folder / "spark0.0001.json.txt").touch()
    other = ReceiptBook(pull.target.with_name("spark0.0001.k3bank"))
    other.begin(service="tcp://h:1", node="x", started="2026-01-01T00:00:00+00:00")

    pull()

    found = pull.receipts()
    assert len(found) == KEPT_MAX
    assert [receipt.attempt for receipt in found] == list(range(5, KEPT_MAX + 5))
    assert {receipt.outcome for receipt in found[:-1]} == {"interrupted"}
    assert found[-1].outcome == "complete"
    assert other.attempts() == [1]


def test_second_attempt_at_once_is_refused(pull: Pull) -> None:
    """One writer per bank; the second says so and leaves the first one's files and receipt."""

    async def hook(asked: ToBankService, answer: FromBankService) -> FromBankService | None:
        await asyncio.sleep(0.02)
        return answer

    pull.host.hook = hook

    async def twice() -> list[Receipt | BaseException]:
        service = staging.service_of(
            pull.host.address, node_key=pull.host.node_key(), station_key=pull.host.station_key
        )
        wanted = Wanted("spark0", "spark0", "spark")
        jobs = [
            staging.stage(service, wanted, pull.target, progress=lambda _done, _total: None)
            for _ in range(2)
        ]
        return await asyncio.gather(*jobs, return_exceptions=True)

    first, second = asyncio.run(twice())
    assert isinstance(first, Receipt)
    assert isinstance(second, BankError)
    assert "another builder is writing it" in str(second)
    assert [receipt.outcome for receipt in pull.receipts()] == ["complete", "failed"]
    assert pull.target.read_bytes() == pull.served().read_bytes()


def test_cancelled_pull_is_resumed(pull: Pull) -> None:
    """Cancelling waits for the threads, keeps the records, and the receipt says interrupted."""
    service = staging.service_of(
        pull.host.address, node_key=pull.host.node_key(), station_key=pull.host.station_key
    )

    async def cancelled() -> None:
        task = asyncio.current_task()
        assert task is not None

        def progress(_done: int, _total: int) -> None:
            # not by bytes: what has arrived may not be written yet
            if count_finished(journal_path(pull.target)) >= ROWS // 2:
                task.cancel()

        wanted = Wanted("spark0", "spark0", "spark")
        await staging.stage(service, wanted, pull.target, progress=progress)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    (receipt,) = pull.receipts()
    assert receipt.outcome == "interrupted"
    assert journal_path(pull.target).exists()
    again = pull()
    assert again.records_kept >= receipt.records_pulled >= ROWS // 2
    assert pull.target.read_bytes() == pull.served().read_bytes()


def test_node_pulls_only_the_bank_it_lacks(pull: Pull) -> None:
    """Without a service, or with a bank, nothing is asked; otherwise the bank is there then."""

    def ensure(address: str) -> Receipt | None:
        config = configs.load(
            "spark",
            "spark0",
            path=None,
            overrides={
                "bank": str(pull.target),
                "bank_service": address,
                "node_key": str(pull.host.node_key()),
                "station_key": str(pull.host.station_key),
            },
        )
        return asyncio.run(
            staging.ensure_bank(config, lambda done, total: pull.progress.append((done, total)))
        )

    assert ensure("") is None
    assert pull.files() == []
    made = ensure(pull.host.address)
    assert made is not None
    assert made.outcome == "complete"
    assert pull.target.read_bytes() == pull.served().read_bytes()
    asked = len(pull.host.asked)
    assert ensure(pull.host.address) is None
    assert len(pull.host.asked) == asked
    pull.target.unlink()
    with pytest.raises(ConfigError, match="not understood"):
        ensure("10.0.0.1:8382")
