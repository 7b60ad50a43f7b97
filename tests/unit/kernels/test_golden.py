"""Golden rows: against the definition of a row written out, and the comparison of two."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shared.core.record import RecordLayout
from shared.core.record_order import reorder
from shared.core.shape import ExpertShape
from shared.kernels.canary import agrees, canary_activation, canary_row
from shared.kernels.codecs import bf16_bits, bf16_float
from shared.kernels.golden import golden_row, is_golden, largest_difference
from shared.kernels.select import select_kernel
from tests.support.expert_records import arena_of, expert_record, tensor

SHAPE = ExpertShape(latent=48, width=32)
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)


def e4m3(code: int) -> float:
    """The value of a non-negative E4M3 byte."""
    exponent, mantissa = code >> 3, code & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


def times(record: np.ndarray, name: str, x: list[float]) -> list[float]:
    """One matrix times x, nibble by nibble."""
    layout = RecordLayout(SHAPE)
    inputs = len(x)
    packed = tensor(layout, record, f"{name}.weight").reshape(-1, inputs // 2).tolist()
    scale = tensor(layout, record, f"{name}.weight_scale").reshape(-1, inputs // 16).tolist()
    scale_2 = float(tensor(layout, record, f"{name}.weight_scale_2").view("<f4")[0])
    return [
        scale_2
        * math.fsum(
            E2M1[codes[i // 2] >> 4 if i % 2 else codes[i // 2] & 15] * e4m3(scales[i // 16]) * x[i]
            for i in range(inputs)
        )
        for codes, scales in zip(packed, scale, strict=True)
    ]


def by_definition(record: np.ndarray, seed: int) -> np.ndarray:
    """A row in Python floats, without any code of the kernels but bf16 rounding."""
    z = [float(value) for value in bf16_float(canary_activation(seed, SHAPE.latent))]
    hidden = [
        4 * math.tanh(g / 4) / (1 + math.exp(-g)) * 25 * math.tanh(u / 25)
        for g, u in zip(times(record, "w1", z), times(record, "w3", z), strict=True)
    ]
    return bf16_bits(times(record, "w2", [float(v) for v in bf16_float(bf16_bits(hidden))]))


@pytest.mark.parametrize("seed", [0, 3, 2**32 - 1])
def test_a_golden_row_is_the_definition(seed: int) -> None:
    """Bit for bit what Python floats give, with three different scales of the matrices."""
    record = expert_record(SHAPE, 7, scale_2=(0.003, 0.005, 0.011))
    row = golden_row(RecordLayout(SHAPE), record, seed)
    assert row.dtype == np.uint16
    assert np.array_equal(row, by_definition(record, seed))
    assert np.abs(bf16_float(row)).max() > 0.01, "a row of zeros would prove nothing"


def test_the_order_of_a_record_changes_no_bit() -> None:
    """Interleaved and row-major records of one expert, several chunks and groups."""
    shape = ExpertShape(latent=256, width=384)
    record = expert_record(shape, 8)
    stored, wanted = RecordLayout(shape), RecordLayout(shape, "interleaved-4")
    other = np.empty_like(record)
    reorder(record, stored, other, wanted)
    row = golden_row(stored, record, 5)
    assert np.array_equal(golden_row(wanted, other, 5), row)
    assert not np.array_equal(golden_row(stored, other, 5), row), "the orders differ"


@pytest.mark.parametrize("name", ["reference", "int16"])
def test_kernels_agree_with_it(name: str) -> None:
    """Within the tolerance for different kernels; a record with another scale does not."""
    shape = ExpertShape(latent=256, width=384)
    record = expert_record(shape, 9)
    golden = golden_row(RecordLayout(shape), record, 2)
    kernel = select_kernel(shape, name)
    assert agrees(canary_row(kernel, arena_of(shape, [record]), 0, 2), golden, same_kernel=False)
    tensor(RecordLayout(shape), record, "w3.weight_scale_2").view("<f4")[:] *= 1.1
    row = canary_row(kernel, arena_of(shape, [record]), 0, 2)
    assert not agrees(row, golden, same_kernel=False)


def test_two_golden_rows_are_one_up_to_a_last_bit() -> None:
    """A neighbour in bf16 passes, its neighbour, another sign, NaN and infinity do not."""
    row = golden_row(RecordLayout(SHAPE), expert_record(SHAPE, 1), 1)
    near, far, minus, nan, inf = (row.copy() for _ in range(5))
    near[3] += 1
    far[3] += 2
    minus[3] ^= 0x8000
    nan[0], inf[0] = 0x7FC0, 0x7F80
    assert is_golden(row, row)
    assert is_golden(near, row)
    assert is_golden(row, near)
    assert not any(is_golden(bad, row) for bad in (far, minus, nan, inf))
    assert not is_golden(nan, nan)
    step = float(abs(bf16_float(near)[3] - bf16_float(row)[3]))
    assert largest_difference(near, row) == step
    assert math.isnan(largest_difference(nan, row))
