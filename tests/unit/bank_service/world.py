"""A small model, its banks, a bank service over a real socket, and a node that asks it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import structlog

from services.bank_service.open_banks import OpenBanks
from services.bank_service.records import Records
from services.bank_service.server import LINK, BankServer
from services.banks.builder import build
from services.banks.source import ExpertSource
from shared.core.bank_wire import (
    ANSWER_BYTES_MAX,
    BANK_PROTOCOL,
    CHUNK_BYTES_MAX,
    WINDOW_MAX,
    BankFound,
    BankMessage,
    BankRefused,
    FindBank,
    FindRecord,
    FromBankService,
    Range,
    ReadRange,
    decode_from_service,
    decode_to_service,
    encode,
)
from shared.core.placement import PlacedNode, Placement
from shared.core.rate import TokenBucket
from shared.core.record import RecordLayout
from shared.core.shape import ExpertShape, ModelShape
from shared.io import keys
from shared.io.link import LinkSettings, NodeLink, connect, listen
from tests.support.expert_records import expert_record

SHAPE = ModelShape(
    layers=3, first_moe_layer=1, experts=6, top_k=2, expert=ExpertShape(latent=512, width=256)
)
MODEL = "model-a"
PATIENCE_S = 40.0
NODE_QUEUE = 2 * WINDOW_MAX + 2  # of a node that behaves
T = TypeVar("T")


class RandomExperts:
    """An ExpertSource whose records follow from their names."""

    layout = RecordLayout(SHAPE.expert)

    def __init__(self, digest: str = MODEL) -> None:
        self.digest = digest

    def expert_record(self, layer: int, expert: int) -> bytes:
        """The record of one expert."""
        return expert_record(SHAPE.expert, 1000 * layer + expert).tobytes()

    def read_expert_record(self, layer: int, expert: int, buffer: memoryview) -> None:
        """The same into a buffer."""
        buffer[:] = self.expert_record(layer, expert)

    def stored_hash(self, layer: int, expert: int) -> None:
        """Records are stored as they are."""

    def position(self, layer: int, expert: int) -> tuple[str, int]:
        """All at one place: any order is as good as another."""
        return "", 0

    def release(self, experts: Sequence[tuple[int, int]]) -> None:
        """Nothing is cached."""


def placement(model_digest: str = MODEL, policy: str = "test") -> Placement:
    """Two nodes that hold every expert but the last of each layer, which nobody holds."""
    rows = [(layer, expert) for layer in (2, 1) for expert in range(5)]
    return Placement(
        version=2,
        model_digest=model_digest,
        shape=SHAPE,
        policy=policy,
        nodes=(
            PlacedNode(name="spark0", tier="spark", rows=tuple(rows[0::2])),
            PlacedNode(name="grace", tier="grace", rows=tuple(rows[1::2])),
        ),
    )


def build_bank(folder: Path, name: str, *, policy: str = "test", replace: bool = False) -> Path:
    """The bank of a node in a folder."""
    path = folder / f"{name}.k3bank"
    build(RandomExperts(), placement(policy=policy), name, path, replace=replace)
    return path


class TestLog:
    """A logger that remembers."""

    __test__ = False

    def __init__(self) -> None:
        self.capture = structlog.testing.LogCapture()
        self.log = structlog.wrap_logger(None, processors=[self.capture]).bind()

    def events(self, name: str) -> list[Any]:
        """The lines of one event."""
        return [line for line in self.capture.entries if line["event"] == name]


def now_us() -> int:
    """The clock of this process."""
    return time.monotonic_ns() // 1000


class Node:
    """A node's end: asks and gets the answer of the same ticket."""

    def __init__(self, link: NodeLink[FromBankService, BankMessage]) -> None:
        self.link = link
        self._tickets = itertools.count()
        self._early: dict[int, FromBankService] = {}

    def send(self, kind: Callable[..., BankMessage], **fields: object) -> int:
        """Ask; the ticket of the question."""
        ticket = next(self._tickets)
        self.link.send(kind(ticket=ticket, **fields))
        return ticket

    async def answer(self, ticket: int) -> FromBankService:
        """The answer to a ticket."""
        async with asyncio.timeout(PATIENCE_S):
            while ticket not in self._early:
                message = await self.link.receive()
                self._early[message.ticket] = message
        return self._early.pop(ticket)

    async def ask(self, kind: Callable[..., BankMessage], **fields: object) -> FromBankService:
        """Ask and wait."""
        return await self.answer(self.send(kind, **fields))

    async def find(self, name: str) -> BankFound | BankRefused:
        """Ask for a bank."""
        answer = await self.ask(FindBank, protocol=BANK_PROTOCOL, name=name)
        assert isinstance(answer, BankFound | BankRefused)
        return answer

    async def find_record(self, layer: int, expert: int, **fields: Any) -> FromBankService:
        """Ask for a record."""
        asked = {"protocol": BANK_PROTOCOL, "model_digest": MODEL, "order": "row-major"} | fields
        return await self.ask(FindRecord, layer=layer, expert=expert, **asked)

    async def read(self, source: str, size: int, *, chunk: int = CHUNK_BYTES_MAX) -> bytes:
        """All bytes of a source, WINDOW_MAX ranges at a time."""
        data = bytearray(size)
        todo = iter(range(0, size, chunk))
        asked = [self._range(source, at, size, chunk) for at in itertools.islice(todo, WINDOW_MAX)]
        while asked:
            answer = await self.answer(asked.pop(0))
            assert isinstance(answer, Range), answer
            assert answer.source == source
            data[answer.offset : answer.offset + len(answer.data)] = answer.data
            asked += [self._range(source, at, size, chunk) for at in itertools.islice(todo, 1)]
        return bytes(data)

    async def pull(self, name: str, *, chunk: int = CHUNK_BYTES_MAX) -> bytes:
        """A whole bank file."""
        found = await self.find(name)
        assert isinstance(found, BankFound), found
        return await self.read(found.digest, found.file_bytes, chunk=chunk)

    def _range(self, source: str, at: int, size: int, chunk: int) -> int:
        return self.send(ReadRange, source=source, offset=at, length=min(chunk, size - at))


