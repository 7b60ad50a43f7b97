"""Two ways of asking the demo model: the Station's model in this process, or a pod through its chat
endpoint.

Owns greedy decoding and the HTTP call. It must not know the corpus, or what a right answer is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx
import torch

from shared.core.errors import MeshError
from station.model.checkpoint import Checkpoint
from station.model.experts import TorchExperts
from station.model.network import K3Text
from station.model.state import SequenceGroup
from station.tokenizer import chat
from station.tokenizer.reply import ContentDelta, ReplyParser
from station.tokenizer.vocabulary import Tokenizer

ANSWER_TOKENS_MAX = 160
"""A trained reply, thought included, is shorter; a longer one has gone astray."""
REQUEST_S_MAX = 120.0
_GROUP = 16


class EndpointFailed(MeshError):
    """The chat endpoint could not be reached or refused a request."""

    code = "endpoint_failed"


class Answerer(Protocol):
    """Answers questions greedily, at the endpoint's default effort."""

    def answers(self, questions: Sequence[str]) -> Iterator[str]:
        """The text of the response channel for each question, in order."""


class LocalAnswerer:
    """The checkpoint through `station.model`, experts in plain torch: no pod, no processes."""

    def __init__(self, directory: Path) -> None:
        """Load the checkpoint. Raises CheckpointError."""
        checkpoint = Checkpoint.open(directory)
        self._tokenizer = Tokenizer.load(directory)
        self._model = K3Text.load(checkpoint, torch.float32)
        self._experts = TorchExperts(checkpoint)

    def answers(self, questions: Sequence[str]) -> Iterator[str]:
        """See `Answerer`; sequences are decoded in groups, which does not change them."""
        for start in range(0, len(questions), _GROUP):
            yield from self._group(questions[start : start + _GROUP])

    def _group(self, questions: Sequence[str]) -> list[str]:
        tokenizer, model = self._tokenizer, self._model
        prompts = [chat.render(tokenizer, [chat.ChatMessage("user", q)]) for q in questions]
        states = [model.new_state() for _ in prompts]
        replies: list[list[int]] = [[] for _ in prompts]
        following = list(prompts)
        running = list(range(len(prompts)))
        while running:
            group = SequenceGroup(
                tuple(states[i] for i in running), tuple(len(following[i]) for i in running)
            )
            ids = torch.tensor([token for i in running for token in following[i]])
            logits = model.forward(ids, group, self._experts).view(len(running), -1)
            for i, token in zip(running, logits.argmax(-1).tolist(), strict=True):
                replies[i].append(token)
                following[i] = [token]
            running = [i for i in running if not self._ended(replies[i])]
        return [self._text(reply) for reply in replies]

    def _ended(self, reply: Sequence[int]) -> bool:
        return reply[-1] == self._tokenizer.end_of_msg_id or len(reply) >= ANSWER_TOKENS_MAX

    def _text(self, reply: Sequence[int]) -> str:
        parser = ReplyParser(self._tokenizer)
        events = [event for token in reply for event in parser.feed(token)] + parser.finish()
        return "".join(event.text for event in events if isinstance(event, ContentDelta))


class EndpointAnswerer:
    """A pod behind its OpenAI-compatible endpoint, for example http://127.0.0.1:8380/v1."""

    def __init__(self, url: str) -> None:
        """Ask the endpoint which model it serves. Raises EndpointFailed."""
        self._client = httpx.Client(base_url=url.rstrip("/") + "/", timeout=REQUEST_S_MAX)
        served = self._call("GET", "models")["data"]
        self._model = served[0]["id"]

    def answers(self, questions: Sequence[str]) -> Iterator[str]:
        """See `Answerer`; one request after another."""
        for question in questions:
            body = {
                "model": self._model,
                "messages": [{"role": "user", "content": question}],
                "temperature": 0,
                "max_tokens": ANSWER_TOKENS_MAX,
            }
            reply = self._call("POST", "chat/completions", body)
            yield reply["choices"][0]["message"]["content"] or ""

    def _call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        try:
            response = self._client.request(method, path, json=body)
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise EndpointFailed(
                f"{self._client.base_url}{path}: {error}; start a pod with `k3 up`, or give --url"
            ) from error
        answer: dict[str, Any] = response.json()
        return answer
