"""The architecture of one checkpoint: `config.json`, checked field by field.

Owns which K3 variants this code can compute exactly; anything else is refused here, by field name,
before a single weight is read. Must not know tensors, files other than config.json, or torch.
No K3 size is wired in: every number comes from the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from shared.core.errors import CheckpointError
from shared.core.shape import ExpertShape, ModelShape

CONFIG_FILE: Final = "config.json"
_CONFIG_BYTES_MAX: Final = 64 * 2**20
_SIZE_MAX: Final = 2**24
# Chunked KDA takes decays relative to the middle of a 16-token chunk; exp(8 * 5) squared is the
# last power that float32 holds with room to spare.
_GATE_LOWER_BOUND_MIN: Final = -5.0


@dataclass(frozen=True, slots=True)
class KdaConfig:
    """Kimi Delta Attention: sizes and the bound of the forget gate (log decay per token)."""

    num_heads: int
    head_dim: int
    conv_kernel: int
    gate_lower_bound: float


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Multi-head latent attention without rotation: `rope` dims exist and are never rotated."""

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class K3Config:
    """A checked `text_config`. Names are those of the file; layer sets are 0-based here."""

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    context_length: int
    intermediate_size: int
    expert: ExpertShape
    num_experts: int
    top_k: int
    num_shared_experts: int
    first_k_dense_replace: int
    routed_scaling_factor: float
    situ_beta: float
    situ_linear_beta: float
    attn_res_block_size: int
    rms_norm_eps: float
    eos_token_id: int
    kda: KdaConfig
    mla: MlaConfig
    mla_layers: frozenset[int]
    canonical_json: bytes

    @classmethod
    def from_file(cls, directory: Path) -> K3Config:
        """Read and check `directory/config.json`; CheckpointError names field and remedy."""
        path = directory / CONFIG_FILE
        try:
            with path.open("rb") as file:
                data = file.read(_CONFIG_BYTES_MAX + 1)
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be read ({error.strerror}); name a directory that holds a "
                "Kimi-K3 checkpoint"
            ) from error
        if len(data) > _CONFIG_BYTES_MAX:
            raise CheckpointError(f"{path}: larger than {_CONFIG_BYTES_MAX} bytes; not a config")
        try:
            parsed = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: not JSON ({error}); fetch it again") from error
        if not isinstance(parsed, dict):
            raise CheckpointError(f"{path}: not a JSON object; fetch it again")
        return cls.from_mapping(parsed, source=str(path))

    @classmethod
    def from_mapping(cls, config: Mapping[str, object], *, source: str) -> K3Config:
        """Check a decoded config.json; `source` is named in errors."""
        top = _Fields(source, "", config)
        top.fixed("model_type", "kimi_k3")
        text = top.section("text_config")
        _check_fixed(text)
        layers = text.size("num_hidden_layers")
        dense = text.size("first_k_dense_replace", low=0)
        experts = text.size("num_experts", high=2**16 - 1)
        top_k = text.size("num_experts_per_token", high=64)
        if dense >= layers:
            raise text.error("first_k_dense_replace", f"below num_hidden_layers = {layers}")
        if top_k > experts:
            raise text.error("num_experts_per_token", f"at most num_experts = {experts}")
        linear = text.section("linear_attn_config")
        vocab = text.size("vocab_size")
        return cls(
            hidden_size=text.size("hidden_size"),
            num_hidden_layers=layers,
            vocab_size=vocab,
            context_length=text.size("max_position_embeddings"),
            intermediate_size=text.size("intermediate_size"),
            expert=_expert_shape(text),
            num_experts=experts,
            top_k=top_k,
            num_shared_experts=text.size("num_shared_experts"),
            first_k_dense_replace=dense,
            routed_scaling_factor=text.positive("routed_scaling_factor"),
            situ_beta=text.positive("activation_situ_beta"),
            situ_linear_beta=text.positive("activation_situ_linear_beta"),
            attn_res_block_size=text.size("attn_res_block_size"),
            rms_norm_eps=text.positive("rms_norm_eps"),
            eos_token_id=text.size("eos_token_id", low=0, high=vocab - 1),
            kda=_kda_config(linear),
            mla=_mla_config(text),
            mla_layers=_mla_layers(linear, layers),
            canonical_json=msgspec.json.encode(text.values, order="deterministic"),
        )

    @property
    def shape(self) -> ModelShape:
        """The routed part, as every other package sees the model."""
        return ModelShape(
            layers=self.num_hidden_layers,
            first_moe_layer=self.first_k_dense_replace,
            experts=self.num_experts,
            top_k=self.top_k,
            expert=self.expert,
        )

    @property
    def residual_blocks(self) -> int:
        """Block vectors that Attention Residuals have collected when the last layer is done."""
        return -(-self.num_hidden_layers // self.attn_res_block_size)

    def is_moe(self, layer: int) -> bool:
        """Whether 0-based `layer` has routed experts (else a dense MLP)."""
        return layer >= self.first_k_dense_replace


class _Fields:
    """One JSON object being checked; every complaint names file, path, value and expectation."""

    def __init__(self, source: str, path: str, values: Mapping[str, object]) -> None:
        self.source = source
        self.path = path
        self.values = values

    def error(self, name: str, expected: str) -> CheckpointError:
        value = self.values.get(name, "absent")
        shown = repr(value)[:80]
        return CheckpointError(
            f"{self.source}: {self.path}{name} is {shown}: expected {expected}; "
            "use a Kimi-K3 checkpoint this version supports"
        )

    def section(self, name: str) -> _Fields:
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return _Fields(self.source, f"{self.path}{name}.", value)

    def fixed(self, name: str, wanted: bool | int | str) -> None:
        value = self.values.get(name)
        # bool is an int in Python, so equality alone would let `1` pass for `true`.
        if type(value) is not type(wanted) or value != wanted:
            raise self.error(name, f"{wanted!r}, the only kind implemented")

    def size(self, name: str, *, low: int = 1, high: int = _SIZE_MAX) -> int:
        value = self.values.get(name)
        if type(value) is not int or not low <= value <= high:
            raise self.error(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, *, low: float, high: float, expected: str) -> float:
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value < high:
            raise self.error(name, expected)
        return float(value)

    def positive(self, name: str) -> float:
        return self.number(name, low=1e-30, high=1e30, expected="a positive number")

    def layer_list(self, name: str, layers: int) -> frozenset[int]:
        """0-based layers of a 1-based list without repeats."""
        value = self.values.get(name)
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            raise self.error(name, "a list of 1-based layer numbers")
        if len(set(value)) != len(value) or any(not 1 <= item <= layers for item in value):
            raise self.error(name, f"layer numbers from 1 to {layers}, each once")
        return frozenset(item - 1 for item in value)


def _check_fixed(text: _Fields) -> None:
    """Refuse every variant of the architecture that this code would compute wrongly."""
    wanted: tuple[tuple[str, bool | int | str], ...] = (
        ("model_type", "kimi_linear"),
        ("hidden_act", "situ"),
        ("mla_use_nope", True),
        ("mla_use_output_gate", True),
        ("latent_moe_use_norm", True),
        ("moe_layer_freq", 1),
        ("moe_router_activation_func", "sigmoid"),
        ("moe_renormalize", True),
        ("topk_method", "noaux_tc"),
        ("num_expert_group", 1),
        ("topk_group", 1),
        ("num_nextn_predict_layers", 0),
        ("tie_word_embeddings", False),
    )
    for name, value in wanted:
        text.fixed(name, value)


def _expert_shape(text: _Fields) -> ExpertShape:
    latent = text.size("routed_expert_hidden_size", high=2**20)
    width = text.size("moe_intermediate_size", high=2**20)
    for name, size in (("routed_expert_hidden_size", latent), ("moe_intermediate_size", width)):
        if size % 16:
            raise text.error(name, "a multiple of 16, the NVFP4 block")
    return ExpertShape(latent=latent, width=width)


def _kda_config(linear: _Fields) -> KdaConfig:
    linear.fixed("use_full_rank_gate", True)
    bound = linear.number(
        "gate_lower_bound",
        low=_GATE_LOWER_BOUND_MIN,
        high=0.0,
        expected=f"a number from {_GATE_LOWER_BOUND_MIN} to below 0",
    )
    return KdaConfig(
        num_heads=linear.size("num_heads"),
        head_dim=linear.size("head_dim"),
        conv_kernel=linear.size("short_conv_kernel_size", low=2, high=64),
        gate_lower_bound=bound,
    )


def _mla_config(text: _Fields) -> MlaConfig:
    heads = text.size("num_attention_heads")
    if text.size("num_key_value_heads") != heads:
        raise text.error("num_key_value_heads", f"num_attention_heads = {heads}")
    return MlaConfig(
        num_heads=heads,
        q_lora_rank=text.size("q_lora_rank"),
        kv_lora_rank=text.size("kv_lora_rank"),
        qk_nope_head_dim=text.size("qk_nope_head_dim"),
        qk_rope_head_dim=text.size("qk_rope_head_dim"),
        v_head_dim=text.size("v_head_dim"),
    )


def _mla_layers(linear: _Fields, layers: int) -> frozenset[int]:
    """Full-attention layers; together with the KDA layers they must cover every layer once."""
    full = linear.layer_list("full_attn_layers", layers)
    if linear.layer_list("kda_layers", layers) != frozenset(range(layers)) - full:
        raise linear.error("kda_layers", f"all of 1..{layers} that full_attn_layers leaves out")
    return full
