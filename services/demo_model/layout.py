"""The layout of the demo checkpoint: tensor names, formats, shards and the JSON files, as in
nvidia/Kimi-K3-NVFP4.

Owns the mapping from the training network's parameters to the names of the release, and what
config.json says. It must not know how a format is encoded or how a file is written. The network
stacks what the release keeps apart (experts, the three convolutions); here they come apart again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from services.demo_model.network import NetworkConfig

TOKENIZER_FILE = "tiktoken.model"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
QUANTISATION_FILE = "hf_quant_config.json"
GENERATION_FILE = "generation_config.json"

BIAS_NAME = "gate.e_score_correction_bias"
_PREFIX = "language_model."
_A_LOG_STEP = 128
"""The release stores A_log zero-padded to a multiple of 128; the first `num_attention_heads`
entries count.
"""
_SPECIAL_TOKENS = 256
_BOS, _END_OF_MESSAGE, _MEDIA_PAD, _PAD = 0, 2, 21, 255
_FUSED_ALIASES = {
    "q_proj": ("fused_qkvg_proj", "in_proj_qkvgfab"),
    "q_a_proj": ("fused_qkv_a_proj_with_mqa", "fused_qkv_a_proj"),
}
"""Names under which inference engines look up the format of matrices that they fuse."""


class Format(Enum):
    """How a tensor is stored."""

    NVFP4 = "NVFP4"
    FP8_BLOCK = "FP8_PB_WO"
    BF16 = "BF16"
    F32 = "F32"


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A float32 tensor under its checkpoint name. `scale_source`, for NVFP4, is what the shared
    second scale is taken over.
    """

    name: str
    value: Tensor
    format: Format
    scale_source: Tensor | None = None


def checkpoint_tensors(
    masters: Mapping[str, Tensor], config: NetworkConfig
) -> Iterator[NamedTensor]:
    """All tensors of the checkpoint from the network's float32 parameters and correction biases, by
    network name.
    """
    for name, value in masters.items():
        if name.endswith(".experts.w13"):
            yield from _gate_and_up(_release_name(name.removesuffix(".w13")), value, config)
        elif name.endswith(".experts.w2"):
            prefix = _release_name(name.removesuffix(".w2"))
            for expert in range(config.num_experts):
                matrix = value[expert]
                yield NamedTensor(f"{prefix}.{expert}.w2.weight", matrix, Format.NVFP4, matrix)
        elif name.endswith(("in_proj.weight", "gate_up_proj.weight")):
            yield from _fused(name, value, config)
        elif name.endswith("qkv_conv1d"):
            for letter, taps in zip("qkv", value.chunk(3, -1), strict=True):
                prefix = _release_name(name.removesuffix("qkv_conv1d"))
                yield NamedTensor(
                    f"{prefix}{letter}_conv1d.weight", taps.T.unsqueeze(1), Format.F32
                )
        elif name.endswith(".A_log"):
            padded = torch.nn.functional.pad(value, (0, -len(value) % _A_LOG_STEP))
            yield NamedTensor(_release_name(name), padded, Format.F32)
        else:
            yield NamedTensor(_release_name(name), value, _format(name))


def _gate_and_up(prefix: str, stacked: Tensor, config: NetworkConfig) -> Iterator[NamedTensor]:
    width = config.moe_intermediate_size
    for expert in range(config.num_experts):
        both = stacked[expert]
        yield NamedTensor(f"{prefix}.{expert}.w1.weight", both[:width], Format.NVFP4, both)
        yield NamedTensor(f"{prefix}.{expert}.w3.weight", both[width:], Format.NVFP4, both)


def _fused(name: str, stacked: Tensor, config: NetworkConfig) -> Iterator[NamedTensor]:
    """The matrices of a fused projection, in the order in which the network splits its output."""
    prefix, parts = name.rsplit(".", 2)[0], _fused_parts(name, config)
    pieces = torch.split_with_sizes(stacked, list(parts.values()))
    for leaf, piece in zip(parts, pieces, strict=True):
        own = f"{prefix}.{leaf}.weight"
        yield NamedTensor(_release_name(own), piece, _format(own))


def _fused_parts(name: str, config: NetworkConfig) -> dict[str, int]:
    """Rows of each matrix in a fused projection."""
    layer = int(name.split(".")[1])
    if name.endswith("gate_up_proj.weight"):
        shared = config.moe_intermediate_size * config.num_shared_experts
        width = shared if config.is_moe(layer) else config.intermediate_size
        return {"gate_proj": width, "up_proj": width}
    if config.is_full_attention(layer):
        return {
            "q_a_proj": config.q_lora_rank,
            "kv_a_proj_with_mqa": config.kv_lora_rank + config.qk_rope_head_dim,
            "g_proj": config.num_attention_heads * config.v_head_dim,
        }
    heads, width = config.num_attention_heads, config.kda_head_dim
    whole = dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_proj"), heads * width)
    return whole | {"f_a_proj": width, "b_proj": heads}


def _format(name: str) -> Format:
    if ".self_attn." in name and name.rsplit(".", 2)[-2].endswith(("_proj", "_with_mqa")):
        return Format.FP8_BLOCK
    if name.endswith((".dt_bias", ".o_norm", BIAS_NAME)):
        return Format.F32
    return Format.BF16


