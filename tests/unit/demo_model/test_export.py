"""The export of the demo model: what was trained is what the Station reads, in the right layout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.demo_model import layout
from services.demo_model.export import MASTERS_FILE, export, load_masters, save_masters
from services.demo_model.network import Network, NetworkConfig
from shared.core.errors import ConfigError
from station.model.checkpoint import Checkpoint
from station.model.experts import TorchExperts
from station.model.network import K3Text

CONFIG = NetworkConfig(
    vocab_size=320,
    hidden_size=64,
    num_hidden_layers=5,
    num_attention_heads=2,
    q_lora_rank=48,
    kv_lora_rank=32,
    intermediate_size=96,
    moe_intermediate_size=32,
    routed_expert_hidden_size=48,
    num_experts=12,
    num_experts_per_token=3,
    attn_res_block_size=2,
)
BANK = "language_model.model.layers.1.block_sparse_moe.experts"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run: random parameters, none at a value that would hide a mistake."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    network = Network(CONFIG)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.dim() == 1 or name.endswith(".proj"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    for mixture in network.mixtures():
        mixture.gate.e_score_correction_bias.normal_(0, 0.2)
    save_masters(network.state_dict(), CONFIG, folder)
    (folder / layout.TOKENIZER_FILE).write_text("IQ== 0\n")
    export(folder, folder / "checkpoint")
    return folder


@pytest.fixture(scope="module")
def checkpoint(run: Path) -> Iterator[Checkpoint]:
    """The exported checkpoint, as the Station opens it."""
    with Checkpoint.open(run / "checkpoint") as opened:
        yield opened


def decoded_network(run: Path, checkpoint: Checkpoint) -> Network:
    """The training network with the weights that the Station decodes from the checkpoint."""
    masters, config = load_masters(run)
    network = Network(config)
    network.load_state_dict(masters)
    # The layout hands out views of the parameters, so writing to them changes the network.
    with torch.no_grad():
        for tensor in layout.checkpoint_tensors(network.state_dict(), config):
            weight = checkpoint.weight(tensor.name)
            target = tensor.value.reshape(-1)[: weight.numel()].view(weight.shape)
            if not tensor.name.endswith("A_log"):
                tensor.value.copy_(weight)
            assert torch.allclose(target, weight, rtol=0.3, atol=0.1), tensor.name
    return network


def test_station_computes_what_was_trained(run: Path, checkpoint: Checkpoint) -> None:
    """On the decoded weights the Station's model and the training network give the same logits."""
    network = decoded_network(run, checkpoint)
    ids = torch.randint(0, CONFIG.vocab_size, (37,), generator=torch.Generator().manual_seed(1))
    model = K3Text.load(checkpoint, torch.float32)
    served = model.forward(ids, model.new_state(), TorchExperts(checkpoint), last_only=False)
    with torch.no_grad():
        trained = network(ids[None])
    assert served.abs().max() > 0.1
    torch.testing.assert_close(served, trained, rtol=0, atol=2e-5)


def test_gate_and_up_share_their_second_scale(checkpoint: Checkpoint) -> None:
    """w1 and w3 are read by one product, so they share weight_scale_2; input_scale is 1."""
    for expert in range(CONFIG.num_experts):
        scales = {m: checkpoint.tensor(f"{BANK}.{expert}.{m}.weight_scale_2") for m in ("w1", "w3")}
        assert scales["w1"].shape == ()
        assert scales["w1"] == scales["w3"]
        assert checkpoint.tensor(f"{BANK}.{expert}.w2.input_scale") == 1.0


def test_formats_are_those_of_the_release(checkpoint: Checkpoint) -> None:
    """Experts U8 with E4M3 scales, attention E4M3 with 4-D float32 scales, A_log padded to 128."""
    prefix = "language_model.model.layers."
    assert checkpoint.tensor(f"{BANK}.0.w1.weight").dtype == torch.uint8
    assert checkpoint.tensor(f"{BANK}.0.w1.weight").shape == (32, 24)
    assert checkpoint.tensor(f"{BANK}.0.w1.weight_scale").dtype == torch.float8_e4m3fn
    assert checkpoint.tensor(f"{prefix}0.self_attn.f_a_proj.weight").dtype == torch.float8_e4m3fn
    assert checkpoint.tensor(f"{prefix}0.self_attn.q_proj.weight_scale").shape == (1, 1, 1, 1)
    assert checkpoint.tensor(f"{prefix}3.self_attn.kv_b_proj.weight_scale").shape == (2, 1, 1, 1)
    a_log = checkpoint.tensor(f"{prefix}0.self_attn.A_log")
    assert a_log.shape == (128,)
    assert not a_log[2:].any()
    assert checkpoint.tensor(f"{prefix}0.self_attn.q_conv1d.weight").shape == (128, 1, 4)
    assert checkpoint.tensor("language_model.lm_head.weight").dtype == torch.bfloat16


def test_experts_of_a_layer_lie_in_one_shard_by_name(run: Path) -> None:
    """One shard per layer, in it the experts as 0, 1, 10, 11, 2, ...: readers must map by name."""
    folder = run / "checkpoint"
    index = json.loads((folder / layout.INDEX_FILE).read_text())["weight_map"]
    names = [name for name in index if name.startswith(BANK)]
    assert {index[name] for name in names} == {"model-00002-of-00006.safetensors"}
    assert len(set(index.values())) == 6
    raw = (folder / index[names[0]]).read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    stored = [name for name in header if name.startswith(BANK) and name.endswith("w1.weight")]
    stored.sort(key=lambda name: header[name]["data_offsets"][0])
    order = [name.split(".")[-3] for name in stored]
    assert order == sorted(order)
    assert order[:4] == ["0", "1", "10", "11"]


def test_quantised_modules_are_declared(run: Path) -> None:
    """hf_quant_config names every bank of experts and every attention matrix, under each alias."""
    config = json.loads((run / "checkpoint" / layout.QUANTISATION_FILE).read_text())
    layers = config["quantization"]["quantized_layers"]
    for prefix in ("language_model.model.layers.", "model.layers.", "layers."):
        for name in ("block_sparse_moe", "mlp"):
            assert layers[f"{prefix}4.{name}.experts"] == {"quant_algo": "NVFP4", "group_size": 16}
        for leaf in ("q_a_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj"):
            assert layers[f"{prefix}3.self_attn.{leaf}"] == {"quant_algo": "FP8_PB_WO"}
    assert not any("lm_head" in name or "shared_experts" in name for name in layers)


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    """An export of something that is no run says which file is missing and what makes it."""
    with pytest.raises(ConfigError, match=rf"{MASTERS_FILE}.*services\.demo_model\.train"):
        export(tmp_path, tmp_path / "out")
