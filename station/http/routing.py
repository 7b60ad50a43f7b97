"""GET /k3/routing: a stream of the experts that tokens choose, for `k3 trace record`.

The shell around the routing tap: owns waiting and sending. A listener that does not read is sent
what fits its queue, told what it missed, and cut off after a bound; it never slows the model.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send
from structlog.typing import FilteringBoundLogger

from shared.core.errors import RequestRefused
from shared.core.routing_wire import CONTENT_TYPE, VERSION, Message, Opened, frame
from shared.core.shape import ModelShape
from station.http.body import ClientGone, while_connected
from station.http.errors import error_response
from station.routing_tap import QUEUE_TOKENS, Listener, RoutingTap


@dataclass(frozen=True, slots=True)
class RoutingParts:
    """What the route is built from; `stop` ends all streams."""

    tap: RoutingTap
    model_digest: str
    shape: ModelShape
    stop: asyncio.Event
    log: FilteringBoundLogger
    listeners_max: int = 2
    queue_tokens: int = QUEUE_TOKENS
    totals_s: float = 1.0  # silence is at most this long
    send_s: float = 30.0  # a client that takes longer to read a piece is cut off


class RoutingRoute:
    """The ASGI application of the route."""

    def __init__(self, parts: RoutingParts) -> None:
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one listener until it leaves or the Station stops."""
        parts = self._parts
        if parts.tap.listeners >= parts.listeners_max:
            refusal = RequestRefused(
                f"{parts.listeners_max} recorders listen already; stop one of them", retry_after_s=5
            )
            await error_response(refusal)(scope, receive, send)
            return
        loop = asyncio.get_running_loop()
        news = asyncio.Event()
        listener = parts.tap.listen(lambda: _tell(loop, news), tokens_max=parts.queue_tokens)
        stream = _Stream(parts, listener, news, send)
        reason = "stopped"
        try:
            await while_connected(receive, stream.run)
        except ClientGone as gone:
            reason = gone.reason
        except asyncio.CancelledError:
            reason = "shutdown"  # the server waits for nothing but our end
        finally:
            parts.tap.leave(listener)
            totals = listener.totals()
            parts.log.info(
                "routing_recorded",
                ended=reason,
                tokens=totals.sent,
                dropped=totals.dropped,
                incomplete=totals.incomplete,
            )


@dataclass(frozen=True, slots=True)
class _Stream:
    parts: RoutingParts
    listener: Listener
    news: asyncio.Event
    send: Send

    async def run(self) -> None:
        """Head, then pieces as they come, then totals whenever the queue is empty."""
        parts = self.parts
        await self.send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [
                    (b"content-type", CONTENT_TYPE.encode()),
                    (b"cache-control", b"no-store"),
                ],
            }
        )
        await self._body(Opened(VERSION, parts.model_digest, parts.shape))
        while True:
            # before the queue is read: what comes while we read wakes us again
            self.news.clear()
            stopping = parts.stop.is_set()
            while (piece := self.listener.take()) is not None:
                await self._body(piece)
            await self._body(self.listener.totals(), more=not stopping)
            if stopping:
                return
            await self._wait()

    async def _wait(self) -> None:
        """Until something comes, and at most until the next totals are due."""
        try:
            async with asyncio.timeout(self.parts.totals_s):
                await self.news.wait()
        except TimeoutError:
            return

    async def _body(self, message: Message, *, more: bool = True) -> None:
        try:
            async with asyncio.timeout(self.parts.send_s):
                await self.send(
                    {"type": "http.response.body", "body": frame(message), "more_body": more}
                )
        except TimeoutError:
            raise ClientGone("slow_reader") from None


def _tell(loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> None:
    loop.call_soon_threadsafe(news.set)
