"""The stream and its recorder over real sockets: whole recordings, slow listeners, every end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from services.pod.endpoint import PodRefused, PodUnreachable, open_client
from services.routing.file import load
from services.routing.format import LossTotals
from services.routing.recorder import Limits, Recording, RequestNumbers, record
from services.routing.rotation import Rotation
from shared.core.errors import RemoteProtocolError
from shared.core.routing_wire import CONTENT_TYPE, FrameReader, Message, Opened, Pass, Totals, frame
from station.http.routing import RoutingParts
from station.routing_tap import RoutingTap
from tests.unit.http.endpoint import Endpoint, Start
from tests.unit.routing.traces import RECORDING, SHAPE, ids_of

pytestmark = pytest.mark.asyncio
PATIENCE_S = 20.0


@dataclass
class Station:
    """The endpoint with a tap that the test plays the model for."""

    endpoint: Endpoint
    tap: RoutingTap

    def route(self, name: str, ids: np.ndarray, *, position: int = 0) -> None:
        """One forward pass of request `name`."""
        routed = self.tap.open(name, position, len(ids))
        if routed is not None:
            for layer in range(ids.shape[1]):
                routed.add(ids[:, layer].astype(np.int64))
            routed.close()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for the other side."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds():  # noqa: ASYNC110 - sockets set no event
                await asyncio.sleep(0.002)

    def start_record(self, folder: Path, limits: Limits, **options: Any) -> asyncio.Task[Recording]:
        """`record` in a thread of its own, as the verb runs it."""
        return asyncio.ensure_future(
            asyncio.to_thread(recorded, self.endpoint.url, folder, limits, **options)
        )


def recorded(url: str, folder: Path, limits: Limits, *, token: str | None = None) -> Recording:
    """A recording as `k3 trace record` makes it."""
    clock = iter(range(10**6))
    with open_client(url, token, idle_s=3.0) as client:
        return record(
            client,
            Rotation(folder, "r", 2**20, files=3),
            limits,
            recording=RECORDING,
            created_s=1_800_000_000,
            clock_s=lambda: float(next(clock)),
            progress=lambda _tokens, _losses: None,
        )


def files_in(folder: Path) -> list[Path]:
    """What is there."""
    return sorted(folder.iterdir())


@asynccontextmanager
async def station(
    start: Start, *, token: str | None = None, **parts: Any
) -> AsyncIterator[Station]:
    """An endpoint that offers its routing."""
    tap = RoutingTap(SHAPE)

    def routing(stop: asyncio.Event) -> RoutingParts:
        return RoutingParts(
            tap, "m" * 8, SHAPE, stop, structlog.wrap_logger(None, processors=[_drop]), **parts
        )

    async with start(token=token, routing=routing) as endpoint:
        yield Station(endpoint, tap)


def _drop(*_: object) -> dict[str, object]:
    raise structlog.DropEvent


async def test_what_was_routed_is_in_the_files(start: Start, tmp_path: Path) -> None:
    """Two requests in turns, prefill and decode; numbers, positions and order are right."""
    first, second = ids_of(7, seed=1), ids_of(5, seed=2)
    async with station(start) as pod:
        task = pod.start_record(tmp_path, Limits(tokens=12))
        await pod.until(lambda: pod.tap.listeners == 1)
        pod.route("b", first[:4])
        pod.route("a", second[:4])
        for at in (4, 5, 6):
            pod.route("b", first[at : at + 1], position=at)
        pod.route("a", second[4:], position=4)
        done = await task
        await pod.until(lambda: pod.tap.listeners == 0)

    trace = load([Path(file) for file in done.files]).trace
    assert trace.request.tolist() == [0] * 7 + [1] * 5
    assert trace.step.tolist() == [*range(7), *range(5)]
    assert np.array_equal(trace.ids, np.concatenate([first, second]))
    assert (trace.model_digest, trace.first_layer, trace.experts) == ("m" * 8, 1, 24)
    assert (done.ended, done.tokens, done.requests) == ("tokens", 12, 2)
    assert (done.tokens_dropped, done.tokens_incomplete) == (0, 0)


async def test_a_limit_cuts_within_a_pass(start: Start, tmp_path: Path) -> None:
    """Not one token more than asked for."""
    async with station(start) as pod:
        task = pod.start_record(tmp_path, Limits(tokens=3))
        await pod.until(lambda: pod.tap.listeners == 1)
        pod.route("a", ids_of(9))
        done = await task

    assert done.tokens == 3
    assert np.array_equal(load([Path(done.files[0])]).trace.ids, ids_of(9)[:3])


async def test_a_listener_that_is_too_slow_is_told_what_it_missed(
    start: Start, tmp_path: Path
) -> None:
    """The queue holds ten tokens, a hundred come at once: the files say what is not in them."""
    async with station(start, queue_tokens=10) as pod:
        task = pod.start_record(tmp_path, Limits(tokens=11))
        await pod.until(lambda: pod.tap.listeners == 1)
        for number in range(20):
            pod.route(f"r{number}", ids_of(5, seed=number))  # no await: nobody reads meanwhile
        await asyncio.sleep(0)
        await pod.until(lambda: bool(list(tmp_path.glob("*.k3trace"))))
        pod.route("last", ids_of(5, seed=99))
        done = await task

    loaded = load([Path(file) for file in done.files])
    assert done.tokens_dropped == loaded.losses.dropped == 90
    assert loaded.losses == LossTotals(90, 0)
    assert np.array_equal(loaded.trace.ids[:10], np.concatenate([ids_of(5), ids_of(5, seed=1)]))
    assert np.array_equal(loaded.trace.ids[10:], ids_of(5, seed=99)[:1])


async def test_a_client_that_does_not_read_is_cut_off(start: Start) -> None:
    """Its socket fills, its queue fills, then it is gone; the model never waited."""
    async with station(start, send_s=0.3, queue_tokens=4096) as pod:
        host, port = pod.endpoint.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(b"GET /k3/routing HTTP/1.1\r\nHost: x\r\n\r\n")
            await pod.until(lambda: pod.tap.listeners == 1)
            ids = ids_of(64)
            async with asyncio.timeout(PATIENCE_S):
                while pod.tap.listeners:
                    pod.route("r", ids)
                    await asyncio.sleep(0)


async def test_a_listener_that_leaves_frees_its_place(start: Start, tmp_path: Path) -> None:
    """Two may listen; a third is refused with a remedy until one has left."""
    async with station(start, totals_s=0.05) as pod:
        client = pod.endpoint.client
        async with client.stream("GET", "/k3/routing"), client.stream("GET", "/k3/routing"):
            await pod.until(lambda: pod.tap.listeners == 2)
            with pytest.raises(PodRefused, match="2 recorders listen already"):
                await asyncio.to_thread(recorded, pod.endpoint.url, tmp_path, Limits(tokens=1))
        await pod.until(lambda: pod.tap.listeners == 0)


async def test_the_stream_needs_the_token(start: Start, tmp_path: Path) -> None:
    """As every endpoint but the probes."""
    async with station(start, token="secret") as pod:
        with pytest.raises(PodRefused, match="401"):
            await asyncio.to_thread(recorded, pod.endpoint.url, tmp_path, Limits(tokens=1))
        assert pod.tap.listeners == 0
        assert (await pod.endpoint.client.post("/k3/routing")).status_code == 401
        done = await asyncio.to_thread(
            recorded, pod.endpoint.url, tmp_path, Limits(seconds=0.5), token="secret"
        )

    assert done.ended == "seconds"
    assert done.files == ()


async def test_a_stopping_station_ends_the_recording_cleanly(start: Start, tmp_path: Path) -> None:
    """What came is in the files, and the end has its name; the stream holds up no shutdown."""
    async with station(start, totals_s=0.05) as pod:
        task = pod.start_record(tmp_path, Limits())
        await pod.until(lambda: pod.tap.listeners == 1)
        pod.route("a", ids_of(3))
        pod.endpoint.stop.set()
        done = await task

    assert (done.ended, done.tokens) == ("station stopped", 3)
    assert np.array_equal(load([Path(done.files[0])]).trace.ids, ids_of(3))


async def test_a_station_that_does_not_record_says_so(start: Start, tmp_path: Path) -> None:
    """An endpoint without the route: the pod's own 404."""
    async with start() as endpoint:
        with pytest.raises(PodRefused, match="404"):
            await asyncio.to_thread(recorded, endpoint.url, tmp_path, Limits(tokens=1))


