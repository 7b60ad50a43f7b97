"""The Kimi-K3 text architecture in plain torch, small enough to train on a CPU.

Owns the trainable network: its parts, its parameters and their start values. It must not know where
the text comes from, how a step is taken or what a checkpoint file looks like. The pod never runs
this code: it serves the exported checkpoint through `station.model`; this is the same mathematics
for whole rows, with gradients.

Formulas: Kimi Delta Attention with the bounded gate, gated MLA without positions, latent mixture of
experts with an FP32 router and a correction bias that only takes part in the choice, SiTU, and
attention over depth (AttnRes) in place of the residual stream. Shapes: B rows, T tokens, N = B * T,
H hidden, L latent, K experts per token, E experts, D head width.

Matrices that enter a matrix product are held in `dtype` (bf16 while training: that is what a CPU
with AMX multiplies fast), everything else in float32. The optimiser keeps the float32 masters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from services.demo_model.operations import (
    Operations,
    ReferenceOperations,
    l2_normalise,
    rms_norm,
    situ,
)

LATENT_NORM_EPS = 1e-6
"""The two latent norms of MLA; every other norm has `rms_norm_eps`."""


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """Sizes of a K3 text network; the defaults are the demo model. Field names are those of
    config.json.
    """

    vocab_size: int = 2048
    hidden_size: int = 256
    num_hidden_layers: int = 9
    num_attention_heads: int = 4
    kda_head_dim: int = 64
    short_conv_kernel_size: int = 4
    gate_lower_bound: float = -5.0
    q_lora_rank: int = 128
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64
    intermediate_size: int = 1024
    moe_intermediate_size: int = 128
    routed_expert_hidden_size: int = 128
    num_experts: int = 64
    num_experts_per_token: int = 8
    num_shared_experts: int = 1
    first_k_dense_replace: int = 1
    attn_res_block_size: int = 4
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096

    def is_full_attention(self, layer: int) -> bool:
        """Whether layer (from 0) is MLA: every fourth one, and the last."""
        return (layer + 1) % 4 == 0 or layer == self.num_hidden_layers - 1

    def is_moe(self, layer: int) -> bool:
        """Whether layer (from 0) routes to experts; the first `first_k_dense_replace` layers are
        dense.
        """
        return layer >= self.first_k_dense_replace


class Linear(nn.Module):
    """A matrix without bias, `[outputs, inputs]`; the input is cast to the matrix's dtype, the
    result stays in it.
    """

    def __init__(
        self, inputs: int, outputs: int, dtype: torch.dtype, *, std: float | None = None
    ) -> None:
        super().__init__()
        scale = inputs**-0.5 if std is None else std
        self.weight = nn.Parameter((torch.randn(outputs, inputs) * scale).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        return functional.linear(x.to(self.weight.dtype), self.weight)


class Norm(nn.Module):
    """RMSNorm with a float32 weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same shape, float32."""
        return rms_norm(x, self.weight, self.eps)


class DepthMix(nn.Module):
    """AttnRes followed by the norm that reads it: a softmax over the block vectors and the running
    prefix of a token.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(width))
        self.proj = nn.Parameter(torch.zeros(1, width))
        self.eps = eps

    def forward(self, sources: list[Tensor], norm_weight: Tensor) -> Tensor:
        """[N, H] float32 vectors, prefix last -> RMSNorm of their mixture, [N, H]. One source is
        its own mixture.
        """
        query = self.norm * self.proj[0]
        scores = [
            (source * query).sum(-1) * torch.rsqrt(source.square().mean(-1) + self.eps)
            for source in sources
        ]
        shares = torch.softmax(torch.stack(scores, -1), -1)
        mixed = sources[0] * shares[..., :1]
        for depth in range(1, len(sources)):
            mixed = mixed + sources[depth] * shares[..., depth : depth + 1]
        return rms_norm(mixed, norm_weight, self.eps)


