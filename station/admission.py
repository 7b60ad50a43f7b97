"""How many requests may run and wait. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from shared.core.errors import LocalProtocolError, RequestError, RequestRefused


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of the Station's work."""

    # one native wait watches at most 64 lanes
    active: Annotated[int, msgspec.Meta(ge=1, le=64)] = 8
    waiting: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 32
    prefill_tokens: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 64


@dataclass(slots=True)
class Admission:
    """Counts of requests; refuses instead of growing without bound."""

    limits: Limits
    open: int = 0
    refused: int = 0

    def enter(self) -> None:
        """One more request, running or waiting; RequestRefused when both are full."""
        if self.open >= self.limits.active + self.limits.waiting:
            self.refused += 1
            raise RequestRefused(
                f"the pod already has {self.open} requests ({self.limits.active} running, "
                f"{self.limits.waiting} waiting); try again shortly",
                retry_after_s=2,
            )
        self.open += 1

    def leave(self) -> None:
        """A request ended, whatever its end."""
        if self.open == 0:
            raise LocalProtocolError("a request left that never entered")
        self.open -= 1


def check_length(prompt_tokens: int, max_tokens: int, context_length: int) -> None:
    """Refuse what cannot fit the model's context."""
    if prompt_tokens + max_tokens > context_length:
        raise RequestError(
            f"this model's context is {context_length} tokens: the prompt has {prompt_tokens} and "
            f"max_tokens asks for {max_tokens}; shorten one of them",
            param="messages" if prompt_tokens >= context_length else "max_tokens",
            error_code="context_length_exceeded",
        )
