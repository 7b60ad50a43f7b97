"""Where the 12 tensors of one expert lie inside a bank record.

A record is self-contained: fixed offsets, so address = base + row x stride. Large tensors come
first, 16-byte aligned at every legal shape; the six scalars close the record.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from shared.core.shape import ExpertShape

PAGE_BYTES: Final = 4096
BLOCK: Final = 16  # inputs that share one E4M3 scale in NVFP4


@dataclass(frozen=True, slots=True)
class RecordField:
    """One tensor of an expert; `dtype` is the safetensors name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


@dataclass(frozen=True)
class RecordLayout:
    """Row-major record of one expert, byte for byte as the NVFP4 release stores its tensors."""

    shape: ExpertShape

    @cached_property
    def fields(self) -> tuple[RecordField, ...]:
        """The 12 tensors in storage order."""
        latent, width = self.shape.latent, self.shape.width
        fields: list[RecordField] = []
        offset = 0

        def add(name: str, dtype: str, shape: tuple[int, ...], length: int) -> None:
            nonlocal offset
            fields.append(RecordField(name, dtype, shape, offset, length))
            offset += length

        for matrix, outputs, inputs in (
            ("w1", width, latent),
            ("w3", width, latent),
            ("w2", latent, width),
        ):
            packed, blocks = inputs // 2, inputs // BLOCK
            add(f"{matrix}.weight", "U8", (outputs, packed), outputs * packed)
            add(f"{matrix}.weight_scale", "F8_E4M3", (outputs, blocks), outputs * blocks)
        for scalar in ("weight_scale_2", "input_scale"):
            for matrix in ("w1", "w3", "w2"):
                add(f"{matrix}.{scalar}", "F32", (), 4)
        return tuple(fields)

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of the 12 tensors; 18,579,480 at K3 size."""
        last = self.fields[-1]
        return last.offset + last.length

    @cached_property
    def stride_bytes(self) -> int:
        """Distance between records: the next multiple of a page."""
        return -(-self.record_bytes // PAGE_BYTES) * PAGE_BYTES
