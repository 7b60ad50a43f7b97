"""Bad requests: one clear error each, in OpenAI's shape, with the right status."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from shared.core.errors import NodeLost, RequestRefused
from station.http.limits import EndpointLimits
from tests.unit.http.endpoint import ANSWER, STOP, Endpoint, Start

pytestmark = pytest.mark.asyncio

GOOD = {"model": "k3-demo", "messages": [{"role": "user", "content": "Hi"}]}


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object; fails when the shape is not OpenAI's."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    return body["error"]


async def post(endpoint: Endpoint, content: bytes, **headers: str) -> httpx.Response:
    """POST raw bytes as JSON; `headers` over that."""
    sent = {"content-type": "application/json"} | {
        k.replace("_", "-"): v for k, v in headers.items()
    }
    return await endpoint.client.post("/v1/chat/completions", content=content, headers=sent)


async def status_line(endpoint: Endpoint, request: bytes) -> bytes:
    """Write raw bytes; the first line that comes back, within two seconds."""
    host, port = endpoint.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    async with asyncio.timeout(2):
        status = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return status


HEAD = json.dumps(GOOD).encode()[:-1]
NO_REQUESTS = {
    "empty": (b"", "invalid_json"),
    "cut": (b"{", "invalid_json"),
    "array": (b"[]", "invalid_type"),
    "null": (b"null", "invalid_type"),
    "nan": (HEAD + b',"temperature":NaN}', "invalid_json"),
    "infinity": (HEAD + b',"temperature":Infinity}', "invalid_json"),
    "overflow": (HEAD + b',"temperature":1e999}', "invalid_type"),
    "duplicate key": (HEAD + b',"model":"k3-demo"}', "duplicate_key"),
    "duplicate key inside": (HEAD + b',"x":{"a":1,"a":2}}', "duplicate_key"),
    "not UTF-8": (HEAD + b',"user":"\xff"}', "invalid_json"),
    "lone surrogate": (HEAD + b',"user":"\\ud800"}', "invalid_json"),
    "5000 digits": (HEAD + b',"x":' + b"9" * 5000 + b"}", "invalid_json"),
    "something after": (HEAD + b"}x", "invalid_json"),
    "byte order mark": (b"\xef\xbb\xbf" + HEAD + b"}", "invalid_json"),
    "too deep": (HEAD + b',"x":' + b"[" * 100_000, "invalid_json"),
}


async def test_a9_bodies_that_are_no_request(start: Start) -> None:
    """A9: empty, cut, array, NaN, Infinity, duplicate keys, bad UTF-8, too deep: 400 each."""
    async with start(STOP) as endpoint:
        answers = {name: await post(endpoint, body) for name, (body, _) in NO_REQUESTS.items()}

    got = {name: (a.status_code, error_of(a)["code"]) for name, a in answers.items()}
    assert got == {name: (400, code) for name, (_, code) in NO_REQUESTS.items()}
    assert endpoint.backend.requests == []


async def test_a9_wrong_media_type(start: Start) -> None:
    """A9: wrong content type and compression are 415; parameters of the right one are fine."""
    body = json.dumps(GOOD).encode()
    async with start(STOP) as endpoint:
        refused = [
            await post(endpoint, body, content_type="text/plain"),
            await post(endpoint, body, content_type="application/x-www-form-urlencoded"),
            await post(endpoint, body, content_type=""),
            await post(endpoint, body, content_encoding="gzip"),
        ]
        fine = await post(
            endpoint,
            body,
            content_type="application/json; charset=utf-8",
            content_encoding="identity",
        )

    assert {(r.status_code, error_of(r)["code"]) for r in refused} == {
        (415, "unsupported_media_type")
    }
    assert fine.status_code == 200


async def test_a9_body_of_11_mb(start: Start) -> None:
    """A9: 11 MB are 413, with a declared length and chunked; the server goes on serving."""
    big = json.dumps({**GOOD, "user": "x" * 11_000_000}).encode()

    async def parts() -> Any:
        for offset in range(0, len(big), 100_000):
            yield big[offset : offset + 100_000]

    async with start(STOP) as endpoint:
        declared = await post(endpoint, big)
        chunked = await endpoint.client.post(
            "/v1/chat/completions", content=parts(), headers={"content-type": "application/json"}
        )
        after = await endpoint.chat()

    assert [declared.status_code, chunked.status_code, after.status_code] == [413, 413, 200]
    assert error_of(declared)["code"] == error_of(chunked)["code"] == "request_too_large"


async def test_a9_large_declared_length_is_refused_unread(start: Start) -> None:
    """A9: a client that asks first (Expect) is refused before it sends a byte of body."""
    async with start(STOP) as endpoint:
        status = await status_line(
            endpoint,
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 99999999999\r\nExpect: 100-continue\r\n\r\n",
        )

    assert b" 413 " in status


async def test_both_framings_are_refused(start: Start) -> None:
    """A request with Content-Length and Transfer-Encoding could be read in two ways."""
    body = json.dumps(GOOD).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n"
    )
    chunk = b"\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    async with start(STOP) as endpoint:
        alone = await status_line(endpoint, head + chunk)
        both = await status_line(endpoint, head + b"Content-Length: 5\r\n" + chunk)

    assert b" 200 " in alone
    assert b" 400 " in both


async def test_slow_body_is_cut_off(start: Start) -> None:
    """A body that never ends is answered 408 within the limit."""
    async with start(STOP, limits=EndpointLimits(body_s=0.1)) as endpoint:
        status = await status_line(
            endpoint,
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{",
        )

    assert b" 408 " in status


BAD_FIELDS = [
    ("max_tokens", 0, "max_tokens", "invalid_value"),
    ("max_tokens", -1, "max_tokens", "invalid_value"),
    ("max_tokens", 1_000_000_000, "max_tokens", "context_length_exceeded"),
    ("max_tokens", 1e9, "max_tokens", "invalid_type"),
    ("max_tokens", "5", "max_tokens", "invalid_type"),
    ("max_tokens", True, "max_tokens", "invalid_type"),
    ("max_completion_tokens", 0, "max_completion_tokens", "invalid_value"),
    ("n", 2, "n", "invalid_value"),
    ("n", 0, "n", "invalid_value"),
    ("temperature", -0.1, "temperature", "invalid_type"),
    ("temperature", 2.1, "temperature", "invalid_type"),
    ("top_p", 1.5, "top_p", "invalid_type"),
    ("seed", 2**63, "seed", "invalid_type"),
    ("seed", 1.5, "seed", "invalid_type"),
    ("stream", "yes", "stream", "invalid_type"),
    ("stop", ["a"] * 5, "stop", "invalid_value"),
    ("stop", "", "stop", "invalid_value"),
    ("stop", [1], "stop[0]", "invalid_type"),
    ("reasoning_effort", "medium", "reasoning_effort", "invalid_value"),
    ("tool_choice", {"type": "function"}, "tool_choice", "invalid_value"),
    ("logprobs", True, "logprobs", "unsupported_parameter"),
    ("model", ..., "model", "invalid_type"),
    ("messages", [], "messages", "invalid_type"),
    ("messages", ..., "messages", "invalid_type"),
    ("messages", [{"content": "x"}], "messages[0].role", "invalid_type"),
    ("messages", [{"role": "bot"}], "messages[0].role", "invalid_value"),
    (
        "messages",
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        "messages[0].content[0]",
        "invalid_value",
    ),
    ("messages", [GOOD["messages"][0]] * 5000, "messages", "invalid_value"),
    (
        "messages",
        [{"role": "user", "content": "x" * 3000}],
        "messages",
        "context_length_exceeded",
    ),
]


async def test_a6_a8_field_errors_name_the_field(start: Start) -> None:
    """A6, A8: a field of a wrong type or value is 400 and the error names it."""
    async with start(STOP) as endpoint:
        answers = [await endpoint.chat(**{field: value}) for field, value, _, _ in BAD_FIELDS]

    errors = [error_of(answer) for answer in answers]
    assert [(error["param"], error["code"]) for error in errors] == [
        (param, code) for _, _, param, code in BAD_FIELDS
    ]
    assert {answer.status_code for answer in answers} == {400}
    assert {error["type"] for error in errors} == {"invalid_request_error"}
    assert endpoint.backend.requests == []


async def test_a6_null_is_the_default_and_max_completion_tokens_wins(start: Start) -> None:
    """A6: null means absent; of the two spellings the newer decides."""
    async with start(STOP) as endpoint:
        await endpoint.chat(max_tokens=None, temperature=None, stop=None, n=None, stream=None)
        await endpoint.chat(max_tokens=5, max_completion_tokens=7)
        await endpoint.chat(max_tokens=0, max_completion_tokens=7)

    left = endpoint.backend.context_length - len(endpoint.backend.requests[0].prompt_ids)
    assert [request.max_tokens for request in endpoint.backend.requests] == [left, 7, 7]


async def test_a8_unknown_model_and_paths(start: Start) -> None:
    """A8: unknown model, unknown path and wrong method come in the same shape."""
    async with start(STOP) as endpoint:
        model = await endpoint.chat(model="gpt-4")
        path = await endpoint.client.get("/v2/nothing")
        method = await endpoint.client.get("/v1/chat/completions")

    assert (model.status_code, error_of(model)["code"]) == (404, "model_not_found")
    assert error_of(model)["param"] == "model"
    assert (path.status_code, error_of(path)["code"]) == (404, "not_found")
    assert (method.status_code, error_of(method)["code"]) == (405, "method_not_allowed")
    assert "POST" in method.headers["allow"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a14_full_queue_is_503_before_any_header(start: Start, stream: bool) -> None:
    """A14: a refusal of the pod is a plain 503 with Retry-After, also for a stream."""
    refusal = RequestRefused("the queue holds 8 requests; try again later", retry_after_s=7)
    async with start(refusal) as endpoint:
        response = await endpoint.chat(stream=stream)

    assert response.status_code == 503
    assert response.headers["retry-after"] == "7"
    assert error_of(response)["type"] == "overloaded"


async def test_a14_too_many_requests_at_once(start: Start) -> None:
    """A14: the endpoint's own cap refuses at once and lets go when a request ends."""
    gate = asyncio.Event()
    async with start(gate, STOP, limits=EndpointLimits(concurrent_max=1)) as endpoint:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(endpoint.chat())
            await endpoint.backend.until_active(1)
            second = await endpoint.chat()
            gate.set()
        third = await endpoint.chat()

    statuses = [first.result().status_code, second.status_code, third.status_code]
    assert statuses == [200, 503, 200]
    assert second.headers["retry-after"] == "1"


