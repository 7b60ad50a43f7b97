"""Good requests: plain and streamed answers, the official client, defaults, the small routes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
import uvloop

from station.backend import Token
from station.tokenizer.vocabulary import Tokenizer
from tests.unit.http.endpoint import ANSWER, LENGTH, STOP, Endpoint, Start


def chunks(text: str) -> list[Any]:
    """The payloads of an SSE body; [DONE] stays text."""
    payloads = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    return [part if part == "[DONE]" else json.loads(part) for part in payloads]


def joined(parts: list[Any], field: str) -> str:
    """One delta field over all chunks."""
    deltas = [c["delta"] for p in parts if p != "[DONE]" for c in p["choices"]]
    return "".join(delta.get(field) or "" for delta in deltas)


def client_of(endpoint: Endpoint) -> openai.AsyncOpenAI:
    """The official client, pointed at the endpoint."""
    return openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key="none", max_retries=0)


@pytest.mark.asyncio
async def test_plain_answer_has_every_field(start: Start) -> None:
    """Content, reasoning, usage, finish reason and what the pod did, in OpenAI's shape."""
    async with start(f"{ANSWER}82,432", STOP) as endpoint:
        answer = await endpoint.chat()

    request = endpoint.backend.requests[0]
    assert answer.status_code == 200
    assert answer.json() == {
        "id": "chatcmpl-t1",
        "object": "chat.completion",
        "created": 1_800_000_000,
        "model": "k3-demo",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "82,432", "reasoning_content": "why"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": len(request.prompt_ids),
            "completion_tokens": endpoint.backend.produced,
            "total_tokens": len(request.prompt_ids) + endpoint.backend.produced,
        },
        "k3": {"cold_rows": 3},
    }
    assert request.request_id == "chatcmpl-t1"


@pytest.mark.asyncio
async def test_defaults_reach_the_pod(start: Start, byte_tokenizer: Tokenizer) -> None:
    """Temperature 1, top-p 0.95, effort max, the rest of the context, the end-of-message stop."""
    async with start(STOP) as endpoint:
        await endpoint.chat()

    request = endpoint.backend.requests[0]
    assert (request.temperature, request.top_p, request.seed) == (1.0, 0.95, None)
    assert request.max_tokens == endpoint.backend.context_length - len(request.prompt_ids)
    assert request.stop_ids == {byte_tokenizer.end_of_msg_id}
    assert "thinking_effort=max`." in byte_tokenizer.decode(request.prompt_ids)


@pytest.mark.asyncio
async def test_settings_reach_the_pod(start: Start, byte_tokenizer: Tokenizer) -> None:
    """What the client asks for is what the pod is asked for."""
    async with start(STOP) as endpoint:
        await endpoint.chat(
            temperature=0, top_p=0.5, seed=-7, max_tokens=9, reasoning_effort="low", user="u"
        )
        await endpoint.chat(reasoning_effort="none")

    low, off = endpoint.backend.requests
    assert (low.temperature, low.top_p, low.seed, low.max_tokens) == (0.0, 0.5, -7, 9)
    assert "thinking_effort=low`." in byte_tokenizer.decode(low.prompt_ids)
    assert byte_tokenizer.decode(off.prompt_ids).endswith("<|open|>response<|sep|>")


@pytest.mark.asyncio
async def test_length_is_told(start: Start) -> None:
    """An answer cut inside the reasoning has empty content and says length."""
    async with start("thinking", LENGTH) as endpoint:
        choice = (await endpoint.chat(max_tokens=8)).json()["choices"][0]

    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning_content"] == "thinking"


@pytest.mark.asyncio
async def test_a2_stream_equals_plain(start: Start) -> None:
    """A2: characters split over tokens arrive whole; the deltas add up to the plain answer."""
    text = "👩🏽‍🚀漢字é"
    async with start(f"{ANSWER}{text}", STOP) as endpoint:
        plain = (await endpoint.chat()).json()["choices"][0]["message"]
        streamed = await endpoint.chat(stream=True)

    parts = chunks(streamed.text)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert (text, text) == (plain["content"], joined(parts, "content"))
    assert joined(parts, "reasoning_content") == plain["reasoning_content"] == "why"
    assert "\ufffd" not in streamed.text
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert parts[-1] == "[DONE]"
    assert parts[-2]["choices"][0]["finish_reason"] == "stop"
    assert parts[-2]["k3"] == {"cold_rows": 3}


