"""Root-mean-square norms, in the rounding order of the official model.

Written with a vector norm because that is one kernel on a CPU where a mean of squares is three.
"""

from __future__ import annotations

import torch


class InverseRms:
    """1 / sqrt(mean(x^2) + eps) over the last dimension of a float32 tensor, which stays."""

    def __init__(self, size: int, eps: float) -> None:
        """`size` is the length of the last dimension."""
        self._share = 1.0 / size
        self._eps = torch.tensor(eps, dtype=torch.float32)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] float32 -> [..., 1] float32."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.addcmul(self._eps, norm, norm, value=self._share).rsqrt_()


class RmsNorm:
    """w * cast(x / rms(x)): normalise in float32, round to the weight's dtype, then multiply."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """`weight` is [size] in the dtype of the result."""
        self._weight = weight
        self._inverse_rms = InverseRms(weight.shape[0], eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] in any float dtype -> [..., size] in the weight's dtype."""
        x = x.float()
        return self._weight * (x * self._inverse_rms(x)).to(self._weight.dtype)
