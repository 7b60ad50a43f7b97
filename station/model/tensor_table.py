"""Which tensors a checkpoint of a given config must hold, with their logical shapes.

Owns the names and shapes of the release. Storage formats are decided later, per tensor, from the
dtypes found; here a tensor has only a logical shape and a kind. Must not know files or torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from station.model.config import K3Config

PREFIX: Final = "language_model."
IGNORED_PREFIXES: Final = ("vision_tower.", "mm_projector.")


class Kind(Enum):
    """What storage a tensor may have."""

    PLAIN = "plain"  # BF16, F16 or F32
    LINEAR = "linear"  # plain, or block FP8
    PADDED = "padded"  # plain; the first dimension may be longer than needed
    EXPERT = "expert"  # NVFP4 or MXFP4


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """A tensor the model needs; `name` ends in `.weight` for every matrix, whatever its storage."""

    name: str
    shape: tuple[int, ...]
    kind: Kind


def layer_prefix(layer: int) -> str:
    """Name prefix of everything in 0-based `layer`, with its trailing dot."""
    return f"{PREFIX}model.layers.{layer}."


def expert_prefix(layer: int, expert: int) -> str:
    """Name prefix of one routed expert, with its trailing dot."""
    return f"{layer_prefix(layer)}block_sparse_moe.experts.{expert}."


def expected_tensors(config: K3Config) -> Iterator[ExpectedTensor]:
    """Every text tensor, experts last within their layer."""
    hidden = config.hidden_size
    for name in ("model.embed_tokens", "lm_head"):
        yield ExpectedTensor(f"{PREFIX}{name}.weight", (config.vocab_size, hidden), Kind.PLAIN)
    yield ExpectedTensor(f"{PREFIX}model.norm.weight", (hidden,), Kind.PLAIN)
    yield from _attention_residual(f"{PREFIX}model.output_attn_res", hidden)
    for layer in range(config.num_hidden_layers):
        prefix = layer_prefix(layer)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield ExpectedTensor(f"{prefix}{norm}.weight", (hidden,), Kind.PLAIN)
        for residual in ("self_attention_res", "mlp_res"):
            yield from _attention_residual(f"{prefix}{residual}", hidden)
        attention = f"{prefix}self_attn."
        yield from (
            _mla(config, attention) if layer in config.mla_layers else _kda(config, attention)
        )
        if config.is_moe(layer):
            yield from _moe(config, f"{prefix}block_sparse_moe.")
            for expert in range(config.num_experts):
                yield from _expert(config, expert_prefix(layer, expert))
        else:
            yield from _mlp(f"{prefix}mlp.", hidden, config.intermediate_size)


def _attention_residual(prefix: str, hidden: int) -> Iterator[ExpectedTensor]:
    yield ExpectedTensor(f"{prefix}_norm.weight", (hidden,), Kind.PLAIN)
    yield ExpectedTensor(f"{prefix}_proj.weight", (1, hidden), Kind.PLAIN)


def _kda(config: K3Config, prefix: str) -> Iterator[ExpectedTensor]:
    kda, hidden = config.kda, config.hidden_size
    inner = kda.num_heads * kda.head_dim
    for name, shape in (
        ("q_proj", (inner, hidden)),
        ("k_proj", (inner, hidden)),
        ("v_proj", (inner, hidden)),
        ("g_proj", (inner, hidden)),
        ("f_a_proj", (kda.head_dim, hidden)),
        ("f_b_proj", (inner, kda.head_dim)),
        ("b_proj", (kda.num_heads, hidden)),
        ("o_proj", (hidden, inner)),
    ):
        yield ExpectedTensor(f"{prefix}{name}.weight", shape, Kind.LINEAR)
    for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
        yield ExpectedTensor(f"{prefix}{name}.weight", (inner, 1, kda.conv_kernel), Kind.PLAIN)
    yield ExpectedTensor(f"{prefix}A_log", (kda.num_heads,), Kind.PADDED)
    yield ExpectedTensor(f"{prefix}dt_bias", (inner,), Kind.PLAIN)
    yield ExpectedTensor(f"{prefix}o_norm.weight", (kda.head_dim,), Kind.PLAIN)


def _mla(config: K3Config, prefix: str) -> Iterator[ExpectedTensor]:
    mla, hidden = config.mla, config.hidden_size
    q_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    kv_dim = mla.qk_nope_head_dim + mla.v_head_dim
    inner = mla.num_heads * mla.v_head_dim
    for name, shape in (
        ("q_a_proj", (mla.q_lora_rank, hidden)),
        ("q_b_proj", (mla.num_heads * q_dim, mla.q_lora_rank)),
        ("kv_a_proj_with_mqa", (mla.kv_lora_rank + mla.qk_rope_head_dim, hidden)),
        ("kv_b_proj", (mla.num_heads * kv_dim, mla.kv_lora_rank)),
        ("g_proj", (inner, hidden)),
        ("o_proj", (hidden, inner)),
    ):
        yield ExpectedTensor(f"{prefix}{name}.weight", shape, Kind.LINEAR)
    yield ExpectedTensor(f"{prefix}q_a_layernorm.weight", (mla.q_lora_rank,), Kind.PLAIN)
    yield ExpectedTensor(f"{prefix}kv_a_layernorm.weight", (mla.kv_lora_rank,), Kind.PLAIN)


def _mlp(prefix: str, hidden: int, inner: int) -> Iterator[ExpectedTensor]:
    for name, shape in (
        ("gate_proj", (inner, hidden)),
        ("up_proj", (inner, hidden)),
        ("down_proj", (hidden, inner)),
    ):
        yield ExpectedTensor(f"{prefix}{name}.weight", shape, Kind.LINEAR)


def _moe(config: K3Config, prefix: str) -> Iterator[ExpectedTensor]:
    hidden, latent = config.hidden_size, config.expert.latent
    yield ExpectedTensor(f"{prefix}gate.weight", (config.num_experts, hidden), Kind.PLAIN)
    yield ExpectedTensor(f"{prefix}gate.e_score_correction_bias", (config.num_experts,), Kind.PLAIN)
    yield ExpectedTensor(f"{prefix}routed_expert_down_proj.weight", (latent, hidden), Kind.LINEAR)
    yield ExpectedTensor(f"{prefix}routed_expert_up_proj.weight", (hidden, latent), Kind.LINEAR)
    yield ExpectedTensor(f"{prefix}routed_expert_norm.weight", (latent,), Kind.PLAIN)
    shared = config.expert.width * config.num_shared_experts
    yield from _mlp(f"{prefix}shared_experts.", hidden, shared)


def _expert(config: K3Config, prefix: str) -> Iterator[ExpectedTensor]:
    latent, width = config.expert.latent, config.expert.width
    yield ExpectedTensor(f"{prefix}w1.weight", (width, latent), Kind.EXPERT)
    yield ExpectedTensor(f"{prefix}w3.weight", (width, latent), Kind.EXPERT)
    yield ExpectedTensor(f"{prefix}w2.weight", (latent, width), Kind.EXPERT)