@dataclass
class World:
    """Keys of the Station and some nodes, folders of banks, and the parts of a service."""

    root: Path
    folders: tuple[Path, ...]
    log: TestLog = field(default_factory=TestLog)
    source: ExpertSource | None = None
    rate_bytes_per_s: int = 0
    address: str = ""
    server: BankServer | None = None
    banks: OpenBanks | None = None

    def key(self, name: str) -> keys.KeyPair:
        """The key pair of a node or the Station, made when it is first asked for."""
        path = self.root / "keys" / f"{name}{keys.SECRET_SUFFIX}"
        return keys.load_secret(path) if path.exists() else keys.create(self.root / "keys", name)

    @asynccontextmanager
    async def serving(self, *nodes: str, **settings: Any) -> AsyncIterator[BankServer]:
        """A service that admits `nodes`, ended with the block."""
        source = self.source
        self.banks = OpenBanks(self.folders, self.log.log, **settings)
        records = Records(self.folders, None if source is None else lambda: source, self.log.log)
        with ThreadPoolExecutor(4) as readers, ThreadPoolExecutor(1) as finder:
            async with (
                asyncio.TaskGroup() as tasks,
                listen(
                    "tcp://127.0.0.1:0",
                    keys=self.key("station"),
                    allow_list={self.key(name).public: name for name in nodes},
                    decode=decode_to_service,
                    encode=encode,
                    tasks=tasks,
                    log=self.log.log,
                    settings=LINK,
                ) as link,
            ):
                self.address = link.address
                self.server = BankServer(
                    link,
                    self.banks,
                    records,
                    bucket=TokenBucket(self.rate_bytes_per_s, CHUNK_BYTES_MAX),
                    readers=readers,
                    finder=finder,
                    clock_us=now_us,
                    log=self.log.log,
                )
                running = tasks.create_task(self.server.run())
                try:
                    yield self.server
                finally:
                    running.cancel()
                    await asyncio.wait([running])
                    self.banks.close()

    @asynccontextmanager
    async def node(
        self,
        name: str,
        address: str = "",
        *,
        encoder: Callable[[Any], bytes] = encode,
        queue_len_max: int = 1000,
    ) -> AsyncIterator[Node]:
        """A connected node; its long queue lets it ask more than it should."""
        async with (
            asyncio.TaskGroup() as tasks,
            connect(
                address or self.address,
                keys=self.key(name),
                station_key=self.key("station").public,
                decode=decode_from_service,
                encode=encoder,
                tasks=tasks,
                settings=LinkSettings(
                    frame_bytes_max=ANSWER_BYTES_MAX,
                    queue_len_max=queue_len_max,
                    heartbeat_timeout_us=30_000_000,
                ),
            ) as link,
        ):
            yield Node(link)

    @asynccontextmanager
    async def nodes(self, *names: str) -> AsyncIterator[list[Node]]:
        """Several connected nodes."""
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(self.node(name)) for name in names]


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - a test looks from outside
            await asyncio.sleep(0.01)
