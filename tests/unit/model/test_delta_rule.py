"""The delta rule against its definition, written out in float64 one token at a time."""

from __future__ import annotations

import pytest
import torch

from station.model.delta_rule import CHUNK, delta_chunks, delta_step


def _inputs(seed: int, tokens: int, shift: float) -> tuple[torch.Tensor, ...]:
    heads, size = 2, 8
    rng = torch.Generator().manual_seed(seed)
    q, k, v, gate = (torch.randn(tokens, heads, size, generator=rng) for _ in range(4))
    k = torch.nn.functional.normalize(k, dim=-1)
    beta = torch.sigmoid(torch.randn(tokens, heads, generator=rng))
    return q, k, v, -5 * torch.sigmoid(gate + shift), beta


def _definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, log_decay, beta = (x.double() for x in (q, k, v, log_decay, beta))
    tokens, heads, size = q.shape
    memory = torch.zeros(heads, size, size, dtype=torch.float64)
    output = torch.zeros(tokens, heads, size, dtype=torch.float64)
    for t in range(tokens):
        for h in range(heads):
            decayed = log_decay[t, h].exp()[:, None] * memory[h]
            change = beta[t, h] * (v[t, h] - k[t, h] @ decayed)
            memory[h] = decayed + torch.outer(k[t, h], change)
            output[t, h] = q[t, h] @ memory[h]
    return output, memory


@pytest.mark.parametrize("shift", [-6.0, 0.0, 30.0], ids=["slow", "mixed", "always -5"])
@pytest.mark.parametrize("tokens", [1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK])
def test_both_forms_follow_the_definition(tokens: int, shift: float) -> None:
    """Chunks and steps give outputs and memory of the definition, at the steepest decay too."""
    inputs = _inputs(tokens, tokens, shift)
    expected, expected_memory = _definition(*inputs)
    chunk_memory = torch.zeros(2, 8, 8)
    chunked = delta_chunks(*inputs, chunk_memory)
    step_memory = torch.zeros(2, 8, 8)
    q, k, v, log_decay, beta = inputs
    stepped = torch.stack(
        [
            delta_step(q[t], k[t], v[t], log_decay[t].exp(), beta[t], step_memory)
            for t in range(tokens)
        ]
    )
    for output, memory in ((chunked, chunk_memory), (stepped, step_memory)):
        assert torch.isfinite(output).all()
        torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(memory.double(), expected_memory, rtol=1e-5, atol=1e-5)


def test_memory_carries_over_between_calls() -> None:
    """Two calls are one longer call: the memory is all that a sequence keeps."""
    q, k, v, log_decay, beta = _inputs(3, 40, 0.0)
    whole = torch.zeros(2, 8, 8)
    expected = delta_chunks(q, k, v, log_decay, beta, whole)
    parts = torch.zeros(2, 8, 8)
    cut = [
        delta_chunks(q[s], k[s], v[s], log_decay[s], beta[s], parts)
        for s in (slice(0, 23), slice(23, 40))
    ]
    torch.testing.assert_close(torch.cat(cut), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)
