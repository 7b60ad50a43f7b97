"""A node's questions to the Station's bank service, over a link that is opened again when it ends.

Owns tickets, the window of ranges, the rate, and what silence and refusals mean. Must not know
files or what the bytes are. A question outlives its connection: it is asked again on the next one,
and the service keeps no state, so a pull goes on where it was.

Every wait is bounded: a connection without an answer for `answer_us` is given up, and a service
that gives nothing useful for `give_up_us` is a StationUnreachable.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

from shared.core import bank_wire
from shared.core.bank_wire import (
    ANSWER_BYTES_MAX,
    BANK_PROTOCOL,
    CHUNK_BYTES_MAX,
    REQUEST_BYTES_MAX,
    WINDOW_MAX,
    BankFound,
    BankMessage,
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
from shared.core.errors import (
    BankError,
    CheckpointError,
    ConfigError,
    DigestMismatch,
    MeshError,
    RemoteProtocolError,
)
from shared.core.rate import TokenBucket
from shared.core.record import RecordOrder
from shared.io.keys import KeyPair
from shared.io.link import LinkSettings, NodeLink, StationUnreachable, connect
from spark_daemon.staging.tasks import all_of

A = TypeVar("A", BankFound, RecordFound, Range)
Notice: TypeAlias = Callable[[str], None]  # one line for a person
Arrived: TypeAlias = Callable[[int], None]  # bytes of a range
_Link: TypeAlias = NodeLink[FromBankService, BankMessage]

LINK: Final = LinkSettings(
    frame_bytes_max=ANSWER_BYTES_MAX,
    sent_bytes_max=REQUEST_BYTES_MAX,
    queue_len_max=2 * WINDOW_MAX + 2,  # in MiB: what a node that is slow to read may have to hold
    # behind megabytes on a slow line a heartbeat may take seconds
    heartbeat_interval_us=3_000_000,
    heartbeat_timeout_us=15_000_000,
)
GONE: Final = "gone"
_TICK_US: Final = 500_000  # how often a silent connection is looked at
_OVERTAKEN: Final = 10  # a question that is this many answer_us old was lost on its way
# by the service's code; any other permanent refusal is about a bank
_REFUSALS: Final[dict[str, type[ConfigError]]] = {
    "model_unknown": DigestMismatch,
    "checkpoint_invalid": CheckpointError,
}


class SourceGone(MeshError):
    """The service no longer has the bytes of this digest; asked by name it may have others."""

    code = "bank_gone"
    exit_status = 75  # EX_TEMPFAIL of sysexits.h


@dataclass(frozen=True, slots=True)
class Service:
    """Where the bank service is, and who asks: the node's keys, the Station's public key (Z85)."""

    address: str
    keys: KeyPair
    station_key: str

    def __str__(self) -> str:
        """For messages."""
        return f"the bank service at {self.address}"


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for what.

    `answer_us` also bounds how slow a service may be: it must answer one range in that time.
    """

    connect_us: int = 2_000_000
    answer_us: int = 30_000_000
    give_up_us: int = 120_000_000
    pause_us_min: int = 100_000
    pause_us_max: int = 5_000_000


@dataclass(slots=True)
class _Question:
    """A question without an answer. Mutable: the time is that of its last sending."""

    message: ToBankService
    answer: asyncio.Future[FromBankService]
    sent_us: int


def now_us() -> int:
    """This process's monotonic clock."""
    return time.monotonic_ns() // 1000


