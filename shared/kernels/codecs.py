"""The number formats of the checkpoints: NVFP4, MXFP4, block FP8 and BF16, in numpy.

Owns the bit-exact encode and decode of every weight format that the two public releases use, with
ModelOpt 0.47 as the authority: where it makes an odd choice (signed zeros, which way a tie falls),
so do we. Must not know files, tensor names, torch, or how a kernel reads a record.

Packing, in all 4-bit formats: one byte holds two E2M1 codes, the even column in the low nibble.
E2M1 codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and bit 3 is the sign.
Encoders refuse weights that are not finite, and sizes that do not divide into blocks, with
ValueError: both are mistakes of the caller and not of a file.
"""

from __future__ import annotations

from typing import Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]

NVFP4_BLOCK: Final = 16
MXFP4_BLOCK: Final = 32
FP8_TILE: Final = 128

_E2M1_MAX: Final = np.float32(6.0)
_E4M3_MAX: Final = np.float32(448.0)
_E4M3_MIN: Final = np.float32(2.0**-9)
# Powers of two that E4M3 holds exactly: 2^-9 (the smallest subnormal) to 2^8.
_E4M3_EXPONENT_MAX: Final = 8
_E4M3_EXPONENT_MIN: Final = -9
_E8M0_BIAS: Final = 127

_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# ModelOpt's NVFP4 table holds a positive zero for code 8; its MXFP4 decode multiplies by the sign
# and so yields -0.0. The difference is invisible in a dot product and visible in a bit comparison.
_NVFP4_VALUES: Final = np.array(
    [*_MAGNITUDES, 0.0, *(-value for value in _MAGNITUDES[1:])], dtype=np.float32
)
_MXFP4_VALUES: Final = np.array(
    [*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=np.float32
)
_MIDPOINTS: Final = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=np.float32)
# searchsorted counts the bounds strictly below |x|. Lowering every second bound by one ulp makes a
# tie count there as above it, which is round to nearest even code.
_MIDPOINTS_TO_EVEN: Final = np.where(
    np.arange(7) % 2 == 1, np.nextafter(_MIDPOINTS, np.float32(0)), _MIDPOINTS
).astype(np.float32)


def bf16_bits(values: npt.ArrayLike) -> U16:
    """BF16 bit patterns of float values, rounded to nearest even; same shape, uint16."""
    rounded = np.asarray(values, dtype=np.float32).astype(ml_dtypes.bfloat16)
    return np.asarray(rounded.view(np.uint16))


def bf16_float(bits: U16) -> F32:
    """Values of BF16 bit patterns (uint16), exactly; same shape, float32."""
    return (np.asarray(bits, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)


def e4m3_float(codes: U8) -> F32:
    """Values of E4M3 (fn: no infinity) bytes, exactly; same shape, float32."""
    codes = np.ascontiguousarray(codes, dtype=np.uint8)
    return np.asarray(codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32))


def e4m3_bytes(values: F32) -> U8:
    """E4M3 (fn) bytes of float values, rounded to nearest even; beyond 448 rounds to NaN."""
    rounded = np.asarray(values, dtype=np.float32).astype(ml_dtypes.float8_e4m3fn)
    return np.asarray(rounded.view(np.uint8))


def nvfp4_scale_2(weight: F32) -> np.float32:
    """Per-tensor NVFP4 scale: amax / (6 * 448). Tensors fused in one GEMM share the larger one."""
    largest = np.float32(np.max(np.abs(weight), initial=0.0))
    return np.float32(largest / (_E2M1_MAX * _E4M3_MAX))


def nvfp4_encode(weight: F32, scale_2: np.float32) -> tuple[U8, U8]:
    """Quantise a [O, I] float32 weight to NVFP4 in blocks of 16 inputs.

    scale = E4M3(amax_block / (6 * scale_2)), kept within [2^-9, 448], 1.0 for a block of zeros;
    code = E2M1(weight / (scale * scale_2)), ties to the even code. `scale_2` zero (a weight of
    zeros) stores zeros. Returns (packed [O, I/2], scale [O, I/16] as E4M3 bytes), both uint8.
    """
    blocks = _blocks(weight, NVFP4_BLOCK)
    scale_2 = np.float32(scale_2)
    if scale_2 == 0.0:
        unit = e4m3_bytes(np.ones(blocks.shape[:2], dtype=np.float32))
        return np.zeros((blocks.shape[0], blocks.shape[1] * 8), dtype=np.uint8), unit
    per_block = np.max(np.abs(blocks), axis=-1) / (_E2M1_MAX * scale_2)
    per_block[per_block == 0.0] = 1.0
    scale = e4m3_bytes(np.clip(per_block, _E4M3_MIN, _E4M3_MAX))
    return _nvfp4_codes(blocks, scale, scale_2), scale