@pytest.mark.asyncio
async def test_a2_invalid_bytes_come_at_the_end(start: Start, byte_tokenizer: Tokenizer) -> None:
    """A2: half a character at the end of the answer is shown as U+FFFD in the last delta."""
    half = byte_tokenizer.encode_text("漢")[0]
    async with start(f"{ANSWER}ab", Token(half), LENGTH) as endpoint:
        parts = chunks((await endpoint.chat(stream=True)).text)

    assert joined(parts, "content") == "ab\ufffd"


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("alpha beta gamma delta", ["beta gamma"], "alpha "),
        ("one line\n", "\n", "one line"),
        ("xabcdef", ["abcd", "bc"], "xa"),
        ("no stop here, be", ["beta"], "no stop here, be"),
    ],
)
@pytest.mark.asyncio
async def test_a4_stop_strings_cut_exactly(
    start: Start, text: str, stop: str | list[str], expected: str
) -> None:
    """A4: over token borders, as the last token, overlapping, never: streaming equals plain."""
    async with start(f"{ANSWER}{text}", STOP) as endpoint:
        plain = (await endpoint.chat(stop=stop)).json()["choices"][0]
        parts = chunks((await endpoint.chat(stop=stop, stream=True)).text)

    assert plain["message"]["content"] == joined(parts, "content") == expected
    assert plain["finish_reason"] == parts[-2]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.asyncio
async def test_a4_stop_string_ends_the_generation(start: Start) -> None:
    """A4: the pod is not asked for one token more, and reasoning is not searched."""
    async with start("stop<|close|>think<|sep|>a stop b", 1, STOP) as endpoint:
        answer = (await endpoint.chat(stop=["stop"])).json()

    assert answer["choices"][0]["message"]["content"] == "a "
    assert endpoint.backend.produced == len("stop") + 1 + len("think") + 1 + len("a stop")
    assert endpoint.backend.closed.is_set()
    assert "k3" not in answer  # cut before the pod's own end: its counts are not known


@pytest.mark.asyncio
async def test_a6_usage_only_when_asked(start: Start) -> None:
    """A6: include_usage true gives one last chunk without choices; otherwise no usage anywhere."""
    async with start(f"{ANSWER}a", STOP) as endpoint:
        answers = [
            chunks((await endpoint.chat(stream=True, stream_options=options)).text)[:-1]
            for options in ({"include_usage": True}, {"include_usage": False}, None, ...)
        ]

    asked, *others = answers
    assert asked[-1]["choices"] == []
    assert asked[-1]["usage"]["completion_tokens"] == endpoint.backend.produced // 4
    assert {part["usage"] for part in asked[:-1]} == {None}
    for parts in others:
        assert all("usage" not in part and part["choices"] for part in parts)


@pytest.mark.asyncio
async def test_a8_two_system_messages_and_parts(start: Start, byte_tokenizer: Tokenizer) -> None:
    """A8: several system messages, the developer role and text parts are all fine."""
    messages = [
        {"role": "system", "content": "S1"},
        {"role": "developer", "content": [{"type": "text", "text": "S2"}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "reasoning_content": "r"},
        {"role": "user", "content": "c"},
    ]
    async with start(STOP) as endpoint:
        answer = await endpoint.chat(messages=messages, unknown_field={"x": 1})

    prompt = byte_tokenizer.decode(endpoint.backend.requests[0].prompt_ids)
    assert answer.status_code == 200
    assert 'role="system"<|sep|>S1<|close|>' in prompt
    assert 'role="system"<|sep|>S2<|close|>' in prompt
    assert 'role="user"<|sep|>ab<|close|>' in prompt
    assert "<|open|>think<|sep|>r<|close|>" in prompt


CALL = (
    f"{ANSWER}text<|close|>response<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="get" index="1"<|sep|>'
    '<|open|>argument key="n" type="number"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|>'
    '<|open|>call tool="put" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>after'
)


@pytest.mark.asyncio
async def test_a10_tool_calls_round_trip(start: Start, byte_tokenizer: Tokenizer) -> None:
    """A10: calls get ids that count over the conversation; any id spelling comes back accepted."""
    spellings = ["functions.x:0", "functions_x_0", "call_abc", "call00003"]
    call = [
        {"id": spelling, "type": "function", "function": {"name": "get", "arguments": '{"n":1}'}}
        for spelling in spellings
    ]
    results = [
        {"role": "tool", "tool_call_id": spelling, "content": f"r{place}"}
        for place, spelling in reversed(list(enumerate(spellings)))
    ]
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": call},
        *results,
    ]
    async with start(CALL, STOP) as endpoint:
        choice = (await endpoint.chat(messages=messages)).json()["choices"][0]

    prompt = byte_tokenizer.decode(endpoint.backend.requests[0].prompt_ids)
    assert [prompt.index(f"<|sep|>r{place}<|close|>") for place in range(4)] == sorted(
        prompt.index(f"<|sep|>r{place}<|close|>") for place in range(4)
    )
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "text"
    assert choice["message"]["tool_calls"] == [
        {"id": "get:4", "type": "function", "function": {"name": "get", "arguments": '{"n":1}'}},
        {"id": "put:5", "type": "function", "function": {"name": "put", "arguments": "{}"}},
    ]


