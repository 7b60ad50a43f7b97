"""`k3 bench pod`: what one user gets from an embedded pod, and where the time goes.

Tokens per second come from pairs of requests that differ only in `max_tokens` (1 and N): the
difference of their times is N - 1 decode steps as a client sees them, without prefill.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx
import msgspec

from services.bench.decode import layer_figures
from services.bench.report import Figure
from services.chat.client import served_model
from services.pod.endpoint import PodRefused, check_answer, open_client, transport_errors
from services.status.client import fetch_status

QUESTIONS: Final = (
    "How does a token travel through the pod?",
    "Explain what a bank file is and what its records hold.",
    "What happens when a Spark is lost while a layer waits for it?",
)
STEPS_MIN: Final = 8  # an answer shorter than this says nothing about decoding


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int


class _Completion(msgspec.Struct, frozen=True):
    usage: _Usage


@dataclass(frozen=True, slots=True)
class _Timed:
    """One request: how long it took and what it counted."""

    seconds: float
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class _Pair:
    """The same question with one token and with many."""

    short: _Timed
    long: _Timed

    @property
    def steps(self) -> int:
        """Decode steps by which the two differ."""
        return self.long.completion_tokens - self.short.completion_tokens

    @property
    def tokens_per_s(self) -> float:
        """Decode rate without prefill."""
        return self.steps / (self.long.seconds - self.short.seconds)


def measure(
    url: str, token: str | None, *, tokens: int, runs: int
) -> tuple[tuple[Figure, ...], dict[str, str]]:
    """Figures of the pod at `url` (names without prefix), and what could not be taken and why."""
    with open_client(url, token) as client:
        model = served_model(client)
        ask = _Asker(client, model)
        ask(QUESTIONS[0], tokens)  # warm-up: code paths, hop curves, page tables
        before = fetch_status(client)
        pairs = [_pair(ask, QUESTIONS[run % len(QUESTIONS)], tokens) for run in range(runs)]
        after = fetch_status(client)
    skipped: dict[str, str] = {}
    figures = list(_rates(pairs, skipped))
    figures += layer_figures(before, after)
    return tuple(figures), skipped


def _rates(pairs: Sequence[_Pair], skipped: dict[str, str]) -> Sequence[Figure]:
    usable = [
        pair for pair in pairs if pair.steps >= STEPS_MIN and pair.long.seconds > pair.short.seconds
    ]
    prefill = statistics.median(pair.short.prompt_tokens / pair.short.seconds for pair in pairs)
    figures = [
        Figure(
            "first_token_ms",
            round(1000 * statistics.median(pair.short.seconds for pair in pairs), 1),
            "ms",
        ),
        Figure("prefill_tokens_per_s", round(prefill, 1), "tokens/s"),
    ]
    if not usable:
        skipped["tokens_per_s"] = (
            f"every answer ended within {STEPS_MIN} tokens: ask for more, or use a trained model"
        )
        return figures
    rates = sorted(pair.tokens_per_s for pair in usable)
    return [
        Figure("tokens_per_s", round(statistics.median(rates), 2), "tokens/s"),
        Figure("tokens_per_s_min", round(rates[0], 2), "tokens/s"),
        Figure("tokens_per_s_max", round(rates[-1], 2), "tokens/s"),
        *figures,
    ]


class _Asker:
    """Sends greedy requests that are not streamed, and times them."""

    def __init__(self, client: httpx.Client, model: str) -> None:
        self._client = client
        self._model = model

    def __call__(self, question: str, max_tokens: int) -> _Timed:
        body: Mapping[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": max_tokens,
        }
        started_ns = time.monotonic_ns()
        with transport_errors(str(self._client.base_url)):
            response = self._client.post("/v1/chat/completions", json=body)
            check_answer(response)
        seconds = (time.monotonic_ns() - started_ns) / 1e9
        try:
            usage = msgspec.json.decode(response.content, type=_Completion).usage
        except msgspec.DecodeError as error:
            raise PodRefused(f"the pod's answer is not understood: {error}") from error
        return _Timed(seconds, usage.prompt_tokens, usage.completion_tokens)


def _pair(ask: _Asker, question: str, tokens: int) -> _Pair:
    return _Pair(short=ask(question, 1), long=ask(question, tokens))
