"""`k3 chat` against the Station's real endpoint."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from services import cli
from services.chat.client import Asking, answer
from services.chat.session import Session, converse
from services.pod.endpoint import PodRefused, PodUnreachable, base_url, open_client
from shared.core.errors import ConfigError, NodeLost, RequestRefused
from tests.unit.http.endpoint import ANSWER, LENGTH, STOP, Endpoint, Start

CLOSE = "<|close|>response<|sep|>"
Capture = pytest.CaptureFixture[str]


async def k3(endpoint: Endpoint, *arguments: str) -> int:
    """`k3 chat ARGUMENTS` against the endpoint, in a thread of its own."""
    return await asyncio.to_thread(cli.run, ["chat", "--url", endpoint.url, *arguments])


def talk(endpoint: Endpoint, lines: list[str], session: Session) -> list[str]:
    """A conversation of typed lines; what was complained about."""
    complaints: list[str] = []
    typed = iter(lines)

    def read(_prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    converse(session, read, complaints.append)
    return complaints


def new_session(url: str, out: io.StringIO, *, system: str | None = None) -> Session:
    """A session with an open client."""
    asking = Asking(model="k3-demo", temperature=0, max_tokens=50, effort=None, seed=None)
    return Session(open_client(url, None), asking, system, out, None)


@pytest.mark.asyncio
async def test_once_prints_the_answer_and_nothing_else(start: Start, capsys: Capture) -> None:
    """A script can use stdout as it is; decoding is greedy unless asked otherwise."""
    async with start(ANSWER + "82,432 experts." + CLOSE, STOP) as endpoint:
        status = await k3(endpoint, "--once", "How many?")

        assert status == 0
        assert endpoint.backend.requests[0].temperature == 0
    assert capsys.readouterr() == ("82,432 experts.\n", "")


@pytest.mark.asyncio
async def test_the_thinking_is_shown_on_request(start: Start, capsys: Capture) -> None:
    """On stderr, so that stdout stays the answer."""
    async with start(ANSWER + "Yes" + CLOSE, STOP) as endpoint:
        assert await k3(endpoint, "--once", "Hm?", "--show-reasoning") == 0
    assert capsys.readouterr() == ("Yes\n", "why\n")


@pytest.mark.asyncio
async def test_json_is_one_object(start: Start, capsys: Capture) -> None:
    """Answer, thinking, end, usage and the pod's remarks."""
    async with start(ANSWER + "Yes" + CLOSE, STOP) as endpoint:
        assert await k3(endpoint, "--once", "Hm?", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    usage = shown.pop("usage")
    assert shown == {
        "content": "Yes",
        "reasoning": "why",
        "finish_reason": "stop",
        "k3": {"cold_rows": 3},
    }
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.asyncio
async def test_options_reach_the_pod(start: Start, byte_tokenizer) -> None:
    """Temperature, length, seed, effort and the system message."""
    async with start(ANSWER + "Yes" + CLOSE, STOP) as endpoint:
        options = ["--temperature", "0.5", "--max-tokens", "7", "--seed", "11", "--effort", "low"]
        await k3(endpoint, "--once", "Hm?", "--system", "Be brief.", *options)

        request = endpoint.backend.requests[0]
    assert (request.temperature, request.max_tokens, request.seed) == (0.5, 7, 11)
    prompt = byte_tokenizer.decode(list(request.prompt_ids))
    assert "Be brief." in prompt
    assert "thinking_effort=low" in prompt


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("script", "status", "complaint"),
    [
        ((ANSWER + "half", LENGTH), 0, "cut at its token limit"),
        (("only thinking", LENGTH), 1, "cut at its token limit"),
        ((ANSWER + CLOSE, STOP), 1, "gave no answer text"),
    ],
)
async def test_an_odd_answer_is_remarked(
    start: Start, capsys: Capture, script: tuple[object, ...], status: int, complaint: str
) -> None:
    """A cut or empty answer is said on stderr; without any answer the status is 1."""
    async with start(*script) as endpoint:
        assert await k3(endpoint, "--once", "Hm?") == status
    assert complaint in capsys.readouterr().err


