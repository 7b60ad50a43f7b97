"""Our codecs against nvidia-modelopt, the tool that made the release: equal bits, both ways."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from shared.kernels import codecs
from tests.oracle.packages import oracle_module

pytestmark = pytest.mark.oracle

TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]


@pytest.fixture(scope="module")
def modelopt() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return oracle_module("modelopt.torch.quantization.qtensor")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """ModelOpt warns about transformers' version on first use; that is not what is tested."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _weight(seed: int) -> np.ndarray:
    """[96, 256] over many magnitudes, with zeros, ties, tiny and saturating blocks."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((96, 256)) * 10.0 ** rng.uniform(-4, 2, size=(96, 1))
    weight[0] = 0
    weight[1, :32] = 0
    weight[2] *= 1e-7  # block scales below E4M3's smallest
    weight[3, :16] = 1e-30
    weight[4] = np.resize([*TIES, *(-tie for tie in TIES)], 256)
    weight[5, ::2] = -0.0
    return weight.astype(np.float32)


def _same_bits(ours: np.ndarray, theirs: torch.Tensor) -> None:
    other = theirs.contiguous().view(torch.uint8).numpy().reshape(-1)
    np.testing.assert_array_equal(np.ascontiguousarray(ours).view(np.uint8).reshape(-1), other)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shrink", [1.0, 3.0, 1 / 300], ids=["own scale", "saturating", "coarse"])
def test_nvfp4(modelopt: Any, seed: int, shrink: float) -> None:
    """Scales, codes and decoded values are ModelOpt's bits, also under a foreign scale_2."""
    weight = _weight(seed)
    tensor = torch.from_numpy(weight.copy())
    own = codecs.nvfp4_scale_2(weight)
    assert own == modelopt.NVFP4QTensor.get_weights_scaling_factor_2(tensor).item()
    scale_2 = np.float32(own / shrink)
    theirs, their_scale, _ = modelopt.NVFP4QTensor.quantize(
        tensor, 16, None, torch.tensor(scale_2), try_tensorrt=False
    )
    packed, scale = codecs.nvfp4_encode(weight, scale_2)
    _same_bits(scale, their_scale)
    _same_bits(packed, theirs._quantized_data)
    decoded = theirs.dequantize(
        torch.float32,
        scale=their_scale,
        double_scale=torch.tensor(scale_2),
        block_sizes={-1: 16},
    )
    _same_bits(codecs.nvfp4_decode(packed, scale, scale_2), decoded)


@pytest.mark.parametrize("seed", range(4))
def test_mxfp4(modelopt: Any, seed: int) -> None:
    """Scales, codes (-0 for every zero included) and decoded values are ModelOpt's bits."""
    weight = _weight(seed)
    theirs, their_scale = modelopt.MXFP4QTensor.quantize(torch.from_numpy(weight.copy()), 32)
    packed, scale = codecs.mxfp4_encode(weight)
    _same_bits(scale, their_scale)
    _same_bits(packed, theirs._quantized_data)
    decoded = theirs.dequantize(torch.float32, scale=their_scale, block_sizes=[32])
    _same_bits(codecs.mxfp4_decode(packed, scale), decoded)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lift", [0, 3], ids=["own exponent", "shared exponent"])
def test_mxfp4_to_nvfp4(seed: int, lift: int) -> None:
    """The cast is the one of ModelOpt's release tool, bit for bit, out-of-range blocks included."""
    tool = oracle_module("modelopt.torch.export.shard_cast_utils")
    packed, scale = codecs.mxfp4_encode(_weight(seed))
    k_max = tool.mxfp4_kmax(torch.from_numpy(scale))
    assert codecs.mxfp4_k_max(scale) == k_max
    theirs = tool.quantize_mxfp4_to_nvfp4_lossless(
        torch.from_numpy(packed), torch.from_numpy(scale), k_max + lift, "cpu"
    )
    ours = codecs.mxfp4_to_nvfp4(packed, scale, k_max + lift)
    _same_bits(ours[0], theirs[0])
    _same_bits(ours[1], theirs[1])
    assert ours[2] == theirs[2].item()


@pytest.mark.parametrize("shape", [(128, 128), (300, 200), (96, 256), (576, 130)])
def test_fp8_blocks(modelopt: Any, shape: tuple[int, int]) -> None:
    """Tile scales, codes and values of a BF16 weight are ModelOpt's bits, edge tiles included."""
    rng = np.random.default_rng(shape[0])
    weight = (rng.standard_normal(shape) * 10.0 ** rng.uniform(-6, 3)).astype(np.float32)
    sizes = {-1: 128, -2: 128}
    theirs, their_scale = modelopt.FP8QTensor.quantize(
        torch.from_numpy(weight).bfloat16(), block_sizes=sizes
    )
    codes, scale = codecs.fp8_block_encode(weight)
    _same_bits(scale, their_scale.float())
    _same_bits(codes, theirs._quantized_data)
    decoded = theirs.dequantize(torch.float32, scale=their_scale.float(), block_sizes=sizes)
    _same_bits(codecs.fp8_block_decode(codes, scale), decoded)
