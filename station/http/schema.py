"""The body of POST /v1/chat/completions: bytes in, one checked ChatRequest out.

Owns every rule about fields, types and ranges, and the error that names the field. Fields it does
not know are ignored, as OpenAI's server does. Must not know the backend or the vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from shared.core.errors import RequestError
from station.http.limits import EndpointLimits
from station.tokenizer.chat import EFFORTS, ChatMessage, ToolCall

DEFAULT_TEMPERATURE = 1.0
DEFAULT_TOP_P = 0.95
DEFAULT_EFFORT = "max"
_NO_THINKING = ("none", "minimal")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request whose every field was checked. `max_tokens` None: whatever the context leaves."""

    model: str
    messages: tuple[ChatMessage, ...]
    max_tokens: int | None
    max_tokens_field: str
    temperature: float
    top_p: float
    seed: int | None
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool
    thinking: bool
    effort: str | None
    tools: tuple[Mapping[str, Any], ...]
    tool_choice: str | None
    response_format: Mapping[str, Any] | None


class _Part(Struct):
    type: str
    text: str | None = None


class _Function(Struct):
    name: Annotated[str, Meta(min_length=1)]
    arguments: str | None = None


class _Call(Struct):
    function: _Function
    id: str | None = None


class _Message(Struct):
    role: str
    content: str | list[_Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    tools: list[dict[str, Any]] | None = None


class _StreamOptions(Struct):
    include_usage: bool | None = None


class _Body(Struct):
    model: str
    messages: Annotated[list[_Message], Meta(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None
    n: int | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    user: str | None = None


_DECODER = msgspec.json.Decoder(_Body)
_PATH = re.compile(r" - at `\$\.?(.*)`$")
_MISSING = re.compile(r"missing required field `(\w+)`")


def decode_chat_request(body: bytes, limits: EndpointLimits) -> ChatRequest:
    """Decode and check `body`; RequestError (400) names the field and the remedy.

    Takes about 30 ms for the largest body: call it outside the event loop.
    """
    raw = _decode(body)
    thinking, effort = _effort(raw.reasoning_effort)
    _refuse_unsupported(raw)
    if len(raw.messages) > limits.messages_max:
        raise _invalid("messages", f"more than {limits.messages_max} messages; send fewer")
    field = "max_tokens" if raw.max_completion_tokens is None else "max_completion_tokens"
    max_tokens: int | None = getattr(raw, field)
    if max_tokens is not None and max_tokens < 1:
        raise _invalid(field, f"{max_tokens} is not positive; ask for at least 1 token")
    return ChatRequest(
        model=raw.model,
        messages=tuple(_message(m, f"messages[{i}]") for i, m in enumerate(raw.messages)),
        max_tokens=max_tokens,
        max_tokens_field=field,
        temperature=DEFAULT_TEMPERATURE if raw.temperature is None else raw.temperature,
        top_p=DEFAULT_TOP_P if raw.top_p is None else raw.top_p,
        seed=raw.seed,
        stops=_stops(raw.stop, limits),
        stream=bool(raw.stream),
        include_usage=raw.stream_options is not None and bool(raw.stream_options.include_usage),
        return_token_ids=bool(raw.return_token_ids),
        thinking=thinking,
        effort=effort,
        tools=tuple(raw.tools or ()),
        tool_choice=_tool_choice(raw.tool_choice),
        response_format=raw.response_format,
    )


def _decode(body: bytes) -> _Body:
    try:
        raw = _DECODER.decode(body)
        # msgspec keeps the last of two equal keys; which one a client meant is anybody's guess.
        json.loads(body, object_pairs_hook=_refuse_duplicates)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from error
    except msgspec.DecodeError as error:
        raise RequestError(
            f"the body is not valid JSON: {error}; send one JSON object in UTF-8",
            error_code="invalid_json",
        ) from error
    except RecursionError as error:
        raise RequestError(
            "the body is nested too deeply; send a flatter one", error_code="invalid_json"
        ) from error
    except ValueError as error:  # an integer of thousands of digits in an ignored field
        raise RequestError(
            f"the body is not usable JSON: {error}", error_code="invalid_json"
        ) from error
    return raw


def _refuse_duplicates(pairs: Sequence[tuple[str, object]]) -> None:
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        name = next(name for name in names if names.count(name) > 1)
        raise RequestError(
            f"the key {name[:100]!r} is given twice in one object; send it once",
            param=name[:100],
            error_code="duplicate_key",
        )


def _field_error(message: str) -> RequestError:
    """msgspec's message with its path turned into OpenAI's `param`."""
    path = _PATH.search(message)
    param = path.group(1) if path else ""
    if missing := _MISSING.search(message):
        param = f"{param}.{missing.group(1)}".lstrip(".")
    reason = message[: path.start()] if path else message
    where = param or "the body"
    return RequestError(f"{where}: {reason}", param=param or None, error_code="invalid_type")


def _invalid(param: str, reason: str) -> RequestError:
    return RequestError(f"{param}: {reason}", param=param, error_code="invalid_value")


def _refuse_unsupported(raw: _Body) -> None:
    """Refuse what a client would miss in the answer; harmless defaults pass."""
    if raw.n not in (None, 1):
        raise _invalid("n", "only n=1 is supported; send several requests instead")
    for name in ("logprobs", "frequency_penalty", "presence_penalty"):
        if getattr(raw, name):
            raise RequestError(
                f"{name}: not supported by this server; leave it out",
                param=name,
                error_code="unsupported_parameter",
            )


def _effort(value: str | None) -> tuple[bool, str | None]:
    """(thinking, effort) of a request's `reasoning_effort`."""
    if value in _NO_THINKING:
        return False, None
    if value is None:
        return True, DEFAULT_EFFORT
    if value not in EFFORTS:
        allowed = ", ".join((*EFFORTS, *_NO_THINKING))
        raise _invalid("reasoning_effort", f"{value[:100]!r} is not supported; use {allowed}")
    return True, value


def _stops(value: str | list[str] | None, limits: EndpointLimits) -> tuple[str, ...]:
    stops = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    if len(stops) > limits.stops_max:
        raise _invalid("stop", f"{len(stops)} strings; send at most {limits.stops_max}")
    if not all(1 <= len(stop) <= limits.stop_chars_max for stop in stops):
        raise _invalid("stop", f"each string needs 1 to {limits.stop_chars_max} characters")
    return stops


def _tool_choice(value: str | dict[str, Any] | None) -> str | None:
    if value is None or value in ("auto", "none", "required"):
        return None if value is None else str(value)
    raise _invalid("tool_choice", "only 'auto', 'none' and 'required' are supported")


def _message(raw: _Message, where: str) -> ChatMessage:
    """One message with its content flattened to texts. OpenAI's `developer` is our `system`."""
    content = _content(raw.content, f"{where}.content")
    match raw.role:
        case "system" | "developer":
            return ChatMessage("system", content, name=raw.name, tools=tuple(raw.tools or ()))
        case "user":
            return ChatMessage("user", content, name=raw.name)
        case "assistant":
            calls = tuple(
                ToolCall(call.function.name, call.function.arguments or "", call.id)
                for call in raw.tool_calls or ()
            )
            reasoning = raw.reasoning_content or raw.reasoning
            return ChatMessage(
                "assistant", content, name=raw.name, reasoning=reasoning, tool_calls=calls
            )
        case "tool":
            return ChatMessage("tool", content, name=raw.name, tool_call_id=raw.tool_call_id)
        case _:
            raise _invalid(
                f"{where}.role",
                f"{raw.role[:100]!r} is not a role; use system, developer, user, assistant or tool",
            )


def _content(value: str | list[_Part] | None, where: str) -> str | tuple[str, ...]:
    if value is None or isinstance(value, str):
        return value or ""
    texts: list[str] = []
    for index, part in enumerate(value):
        if part.type != "text" or part.text is None:
            raise _invalid(
                f"{where}[{index}]",
                f"a part of type {part.type[:100]!r} is not supported; send parts of type 'text'",
            )
        texts.append(part.text)
    return tuple(texts)
