"""The weight formats: known bytes, what survives a round trip, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from shared.kernels import codecs

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
ONE = np.uint8(0x38)  # 1.0 in E4M3


def test_even_column_is_the_low_nibble() -> None:
    """Byte 0x21 is code 1 (0.5) in column 0 and code 2 (1.0) in column 1."""
    packed = np.zeros((1, 8), dtype=np.uint8)
    packed[0, 0] = 0x21
    decoded = codecs.nvfp4_decode(packed, np.array([[ONE]]), np.float32(2.0))
    assert decoded[0, :3].tolist() == [1.0, 2.0, 0.0]


def test_every_nvfp4_value_survives() -> None:
    """All 15 values come back exactly, each block under its own scale."""
    row = np.concatenate([MAGNITUDES, -MAGNITUDES])
    weight = np.stack([np.concatenate([row * 448, row * 2]), np.concatenate([row, row * 32])])
    scale_2 = codecs.nvfp4_scale_2(weight)
    packed, scale = codecs.nvfp4_encode(weight, scale_2)
    assert packed.shape == (2, 16)
    assert scale.shape == (2, 2)
    np.testing.assert_array_equal(codecs.nvfp4_decode(packed, scale, scale_2), weight)


def test_nvfp4_ties_go_to_the_even_code() -> None:
    """0.25 falls to 0, 0.75 rises to 1, 1.25 falls to 1, 1.75 rises to 2, and so on."""
    weight = np.zeros((1, 16), dtype=np.float32)
    weight[0, :8] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    packed, scale = codecs.nvfp4_encode(weight, np.float32(1.0))
    decoded = codecs.nvfp4_decode(packed, scale, np.float32(1.0))
    assert decoded[0, :8].tolist() == [0, 1, 1, 2, 2, 4, 4, 6]


def test_zero_weight_encodes_to_zero() -> None:
    """A tensor of zeros has scale_2 zero, which must not turn into NaN."""
    weight = np.zeros((2, 32), dtype=np.float32)
    scale_2 = codecs.nvfp4_scale_2(weight)
    packed, scale = codecs.nvfp4_encode(weight, scale_2)
    assert not codecs.nvfp4_decode(packed, scale, scale_2).any()
    packed, scale = codecs.mxfp4_encode(weight)
    assert not codecs.mxfp4_decode(packed, scale).any()
    codes, tile_scale = codecs.fp8_block_encode(weight)
    assert tile_scale.ravel().tolist() == [1.0]
    assert not codecs.fp8_block_decode(codes, tile_scale).any()


def test_mxfp4_scale_is_the_exponent_that_holds_the_block() -> None:
    """6 fits exponent 0 (byte 127); a hair above 6 needs exponent 1."""
    weight = np.zeros((2, 32), dtype=np.float32)
    weight[:, 3] = [6.0, 6.001]
    _, scale = codecs.mxfp4_encode(weight)
    assert scale.ravel().tolist() == [127, 128]


@pytest.mark.parametrize("seed", range(3))
def test_mxfp4_to_nvfp4_keeps_every_value(seed: int) -> None:
    """Blocks within 17 exponents of the largest survive the cast exactly; scales are 2^k."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((32, 64)) * 2.0 ** rng.integers(-14, 0, size=(32, 1))
    packed, scale = codecs.mxfp4_encode(weight.astype(np.float32))
    before = codecs.mxfp4_decode(packed, scale)
    for k_max in (None, codecs.mxfp4_k_max(scale) + 1):
        after = codecs.nvfp4_decode(*codecs.mxfp4_to_nvfp4(packed, scale, k_max))
        np.testing.assert_array_equal(after, before)
    assert np.log2(codecs.mxfp4_to_nvfp4(packed, scale)[2]) == codecs.mxfp4_k_max(scale) - 8


def test_nvfp4_error_is_bounded_by_half_a_step() -> None:
    """No weight moves by more than its block's scale, half the widest gap between codes."""
    weight = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    scale_2 = codecs.nvfp4_scale_2(weight)
    packed, scale = codecs.nvfp4_encode(weight, scale_2)
    step = np.repeat(codecs.e4m3_float(scale) * scale_2, 16, axis=1)
    error = np.abs(codecs.nvfp4_decode(packed, scale, scale_2) - weight)
    assert (error <= step * 1.001).all()
    assert error.max() > 0


def test_fp8_tiles_have_their_own_scale() -> None:
    """A loud tile does not cost a quiet one its precision; edge tiles are cropped."""
    weight = np.full((130, 257), 1e-3, dtype=np.float32)
    weight[:128, :128] = 100.0
    codes, scale = codecs.fp8_block_encode(weight)
    assert codes.shape == (130, 257)
    assert scale.shape == (2, 1, 3, 1)
    np.testing.assert_allclose(codecs.fp8_block_decode(codes, scale), weight, rtol=0.01)


def test_bf16_rounds_to_nearest_even() -> None:
    """Halfway cases go to the even mantissa, and every bit pattern comes back."""
    halfway = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8], dtype=np.float32)
    assert codecs.bf16_bits(halfway).tolist() == [0x3F80, 0x3F82, 0xBF80]
    bits = np.arange(0x7F80, dtype=np.uint16)
    np.testing.assert_array_equal(codecs.bf16_bits(codecs.bf16_float(bits)), bits)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    """No format has a code for them."""
    weight = np.zeros((1, 32), dtype=np.float32)
    weight[0, 5] = bad
    for encode in (
        lambda: codecs.nvfp4_encode(weight, np.float32(1)),
        lambda: codecs.mxfp4_encode(weight),
        lambda: codecs.fp8_block_encode(weight),
    ):
        with pytest.raises(ValueError, match="not finite"):
            encode()


def test_sizes_that_do_not_fit_are_refused() -> None:
    """Columns divide into blocks, and scales belong to their codes."""
    weight = np.zeros((2, 24), dtype=np.float32)
    with pytest.raises(ValueError, match="do not divide by 16"):
        codecs.nvfp4_encode(weight, np.float32(1))
    with pytest.raises(ValueError, match="do not divide by 32"):
        codecs.mxfp4_encode(weight)
    packed = np.zeros((2, 16), dtype=np.uint8)
    with pytest.raises(ValueError, match="does not fit"):
        codecs.nvfp4_decode(packed, np.zeros((2, 1), dtype=np.uint8), np.float32(1))
    with pytest.raises(ValueError, match="does not fit"):
        codecs.mxfp4_decode(packed, np.zeros((1, 1), dtype=np.uint8))
    with pytest.raises(ValueError, match="does not fit"):
        codecs.fp8_block_decode(packed, np.zeros((2, 1, 1, 1), dtype=np.float32))
