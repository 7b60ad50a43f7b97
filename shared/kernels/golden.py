"""The golden row: what an expert makes of a canary activation, computed in float64.

Owns the slow exact arithmetic and the comparison with a stored row. Every product and sum is in
float64; the hidden row and the row are rounded to bf16, as in the reference kernel. So what this
computes today is what it computed when a bank was built, to a last bit of bf16 at worst. Must not
know banks, files, or the kernels that are judged by it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from shared.core.record import BLOCK, RecordField, RecordLayout
from shared.core.record_order import by_output
from shared.kernels.canary import canary_activation
from shared.kernels.codecs import bf16_bits, bf16_float, e4m3_float, nvfp4_decode
from shared.kernels.expert import Bf16Bits
from shared.kernels.reference import situ

_OUTPUTS: Final = 16  # decoded at a time: a piece of K3's matrices in float64 stays in the cache
_E4M3_ONE: Final = 0x38
_BF16_STEP: Final = 2.0**-7  # between neighbours, relative to the smaller one

F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]


def golden_row(layout: RecordLayout, record: U8, seed: int) -> Bf16Bits:
    """Row uint16 (bf16 bits) [latent] of `record` (uint8 [>= record_bytes]) for the canary `seed`.

    0.1 s at K3 size in a few MB of memory. NaN and infinity come out as they are.
    """
    fields = {field.name: field for field in layout.fields}
    z = bf16_float(canary_activation(seed, layout.shape.latent)).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        g, u = (_product(layout, record, fields, matrix, z) for matrix in ("w1", "w3"))
        hidden = bf16_float(bf16_bits(_situ(g, u))).astype(np.float64)
        return bf16_bits(_product(layout, record, fields, "w2", hidden))


def is_golden(row: Bf16Bits, golden: Bf16Bits) -> bool:
    """Whether two results of `golden_row` are one: every value equal or a neighbour in bf16."""
    a, b = bf16_float(row).astype(np.float64), bf16_float(golden).astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return False
    return bool((np.abs(a - b) <= _BF16_STEP * np.minimum(np.abs(a), np.abs(b))).all())


def largest_difference(row: Bf16Bits, golden: Bf16Bits) -> float:
    """Largest distance of two values of rows (bf16 bits, [latent]); NaN when one is not finite."""
    a, b = bf16_float(row).astype(np.float64), bf16_float(golden).astype(np.float64)
    with np.errstate(invalid="ignore"):
        return float(np.abs(a - b).max())


def _pairs() -> npt.NDArray[np.uint64]:
    """Two float32 values of every byte of packed codes, as one word: the codec's own, tabled."""
    packed = np.arange(256, dtype=np.uint8).reshape(-1, BLOCK // 2)
    ones = np.full((len(packed), 1), _E4M3_ONE, np.uint8)
    return nvfp4_decode(packed, ones, np.float32(1)).reshape(-1).view(np.uint64)


_PAIRS: Final = _pairs()


def _situ(g: F64, u: F64) -> F64:
    return situ(g, u)  # type: ignore[arg-type,return-value] # elementwise in either precision


def _product(
    layout: RecordLayout, record: U8, fields: dict[str, RecordField], matrix: str, x: F64
) -> F64:
    """One matrix times `x`, a few outputs at a time."""
    packed = _by_row(layout, record, fields[f"{matrix}.weight"])
    scale = _by_row(layout, record, fields[f"{matrix}.weight_scale"])
    out = np.empty(len(packed), np.float64)
    for first in range(0, len(packed), _OUTPUTS):
        piece = slice(first, first + _OUTPUTS)
        values = _PAIRS.take(packed[piece]).view(np.float32)
        blocks = values.reshape(len(values), -1, BLOCK) * e4m3_float(scale[piece])[..., None]
        weight = blocks.reshape(values.shape).astype(np.float64)  # exact: float32 held it whole
        np.einsum("oi,i->o", weight, x, out=out[piece])
    field = fields[f"{matrix}.weight_scale_2"]
    scale_2 = record[field.offset : field.offset + field.length].view("<f4")
    return out * np.float64(scale_2[0])


def _by_row(layout: RecordLayout, record: U8, field: RecordField) -> U8:
    """A tensor as the release stores it, uint8 [outputs, bytes of one]."""
    if layout.order == "row-major":
        return record[field.offset : field.offset + field.length].reshape(field.shape)
    by_row = np.ascontiguousarray(by_output(record, field, layout.order))
    return by_row.view(np.uint8).reshape(field.shape)
