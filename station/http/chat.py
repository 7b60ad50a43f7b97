"""POST /v1/chat/completions: the life of one request.

Body -> checked request -> prompt ids -> backend -> deltas -> response. The shell around the pure
parts: owns waiting, cancelling and answering. Every wait is bounded, the backend's generator is
always closed, and a request ends in tokens or in exactly one error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send
from structlog.typing import FilteringBoundLogger

from shared.core.errors import MeshError, RequestError, RequestRefused
from station.backend import ChatBackend, Finished, GenerationRequest, Token, TokenEvent
from station.http.body import ClientGone, read_body, while_connected
from station.http.errors import error_payload, error_response, json_response
from station.http.limits import EndpointLimits
from station.http.metrics import HttpCounters
from station.http.reply import AnswerHead, Reply, StreamWriter, completion, sse_event
from station.http.schema import ChatRequest, decode_chat_request
from station.tokenizer.chat import render
from station.tokenizer.reply import ReplyEvent, ReplyParser
from station.tokenizer.vocabulary import Tokenizer

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class ChatParts:
    """What the endpoint is built from; `assembly.py` passes them in.

    `new_id` makes a unique text per request, `wall_clock_s` the unix time in seconds,
    `clock_ns` a monotonic time.
    """

    backend: ChatBackend
    tokenizer: Tokenizer
    limits: EndpointLimits
    counters: HttpCounters
    log: FilteringBoundLogger
    new_id: Callable[[], str]
    wall_clock_s: Callable[[], int]
    clock_ns: Callable[[], int]


class ChatRoute:
    """The ASGI application of the route."""

    def __init__(self, parts: ChatParts) -> None:
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request and log one line about it."""
        parts = self._parts
        exchange = _Exchange(parts, scope, receive, send, f"chatcmpl-{parts.new_id()}")
        if parts.counters.active >= parts.limits.concurrent_max:
            refusal = RequestRefused(
                f"{parts.limits.concurrent_max} requests are being served; try again in a second",
                retry_after_s=1,
            )
            await exchange.fail(refusal)
            return
        started_ns = parts.clock_ns()
        parts.counters.active += 1
        try:
            await exchange.run()
        finally:
            parts.counters.active -= 1
            elapsed_us = (parts.clock_ns() - started_ns) // 1000
            parts.log.info(
                "request",
                request=exchange.request_id,
                outcome=exchange.outcome,
                prompt_tokens=exchange.prompt_tokens,
                completion_tokens=exchange.completion_tokens,
                cold_rows=exchange.cold_rows,
                elapsed_us=elapsed_us,
            )


