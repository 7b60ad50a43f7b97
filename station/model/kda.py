"""Kimi Delta Attention: short convolution, bounded forget gate, delta rule, gated norm.

Owns the layer's weights, fused for few calls: all six projections of the input are one matrix. The
recurrence itself is in delta_rule.py. Float32 from the convolution to the gated norm; the inputs of
the recurrence are rounded to the model's dtype first, as the official kernels see them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import linear, silu

from shared.core.errors import LocalProtocolError
from station.model.config import K3Config
from station.model.delta_rule import delta_chunks, delta_step
from station.model.norms import InverseRms, RmsNorm
from station.model.state import KdaState, Span
from station.model.weights import ModuleWeights

_L2_EPS = 1e-6  # added to the sum of squares, not to their mean


class KdaAttention:
    """One KDA layer."""

    def __init__(self, weights: ModuleWeights, config: K3Config, layer: int) -> None:
        """Reads `self_attn.*` below the prefix of `weights`, the layer's."""
        kda = config.kda
        weights = weights.below("self_attn.")
        self._layer = layer
        self._heads, self._size = kda.num_heads, kda.head_dim
        self._inner = kda.num_heads * kda.head_dim
        self._dtype = weights.dtype
        self._bound = kda.gate_lower_bound
        self._entry = weights.matrix("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "f_a_proj")
        self._entry_sizes = [3 * self._inner, self._inner + self._heads, self._size]
        self._out = weights.matrix("o_proj")
        convolutions = [weights.exact(f"{name}_conv1d.weight")[:, 0] for name in ("q", "k", "v")]
        self._taps = torch.cat(convolutions).t().contiguous()
        # exp(A_log) * (f_b f_a + dt_bias) is one affine map of f_a, kept in float32
        rate = torch.exp(weights.exact("A_log")).repeat_interleave(kda.head_dim)
        self._decay_matrix = (weights.exact("f_b_proj.weight") * rate[:, None]).t().contiguous()
        self._decay_bias = weights.exact("dt_bias") * rate
        self._inverse_rms = InverseRms(kda.head_dim, _L2_EPS / kda.head_dim)
        # 1/sqrt(sum + eps) = D^-0.5 / sqrt(mean + eps/D); q carries the attention scale as well
        scale = torch.tensor([1.0 / kda.head_dim, kda.head_dim**-0.5])
        self._qk_scale = scale[:, None, None]
        self._norm = RmsNorm(weights.exact("o_norm.weight"), config.rms_norm_eps)

    def __call__(self, x: torch.Tensor, parts: Sequence[Span]) -> torch.Tensor:
        """[T, H] -> [T, H]; advances the layer state of every part."""
        inner, heads, size = self._inner, self._heads, self._size
        qkv, gates, f_a = linear(x, self._entry).split_with_sizes(self._entry_sizes, -1)
        decay = torch.addmm(self._decay_bias, f_a.float(), self._decay_matrix)
        log_decay = decay.sigmoid_().mul_(self._bound).view(-1, heads, size)
        gates = torch.sigmoid(gates.float())
        beta = gates[:, inner:]
        read = [
            self._recur(
                self._state(part),
                qkv[part.start : part.stop],
                log_decay[part.start : part.stop],
                beta[part.start : part.stop],
            )
            for part in parts
        ]
        output = self._norm(read[0] if len(read) == 1 else torch.cat(read))
        gated = output.reshape(-1, inner).mul_(gates[:, :inner])
        return linear(gated.to(self._dtype), self._out)

    def _recur(
        self, state: KdaState, qkv: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        """Convolve and run the delta rule for one sequence; [T, heads, D] float32."""
        tokens = qkv.shape[0]
        mixed = self._convolve(state, qkv).view(tokens, 3, self._heads, self._size)
        if tokens == 1:
            mixed = mixed[0]
            q, k = self._normalised(mixed[:2])
            decay = torch.exp(log_decay[0])
            return delta_step(q, k, mixed[2], decay, beta[0], state.memory).unsqueeze(0)
        q, k = self._normalised(mixed[:, :2]).unbind(1)
        return delta_chunks(q, k, mixed[:, 2], log_decay, beta, state.memory)

    def _normalised(self, query_key: torch.Tensor) -> torch.Tensor:
        """L2-normalised q and k, [..., 2, heads, D], q times the attention scale."""
        return query_key * self._inverse_rms(query_key).mul_(self._qk_scale)

    def _convolve(self, state: KdaState, qkv: torch.Tensor) -> torch.Tensor:
        """Causal depthwise convolution and SiLU; the last tap multiplies the current token."""
        tokens = qkv.shape[0]
        window = torch.cat([state.window, qkv])
        state.window = window[tokens:]
        taps = self._taps
        if tokens == 1:
            mixed = (window * taps).sum(0)
        else:
            mixed = window[:tokens] * taps[0]
            for tap in range(1, taps.shape[0]):
                mixed.addcmul_(window[tap : tap + tokens], taps[tap])
        return silu(mixed, inplace=True).to(self._dtype).float()

    def _state(self, part: Span) -> KdaState:
        state = part.sequence.layers[self._layer]
        if not isinstance(state, KdaState):
            raise LocalProtocolError(f"layer {self._layer} needs a KDA state")
        return state
