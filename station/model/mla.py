"""Gated multi-head latent attention without rotation, absorbed: keys and values stay latent.

Owns the layer's weights. The cache holds one row (normalised latent | shared key part) per token
and layer; W_UK moves to the query side and W_UV to the output side, so prefill and decode are one
path and nothing per head is ever stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import linear

from shared.core.errors import LocalProtocolError
from station.model.config import K3Config
from station.model.norms import RmsNorm
from station.model.state import LatentCache, Span
from station.model.weights import ModuleWeights

_LATENT_EPS = 1e-6  # the official model keeps this apart from rms_norm_eps


class MlaAttention:
    """One full-attention layer."""

    def __init__(self, weights: ModuleWeights, config: K3Config, layer: int) -> None:
        """Reads `self_attn.*` below the prefix of `weights`, the layer's."""
        mla = config.mla
        weights = weights.below("self_attn.")
        self._layer = layer
        self._heads, self._rank = mla.num_heads, mla.kv_lora_rank
        self._nope, self._rope = mla.qk_nope_head_dim, mla.qk_rope_head_dim
        self._scale = (self._nope + self._rope) ** -0.5
        self._entry = weights.matrix("q_a_proj", "kv_a_proj_with_mqa", "g_proj")
        self._entry_sizes = [
            mla.q_lora_rank,
            mla.kv_lora_rank,
            mla.qk_rope_head_dim,
            mla.num_heads * mla.v_head_dim,
        ]
        self._q_norm = RmsNorm(weights.vector("q_a_layernorm"), _LATENT_EPS)
        self._latent_norm = RmsNorm(weights.vector("kv_a_layernorm"), _LATENT_EPS)
        self._q_b = weights.matrix("q_b_proj")
        per_head = weights.matrix("kv_b_proj").view(mla.num_heads, -1, mla.kv_lora_rank)
        self._absorb_key = per_head[:, : self._nope].contiguous()
        self._absorb_value = per_head[:, self._nope :].transpose(1, 2).contiguous()
        self._out = weights.matrix("o_proj")

    def __call__(self, x: torch.Tensor, parts: Sequence[Span]) -> torch.Tensor:
        """[T, H] -> [T, H]; appends T rows to the caches of the parts."""
        q_a, latent, key, gate = linear(x, self._entry).split_with_sizes(self._entry_sizes, -1)
        query = linear(self._q_norm(q_a), self._q_b).view(-1, self._heads, self._nope + self._rope)
        query = query.transpose(0, 1)
        query = torch.cat(
            [torch.bmm(query[..., : self._nope], self._absorb_key), query[..., self._nope :]], -1
        )
        rows = torch.cat([self._latent_norm(latent), key], -1)
        read = [
            self._attend(
                self._cache(part).append(rows[part.start : part.stop]),
                query[:, part.start : part.stop],
            )
            for part in parts
        ]
        output = torch.bmm(read[0] if len(read) == 1 else torch.cat(read, 1), self._absorb_value)
        gated = output.transpose(0, 1).reshape(gate.shape).mul_(torch.sigmoid(gate))
        return linear(gated, self._out)

    def _attend(self, keys: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """Causal attention of the last T of L tokens.

        keys [L, rank + rope], query [heads, T, rank + rope]; returns latent reads [heads, T, rank].
        """
        heads, tokens, width = query.shape
        length = keys.shape[0]
        scores = (query.reshape(-1, width) @ keys.t()).float().mul_(self._scale)
        if tokens > 1:
            future = torch.ones(tokens, tokens, dtype=torch.bool).triu_(1)
            recent = scores.view(heads, tokens, length)[..., length - tokens :]
            recent.masked_fill_(future, float("-inf"))
        share = torch.softmax(scores, -1).to(keys.dtype)
        return (share @ keys[:, : self._rank]).view(heads, tokens, self._rank)

    def _cache(self, part: Span) -> LatentCache:
        state = part.sequence.layers[self._layer]
        if not isinstance(state, LatentCache):
            raise LocalProtocolError(f"layer {self._layer} needs a latent cache")
        return state
