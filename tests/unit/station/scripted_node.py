"""A Station's control plane with a real link, fabric and engine, and nodes that a test plays."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import structlog
from structlog.testing import CapturingLogger

from shared.core import wire
from shared.core.placement import Placement, balanced
from shared.core.record import RecordLayout
from shared.io import keys
from shared.io.fabric import Region
from shared.io.fabric_shm import ShmFabric
from shared.io.link import LinkSettings, NodeLink, StationUnreachable, connect, listen
from shared.kernels import canary
from station.engine import Engine, Stop
from station.membership import Membership
from station.nodes import Nodes
from station.places import Places
from tests.support.fake_station import MODEL, RING, TinyExperts, kernel

PATIENCE_S = 10.0
CALM = LinkSettings(heartbeat_timeout_us=30_000_000)  # a loaded machine must not look like death
M = TypeVar("M")


def now_us() -> int:
    """The clock that `Station` passes in."""
    return time.monotonic_ns() // 1000


def placement() -> Placement:
    """The Station's own tier and two nodes; spark0 has copies of the Station's experts too."""
    nodes = [("hbm", "hbm", 1.0), ("spark0", "spark", 1.0), ("spark1", "spark", 1.0)]
    placed = balanced(TinyExperts.digest, MODEL, nodes)
    hbm, spark0, spark1 = placed.nodes
    copied = msgspec.structs.replace(spark0, copies=hbm.rows)
    return msgspec.structs.replace(placed, nodes=(hbm, copied, spark1))


@dataclass
class ScriptedNode:
    """Says what the test tells it to say."""

    name: str
    link: NodeLink[wire.ToNode, wire.ToStation]
    fabric: ShmFabric = field(default_factory=lambda: ShmFabric(spin_us=0))
    rings: list[Region] = field(default_factory=list)

    def signed(self) -> dict[str, Any]:
        """Who speaks."""
        return {"sender": self.name, "incarnation": 1}

    def hello(self, **changes: Any) -> None:
        """Ask for a lease."""
        self.link.send(self.hello_message(**changes))

    def hello_message(self, **changes: Any) -> wire.Hello:
        """The right Hello, with changes."""
        placed = placement().node(self.name)
        fields: dict[str, Any] = {
            **self.signed(),
            "protocol": wire.PROTOCOL_VERSION,
            "tier": placed.tier,
            "pid": os.getpid(),
            "bank": wire.BankFacts(
                name=self.name,
                model_digest=TinyExperts.digest,
                placement_digest=placement().digest,
                shape=MODEL.expert,
                rows=len(placed.bank_rows),
            ),
            "kernel_id": kernel().kernel_id,
            "kernel_name": "int16",
        }
        return wire.Hello(**(fields | changes))

    async def expect(self, kind: type[M]) -> M:
        """The next message of a kind; others before it are dropped."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = await self.link.receive()
                if isinstance(message, kind):
                    return message

    def accept(self, offer: wire.LeaseOffer, **changes: Any) -> None:
        """Accept an offer with the right ring and row, with changes."""
        ring = self.fabric.register(offer.ring.request_ring_bytes)
        self.rings.append(ring)
        fields: dict[str, Any] = {
            **self.signed(),
            "epoch": offer.epoch,
            "request_ring": ring.descriptor,
            "canary_row": self.canary_row(offer),
        }
        self.link.send(wire.LeaseAccepted(**(fields | changes)))

    def canary_row(self, offer: wire.LeaseOffer) -> bytes:
        """The right answer to an offer's canary."""
        layer, expert = placement().node(self.name).bank_rows[offer.canary_bank_row]
        record = TinyExperts().expert_record(layer, expert)
        arena = np.zeros((1, RecordLayout(MODEL.expert).stride_bytes), np.uint8)
        arena[0, : len(record)] = np.frombuffer(record, np.uint8)
        return canary.canary_row(kernel(), arena, 0, offer.canary_seed).tobytes()

    def beat(self, epoch: int) -> None:
        """A heartbeat under an epoch."""
        counters = wire.NodeCounters(dispatches=3, rows=4, refused_rows=0, corrupt_dispatches=0)
        self.link.send(wire.Heartbeat(**self.signed(), epoch=epoch, busy=False, counters=counters))

    def load(self, done_bytes: int, total_bytes: int) -> None:
        """Say how far its bank is."""
        self.link.send(
            wire.Loading(
                **self.signed(), phase="loading", done_bytes=done_bytes, total_bytes=total_bytes
            )
        )

    async def join(self) -> int:
        """Hello to grant; the epoch."""
        self.hello()
        self.accept(await self.expect(wire.LeaseOffer))
        return (await self.expect(wire.LeaseGranted)).epoch

    def close(self) -> None:
        """Give all rings back."""
        self.fabric.close()