@asynccontextmanager
async def answering(*pieces: bytes, content_type: str = CONTENT_TYPE) -> AsyncIterator[str]:
    """A server that sends these pieces and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\n\r\n".encode())
        for piece in pieces:
            writer.write(piece)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


OPENED = frame(Opened(1, "m", SHAPE))
GOOD = frame(Pass("r", 0, 2, ids_of(2).tobytes()))


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([b"<html>hello, this is a web page</html>"], "no routing stream"),
        ([GOOD], "does not begin with its head"),
        ([OPENED, OPENED], "two heads"),
        ([OPENED, frame(Pass("r", 0, 2, b"\0" * 7))], "7 bytes of ids"),
        ([OPENED, frame(Pass("r", 0, 2, b"\xff" * 48))], "are no choice"),
        ([OPENED, b"\5\0\0\0hello"], "not understood"),
        ([], "does not begin"),
    ],
)
async def test_a_stream_that_is_none_is_one_error(
    tmp_path: Path, pieces: list[bytes], words: str
) -> None:
    """Whatever answers there; nothing of it gets into a file."""
    async with answering(*pieces) as url:
        with pytest.raises(RemoteProtocolError, match=words):
            await asyncio.to_thread(recorded, url, tmp_path, Limits(tokens=5))

    assert files_in(tmp_path) == []


async def test_a_broken_connection_keeps_what_came(tmp_path: Path) -> None:
    """The Station was killed: an error, and a file with the tokens before it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: 9999\r\n\r\n"
        writer.write(head.encode() + OPENED + GOOD)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(PodUnreachable, match="broke"):
            await asyncio.to_thread(recorded, url, tmp_path, Limits(tokens=5))

    assert np.array_equal(load(files_in(tmp_path)).trace.ids, ids_of(2))


async def test_a_page_that_is_no_stream_is_refused(tmp_path: Path) -> None:
    """By its content type, before a byte of it is read as frames."""
    async with answering(b"hello", content_type="text/html") as url:
        with pytest.raises(PodRefused, match="is it a pod"):
            await asyncio.to_thread(recorded, url, tmp_path, Limits(tokens=5))


async def test_frames_may_be_cut_anywhere() -> None:
    """Byte by byte gives the same messages."""
    sent: list[Message] = [Opened(1, "m", SHAPE), Pass("r", 4, 1, b"12"), Totals(1, 2, 3)]
    reader, got = FrameReader(), []
    for byte in b"".join(map(frame, sent)):
        got += reader.feed(bytes([byte]))

    assert got == sent


async def test_request_names_are_forgotten_in_time() -> None:
    """A bounded memory; names in use keep their numbers."""
    numbers = RequestNumbers(remembered_max=3)

    assert [numbers.of(name) for name in "abcaabd"] == [0, 1, 2, 0, 0, 1, 3]
    assert numbers.of("c") == 4, "the least lately heard of was forgotten"
    assert numbers.of("b") == 1
