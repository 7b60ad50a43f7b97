"""Where the 12 tensors of one expert lie inside a bank record, and in which order their bytes.

A record is self-contained: fixed offsets, so address = base + row x stride. Large tensors come
first, 16-byte aligned at every legal shape; the six scalars close the record.

The order permutes bytes inside each weight and each weight_scale, so sizes and offsets are the same
in both. With outputs o, and inputs in chunks of 128 (64 bytes of weights, 8 bytes of scales):

    row-major       [o][chunk][64 or 8 bytes]             as the NVFP4 release stores a tensor
    interleaved-4   [o / 4][chunk][o % 4][64 or 8 bytes]  four outputs are read as one stream
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, TypeAlias

from shared.core.shape import ExpertShape

PAGE_BYTES: Final = 4096
BLOCK: Final = 16  # inputs that share one E4M3 scale in NVFP4
CHUNK: Final = 128  # inputs that stay together when outputs are interleaved
INTERLEAVED_OUTPUTS: Final = 4

RecordOrder: TypeAlias = Literal["row-major", "interleaved-4"]


@dataclass(frozen=True, slots=True)
class RecordField:
    """One tensor of an expert; `dtype` is the safetensors name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


def can_interleave(shape: ExpertShape) -> bool:
    """Whether experts of this shape can be stored interleaved-4.

    Each size is the inputs of one matrix and the outputs of another: a multiple of 128 serves both.
    """
    return shape.latent % CHUNK == 0 and shape.width % CHUNK == 0


@dataclass(frozen=True)
class RecordLayout:
    """Record of one expert: the 12 tensors of the NVFP4 release, their bytes in `order`.

    Raises ValueError when experts of this shape cannot have that order.
    """

    shape: ExpertShape
    order: RecordOrder = "row-major"

    def __post_init__(self) -> None:
        """Only whole chunks of whole groups of outputs can be interleaved."""
        if self.order != "row-major" and not can_interleave(self.shape):
            raise ValueError(
                f"experts of latent {self.shape.latent} and width {self.shape.width} cannot be "
                f"stored {self.order}, which needs multiples of {CHUNK}: use row-major"
            )

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
