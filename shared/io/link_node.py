"""A node's end of the control link: one DEALER, good for one connection.

Owns the socket and the handshake with the Station. Must not know what messages mean.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Final, Generic, cast

import zmq
import zmq.asyncio

from shared.core.errors import ConfigError, KeyRefused, RemoteProtocolError
from shared.io.address import parse_address
from shared.io.keys import KeyPair
from shared.io.link_base import (
    Codec,
    In,
    LinkCounters,
    LinkSettings,
    Out,
    StationUnreachable,
    next_event,
    open_monitor,
    receive_now,
    send_now,
    set_common_options,
)

_NEVER_MS: Final = 2**31 - 1
_CLOSED_HANDSHAKES_MAX: Final = 3  # in a row: then it is the key, not a Station that just stops


class Outcome(Enum):
    """How one attempt to connect ended; the value completes "the Station at ADDRESS ..."."""

    PENDING = "did not answer"
    ADMITTED = "admitted this node"
    KEY_REFUSED = "refused this node's key"
    CLOSED = "closed the handshake"
    SILENT = "accepted the connection but did not finish the handshake"
    FOREIGN = "closed the connection without a handshake: it may not be a Station"
    ABSENT = "is not listening or not reachable"


def outcome_of(event: int, value: int) -> Outcome | None:
    """What a socket monitor event of a connecting DEALER means; None for "still under way"."""
    match event:
        case zmq.Event.HANDSHAKE_SUCCEEDED:
            return Outcome.ADMITTED
        case zmq.Event.HANDSHAKE_FAILED_AUTH:
            return Outcome.KEY_REFUSED
        case zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
            return Outcome.SILENT if value == errno.EAGAIN else Outcome.CLOSED
        case zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
            return Outcome.CLOSED
        case zmq.Event.DISCONNECTED:
            return Outcome.FOREIGN
        case zmq.Event.CLOSED:
            return Outcome.ABSENT
        case _:
            return None


class NodeLink(Generic[In, Out]):
    """A node's end; made by `connect`, good for one connection. `In` comes from the Station."""

    def __init__(
        self,
        address: str,
        socket: zmq.asyncio.Socket,
        monitor: zmq.asyncio.Socket,
        codec: Codec[In, Out],
    ) -> None:
        """Use `connect`; it also closes what it opened."""
        self.address: Final = address
        self.counters: Final = LinkCounters()
        self.disconnected: Final = asyncio.Event()
        self._socket = socket
        self._monitor = monitor
        self._codec = codec
        self._waiting: asyncio.Future[object] | None = None

    async def receive(self) -> In:
        """The next good message; StationUnreachable once the connection is over and all is read.

        Frames we refuse are counted and skipped. Cancelling loses no message.
        """
        while True:
            frames = await self._next_frames()
            try:
                return self._codec.read(frames, self.counters)
            except RemoteProtocolError:
                continue  # counted by the codec

    def send(self, message: Out) -> None:
        """Queue a message, or raise StationUnreachable (gone, or its queue is full)."""
        frame = self._codec.write(message)
        if self.disconnected.is_set():
            self.counters.unreachable += 1
            raise self._lost()
        try:
            send_now(self._socket, [frame])
        except zmq.Again:
            self.counters.queue_full += 1
            raise StationUnreachable(
                f"Station at {self.address} does not read: "
                f"{self._codec.settings.queue_len_max} messages are waiting"
            ) from None
        self.counters.sent += 1

    async def watch(self) -> None:
        """Wait for the end of the connection; `connect` runs it."""
        while not self.disconnected.is_set():
            await self._monitor.poll()
            while (event := next_event(self._monitor)) is not None:
                if event[0] == zmq.Event.DISCONNECTED:
                    self.disconnected.set()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(0)

    async def _next_frames(self) -> list[zmq.Frame]:
        while True:
            await asyncio.sleep(0)
            frames = receive_now(self._socket)
            if frames is not None:
                return frames
            if self.disconnected.is_set():
                raise self._lost()
            self._waiting = cast("asyncio.Future[object]", self._socket.poll())
            await self._waiting

    def _lost(self) -> StationUnreachable:
        return StationUnreachable(f"Station at {self.address}: the connection is over; join again")


