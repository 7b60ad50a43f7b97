"""The Station's end of the control link: one listening ROUTER for all nodes.

Owns the socket, who is admitted (through `zap`) and which connection belongs to which node. Must
not know what messages mean.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Generic

import zmq
import zmq.asyncio
from structlog.typing import FilteringBoundLogger

from shared.core.errors import AddressInUse, ConfigError, RemoteProtocolError
from shared.io import zap
from shared.io.address import check_listen_address
from shared.io.keys import KeyPair
from shared.io.link_base import (
    Codec,
    In,
    LinkCounters,
    LinkSettings,
    Out,
    PeerUnreachable,
    next_event,
    open_monitor,
    receive,
    send_now,
    set_common_options,
)

_DOMAIN: Final = "k3"
_HANDSHAKE_FAILURES: Final = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
)


@dataclass(frozen=True, slots=True)
class Peer:
    """One connection of an admitted node.

    `name` belongs to the key that the peer proved to hold; compare it with a message's `sender`.
    """

    name: str
    routing_id: bytes

    def __str__(self) -> str:
        """For logs."""
        return f"{self.name}@{self.routing_id.hex()}"


class StationLink(Generic[In, Out]):
    """The Station's end; made by `listen`. `In` comes from nodes, `Out` goes to them."""

    def __init__(
        self,
        socket: zmq.asyncio.Socket,
        monitor: zmq.asyncio.Socket,
        doorkeeper: zap.Doorkeeper,
        codec: Codec[In, Out],
        log: FilteringBoundLogger,
    ) -> None:
        """Use `listen`; it also closes what it opened."""
        self.address: Final[str] = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.counters: Final = LinkCounters()
        self._socket = socket
        self._monitor = monitor
        self._doorkeeper = doorkeeper
        self._codec = codec
        self._log = log
        self._peers: dict[int, Peer] = {}  # by file descriptor of the connection
        self._departures: asyncio.Queue[Peer] = asyncio.Queue(codec.settings.queue_len_max)
        self._offenders: set[str] = set()  # bounded by the allow-list

    @property
    def keys_refused(self) -> int:
        """Connections turned away since the link opened."""
        return self._doorkeeper.refusals

    async def receive(self) -> tuple[Peer, In]:
        """The next good message and who sent it. Frames we refuse are counted and skipped.

        Waits for as long as nothing comes; cancelling loses no message.
        """
        while True:
            frames = await receive(self._socket)
            peer = Peer(str(frames[-1].get("User-Id")), frames[0].bytes)
            self._note_descriptor(frames[-1], peer)
            try:
                message = self._codec.read(frames[1:], self.counters)
            except RemoteProtocolError as error:
                self._note_offence(peer, error)
                continue
            return peer, message

    def send(self, peer: Peer, message: Out) -> None:
        """Queue a message for a peer, or raise PeerUnreachable (gone, or its queue is full)."""
        frame = self._codec.write(message)
        try:
            send_now(self._socket, [peer.routing_id, frame])
        except zmq.Again:
            self.counters.queue_full += 1
            raise PeerUnreachable(
                f"node {peer.name} does not read its messages: "
                f"{self._codec.settings.queue_len_max} are waiting"
            ) from None
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self.counters.unreachable += 1
            raise PeerUnreachable(f"node {peer.name} has left (connection {peer})") from None
        self.counters.sent += 1

    async def departed(self) -> Peer:
        """The next peer whose connection ended; each is told at most once, waits if none."""
        return await self._departures.get()

    async def watch(self) -> None:
        """Read connection events until cancelled; `listen` runs it."""
        while True:
            await self._monitor.poll()
            self._drain_events()

    def _note_descriptor(self, frame: zmq.Frame, peer: Peer) -> None:
        descriptor = frame.get(zmq.SRCFD)
        if not isinstance(descriptor, int) or self._peers.get(descriptor) == peer:
            return
        # Descriptors are reused: the end of the old connection is in the event queue by now and
        # must be read before the new one takes its place.
        self._drain_events()
        self._peers[descriptor] = peer

    def _drain_events(self) -> None:
        while (event := next_event(self._monitor)) is not None:
            kind, value = event
            if kind & _HANDSHAKE_FAILURES:
                self.counters.handshakes_failed += 1
            elif kind == zmq.Event.DISCONNECTED and value in self._peers:
                self._note_departure(self._peers.pop(value))

    def _note_departure(self, peer: Peer) -> None:
        if self._departures.full():  # nobody asks: keep the newest
            self._departures.get_nowait()
            self.counters.departures_dropped += 1
        self._departures.put_nowait(peer)

    def _note_offence(self, peer: Peer, error: RemoteProtocolError) -> None:
        if peer.name not in self._offenders:  # once per node, then only counted
            self._offenders.add(peer.name)
            self._log.warning("frame_refused", node=peer.name, error=str(error))


@asynccontextmanager
async def listen(
    address: str,
    *,
    keys: KeyPair,
    allow_list: Mapping[str, str],
    decode: Callable[[bytes], In],
    encode: Callable[[Out], bytes],
    tasks: asyncio.TaskGroup,
    log: FilteringBoundLogger,
    allow_remote: bool = False,
    settings: LinkSettings | None = None,
) -> AsyncIterator[StationLink[In, Out]]:
    """Open the Station's end on `tcp://IP:PORT` (port 0: `link.address` tells which).

    Nodes whose public key is in `allow_list` (public key -> name) get in. The admission task runs
    in `tasks`: if it dies, so does the group. Raises ConfigError for an address that is malformed,
    not this host's, or remote without `allow_remote`; AddressInUse when another process holds it.
    """
    parsed = check_listen_address(address, allow_remote=allow_remote)
    codec = Codec(decode, encode, settings or LinkSettings())
    context = zmq.asyncio.Context()
    try:
        doorkeeper = zap.Doorkeeper(allow_list, log)
        door = context.socket(zmq.REP)
        door.bind(zap.ZAP_ENDPOINT)  # before the ROUTER: there is no moment without a doorkeeper
        socket = context.socket(zmq.ROUTER)
        set_common_options(socket, keys, codec.settings)
        _set_station_options(socket, codec.settings)
        socket.setsockopt(zmq.IPV6, int(parsed.is_ipv6))
        monitor = open_monitor(context, socket, zmq.Event.DISCONNECTED | _HANDSHAKE_FAILURES)
        _bind(socket, address)
        link = StationLink(socket, monitor, doorkeeper, codec, log)
        children = (
            tasks.create_task(zap.serve(door, doorkeeper), name="link_admission"),
            tasks.create_task(link.watch(), name="station_link_watch"),
        )
        try:
            yield link
        finally:
            for child in children:
                child.cancel()
    finally:
        context.destroy(linger=codec.settings.linger_us // 1000)


def _set_station_options(socket: zmq.asyncio.Socket, settings: LinkSettings) -> None:
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a doorkeeper nobody gets in
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
    # Longer than the nodes' own: while this Station is busy a node shall time out and try again,
    # not see a closed handshake, which means a wrong key.
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5 * settings.handshake_timeout_us // 1000)


def _bind(socket: zmq.asyncio.Socket, address: str) -> None:
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"{address} is already in use: stop the process that holds it (`ss -ltnp` shows "
                "it) or choose another port"
            ) from None
        raise ConfigError(
            f"cannot listen on {address}: {error.strerror}: give an address of this host and a "
            "port this user may open"
        ) from None
