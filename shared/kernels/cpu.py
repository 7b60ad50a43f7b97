"""The native CPU kernel: `shared/native/experts.c` behind the ExpertKernel protocol.

Owns the crossing into C; importing it raises ImportError where the native module was not built. The
call releases the GIL and runs on the calling thread alone. Must not know who chose the pairs.
"""

from __future__ import annotations

from typing import Final

from shared._native import ffi, lib
from shared.core.record import RecordOrder
from shared.core.shape import ExpertShape
from shared.kernels.expert import (
    Arena,
    Bf16Bits,
    Ids,
    bad_bank_row,
    bad_token,
    check_arrays,
    checked_layout,
)

_NO_MEMORY: Final = -(2**63)  # INT64_MIN


class CpuKernel:
    """Rows by portable vector code; the same bits on every machine, so one kernel id for all."""

    kernel_id: Final = 0x0001_0001  # implementation 1, version 1
    name: Final = "cpu"

    def __init__(self, shape: ExpertShape, order: RecordOrder = "row-major") -> None:
        """LocalProtocolError when no record can have this shape and order."""
        self._layout = checked_layout(shape, order)
        self.shape: Final = shape
        self.order: Final = order
        offset = {field.name: field.offset for field in self._layout.fields}
        matrices = ("w1", "w3", "w2")
        self._native_layout = ffi.new(
            "k3_expert_layout *",
            {
                "latent": shape.latent,
                "width": shape.width,
                "interleaved": order == "interleaved-4",
                "stride_bytes": self._layout.stride_bytes,
                "weight": [offset[f"{matrix}.weight"] for matrix in matrices],
                "scale": [offset[f"{matrix}.weight_scale"] for matrix in matrices],
                "scale_2": [offset[f"{matrix}.weight_scale_2"] for matrix in matrices],
            },
        )

    def rows(
        self, arena: Arena, bank_rows: Ids, tokens: Ids, activations: Bf16Bits, out: Bf16Bits
    ) -> None:
        """See ExpertKernel.rows; also MemoryError when the scratch memory cannot be had."""
        check_arrays(self._layout, arena, bank_rows, tokens, activations, out)
        n_rows, n_tokens = len(arena), len(activations)
        view = ffi.from_buffer
        wrong = lib.k3_expert_rows(
            self._native_layout,
            view("uint8_t[]", arena),
            n_rows,
            view("int32_t[]", bank_rows),
            view("int32_t[]", tokens),
            len(bank_rows),
            view("uint16_t[]", activations),
            n_tokens,
            view("uint16_t[]", out),
        )
        if wrong == 0:
            return
        if wrong == _NO_MEMORY:
            raise MemoryError(f"expert rows: no scratch memory for {len(bank_rows)} pairs")
        pair = abs(wrong) - 1
        if wrong > 0:
            raise bad_bank_row(pair, int(bank_rows[pair]), n_rows)
        raise bad_token(pair, int(tokens[pair]), n_tokens)
