"""config.json: what is read, and that anything unknown is refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from shared.core.errors import CheckpointError
from shared.core.shape import ExpertShape, ModelShape
from station.model.config import K3Config


@pytest.fixture
def config(nvfp4_directory: Path) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads((nvfp4_directory / "config.json").read_text())
    return parsed


def test_sizes_come_from_the_file(nvfp4_directory: Path) -> None:
    """Layer lists are 1-based in the file and 0-based here; the routed part is the shape."""
    config = K3Config.from_file(nvfp4_directory)
    assert config.mla_layers == {3, 4}
    assert [config.is_moe(layer) for layer in range(3)] == [False, True, True]
    assert config.residual_blocks == 3
    assert config.eos_token_id == 286
    assert config.shape == ModelShape(
        layers=5,
        first_moe_layer=1,
        experts=12,
        top_k=2,
        expert=ExpertShape(latent=128, width=128),
    )


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_type", "kimi_k2"),
        ("text_config", None),
        ("text_config.model_type", "deepseek"),
        ("text_config.hidden_act", "silu"),
        ("text_config.moe_router_activation_func", "softmax"),
        ("text_config.mla_use_nope", False),
        ("text_config.mla_use_nope", 1),
        ("text_config.mla_use_output_gate", False),
        ("text_config.latent_moe_use_norm", False),
        ("text_config.moe_renormalize", False),
        ("text_config.topk_method", "greedy"),
        ("text_config.num_expert_group", 8),
        ("text_config.topk_group", 2),
        ("text_config.moe_layer_freq", 2),
        ("text_config.num_nextn_predict_layers", 1),
        ("text_config.tie_word_embeddings", True),
        ("text_config.hidden_size", 0),
        ("text_config.hidden_size", "64"),
        ("text_config.hidden_size", True),
        ("text_config.vocab_size", 2**40),
        ("text_config.num_key_value_heads", 1),
        ("text_config.num_experts_per_token", 13),
        ("text_config.first_k_dense_replace", 5),
        ("text_config.routed_expert_hidden_size", 24),
        ("text_config.moe_intermediate_size", 100),
        ("text_config.routed_scaling_factor", float("nan")),
        ("text_config.rms_norm_eps", -1e-5),
        ("text_config.eos_token_id", 300),
        ("text_config.attn_res_block_size", 0),
        ("text_config.activation_situ_beta", None),
        ("text_config.linear_attn_config", []),
        ("text_config.linear_attn_config.gate_lower_bound", -8.0),
        ("text_config.linear_attn_config.gate_lower_bound", 0),
        ("text_config.linear_attn_config.use_full_rank_gate", False),
        ("text_config.linear_attn_config.short_conv_kernel_size", 1),
        ("text_config.linear_attn_config.full_attn_layers", [0, 5]),
        ("text_config.linear_attn_config.full_attn_layers", [4, 4]),
        ("text_config.linear_attn_config.full_attn_layers", "4,5"),
        ("text_config.linear_attn_config.kda_layers", [1, 2]),
    ],
)
def test_one_wrong_field_is_named(config: dict[str, Any], path: str, value: object) -> None:
    """The error names file, field path and value, whatever the field."""
    broken = copy.deepcopy(config)
    *sections, name = path.split(".")
    section = broken
    for part in sections:
        section = section[part]
    section[name] = value
    with pytest.raises(CheckpointError) as error:
        K3Config.from_mapping(broken, source="config.json")
    assert f"config.json: {path} is {str(value)[:10]}" in str(error.value).replace("'", "")


def test_absent_field_is_named(config: dict[str, Any]) -> None:
    """A field that is not there at all is called absent."""
    del config["text_config"]["kv_lora_rank"]
    with pytest.raises(CheckpointError, match=r"text_config\.kv_lora_rank is 'absent'"):
        K3Config.from_mapping(config, source="config.json")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe{}"])
def test_damaged_file_is_one_error(tmp_path: Path, content: bytes) -> None:
    """Not JSON, or not an object: one CheckpointError naming the file."""
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json: not"):
        K3Config.from_file(tmp_path)


def test_missing_file_is_one_error(tmp_path: Path) -> None:
    """A directory without a config gets a remedy."""
    with pytest.raises(CheckpointError, match="name a directory that holds"):
        K3Config.from_file(tmp_path)