class BankClient:
    """Asks the bank service; made by `open_client`. For one event loop, any number of tasks.

    One that was refused or gave up stays so: open another one to try again.
    """

    def __init__(
        self, service: Service, patience: Patience, *, rate_bytes_per_s: int, notice: Notice
    ) -> None:
        """Use `open_client`; it also runs and ends the connection."""
        self.service: Final = service
        self.dropped = 0  # answers that nobody waits for
        self._patience = patience
        self._bucket = TokenBucket(rate_bytes_per_s, CHUNK_BYTES_MAX)
        self._notice = notice
        self._window = asyncio.Semaphore(WINDOW_MAX)
        self._tickets = itertools.count(1)
        self._questions: dict[int, _Question] = {}
        self._link: _Link | None = None
        self._failure: MeshError | None = None
        self._answered_us = now_us()  # or since when there is a question
        self._useful_us = now_us()  # the same without refusals

    async def find_bank(self, name: str) -> BankFound:
        """The bank of this name; BankError when the service has none, or see `read`."""
        return await self._ask(
            lambda ticket: FindBank(ticket=ticket, protocol=BANK_PROTOCOL, name=name), BankFound
        )

    async def find_record(
        self, model_digest: str, layer: int, expert: int, order: RecordOrder
    ) -> RecordFound:
        """A single record; BankError when nobody at the service has it, or see `read`."""
        return await self._ask(
            lambda ticket: FindRecord(
                ticket=ticket,
                protocol=BANK_PROTOCOL,
                model_digest=model_digest,
                layer=layer,
                expert=expert,
                order=order,
            ),
            RecordFound,
        )

    async def read(
        self, source: str, offset: int, buffer: memoryview, arrived: Arrived | None = None
    ) -> None:
        """Fill `buffer` with the bytes of `source` from `offset` on, WINDOW_MAX ranges at a time.

        `arrived` is told the size of each range that came, in any order.
        Raises SourceGone (describe the source again), StationUnreachable (try again later) or a
        ConfigError (refused for good); then some of `buffer` may be filled.
        """
        starts = range(0, len(buffer), CHUNK_BYTES_MAX)
        await all_of(
            self._range(source, offset + start, buffer[start : start + CHUNK_BYTES_MAX], arrived)
            for start in starts
        )

    def say_ended(
        self, source: str, *, complete: bool, pulled_bytes: int, kept_bytes: int, elapsed_us: int
    ) -> None:
        """Tell the service's log how a pull ended, if it can be reached now."""
        if self._link is None:
            return
        with suppress(StationUnreachable):
            self._link.send(
                PullEnded(
                    ticket=next(self._tickets),
                    source=source,
                    complete=complete,
                    pulled_bytes=pulled_bytes,
                    kept_bytes=kept_bytes,
                    elapsed_us=elapsed_us,
                )
            )

    async def run(self) -> None:
        """Keep a connection until cancelled or without hope; `open_client` runs it."""
        pause_us = self._patience.pause_us_min
        was_told = False
        while self._failure is None:
            begun_us = now_us()
            error = await self._converse()
            if isinstance(error, ConfigError):
                self._fail(error)
                return
            if self._useful_us > begun_us:
                pause_us, was_told = self._patience.pause_us_min, False
            waited_us = now_us() - self._useful_us
            if self._questions and waited_us >= self._patience.give_up_us:
                self._fail(self._unreachable(str(error), waited_us))
                return
            if not was_told:
                self._notice(f"{self.service}: {error}; trying again")
                was_told = True
            await asyncio.sleep(pause_us / 1e6)
            pause_us = min(2 * pause_us, self._patience.pause_us_max)

    async def _converse(self) -> MeshError:
        """One connection from its handshake to its end; why it ended."""
        async with asyncio.TaskGroup() as tasks:
            try:
                async with connect(
                    self.service.address,
                    keys=self.service.keys,
                    station_key=self.service.station_key,
                    decode=bank_wire.decode_from_service,
                    encode=bank_wire.encode,
                    tasks=tasks,
                    timeout_us=self._patience.connect_us,
                    settings=LINK,
                ) as link:
                    self._link = link
                    self._answered_us = now_us()
                    for question in self._questions.values():
                        self._send(question)
                    return await self._listen(link)
            except (StationUnreachable, ConfigError) as error:
                return error
            finally:
                self._link = None

    async def _listen(self, link: _Link) -> MeshError:
        """Take answers until the connection is silent for too long (the error returned) or over."""
        while True:
            try:
                async with asyncio.timeout(min(_TICK_US, self._patience.answer_us) / 1e6):
                    self._take(await link.receive())
            except TimeoutError:
                pass
            silent_us = self._silent_us()
            if silent_us >= self._patience.answer_us:
                return StationUnreachable(f"no answer for {silent_us} us")

    def _silent_us(self) -> int:
        if not self._questions:
            return 0
        now = now_us()
        oldest_us = now - min(question.sent_us for question in self._questions.values())
        return max(now - self._answered_us, oldest_us // _OVERTAKEN)

    def _take(self, answer: FromBankService) -> None:
        self._answered_us = now_us()
        if not isinstance(answer, BankRefused):
            self._useful_us = self._answered_us
        question = self._questions.get(answer.ticket)
        if question is None or question.answer.done():
            self.dropped += 1  # whoever asked has given up
            return
        question.answer.set_result(answer)

    def _send(self, question: _Question) -> None:
        """Now, if there is a connection; otherwise the next one begins with it."""
        question.sent_us = now_us()
        if self._link is not None:
            with suppress(StationUnreachable):  # `_listen` sees the same end
                self._link.send(question.message)

    def _fail(self, error: MeshError) -> None:
        self._failure = error
        for question in self._questions.values():
            if not question.answer.done():
                question.answer.set_exception(error)

    async def _range(
        self, source: str, offset: int, part: memoryview, arrived: Arrived | None
    ) -> None:
        async with self._window:
            wait_us = self._bucket.take(len(part), now_us())
            if wait_us:
                await asyncio.sleep(wait_us / 1e6)
            answer = await self._ask(
                lambda ticket: ReadRange(
                    ticket=ticket, source=source, offset=offset, length=len(part)
                ),
                Range,
            )
        if (answer.source, answer.offset, len(answer.data)) != (source, offset, len(part)):
            raise RemoteProtocolError(
                f"{self.service} answered with {len(answer.data)} bytes from {answer.offset} of "
                f"{answer.source} when asked for {len(part)} from {offset} of {source}: run the "
                "same version at both ends"
            )
        part[:] = answer.data
        if arrived is not None:
            arrived(len(part))

    async def _ask(self, message: Callable[[int], ToBankService], kind: type[A]) -> A:
        """The answer of `kind`; refusals that are not for good are waited out, within bounds."""
        refused_us, pause_us = None, self._patience.pause_us_min
        while True:
            answer = await self._exchange(message(next(self._tickets)))
            if isinstance(answer, kind):
                return answer
            if not isinstance(answer, BankRefused):
                raise RemoteProtocolError(
                    f"{self.service} answered {type(answer).__name__} where {kind.__name__} was "
                    "expected: run the same version at both ends"
                )
            self._raise_if_final(answer)
            refused_us = refused_us or now_us()
            waited_us = now_us() - refused_us
            if waited_us >= self._patience.give_up_us:
                raise self._unreachable(f"{answer.code}: {answer.text}", waited_us)
            await asyncio.sleep(pause_us / 1e6)
            pause_us = min(2 * pause_us, self._patience.pause_us_max)

    async def _exchange(self, message: ToBankService) -> FromBankService:
        if self._failure is not None:
            raise self._failure
        if not self._questions:
            self._answered_us = self._useful_us = now_us()
        answer: asyncio.Future[FromBankService] = asyncio.get_running_loop().create_future()
        question = _Question(message, answer, now_us())
        self._questions[message.ticket] = question
        try:
            self._send(question)
            return await answer
        finally:
            del self._questions[message.ticket]

    def _raise_if_final(self, refused: BankRefused) -> None:
        if refused.code == GONE:
            raise SourceGone(f"{self.service}: {refused.text}")
        if refused.permanent:
            kind = _REFUSALS.get(refused.code, BankError)
            raise kind(f"{self.service} refused ({refused.code}): {refused.text}")

    def _unreachable(self, reason: str, waited_us: int) -> StationUnreachable:
        return StationUnreachable(
            f"{self.service} gave nothing for {waited_us} us: {reason}: check that k3-banks runs "
            "there, then start this again: what was pulled is kept"
        )


@asynccontextmanager
async def open_client(
    service: Service,
    *,
    patience: Patience | None = None,
    rate_bytes_per_s: int = 0,
    notice: Notice | None = None,
) -> AsyncIterator[BankClient]:
    """A client that pulls at most `rate_bytes_per_s` (0: no limit) until the block is left.

    Opening waits for nothing: a service that is not there is an error of the first question.
    """
    client = BankClient(
        service,
        patience or Patience(),
        rate_bytes_per_s=rate_bytes_per_s,
        notice=notice or _no_notice,
    )
    failure: MeshError | OSError | None = None
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(client.run(), name="bank_client")
        try:
            yield client
        except (MeshError, OSError) as error:
            failure = error  # raised outside, where no group wraps it
        finally:
            running.cancel()
    if failure is not None:
        raise failure


def _no_notice(_line: str) -> None:
    """Nobody listens."""
