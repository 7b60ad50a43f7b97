"""The real application on a real uvicorn socket, over a backend that plays a script."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import httpx
import structlog
from structlog.testing import LogCapture

from station.backend import Finished, GenerationRequest, Metric, Sample, Token, TokenEvent
from station.http.app import build_app
from station.http.chat import ChatParts
from station.http.limits import EndpointLimits
from station.http.metrics import HttpCounters
from station.http.routing import RoutingParts
from station.http.server import listen, serve
from station.tokenizer.vocabulary import Tokenizer

Step = str | int | TokenEvent | BaseException | asyncio.Event

STOP = Finished("stop", cold_rows=3)
LENGTH = Finished("length", cold_rows=0)
ANSWER = "why<|close|>think<|sep|><|open|>response<|sep|>"


class ScriptedBackend:
    """Plays its script for every request and records by value what the endpoint did with it."""

    model_name = "k3-demo"
    context_length = 2000
    created_s = 1_700_000_000

    def __init__(self, tokenizer: Tokenizer, script: Sequence[Step]) -> None:
        self._tokenizer = tokenizer
        self._script = script
        self.requests: list[GenerationRequest] = []
        self.produced = 0
        self.active = 0
        self._changed = asyncio.Event()
        self.closed = asyncio.Event()
        self.ready = True
        self.alive = True

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Play the script; note when the generator is closed."""
        self.requests.append(request)
        self._move(1)
        try:
            for step in self._script:
                match step:
                    case str():
                        for token in self._ids(step):
                            self.produced += 1
                            yield Token(token)
                    case int():
                        for _ in range(10_000):  # an endless text, `step` milliseconds per token
                            await asyncio.sleep(step / 1000)
                            self.produced += 1
                            yield Token(ord("x"))
                    case BaseException():
                        raise step
                    case asyncio.Event():
                        await step.wait()
                    case event:
                        yield event
        finally:
            self._move(-1)
            self.closed.set()

    def _move(self, by: int) -> None:
        self.active += by
        self._changed.set()

    async def until_active(self, wanted: int) -> None:
        """Wait until exactly `wanted` generators run."""
        async with asyncio.timeout(5):
            while self.active != wanted:
                self._changed.clear()
                await self._changed.wait()

    def _ids(self, text: str) -> list[int]:
        control = {
            "<|open|>": self._tokenizer.open_id,
            "<|close|>": self._tokenizer.close_id,
            "<|sep|>": self._tokenizer.sep_id,
        }
        ids: list[int] = []
        for piece in re.split(r"(<\|(?:open|close|sep)\|>)", text):
            ids += [control[piece]] if piece in control else self._tokenizer.encode_text(piece)
        return ids

    def status(self) -> dict[str, object]:
        return {"nodes": [{"name": "spark-0", "epoch": 3}]}

    def readiness(self) -> tuple[bool, str]:
        return self.ready, "ready" if self.ready else "waiting for spark-1"

    def liveness(self) -> tuple[bool, str]:
        return self.alive, "idle" if self.alive else "layer 7 has not moved for 12 s"

    def metrics(self) -> Sequence[Metric]:
        return [Metric("k3_rows_total", "counter", "Rows.", [Sample({"node": 'a"b'}, 5.0)])]


@dataclass
class Endpoint:
    """A running endpoint."""

    url: str
    backend: ScriptedBackend
    client: httpx.AsyncClient
    log: LogCapture
    stop: asyncio.Event

    async def chat(self, **fields: Any) -> httpx.Response:
        """POST a chat request; `fields` over a minimal valid body, a field of ... is left out."""
        body = {"model": "k3-demo", "messages": [{"role": "user", "content": "Hi"}], **fields}
        body = {key: value for key, value in body.items() if value is not ...}
        return await self.client.post("/v1/chat/completions", json=body)


Start = Callable[..., AbstractAsyncContextManager[Endpoint]]


def starter(tokenizer: Tokenizer) -> Start:
    """A function that starts an endpoint; it stops at the end of the `async with`."""

    @asynccontextmanager
    async def running(
        *script: Step,
        limits: EndpointLimits | None = None,
        token: str | None = None,
        grace_s: int = 1,
        routing: Callable[[asyncio.Event], RoutingParts] | None = None,
    ) -> AsyncIterator[Endpoint]:
        backend = ScriptedBackend(tokenizer, script)
        log = LogCapture()
        ids, ticks = count(1), count(0, 1000)
        parts = ChatParts(
            backend=backend,
            tokenizer=tokenizer,
            limits=limits or EndpointLimits(),
            counters=HttpCounters(),
            log=structlog.wrap_logger(None, processors=[log]),
            new_id=lambda: f"t{next(ids)}",
            wall_clock_s=lambda: 1_800_000_000,
            clock_ns=lambda: next(ticks),
        )
        listener = listen("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        stop = asyncio.Event()
        app = build_app(parts, token=token, routing=None if routing is None else routing(stop))
        async with asyncio.TaskGroup() as group:
            group.create_task(serve(app, listener, stop=stop, grace_s=grace_s))
            async with httpx.AsyncClient(
                base_url=url, timeout=10, verify=False, trust_env=False
            ) as client:
                yield Endpoint(url, backend, client, log, stop)
            stop.set()

    return running
