"""Rows by torch, as a user writes them: take the weights apart to bf16, then multiply.

Owns nothing but that recipe. Must not know clocks.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from shared.core.record import RecordField, RecordLayout
from shared.core.shape import ExpertShape
from shared.kernels.expert import Arena, Bf16Bits, Ids

_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class TorchRows:
    """Dequantise and matmul on `threads` threads, of row-major records in an arena."""

    def __init__(self, shape: ExpertShape, threads: int) -> None:
        """Sets torch's threads for the whole process."""
        torch.set_num_threads(threads)
        layout = RecordLayout(shape)
        self._fields: Final = {field.name: field for field in layout.fields}
        self._values: Final = torch.tensor(
            [*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.bfloat16
        )

    @torch.inference_mode()
    def rows(self, arena: Arena, bank_rows: Ids, activations: Bf16Bits) -> Tensor:
        """Rows bf16 [experts, tokens, latent] of every token for every expert of `bank_rows`."""
        x = torch.from_numpy(activations.view(np.int16)).view(torch.bfloat16)
        return torch.stack([self._expert(torch.from_numpy(arena[row]), x) for row in bank_rows])

    def _expert(self, record: Tensor, x: Tensor) -> Tensor:
        g = functional.linear(x, self._weight(record, "w1")).float()
        u = functional.linear(x, self._weight(record, "w3")).float()
        h = 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)
        return functional.linear(h.bfloat16(), self._weight(record, "w2"))

    def _weight(self, record: Tensor, matrix: str) -> Tensor:
        packed = _tensor(record, self._fields[f"{matrix}.weight"])
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).int()
        scale = _tensor(record, self._fields[f"{matrix}.weight_scale"]).view(torch.float8_e4m3fn)
        scale_2 = _tensor(record, self._fields[f"{matrix}.weight_scale_2"]).view(torch.float32)
        per_weight = (scale.float() * scale_2).bfloat16().repeat_interleave(16, dim=1)
        return self._values[codes] * per_weight


def _tensor(record: Tensor, field: RecordField) -> Tensor:
    flat = record[field.offset : field.offset + field.length]
    return flat.reshape(field.shape) if field.shape else flat