def nvfp4_decode(packed: U8, scale: U8, scale_2: np.float32) -> F32:
    """Weight [O, I] float32 of NVFP4 bytes: E2M1 * (E4M3 scale * scale_2), product in float32.

    packed [O, I/2] and scale [O, I/16] are uint8 (scale holds E4M3 bytes).
    """
    codes = _unpack(packed)
    _check_scale(codes, scale, NVFP4_BLOCK)
    block_scale = e4m3_float(scale) * np.float32(scale_2)
    return _scaled(_NVFP4_VALUES, codes, block_scale, NVFP4_BLOCK)


def mxfp4_encode(weight: F32) -> tuple[U8, U8]:
    """Quantise a [O, I] float32 weight to MXFP4 in blocks of 32 inputs.

    scale = 2^ceil(log2(amax / 6)), never below 2^-127; ties fall to the smaller magnitude and an
    exact zero stores code 8, both as ModelOpt does. Returns (packed [O, I/2], scale [O, I/32] as
    E8M0 bytes, exponent + 127), both uint8.
    """
    blocks = _blocks(weight, MXFP4_BLOCK)
    # The logarithm is taken in float64 and rounded once: a float32 log2 that is an ulp high just
    # above a power of two would move the whole block by one exponent.
    with np.errstate(divide="ignore"):
        log = np.log2((np.max(np.abs(blocks), axis=-1) / _E2M1_MAX).astype(np.float64))
    exponent = np.ceil(np.maximum(log.astype(np.float32), np.float32(-_E8M0_BIAS)))
    exponent = exponent.astype(np.int32)
    scaled = blocks / np.ldexp(np.float32(1.0), exponent)[..., None]
    codes = np.searchsorted(_MIDPOINTS, np.abs(scaled)).astype(np.uint8)
    codes |= (scaled <= 0.0).astype(np.uint8) << 3
    return _pack(codes.reshape(weight.shape)), (exponent + _E8M0_BIAS).astype(np.uint8)


def mxfp4_decode(packed: U8, scale: U8) -> F32:
    """Weight [O, I] float32 of MXFP4 bytes: E2M1 * 2^(scale - 127), exactly.

    packed [O, I/2] and scale [O, I/32] are uint8 (scale holds E8M0 bytes).
    """
    codes = _unpack(packed)
    _check_scale(codes, scale, MXFP4_BLOCK)
    block_scale = np.ldexp(np.float32(1.0), scale.astype(np.int32) - _E8M0_BIAS)
    return _scaled(_MXFP4_VALUES, codes, block_scale, MXFP4_BLOCK)


def mxfp4_k_max(scale: U8) -> int:
    """Largest exponent among E8M0 bytes; bytes of 0 mark blocks of zeros and do not count."""
    used = scale[scale > 0]
    return int(used.max()) - _E8M0_BIAS if used.size else 0


def mxfp4_to_nvfp4(packed: U8, scale: U8, k_max: int | None = None) -> tuple[U8, U8, np.float32]:
    """Cast MXFP4 bytes to NVFP4 bytes: the closed form that made the public NVFP4 release.

    scale_2 = 2^(k_max - 8) and each E4M3 scale is 2^(k - k_max + 8), so every value survives
    exactly as long as k_max - k <= 17; blocks below that keep their largest value as well as the
    format allows. `k_max` defaults to the tensor's own; w1 and w3 of one expert must be given the
    larger of theirs, because the release lets them share scale_2.
    Takes packed [O, I/2] and scale [O, I/32]; returns (packed [O, I/2], scale [O, I/16], scale_2).
    """
    own_k_max = mxfp4_k_max(scale)
    shared_k_max = own_k_max if k_max is None else k_max
    scale_2 = np.ldexp(np.float32(1.0), shared_k_max - _E4M3_EXPONENT_MAX)
    exponent = scale.astype(np.int32) - _E8M0_BIAS
    power = np.ldexp(np.float32(1.0), exponent)
    offset = exponent - (own_k_max - _E4M3_EXPONENT_MAX)
    exact = (offset >= _E4M3_EXPONENT_MIN) & (offset <= _E4M3_EXPONENT_MAX)
    magnitudes = _MXFP4_VALUES[_unpack(packed) & 7]
    largest = magnitudes.reshape(*scale.shape, MXFP4_BLOCK).max(axis=-1) * power
    amax = np.repeat(np.where(exact, _E2M1_MAX * power, largest), 2, axis=-1)
    nv_scale = e4m3_bytes(np.clip(amax / (_E2M1_MAX * scale_2), _E4M3_MIN, _E4M3_MAX))
    blocks = _blocks(mxfp4_decode(packed, scale), NVFP4_BLOCK)
    return _nvfp4_codes(blocks, nv_scale, scale_2), nv_scale, np.float32(scale_2)


