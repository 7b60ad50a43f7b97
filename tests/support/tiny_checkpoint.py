"""Random checkpoints of any size in the layouts of the two public releases, from a seed.

Real files with real names: several shards and an index, experts in lexicographic order, zero-padded
A_log, vision tensors that a text model must ignore. The weights mean nothing, but nothing is left
at a value (0, 1) that would hide a mistake.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from shared.kernels import codecs

Layout = Literal["nvfp4", "mxfp4"]
Tensors = dict[str, np.ndarray]
PREFIX = "language_model."


@dataclass(frozen=True)
class TinyModel:
    """Sizes of a checkpoint; every `mla_every`-th layer and the last are full attention."""

    layers: int = 5
    experts: int = 8
    top_k: int = 2
    latent: int = 128
    width: int = 128
    hidden: int = 64
    heads: int = 2
    vocab: int = 300
    kda_heads: int = 2
    head_dim: int = 32
    q_lora: int = 48
    kv_lora: int = 32
    nope: int = 32
    rope: int = 16
    v_head: int = 32
    intermediate: int = 96
    shared_experts: int = 2
    block: int = 2
    dense_layers: int = 1
    scaling: float = 1.0
    mla_every: int = 4
    context: int = 512

    def text_config(self) -> dict[str, Any]:
        """The `text_config` of config.json, with the same fields as the release."""
        mla = [i for i in range(self.layers) if (i + 1) % self.mla_every == 0]
        mla = sorted({*mla, self.layers - 1})
        return _FIXED_CONFIG | {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "max_position_embeddings": self.context,
            "q_lora_rank": self.q_lora,
            "kv_lora_rank": self.kv_lora,
            "qk_nope_head_dim": self.nope,
            "qk_rope_head_dim": self.rope,
            "v_head_dim": self.v_head,
            "intermediate_size": self.intermediate,
            "moe_intermediate_size": self.width,
            "routed_expert_hidden_size": self.latent,
            "num_experts": self.experts,
            "num_experts_per_token": self.top_k,
            "num_shared_experts": self.shared_experts,
            "first_k_dense_replace": self.dense_layers,
            "routed_scaling_factor": self.scaling,
            "attn_res_block_size": self.block,
            "bos_token_id": self.vocab - 16,
            "eos_token_id": self.vocab - 14,
            "pad_token_id": self.vocab - 1,
            "linear_attn_config": {
                "num_heads": self.kda_heads,
                "head_dim": self.head_dim,
                "short_conv_kernel_size": 4,
                "gate_lower_bound": -5.0,
                "use_full_rank_gate": True,
                "full_attn_layers": [i + 1 for i in mla],
                "kda_layers": [i + 1 for i in range(self.layers) if i not in mla],
            },
        }


_FIXED_CONFIG = {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "latent_moe_use_norm": True,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "rms_norm_eps": 1e-5,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def write_tiny_checkpoint(
    directory: Path, *, seed: int, layout: Layout = "nvfp4", **sizes: Any
) -> Path:
    """Write config, index and shards (one per layer, one for the rest) into `directory`.

    `sizes` are the fields of TinyModel. Equal arguments write equal files. Returns `directory`.
    """
    text = TinyModel(**sizes).text_config()
    layers = text["num_hidden_layers"]
    writer = _Writer(text, layout, np.random.default_rng(seed))
    shards = [writer.layer(layer) for layer in range(layers)] + [writer.rest()]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_config(text, layout), indent=1))
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, directory / name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return directory


class _Writer:
    """Draws tensors in a fixed order, so that one seed is one checkpoint."""

    def __init__(self, text: dict[str, Any], layout: Layout, rng: np.random.Generator) -> None:
        self.text = text
        self.layout = layout
        self.rng = rng

    def normal(self, *shape: int, std: float) -> np.ndarray:
        return (self.rng.standard_normal(shape) * std).astype(np.float32)

    def norm(self, size: int) -> np.ndarray:
        return 1 + self.normal(size, std=0.3)

    def rest(self) -> Tensors:
        hidden, vocab = self.text["hidden_size"], self.text["vocab_size"]
        tensors: Tensors = {}
        bf16(tensors, f"{PREFIX}model.embed_tokens.weight", self.normal(vocab, hidden, std=0.7))
        bf16(tensors, f"{PREFIX}lm_head.weight", self.normal(vocab, hidden, std=hidden**-0.5))
        bf16(tensors, f"{PREFIX}model.norm.weight", self.norm(hidden))
        self.residual(tensors, f"{PREFIX}model.output_attn_res")
        bf16(tensors, "vision_tower.patch_embed.proj.weight", self.normal(4, 3, std=1.0))
        bf16(tensors, "mm_projector.proj.0.weight", self.normal(4, 4, std=1.0))
        return tensors

    def residual(self, tensors: Tensors, name: str) -> None:
        hidden = self.text["hidden_size"]
        bf16(tensors, f"{name}_norm.weight", self.norm(hidden))
        bf16(tensors, f"{name}_proj.weight", self.normal(1, hidden, std=0.2))

    def layer(self, layer: int) -> Tensors:
        text, tensors, hidden = self.text, {}, self.text["hidden_size"]
        prefix = f"{PREFIX}model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            bf16(tensors, f"{prefix}{name}.weight", self.norm(hidden))
        for name in ("self_attention_res", "mlp_res"):
            self.residual(tensors, f"{prefix}{name}")
        is_mla = layer + 1 in text["linear_attn_config"]["full_attn_layers"]
        (self.mla if is_mla else self.kda)(tensors, f"{prefix}self_attn.")
        if layer < text["first_k_dense_replace"]:
            self.mlp(tensors, f"{prefix}mlp.", text["intermediate_size"])
        else:
            self.moe(tensors, f"{prefix}block_sparse_moe.")
        return tensors

    def attention_matrix(self, tensors: Tensors, name: str, rows: int, columns: int) -> None:
        weight = self.normal(rows, columns, std=columns**-0.5)
        if self.layout == "mxfp4":
            bf16(tensors, f"{name}.weight", weight)
            return
        codes, scale = codecs.fp8_block_encode(weight)
        tensors[f"{name}.weight"] = codes.view(ml_dtypes.float8_e4m3fn)
        tensors[f"{name}.weight_scale"] = scale

    def kda(self, tensors: Tensors, prefix: str) -> None:
        linear, hidden = self.text["linear_attn_config"], self.text["hidden_size"]
        heads, size = linear["num_heads"], linear["head_dim"]
        inner = heads * size
        for name in ("q_proj", "k_proj", "v_proj", "g_proj"):
            self.attention_matrix(tensors, f"{prefix}{name}", inner, hidden)
        self.attention_matrix(tensors, f"{prefix}f_a_proj", size, hidden)
        self.attention_matrix(tensors, f"{prefix}f_b_proj", inner, size)
        self.attention_matrix(tensors, f"{prefix}b_proj", heads, hidden)
        self.attention_matrix(tensors, f"{prefix}o_proj", hidden, inner)
        for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
            tensors[f"{prefix}{name}.weight"] = self.normal(inner, 1, 4, std=0.5)
        a_log = np.zeros(heads + -heads % 128, dtype=np.float32)
        a_log[:heads] = np.log(self.rng.uniform(0.5, 4.0, heads))
        tensors[f"{prefix}A_log"] = a_log
        tensors[f"{prefix}dt_bias"] = self.normal(inner, std=1.0) - 1
        tensors[f"{prefix}o_norm.weight"] = self.norm(size)

    def mla(self, tensors: Tensors, prefix: str) -> None:
        text, hidden = self.text, self.text["hidden_size"]
        heads, rank = text["num_attention_heads"], text["kv_lora_rank"]
        nope, rope, v_head = (
            text[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        for name, rows, columns in (
            ("q_a_proj", text["q_lora_rank"], hidden),
            ("q_b_proj", heads * (nope + rope), text["q_lora_rank"]),
            ("kv_a_proj_with_mqa", rank + rope, hidden),
            ("kv_b_proj", heads * (nope + v_head), rank),
            ("g_proj", heads * v_head, hidden),
            ("o_proj", hidden, heads * v_head),
        ):
            self.attention_matrix(tensors, f"{prefix}{name}", rows, columns)
        bf16(tensors, f"{prefix}q_a_layernorm.weight", self.norm(text["q_lora_rank"]))
        bf16(tensors, f"{prefix}kv_a_layernorm.weight", self.norm(rank))

    def mlp(self, tensors: Tensors, prefix: str, inner: int) -> None:
        hidden = self.text["hidden_size"]
        for name in ("gate_proj", "up_proj"):
            weight = self.normal(inner, hidden, std=hidden**-0.5)
            bf16(tensors, f"{prefix}{name}.weight", weight)
        bf16(tensors, f"{prefix}down_proj.weight", self.normal(hidden, inner, std=inner**-0.5))

    def moe(self, tensors: Tensors, prefix: str) -> None:
        text, hidden = self.text, self.text["hidden_size"]
        latent, width = text["routed_expert_hidden_size"], text["moe_intermediate_size"]
        count = text["num_experts"]
        bf16(tensors, f"{prefix}gate.weight", self.normal(count, hidden, std=hidden**-0.5))
        tensors[f"{prefix}gate.e_score_correction_bias"] = self.normal(count, std=0.1)
        for name, rows, columns in (
            ("routed_expert_down_proj", latent, hidden),
            ("routed_expert_up_proj", hidden, latent),
        ):
            weight = self.normal(rows, columns, std=columns**-0.5)
            bf16(tensors, f"{prefix}{name}.weight", weight)
        bf16(tensors, f"{prefix}routed_expert_norm.weight", self.norm(latent))
        self.mlp(tensors, f"{prefix}shared_experts.", width * text["num_shared_experts"])
        write: Callable[..., None] = nvfp4_expert if self.layout == "nvfp4" else mxfp4_expert
        for expert in range(count):
            w1, w3 = (self.normal(width, latent, std=latent**-0.5) for _ in range(2))
            w2 = self.normal(latent, width, std=width**-0.5)
            write(tensors, f"{prefix}experts.{expert}.", w1=w1, w3=w3, w2=w2)


def bf16(tensors: Tensors, name: str, values: np.ndarray) -> None:
    """Store values rounded to BF16."""
    tensors[name] = values.astype(ml_dtypes.bfloat16)


def nvfp4_expert(
    tensors: Tensors, prefix: str, *, w1: np.ndarray, w3: np.ndarray, w2: np.ndarray
) -> None:
    """Store one expert as the NVFP4 release does: w1 and w3 share weight_scale_2."""
    fused = max(codecs.nvfp4_scale_2(w1), codecs.nvfp4_scale_2(w3))
    for name, weight, scale_2 in (
        ("w1", w1, fused),
        ("w3", w3, fused),
        ("w2", w2, codecs.nvfp4_scale_2(w2)),
    ):
        packed, scale = codecs.nvfp4_encode(weight, scale_2)
        tensors[f"{prefix}{name}.weight"] = packed
        tensors[f"{prefix}{name}.weight_scale"] = scale.view(ml_dtypes.float8_e4m3fn)
        tensors[f"{prefix}{name}.weight_scale_2"] = np.array(scale_2, dtype=np.float32)
        tensors[f"{prefix}{name}.input_scale"] = np.array(1.0, dtype=np.float32)


def mxfp4_expert(
    tensors: Tensors, prefix: str, *, w1: np.ndarray, w3: np.ndarray, w2: np.ndarray
) -> None:
    """Store one expert as the original release does."""
    for name, weight in (("w1", w1), ("w3", w3), ("w2", w2)):
        packed, scale = codecs.mxfp4_encode(weight)
        tensors[f"{prefix}{name}.weight_packed"] = packed
        tensors[f"{prefix}{name}.weight_scale"] = scale


def _config(text: dict[str, Any], layout: Layout) -> dict[str, Any]:
    top = {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "bos_token_id": text["bos_token_id"],
        "eos_token_id": text["eos_token_id"],
        "pad_token_id": text["pad_token_id"],
        "tie_word_embeddings": False,
        "text_config": text,
    }
    if layout == "nvfp4":
        quantised = {"quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION"}
        return top | {"quantization_config": quantised}
    quantised = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    return top | {"text_config": text | {"quantization_config": quantised}}
