"""One answer from a pod: a request out, a stream of deltas in.

Owns the OpenAI wire form as a client sees it. Must not know terminals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
from httpx_sse import SSEError, connect_sse

from services.pod.endpoint import PodRefused, check_answer, error_message, transport_errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How to ask: what stays the same over a conversation."""

    model: str
    temperature: float
    max_tokens: int | None
    effort: str | None
    seed: int | None


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class End:
    """The end of an answer: why, how many tokens, and the pod's own remarks."""

    reason: str
    usage: Mapping[str, int]
    pod: Mapping[str, int]


Delta = Reasoning | Content | End


class _DeltaBody(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _DeltaBody = _DeltaBody()
    finish_reason: str | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    usage: dict[str, Any] | None = None
    k3: dict[str, int] | None = None


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...]


_CHUNK = msgspec.json.Decoder(_Chunk)


def served_model(client: httpx.Client) -> str:
    """Name of the model that the pod serves."""
    with transport_errors(str(client.base_url)):
        response = client.get("/v1/models")
        check_answer(response)
    try:
        models = msgspec.json.decode(response.content, type=_Models)
    except msgspec.DecodeError as error:
        raise PodRefused(f"{client.base_url} does not answer like a pod: {error}") from error
    if not models.data:
        raise PodRefused(f"{client.base_url} serves no model")
    return models.data[0].id


def answer(
    client: httpx.Client, asking: Asking, messages: Sequence[Mapping[str, str]]
) -> Iterator[Delta]:
    """Stream one answer; ends with exactly one End, or raises PodRefused or PodUnreachable."""
    reason: str | None = None
    usage: dict[str, int] = {}
    pod: dict[str, int] = {}
    for chunk in _chunks(client, _body(asking, messages)):
        for choice in chunk.choices:
            if choice.delta.reasoning_content:
                yield Reasoning(choice.delta.reasoning_content)
            if choice.delta.content:
                yield Content(choice.delta.content)
            reason = choice.finish_reason or reason
        usage |= {k: v for k, v in (chunk.usage or {}).items() if isinstance(v, int)}
        pod |= chunk.k3 or {}
    if reason is None:
        raise PodRefused("the answer was cut off before its end; look at `k3 status`")
    yield End(reason, usage, pod)


def _body(asking: Asking, messages: Sequence[Mapping[str, str]]) -> dict[str, object]:
    body: dict[str, object] = {
        "model": asking.model,
        "messages": list(messages),
        "temperature": asking.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    optional = {
        "max_tokens": asking.max_tokens,
        "reasoning_effort": asking.effort,
        "seed": asking.seed,
    }
    return body | {name: value for name, value in optional.items() if value is not None}


def _chunks(client: httpx.Client, body: Mapping[str, object]) -> Iterator[_Chunk]:
    """The chunks of a stream; an error event becomes PodRefused."""
    with (
        transport_errors(str(client.base_url)),
        connect_sse(client, "POST", "/v1/chat/completions", json=body) as source,
    ):
        check_answer(source.response)
        try:
            for event in source.iter_sse():
                if event.data == "[DONE]":
                    return
                yield _chunk(event.data)
        except SSEError as error:
            raise PodRefused(f"the pod does not answer with a stream: {error}") from error


def _chunk(data: str) -> _Chunk:
    try:
        fields = msgspec.json.decode(data, type=dict[str, object])
        if message := error_message(fields):
            raise PodRefused(f"the pod ended the answer: {message}")
        return _CHUNK.decode(data)
    except msgspec.DecodeError as error:
        raise PodRefused(f"the pod sent a chunk that is not understood: {error}") from error