class _Exchange:
    """One request and its response. Mutable: it records how far it came."""

    def __init__(
        self, parts: ChatParts, scope: Scope, receive: Receive, send: Send, request_id: str
    ) -> None:
        self._parts = parts
        self._scope = scope
        self._receive = receive
        self._send_raw = send
        self._stream_open = False
        self.request_id = request_id
        self.outcome = "aborted"
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cold_rows = 0

    async def run(self) -> None:
        """Serve the request; every failure becomes an answer or a counted cancellation."""
        try:
            try:
                await self._serve()
            except MeshError as error:
                await self.fail(error)
            except asyncio.CancelledError:
                # Only the server cancels us, at the end of its grace time, and it waits for nothing
                # but our end: the request ends in its answer, not in a trace in the log.
                await self.fail(RequestRefused("the server is shutting down", retry_after_s=5))
                self._give_up("shutdown")
        except ClientGone as gone:
            self._give_up(gone.reason)

    async def fail(self, error: MeshError) -> None:
        """Answer with `error`: a response of its own, or the last event of an open stream."""
        self.outcome = error.code
        self._parts.counters.answered(error.http_status)
        if self._stream_open:
            await self._send_body(sse_event(error_payload(error)), more=False)
        else:
            await error_response(error)(self._scope, self._receive, self._send_raw)

    def _give_up(self, reason: str) -> None:
        self.outcome = reason
        self._parts.counters.cancelled(reason)

    async def _serve(self) -> None:
        parts = self._parts
        body = await read_body(self._receive, Headers(scope=self._scope), parts.limits)
        # Decoding and tokenising a body of megabytes takes a second: not in the event loop.
        request, prompt_ids = await asyncio.to_thread(_prepare, parts, body)
        generation = _generation(parts, request, prompt_ids, self.request_id)
        head = AnswerHead(
            self.request_id,
            parts.wall_clock_s(),
            parts.backend.model_name,
            len(prompt_ids),
            sum(len(message.tool_calls) for message in request.messages),
        )
        self.prompt_tokens = len(prompt_ids)
        reply = Reply(
            ReplyParser(parts.tokenizer, thinking=request.thinking),
            request.stops,
            keep_token_ids=request.return_token_ids,
        )
        if request.stream:
            writer = StreamWriter(head, include_usage=request.include_usage)
            await self._generate(generation, reply, self._stream_with(writer))
            await self._send_body(writer.closing(reply), more=False)
        else:
            events: list[ReplyEvent] = []
            await self._generate(generation, reply, _collect_into(events))
            response = json_response(completion(head, reply, events))
            await response(self._scope, self._receive, self._send_raw)
        parts.counters.answered(200)
        self.outcome = reply.finish_reason

    async def _generate(
        self, generation: GenerationRequest, reply: Reply, deliver: _Deliver
    ) -> None:
        """Run the backend until it ends, a stop string is found or the client goes away."""

        async def work() -> None:
            async with aclosing(self._parts.backend.generate(generation)) as events:
                finished: Finished | None = None
                while finished is None and not reply.stopped:
                    match await self._next(events):
                        case Token(token_id=token_id):
                            self.completion_tokens += 1
                            await deliver(reply.feed(token_id))
                        case Finished() as finished:
                            continue
            if finished is not None:
                self.cold_rows = finished.cold_rows
            await deliver(reply.finish(finished))

        await while_connected(self._receive, work)

    async def _next(self, events: AsyncGenerator[TokenEvent, None]) -> TokenEvent:
        """The next event, within the limit."""
        limit_s = self._parts.limits.event_s
        try:
            async with asyncio.timeout(limit_s):
                return await anext(events)
        except TimeoutError:
            raise RequestError(
                f"the pod made no token within {limit_s:g} s; `k3 status` shows what it waits for",
                error_code="generation_stalled",
                http_status=504,
            ) from None
        except StopAsyncIteration:
            raise MeshError("the pod ended a request without saying why; this is a bug") from None

    def _stream_with(self, writer: StreamWriter) -> _Deliver:
        """Send deltas as they come. The first token opens the stream, so a refusal has a status."""

        async def deliver(events: list[ReplyEvent]) -> None:
            parts = [writer.delta(event) for event in events]
            if not self._stream_open:
                await self._send_raw(
                    {"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS}
                )
                self._stream_open = True
                parts.insert(0, writer.opening())
            if parts:
                await self._send_body(b"".join(parts), more=True)

        return deliver

    async def _send_body(self, body: bytes, *, more: bool) -> None:
        """Send a part of the stream; a client that does not read it in time is gone."""
        try:
            async with asyncio.timeout(self._parts.limits.send_s):
                await self._send_raw(
                    {"type": "http.response.body", "body": body, "more_body": more}
                )
        except TimeoutError:
            raise ClientGone("slow_reader") from None


_Deliver = Callable[[list[ReplyEvent]], Awaitable[None]]


def _collect_into(collected: list[ReplyEvent]) -> _Deliver:
    async def deliver(events: list[ReplyEvent]) -> None:
        collected.extend(events)

    return deliver


def _prepare(parts: ChatParts, body: bytes) -> tuple[ChatRequest, list[int]]:
    """Decode the body and render its prompt. Runs in a worker thread."""
    request = decode_chat_request(body, parts.limits)
    if request.model != parts.backend.model_name:
        raise RequestError(
            f"unknown model {request.model[:100]!r}; this server serves "
            f"{parts.backend.model_name!r}",
            param="model",
            error_code="model_not_found",
            http_status=404,
        )
    prompt_ids = render(
        parts.tokenizer,
        request.messages,
        thinking=request.thinking,
        effort=request.effort,
        tools=request.tools,
        tool_choice=request.tool_choice,
        response_format=request.response_format,
    )
    return request, prompt_ids


def _generation(
    parts: ChatParts, request: ChatRequest, prompt_ids: list[int], request_id: str
) -> GenerationRequest:
    """The backend's request; RequestError when prompt and answer do not fit the context."""
    context, left = parts.backend.context_length, parts.backend.context_length - len(prompt_ids)
    if left < 1:
        raise RequestError(
            f"the prompt has {len(prompt_ids)} tokens and the context holds {context}, the answer "
            "included; send a shorter conversation",
            param="messages",
            error_code="context_length_exceeded",
        )
    if request.max_tokens is not None and request.max_tokens > left:
        raise RequestError(
            f"{request.max_tokens_field}: {request.max_tokens} tokens after a prompt of "
            f"{len(prompt_ids)} do not fit the context of {context}; ask for at most {left}",
            param=request.max_tokens_field,
            error_code="context_length_exceeded",
        )
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=tuple(prompt_ids),
        max_tokens=left if request.max_tokens is None else request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        stop_ids=frozenset({parts.tokenizer.end_of_msg_id}),
    )