@asynccontextmanager
async def connect(
    address: str,
    *,
    keys: KeyPair,
    station_key: str,
    decode: Callable[[bytes], In],
    encode: Callable[[Out], bytes],
    tasks: asyncio.TaskGroup,
    timeout_us: int = 5_000_000,
    settings: LinkSettings | None = None,
) -> AsyncIterator[NodeLink[In, Out]]:
    """Open a node's end and finish the handshake with the Station that holds `station_key`.

    Tries again every `retry_pause_us` within `timeout_us`. Raises KeyRefused when the Station
    refuses this node's key or does not hold `station_key`, ConfigError for a host that cannot be
    one, StationUnreachable when time is over.
    """
    parse_address(address)
    codec = Codec(decode, encode, settings or LinkSettings())
    context = zmq.asyncio.Context()
    try:
        caller = _Caller(context, address, keys, station_key, codec.settings)
        socket, monitor = await caller.admitted(timeout_us)
        link = NodeLink(address, socket, monitor, codec)
        watch = tasks.create_task(link.watch(), name="node_link_watch")
        try:
            yield link
        finally:
            watch.cancel()
    finally:
        context.destroy(linger=codec.settings.linger_us // 1000)


@dataclass(frozen=True, slots=True)
class _Caller:
    """A node at the Station's door."""

    context: zmq.asyncio.Context
    address: str
    keys: KeyPair
    station_key: str
    settings: LinkSettings

    async def admitted(self, timeout_us: int) -> tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]:
        """Knock until let in: the connected socket and its monitor. Errors as in `connect`."""
        outcome, serial, closed_in_a_row = Outcome.PENDING, 0, 0
        try:
            async with asyncio.timeout(timeout_us / 1e6):
                while True:
                    socket, monitor = self._knock(serial)
                    outcome = await _outcome(monitor)
                    if outcome is Outcome.ADMITTED:
                        return socket, monitor
                    monitor.close(linger=0)
                    socket.close(linger=0)
                    closed_in_a_row = closed_in_a_row + 1 if outcome is Outcome.CLOSED else 0
                    self._raise_if_final(outcome, closed_in_a_row)
                    await asyncio.sleep(self.settings.retry_pause_us / 1e6)
                    serial += 1
        except TimeoutError:
            raise StationUnreachable(
                f"Station at {self.address} {outcome.value} (tried for {timeout_us} us): "
                "check that it runs and that the address is right"
            ) from None

    def _knock(self, serial: int) -> tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]:
        socket = self.context.socket(zmq.DEALER)
        set_common_options(socket, self.keys, self.settings)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.station_key.encode("ascii"))
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.keys.public.encode("ascii"))
        # Never reconnect. IMMEDIATE, or -1 here, would throw away what has arrived unread when the
        # connection ends; nothing is sent before the handshake, so IMMEDIATE would add nothing.
        socket.setsockopt(zmq.IMMEDIATE, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, self.settings.handshake_timeout_us // 1000)
        monitor = open_monitor(self.context, socket, zmq.EVENT_ALL, serial=serial)
        socket.setsockopt(zmq.IPV6, int(parse_address(self.address).is_ipv6))
        try:
            socket.connect(self.address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot connect to {self.address}: {error.strerror}: write tcp://HOST:PORT with "
                "the host's name or IP"
            ) from None
        return socket, monitor

    def _raise_if_final(self, outcome: Outcome, closed_in_a_row: int) -> None:
        if outcome is Outcome.KEY_REFUSED:
            raise KeyRefused(
                f"Station at {self.address} refused key {self.keys.public} of node "
                f"{self.keys.name}: add {self.keys.name}.key to the Station's allow-list and "
                "restart the Station"
            )
        if closed_in_a_row >= _CLOSED_HANDSHAKES_MAX:
            raise KeyRefused(
                f"Station at {self.address} {outcome.value}: it does not hold the key "
                f"{self.station_key} that node {self.keys.name} expects: copy the Station's "
                "public .key file to this node again"
            )


async def _outcome(monitor: zmq.asyncio.Socket) -> Outcome:
    """Read events until one decides. Bounded by the socket's handshake and connect timeouts."""
    while True:
        await monitor.poll()
        while (event := next_event(monitor)) is not None:
            outcome = outcome_of(*event)
            if outcome is not None:
                return outcome
