"""What a builder needs of a checkpoint, and the check of every record it gets from one.

Owns the refusal of scales that kernels rely on. Must not know checkpoint formats or bank files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from shared.core.errors import CheckpointError
from shared.core.record import RecordLayout

_E4M3_NAN: Final = 0x7F  # codes from here on are NaN or have the sign bit set


class ExpertSource(Protocol):
    """A model whose experts can be read one by one, by any thread."""

    @property
    def digest(self) -> str:
        """Digest of the model."""

    @property
    def layout(self) -> RecordLayout:
        """Where the tensors of a record lie."""

    def read_expert_record(self, layer: int, expert: int, buffer: memoryview) -> None:
        """Fill `buffer` with the 12 tensors of one expert, found by their names."""

    def stored_hash(self, layer: int, expert: int) -> bytes | None:
        """BLAKE3 of the expert's tensors as stored; None when they are the record itself."""

    def position(self, layer: int, expert: int) -> tuple[str, int]:
        """Sort key of its place on disk: in this order a disk is read forwards."""

    def release(self, experts: Sequence[tuple[int, int]]) -> None:
        """These (layer, expert) are not needed again soon: the page cache may forget them."""


def read_record(source: ExpertSource, layer: int, expert: int, buffer: memoryview) -> None:
    """Fill `buffer` (record_bytes) with a checked record; CheckpointError names what is wrong."""
    read_source(source, layer, expert, buffer)
    _check_scales(source.layout, buffer, f"layer {layer} expert {expert}")


def read_source(source: ExpertSource, layer: int, expert: int, buffer: memoryview) -> None:
    """The same without the check of its scales."""
    try:
        source.read_expert_record(layer, expert, buffer)
    except OSError as error:  # not to be blamed on the bank's disk
        raise CheckpointError(
            f"layer {layer} expert {expert}: cannot read the checkpoint: {error.strerror}: "
            "check its disk"
        ) from error


def _check_scales(layout: RecordLayout, record: memoryview, where: str) -> None:
    """Kernels rely on finite, non-negative scales; a bad one is named here, once, by tensor."""
    data = np.frombuffer(record, np.uint8)
    for field in layout.fields:
        tensor = data[field.offset : field.offset + field.length]
        if field.dtype == "F8_E4M3" and int(tensor.max()) >= _E4M3_NAN:
            bad = np.flatnonzero(tensor >= _E4M3_NAN)
            block = np.unravel_index(int(bad[0]), field.shape)
            raise CheckpointError(
                f"{where}: {field.name}[{block[0]}, {block[1]}] is E4M3 byte "
                f"0x{int(tensor[bad[0]]):02x}, negative or NaN ({len(bad)} such scales): "
                "the checkpoint is damaged, fetch this shard again"
            )
        if field.dtype == "F32":
            _check_scalar(f"{where}: {field.name}", tensor)


def _check_scalar(where: str, tensor: npt.NDArray[np.uint8]) -> None:
    value = float(np.frombuffer(tensor.tobytes(), "<f4")[0])
    if not (np.isfinite(value) and value >= 0):
        raise CheckpointError(
            f"{where} is {value}, not a finite scale >= 0: "
            "the checkpoint is damaged, fetch this shard again"
        )
