"""One answer: token ids become OpenAI chunks or one OpenAI message.

Pure: no socket, no clock. `Reply` folds tokens into deltas (parser, then stop strings) and counts
them; `StreamWriter` and `completion` turn the same deltas into the JSON of a stream or of a
whole response, so both say the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from station.backend import Finished
from station.tokenizer.reply import (
    ContentDelta,
    ReasoningDelta,
    ReplyEvent,
    ReplyParser,
    ToolCallDone,
)
from station.tokenizer.stops import StopMatcher

SSE_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every chunk of one answer repeats; `call_base` is the number of earlier tool calls."""

    request_id: str
    created_s: int
    model: str
    prompt_tokens: int
    call_base: int


class Reply:
    """Folds generated tokens into deltas. Mutable: the state of one answer."""

    def __init__(
        self, parser: ReplyParser, stops: Sequence[str], *, keep_token_ids: bool = False
    ) -> None:
        """Stop strings apply to the answer's text, not to reasoning or tool calls.

        `keep_token_ids`: the choice reports the ids, as proof that two runs gave the same tokens.
        """
        self._parser = parser
        self._stops = StopMatcher(stops)
        self._finished: Finished | None = None
        self.completion_tokens = 0
        self.tool_calls = 0
        self.token_ids: list[int] | None = [] if keep_token_ids else None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found: no further token is wanted."""
        return self._stops.matched is not None

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for why the answer ended."""
        if self._finished is not None and self._finished.reason == "length" and not self.stopped:
            return "length"
        return "tool_calls" if self.tool_calls else "stop"

    @property
    def pod(self) -> dict[str, int] | None:
        """The `k3` object; None when a stop string cut the answer before the pod's own end."""
        if self._finished is None:
            return None
        return {"cold_rows": self._finished.cold_rows}

    def feed(self, token_id: int) -> list[ReplyEvent]:
        """The deltas that one token completes."""
        self.completion_tokens += 1
        if self.token_ids is not None:
            self.token_ids.append(token_id)
        return self._cut(self._parser.feed(token_id))

    def finish(self, finished: Finished | None) -> list[ReplyEvent]:
        """The last deltas. `finished` is None when a stop string ended the answer."""
        self._finished = finished
        events = self._cut(self._parser.finish())
        return events + ([ContentDelta(rest)] if (rest := self._stops.finish()) else [])

    def _cut(self, events: Sequence[ReplyEvent]) -> list[ReplyEvent]:
        kept: list[ReplyEvent] = []
        for event in events:
            if self.stopped:
                break
            if isinstance(event, ContentDelta):
                if text := self._stops.feed(event.text):
                    kept.append(ContentDelta(text))
                continue
            if isinstance(event, ToolCallDone):
                # The text ends here, so what the matcher holds can no longer become a stop string.
                if held := self._stops.finish():
                    kept.append(ContentDelta(held))
                self.tool_calls += 1
            kept.append(event)
        return kept


class StreamWriter:
    """Server-sent events of one answer. Mutable: counts tool calls for their `index`."""

    def __init__(self, head: AnswerHead, *, include_usage: bool) -> None:
        """`include_usage`: a last chunk carries the usage, all others carry `usage: null`."""
        self._head = head
        self._include_usage = include_usage
        self._calls = 0

    def opening(self) -> bytes:
        """The first chunk: the role."""
        return self._chunk({"role": "assistant", "content": ""})

    def delta(self, event: ReplyEvent) -> bytes:
        """The chunk of one delta."""
        match event:
            case ReasoningDelta(text=text):
                return self._chunk({"reasoning_content": text})
            case ContentDelta(text=text):
                return self._chunk({"content": text})
            case ToolCallDone():
                call = _tool_call(event, self._head.call_base + self._calls)
                self._calls += 1
                return self._chunk({"tool_calls": [{"index": self._calls - 1, **call}]})

    def closing(self, reply: Reply) -> bytes:
        """The chunk with the finish reason, the usage when it was asked for, and [DONE]."""
        parts = [self._chunk({}, finish_reason=reply.finish_reason, ended=reply)]
        if self._include_usage:
            parts.append(sse_event(self._object([], usage=_usage(self._head, reply))))
        return b"".join([*parts, SSE_DONE])

    def _chunk(
        self,
        delta: dict[str, Any],
        *,
        finish_reason: str | None = None,
        ended: Reply | None = None,
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        if ended is None:
            return sse_event(self._object([choice], usage=None))
        chunk = self._object([choice | _token_ids(ended)], usage=None)
        return sse_event(chunk if ended.pod is None else {**chunk, "k3": ended.pod})

    def _object(self, choices: list[dict[str, Any]], *, usage: object) -> dict[str, Any]:
        chunk = {
            "id": self._head.request_id,
            "object": "chat.completion.chunk",
            "created": self._head.created_s,
            "model": self._head.model,
            "choices": choices,
        }
        return {**chunk, "usage": usage} if self._include_usage else chunk


def sse_event(payload: object) -> bytes:
    """One server-sent event with a JSON payload."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


def completion(head: AnswerHead, reply: Reply, events: Sequence[ReplyEvent]) -> dict[str, Any]:
    """The whole response of a request that did not ask for a stream."""
    content = "".join(e.text for e in events if isinstance(e, ContentDelta))
    reasoning = "".join(e.text for e in events if isinstance(e, ReasoningDelta))
    calls = [e for e in events if isinstance(e, ToolCallDone)]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not content else content,
        "reasoning_content": reasoning or None,
    }
    if calls:
        message["tool_calls"] = [_tool_call(c, head.call_base + i) for i, c in enumerate(calls)]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": reply.finish_reason,
    }
    answer = {
        "id": head.request_id,
        "object": "chat.completion",
        "created": head.created_s,
        "model": head.model,
        "choices": [choice | _token_ids(reply)],
        "usage": _usage(head, reply),
    }
    return answer if reply.pod is None else {**answer, "k3": reply.pod}


def _token_ids(reply: Reply) -> dict[str, list[int]]:
    return {} if reply.token_ids is None else {"token_ids": reply.token_ids}


def _tool_call(call: ToolCallDone, number: int) -> dict[str, Any]:
    return {
        "id": f"{call.name}:{number}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _usage(head: AnswerHead, reply: Reply) -> dict[str, int]:
    return {
        "prompt_tokens": head.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": head.prompt_tokens + reply.completion_tokens,
    }
