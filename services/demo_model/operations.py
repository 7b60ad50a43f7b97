"""The K3 formulas in plain torch: what every faster form of them is held against.

Owns the arithmetic of a layer's parts as functions of tensors, and the protocol through which the
network asks for the three of them that have a fused form (native.py). It must not know about
parameters, steps or files. Shapes: B rows, T tokens, N = B * T, H hidden, L latent, I expert width,
K experts per token, E experts, D head width.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

CHUNK_TOKENS = 16
"""Tokens per KDA chunk: log decays are at least -5, so half a chunk spans e^40, finite in float32.
"""

L2_EPS = 1e-6


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def l2_normalise(x: Tensor) -> Tensor:
    """`x / sqrt(sum(x^2) + 1e-6)`: the epsilon stands on the sum, not on the mean."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """`beta * tanh(g / beta) * sigmoid(g) * linear_beta * tanh(u / linear_beta)` in float32."""
    gate, up = gate.float(), up.float()
    bounded = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
    return bounded * (linear_beta * torch.tanh(up / linear_beta))


class Operations(Protocol):
    """The parts of a layer that have a fused form."""

    def short_convolution(self, x: Tensor, taps: Tensor) -> Tensor:
        """Causal depthwise convolution, then SiLU: x [B, T, C], taps [W, C] float32 -> [B, T, C]
        float32.

        taps[W - 1] meets the current token.
        """

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
    ) -> Tensor:
        """The gated delta rule over whole rows; the state S [D, D] of each head starts at zero, and
        per token

            S <- exp(log_decay)[:, None] * S;  S <- S + (beta k) (v - k^T S);  out = q^T S

        q, k, v, log_decay [B, T, heads, D] and beta [B, T, heads], all float32 -> out, of the shape
        of v.
        """

    def routed(
        self,
        z: Tensor,
        ids: Tensor,
        weights: Tensor,
        matrices: tuple[Tensor, Tensor],
        betas: tuple[float, float],
    ) -> Tensor:
        """The weighted sum of a token's expert rows, in float32 and in the order of the choice.

        z [N, L], ids [N, K] int64, weights [N, K] float32, matrices w13 [E, 2 I, L] (gate rows
        first) and w2 [E, L, I], betas of SiTU -> [N, L] float32.
        """


class ReferenceOperations:
    """The readable form, in the dtype of its input; differentiable by torch itself."""

    def short_convolution(self, x: Tensor, taps: Tensor) -> Tensor:
        """See `Operations`."""
        width, tokens = taps.shape[0], x.shape[1]
        padded = functional.pad(x.float(), (0, 0, width - 1, 0))
        mixed = padded[:, :tokens] * taps[0]
        for tap in range(1, width):
            mixed = mixed + padded[:, tap : tap + tokens] * taps[tap]
        return functional.silu(mixed)

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
    ) -> Tensor:
        """See `Operations`; chunk by chunk, with decays relative to a chunk's middle so that
        nothing overflows.
        """
        rows, tokens, heads, width = q.shape
        pad = -tokens % CHUNK_TOKENS
        chunks = (tokens + pad) // CHUNK_TOKENS

        def chunked(x: Tensor) -> Tensor:
            x = functional.pad(x, (0, 0, 0, 0, 0, pad))
            x = x.reshape(rows, chunks, CHUNK_TOKENS, heads, -1).permute(1, 0, 3, 2, 4)
            return x.reshape(chunks, rows * heads, CHUNK_TOKENS, -1)

        q, k, v, rate = chunked(q), chunked(k), chunked(v), chunked(beta[..., None])
        total = chunked(log_decay).cumsum(-2)
        relative = total - total[..., CHUNK_TOKENS // 2 - 1 : CHUNK_TOKENS // 2, :]
        forward, backward = torch.exp(relative), k * torch.exp(-relative)
        inner = torch.tril((k * forward) @ backward.mT, -1) * rate
        reads = torch.tril((q * forward) @ backward.mT)
        decay = torch.exp(total)
        system = torch.eye(CHUNK_TOKENS, dtype=q.dtype) + inner
        known = rate * torch.cat((k * decay, v), -1)
        solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
        from_state, fresh = solved[..., :width], solved[..., width:]
        q_state, k_state = q * decay, (k * torch.exp(total[..., -1:, :] - total)).mT
        kept = decay[..., -1, :, None]
        state = torch.zeros(rows * heads, width, v.shape[-1], dtype=q.dtype)
        outputs = []
        for chunk in range(chunks):
            written = fresh[chunk] - from_state[chunk] @ state
            outputs.append(q_state[chunk] @ state + reads[chunk] @ written)
            state = kept[chunk] * state + k_state[chunk] @ written
        out = torch.stack(outputs).reshape(chunks, rows, heads, CHUNK_TOKENS, -1)
        return out.permute(1, 0, 3, 2, 4).reshape(rows, tokens + pad, heads, -1)[:, :tokens]

    def routed(
        self,
        z: Tensor,
        ids: Tensor,
        weights: Tensor,
        matrices: tuple[Tensor, Tensor],
        betas: tuple[float, float],
    ) -> Tensor:
        """See `Operations`; one expert after another."""
        w13, w2 = matrices
        rows = z.new_zeros(*ids.shape, z.shape[-1])
        for expert in torch.unique(ids).tolist():
            tokens, slots = torch.nonzero(ids == expert, as_tuple=True)
            gate, up = functional.linear(z[tokens], w13[expert]).chunk(2, -1)
            inner = situ(gate, up, *betas).to(z.dtype)
            rows = rows.index_put((tokens, slots), functional.linear(inner, w2[expert]))
        return (rows.float() * weights[..., None]).sum(1)
