"""Sampling: greedy, nucleus, and tokens that depend on (seed, position) alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from station.sampling import sample, step_rng


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    """Temperature 0 is a function of the logits; no random number is drawn."""
    rng = step_rng(1, 0)
    before = rng.bit_generator.state["state"]["counter"].copy()

    assert sample(np.array([0.0, 3.0, 3.0, -np.inf], np.float32), 0.0, 0.5, rng) == 1
    assert np.array_equal(before, rng.bit_generator.state["state"]["counter"])


def test_torch_and_numpy_give_the_same_token() -> None:
    """Either kind of logits is accepted and means the same."""
    logits = np.random.default_rng(0).normal(size=500).astype(np.float32)

    for position in range(50):
        assert sample(logits, 1.0, 0.9, step_rng(7, position)) == sample(
            torch.from_numpy(logits), 1.0, 0.9, step_rng(7, position)
        )


def test_tokens_depend_on_seed_and_position_alone() -> None:
    """The same pair gives the same token whatever was drawn before; other pairs give others."""
    logits = np.zeros(1000, np.float32)
    first = [sample(logits, 1.0, 1.0, step_rng(42, position)) for position in range(100)]
    again = [sample(logits, 1.0, 1.0, step_rng(42, position)) for position in reversed(range(100))]
    other = [sample(logits, 1.0, 1.0, step_rng(43, position)) for position in range(100)]

    assert first == again[::-1]
    assert first != other
    assert len(set(first)) > 80


@pytest.mark.parametrize("seed", [-1, 2**63 - 1, -(2**63), 2**70 + 3])
def test_any_integer_is_a_seed(seed: int) -> None:
    """Negative and huge seeds work and repeat."""
    assert step_rng(seed, 5).random() == step_rng(seed, 5).random()


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 300),
    top_p=st.floats(0.0, 0.999),
    temperature=st.floats(0.1, 2.0),
)
def test_token_is_always_inside_the_nucleus(
    seed: int, size: int, top_p: float, temperature: float
) -> None:
    """The smallest set of most likely tokens that holds top_p, by a plain full sort."""
    logits = np.random.default_rng(seed).normal(size=size).astype(np.float32).round(1)
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    order = np.lexsort((np.arange(size), -weights))
    reached = np.cumsum(weights[order]) >= top_p * weights.sum() * (1 - 1e-12)
    nucleus = set(order[: int(np.argmax(reached)) + 1].tolist())

    assert {sample(logits, temperature, top_p, step_rng(seed, k)) for k in range(5)} <= nucleus


def test_wide_nucleus_is_found_whole() -> None:
    """Flat logits need far more candidates than the first guesses; half of them is the nucleus."""
    logits = np.zeros(10_000, np.float32)
    tokens = [sample(logits, 1.0, 0.5, step_rng(3, position)) for position in range(2000)]

    assert max(tokens) < 5000
    assert max(tokens) > 4900
    assert min(tokens) < 100


def test_frequencies_follow_the_probabilities() -> None:
    """20,000 draws with temperature 2 agree with the softmax to about three sigma."""
    logits = np.log(np.array([0.64, 0.16, 0.04, 0.16], np.float32))
    expected = np.sqrt(np.array([0.64, 0.16, 0.04, 0.16]))
    expected /= expected.sum()
    draws = [sample(logits, 2.0, 1.0, step_rng(11, position)) for position in range(20_000)]
    measured = np.bincount(draws, minlength=4) / len(draws)

    assert np.abs(measured - expected).max() < 0.011


def test_minus_infinity_is_never_drawn() -> None:
    """A masked token has no weight."""
    logits = np.array([-np.inf, 0.0, -np.inf, 0.0], np.float32)

    assert {1, 3} == {sample(logits, 1.0, 1.0, step_rng(0, position)) for position in range(200)}


def test_tiny_temperature_is_greedy() -> None:
    """No overflow, no NaN: the largest logit wins."""
    logits = np.array([1.0, 2.0, 1.5], np.float32)

    assert sample(logits, 1e-6, 0.95, step_rng(0, 0)) == 1
