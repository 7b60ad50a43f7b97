"""Connections: clients that leave, clients that do not read, ports in use, shutdown."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shared.core.errors import AddressInUse, ConfigError
from station.http.limits import EndpointLimits
from station.http.server import listen, serve
from tests.unit.http.endpoint import ANSWER, STOP, Endpoint, Start

pytestmark = pytest.mark.asyncio

BODY = {"model": "k3-demo", "messages": [{"role": "user", "content": "Hi"}]}
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(
    endpoint: Endpoint, *, stream: bool = True, body_cut: int = 0, slow: bool = False
) -> AsyncIterator[Connection]:
    """Send a chat request, less `body_cut` bytes, over a plain socket; close it at the end."""
    host, port = endpoint.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)))
    if slow:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=sock, limit=1024 if slow else 65536)
    body = json.dumps({**BODY, "stream": stream}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body[: len(body) - body_cut])
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def has_metric(endpoint: Endpoint, line: str) -> bool:
    """Whether /metrics has the line."""
    return f"{line}\n" in (await endpoint.client.get("/metrics")).text


async def until_metric(endpoint: Endpoint, line: str) -> None:
    """Wait until /metrics has the line."""
    async with asyncio.timeout(5):
        while not await has_metric(endpoint, line):
            pass


async def closed_within(endpoint: Endpoint, seconds: float) -> None:
    """The backend's generator is closed in time."""
    async with asyncio.timeout(seconds):
        await endpoint.backend.closed.wait()


async def test_a1_client_that_leaves_a_stream_is_noticed(start: Start) -> None:
    """A1: at most two more tokens, the generator closed within 200 ms, the reason counted."""
    async with start(ANSWER, 50) as endpoint:
        async with connected(endpoint) as (reader, writer):
            for _ in range(5):
                await reader.readuntil(b'"content":"x"')
            produced = endpoint.backend.produced
            writer.close()
            await closed_within(endpoint, 0.2)

        assert endpoint.backend.produced <= produced + 2
        assert endpoint.backend.active == 0
        await until_metric(endpoint, 'k3_http_cancelled_total{reason="disconnect"} 1')
        assert await has_metric(endpoint, "k3_http_active_requests 0")
    assert endpoint.log.entries[-1]["outcome"] == "disconnect"


@pytest.mark.parametrize("stream", [True, False])
async def test_a1_client_that_leaves_while_waiting(start: Start, stream: bool) -> None:
    """A1: also before the first token, and without a stream."""
    async with start(asyncio.Event()) as endpoint:
        async with connected(endpoint, stream=stream) as (_, writer):
            await endpoint.backend.until_active(1)
            writer.close()
            await closed_within(endpoint, 0.2)

        await until_metric(endpoint, 'k3_http_cancelled_total{reason="disconnect"} 1')


async def test_client_that_leaves_in_its_body(start: Start) -> None:
    """A connection that ends inside the request's body leaves nothing behind."""
    async with start(STOP) as endpoint:
        async with connected(endpoint, body_cut=1):
            await until_metric(endpoint, "k3_http_active_requests 1")
        await until_metric(endpoint, "k3_http_active_requests 0")

        assert await has_metric(endpoint, 'k3_http_cancelled_total{reason="disconnect"} 1')
        assert endpoint.backend.requests == []


async def test_client_that_does_not_read_is_cut_off(start: Start) -> None:
    """A reader slower than the limit ends its own request, not the server's memory."""
    text = "x" * 60_000
    async with (
        start(ANSWER, text, STOP, limits=EndpointLimits(send_s=0.2)) as endpoint,
        connected(endpoint, slow=True),
    ):
        await closed_within(endpoint, 20)
        await until_metric(endpoint, 'k3_http_cancelled_total{reason="slow_reader"} 1')

        assert endpoint.backend.produced < len(text)


async def test_one_client_that_leaves_disturbs_no_other(start: Start) -> None:
    """One client leaving ends its own generation only."""
    gate = asyncio.Event()
    async with (
        start(f"{ANSWER}a", gate, "b", STOP) as endpoint,
        asyncio.TaskGroup() as group,
    ):
        staying = group.create_task(endpoint.chat())
        async with connected(endpoint) as (reader, _):
            await reader.readuntil(b'"content":"a"')
            await endpoint.backend.until_active(2)
        await endpoint.backend.until_active(1)
        gate.set()

    assert staying.result().json()["choices"][0]["message"]["content"] == "ab"


async def test_port_in_use_names_port_and_remedy() -> None:
    """A taken port is one error with the port and what to do; exit status 78."""
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            AddressInUse, match=f"127.0.0.1:{port} is in use.*another port"
        ) as error:
            listen("127.0.0.1", port)

    assert error.value.exit_status == 78
    listen("127.0.0.1", port).close()  # and it is free again at once


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
async def test_address_of_another_machine_is_a_config_error(host: str) -> None:
    """An address that cannot be bound is told apart from a port in use."""
    with pytest.raises(ConfigError, match="use an") as caught:
        listen(host, 0)

    assert not isinstance(caught.value, AddressInUse)


async def refused(endpoint: Endpoint) -> None:
    """Wait until the server accepts no new connection."""
    host, port = endpoint.url.removeprefix("http://").split(":")
    async with asyncio.timeout(5):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except ConnectionError:  # refused, or reset while it waited in the backlog
                return
            writer.transport.abort()


async def test_shutdown_lets_a_running_request_finish(start: Start) -> None:
    """Within the grace time a running request ends as if nothing had happened."""
    gate = asyncio.Event()
    async with (
        start(f"{ANSWER}a", gate, "b", STOP, grace_s=5) as endpoint,
        asyncio.TaskGroup() as group,
    ):
        running = group.create_task(endpoint.chat())
        await endpoint.backend.until_active(1)
        endpoint.stop.set()
        await refused(endpoint)
        gate.set()

    assert running.result().json()["choices"][0]["message"]["content"] == "ab"


async def test_shutdown_is_bounded_and_typed(start: Start) -> None:
    """After the grace time a stream ends in one typed error and its generator is closed."""
    async with (
        asyncio.timeout(5),
        start(f"{ANSWER}a", asyncio.Event(), grace_s=0) as endpoint,
        asyncio.TaskGroup() as group,
    ):
        running = group.create_task(endpoint.chat(stream=True))
        await endpoint.backend.until_active(1)
        endpoint.stop.set()

    events = [part for part in running.result().text.split("\n\n") if part]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "overloaded"
    assert endpoint.backend.closed.is_set()


async def test_cancelling_the_server_closes_the_port() -> None:
    """Cancelled from outside, the server still stops in order and frees its port."""
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]

    async def app(scope: object, receive: object, send: object) -> None:
        raise AssertionError("no request is made")

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await serve(app, listener, stop=asyncio.Event(), grace_s=1)

    listen("127.0.0.1", port).close()