class DeltaAttention(nn.Module):
    """Kimi Delta Attention: linear attention with a decay per channel, bounded below, and a full-
    rank output gate.
    """

    def __init__(self, config: NetworkConfig, dtype: torch.dtype, operations: Operations) -> None:
        super().__init__()
        hidden, heads, width = config.hidden_size, config.num_attention_heads, config.kda_head_dim
        inner = heads * width
        self.config = config
        self.operations = operations
        self.in_parts = (3 * inner, inner, width, heads)
        # q, k, v, the output gate, f_a and b read the same input: one product instead of six.
        self.in_proj = Linear(hidden, sum(self.in_parts), dtype)
        self.f_b_proj = Linear(width, inner, dtype)
        self.o_proj = Linear(inner, hidden, dtype)
        # The taps of q, k and v side by side, [W, 3 C]: one convolution, the last row meets the
        # current token.
        taps = 0.1 * torch.randn(config.short_conv_kernel_size, 3 * inner)
        taps[-1] += 1.0
        self.qkv_conv1d = nn.Parameter(taps)
        self.A_log = nn.Parameter(torch.zeros(heads))
        # Slow decays at the start: sigmoid(dt_bias) between 0.002 and 0.1, spread evenly in the
        # logarithm.
        rates = torch.exp(torch.empty(inner).uniform_(math.log(0.002), math.log(0.1)))
        self.dt_bias = nn.Parameter(torch.logit(rates))
        self.o_norm = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H] float32."""
        rows, tokens, _ = x.shape
        heads, width = self.config.num_attention_heads, self.config.kda_head_dim
        split = (rows, tokens, heads, width)
        qkv, gate, forget, rate = self.in_proj(x).split(self.in_parts, -1)
        qkv = self.operations.short_convolution(qkv.float(), self.qkv_conv1d)
        q, k, v = (part.reshape(split) for part in qkv.chunk(3, -1))
        forget = self.f_b_proj(forget).view(split).float() + self.dt_bias.view(heads, width)
        log_decay = self.config.gate_lower_bound * torch.sigmoid(self.A_log.exp()[:, None] * forget)
        beta = torch.sigmoid(rate.float())
        q, k = l2_normalise(q) * width**-0.5, l2_normalise(k)
        out = self.operations.delta_rule(q, k, v, log_decay, beta)
        out = rms_norm(out, self.o_norm, self.config.rms_norm_eps)
        out = out * torch.sigmoid(gate.reshape(split).float())
        return cast(Tensor, self.o_proj(out.reshape(rows, tokens, heads * width)).float())


class LatentAttention(nn.Module):
    """Multi-head latent attention without positions (NoPE), with an output gate."""

    def __init__(self, config: NetworkConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.config = config
        self.in_parts = (config.q_lora_rank, config.kv_lora_rank, rope, heads * value)
        # q_a, kv_a (latent and shared key) and the output gate read the same input.
        self.in_proj = Linear(hidden, sum(self.in_parts), dtype)
        self.q_a_layernorm = Norm(config.q_lora_rank, LATENT_NORM_EPS)
        self.q_b_proj = Linear(config.q_lora_rank, heads * (nope + rope), dtype)
        self.kv_a_layernorm = Norm(config.kv_lora_rank, LATENT_NORM_EPS)
        self.kv_b_proj = Linear(config.kv_lora_rank, heads * (nope + value), dtype)
        self.o_proj = Linear(heads * value, hidden, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, H] float32; causal over T. The rope part of a key is shared by all
        heads and not rotated.
        """
        rows, tokens, _ = x.shape
        config = self.config
        heads, nope = config.num_attention_heads, config.qk_nope_head_dim
        query, latent, shared_key, gate = self.in_proj(x).split(self.in_parts, -1)
        q = self.q_b_proj(self.q_a_layernorm(query))
        q = q.view(rows, tokens, heads, -1).transpose(1, 2)
        kv = (
            self.kv_b_proj(self.kv_a_layernorm(latent))
            .view(rows, tokens, heads, -1)
            .transpose(1, 2)
        )
        spread = shared_key[:, None].expand(rows, heads, tokens, config.qk_rope_head_dim)
        k, v = torch.cat((kv[..., :nope], spread), -1), kv[..., nope:]
        scores = (q @ k.mT).float() * (nope + config.qk_rope_head_dim) ** -0.5
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        shares = torch.softmax(scores.masked_fill(later, float("-inf")), -1)
        out = (shares.to(v.dtype) @ v).transpose(1, 2).reshape(rows, tokens, -1)
        return cast(Tensor, self.o_proj(out.float() * torch.sigmoid(gate.float())).float())


