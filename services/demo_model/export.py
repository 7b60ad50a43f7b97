"""Write the demo checkpoint in the mixed format of the release: NVFP4 experts, block-FP8 attention,
the rest BF16 or F32.

Owns the encoding of trained float32 parameters and the files of a checkpoint folder. Names and
configuration come from layout.py, number formats from shared.kernels.codecs. Run alone to export a
finished run again: `python -m services.demo_model.export --run DIR --out CHECKPOINT`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from services.demo_model import layout
from services.demo_model.layout import Format, NamedTensor
from services.demo_model.network import NetworkConfig
from shared.core.errors import ConfigError
from shared.kernels import codecs

MASTERS_FILE = "masters.safetensors"
_CONFIG_KEY = "network"


@dataclass(frozen=True, slots=True)
class ExportReport:
    """Sizes of a written checkpoint, and the mean relative error that each quantised format has
    introduced.
    """

    tensors: int
    file_bytes: int
    payload_bytes: dict[str, int]
    relative_error: dict[str, float]


def save_masters(masters: Mapping[str, Tensor], config: NetworkConfig, run: Path) -> None:
    """Keep the trained float32 parameters in `run`, so that an export can be repeated."""
    metadata = {_CONFIG_KEY: msgspec.json.encode(asdict(config)).decode()}
    save_file(
        {name: value.contiguous() for name, value in masters.items()}, run / MASTERS_FILE, metadata
    )


def load_masters(run: Path) -> tuple[dict[str, Tensor], NetworkConfig]:
    """Parameters and sizes of a finished run. Raises ConfigError when `run` holds none."""
    try:
        with safe_open(run / MASTERS_FILE, "pt") as handle:
            names: list[str] = list(handle.keys())
            masters = {name: handle.get_tensor(name) for name in names}
            metadata = handle.metadata()
    except (FileNotFoundError, SafetensorError) as error:
        raise ConfigError(
            f"{run / MASTERS_FILE} is not a finished training run ({error}): "
            "run services.demo_model.train first"
        ) from error
    return masters, msgspec.convert(msgspec.json.decode(metadata[_CONFIG_KEY]), NetworkConfig)


def export(run: Path, out: Path) -> ExportReport:
    """Write the checkpoint of the finished run in folder `run` into folder `out`, replacing what is
    there.
    """
    masters, config = load_masters(run)
    tensors = list(layout.checkpoint_tensors(masters, config))
    shards: dict[int, dict[str, Tensor]] = {}
    payload = {format_.value: 0 for format_ in Format}
    errors: dict[str, list[float]] = {}
    for tensor in tensors:
        for name, stored in encode(tensor):
            shards.setdefault(layout.shard_of(name, config), {})[name] = stored
            payload[tensor.format.value] += stored.numel() * stored.element_size()
        error = _relative_error(tensor)
        if error is not None:
            errors.setdefault(tensor.format.value, []).append(error)
    out.mkdir(parents=True, exist_ok=True)
    _write_shards(shards, config, out)
    quantisation = layout.quantisation(iter(tensors))
    producer = {"name": "k3-pod services.demo_model", "version": "1"}
    _write_json(out / layout.CONFIG_FILE, layout.model_config(config, quantisation))
    _write_json(
        out / layout.QUANTISATION_FILE, {"producer": producer, "quantization": quantisation}
    )
    _write_json(out / layout.GENERATION_FILE, layout.generation_config(config))
    shutil.copyfile(run / layout.TOKENIZER_FILE, out / layout.TOKENIZER_FILE)
    return ExportReport(
        tensors=sum(len(shard) for shard in shards.values()),
        file_bytes=sum(path.stat().st_size for path in out.iterdir()),
        payload_bytes=payload,
        relative_error={name: float(np.mean(values)) for name, values in errors.items()},
    )


def encode(tensor: NamedTensor) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors of one named tensor: the weight, and the scales of its format."""
    name, value = tensor.name, tensor.value.detach().contiguous()
    match tensor.format:
        case Format.NVFP4:
            scale_2 = _scale_2(tensor)
            packed, scale = codecs.nvfp4_encode(value.numpy(), scale_2)
            yield name, torch.from_numpy(packed)
            yield f"{name}_scale", torch.from_numpy(scale).view(torch.float8_e4m3fn)
            yield f"{name}_scale_2", torch.tensor(scale_2)
            yield name.removesuffix("weight") + "input_scale", torch.tensor(1.0)
        case Format.FP8_BLOCK:
            weight, tile_scale = codecs.fp8_block_encode(value.numpy())
            yield name, torch.from_numpy(weight).view(torch.float8_e4m3fn)
            yield f"{name}_scale", torch.from_numpy(tile_scale)
        case Format.BF16:
            yield name, value.bfloat16()
        case Format.F32:
            yield name, value.clone()


def _scale_2(tensor: NamedTensor) -> np.float32:
    source = tensor.value if tensor.scale_source is None else tensor.scale_source
    return codecs.nvfp4_scale_2(source.detach().numpy())


def _relative_error(tensor: NamedTensor) -> float | None:
    """Relative error (Frobenius) of a quantised tensor; None for the formats that only round."""
    value = tensor.value.detach().contiguous().numpy()
    if tensor.format is Format.NVFP4:
        scale_2 = _scale_2(tensor)
        restored = codecs.nvfp4_decode(*codecs.nvfp4_encode(value, scale_2), scale_2)
    elif tensor.format is Format.FP8_BLOCK:
        restored = codecs.fp8_block_decode(*codecs.fp8_block_encode(value))
    else:
        return None
    return float(np.linalg.norm(restored - value) / np.linalg.norm(value))


def _write_shards(
    shards: Mapping[int, dict[str, Tensor]], config: NetworkConfig, out: Path
) -> None:
    """The shards and their index; safetensors orders the tensors of a file by name, so experts lie
    as 0, 1, 10, 11, ...
    """
    for old in out.glob("model-*.safetensors"):
        old.unlink()
    weight_map, total = {}, 0
    for number, shard in sorted(shards.items()):
        file_name = layout.shard_name(number, config)
        save_file(shard, out / file_name, {"format": "pt"})
        # safetensors writes for its owner only; a pod's daemons run as another user.
        (out / file_name).chmod(0o644)
        weight_map.update(dict.fromkeys(shard, file_name))
        total += sum(value.numel() * value.element_size() for value in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(out / layout.INDEX_FILE, index)


def _write_json(path: Path, content: object) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


@click.command()
@click.option(
    "--run",
    type=click.Path(path_type=Path, exists=True),
    required=True,
    help="Folder of a finished training run.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Folder for the checkpoint."
)
def main(run: Path, out: Path) -> None:
    """Export a finished training run as a checkpoint."""
    click.echo(msgspec.json.format(msgspec.json.encode(export(run, out)), indent=2).decode())


if __name__ == "__main__":
    main()
