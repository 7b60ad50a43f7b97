"""The control shell: node messages in, membership decisions, leases and engine commands out.

Runs on the event loop. Decides nothing: Membership says what to do, this file does it - registers
reply rings, sends offers, judges canaries on a worker thread, attaches and fences channels.
Nothing that a node sends may end this shell: it ends at most that node's lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict, assert_never

import numpy as np
import numpy.typing as npt
from structlog.typing import FilteringBoundLogger

from shared.core import lease as leases
from shared.core.errors import MeshError
from shared.core.record import RecordLayout
from shared.core.ring_layout import RingShape
from shared.core.wire import (
    Goodbye,
    Heartbeat,
    HeartbeatSeen,
    Hello,
    HelloRefused,
    LeaseAccepted,
    LeaseGranted,
    LeaseOffer,
    LeaseRevoked,
    Loading,
    NodeCounters,
    RegionDescriptor,
    ToNode,
    ToStation,
)
from shared.io.fabric import AccessRefused, Fabric, FabricError, Region, RemoteRegion
from shared.io.link import Peer, PeerUnreachable, StationLink
from shared.kernels import canary
from shared.kernels.expert import ExpertKernel
from station.channel import NodeChannel
from station.engine import Attach, Detach, Engine
from station.expert_path import NodeReport
from station.local_experts import RecordSource
from station.membership import (
    Acknowledge,
    Action,
    CanaryJudged,
    Event,
    Fence,
    Grant,
    HeartbeatCame,
    HelloCame,
    LayerMissed,
    LayerServed,
    LoadingCame,
    LoadingEnded,
    Membership,
    NodeEnded,
    Offer,
    Refuse,
    TimePassed,
)
from station.places import Places

TICK_S = 0.1


@dataclass(slots=True)
class _Pending:
    """A lease between offer and fence, as the shell needs it."""

    peer: Peer
    epoch: int
    reply_ring: Region
    seed: int
    bank_row: int
    pid: int
    channel: NodeChannel | None = None
    request_ring: RemoteRegion | None = None


class _Signature(TypedDict):
    sender: str
    incarnation: int


@dataclass
class Nodes:
    """All nodes of the pod, as the event loop sees them."""

    link: StationLink[ToStation, ToNode]
    membership: Membership
    places: Places
    engine: Engine
    fabric: Fabric
    ring: RingShape
    kernel: ExpertKernel
    source: RecordSource
    incarnation: int
    now_us: Callable[[], int]
    pause: Callable[[], None]
    log: FilteringBoundLogger

    def __post_init__(self) -> None:
        """No node is known yet."""
        self._pending: dict[str, _Pending] = {}
        self._peers: dict[str, Peer] = {}
        self._loaders: dict[str, Peer] = {}  # over which a node reported its load last
        self._impostors: set[str] = set()
        self._unjudged: dict[str, LeaseAccepted] = {}  # the latest of each node
        self._has_unjudged = asyncio.Event()
        self.counters: dict[str, NodeCounters] = {}
        self.was_complete = False  # every placed node has served at the same time

    async def run(self) -> None:
        """Serve the control plane until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive(), name="control")
            tasks.create_task(self._judge_all(), name="canaries")
            tasks.create_task(self._departures(), name="departures")
            tasks.create_task(self._tick(), name="membership_tick")

    def pid_of(self, node: str) -> int | None:
        """The process that holds a node's lease, if any."""
        pending = self._pending.get(node)
        return pending.pid if pending is not None else None

    def missing(self) -> list[str]:
        """Names of nodes that hold experts and do not serve; the Station's own never miss."""
        leases_of = self.membership.leases
        return [
            placed.name
            for place, placed in enumerate(self.membership.placement.nodes)
            if placed.bank_rows
            and place not in self.places.local
            and (
                (lease := leases_of.get(placed.name)) is None
                or lease.state is not leases.LeaseState.SERVING
            )
        ]

    def report(self, report: NodeReport) -> None:
        """A layer's verdict on a node; called on the event loop."""
        kind = LayerMissed if report.missed else LayerServed
        self._apply(kind(report.node, report.epoch))

    async def _receive(self) -> None:
        while True:
            peer, message = await self.link.receive()
            if message.sender != peer.name:
                self._note_impostor(peer, message.sender)
                continue
            if isinstance(message, Loading):
                # not an entry in _peers: answers go to the process that asked for a lease
                self._loaders[peer.name] = peer
                self._apply(LoadingCame(message, self.now_us()))
                continue
            self._peers[peer.name] = peer
            match message:
                case Hello():
                    self._apply(HelloCame(message, self.now_us()))
                case LeaseAccepted():
                    self._unjudged[peer.name] = message
                    self._has_unjudged.set()
                case Heartbeat(epoch=epoch, counters=counters):
                    self.counters[peer.name] = counters
                    self._apply(HeartbeatCame(peer.name, epoch, self.now_us()))
                case Goodbye(epoch=epoch, reason=reason):
                    self._apply(NodeEnded(peer.name, epoch, f"goodbye: {reason}"))
                case _:
                    assert_never(message)

    def _note_impostor(self, peer: Peer, claimed: str) -> None:
        if peer.name not in self._impostors:  # once per node: the log is not the node's to fill
            self._impostors.add(peer.name)
            self.log.warning("sender_is_not_its_key", node=peer.name, claimed=claimed)

    async def _judge_all(self) -> None:
        """Judge one canary after the other; heartbeats are read meanwhile, however slow the disk.

        Bounded: one entry per node of the allow-list.
        """
        while True:
            await self._has_unjudged.wait()
            self._has_unjudged.clear()
            while self._unjudged:
                await self._judge(self._unjudged.pop(next(iter(self._unjudged))))

    async def _departures(self) -> None:
        while True:
            peer = await self.link.departed()
            if self._loaders.get(peer.name) == peer:
                del self._loaders[peer.name]
                self._apply(LoadingEnded(peer.name))
            pending = self._pending.get(peer.name)
            if pending is not None and pending.peer == peer:
                self._apply(NodeEnded(peer.name, pending.epoch, "its connection closed"))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._apply(TimePassed(self.now_us()))

    def _apply(self, event: Event) -> None:
        for action in self.membership.apply(event):
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case Offer(hello=hello, epoch=epoch):
                self._offer(hello, epoch)
            case Grant(node=node, epoch=epoch):
                self._grant(node, epoch)
            case Acknowledge(node=node, epoch=epoch):
                self._send(self._peers[node], HeartbeatSeen(epoch=epoch, **self._signed()))
            case Refuse(node=node, code=code, text=text, permanent=permanent):
                self.log.warning("node_refused", node=node, code=code, reason=text)
                if node in (placed.name for placed in self.membership.placement.nodes):
                    self.places.stats[self._place(node)].last_loss = text
                refusal = HelloRefused(
                    code=code, text=text[:512], permanent=permanent, **self._signed()
                )
                self._send(self._peers[node], refusal)
            case Fence(node=node, epoch=epoch, reason=reason):
                self._fence(node, epoch, reason)
            case _:
                assert_never(action)

    def _offer(self, hello: Hello, epoch: int) -> None:
        node = hello.sender
        try:
            reply_ring = self.fabric.register(self.ring.reply_ring_bytes)
        except FabricError as error:
            self.log.warning("reply_ring_failed", node=node, error=str(error))
            self._apply(NodeEnded(node, epoch, f"the Station has no reply ring for it: {error}"))
            return
        seed = (self.incarnation + epoch) % 2**32  # other rows at every start
        bank_row = seed % hello.bank.rows
        self._pending[node] = _Pending(
            self._peers[node], epoch, reply_ring, seed, bank_row, hello.pid
        )
        offer = LeaseOffer(
            epoch=epoch,
            ring=self.ring,
            reply_ring=reply_ring.descriptor,
            canary_bank_row=bank_row,
            canary_seed=seed,
            heartbeat_us=leases.HEARTBEAT_US,
            ttl_us=leases.TTL_US,
            **self._signed(),
        )
        self._send(self._peers[node], offer)

    async def _judge(self, accepted: LeaseAccepted) -> None:
        node = accepted.sender
        pending = self._pending.get(node)
        if pending is None or pending.epoch != accepted.epoch or pending.request_ring is not None:
            return
        try:
            pending.request_ring = self._connect(accepted.request_ring)
            expected = await asyncio.to_thread(self._canary_row, node, pending)
        except FabricError as error:
            self._apply(NodeEnded(node, accepted.epoch, f"its request ring: {error}"))
        except MeshError as error:
            reason = f"the Station could not compute its canary: {error}"
            self._apply(NodeEnded(node, accepted.epoch, reason))
        else:
            right = _is_row(accepted.canary_row, expected)
            self._apply(CanaryJudged(node, accepted.epoch, right, self.now_us()))

    def _connect(self, ring: RegionDescriptor) -> RemoteRegion:
        if ring.length != self.ring.request_ring_bytes:
            raise AccessRefused(
                f"{ring} was given for a request ring of {self.ring.request_ring_bytes} bytes"
            )
        return self.fabric.connect(ring)

    def _canary_row(self, node: str, pending: _Pending) -> npt.NDArray[np.uint16]:
        layer, expert = self.membership.placement.node(node).bank_rows[pending.bank_row]
        record = self.source.expert_record(layer, expert)
        layout = RecordLayout(self.membership.placement.shape.expert)
        arena = np.zeros((1, layout.stride_bytes), np.uint8)
        arena[0, : len(record)] = np.frombuffer(record, np.uint8)
        return canary.canary_row(self.kernel, arena, 0, pending.seed)

    def _grant(self, node: str, epoch: int) -> None:
        pending = self._pending[node]
        assert pending.request_ring is not None, "granted before its ring was connected"
        place = self._place(node)
        pending.channel = NodeChannel(
            node=node,
            place=place,
            epoch=epoch,
            shape=self.ring,
            request_ring=pending.request_ring,
            reply_ring=pending.reply_ring,
            kernel_id=self.kernel.kernel_id,
            stats=self.places.stats[place],
            now_us=self.now_us,
            pause=self.pause,
        )
        self.engine.send(Attach(pending.channel))
        self._send(pending.peer, LeaseGranted(epoch=epoch, **self._signed()))
        self.was_complete = self.was_complete or not self.missing()
        self.log.info("node_serving", node=node, epoch=epoch)

    def _fence(self, node: str, epoch: int, reason: str) -> None:
        pending = self._pending.get(node)
        peer = self._peers.get(node)
        if pending is not None and pending.epoch == epoch:
            del self._pending[node]
            peer = pending.peer  # a second process of that name may speak by now
            place = self._place(node)
            self.places.stats[place].last_loss = reason
            if pending.channel is not None:
                # the engine owns the rings now and closes them between two waits
                self.engine.send(Detach(place, epoch))
                self.places.stats[place].losses += 1
            else:
                pending.reply_ring.close()
                if pending.request_ring is not None:
                    pending.request_ring.close()
            self.log.warning("node_lost", node=node, epoch=epoch, reason=reason)
        if peer is not None:
            self._send(peer, LeaseRevoked(epoch=epoch, reason=reason[:512], **self._signed()))

    def _send(self, peer: Peer, message: ToNode) -> None:
        try:
            self.link.send(peer, message)
        except PeerUnreachable as error:
            # the lease ends by itself when the node stays silent
            self.log.debug("peer_unreachable", node=peer.name, error=str(error))

    def _signed(self) -> _Signature:
        return {"sender": "station", "incarnation": self.incarnation}

    def _place(self, node: str) -> int:
        names = [placed.name for placed in self.membership.placement.nodes]
        return names.index(node)


def _is_row(sent: bytes, expected: npt.NDArray[np.uint16]) -> bool:
    """Whether `sent`, which may be any bytes, is the row that the kernel computes."""
    if len(sent) != expected.nbytes:
        return False
    return canary.agrees(np.frombuffer(sent, np.uint16), expected, same_kernel=True)