def fp8_block_encode(weight: F32) -> tuple[U8, F32]:
    """Quantise a [O, I] weight to E4M3 with one scale per 128 x 128 tile (ModelOpt FP8_PB_WO).

    The release was made from BF16 weights with BF16 arithmetic, so that is what happens here: the
    weight, scale = amax / 448 and the quotient are each rounded to BF16. Edge tiles may be partial.
    A tile of zeros gets scale 1.0 (ModelOpt would store 0 / 0 = NaN).
    Returns (weight [O, I] as E4M3 bytes, scale [ceil(O/128), 1, ceil(I/128), 1] float32).
    """
    _check_finite(weight)
    rows, columns = weight.shape
    row_tiles, column_tiles = -(-rows // FP8_TILE), -(-columns // FP8_TILE)
    padded = np.zeros((row_tiles * FP8_TILE, column_tiles * FP8_TILE), dtype=np.float32)
    padded[:rows, :columns] = _bf16_round(weight)
    tiles = padded.reshape(row_tiles, FP8_TILE, column_tiles, FP8_TILE)
    scale = _bf16_round(np.abs(tiles).max(axis=(1, 3), keepdims=True) / _E4M3_MAX)
    scale[scale == 0.0] = 1.0
    codes = e4m3_bytes(_bf16_round(tiles / scale)).reshape(padded.shape)
    return np.ascontiguousarray(codes[:rows, :columns]), scale


def fp8_block_decode(weight: U8, scale: F32) -> F32:
    """Weight [O, I] float32 of E4M3 bytes [O, I] and tile scales [ceil(O/128), 1, ceil(I/128), 1].

    A scale [ceil(O/128), ceil(I/128)] is accepted too.
    """
    rows, columns = weight.shape
    tiles = (-(-rows // FP8_TILE), -(-columns // FP8_TILE))
    if scale.shape not in ((tiles[0], 1, tiles[1], 1), tiles):
        raise ValueError(
            f"FP8 scale {scale.shape} does not fit weight {weight.shape}: need {tiles}"
        )
    grid = scale.reshape(tiles).astype(np.float32)
    spread = np.repeat(np.repeat(grid, FP8_TILE, axis=0), FP8_TILE, axis=1)[:rows, :columns]
    return np.asarray(e4m3_float(weight) * spread, dtype=np.float32)


def _nvfp4_codes(blocks: F32, scale: U8, scale_2: np.float32) -> U8:
    """Packed codes [O, I/2] of blocks [O, I/16, 16] under the given scales."""
    scaled = blocks / (e4m3_float(scale) * scale_2)[..., None]
    codes = np.searchsorted(_MIDPOINTS_TO_EVEN, np.abs(scaled)).astype(np.uint8)
    # A small negative weight that rounds to zero keeps its sign (code 8), as in ModelOpt.
    codes |= (scaled < 0.0).astype(np.uint8) << 3
    return _pack(codes.reshape(blocks.shape[0], -1))


def _pack(codes: U8) -> U8:
    return np.ascontiguousarray(codes[:, 0::2] | (codes[:, 1::2] << 4))


def _unpack(packed: U8) -> U8:
    codes = np.empty((packed.shape[0], packed.shape[1] * 2), dtype=np.uint8)
    codes[:, 0::2] = packed & 0x0F
    codes[:, 1::2] = packed >> 4
    return codes


def _scaled(values: F32, codes: U8, block_scale: F32, block: int) -> F32:
    blocks = values[codes].reshape(codes.shape[0], -1, block)
    return np.asarray(blocks * block_scale[..., None], dtype=np.float32).reshape(codes.shape)


def _blocks(weight: F32, block: int) -> F32:
    _check_finite(weight)
    rows, columns = weight.shape
    if columns % block:
        raise ValueError(f"weight {weight.shape}: {columns} columns do not divide by {block}")
    return np.asarray(weight, dtype=np.float32).reshape(rows, columns // block, block)


def _check_finite(weight: F32) -> None:
    if not np.isfinite(weight).all():
        raise ValueError(f"weight {weight.shape} holds values that are not finite")


def _check_scale(codes: U8, scale: U8, block: int) -> None:
    expected = (codes.shape[0], codes.shape[1] // block)
    if codes.shape[1] % block or scale.shape != expected:
        raise ValueError(f"scale {scale.shape} does not fit codes {codes.shape}: need {expected}")


def _bf16_round(values: npt.ArrayLike) -> F32:
    return bf16_float(bf16_bits(values))
