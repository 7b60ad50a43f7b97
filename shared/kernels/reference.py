"""The reference kernel: the definition of a row written as plainly as numpy allows.

Owns nothing but clarity; the oracle of the other kernels and the fallback where there is no
compiler. Decodes whole matrices for every pair, so it is hundreds of times slower than "int16".
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from shared.core.record import RecordOrder
from shared.core.record_order import by_output
from shared.core.shape import ExpertShape
from shared.kernels.codecs import bf16_bits, bf16_float, nvfp4_decode
from shared.kernels.expert import (
    Arena,
    Bf16Bits,
    Ids,
    bad_bank_row,
    bad_token,
    check_arrays,
    checked_layout,
)

_ONE: Final = np.float32(1)


class ReferenceKernel:
    """Rows in numpy float32, one pair at a time."""

    kernel_id: Final = 0x0000_0001  # implementation 0, version 1
    name: Final = "reference"

    def __init__(self, shape: ExpertShape, order: RecordOrder = "row-major") -> None:
        """LocalProtocolError when no record can have this shape and order."""
        self._layout = checked_layout(shape, order)
        self.shape: Final = shape
        self.order: Final = order
        self._fields = {field.name: field for field in self._layout.fields}

    def rows(
        self, arena: Arena, bank_rows: Ids, tokens: Ids, activations: Bf16Bits, out: Bf16Bits
    ) -> None:
        """See ExpertKernel.rows."""
        check_arrays(self._layout, arena, bank_rows, tokens, activations, out)
        for pair, (bank_row, token) in enumerate(zip(bank_rows, tokens, strict=True)):
            if not -1 <= bank_row < len(arena):
                raise bad_bank_row(pair, int(bank_row), len(arena))
            if not 0 <= token < len(activations):
                raise bad_token(pair, int(token), len(activations))
        for pair, (bank_row, token) in enumerate(zip(bank_rows, tokens, strict=True)):
            out[pair] = 0 if bank_row < 0 else self._row(arena[bank_row], activations[token])

    def _row(self, record: npt.NDArray[np.uint8], activation: Bf16Bits) -> Bf16Bits:
        z = bf16_float(activation)
        # NaN and infinity are legal results of damaged input: the reader of a row refuses them
        with np.errstate(invalid="ignore", over="ignore"):
            hidden = bf16_float(
                bf16_bits(situ(self._product(record, "w1", z), self._product(record, "w3", z)))
            )
            return bf16_bits(self._product(record, "w2", hidden))

    def _product(
        self, record: npt.NDArray[np.uint8], matrix: str, x: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float32]:
        weight = nvfp4_decode(
            self._tensor(record, f"{matrix}.weight"),
            self._tensor(record, f"{matrix}.weight_scale"),
            _ONE,
        )
        scale_2 = self._tensor(record, f"{matrix}.weight_scale_2").view(np.float32)
        # not `@`: a BLAS may order its sums by thread count; numpy's pairwise sum never changes
        return np.asarray((weight * x).sum(axis=1) * scale_2, dtype=np.float32)

    def _tensor(self, record: npt.NDArray[np.uint8], name: str) -> npt.NDArray[np.uint8]:
        field = self._fields[name]
        if field.shape and self.order != "row-major":
            # a copy, because neighbours of a row-major tensor are not neighbours here
            by_row = np.ascontiguousarray(by_output(record, field, self.order))
            return by_row.view(np.uint8).reshape(field.shape)
        flat = record[field.offset : field.offset + field.length]
        return flat.reshape(field.shape) if field.shape else flat


def situ(g: npt.NDArray[np.float32], u: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """K3's activation 4 tanh(g/4) sigmoid(g) x 25 tanh(u/25), elementwise, float32 or float64."""
    with np.errstate(over="ignore"):  # exp(-g) of a very negative g is infinite, its sigmoid zero
        sigmoid = 1 / (1 + np.exp(-g))
    return np.asarray((4 * np.tanh(g / 4) * sigmoid) * (25 * np.tanh(u / 25)))
