"""The rules of the training run: the rate's schedule and the balancing of the experts."""

from __future__ import annotations

from itertools import pairwise

import torch

from services.demo_model.recipe import Recipe, bias_change, learning_rate, mean_load

RECIPE = Recipe(tokens=3072 * 1000)


def test_rate_rises_stays_and_falls() -> None:
    """Warm-up, plateau up to the last 70 % of the steps, then a straight line to the floor."""
    assert RECIPE.steps == 1000
    rates = [learning_rate(RECIPE, step) for step in range(RECIPE.steps)]
    assert rates[0] == RECIPE.rate / RECIPE.warmup_steps
    assert rates[RECIPE.warmup_steps : 300] == [RECIPE.rate] * (300 - RECIPE.warmup_steps)
    assert all(after <= before for before, after in pairwise(rates[300:]))
    assert abs(rates[650] - RECIPE.rate / 2) < 1e-9
    assert rates[-1] == RECIPE.rate * RECIPE.rate_floor


def test_load_is_a_running_share_of_even() -> None:
    """Loads of one step count a tenth; 1 is an even load."""
    first = mean_load(RECIPE, None, torch.tensor([[30, 10]]))
    assert first.tolist() == [[1.5, 0.5]]
    second = mean_load(RECIPE, first, torch.tensor([[0, 40]]))
    torch.testing.assert_close(second, torch.tensor([[1.35, 0.65]]))


def test_bias_moves_only_outside_the_dead_zone() -> None:
    """Starved experts rise, crowded ones fall, others stay; later half steps, none at the end."""
    load = torch.tensor([[0.1, 0.5, 1.9, 3.0]])
    torch.testing.assert_close(
        bias_change(RECIPE, 0, load), torch.tensor([[0.004, 0.0, 0.0, -0.004]])
    )
    torch.testing.assert_close(
        bias_change(RECIPE, 600, load), torch.tensor([[0.002, 0.0, 0.0, -0.002]])
    )
    assert not bias_change(RECIPE, 950, load).any()
