"""How big a synthetic checkpoint is, and the JSON files that say so. Pure.

Owns the sizes, their limits, the two presets, and what config.json and hf_quant_config.json of the
release hold. Must not know bytes, shards or tensor contents.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from shared.core.errors import ConfigError
from shared.core.record import BLOCK
from shared.core.shape import K3
from station.model.config import K3Config

SPECIAL_TOKENS: Final = 256
_MLA_EVERY: Final = 4
_STRUCTURE_WIDTH: Final = 32
_BOS, _END_OF_MESSAGE, _MEDIA_PAD, _PAD = 0, 2, 21, 255
_PREFIX: Final = "language_model.model."
# Names under which inference engines look up the format of matrices that they fuse.
_FUSED: Final = {
    "q_proj": ("fused_qkvg_proj", "in_proj_qkvgfab"),
    "q_a_proj": ("fused_qkv_a_proj_with_mqa", "fused_qkv_a_proj"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthSizes:
    """Sizes of a checkpoint, by the names of config.json; layer 0 is dense, all others have
    experts. `shards` None is the release's cut: one shard per layer and three for the rest."""

    layers: int = 4
    experts: int = 16
    top_k: int = 4
    latent: int = 128
    width: int = 128
    hidden: int = 64
    vocab: int = 512
    shards: int | None = None

    def __post_init__(self) -> None:
        """ConfigError names the size that cannot be."""
        _check("layers", self.layers, low=2, high=10_000)
        _check("experts", self.experts, low=1, high=2**16 - 1)
        _check("top-k", self.top_k, low=1, high=min(64, self.experts))
        _check("hidden", self.hidden, low=1, high=2**20)
        _check("vocab", self.vocab, low=SPECIAL_TOKENS, high=2**24)
        for name, size in (("latent", self.latent), ("width", self.width)):
            _check(name, size, low=BLOCK, high=2**20)
            if size % BLOCK:
                raise ConfigError(
                    f"{name} {size} is not a multiple of {BLOCK}, the NVFP4 block: choose "
                    f"{size // BLOCK * BLOCK + BLOCK}"
                )
        if self.shards is not None:
            _check("shards", self.shards, low=1, high=99_999)

    @property
    def config(self) -> K3Config:
        """The architecture, as a reader of the checkpoint will see it."""
        return K3Config.from_mapping(
            {"model_type": "kimi_k3", "text_config": _text(self)}, source="synth"
        )


def k3_structure(shards: int | None = None) -> SynthSizes:
    """All layers, experts and tensors of the release, at widths that need a few hundred MB."""
    return SynthSizes(
        shards=shards,
        layers=K3.layers,
        experts=K3.experts,
        top_k=K3.top_k,
        latent=_STRUCTURE_WIDTH,
        width=_STRUCTURE_WIDTH,
        hidden=_STRUCTURE_WIDTH,
    )


def k3_experts(experts: int, shards: int | None = None) -> SynthSizes:
    """One MoE layer of real K3 experts; everything around them is small."""
    return SynthSizes(
        shards=shards,
        layers=2,
        experts=experts,
        top_k=min(K3.top_k, experts),
        latent=K3.expert.latent,
        width=K3.expert.width,
    )


def model_config(sizes: SynthSizes, quantisation: dict[str, Any]) -> dict[str, Any]:
    """config.json."""
    return {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        **_special_tokens(sizes.vocab),
        "media_placeholder_token_id": sizes.vocab - SPECIAL_TOKENS + _MEDIA_PAD,
        "tie_word_embeddings": False,
        "text_config": _text(sizes),
        "quantization_config": {"quant_method": "modelopt_mixed", **quantisation},
    }


def quantisation(banks: Iterable[str], attention: Iterable[str]) -> dict[str, Any]:
    """What is quantised and how, under every alias that engines look up.

    `banks` are module names that end in `.experts`, `attention` those of block-FP8 matrices.
    """
    layers: dict[str, dict[str, Any]] = {}
    for bank in banks:
        layers |= {name: {"quant_algo": "NVFP4", "group_size": BLOCK} for name in _aliases(bank)}
    for module in attention:
        parent, leaf = module.rsplit(".", 1)
        for name in (leaf, *_FUSED.get(leaf, ())):
            layers |= {alias: {"quant_algo": "FP8_PB_WO"} for alias in _aliases(f"{parent}.{name}")}
    return {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "group_size": BLOCK,
        "quantized_layers": dict(sorted(layers.items())),
        "exclude_modules": ["*embed_tokens*", "*lm_head*", "*shared_experts*", "*routed_expert_*"],
    }


def _aliases(module: str) -> list[str]:
    bare = module.removeprefix(_PREFIX)
    spelled = {bare, bare.replace("block_sparse_moe", "mlp")}
    return [prefix + name for name in sorted(spelled) for prefix in (_PREFIX, "model.", "")]


def _check(name: str, value: int, *, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}: choose a number from {low} to {high}")


def _special_tokens(vocab: int) -> dict[str, int]:
    first = vocab - SPECIAL_TOKENS
    return {
        "bos_token_id": first + _BOS,
        "eos_token_id": first + _END_OF_MESSAGE,
        "pad_token_id": first + _PAD,
    }


def _text(sizes: SynthSizes) -> dict[str, Any]:
    """`text_config`: every field of the release. Attention is small at every size: a synthetic
    checkpoint is about experts."""
    last = sizes.layers
    full = [n for n in range(1, last + 1) if n % _MLA_EVERY == 0 or n == last]
    return {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "intermediate_size": 96,
        "moe_intermediate_size": sizes.width,
        "routed_expert_hidden_size": sizes.latent,
        "latent_moe_use_norm": True,
        "num_experts": sizes.experts,
        "num_experts_per_token": sizes.top_k,
        "num_shared_experts": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 12,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        **_special_tokens(sizes.vocab),
        "dtype": "bfloat16",
        "linear_attn_config": {
            "num_heads": 2,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
            "full_attn_layers": full,
            "kda_layers": [n for n in range(1, last + 1) if n not in full],
        },
    }
