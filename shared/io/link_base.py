"""What both ends of the control link share: bounds, counters, errors, framing, socket options.

Must not know which end it serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar, cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from shared.core.errors import LocalProtocolError, MeshError, RemoteProtocolError
from shared.core.wire import FRAME_BYTES_MAX
from shared.io.keys import KeyPair

In = TypeVar("In")
Out = TypeVar("Out")

_CURVE_BYTES: Final = 1024  # room for CURVE's framing (34 bytes seen) on top of a full frame


class PeerUnreachable(MeshError):
    """A node that is gone or does not read; the message was not taken."""

    code = "peer_unreachable"
    http_status = 503


class StationUnreachable(MeshError):
    """The Station is not there, went away or does not read; worth trying again later."""

    code = "station_unreachable"
    exit_status = 75  # EX_TEMPFAIL of sysexits.h
    http_status = 503


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Bounds and clocks of a link; every one is set on the socket explicitly.

    `linger_us` bounds how long closing a link may take to hand over what was sent last (a goodbye).
    `frame_bytes_max` bounds what is received, and what is sent unless `sent_bytes_max` says more:
    an end that is asked little and answers much needs no memory for large questions.
    """

    frame_bytes_max: int = FRAME_BYTES_MAX
    sent_bytes_max: int | None = None
    queue_len_max: int = 1000
    heartbeat_interval_us: int = 500_000
    heartbeat_timeout_us: int = 2_000_000
    handshake_timeout_us: int = 2_000_000
    retry_pause_us: int = 50_000
    linger_us: int = 100_000


@dataclass(slots=True)
class LinkCounters:
    """What happened on a link since it opened. Mutable: the link counts in place."""

    received: int = 0
    sent: int = 0
    malformed: int = 0
    oversized: int = 0
    unreachable: int = 0
    queue_full: int = 0
    handshakes_failed: int = 0
    departures_dropped: int = 0


@dataclass(frozen=True, slots=True)
class Codec(Generic[In, Out]):
    """How messages become frames and back, and how large a frame may be."""

    decode: Callable[[bytes], In]
    encode: Callable[[Out], bytes]
    settings: LinkSettings

    def read(self, frames: list[zmq.Frame], counters: LinkCounters) -> In:
        """The message in `frames`; RemoteProtocolError (already counted) for one we refuse."""
        if len(frames) != 1:
            counters.malformed += 1
            raise RemoteProtocolError(f"message of {len(frames)} parts instead of one")
        frame = frames[0].bytes
        if len(frame) > self.settings.frame_bytes_max:
            counters.oversized += 1
            raise RemoteProtocolError(
                f"frame of {len(frame)} bytes, at most {self.settings.frame_bytes_max} allowed"
            )
        try:
            message = self.decode(frame)
        except RemoteProtocolError:
            counters.malformed += 1
            raise
        counters.received += 1
        return message

    def write(self, message: Out) -> bytes:
        """The frame of a message; LocalProtocolError when the peer would have to refuse it."""
        frame = self.encode(message)
        size_max = self.settings.sent_bytes_max or self.settings.frame_bytes_max
        if len(frame) > size_max:
            raise LocalProtocolError(
                f"{type(message).__name__} makes a frame of {len(frame)} bytes, at most "
                f"{size_max} allowed"
            )
        return frame


def set_common_options(socket: zmq.asyncio.Socket, keys: KeyPair, settings: LinkSettings) -> None:
    """Bounds, own key and clocks; nothing is left to libzmq's defaults."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode("ascii"))
    socket.setsockopt(zmq.MAXMSGSIZE, settings.frame_bytes_max + _CURVE_BYTES)
    socket.setsockopt(zmq.SNDHWM, settings.queue_len_max)
    socket.setsockopt(zmq.RCVHWM, settings.queue_len_max)
    socket.setsockopt(zmq.HEARTBEAT_IVL, settings.heartbeat_interval_us // 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, settings.heartbeat_timeout_us // 1000)
    socket.setsockopt(zmq.HEARTBEAT_TTL, settings.heartbeat_timeout_us // 1000)
    socket.setsockopt(zmq.HANDSHAKE_IVL, settings.handshake_timeout_us // 1000)


def open_monitor(
    context: zmq.asyncio.Context, socket: zmq.asyncio.Socket, events: int, *, serial: int = 0
) -> zmq.asyncio.Socket:
    """A socket on which the connection events of `socket` arrive.

    `serial` must differ between the sockets of one context: pyzmq's own `get_monitor_socket` names
    the channel after a file descriptor, which may be reused before libzmq has freed the name.
    """
    channel = f"inproc://link-monitor-{serial}"
    socket.monitor(channel, events)
    monitor = context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.connect(channel)
    return monitor


def next_event(monitor: zmq.asyncio.Socket) -> tuple[int, int] | None:
    """(event, value) of the next monitor event, None when there is none now."""
    frames = receive_now(monitor)
    if frames is None:
        return None
    event = parse_monitor_message([frame.bytes for frame in frames])
    return int(event["event"]), int(event["value"])


async def receive(socket: zmq.asyncio.Socket) -> list[zmq.Frame]:
    """The next message. Waits for readiness, then takes it in one step: cancelling loses none."""
    while True:
        await asyncio.sleep(0)  # a peer that sends without pause must not starve the other tasks
        frames = receive_now(socket)
        if frames is not None:
            return frames
        await socket.poll()


def receive_now(socket: zmq.asyncio.Socket) -> list[zmq.Frame] | None:
    """The frames of a message that is here already, None when there is none."""
    # With NOBLOCK the future is finished when it is returned, so nothing is awaited here.
    future = socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
    try:
        return cast("asyncio.Future[list[zmq.Frame]]", future).result()
    except zmq.Again:
        return None


def send_now(socket: zmq.asyncio.Socket, frames: list[bytes]) -> None:
    """Hand a message to libzmq at once; zmq.ZMQError when it does not take it."""
    future = socket.send_multipart(frames, flags=zmq.NOBLOCK)
    cast("asyncio.Future[object]", future).result()
