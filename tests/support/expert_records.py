"""Random expert records with sane scales, and single tensors of them to tamper with."""

from __future__ import annotations

import numpy as np

from shared.core.record import RecordLayout
from shared.core.shape import ExpertShape
from shared.kernels.codecs import bf16_bits, bf16_float, nvfp4_decode, nvfp4_encode


def expert_record(
    shape: ExpertShape,
    seed: int,
    *,
    scale_2: tuple[float, float, float] = (0.004, 0.004, 0.004),
) -> np.ndarray:
    """One record uint8 [record_bytes]; `scale_2` of w1, w3, w2. Pre-activations are about 1."""
    rng = np.random.default_rng(seed)
    layout = RecordLayout(shape)
    record = np.zeros(layout.record_bytes, np.uint8)
    sizes = {"w1": (shape.width, shape.latent), "w3": (shape.width, shape.latent)}
    sizes["w2"] = (shape.latent, shape.width)
    for (matrix, (outputs, inputs)), factor in zip(sizes.items(), scale_2, strict=True):
        weight = (rng.standard_normal((outputs, inputs)) / np.sqrt(inputs)).astype(np.float32)
        # encoded for 0.004 whatever is stored, so that the stored scale_2 scales the matrix
        packed, scale = nvfp4_encode(weight, np.float32(0.004))
        tensor(layout, record, f"{matrix}.weight")[:] = packed.ravel()
        tensor(layout, record, f"{matrix}.weight_scale")[:] = scale.ravel()
        tensor(layout, record, f"{matrix}.weight_scale_2").view("<f4")[:] = factor
        tensor(layout, record, f"{matrix}.input_scale").view("<f4")[:] = 1.0
    return record


def tensor(layout: RecordLayout, record: np.ndarray, name: str) -> np.ndarray:
    """The flat bytes of one tensor of a record; writing to them changes the record."""
    field = next(field for field in layout.fields if field.name == name)
    return record[field.offset : field.offset + field.length]


def arena_of(shape: ExpertShape, records: list[np.ndarray]) -> np.ndarray:
    """Records side by side as an arena uint8 [rows, stride], 0xFF (NaN everywhere) between them."""
    layout = RecordLayout(shape)
    arena = np.full((len(records), layout.stride_bytes), 0xFF, np.uint8)
    for row, record in enumerate(records):
        arena[row, : layout.record_bytes] = record
    return arena


def activations(tokens: int, latent: int, seed: int) -> np.ndarray:
    """Standard normal activations, bf16 bits uint16 [tokens, latent]."""
    rng = np.random.default_rng(seed)
    return bf16_bits(rng.standard_normal((tokens, latent)).astype(np.float32))


def dense_row(
    shape: ExpertShape, record: np.ndarray, z: np.ndarray, *, round_hidden: bool
) -> np.ndarray:
    """The expert in float64 with plain matrices; `round_hidden` rounds h to bf16 as defined."""
    layout = RecordLayout(shape)

    def weight(name: str, outputs: int, inputs: int) -> np.ndarray:
        packed = tensor(layout, record, f"{name}.weight").reshape(outputs, inputs // 2)
        scale = tensor(layout, record, f"{name}.weight_scale").reshape(outputs, inputs // 16)
        scale_2 = float(tensor(layout, record, f"{name}.weight_scale_2").view("<f4")[0])
        return nvfp4_decode(packed, scale, np.float32(1)).astype(np.float64) * scale_2

    x = bf16_float(z).astype(np.float64)
    g = weight("w1", shape.width, shape.latent) @ x
    u = weight("w3", shape.width, shape.latent) @ x
    with np.errstate(over="ignore"):
        h = 4 * np.tanh(g / 4) / (1 + np.exp(-g)) * 25 * np.tanh(u / 25)
    if round_hidden:
        h = bf16_float(bf16_bits(h)).astype(np.float64)
    return weight("w2", shape.latent, shape.width) @ h
