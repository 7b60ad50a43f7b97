"""Synthetic checkpoints: the release's layout byte for byte, always the same, whole or absent."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from services import cli
from services.synth.contents import CHUNK_ELEMENTS, chunks
from services.synth.sizes import SynthSizes, k3_experts, k3_structure
from services.synth.tensors import Fill, SynthTensor, shard_count, shards, totals
from services.synth.writer import write
from shared.core.errors import ConfigError
from station.model.checkpoint import Checkpoint
from station.model.config import K3Config
from station.model.network import K3Text
from station.model.tensor_table import IGNORED_PREFIXES, expert_prefix

ROOT = Path(__file__).resolve().parents[4]
SMALL = SynthSizes(layers=3, experts=12, top_k=2, latent=32, width=48, hidden=32)
# text_config of moonshotai/Kimi-K3, the fields that sizes depend on (k3-model.md 1.2).
K3_SIZES = {
    "hidden_size": 7168,
    "vocab_size": 163840,
    "num_attention_heads": 96,
    "num_key_value_heads": 96,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 33792,
    "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584,
}


def _files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_files_are_what_the_reference_library_would_write(tmp_path: Path) -> None:
    """Every shard, read and saved again by safetensors, comes out identical; the index is right."""
    write(tmp_path / "m", SMALL, 1)
    index = json.loads((tmp_path / "m/model.safetensors.index.json").read_text())
    placed: dict[str, str] = {}
    size = 0
    for path in sorted((tmp_path / "m").glob("*.safetensors")):
        tensors = load_file(path)
        save_file(tensors, tmp_path / "again", {"format": "pt"})
        assert (tmp_path / "again").read_bytes() == path.read_bytes(), path.name
        placed |= dict.fromkeys(tensors, path.name)
        size += sum(tensor.nbytes for tensor in tensors.values())
    assert index == {"metadata": {"total_size": size}, "weight_map": placed}
    assert sum(name.startswith(IGNORED_PREFIXES) for name in placed) == 168


def test_experts_lie_in_lexicographic_order(tmp_path: Path) -> None:
    """Case B1: 0, 1, 10, 11, 2 in every shard, so that a stride finds the wrong expert."""
    write(tmp_path / "m", SMALL, 1)
    with safe_open(tmp_path / "m/model-00002-of-00006.safetensors", "pt") as file:
        names = [name for name in file.offset_keys() if name.endswith("w1.weight")]
    experts = [int(name.split(".experts.")[1].split(".")[0]) for name in names]
    assert experts == [0, 1, 10, 11, *range(2, 10)]


def test_sizes_of_the_real_model_are_the_published_ones() -> None:
    """With K3's own sizes our table of what is stored gives 992,508 tensors, 77,338,674,496 bytes
    of text without experts and 18,579,480 bytes per expert, to the byte."""
    text = json.loads(k3_structure().config.canonical_json) | K3_SIZES | {"num_experts": 1}
    text |= {"num_experts_per_token": 1}
    text["linear_attn_config"] |= {"num_heads": 96, "head_dim": 128}
    config = K3Config.from_mapping({"model_type": "kimi_k3", "text_config": text}, source="k3")
    tensors, size = totals(config)
    more = 92 * 895  # experts, each with 12 tensors, a BF16 row of the gate and an F32 bias
    vision = list(shards(SMALL.config, 6))[-1]
    size += more * (7168 * 2 + 4) - 92 * 18_579_480 - sum(tensor.length for tensor in vision)
    assert tensors + more * 12 == 992_508
    assert size == 77_338_674_496


def test_k3_structure_is_all_of_it() -> None:
    """93 layers, 82,432 experts, 16 of 896 per token, 96 shards."""
    shape = k3_structure().config.shape
    assert (shape.layers, shape.experts, shape.top_k) == (93, 896, 16)
    assert shape.routed_experts == 82_432
    assert shard_count(k3_structure().config, None) == 96


@pytest.mark.parametrize("count", [1, 2, 5, 6, 7, 11, 24, 30])
def test_any_number_of_shards_is_the_same_model(tmp_path: Path, count: int) -> None:
    """Contents depend on seed and name alone; w1 and w3 of an expert never part."""
    sizes = SynthSizes(layers=3, experts=12, top_k=2, latent=32, width=48, hidden=32, shards=count)
    write(tmp_path / "whole", SMALL, 5)
    assert write(tmp_path / "cut", sizes, 5).shards == count
    with Checkpoint.open(tmp_path / "whole") as whole, Checkpoint.open(tmp_path / "cut") as cut:
        assert whole.digest == cut.digest
        assert whole.expert_record(2, 11) == cut.expert_record(2, 11)
    homes: dict[str, set[str]] = {}
    index = json.loads((tmp_path / "cut/model.safetensors.index.json").read_text())["weight_map"]
    for name, shard in index.items():
        if ".experts." in name:
            homes.setdefault(name.rsplit(".", 2)[0], set()).add(shard)
    assert len(homes) == 24
    assert all(len(shards_of) == 1 for shards_of in homes.values())


def test_one_seed_is_one_checkpoint(tmp_path: Path) -> None:
    """Equal arguments write equal files; another seed is another model of the same shape."""
    for name, seed in (("one", 3), ("same", 3), ("other", 4)):
        write(tmp_path / name, SMALL, seed)
    one, same, other = (_files(tmp_path / name) for name in ("one", "same", "other"))
    assert one == same
    assert one.keys() == other.keys()
    assert one["config.json"] == other["config.json"]
    with Checkpoint.open(tmp_path / "one") as first, Checkpoint.open(tmp_path / "other") as second:
        assert first.digest != second.digest
        assert first.expert_record(1, 0) != second.expert_record(1, 0)


def test_a_network_runs_on_it(tmp_path: Path) -> None:
    """Loadable, finite and not constant; weights have about the variance of a trained matrix, and
    w1 and w3 share their second scale as in the release."""
    write(tmp_path / "m", SMALL, 2)
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        for expert in (0, 11):
            prefix = expert_prefix(1, expert)
            for name, inputs in (("w1", 32), ("w3", 32), ("w2", 48)):
                weight = checkpoint.weight(f"{prefix}{name}.weight")
                assert 0.5 < float(weight.std()) * inputs**0.5 < 2
            scales = [checkpoint.tensor(f"{prefix}{n}.weight_scale_2") for n in ("w1", "w3", "w2")]
            assert scales[0] == scales[1] != scales[2]
        attention = checkpoint.weight("language_model.model.layers.0.self_attn.q_proj.weight")
        assert 0.5 < float(attention.std()) * 32**0.5 < 2
        network = K3Text.load(checkpoint, torch.float32)

        def experts(_layer: int, latent: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*ids.shape, latent.shape[-1])

        logits = network.forward(torch.tensor([1, 7, 300]), network.new_state(), experts)
    assert torch.isfinite(logits).all()
    assert logits.std() > 0.01


def test_experts_of_real_size_stream_through_little_memory(tmp_path: Path) -> None:
    """--k3-experts: 18,579,480 bytes each, written chunk by chunk."""
    tracemalloc.start()
    try:
        written = write(tmp_path / "m", k3_experts(2), 0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert written.payload_bytes > 2 * 18_579_480
    assert peak < 32 * 2**20
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        assert checkpoint.layout.record_bytes == 18_579_480
        assert len(set(checkpoint.expert_record(1, 1)[:4096])) > 200


@pytest.mark.parametrize("fill", [Fill.NIBBLES, Fill.MATRIX])
def test_a_large_tensor_has_no_seam(fill: Fill) -> None:
    """Chunks continue one stream: the second differs from the first and follows from its place."""
    dtype = "U8" if fill is Fill.NIBBLES else "BF16"
    size = 1 if fill is Fill.NIBBLES else 2
    large = SynthTensor("x.weight", dtype, (CHUNK_ELEMENTS + 1000,), fill, 64)
    small = SynthTensor("x.weight", dtype, (1000,), fill, 64)
    pieces = list(chunks(1, large))
    assert [len(piece) for piece in pieces] == [CHUNK_ELEMENTS * size, 1000 * size]
    assert pieces[0][: 1000 * size] == b"".join(chunks(1, small))
    assert pieces[1] != pieces[0][: 1000 * size]


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    """Bytes done grow to the bytes of all tensors."""
    seen: list[tuple[int, int]] = []
    written = write(tmp_path / "m", SMALL, 0, lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (written.payload_bytes, written.payload_bytes)


def test_quantisation_file_names_banks_and_attention(tmp_path: Path) -> None:
    """hf_quant_config.json agrees with config.json and with what is stored."""
    write(tmp_path / "m", SMALL, 0)
    release = json.loads((tmp_path / "m/hf_quant_config.json").read_text())["quantization"]
    config = json.loads((tmp_path / "m/config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "modelopt_mixed", **release}
    layers: dict[str, Any] = release["quantized_layers"]
    bank = "language_model.model.layers.2.block_sparse_moe.experts"
    assert (
        layers[bank] == layers["layers.2.mlp.experts"] == {"quant_algo": "NVFP4", "group_size": 16}
    )
    assert layers["model.layers.0.self_attn.in_proj_qkvgfab"] == {"quant_algo": "FP8_PB_WO"}


def test_existing_files_are_safe(tmp_path: Path) -> None:
    """Nothing is overwritten without --replace, and nothing but an older checkpoint with it."""
    target = tmp_path / "m"
    write(target, SMALL, 1)
    before = _files(target)
    with pytest.raises(ConfigError, match="--replace"):
        write(target, SMALL, 2)
    assert _files(target) == before
    assert write(target, SMALL, 2, replace=True).shards == 6
    assert _files(target) != before
    (target / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"thesis\.txt"):
        write(target, SMALL, 1, replace=True)
    assert (target / "thesis.txt").read_text() == "years of work"
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(target)
    for name in ("file", "link"):
        with pytest.raises(ConfigError, match="is not a directory"):
            write(tmp_path / name, SMALL, 1, replace=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "m"]


def test_an_empty_directory_may_be_filled(tmp_path: Path) -> None:
    """`mkdir` first is no mistake."""
    (tmp_path / "m").mkdir()
    write(tmp_path / "m", SMALL, 1)
    with Checkpoint.open(tmp_path / "m"):
        pass


def test_full_disk_is_said_before_and_during(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too little space is refused at once; a write that fails all the same leaves nothing."""
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1000))
        with pytest.raises(ConfigError, match=r"needs \d+ bytes, the disk has 1000 free"):
            write(tmp_path / "m", SMALL, 1)
    code = (
        "import resource, sys; from services.cli import run;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000));"
        "sys.exit(run(['synth', sys.argv[1]]))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "m")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert answer.returncode == 78
    assert "cannot write the checkpoint (File too large)" in answer.stderr
    assert list(tmp_path.iterdir()) == []


def test_killed_in_the_middle_leaves_no_checkpoint(tmp_path: Path) -> None:
    """kill -9 leaves only a hidden partial directory, which the next run takes over."""
    target = tmp_path / "m"
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cli", "synth", str(target), "--k3-experts", "64"], cwd=ROOT
    )
    partial = tmp_path / ".m.partial"
    while process.poll() is None and not list(partial.glob("model-00002*")):
        os.sched_yield()
    with pytest.raises(ConfigError, match="another synthesis"):
        write(target, SMALL, 1)
    process.send_signal(signal.SIGKILL)
    assert process.wait(20) == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [".m.partial"]
    write(target, SMALL, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    with Checkpoint.open(target):
        pass


def test_a_header_that_no_reader_accepts_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many tensors for one shard: more shards are the remedy."""
    monkeypatch.setattr("services.synth.writer.HEADER_BYTES_MAX", 10_000)
    with pytest.raises(ConfigError, match="choose more shards"):
        write(tmp_path / "m", SMALL, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        (["--latent", "24"], 78, "latent 24 is not a multiple of 16"),
        (["--width", "0"], 78, "width is 0: choose a number from 16"),
        (["--experts", "2", "--top-k", "3"], 78, "top-k is 3: choose a number from 1 to 2"),
        (["--layers", "1"], 78, "layers is 1"),
        (["--k3-experts", "0"], 78, "experts is 0"),
        (["--shards", "56"], 78, "shards is 56: choose at most 55"),
        (["--k3-structure", "--k3-experts", "3"], 2, "exclude each other"),
        (["--k3-structure", "--top-k", "3"], 2, "--top-k is fixed"),
        (["--seed", "x"], 2, "not a valid integer"),
    ],
)
def test_impossible_sizes_are_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    complaint: str,
) -> None:
    """One line says which size and what would do; nothing is written."""
    assert cli.run(["synth", str(tmp_path / "m"), *arguments]) == status
    assert complaint in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_verb_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line with tensors, bytes and shards; values follow the options."""
    target = tmp_path / "m"
    options = ["--layers", "3", "--experts", "5", "--latent", "48", "--seed", "9", "--shards", "2"]
    assert cli.run(["synth", str(target), *options]) == 0
    assert f"{target}: " in (line := capsys.readouterr().out)
    assert " in 2 shards" in line
    with Checkpoint.open(target) as checkpoint:
        assert checkpoint.config.shape.routed_experts == 10
        assert checkpoint.config.expert.latent == 48
        assert np.isfinite(checkpoint.weight(f"{expert_prefix(2, 4)}w2.weight").numpy()).all()
