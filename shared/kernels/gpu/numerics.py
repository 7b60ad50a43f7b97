"""The number formats and the activation of an expert, as Triton functions of blocks.

Owns the decode of NVFP4 bytes, the rounding to bf16 and SiTU: integer operations and + - x / of
float32 alone, so the interpreter and a GPU run the same steps. Must not know records or memory.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

# A 4-bit code placed in the exponent of a float32 is 2^-126 of its value (0.5 is a subnormal, which
# must not be flushed), an E4M3 byte in that of a half float 2^-8 of its own. One factor per scale
# brings their product near 1: WEIGHT_UNIT x the weight, because 448 x 2^126 is beyond float32.
_SCALE_FACTOR: Final = tl.constexpr(2.0**125)
WEIGHT_UNIT: Final = tl.constexpr(2.0**-9)
_SIGN: Final = tl.constexpr(-(2**31))
_MAGNITUDE: Final = tl.constexpr(0x01C00000)

_LOG2_E: Final = tl.constexpr(1.44269504)
_LN2_HIGH: Final = tl.constexpr(0.693359375)  # exact in 9 bits
_LN2_LOW: Final = tl.constexpr(-2.12194440e-4)
_TO_INTEGER: Final = tl.constexpr(12582912.0)  # 1.5 x 2^23: adding it rounds to an integer
_ONE_BITS: Final = tl.constexpr(0x3F800000)


@triton.jit
def e4m3_scales(codes: tl.tensor) -> tl.tensor:
    """float32 2^117 x the values of E4M3 (fn) bytes, exactly; 0x7F and 0xFF are NaN."""
    wide = codes.to(tl.uint16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * _SCALE_FACTOR
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def e2m1_even(packed: tl.tensor) -> tl.tensor:
    """float32 2^-126 x the values of the low nibbles, which are the even columns."""
    wide = packed.to(tl.int32)
    return (((wide << 28) & _SIGN) | ((wide << 22) & _MAGNITUDE)).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_odd(packed: tl.tensor) -> tl.tensor:
    """float32 2^-126 x the values of the high nibbles, which are the odd columns."""
    wide = packed.to(tl.int32)
    return (((wide << 24) & _SIGN) | ((wide << 18) & _MAGNITUDE)).to(tl.float32, bitcast=True)


@triton.jit
def bf16_even(words: tl.tensor, OPERAND: tl.constexpr) -> tl.tensor:
    """The first of two bf16 in each int32 word, as bf16 or (exactly) as float32."""
    if OPERAND == tl.bfloat16:
        even = words.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        even = (words << 16).to(tl.float32, bitcast=True)
    return even


@triton.jit
def bf16_odd(words: tl.tensor, OPERAND: tl.constexpr) -> tl.tensor:
    """The second of two bf16 in each int32 word, as bf16 or (exactly) as float32."""
    if OPERAND == tl.bfloat16:
        odd = (words >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        odd = ((words >> 16) << 16).to(tl.float32, bitcast=True)
    return odd


@triton.jit
def bf16_bits(x: tl.tensor) -> tl.tensor:
    """int16 bits of float32 rounded to bf16, nearest even; every NaN becomes 0x7FC0."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0).to(tl.int16)


@triton.jit
def situ(g: tl.tensor, u: tl.tensor) -> tl.tensor:
    """float32 4 tanh(g/4) sigmoid(g) x 25 tanh(u/25), relative error a few 1e-7; keeps NaN."""
    return (4.0 * _tanh(g * 0.25) * _sigmoid(g)) * (25.0 * _tanh(tl.div_rn(u, 25.0)))


@triton.jit
def _exp_parts(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """(scale, tail) with exp(x) = scale x (1 + tail), |tail| < 0.42, for |x| <= 87 or NaN."""
    shifted = x * _LOG2_E + _TO_INTEGER
    n = shifted - _TO_INTEGER
    r = x - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = r * (1.0 / 5040) + 1.0 / 720
    p = p * r + 1.0 / 120
    p = p * r + 1.0 / 24
    p = p * r + 1.0 / 6
    p = p * r + 0.5
    scale = (shifted.to(tl.int32, bitcast=True) << 23) + _ONE_BITS
    return scale.to(tl.float32, bitcast=True), p * (r * r) + r


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    """From expm1, so that a small x keeps its relative precision."""
    magnitude = tl.abs(x)
    magnitude = tl.where(magnitude > 10.0, 10.0, magnitude)  # tanh(10) is 1 in float32
    scale, tail = _exp_parts(magnitude + magnitude)
    expm1 = scale * tail + (scale - 1.0)
    positive = tl.div_rn(expm1, expm1 + 2.0)
    return tl.where(x < 0, -positive, positive)


@triton.jit
def _sigmoid(x: tl.tensor) -> tl.tensor:
    """1 / (1 + exp(-x)); never below exp(-87), the smallest exponential that is a normal number."""
    a = tl.where(x < -87.0, 87.0, -x)
    a = tl.where(a < -87.0, -87.0, a)
    scale, tail = _exp_parts(a)
    return tl.div_rn(1.0 + tl.zeros_like(x), 1.0 + (scale + scale * tail))