@pytest.mark.asyncio
async def test_a_lost_node_ends_the_answer_with_its_name(start: Start, capsys: Capture) -> None:
    """The pod's own error in the middle of a stream: status 1, one line, the culprit in it."""
    lost = NodeLost("its connection closed", node="spark1", layer=7, experts=[3], elapsed_us=900)
    async with start(ANSWER + "Ye", lost) as endpoint:
        assert await k3(endpoint, "--once", "Hm?") == 1
    error = capsys.readouterr().err
    assert "k3: error[pod_refused]" in error
    assert "node spark1, layer 7, experts [3], after 900 us" in error
    assert "(node_lost)" in error


@pytest.mark.asyncio
async def test_a_refusal_is_the_pods_own_words(start: Start, capsys: Capture) -> None:
    """Before the first byte of a stream: a full pod, and a missing token."""
    async with start(RequestRefused("the pod is full", retry_after_s=2)) as endpoint:
        assert await k3(endpoint, "--once", "Hm?") == 1
        assert "answers 503 (overloaded): the pod is full" in capsys.readouterr().err
    async with start(STOP, token="secret") as endpoint:
        assert await k3(endpoint, "--once", "Hm?", "--token", "wrong") == 1
        assert "answers 401 (invalid_api_key)" in capsys.readouterr().err


@pytest.mark.asyncio
async def test_a_conversation_is_remembered_until_reset(start: Start, byte_tokenizer) -> None:
    """Each turn sends the earlier ones, thinking included; /reset forgets all but the system."""
    async with start(ANSWER + "Sure." + CLOSE, STOP) as endpoint:
        out = io.StringIO()
        session = new_session(endpoint.url, out, system="Be kind.")
        lines = ["First", "", "Second", "/help", "/reset", "Third", "/exit", "never"]

        complaints = await asyncio.to_thread(talk, endpoint, lines, session)

        prompts = [byte_tokenizer.decode(list(r.prompt_ids)) for r in endpoint.backend.requests]
    assert out.getvalue() == "Sure.\n" * 3
    assert len(complaints) == 2
    assert ["First" in p for p in prompts] == [True, True, False]
    assert ["Sure." in p for p in prompts] == [False, True, False]
    assert "why" in prompts[1]
    assert all("Be kind." in p for p in prompts)
    assert "Third" in prompts[2]
    session.client.close()


@pytest.mark.asyncio
async def test_a_failed_turn_can_be_asked_again(start: Start) -> None:
    """The error is said, the talk goes on, and the turn left no trace."""
    async with start(RequestRefused("the pod is full", retry_after_s=2)) as endpoint:
        session = new_session(endpoint.url, io.StringIO())

        complaints = await asyncio.to_thread(talk, endpoint, ["One", "Two"], session)

        assert len(endpoint.backend.requests) == 2
    assert [text.count("the pod is full") for text in complaints] == [1, 1]
    assert session.messages == []
    session.client.close()


class Interrupting(io.StringIO):
    """A terminal whose user presses Ctrl-C at the first text."""

    def write(self, text: str) -> int:
        raise KeyboardInterrupt


@pytest.mark.asyncio
async def test_ctrl_c_ends_the_answer_at_the_pod_too(start: Start) -> None:
    """The stream is closed at once, so the pod stops working on it; the talk goes on."""
    async with start(ANSWER, 5) as endpoint:
        session = new_session(endpoint.url, Interrupting())

        complaints = await asyncio.to_thread(talk, endpoint, ["Go on for ever"], session)

        async with asyncio.timeout(5):
            await endpoint.backend.closed.wait()
    assert "stopped" in complaints[0]
    assert session.messages == []
    session.client.close()


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.asyncio
async def test_a_model_cannot_steer_the_terminal(start: Start) -> None:
    """Escape sequences of an answer are not passed on; newlines and tabs are."""
    async with start(ANSWER + "a\x1b]0;title\x07\tb\r\nc" + CLOSE, STOP) as endpoint:
        out = Terminal()
        session = new_session(endpoint.url, out)
        await asyncio.to_thread(session.ask, "Hm?")
    assert out.getvalue() == "a]0;title\tb\nc\n"
    session.client.close()


