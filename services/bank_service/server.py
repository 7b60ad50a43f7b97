"""Answers the nodes: takes their questions in turn, at the set rate, and never waits for one.

The shell around FairQueue, TokenBucket, OpenBanks and Records: owns tasks, threads and what is
logged. Disks are read in a few threads, so the loop stays responsive. Memory is bounded: per
connection at most WINDOW_MAX questions wait here and ANSWERS_WAITING_MAX answers of 1 MiB wait to
be read by the node; a node has at most CONNECTIONS_MAX connections.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final, TypeAlias, assert_never

from structlog.typing import FilteringBoundLogger

from services.bank_service.fair_queue import FairQueue
from services.bank_service.open_banks import OpenBank, OpenBanks
from services.bank_service.records import FoundRecord, Records
from services.bank_service.refusal import Refusal
from services.bank_service.traffic import Traffic
from shared.core.bank_wire import (
    ANSWER_BYTES_MAX,
    BANK_PROTOCOL,
    REQUEST_BYTES_MAX,
    WINDOW_MAX,
    BankFound,
    BankRefused,
    FindBank,
    FindRecord,
    FromBankService,
    PullEnded,
    Range,
    ReadRange,
    RecordFound,
    ToBankService,
)
from shared.core.rate import TokenBucket
from shared.io.link import LinkSettings, Peer, PeerUnreachable, StationLink
from shared.io.systemd import Pulse

READERS: Final = 4  # ranges read at a time
FINDS_WAITING_MAX: Final = 4  # per connection
CONNECTIONS_MAX: Final = 4  # per node: a pull, a record, and what an earlier life left
# libzmq learns in batches of half the queue what a node has read, hence twice the window
ANSWERS_WAITING_MAX: Final = 2 * WINDOW_MAX + 2
LINES_MAX: Final = 64  # logged per node, and one more with each look: it must not fill the journal
LINK: Final = LinkSettings(
    frame_bytes_max=REQUEST_BYTES_MAX,
    sent_bytes_max=ANSWER_BYTES_MAX,
    queue_len_max=ANSWERS_WAITING_MAX,
    # behind megabytes on a slow line a heartbeat may take seconds
    heartbeat_interval_us=3_000_000,
    heartbeat_timeout_us=15_000_000,
)

_TEXT_CHARS_MAX: Final = 512  # of BankRefused.text

Link: TypeAlias = StationLink[ToBankService, FromBankService]
Find: TypeAlias = FindBank | FindRecord


class BankServer:
    """Serves one link until cancelled. Event loop only; `readers` and `finder` are its threads."""

    def __init__(
        self,
        link: Link,
        banks: OpenBanks,
        records: Records,
        *,
        bucket: TokenBucket,
        readers: Executor,
        finder: Executor,
        clock_us: Callable[[], int],
        log: FilteringBoundLogger,
    ) -> None:
        """`finder` must have one thread: it alone looks for records."""
        self._link = link
        self._banks = banks
        self._records = records
        self._bucket = bucket
        self._readers = readers
        self._finder = finder
        self._clock_us = clock_us
        self._log = log
        self._visits: dict[Peer, set[str]] = {}  # connections: codes refused, each logged once
        self._lines: dict[str, int] = {}  # logged of late, by node: bounded by the allow-list
        self._departures_missed = 0
        self._ranges: FairQueue[Peer, ReadRange] = FairQueue(WINDOW_MAX)
        self._finds: FairQueue[Peer, Find] = FairQueue(FINDS_WAITING_MAX)
        self._ranges_wanted = asyncio.Semaphore(0)
        self._finds_wanted = asyncio.Semaphore(0)
        self._in_flight = 0
        self._answered = 0
        self._traffic = Traffic()
        self._traffic_since_us = clock_us()
        self.refusals: Final[Counter[str]] = Counter()  # by code

    async def run(self) -> None:
        """Take and answer questions until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive(), name="bank_questions")
            tasks.create_task(self._departures(), name="bank_departures")
            tasks.create_task(self._find_always(), name="bank_finder")
            for index in range(READERS):
                tasks.create_task(self._read_always(), name=f"bank_reader_{index}")

    def pulse(self) -> Pulse:
        """Progress is ranges answered; without a waiting range there is nothing to do."""
        return Pulse(self._answered, idle=not len(self._ranges) and not self._in_flight)

    def look(self) -> str:
        """Close what nobody reads any more; the state of the service in one line."""
        now = self._clock_us()
        self._banks.close_idle(now)
        self._lines = {node: lines - 1 for node, lines in self._lines.items() if lines > 1}
        if self._link.counters.departures_dropped != self._departures_missed:
            self._departures_missed = self._link.counters.departures_dropped
            self._visits.clear()  # who is still there is known again with its next question
        elapsed_us, self._traffic_since_us = now - self._traffic_since_us, now
        return self._traffic.summary(elapsed_us)

    async def _receive(self) -> None:
        while True:
            peer, message = await self._link.receive()
            self._take(peer, message)

    async def _departures(self) -> None:
        while True:
            self._forget(await self._link.departed())

    def _take(self, peer: Peer, message: ToBankService) -> None:
        if isinstance(message, PullEnded):
            self._note_end(peer, message)  # often the last word of a connection that is gone by now
            return
        if not self._admitted(peer):
            text = f"node {peer.name} has {CONNECTIONS_MAX} connections already: close one"
            self._refuse(peer, message, Refusal("too_many_connections", text, permanent=False))
            return
        match message:
            case ReadRange():
                if self._ranges.put(peer, message):
                    self._ranges_wanted.release()
                else:
                    self._refuse(peer, message, _too_many(WINDOW_MAX))
            case FindBank() | FindRecord():
                if message.protocol != BANK_PROTOCOL:
                    self._refuse(peer, message, _other_protocol(message.protocol))
                elif self._finds.put(peer, message):
                    self._finds_wanted.release()
                else:
                    self._refuse(peer, message, _too_many(FINDS_WAITING_MAX))
            case _:
                assert_never(message)

    def _admitted(self, peer: Peer) -> bool:
        if peer in self._visits:
            return True
        if sum(known.name == peer.name for known in self._visits) >= CONNECTIONS_MAX:
            return False
        self._visits[peer] = set()
        return True

    async def _read_always(self) -> None:
        while True:
            await self._ranges_wanted.acquire()
            taken = self._ranges.take()
            if taken is None:  # its node has left
                continue
            self._in_flight += 1
            try:
                await self._answer_range(*taken)
            finally:
                self._in_flight -= 1
            self._answered += 1

    async def _answer_range(self, peer: Peer, asked: ReadRange) -> None:
        wait_us = self._bucket.take(asked.length, self._clock_us())
        if wait_us:
            await asyncio.sleep(wait_us / 1e6)
        if peer not in self._visits:
            return
        loop = asyncio.get_running_loop()
        data = await loop.run_in_executor(self._readers, self._read, asked)
        if isinstance(data, Refusal):
            self._refuse(peer, asked, data)
            return
        answer = Range(ticket=asked.ticket, source=asked.source, offset=asked.offset, data=data)
        if self._send(peer, answer):
            self._traffic.add(peer.name, len(data))

    def _read(self, asked: ReadRange) -> bytes | Refusal:
        """In a thread."""
        if self._records.has(asked.source):
            return self._records.read(asked.source, asked.offset, asked.length)
        return self._banks.read(asked.source, asked.offset, asked.length, self._clock_us())

    async def _find_always(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._finds_wanted.acquire()
            taken = self._finds.take()
            if taken is None:
                continue
            peer, asked = taken
            match asked:
                case FindBank():
                    bank = await loop.run_in_executor(
                        self._finder, self._banks.find, asked.name, self._clock_us()
                    )
                    self._answer_bank(peer, asked, bank)
                case FindRecord():
                    record = await loop.run_in_executor(
                        self._finder,
                        self._records.find,
                        *(asked.model_digest, asked.layer, asked.expert, asked.order),
                    )
                    self._answer_record(peer, asked, record)

    def _answer_bank(self, peer: Peer, asked: FindBank, bank: OpenBank | Refusal) -> None:
        if isinstance(bank, Refusal):
            self._refuse(peer, asked, bank)
            return
        answer = BankFound(
            ticket=asked.ticket,
            name=bank.name,
            digest=bank.digest,
            file_bytes=bank.file_bytes,
            header_bytes=bank.header_bytes,
        )
        if self._send(peer, answer) and self._may_log(peer):
            self._log.info(
                "bank_pull_begun",
                node=peer.name,
                bank=bank.name,
                digest=bank.digest,
                bytes=bank.file_bytes,
            )

    def _answer_record(self, peer: Peer, asked: FindRecord, record: FoundRecord | Refusal) -> None:
        if isinstance(record, Refusal):
            self._refuse(peer, asked, record)
            return
        answer = RecordFound(
            ticket=asked.ticket,
            shape=record.shape,
            record_hash=record.record_hash,
            record_bytes=len(record.data),
        )
        if self._send(peer, answer):
            self._log.debug(
                "record_pull_begun",
                node=peer.name,
                layer=asked.layer,
                expert=asked.expert,
                origin=record.origin,
            )

    def _refuse(self, peer: Peer, asked: Find | ReadRange, refusal: Refusal) -> None:
        self.refusals[refusal.code] += 1
        logged = self._visits.get(peer, set())
        if refusal.code not in logged and self._may_log(peer):
            logged.add(refusal.code)
            self._log.warning(
                "bank_pull_refused", node=peer.name, code=refusal.code, error=refusal.text
            )
        answer = BankRefused(
            ticket=asked.ticket,
            code=refusal.code,
            text=_sendable(refusal.text),
            permanent=refusal.permanent,
        )
        self._send(peer, answer)

    def _note_end(self, peer: Peer, ended: PullEnded) -> None:
        bank = self._banks.name_of(ended.source)
        line = self._log.debug if bank is None else self._log.info
        if self._may_log(peer):
            line(
                "bank_pull_ended",
                node=peer.name,
                bank=bank or ended.source,
                complete=ended.complete,
                bytes=ended.pulled_bytes,
                kept_bytes=ended.kept_bytes,
                seconds=round(ended.elapsed_us / 1e6, 3),
                bytes_per_s=ended.pulled_bytes * 1_000_000 // max(ended.elapsed_us, 1),
            )

    def _send(self, peer: Peer, answer: FromBankService) -> bool:
        """Whether it was taken; a node that left or does not read asks again when it is back."""
        try:
            self._link.send(peer, answer)
        except PeerUnreachable:
            # also when it asked, left, and its departure was seen before its question
            self._forget(peer)
            return False
        return True

    def _forget(self, peer: Peer) -> None:
        self._ranges.forget(peer)
        self._finds.forget(peer)
        self._visits.pop(peer, None)

    def _may_log(self, peer: Peer) -> bool:
        lines = self._lines.get(peer.name, 0)
        if lines >= LINES_MAX:
            return False
        self._lines[peer.name] = lines + 1
        return True


def _sendable(text: str) -> str:
    """Short enough, and UTF-8 also where it has a path that is not."""
    return text[:_TEXT_CHARS_MAX].encode(errors="backslashreplace").decode()[:_TEXT_CHARS_MAX]


def _too_many(waiting_max: int) -> Refusal:
    return Refusal(
        "too_many_requests",
        f"{waiting_max} questions of this connection wait already: ask again after an answer",
        permanent=False,
    )


def _other_protocol(protocol: int) -> Refusal:
    return Refusal(
        "protocol_unsupported",
        f"bank protocol {protocol}, this service speaks {BANK_PROTOCOL}: install the same version "
        "on both ends",
        permanent=True,
    )
