"""The gated MLP with the SiTU activation: dense layers and shared experts.

SiTU(g, u) = beta * tanh(g / beta) * sigmoid(g) * linear_beta * tanh(u / linear_beta), in float32
with one cast at the end.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from station.model.config import K3Config
from station.model.weights import ModuleWeights


class Situ:
    """SiTU on a fused [gate | up] input; both tanh run as one call."""

    def __init__(self, width: int, beta: float, linear_beta: float) -> None:
        """`width` is the number of gate values, and of up values."""
        self._divisor = torch.tensor([[beta], [linear_beta]], dtype=torch.float32)
        self._width = width
        self._product = beta * linear_beta

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 * width] -> [T, width] in the same dtype."""
        values = gate_up.float().view(-1, 2, self._width)
        gate, up = torch.tanh(values / self._divisor).unbind(1)
        gate = torch.sigmoid(values.select(1, 0)).mul_(gate)
        return gate.mul_(up).mul_(self._product).to(gate_up.dtype)


class GatedMlp:
    """down( SiTU(gate(x), up(x)) )."""

    def __init__(self, weights: ModuleWeights, config: K3Config) -> None:
        """Reads gate_proj, up_proj and down_proj below the prefix of `weights`."""
        self._gate_up = weights.matrix("gate_proj", "up_proj")
        self._down = weights.matrix("down_proj")
        self._situ = Situ(self._down.shape[1], config.situ_beta, config.situ_linear_beta)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        return linear(self._situ(linear(x, self._gate_up)), self._down)