@contextmanager
def server(answer_bytes: bytes) -> Iterator[str]:
    """A server that answers every connection with the same bytes and closes it."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(5)

    def serve() -> None:
        with listener:
            try:
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.settimeout(5)
                        connection.recv(65_536)
                        connection.sendall(answer_bytes)
                        connection.shutdown(socket.SHUT_WR)
                        # closing over unread bytes would reset the answer away
                        while connection.recv(65_536):
                            pass
            except OSError:
                return

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n"


@pytest.mark.parametrize(
    ("raw", "error", "text"),
    [
        (SSE + b"\r\n", PodRefused, "cut off before its end"),
        (SSE + b"\r\ndata: {bad\n\n", PodRefused, "not understood"),
        (SSE + b"\r\ndata: [1]\n\n", PodRefused, "not understood"),
        (SSE + b"content-length: 100\r\n\r\ndata: {}\n\n", PodUnreachable, "broke"),
        (b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\n\r\n<p>", PodRefused, "with a stream"),
        (b"HTTP/1.1 502 Bad\r\nconnection: close\r\n\r\n<p>proxy", PodRefused, "502: <p>proxy"),
        (
            b"HTTP/1.1 502 Bad\r\nconnection: close\r\n\r\n<p>\n\x1b[31m",
            PodRefused,
            r"502: <p> \[31m",
        ),
        (b"nonsense\r\n\r\n", PodUnreachable, "broke"),
        (b"", PodUnreachable, "broke"),
    ],
)
def test_whatever_answers_is_one_clear_error(raw: bytes, error: type[Exception], text: str) -> None:
    """Not a pod, a dying pod, a proxy in between."""
    asking = Asking(model="m", temperature=0, max_tokens=1, effort=None, seed=None)
    with server(raw) as url, open_client(url, None) as client, pytest.raises(error, match=text):
        list(answer(client, asking, []))


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:8380", "ftp://h", "http://", "http://h/v2", "http://h/v1?x=1", "http://[::1"],
)
def test_a_bad_address_is_refused(url: str) -> None:
    """With the form that is wanted; nothing is sent."""
    with pytest.raises(ConfigError):
        base_url(url)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_the_printed_address_can_be_pasted(url: str) -> None:
    """`k3 up` prints the address with /v1, as OpenAI clients want it."""
    assert base_url(url) == "http://h:1"


def test_a_proxy_of_the_environment_is_not_asked_for_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """http_proxy in a shell must not break the embedded pod."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with server(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok") as url:
        with open_client(url, None) as client:
            assert client.get("/").text == "ok"
        assert isinstance(client, httpx.Client)


@pytest.mark.parametrize("proxy", ["frog://x", "socks5://x"])
def test_a_proxy_that_cannot_be_used_is_refused(
    proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment is what a person has to change; nothing is sent."""
    monkeypatch.setenv("all_proxy", proxy)

    with pytest.raises(ConfigError, match="proxy settings of the environment"):
        open_client("http://pod.invalid", None)


@pytest.mark.parametrize("token", ["a\nb", "caf\u00e9"])
def test_a_token_that_no_header_holds_is_refused(token: str) -> None:
    """And is not repeated in the error: it is a secret."""
    with pytest.raises(ConfigError, match="the token has characters") as caught:
        open_client("http://127.0.0.1:1", token)
    assert token not in str(caught.value)
