"""Attention Residuals: a softmax over depth takes the place of the residual stream.

For block vectors and the running sum V_k: score_k = <V_k / rms(V_k), norm * proj>, and the result
is sum_k softmax(score)_k V_k, the un-normalised vectors, all in float32. Only the product of the
norm's and the projection's weights matters, so only the product is kept.
"""

from __future__ import annotations

import torch

from station.model.norms import InverseRms
from station.model.weights import ModuleWeights


class AttentionResidual:
    """One of the three residual mixers: before attention, before the FFN, before the final norm."""

    def __init__(self, weights: ModuleWeights, name: str, eps: float) -> None:
        """`name` is e.g. `self_attention_res`; the tensors are `name`_norm and `name`_proj."""
        norm = weights.exact(f"{name}_norm.weight")
        self._direction = norm * weights.exact(f"{name}_proj.weight")[0]
        self._inverse_rms = InverseRms(norm.shape[0], eps)
        self._dtype = weights.dtype

    def __call__(self, stack: torch.Tensor) -> torch.Tensor:
        """Mix `stack` [depth, T, H] (blocks, then the running sum) into [T, H], same dtype."""
        depth, tokens, hidden = stack.shape
        flat = stack.float().view(-1, hidden)
        scores = torch.mv(flat, self._direction).mul_(self._inverse_rms(flat).view(-1))
        share = torch.softmax(scores.view(depth, tokens), dim=0)
        if tokens == 1:
            mixed = torch.mm(share.t(), flat)
        else:
            vectors = flat.view(depth, tokens, hidden).transpose(0, 1)
            # contiguous, or bmm falls back to one call per token
            mixed = torch.bmm(share.t().contiguous().unsqueeze(1), vectors).squeeze(1)
        return mixed.to(self._dtype)
