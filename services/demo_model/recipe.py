"""The recipe of the demo model: every number of the training run, and the pure rules derived from
them.

Owns the schedule of the learning rate and the balancing of the experts. It must not know tensors'
places, processes or files: all functions take values and return values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PROCESSES = 2
"""Training processes of one thread each: two quiet cores, and no barrier of threads when the
machine is shared.
"""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One training run. The budget is counted in tokens, so that a loaded machine gives the same
    model, only later.
    """

    tokens: int = 3_600_000
    rows: int = 8
    """Rows per step and process."""
    row_tokens: int = 192
    seed: int = 1
    rate: float = 1.2e-3
    rate_floor: float = 0.02
    """Share of `rate` at the end."""
    warmup_steps: int = 50
    decay_share: float = 0.7
    """Share of the steps, at the end, over which the rate falls in a straight line."""
    weight_decay: float = 0.1
    momentum: float = 0.9
    memory: float = 0.97
    eps: float = 1e-8
    gradient_norm_max: float = 1.0
    bias_step: float = 0.004
    load_low: float = 0.4
    load_high: float = 2.0
    """Experts between the two shares of an even load are left alone: some skew is wanted, collapse
    is not.
    """
    load_memory: float = 0.9
    balance_share: float = 0.9
    """The biases stay fixed after this share of the steps, so that the last ones train the choice
    that is served.
    """

    @property
    def step_tokens(self) -> int:
        """Tokens of one step over all processes."""
        return PROCESSES * self.rows * self.row_tokens

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return max(1, self.tokens // self.step_tokens)


def learning_rate(recipe: Recipe, step: int) -> float:
    """Rate of `step` (from 0): a straight rise, a plateau, and a straight fall to the floor."""
    rise = min(1.0, (step + 1) / recipe.warmup_steps)
    left = (recipe.steps - step) / recipe.steps
    fall = min(1.0, max(recipe.rate_floor, left / recipe.decay_share))
    return recipe.rate * rise * fall


def mean_load(recipe: Recipe, previous: Tensor | None, loads: Tensor) -> Tensor:
    """Running mean of the experts' loads; loads [layers, E] tokens of one step -> shares of an even
    load, [layers, E].
    """
    shares = loads.float() / loads.float().mean(-1, keepdim=True)
    if previous is None:
        return shares
    return recipe.load_memory * previous + (1 - recipe.load_memory) * shares


def bias_change(recipe: Recipe, step: int, load: Tensor) -> Tensor:
    """What to add to the correction biases after `step`: up for starved experts, down for crowded
    ones, [layers, E].
    """
    if step >= recipe.balance_share * recipe.steps:
        return torch.zeros_like(load)
    size = recipe.bias_step if step < recipe.steps / 2 else recipe.bias_step / 2
    return size * ((load < recipe.load_low).float() - (load > recipe.load_high).float())