LOST = NodeLost("spark-3 went away", node="spark-3", layer=45, experts=[7, 9], elapsed_us=1234)


@pytest.mark.parametrize("stream", [True, False])
async def test_failed_layer_before_the_first_token(start: Start, stream: bool) -> None:
    """The typed error names node, layer, experts and microseconds, under its own status."""
    async with start(LOST) as endpoint:
        response = await endpoint.chat(stream=stream)

    error = error_of(response)
    assert (response.status_code, error["code"]) == (503, "node_lost")
    for culprit in ("spark-3", "layer 45", "[7, 9]", "1234 us"):
        assert culprit in error["message"]


async def test_nothing_follows_an_error_in_a_stream(start: Start) -> None:
    """The error is the last event: no finish reason, no [DONE]."""
    async with start(f"{ANSWER}partial", LOST) as endpoint:
        response = await endpoint.chat(stream=True)

    events = [part.removeprefix("data: ") for part in response.text.split("\n\n") if part]
    assert json.loads(events[-1])["error"]["code"] == "node_lost"
    assert "[DONE]" not in response.text
    assert '"finish_reason":"stop"' not in response.text


async def test_stalled_pod_ends_the_request(start: Start) -> None:
    """Every wait is bounded: a pod that makes no token gets its request closed and named."""
    async with start(asyncio.Event(), limits=EndpointLimits(event_s=0.05)) as endpoint:
        response = await endpoint.chat()

    assert (response.status_code, error_of(response)["code"]) == (504, "generation_stalled")
    assert endpoint.backend.closed.is_set()


