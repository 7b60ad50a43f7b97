"""Fuzz of the request decoder: any body gives a checked request or one RequestError."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.core.errors import RequestError
from station.http.limits import EndpointLimits
from station.http.schema import decode_chat_request
from station.tokenizer.chat import render
from station.tokenizer.vocabulary import Tokenizer

FIELDS = [
    "model",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "seed",
    "stop",
    "stream",
    "n",
    "stream_options",
    "reasoning_effort",
    "tools",
    "tool_choice",
    "response_format",
    "logprobs",
    "user",
    "extra",
]
KEYS = st.sampled_from(["type", "text", "role", "content", "name", "json_schema", "schema", "x"])
WORDS = st.sampled_from(["user", "tool", "text", "json_schema", "none", "high", "", "漢"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool", "bot"])
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": ROLES},
        optional={"content": VALUES, "name": WORDS, "tool_call_id": WORDS, "tools": VALUES},
    ),
    max_size=4,
)


@settings(deadline=None, max_examples=150)
@given(
    fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6),
    messages=MESSAGES,
    cut=st.integers(0, 3),
)
def test_a9_any_body_is_a_request_or_one_error(
    byte_tokenizer: Tokenizer, fields: dict[str, object], messages: list[object], cut: int
) -> None:
    """A9: nothing but RequestError leaves the decoder, and what it accepts can be rendered."""
    text = json.dumps({"model": "k3-demo", "messages": messages, **fields})
    body = text[: len(text) - cut].encode()
    try:
        request = decode_chat_request(body, EndpointLimits())
        ids = render(
            byte_tokenizer,
            request.messages,
            thinking=request.thinking,
            effort=request.effort,
            tools=request.tools,
            tool_choice=request.tool_choice,
            response_format=request.response_format,
        )
    except RequestError as error:
        refusal = error
    else:
        assert request.max_tokens is None or request.max_tokens >= 1
        assert 0 <= request.temperature <= 2
        assert ids[-1] == byte_tokenizer.sep_id
        return
    assert refusal.http_status == 400
    assert str(refusal)


@settings(deadline=None, max_examples=300)
@given(body=st.binary(max_size=60))
def test_a9_random_bytes_are_one_error(body: bytes) -> None:
    """A9: bytes that are no JSON object are refused, whatever they are."""
    try:
        decode_chat_request(body, EndpointLimits())
    except RequestError as error:
        refusal = error

    assert refusal.http_status == 400
    assert refusal.error_code in ("invalid_json", "invalid_type")
