"""What the HTTP layer sees of the coordinator: requests in, token events out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One tokenised request. `temperature` 0 means greedy; `seed` None lets the pod draw one."""

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    stop_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token."""

    token_id: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a request: why it ended and how many rows the cold store computed."""

    reason: Literal["stop", "length"]
    cold_rows: int


TokenEvent = Token | Finished


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a metric."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Metric:
    """A Prometheus metric family."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    samples: Sequence[Sample]


class ChatBackend(Protocol):
    """The coordinator as the endpoint needs it."""

    model_name: str
    context_length: int
    created_s: int

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Yield tokens, then one Finished.

        Admission happens before the first event (RequestRefused); a layer that cannot be completed
        raises LayerFailed. `aclose()` cancels at the next layer boundary.
        """

    def status(self) -> dict[str, object]:
        """JSON-able state of the pod: what `k3 status --json` prints."""

    def readiness(self) -> tuple[bool, str]:
        """Whether new requests can be served, and the reason in words."""

    def liveness(self) -> tuple[bool, str]:
        """Whether work makes progress (or there is none), and the reason in words."""

    def metrics(self) -> Sequence[Metric]:
        """Counters and gauges for /metrics."""
