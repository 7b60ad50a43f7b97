"""The checkpoint reader: both layouts, records, digest, and every way a checkpoint can be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.core.errors import CheckpointError, LocalProtocolError
from shared.kernels import codecs
from station.model.checkpoint import Checkpoint
from station.model.shard_index import INDEX_FILE, SINGLE_FILE
from station.model.tensor_table import PREFIX, expert_prefix
from tests.support.tiny_checkpoint import write_tiny_checkpoint

GATE = f"{PREFIX}model.layers.2.block_sparse_moe.gate"
SHARD = "model-00003-of-00006.safetensors"  # layer 2
Edit = Callable[[dict[str, torch.Tensor]], None]


def _everything(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(shard)
    return tensors


def _single_file_copy(source: Path, target: Path, edit: Edit | None = None) -> Path:
    tensors = _everything(source)
    if edit is not None:
        edit(tensors)
    target.mkdir()
    shutil.copy(source / "config.json", target)
    save_file(tensors, target / SINGLE_FILE)
    return target


def test_sharded_and_single_file_are_the_same_model(nvfp4_directory: Path, tmp_path: Path) -> None:
    """How a model is cut into files changes neither its weights nor its digest."""
    copy = _single_file_copy(nvfp4_directory, tmp_path / "single")
    with Checkpoint.open(nvfp4_directory) as sharded, Checkpoint.open(copy) as single:
        assert sharded.digest == single.digest
        assert sharded.expert_record(2, 10) == single.expert_record(2, 10)
        name = f"{PREFIX}lm_head.weight"
        assert torch.equal(sharded.weight(name), single.weight(name))


@pytest.mark.parametrize(
    "name",
    [
        f"{GATE}.e_score_correction_bias",
        f"{PREFIX}model.norm.weight",
        f"{PREFIX}lm_head.weight",
    ],
)
def test_digest_differs_between_models(nvfp4_directory: Path, tmp_path: Path, name: str) -> None:
    """One changed value in any tensor that training moves is another model."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        changed = tensors[name].clone()
        changed.view(-1)[3] += 1
        tensors[name] = changed

    copy = _single_file_copy(nvfp4_directory, tmp_path / "other", edit)
    with Checkpoint.open(nvfp4_directory) as one, Checkpoint.open(copy) as other:
        assert one.digest != other.digest


def test_nvfp4_record_is_the_stored_bytes(nvfp4_directory: Path) -> None:
    """A record holds the 12 stored tensors at the layout's offsets, untouched."""
    tensors = _everything(nvfp4_directory)
    with Checkpoint.open(nvfp4_directory) as checkpoint:
        record = checkpoint.expert_record(3, 11)
        assert len(record) == checkpoint.layout.record_bytes
        for field in checkpoint.layout.fields:
            tensor = tensors[expert_prefix(3, 11) + field.name]
            stored = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            assert record[field.offset : field.offset + field.length] == stored


def test_mxfp4_record_holds_the_same_weights_as_nvfp4(mxfp4_directory: Path) -> None:
    """Cast records decode to the original values exactly, with one scale_2 for w1 and w3."""
    with Checkpoint.open(mxfp4_directory) as checkpoint:
        record = checkpoint.expert_record(1, 5)
        fields = {
            field.name: np.frombuffer(record[field.offset :][: field.length], np.uint8).reshape(
                field.shape if field.shape else (4,)
            )
            for field in checkpoint.layout.fields
        }
        scale_2 = {n: fields[f"{n}.weight_scale_2"].view(np.float32)[0] for n in ("w1", "w3", "w2")}
        assert scale_2["w1"] == scale_2["w3"]
        for name in ("w1", "w3", "w2"):
            decoded = codecs.nvfp4_decode(
                fields[f"{name}.weight"], fields[f"{name}.weight_scale"], scale_2[name]
            )
            expected = checkpoint.weight(f"{expert_prefix(1, 5)}{name}.weight")
            np.testing.assert_array_equal(decoded, expected.numpy())
            assert fields[f"{name}.input_scale"].view(np.float32)[0] == 1.0


def test_records_read_by_many_threads_are_the_same(nvfp4_directory: Path) -> None:
    """Reads carry their own position, so threads cannot disturb each other."""
    keys = [(layer, expert) for layer in range(1, 5) for expert in range(12)]
    with Checkpoint.open(nvfp4_directory) as checkpoint:
        alone = [checkpoint.expert_record(*key) for key in keys]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda key: checkpoint.expert_record(*key), keys * 3))
    assert together == alone * 3


def test_stored_and_dequantised_forms(nvfp4_directory: Path) -> None:
    """`tensor` is what the file holds, `weight` what the layer computes with."""
    with Checkpoint.open(nvfp4_directory) as checkpoint:
        name = f"{PREFIX}model.layers.0.self_attn.q_proj.weight"
        assert checkpoint.tensor(name).dtype == torch.float8_e4m3fn
        scale = checkpoint.tensor(f"{name}_scale")
        expected = checkpoint.tensor(name).float() * scale[0, 0, 0, 0]
        assert torch.equal(checkpoint.weight(name), expected)
        assert checkpoint.weight(name, torch.bfloat16).dtype == torch.bfloat16
        a_log = f"{PREFIX}model.layers.0.self_attn.A_log"
        assert checkpoint.tensor(a_log).shape == (128,)
        assert checkpoint.weight(a_log).shape == (2,)