class FeedForward(nn.Module):
    """`down(SiTU(gate(x), up(x)))`: the dense layer and the shared experts."""

    def __init__(self, config: NetworkConfig, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.gate_up_proj = Linear(config.hidden_size, 2 * width, dtype)
        self.down_proj = Linear(width, config.hidden_size, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[N, H] -> [N, H] float32."""
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        inner = situ(gate, up, self.config.situ_beta, self.config.situ_linear_beta)
        return cast(Tensor, self.down_proj(inner).float())


class Experts(nn.Module):
    """All experts of a layer, stacked: `w13` [E, 2 I, L], gate rows first, `w2` [E, L, I]."""

    def __init__(self, config: NetworkConfig, dtype: torch.dtype) -> None:
        super().__init__()
        count, latent = config.num_experts, config.routed_expert_hidden_size
        width = config.moe_intermediate_size
        self.w13 = nn.Parameter((torch.randn(count, 2 * width, latent) * latent**-0.5).to(dtype))
        self.w2 = nn.Parameter((torch.randn(count, latent, width) * width**-0.5).to(dtype))


class Router(nn.Module):
    """Sigmoid scores in float32; the correction bias moves the choice, never the weights."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.chosen = config.num_experts_per_token
        self.weight = nn.Parameter(
            torch.randn(config.num_experts, config.hidden_size) * config.hidden_size**-0.5
        )
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts))
        self.e_score_correction_bias: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, H] -> expert ids [N, K] int64 and weights [N, K] float32 that sum to one."""
        scores = torch.sigmoid(functional.linear(x.float(), self.weight))
        ids = torch.topk(scores.detach() + self.e_score_correction_bias, self.chosen, -1).indices
        weights = scores.gather(-1, ids)
        return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20)


class Merge(nn.Module):
    """What follows the sum over the experts: the norm, the way up and the shared experts."""

    def __init__(self, config: NetworkConfig, dtype: torch.dtype) -> None:
        super().__init__()
        latent, hidden = config.routed_expert_hidden_size, config.hidden_size
        self.routed_expert_norm = Norm(latent, config.rms_norm_eps)
        # Half the usual start value: the normalised sum would otherwise outweigh the attention.
        self.routed_expert_up_proj = Linear(latent, hidden, dtype, std=0.5 * latent**-0.5)
        self.shared_experts = FeedForward(
            config, config.moe_intermediate_size * config.num_shared_experts, dtype
        )

    def forward(self, x: Tensor, routed: Tensor) -> Tensor:
        """x [N, H], routed [N, L] -> [N, H] float32."""
        routed = self.routed_expert_up_proj(self.routed_expert_norm(routed)).float()
        return cast(Tensor, routed + self.shared_experts(x))


class LatentMoe(nn.Module):
    """The latent mixture of experts; `loads` holds the tokens per expert of the latest pass, for
    the balancer.
    """

    def __init__(self, config: NetworkConfig, dtype: torch.dtype, operations: Operations) -> None:
        super().__init__()
        self.operations = operations
        self.betas = (config.situ_beta, config.situ_linear_beta)
        self.gate = Router(config)
        self.routed_expert_down_proj = Linear(
            config.hidden_size, config.routed_expert_hidden_size, dtype
        )
        self.experts = Experts(config, dtype)
        self.merge = Merge(config, dtype)
        self.loads = torch.zeros(config.num_experts, dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        """[N, H] -> [N, H] float32."""
        ids, weights = self.gate(x)
        self.loads = torch.bincount(ids.reshape(-1), minlength=len(self.loads))
        z = self.routed_expert_down_proj(x)
        matrices = (self.experts.w13, self.experts.w2)
        return cast(
            Tensor, self.merge(x, self.operations.routed(z, ids, weights, matrices, self.betas))
        )


class Layer(nn.Module):
    """One layer: attention and a feed-forward part, each reading its own mixture over depth."""

    def __init__(
        self, config: NetworkConfig, index: int, dtype: torch.dtype, operations: Operations
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.Parameter(torch.ones(hidden))
        self.post_attention_layernorm = nn.Parameter(torch.ones(hidden))
        self.self_attention_res = DepthMix(hidden, eps)
        self.mlp_res = DepthMix(hidden, eps)
        self.self_attn: nn.Module
        if config.is_full_attention(index):
            self.self_attn = LatentAttention(config, dtype)
        else:
            self.self_attn = DeltaAttention(config, dtype, operations)
        self.mlp: nn.Module
        if config.is_moe(index):
            self.mlp = LatentMoe(config, dtype, operations)
        else:
            self.mlp = FeedForward(config, config.intermediate_size, dtype)


class Network(nn.Module):
    """The whole text model, for rows of equal length that start from nothing."""

    def __init__(
        self,
        config: NetworkConfig,
        dtype: torch.dtype = torch.float32,
        operations: Operations | None = None,
    ) -> None:
        super().__init__()
        operations = ReferenceOperations() if operations is None else operations
        self.config = config
        self.embed_tokens = nn.Parameter(
            (torch.randn(config.vocab_size, config.hidden_size) * 0.5).to(dtype)
        )
        self.layers = nn.ModuleList(
            Layer(config, index, dtype, operations) for index in range(config.num_hidden_layers)
        )
        self.output_attn_res = DepthMix(config.hidden_size, config.rms_norm_eps)
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype, std=0.02)

    def mixtures(self) -> list[LatentMoe]:
        """The expert layers, in order."""
        return [module for module in self.modules() if isinstance(module, LatentMoe)]

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """ids [B, T] int64 -> logits float32, [N, V] or only the flat `positions` [M] -> [M, V]."""
        batch = ids.shape
        prefix = (
            functional.embedding(ids, self.embed_tokens).view(-1, self.config.hidden_size).float()
        )
        blocks: list[Tensor] = []
        for index, layer in enumerate(cast(list[Layer], list(self.layers))):
            # At layer 0 there is only the embedding, and a mixture of one vector is that vector.
            x = layer.self_attention_res([*blocks, prefix], layer.input_layernorm)
            attended = layer.self_attn(x.view(*batch, -1)).view(-1, self.config.hidden_size)
            if index % self.config.attn_res_block_size == 0:
                blocks = [*blocks, prefix]
                prefix = attended
            else:
                prefix = prefix + attended
            prefix = prefix + layer.mlp(
                layer.mlp_res([*blocks, prefix], layer.post_attention_layernorm)
            )
        out = self.output_attn_res([*blocks, prefix], self.norm)
        return cast(Tensor, self.lm_head(out if positions is None else out[positions]).float())

    def compile_regions(self) -> None:
        """Compile the parts between the fused operations: the same results up to rounding, in half
        the time.

        A whole-model compilation would have to guard on the loads of the experts; regions compile
        once per kind.
        """
        for module in self.modules():
            if isinstance(
                module, DepthMix | DeltaAttention | LatentAttention | FeedForward | Router | Merge
            ):
                module.compile(dynamic=False)