def _release_name(name: str) -> str:
    """Checkpoint name of a parameter that is stored as it is, or of the prefix of one that is taken
    apart.
    """
    for mixture in ("self_attention_res", "mlp_res", "output_attn_res"):
        name = name.replace(f"{mixture}.norm", f"{mixture}_norm").replace(
            f"{mixture}.proj", f"{mixture}_proj"
        )
    for part in ("merge.", "gate.", "experts", "routed_"):
        name = name.replace(f".mlp.{part}", f".block_sparse_moe.{part.removeprefix('merge.')}")
    bare = name.endswith(("layernorm", "norm", "_res_proj", "embed_tokens"))
    name = f"{name}.weight" if bare else name
    return f"{_PREFIX}{name}" if name.startswith("lm_head") else f"{_PREFIX}model.{name}"


def shard_of(name: str, config: NetworkConfig) -> int:
    """Number, from 1, of the shard that holds a tensor: one shard per layer, and one for everything
    else.
    """
    layers = f"{_PREFIX}model.layers."
    if name.startswith(layers):
        return int(name.removeprefix(layers).split(".", 1)[0]) + 1
    return config.num_hidden_layers + 1


def shard_name(number: int, config: NetworkConfig) -> str:
    """File name of shard `number`."""
    return f"model-{number:05d}-of-{config.num_hidden_layers + 1:05d}.safetensors"


def text_config(config: NetworkConfig) -> dict[str, Any]:
    """`text_config` of config.json, every field of the release."""
    full = [
        layer + 1 for layer in range(config.num_hidden_layers) if config.is_full_attention(layer)
    ]
    linear = [layer + 1 for layer in range(config.num_hidden_layers) if layer + 1 not in full]
    return {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_attention_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "routed_expert_hidden_size": config.routed_expert_hidden_size,
        "latent_moe_use_norm": True,
        "num_experts": config.num_experts,
        "num_experts_per_token": config.num_experts_per_token,
        "num_shared_experts": config.num_shared_experts,
        "first_k_dense_replace": config.first_k_dense_replace,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "hidden_act": "situ",
        "activation_situ_beta": config.situ_beta,
        "activation_situ_linear_beta": config.situ_linear_beta,
        "attn_res_block_size": config.attn_res_block_size,
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": 0.02,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        **special_tokens(config),
        "dtype": "bfloat16",
        "linear_attn_config": {
            "num_heads": config.num_attention_heads,
            "head_dim": config.kda_head_dim,
            "short_conv_kernel_size": config.short_conv_kernel_size,
            "gate_lower_bound": config.gate_lower_bound,
            "use_full_rank_gate": True,
            "full_attn_layers": full,
            "kda_layers": linear,
        },
    }


def special_tokens(config: NetworkConfig) -> dict[str, int]:
    """The ids that config.json names; specials start at the number of ranks. The end of a message
    ends a generation.
    """
    first = config.vocab_size - _SPECIAL_TOKENS
    return {
        "bos_token_id": first + _BOS,
        "eos_token_id": first + _END_OF_MESSAGE,
        "pad_token_id": first + _PAD,
    }


def model_config(config: NetworkConfig, quantisation: Mapping[str, Any]) -> dict[str, Any]:
    """config.json."""
    return {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        **special_tokens(config),
        "media_placeholder_token_id": config.vocab_size - _SPECIAL_TOKENS + _MEDIA_PAD,
        "tie_word_embeddings": False,
        "text_config": text_config(config),
        "quantization_config": {"quant_method": "modelopt_mixed", **quantisation},
    }


def generation_config(config: NetworkConfig) -> dict[str, Any]:
    """generation_config.json: K3's sampling."""
    return {**special_tokens(config), "temperature": 1.0, "top_p": 0.95}


def quantisation(tensors: Iterator[NamedTensor]) -> dict[str, Any]:
    """What is quantised and how: one entry per bank of experts and per attention matrix, under
    every alias.
    """
    layers: dict[str, dict[str, Any]] = {}
    for tensor in tensors:
        module = tensor.name.removesuffix(".weight")
        match tensor.format:
            case Format.NVFP4:
                bank = module.split(".experts.")[0] + ".experts"
                scheme: dict[str, Any] = {"quant_algo": "NVFP4", "group_size": 16}
                layers.update(dict.fromkeys(_aliases(bank), scheme))
            case Format.FP8_BLOCK:
                scheme = {"quant_algo": "FP8_PB_WO"}
                parent, leaf = module.rsplit(".", 1)
                for name in (leaf, *_FUSED_ALIASES.get(leaf, ())):
                    layers.update(dict.fromkeys(_aliases(f"{parent}.{name}"), scheme))
            case Format.BF16 | Format.F32:
                pass
    return {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "quantized_layers": dict(sorted(layers.items())),
        "exclude_modules": [
            "*embed_tokens*",
            "*lm_head*",
            "*shared_experts*",
            "*routed_expert_*",
            "*gate",
            "*_res_proj",
        ],
    }


def _aliases(module: str) -> list[str]:
    """A module under each prefix that engines use, and with `mlp` for `block_sparse_moe`."""
    bare = module.removeprefix(f"{_PREFIX}model.")
    spelled = {bare, bare.replace("block_sparse_moe", "mlp")}
    return [
        prefix + name for name in sorted(spelled) for prefix in (f"{_PREFIX}model.", "model.", "")
    ]
