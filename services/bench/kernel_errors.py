"""How far the rows of kernels are from float64, on a few experts of real size.

Owns the experts that are compared. Must not know clocks or targets.

What is compared is a row before its own rounding to bf16: that rounding alone is 1.7e-3.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from services.bench.kernel_contenders import Backend, kernel_of
from services.bench.kernel_records import (
    F64,
    Error,
    error_of,
    expected_rows,
    synthetic_activations,
    synthetic_record,
)
from services.bench.peers.ggml_rows import GgmlRows, converted
from shared.core.record import RecordLayout
from shared.core.shape import ExpertShape
from shared.kernels.codecs import bf16_float
from shared.kernels.expert import Bf16Bits

_EXPERTS: Final = 2
_TOKENS: Final = 3
_SEED: Final = 1000


def kernel_errors(backends: Sequence[Backend], shape: ExpertShape) -> dict[str, Error]:
    """By back end, those that can run here; row-major, which is bitwise the other order too."""
    layout = RecordLayout(shape)
    records = [synthetic_record(shape, _SEED + expert) for expert in range(_EXPERTS)]
    arena = np.zeros((_EXPERTS, layout.stride_bytes), np.uint8)
    arena[:, : layout.record_bytes] = records
    z = synthetic_activations(_TOKENS, shape.latent, _SEED)
    expected = np.stack([expected_rows(record, shape, _float64(z)) for record in records])
    rows = np.repeat(np.arange(_EXPERTS, dtype=np.int32), _TOKENS)
    tokens = np.tile(np.arange(_TOKENS, dtype=np.int32), _EXPERTS)
    errors: dict[str, Error] = {}
    for backend in backends:
        if backend.reason is None:
            kernel = kernel_of(backend, shape, "row-major", 1)
            found = kernel.rows_f32(arena, rows, tokens, z)
            errors[backend.name] = error_of(found, expected)
    return errors


def peer_errors(library: Path, shape: ExpertShape) -> Error:
    """ggml's, against float64 with its own activation."""
    records = [synthetic_record(shape, _SEED + expert) for expert in range(_EXPERTS)]
    z = synthetic_activations(_TOKENS, shape.latent, _SEED)
    expected = np.stack([expected_rows(record, shape, _float64(z), "silu") for record in records])
    peer = GgmlRows(library, shape, 1)
    try:
        arena = np.stack([converted(record, shape) for record in records])
        which = np.arange(_EXPERTS, dtype=np.int32)
        return error_of(peer.rows(arena, which, np.ascontiguousarray(bf16_float(z))), expected)
    finally:
        peer.close()


def _float64(bits: Bf16Bits) -> F64:
    return bf16_float(bits).astype(np.float64)