async def test_a_bug_shows_no_trace(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """An unexpected exception is a 500 in the same shape; the trace is in the log only."""
    async with start(ZeroDivisionError("secret detail")) as endpoint:
        response = await endpoint.chat()

    assert response.status_code == 500
    assert error_of(response)["type"] == "internal_error"
    assert "secret" not in response.text
    assert "secret detail" in caplog.text


async def test_token_guards_all_but_the_probes(start: Start) -> None:
    """With a token configured only probes are open; a wrong or missing token is 401."""
    async with start(STOP, token="s3cret") as endpoint:
        missing = await endpoint.chat()
        wrong = await endpoint.client.get("/k3/status", headers={"authorization": "Bearer s3cre"})
        right = await endpoint.client.get("/metrics", headers={"authorization": "Bearer s3cret"})
        probe = await endpoint.client.get("/readyz")

    assert [r.status_code for r in (missing, wrong, right, probe)] == [401, 401, 200, 200]
    assert error_of(missing)["code"] == "invalid_api_key"
    assert missing.headers["www-authenticate"] == "Bearer"
    assert endpoint.backend.requests == []


async def test_official_client_maps_our_errors(start: Start) -> None:
    """The openai package raises its own class for each status, and for an error in a stream."""
    messages: Any = [{"role": "user", "content": "Hi"}]
    async with (
        start(f"{ANSWER}partial", LOST) as endpoint,
        openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key="none", max_retries=0) as client,
    ):
        create = client.chat.completions.create
        with pytest.raises(openai.NotFoundError, match="unknown model 'x'"):
            await create(model="x", messages=messages)
        with pytest.raises(openai.BadRequestError, match="only n=1") as bad:
            await create(model="k3-demo", messages=messages, n=2)
        with pytest.raises(openai.InternalServerError, match="spark-3"):
            await create(model="k3-demo", messages=messages)
        stream = await create(model="k3-demo", messages=messages, stream=True)
        with pytest.raises(openai.APIError, match="spark-3"):
            async for _ in stream:
                pass

    assert bad.value.param == "n"
