"""The Station's part of a latent mixture of experts: router, projections, shared experts, sum.

Routed experts never run here. The router and the weighted sum are float32 whatever the model's
dtype: a BF16 router sends 5 % of tokens to other experts.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import linear

from station.model.config import K3Config
from station.model.mlp import GatedMlp
from station.model.norms import RmsNorm
from station.model.weights import ModuleWeights

_SUM_EPS = 1e-20


def combine(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum over K of weights[t, k] * rows[t, k], in float32, strictly in order of k.

    rows [T, K, latent] in any float dtype, weights [T, K] float32; returns [T, latent] float32.
    Each product and each sum is rounded on its own, so no fused multiply-add can make one machine
    differ from another, and the result does not depend on who computed which row.
    """
    products = rows.float() * weights.unsqueeze(-1)
    first, *others = products.unbind(1)
    total = first.clone()
    for product in others:
        total.add_(product)
    return total


class LatentMoe:
    """One MoE layer without its routed experts."""

    def __init__(self, weights: ModuleWeights, config: K3Config) -> None:
        """Reads `block_sparse_moe.*` below the prefix of `weights`, the layer's."""
        weights = weights.below("block_sparse_moe.")
        self._gate = weights.exact("gate.weight")
        self._bias = weights.exact("gate.e_score_correction_bias")
        self._top_k = config.top_k
        self._scaling = config.routed_scaling_factor
        self._down = weights.matrix("routed_expert_down_proj")
        self._up = weights.matrix("routed_expert_up_proj")
        self._norm = RmsNorm(weights.vector("routed_expert_norm"), config.rms_norm_eps)
        self._dtype = weights.dtype
        self.shared = GatedMlp(weights.below("shared_experts."), config)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts for x [T, H]: ids int64 [T, K], best first, and weights float32 [T, K].

        Sigmoid scores plus bias decide, equal scores in favour of the lower id: a stable sort (the
        order of ties in torch.topk is unspecified; numpy sorts short rows ten times faster than
        torch). Weights are the scores without bias, renormalised.
        """
        scores = torch.sigmoid(linear(x.float(), self._gate))
        order = np.argsort(-(scores + self._bias).numpy(), axis=-1, kind="stable")
        ids = torch.from_numpy(order[:, : self._top_k].copy())
        chosen = scores.gather(-1, ids)
        return ids, chosen.div_(chosen.sum(-1, keepdim=True).add_(_SUM_EPS)).mul_(self._scaling)

    def latent(self, x: torch.Tensor) -> torch.Tensor:
        """What the routed experts see of x [T, H]: [T, latent]."""
        return linear(x, self._down)

    def finish(self, routed: torch.Tensor) -> torch.Tensor:
        """The complete weighted sum [T, latent] float32 -> [T, H]; the norm needs all experts."""
        return linear(self._norm(routed.to(self._dtype)), self._up)
