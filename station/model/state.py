"""What a sequence remembers between tokens: KDA memories, convolution windows, latent caches.

Owns allocation, growth and zeroing. A state belongs to one pass at a time; a pass that was given up
half way leaves it unusable until `reset`. Must not know weights or maths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from shared.core.errors import LocalProtocolError
from station.model.config import K3Config

_FIRST_CAPACITY: Final = 64


class KdaState:
    """One KDA layer: the last inputs of the short convolution and the delta-rule memory."""

    def __init__(self, config: K3Config, dtype: torch.dtype) -> None:
        """`window` [kernel - 1, 3 * inner] in the model's dtype, `memory` [heads, D, D] float32."""
        kda = config.kda
        inner = kda.num_heads * kda.head_dim
        self.window = torch.zeros(kda.conv_kernel - 1, 3 * inner, dtype=dtype)
        self.memory = torch.zeros(kda.num_heads, kda.head_dim, kda.head_dim)

    def reset(self) -> None:
        """Forget everything. New tensors, so that any thread may reset between passes."""
        self.window = torch.zeros_like(self.window)
        self.memory = torch.zeros_like(self.memory)


class LatentCache:
    """One MLA layer: a row (latent | unrotated key) per token, in memory that grows by doubling."""

    def __init__(self, config: K3Config, dtype: torch.dtype) -> None:
        """Starts small: a short chat must not pay for the longest one."""
        mla = config.mla
        self._limit = config.context_length
        self._rows = torch.zeros(
            min(_FIRST_CAPACITY, self._limit), mla.kv_lora_rank + mla.qk_rope_head_dim, dtype=dtype
        )
        self._length = 0

    def append(self, rows: torch.Tensor) -> torch.Tensor:
        """Add `rows` [T, width]; returns all rows so far [length, width] (a view)."""
        length = self._length + rows.shape[0]
        if length > self._rows.shape[0]:
            self._grow(length)
        self._rows[self._length : length] = rows
        self._length = length
        return self._rows[:length]

    def reset(self) -> None:
        """Forget everything; rows past the length are never read, so the memory is kept."""
        self._length = 0

    def _grow(self, length: int) -> None:
        if length > self._limit:
            raise LocalProtocolError(f"{length} tokens exceed the context of {self._limit}")
        capacity = self._rows.shape[0]
        while capacity < length:
            capacity *= 2
        grown = self._rows.new_zeros(min(capacity, self._limit), self._rows.shape[1])
        grown[: self._length] = self._rows[: self._length]
        self._rows = grown


class SequenceState:
    """All layers of one sequence and the number of tokens it has seen."""

    def __init__(self, config: K3Config, dtype: torch.dtype) -> None:
        """A sequence of no tokens."""
        self.length = 0
        self._limit = config.context_length
        self.layers: tuple[KdaState | LatentCache, ...] = tuple(
            LatentCache(config, dtype) if layer in config.mla_layers else KdaState(config, dtype)
            for layer in range(config.num_hidden_layers)
        )

    def advance(self, tokens: int) -> None:
        """Count `tokens` about to be computed; refuses to pass the context length."""
        if tokens < 1 or self.length + tokens > self._limit:
            raise LocalProtocolError(
                f"{self.length} + {tokens} tokens do not fit the context of {self._limit}"
            )
        self.length += tokens

    def reset(self) -> None:
        """Back to a sequence of no tokens, as if new."""
        self.length = 0
        for layer in self.layers:
            layer.reset()


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """Several sequences in one pass: their states and how many rows belong to each, in order.

    Rows share every matrix product; convolution, memory and cache stay per sequence.
    """

    states: tuple[SequenceState, ...]
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        """One count per state, and no state twice."""
        if len(self.states) != len(self.tokens) or not self.states:
            raise LocalProtocolError(f"{len(self.states)} states, {len(self.tokens)} token counts")
        if len({id(state) for state in self.states}) != len(self.states):
            raise LocalProtocolError("a sequence appears twice in one group")


@dataclass(frozen=True, slots=True)
class Span:
    """Rows start..stop (exclusive) of a pass and the layer state of the sequence they belong to."""

    start: int
    stop: int
    sequence: SequenceState


def spans(state: SequenceState | SequenceGroup, rows: int) -> Iterator[Span]:
    """The rows of each sequence in a pass of `rows` rows."""
    if isinstance(state, SequenceState):
        yield Span(0, rows, state)
        return
    if sum(state.tokens) != rows:
        raise LocalProtocolError(f"{rows} rows for a group of {sum(state.tokens)} tokens")
    start = 0
    for sequence, tokens in zip(state.states, state.tokens, strict=True):
        yield Span(start, start + tokens, sequence)
        start += tokens
