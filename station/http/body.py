"""Reading a request body under limits, and noticing that a client went away.

Owns the checks that come before JSON: framing, content type, encoding, size, time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers
from starlette.types import Receive

from shared.core.errors import MeshError, RequestError
from station.http.limits import EndpointLimits


class ClientGone(Exception):
    """The client closed its connection (or stopped reading); nobody is left to answer."""

    def __init__(self, reason: str) -> None:
        """`reason` is the label of the metric: `disconnect` or `slow_reader`."""
        super().__init__(reason)
        self.reason = reason


async def read_body(receive: Receive, headers: Headers, limits: EndpointLimits) -> bytes:
    """The whole body; RequestError 400, 408, 413 or 415, or ClientGone.

    A body that declares too large a size is refused before it is read.
    """
    _check_headers(headers)
    declared = headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limits.body_bytes_max:
        if "expect" not in headers:  # else the client is waiting for our word before it sends
            await _drain(receive, limits)
        raise _too_large(limits)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            while True:
                data, more = await _next_part(receive)
                body += data
                if len(body) > limits.body_bytes_max:
                    break
                if not more:
                    return bytes(body)
    except TimeoutError:
        raise RequestError(
            f"the request body did not arrive within {limits.body_s:g} s; send it faster",
            error_code="request_timeout",
            http_status=408,
        ) from None
    body.clear()
    await _drain(receive, limits)
    raise _too_large(limits)


async def while_connected(receive: Receive, work: Callable[[], Awaitable[None]]) -> None:
    """Run `work` and cancel it the moment the client disconnects (ClientGone).

    A MeshError of `work` comes out as itself, not inside a group.
    """
    failure: MeshError | ClientGone | None = None
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_watch(receive))
            try:
                await work()
            except (MeshError, ClientGone) as error:
                failure = error
            watcher.cancel()
    except* ClientGone as gone:
        failure = ClientGone(str(gone.exceptions[0]))
    if failure is not None:
        raise failure


async def _watch(receive: Receive) -> None:
    """Wait for the end of the connection; anything else the client sends is not for us."""
    while (await receive())["type"] != "http.disconnect":
        continue
    raise ClientGone("disconnect")


async def _next_part(receive: Receive) -> tuple[bytes, bool]:
    part = await receive()
    if part["type"] == "http.disconnect":
        raise ClientGone("disconnect")
    return part.get("body", b""), part.get("more_body", False)


async def _drain(receive: Receive, limits: EndpointLimits) -> None:
    """Throw away a bounded part of a refused body.

    Closing a socket with unread bytes resets it: the client would see that instead of our answer.
    """
    left, more = limits.drain_bytes_max, True
    try:
        async with asyncio.timeout(2.0):
            while more and left > 0:
                data, more = await _next_part(receive)
                left -= len(data)
    except TimeoutError:
        return


def _check_headers(headers: Headers) -> None:
    if "content-length" in headers and "transfer-encoding" in headers:
        raise RequestError(
            "both Content-Length and Transfer-Encoding are given; send one of them",
            error_code="ambiguous_framing",
        )
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(
            f"Content-Type {kind[:100]!r} is not supported; send application/json",
            error_code="unsupported_media_type",
            http_status=415,
        )
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise RequestError(
            f"Content-Encoding {encoding[:100]!r} is not supported; send the body uncompressed",
            error_code="unsupported_media_type",
            http_status=415,
        )


def _too_large(limits: EndpointLimits) -> RequestError:
    return RequestError(
        f"the request body is larger than {limits.body_bytes_max} bytes; send fewer messages",
        error_code="request_too_large",
        http_status=413,
    )