@pytest.mark.asyncio
async def test_a12_no_content_after_a_tool_delta(start: Start) -> None:
    """A12: in a stream nothing but tool deltas follows the first one, and no markup leaks."""
    async with start(CALL, STOP) as endpoint:
        parts = chunks((await endpoint.chat(stream=True)).text)[:-1]

    deltas = [part["choices"][0]["delta"] for part in parts]
    first = next(place for place, delta in enumerate(deltas) if "tool_calls" in delta)
    assert joined(parts, "content") == "text"
    assert [set(delta) for delta in deltas[first:]] == [{"tool_calls"}, {"tool_calls"}, set()]
    assert [d["tool_calls"][0]["index"] for d in deltas[first : first + 2]] == [0, 1]
    assert parts[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.asyncio
async def test_official_client_plain_and_stream(start: Start) -> None:
    """The openai package reads answer, reasoning, usage and model list."""
    messages: Any = [{"role": "user", "content": "Hi"}]
    async with start(f"{ANSWER}hello", STOP) as endpoint, client_of(endpoint) as client:
        plain = await client.chat.completions.create(model="k3-demo", messages=messages, seed=1)
        stream = await client.chat.completions.create(
            model="k3-demo", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        parts = [chunk async for chunk in stream]
        models = await client.models.list()

    message: Any = plain.choices[0].message
    assert (message.content, message.reasoning_content) == ("hello", "why")
    assert plain.usage is not None
    assert plain.usage.total_tokens == plain.usage.prompt_tokens + endpoint.backend.produced // 2
    deltas: list[Any] = [c.delta for part in parts for c in part.choices]
    assert "".join(delta.content or "" for delta in deltas) == "hello"
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "why"
    assert parts[-1].usage is not None
    assert [model.id for model in models.data] == ["k3-demo"]


@pytest.mark.asyncio
async def test_probes_status_and_metrics(start: Start) -> None:
    """Probes follow the backend; status is its JSON; metrics are Prometheus text."""
    async with start(f"{ANSWER}a", STOP) as endpoint:
        get = endpoint.client.get
        assert (await get("/livez")).json() == {"ok": True, "reason": "idle"}
        assert (await get("/readyz")).status_code == 200
        endpoint.backend.ready = endpoint.backend.alive = False
        assert (await get("/livez")).status_code == 503
        unready = await get("/readyz")
        await endpoint.chat()
        status, metrics = await get("/k3/status"), await get("/metrics")

    assert (unready.status_code, unready.json()["reason"]) == (503, "waiting for spark-1")
    assert status.json() == {"nodes": [{"name": "spark-0", "epoch": 3}]}
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert '# TYPE k3_rows_total counter\nk3_rows_total{node="a\\"b"} 5\n' in metrics.text
    assert 'k3_http_requests_total{status="200"} 1\n' in metrics.text
    assert "k3_http_active_requests 0\n" in metrics.text


@pytest.mark.asyncio
async def test_one_log_line_per_request(start: Start) -> None:
    """The request's id, outcome and token counts are in exactly one line."""
    async with start(f"{ANSWER}a", STOP) as endpoint:
        await endpoint.chat()

    assert len(endpoint.log.entries) == 1
    entry = endpoint.log.entries[0]
    assert (entry["event"], entry["request"], entry["outcome"]) == (
        "request",
        "chatcmpl-t1",
        "stop",
    )
    assert entry["completion_tokens"] == endpoint.backend.produced


def test_z6_everything_works_under_uvloop(start: Start) -> None:
    """Z6: plain, stream and cancel behave the same on the loop that production uses."""

    async def scenario() -> None:
        async with start(f"{ANSWER}hello", STOP) as endpoint:
            plain = (await endpoint.chat()).json()["choices"][0]["message"]["content"]
            parts = chunks((await endpoint.chat(stream=True)).text)
            assert plain == joined(parts, "content") == "hello"
        async with start(ANSWER, 5) as endpoint:
            async with endpoint.client.stream(
                "POST",
                "/v1/chat/completions",
                json={
                    "model": "k3-demo",
                    "messages": [{"role": "user", "content": "Hi"}],
                    "stream": True,
                },
            ) as stream:
                await anext(stream.aiter_lines())
            async with asyncio.timeout(2):
                await endpoint.backend.closed.wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