def test_unknown_names_are_our_own_bug(nvfp4_directory: Path) -> None:
    """Asking for what the model does not have is a protocol error of this process."""
    with Checkpoint.open(nvfp4_directory) as checkpoint:
        for ask in (
            lambda: checkpoint.weight("vision_tower.patch_embed.proj.weight"),
            lambda: checkpoint.tensor("nothing"),
            lambda: checkpoint.expert_record(0, 0),
            lambda: checkpoint.expert_record(1, 12),
            lambda: checkpoint.read_expert_record(1, 0, memoryview(bytearray(10))),
        ):
            with pytest.raises(LocalProtocolError):
                ask()


def _drop(name: str) -> Edit:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    return edit


def _replace(name: str, value: torch.Tensor) -> Edit:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = value

    return edit


EXPERT = expert_prefix(2, 7)
WRONG = {
    "missing": (_drop(f"{GATE}.weight"), f"{GATE}.weight is missing"),
    "no scale": (_drop(f"{EXPERT}w1.weight_scale_2"), "w1.weight_scale_2 is missing"),
    "foreign": (
        _replace(f"{PREFIX}model.layers.2.extra", torch.zeros(3)),
        "1 tensors do not belong",
    ),
    "shape": (_replace(f"{GATE}.weight", torch.zeros(12, 63)), r"shape \[12, 63\]"),
    "dtype": (_replace(f"{GATE}.weight", torch.zeros(12, 64, dtype=torch.int32)), "stored as I32"),
    "plain expert": (_replace(f"{EXPERT}w2.weight", torch.zeros(128, 128)), "w2.weight"),
    "scale shape": (
        _replace(f"{EXPERT}w3.weight_scale", torch.zeros(128, 4, dtype=torch.float8_e4m3fn)),
        r"expected F8_E4M3 \[128, 8\]",
    ),
    "short A_log": (
        _replace(f"{PREFIX}model.layers.0.self_attn.A_log", torch.zeros(1)),
        r"expected \[2\] or longer",
    ),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_tensor_that_does_not_fit_the_config_is_named(
    nvfp4_directory: Path, tmp_path: Path, case: str
) -> None:
    """Refused when opened, with the tensor's name and the remedy."""
    edit, complaint = WRONG[case]
    copy = _single_file_copy(nvfp4_directory, tmp_path / "wrong", edit)
    with pytest.raises(CheckpointError, match=complaint) as error:
        Checkpoint.open(copy)
    assert "fetch" in str(error.value)


def _index(directory: Path, change: Callable[[dict[str, str]], None]) -> None:
    path = directory / INDEX_FILE
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda m: m.update({f"{GATE}.weight": "../x.safetensors"}), "not a plain"),
        (lambda m: m.update({f"{GATE}.weight": "gone.safetensors"}), "gone.safetensors: cannot"),
        (lambda m: m.update({"language_model.new": SHARD}), "language_model.new is missing"),
        (lambda m: m.pop(f"{GATE}.weight"), "which the index places in no shard"),
    ],
    ids=["path", "missing shard", "listed only", "unlisted"],
)
def test_index_and_shards_must_agree(
    nvfp4_directory: Path,
    tmp_path: Path,
    change: Callable[[dict[str, str]], None],
    complaint: str,
) -> None:
    """A mixed download is refused, and no shard name can leave the directory."""
    copy = shutil.copytree(nvfp4_directory, tmp_path / "copy")
    _index(copy, change)
    with pytest.raises(CheckpointError, match=complaint):
        Checkpoint.open(copy)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"weight_map": 3}'])
def test_damaged_index_is_refused(nvfp4_directory: Path, tmp_path: Path, content: bytes) -> None:
    """One error naming the index."""
    copy = shutil.copytree(nvfp4_directory, tmp_path / "copy")
    (copy / INDEX_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        Checkpoint.open(copy)


def test_truncated_shard_is_named(nvfp4_directory: Path, tmp_path: Path) -> None:
    """An interrupted download is found when opening, not when computing."""
    copy = shutil.copytree(nvfp4_directory, tmp_path / "copy")
    with (copy / SHARD).open("r+b") as handle:
        handle.truncate((copy / SHARD).stat().st_size - 1)
    with pytest.raises(CheckpointError, match=f"{SHARD}.*truncated"):
        Checkpoint.open(copy)


def test_one_seed_is_one_checkpoint(tmp_path: Path) -> None:
    """The test helper is deterministic, and another seed is another model."""
    one, same, other = (
        write_tiny_checkpoint(tmp_path / name, seed=seed, layers=2, experts=4)
        for name, seed in (("one", 5), ("same", 5), ("other", 6))
    )
    for file in one.iterdir():
        assert file.read_bytes() == (same / file.name).read_bytes()
    with Checkpoint.open(one) as first, Checkpoint.open(other) as second:
        assert first.digest != second.digest
