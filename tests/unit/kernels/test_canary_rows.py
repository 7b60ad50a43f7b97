"""The canary: the same question everywhere, and an answer that a broken kernel cannot give."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from shared.core.record import RecordLayout
from shared.core.shape import ExpertShape
from shared.kernels.canary import agrees, canary_activation, canary_row
from shared.kernels.codecs import bf16_bits, bf16_float
from shared.kernels.select import select_kernel
from tests.support.expert_records import arena_of, expert_record, tensor

SHAPE = ExpertShape(128, 128)
PINNED = "c95d6193e93428cee11550d7d4e549eb5ffb27a50d8b8d7d1f66aeb3ef979820"


def test_activation_is_a_function_of_the_seed() -> None:
    """Pinned bits: a node of another numpy or another machine must ask the same question."""
    first = canary_activation(7, 3584)
    assert first.dtype == np.uint16
    assert hashlib.sha256(first.astype("<u2").tobytes()).hexdigest() == PINNED
    assert np.array_equal(first[:128], canary_activation(7, 128))
    assert not np.array_equal(first, canary_activation(8, 3584))
    values = bf16_float(first)
    assert values.min() >= -2
    assert values.max() < 2
    assert abs(values.mean()) < 0.1
    assert values.std() > 1


def test_kernels_agree_on_the_canary() -> None:
    """N9: native and reference rows agree by cosine; the same kernel agrees bit for bit."""
    arena = arena_of(SHAPE, [expert_record(SHAPE, seed) for seed in range(2)])
    native, reference = select_kernel(SHAPE, "int16"), select_kernel(SHAPE, "reference")
    row = canary_row(native, arena, 1, seed=3)
    assert np.array_equal(row, canary_row(native, arena, 1, seed=3))
    assert agrees(row, canary_row(reference, arena, 1, seed=3), same_kernel=False)
    assert not agrees(row, canary_row(native, arena, 0, seed=3), same_kernel=False)
    assert not agrees(row, canary_row(native, arena, 1, seed=4), same_kernel=False)


@pytest.mark.parametrize("factor", [0.0, 0.25, 0.5, 2.0])
@pytest.mark.parametrize("matrix", ["w1", "w3", "w2"])
def test_wrong_second_scale_is_caught(matrix: str, factor: float) -> None:
    """N7: a scale_2 lost, halved or applied twice fails the canary although its cosine may be 1."""
    layout = RecordLayout(SHAPE)
    right = expert_record(SHAPE, 1)
    wrong = right.copy()
    tensor(layout, wrong, f"{matrix}.weight_scale_2").view("<f4")[:] *= factor
    kernel = select_kernel(SHAPE)
    arena = arena_of(SHAPE, [right, wrong])
    rows = [canary_row(kernel, arena, row, seed=5) for row in range(2)]
    assert not agrees(rows[0], rows[1], same_kernel=False)
    assert not agrees(rows[0], rows[1], same_kernel=True)


def test_one_wrong_value_of_many_is_caught() -> None:
    """A kernel that leaves out one output of K3's 3,584: cosine and norm would not notice."""
    values = np.random.default_rng(1).standard_normal(3584).astype(np.float32)
    values[3583] = 0.5
    row = bf16_bits(values)
    left_out = row.copy()
    left_out[3583] = 0
    assert not agrees(row, left_out, same_kernel=False)
    assert not agrees(left_out, row, same_kernel=False)
    near = bf16_bits(values * np.float32(1.004))
    assert agrees(row, near, same_kernel=False)


def test_nothing_agrees_with_nan() -> None:
    """A row that is not finite never passes, not even against itself."""
    row = bf16_bits(np.array([1.0, np.nan], np.float32))
    assert not agrees(row, row, same_kernel=True)
    assert not agrees(row, row, same_kernel=False)
    infinite = bf16_bits(np.array([1.0, np.inf], np.float32))
    assert not agrees(infinite, infinite, same_kernel=True)


def test_zero_rows_and_sizes() -> None:
    """Zeros agree with zeros only; rows of different length never agree; one bit matters."""
    zero, one = np.zeros(4, np.uint16), bf16_bits(np.ones(4, np.float32))
    assert agrees(zero, zero, same_kernel=False)
    assert not agrees(zero, one, same_kernel=False)
    assert not agrees(one, one[:3], same_kernel=False)
    nearly = one.copy()
    nearly[2] += 1
    assert agrees(one, nearly, same_kernel=False)
    assert not agrees(one, nearly, same_kernel=True)
