"""The canary: one known activation whose row tells whether a node still computes the right thing.

Owns the activation (a function of the seed alone, on any machine) and the comparison of two rows.
Must not know when a canary is due or what happens to a node that fails.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from shared.kernels.codecs import bf16_float
from shared.kernels.expert import Arena, Bf16Bits, ExpertKernel

COSINE_MIN: Final = 0.999
NORM_RATIO_MAX: Final = 1.02  # a cosine is blind to a wrong scale_2
# Both are blind to a few wrong values of K3's 3,584. Of the row's largest value; right kernels
# differed by 0.01 at most in 9,000 comparisons on random experts, a step of bf16 being 0.008.
VALUE_OFF_MAX: Final = 2.0**-5


def canary_activation(seed: int, latent: int) -> Bf16Bits:
    """Bf16 bits uint16 [latent] of values in [-2, 2), by SplitMix64 of (seed, index)."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is the point
        state = np.uint64(seed % 2**64) + np.arange(1, latent + 1, dtype=np.uint64) * np.uint64(
            0x9E3779B97F4A7C15
        )
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    values = ((state >> np.uint64(40)).astype(np.float32) / np.float32(2**22)) - np.float32(2)
    return np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16))


def canary_row(kernel: ExpertKernel, arena: Arena, bank_row: int, seed: int) -> Bf16Bits:
    """Row uint16 [latent] of the expert at `bank_row` for the canary activation of `seed`.

    The arena's records are of the kernel's shape; LocalProtocolError otherwise.
    """
    latent = kernel.shape.latent
    out = np.empty((1, latent), np.uint16)
    kernel.rows(
        arena,
        np.array([bank_row], np.int32),
        np.zeros(1, np.int32),
        canary_activation(seed, latent)[None],
        out,
    )
    return np.asarray(out[0])


def agrees(row_a: Bf16Bits, row_b: Bf16Bits, same_kernel: bool) -> bool:
    """Whether two rows (bf16 bits, [latent]) are the same answer; a row with NaN or Inf never is.

    Bitwise when both came from one kernel id. Otherwise the cosine is at least COSINE_MIN, the
    norms differ by at most NORM_RATIO_MAX and no value by more than VALUE_OFF_MAX of the largest
    one; two rows of zeros agree.
    """
    if row_a.shape != row_b.shape:
        return False
    a, b = bf16_float(row_a).astype(np.float64), bf16_float(row_b).astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return False
    if same_kernel:
        return bool(np.array_equal(row_a, row_b))
    norm_a, norm_b = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    if norm_a == 0.0 or norm_b == 0.0:
        return norm_a == norm_b
    if max(norm_a / norm_b, norm_b / norm_a) > NORM_RATIO_MAX:
        return False
    if np.abs(a - b).max() > VALUE_OFF_MAX * np.abs(a).max():
        return False
    return float(a @ b) / (norm_a * norm_b) >= COSINE_MIN
