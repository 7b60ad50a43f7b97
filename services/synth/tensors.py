"""Which tensors a synthetic checkpoint stores, and in which shard. Pure.

Owns the storage of the release (NVFP4 experts, block-FP8 attention, BF16 and F32 for the rest, the
vision tensors that a text model ignores) and the cut into shards. Names and logical shapes are the
reader's own (`station.model.tensor_table`). Must not know bytes or files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain, groupby
from typing import Final, TypeAlias

from shared.core.errors import ConfigError
from shared.core.record import BLOCK
from shared.kernels.codecs import FP8_TILE
from station.model.config import K3Config
from station.model.tensor_table import (
    PREFIX,
    ExpectedTensor,
    Kind,
    expected_tensors,
    layer_prefix,
)

_OTHER_MODULES: Final = 3  # embedding, head, vision
_A_LOG_STEP: Final = 128
_VISION_BLOCKS: Final = 27
_VISION_WIDTH: Final = 16
_F32_SUFFIXES: Final = ("_conv1d.weight", ".dt_bias", ".o_norm.weight", "_score_correction_bias")
# safetensors lays out a file by dtype in this order, and by name within one.
_FILE_ORDER: Final = {"F32": 0, "BF16": 1, "F8_E4M3": 2, "U8": 3}
_DTYPE_BYTES: Final = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}
_Module: TypeAlias = "list[list[SynthTensor]]"


class Fill(Enum):
    """What a tensor's values look like."""

    NIBBLES = "nibbles"  # any byte is two E2M1 codes
    SCALE = "scale"  # positive E4M3 around 1
    MATRIX = "matrix"  # zero mean, variance 1 / inputs
    NORM = "norm"  # around 1
    BIAS = "bias"  # around 0
    DECAY = "decay"  # A_log: around 0, and zero beyond its first `inputs` entries
    SCALE_2 = "scale_2"  # of an expert: makes the matrix's variance about 1 / inputs
    TILE_SCALE = "tile_scale"  # of a block-FP8 matrix, likewise
    ONE = "one"


@dataclass(frozen=True, slots=True)
class SynthTensor:
    """One stored tensor; `inputs` is the fan-in that its values are scaled for."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fill: Fill
    inputs: int

    @property
    def length(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * _DTYPE_BYTES[self.dtype]


def shard_count(config: K3Config, wanted: int | None) -> int:
    """Checked number of shards, the release's cut for None; ConfigError names the most possible."""
    modules = config.num_hidden_layers + _OTHER_MODULES
    most = modules + config.shape.routed_experts
    if wanted is not None and wanted > most:
        raise ConfigError(f"shards is {wanted}: choose at most {most}, the parts of this model")
    return modules if wanted is None else wanted


def shards(config: K3Config, count: int) -> Iterator[list[SynthTensor]]:
    """The tensors of each shard, in file order; exactly `count` lists, none of them empty.

    Up to one shard per module, whole modules share shards; beyond that MoE layers are cut between
    experts.
    """
    modules = config.num_hidden_layers + _OTHER_MODULES
    pieces = chain.from_iterable(
        _cut(module, share)
        for module, share in zip(_modules(config), _shares(config, count), strict=True)
    )
    numbered = groupby(
        enumerate(pieces), lambda item: item[0] * count // modules if count < modules else item[0]
    )
    for _, group in numbered:
        tensors = chain.from_iterable(piece for _, piece in group)
        yield sorted(tensors, key=lambda tensor: (_FILE_ORDER[tensor.dtype], tensor.name))


def totals(config: K3Config) -> tuple[int, int]:
    """Number of tensors and their bytes; nothing is kept."""
    text = (tensor for expected in expected_tensors(config) for tensor in _stored(expected))
    count = size = 0
    for tensor in chain(text, _vision()):
        count += 1
        size += tensor.length
    return count, size


def quantised_modules(config: K3Config) -> tuple[list[str], list[str]]:
    """Module names of the expert banks, and of the block-FP8 attention matrices."""
    banks = [f"{layer_prefix(n)}block_sparse_moe.experts" for n in config.shape.moe_layers]
    attention = [
        expected.name.removesuffix(".weight")
        for expected in expected_tensors(config)
        if _is_block_fp8(expected)
    ]
    return banks, attention


def _modules(config: K3Config) -> Iterator[_Module]:
    """Layers, embedding, head, vision: what the release keeps in one shard each."""
    top: list[ExpectedTensor] = []
    layers = f"{PREFIX}model.layers."
    for module, group in groupby(
        expected_tensors(config),
        lambda expected: expected.name.split(".", 4)[3] if expected.name.startswith(layers) else "",
    ):
        if module:
            yield _granules(group)
        else:
            top += group
    embedding = f"{PREFIX}model.embed_tokens.weight"
    yield _granules(expected for expected in top if expected.name == embedding)
    yield _granules(expected for expected in top if expected.name != embedding)
    yield [list(_vision())]


