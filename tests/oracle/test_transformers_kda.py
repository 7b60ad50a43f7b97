"""Both forms of our delta rule against the torch functions of transformers' Kimi Linear."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from station.model.delta_rule import delta_chunks, delta_step
from tests.oracle.packages import oracle_module

pytestmark = pytest.mark.oracle
MODULE = "transformers.models.kimi_linear.modeling_kimi_linear"


def _inputs(seed: int, tokens: int, heads: int, size: int, steep: float) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    q, k, v, gate = (torch.randn(tokens, heads, size, generator=rng) for _ in range(4))
    return {
        "q": torch.nn.functional.normalize(q, dim=-1),
        "k": torch.nn.functional.normalize(k, dim=-1),
        "v": v,
        "log_decay": -5 * torch.sigmoid(gate + steep),
        "beta": torch.sigmoid(torch.randn(tokens, heads, generator=rng)),
        "memory": torch.randn(heads, size, size, generator=rng) * 0.1,
    }


def _theirs(function: Any, x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    output, memory = function(
        x["q"][None],
        x["k"][None],
        x["v"][None],
        g=x["log_decay"][None],
        beta=x["beta"][None],
        initial_state=x["memory"][None].clone(),
        output_final_state=True,
    )
    return output[0], memory[0]


@pytest.mark.parametrize("steep", [-4.0, 0.0, 8.0], ids=["slow", "mixed", "fastest decay"])
@pytest.mark.parametrize(
    ("tokens", "heads", "size"), [(1, 2, 16), (16, 1, 32), (50, 3, 24), (131, 2, 64)]
)
def test_delta_rule_agrees_with_transformers(
    tokens: int, heads: int, size: int, steep: float
) -> None:
    """Step by step and in chunks, outputs and final memory equal the recurrent reference."""
    kimi = oracle_module(MODULE)
    x = _inputs(tokens, tokens, heads, size, steep)
    expected, expected_memory = _theirs(kimi.recurrent_kimi_delta_attention, x)
    q = x["q"] / math.sqrt(size)  # the reference scales q itself

    chunked_memory = x["memory"].clone()
    chunked = delta_chunks(q, x["k"], x["v"], x["log_decay"], x["beta"], chunked_memory)
    stepped_memory = x["memory"].clone()
    stepped = torch.stack(
        [
            delta_step(
                q[t], x["k"][t], x["v"][t], x["log_decay"][t].exp(), x["beta"][t], stepped_memory
            )
            for t in range(tokens)
        ]
    )

    for output, memory in ((chunked, chunked_memory), (stepped, stepped_memory)):
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(memory, expected_memory, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("steep", [-4.0, 0.0])
def test_both_chunked_forms_agree(steep: float) -> None:
    """Our chunks of 16 equal the reference's chunks of 64."""
    kimi = oracle_module(MODULE)
    x = _inputs(7, 150, 2, 32, steep)
    expected, expected_memory = _theirs(kimi.chunk_kimi_delta_attention, x)
    memory = x["memory"].clone()
    q = x["q"] / math.sqrt(32)
    output = delta_chunks(q, x["k"], x["v"], x["log_decay"], x["beta"], memory)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=5e-6)
    torch.testing.assert_close(memory, expected_memory, rtol=1e-5, atol=5e-6)
