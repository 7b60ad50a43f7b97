"""A bank service for tests of the pulling end: the real link and a real bank file, in a thread.

It answers at once and from one folder; `hook` sees every question and may change, delay or swallow
its answer. The service that ships is tested by itself, and with the node in tests/e2e.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from shared.core import bank_wire
from shared.core.bank_header import header_block_bytes, stored_digest
from shared.core.bank_wire import (
    ANSWER_BYTES_MAX,
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
from shared.io import keys
from shared.io.bank_file import BankFile, blake3_digest
from shared.io.link import LinkSettings, PeerUnreachable, listen

Hook = Callable[[ToBankService, FromBankService], Awaitable[FromBankService | None]]
WAIT_S = 10.0


class BankHost:
    """Serves `folder` at a fixed port from `start` to `stop`; both may be repeated."""

    def __init__(self, root: Path, folder: Path, *, nodes: tuple[str, ...] = ("spark0",)) -> None:
        """Makes the keys of the Station and of `nodes`."""
        self.root, self.folder = root, folder
        self.station = keys.create(root / "station", "station")
        for node in nodes:
            keys.create(root / "nodes", node)
        self.address = "tcp://127.0.0.1:0"
        self.asked: list[ToBankService] = []
        self.hook: Hook | None = None
        self._sources: dict[str, bytes] = {}
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    @property
    def station_key(self) -> Path:
        return self.root / "station" / "station.key"

    def node_key(self, node: str = "spark0") -> Path:
        return self.root / "nodes" / f"{node}.key_secret"

    def start(self) -> None:
        """Returns when it listens."""
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)))
        self._thread.start()
        assert ready.wait(WAIT_S)

    def stop(self) -> None:
        """The sudden end: what it knew of open banks is gone."""
        if self._thread is None:
            return
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self._thread = None
        self._sources.clear()

    def ranges(self) -> list[ReadRange]:
        """The ranges asked for so far."""
        return [message for message in self.asked if isinstance(message, ReadRange)]

    def ends(self) -> list[PullEnded]:
        """What nodes said at the end."""
        return [message for message in self.asked if isinstance(message, PullEnded)]

    def forget(self) -> None:
        """Every digest is gone, as after a restart or when too many banks are open."""
        self._sources.clear()

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with (
            asyncio.TaskGroup() as tasks,
            listen(
                self.address,
                keys=self.station,
                allow_list=dict(keys.load_allow_list(self.root / "nodes")),
                decode=bank_wire.decode_to_service,
                encode=bank_wire.encode,
                tasks=tasks,
                log=structlog.get_logger(),
                settings=LinkSettings(frame_bytes_max=ANSWER_BYTES_MAX),
            ) as link,
        ):
            self.address = link.address
            ready.set()
            async with asyncio.TaskGroup() as answering:  # ends before the link does
                receiving = answering.create_task(self._answer(link))
                await self._stop.wait()
                receiving.cancel()

    async def _answer(self, link: Any) -> None:
        async with asyncio.TaskGroup() as answering:
            while True:
                peer, message = await link.receive()
                self.asked.append(message)
                if not isinstance(message, PullEnded):
                    answering.create_task(self._one(link, peer, message))

    async def _one(self, link: Any, peer: Any, message: ToBankService) -> None:
        answer: FromBankService | None = self._plain(message)
        if self.hook is not None:
            answer = await self.hook(message, answer)
        if answer is not None:
            with suppress(PeerUnreachable):  # a node that was killed
                link.send(peer, answer)

    def _plain(self, message: ToBankService) -> FromBankService:
        match message:
            case FindBank(ticket=ticket, name=name):
                path = self.folder / f"{name}.k3bank"
                if not path.exists():
                    return refused(ticket, "bank_unknown", f"no bank {name}", permanent=True)
                data = path.read_bytes()
                digest = stored_digest(data).hex()
                self._sources[digest] = data
                size = header_block_bytes(data[:4096], source="test")
                return BankFound(
                    ticket=ticket,
                    name=name,
                    digest=digest,
                    file_bytes=len(data),
                    header_bytes=size,
                )
            case FindRecord():
                return self._record(message)
            case ReadRange(ticket=ticket, source=source, offset=offset, length=length):
                if source not in self._sources:
                    return refused(ticket, "gone", f"{source} is not open", permanent=False)
                part = self._sources[source][offset : offset + length]
                return Range(ticket=ticket, source=source, offset=offset, data=part)
        raise AssertionError(message)

    def _record(self, asked: FindRecord) -> FromBankService:
        for path in sorted(self.folder.glob("*.k3bank")):
            with BankFile.open(path) as bank:
                row = bank.header.row_of().get((asked.layer, asked.expert))
                if row is None or bank.header.layout != asked.order:
                    continue
                record = bytearray(bank.layout.record_bytes)
                bank.read_into(row, memoryview(record))
                digest = blake3_digest(record).hex()
                self._sources[digest] = bytes(record)
                return RecordFound(
                    ticket=asked.ticket,
                    shape=bank.header.shape,
                    record_hash=digest,
                    record_bytes=len(record),
                )
        return refused(asked.ticket, "record_unknown", "nobody has it", permanent=True)


def refused(ticket: int, code: str, text: str, *, permanent: bool) -> BankRefused:
    """A refusal."""
    return BankRefused(ticket=ticket, code=code, text=text, permanent=permanent)
