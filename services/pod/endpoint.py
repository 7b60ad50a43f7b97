"""How the operator's tools reach a pod over HTTP: its address, its token, its errors.

Owns the mapping from transport failures to one clear error. Must not know what is asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Final
from urllib.parse import urlsplit

import click
import httpx
import msgspec

from shared.core.errors import ConfigError, MeshError

DEFAULT_URL: Final = "http://127.0.0.1:8380"
_CONNECT_S: Final = 5.0
_IDLE_S: Final = 120.0  # between two pieces of an answer; a long prefill is silent

url_option = click.option(
    "--url",
    default=DEFAULT_URL,
    show_default=True,
    envvar="K3_URL",
    help="Address of the pod's endpoint, with or without /v1. [env: K3_URL]",
)
token_option = click.option(
    "--token",
    envvar="K3_TOKEN",
    help="Bearer token, where the Station asks for one. Better given as K3_TOKEN. [env: K3_TOKEN]",
)


class PodUnreachable(MeshError):
    """No pod answers at the address."""

    code = "pod_unreachable"


class PodRefused(MeshError):
    """The pod answered with an error."""

    code = "pod_refused"


def base_url(url: str) -> str:
    """`url` without path; ConfigError when it is no http address."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"address {url!r}: {error}; write http://HOST:PORT") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ConfigError(f"address {url!r} is not understood: write http://HOST:PORT")
    if parts.path.strip("/") not in ("", "v1"):
        raise ConfigError(f"address {url!r}: leave out the path {parts.path!r}")
    return f"{parts.scheme}://{parts.netloc}"


def open_client(url: str, token: str | None, *, idle_s: float = _IDLE_S) -> httpx.Client:
    """A client for the pod at `url`; proxies of the environment are not asked for loopback."""
    if token and not (token.isascii() and token.isprintable()):
        raise ConfigError("the token has characters no HTTP header may hold: copy it again")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    base = base_url(url)
    is_loopback = urlsplit(base).hostname in ("127.0.0.1", "localhost", "::1")
    try:
        return httpx.Client(
            base_url=base,
            headers=headers,
            timeout=httpx.Timeout(idle_s, connect=_CONNECT_S),
            trust_env=not is_loopback,
        )
    except (ValueError, ImportError) as error:  # a kind of proxy that httpx does not know
        raise ConfigError(
            f"the proxy settings of the environment cannot be used: {error}; unset them or set "
            "NO_PROXY"
        ) from error


@contextlib.contextmanager
def transport_errors(url: str) -> Iterator[None]:
    """Turn what can go wrong on the way into PodUnreachable with a remedy."""
    try:
        yield
    except httpx.ConnectError as error:
        raise PodUnreachable(
            f"no pod answers at {url}: start one with `k3 up`, or name another with --url"
        ) from error
    except httpx.TimeoutException as error:
        raise PodUnreachable(
            f"the pod at {url} does not answer in time: look at `k3 status` and its logs"
        ) from error
    except httpx.InvalidURL as error:
        raise ConfigError(f"address {url!r} is not understood: write http://HOST:PORT") from error
    except httpx.TransportError as error:
        raise PodUnreachable(
            f"the connection to {url} broke ({error}): is it a pod, and does it still run?"
        ) from error


def check_answer(response: httpx.Response) -> None:
    """Raise PodRefused with the pod's own words unless the answer is a success."""
    if response.is_success:
        return
    message, code = _error_of(response.read())
    where = f"the pod answers {response.status_code}"
    raise PodRefused(f"{where} ({code}): {message}" if code else f"{where}: {message}")


def error_message(body: Mapping[str, object]) -> str | None:
    """Message of an OpenAI error object with its type, or None when there is no error in `body`."""
    error = body.get("error")
    if not isinstance(error, dict):
        return None
    return f"{error.get('message', 'no message')} ({error.get('code') or error.get('type')})"


def _error_of(body: bytes) -> tuple[str, str | None]:
    try:
        answer = msgspec.json.decode(body, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError):
        # some proxy's page: one line of it, and nothing that steers a terminal
        text = body[:200].decode("utf-8", "replace")
        plain = "".join(letter if letter.isprintable() else " " for letter in text)
        return " ".join(plain.split()) or "no reason given", None
    error = answer.get("error")
    if not isinstance(error, dict):
        return str(answer.get("reason", "no reason given")), None
    code = error.get("code") or error.get("type")
    return str(error.get("message", "no message")), None if code is None else str(code)