@dataclass
class Station:
    """The parts under test, and a door for nodes."""

    nodes: Nodes
    engine: Engine
    fabric: ShmFabric
    home: Path
    tasks: asyncio.TaskGroup
    stack: AsyncExitStack
    bugs: list[BaseException]

    async def node(self, name: str = "spark0") -> ScriptedNode:
        """A node that is connected and has said nothing yet."""
        return await self.stack.enter_async_context(self.passing_node(name))

    @asynccontextmanager
    async def passing_node(self, name: str = "spark0") -> AsyncIterator[ScriptedNode]:
        """The same for a while: leaving the block closes its connection."""
        link: NodeLink[wire.ToNode, wire.ToStation]
        async with connect(
            self.nodes.link.address,
            keys=keys.load_secret(self.home / "nodes" / f"{name}.key_secret"),
            station_key=keys.load_secret(self.home / "station" / "station.key_secret").public,
            decode=wire.decode_to_node,
            encode=wire.encode,
            tasks=self.tasks,
            settings=CALM,
        ) as link:
            node = ScriptedNode(name, link)
            try:
                yield node
            finally:
                node.close()

    def state(self, name: str = "spark0") -> str:
        """State of a node's lease."""
        return self.nodes.membership.leases[name].state.value

    async def until(self, what: str, holds: Callable[[], bool]) -> None:
        """Wait for a condition, or fail by its name."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not holds():  # noqa: ASYNC110 - the engine's thread sets no event
                    await asyncio.sleep(0.002)
        except TimeoutError:
            raise AssertionError(f"never happened: {what}") from None


@asynccontextmanager
async def station(home: Path, *, source: Any = None) -> AsyncIterator[Station]:
    """A running control plane; leaving the block checks that no error ended any part of it."""
    for folder, name in (("station", "station"), ("nodes", "spark0"), ("nodes", "spark1")):
        keys.create(home / folder, name)
    fabric = ShmFabric(spin_us=0)
    bugs: list[BaseException] = []
    places = Places(placement(), {0: None})  # no layer runs here
    engine = Engine(
        fabric=fabric,
        places=places,
        now_us=now_us,
        on_bug=lambda _, error: bugs.append(error),
        torch_threads=1,
    )
    log = structlog.wrap_logger(CapturingLogger(), wrapper_class=structlog.BoundLogger)
    async with (
        asyncio.TaskGroup() as tasks,
        listen(
            "tcp://127.0.0.1:0",
            keys=keys.load_secret(home / "station" / "station.key_secret"),
            allow_list=keys.load_allow_list(home / "nodes"),
            decode=wire.decode_to_station,
            encode=wire.encode,
            tasks=tasks,
            log=log,
            settings=CALM,
        ) as link,
        AsyncExitStack() as stack,
    ):
        nodes = Nodes(
            link=link,
            membership=Membership(
                placement=placement(), kernel_id=kernel().kernel_id, last_epoch=100
            ),
            places=places,
            engine=engine,
            fabric=fabric,
            ring=RING,
            kernel=kernel(),
            source=source or TinyExperts(),
            incarnation=9,
            now_us=now_us,
            pause=lambda: None,
            log=log,
        )
        engine.start()
        running = tasks.create_task(nodes.run())
        try:
            yield Station(nodes, engine, fabric, home, tasks, stack, bugs)
            assert not running.done(), "the control plane ended"
        finally:
            running.cancel()
            engine.send(Stop())
            ended = await asyncio.to_thread(engine.join, PATIENCE_S)
            fabric.close()
        assert ended
        assert not bugs


__all__ = ["MODEL", "RING", "ScriptedNode", "Station", "StationUnreachable", "placement", "station"]