def _granules(module: Iterable[ExpectedTensor]) -> _Module:
    """What must stay in one shard: each expert, and all the rest of a module."""
    rest: list[SynthTensor] = []
    experts: dict[str, list[SynthTensor]] = {}
    for expected in module:
        is_expert = expected.kind is Kind.EXPERT
        part = experts.setdefault(expected.name.rsplit(".", 2)[0], []) if is_expert else rest
        part += _stored(expected)
    return [rest, *experts.values()]


def _shares(config: K3Config, count: int) -> list[int]:
    """Into how many shards each module goes; extra shards are spread over the MoE layers."""
    extra = max(0, count - config.num_hidden_layers - _OTHER_MODULES)
    layers = len(config.shape.moe_layers)
    moe = [1 + extra // layers + (n < extra % layers) for n in range(layers)]
    return [1] * config.first_k_dense_replace + moe + [1] * _OTHER_MODULES


def _cut(module: _Module, share: int) -> Iterator[list[SynthTensor]]:
    """`share` runs of granules, as equal as possible."""
    for n in range(share):
        start, stop = (len(module) * edge // share for edge in (n, n + 1))
        yield list(chain.from_iterable(module[start:stop]))


def _is_block_fp8(expected: ExpectedTensor) -> bool:
    return expected.kind is Kind.LINEAR and ".self_attn." in expected.name


def _stored(expected: ExpectedTensor) -> Iterator[SynthTensor]:
    """What the release stores for one tensor of the model."""
    name, shape = expected.name, expected.shape
    inputs = shape[-1]
    if expected.kind is Kind.EXPERT:
        rows = shape[0]
        base = name.removesuffix(".weight")
        yield SynthTensor(name, "U8", (rows, inputs // 2), Fill.NIBBLES, inputs)
        yield SynthTensor(f"{name}_scale", "F8_E4M3", (rows, inputs // BLOCK), Fill.SCALE, inputs)
        yield SynthTensor(f"{name}_scale_2", "F32", (), Fill.SCALE_2, inputs)
        yield SynthTensor(f"{base}.input_scale", "F32", (), Fill.ONE, inputs)
    elif _is_block_fp8(expected):
        tiles = (-(-shape[0] // FP8_TILE), 1, -(-inputs // FP8_TILE), 1)
        yield SynthTensor(name, "F8_E4M3", shape, Fill.MATRIX, inputs)
        yield SynthTensor(f"{name}_scale", "F32", tiles, Fill.TILE_SCALE, inputs)
    elif expected.kind is Kind.PADDED:
        padded = -(-shape[0] // _A_LOG_STEP) * _A_LOG_STEP
        yield SynthTensor(name, "F32", (padded,), Fill.DECAY, shape[0])
    else:
        dtype = "F32" if name.endswith(_F32_SUFFIXES) else "BF16"
        yield SynthTensor(name, dtype, shape, _plain_fill(name), inputs)


def _plain_fill(name: str) -> Fill:
    if name.endswith("norm.weight"):
        return Fill.NORM
    return Fill.BIAS if name.endswith("bias") else Fill.MATRIX


def _vision() -> Iterator[SynthTensor]:
    """168 tensors, as many as the release has; their names and sizes are made up."""
    wide = _VISION_WIDTH
    matrix: tuple[int, ...] = (wide, wide)
    vector: tuple[int, ...] = (wide,)
    block: dict[str, tuple[int, ...]] = {
        "wqkv": (3 * wide, wide),
        "wo": matrix,
        "mlp.fc0": matrix,
        "mlp.fc1": matrix,
    }
    block |= {"norm0": vector, "norm1": vector}
    shapes = {
        f"vision_tower.blocks.{n}.{part}": shape
        for n in range(_VISION_BLOCKS)
        for part, shape in block.items()
    }
    shapes |= dict.fromkeys(("vision_tower.patch_embed.proj", "vision_tower.pos_emb"), matrix)
    shapes |= dict.fromkeys(("mm_projector.proj.0", "mm_projector.proj.2"), matrix)
    shapes |= dict.fromkeys(("vision_tower.final_norm", "mm_projector.pre_norm"), vector)
    for name, shape in shapes.items():
        fill = Fill.NORM if shape == vector else Fill.MATRIX
        yield SynthTensor(f"{name}.weight", "BF16", shape, fill, wide)
