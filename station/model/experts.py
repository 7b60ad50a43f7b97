"""Routed experts in plain torch float32: the oracle's and the single process's expert function.

Not for serving: rows stay unrounded and weights are expanded to float32 on first use. The pod's
kernels read records instead. Must not know the network.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from station.model.checkpoint import Checkpoint
from station.model.mlp import Situ
from station.model.tensor_table import expert_prefix


class TorchExperts:
    """An ExpertFunction over a checkpoint; every expert used stays expanded in memory."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> None:
        """`dtype` is that of weights, activations and rows."""
        config = checkpoint.config
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._situ = Situ(config.expert.width, config.situ_beta, config.situ_linear_beta)
        self._expanded: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, layer: int, z: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Unweighted rows [T, K, latent] of experts ids [T, K] applied to z [T, latent]."""
        z = z.to(self._dtype)
        rows = torch.empty(*ids.shape, z.shape[-1], dtype=self._dtype)
        for expert in torch.unique(ids).tolist():
            token, slot = torch.nonzero(ids == expert, as_tuple=True)
            gate_up, down = self._weights(layer, expert)
            rows[token, slot] = linear(self._situ(linear(z[token], gate_up)), down)
        return rows

    def _weights(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        key = (layer, expert)
        if key not in self._expanded:
            prefix = expert_prefix(layer, expert)
            w1, w3, w2 = (
                self._checkpoint.weight(f"{prefix}{name}.weight", self._dtype)
                for name in ("w1", "w3", "w2")
            )
            self._expanded[key] = (torch.cat([w1, w3]), w2)
        return self._expanded[key]
