"""Every kernel against an independent float64 dense expert, and each other; the guard of a call."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest

from shared.core.errors import ConfigError, LocalProtocolError
from shared.core.record import RecordLayout
from shared.core.shape import ExpertShape
from shared.kernels.codecs import bf16_bits, bf16_float, nvfp4_decode
from shared.kernels.expert import ExpertKernel
from shared.kernels.reference import situ
from shared.kernels.select import select_kernel
from tests.support.expert_records import activations, arena_of, dense_row, expert_record, tensor

NAMES = ("int16", "reference")  # test_native_kernels.py: every form of int16 and bf16
POISON = 0x7FC1  # a NaN: a row that is not written does not go unnoticed
SHAPES = [(128, 128), (16, 16), (48, 208), (272, 144), (512, 256)]


def compute(
    kernel: ExpertKernel, arena: np.ndarray, bank_rows: list[int], tokens: list[int], z: np.ndarray
) -> np.ndarray:
    out = np.full((len(bank_rows), z.shape[1]), POISON, np.uint16)
    kernel.rows(arena, np.array(bank_rows, np.int32), np.array(tokens, np.int32), z, out)
    return out


def assert_close(row_bits: np.ndarray, expected: np.ndarray) -> None:
    row = bf16_float(row_bits).astype(np.float64)
    largest = np.abs(expected).max()
    assert largest > 0.01, "an expected row of zeros proves nothing"
    assert np.abs(row - expected).max() <= 2**-7 * largest
    cosine = row @ expected / (np.linalg.norm(row) * np.linalg.norm(expected))
    assert cosine >= 0.99999


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", SHAPES)
def test_rows_equal_a_dense_expert(name: str, sizes: tuple[int, int]) -> None:
    """Also for sizes that are no multiple of the 128 columns a kernel may decode at a time."""
    shape = ExpertShape(*sizes)
    records = [expert_record(shape, seed) for seed in range(2)]
    z = activations(3, shape.latent, seed=9)
    rows = compute(select_kernel(shape, name), arena_of(shape, records), [0, 1, 1], [0, 1, 2], z)
    for row, record, token in zip(rows, (0, 1, 1), (0, 1, 2), strict=True):
        assert_close(row, dense_row(shape, records[record], z[token], round_hidden=True))


@pytest.mark.parametrize("name", NAMES)
def test_masked_pairs_are_zero_rows(name: str) -> None:
    """N1: bank row -1 at positions 0, 7 and 15 of 16 gives exact zeros, the rest is right."""
    shape = ExpertShape(128, 128)
    records = [expert_record(shape, seed) for seed in range(4)]
    bank_rows = [-1 if pair in (0, 7, 15) else pair % 4 for pair in range(16)]
    z = activations(1, 128, seed=1)
    rows = compute(select_kernel(shape, name), arena_of(shape, records), bank_rows, [0] * 16, z)
    for pair, bank_row in enumerate(bank_rows):
        if bank_row < 0:
            assert not rows[pair].any()
        else:
            assert_close(rows[pair], dense_row(shape, records[bank_row], z[0], round_hidden=True))


@pytest.mark.parametrize("name", NAMES)
def test_gate_and_up_keep_their_own_scale(name: str) -> None:
    """N5: w1 and w3 whose scale_2 differ by 2 are each scaled by their own."""
    shape = ExpertShape(128, 128)
    for scale_2 in ((0.004, 0.008, 0.004), (0.008, 0.004, 0.004)):
        record = expert_record(shape, 5, scale_2=scale_2)
        z = activations(1, 128, seed=2)
        rows = compute(select_kernel(shape, name), arena_of(shape, [record]), [0], [0], z)
        assert_close(rows[0], dense_row(shape, record, z[0], round_hidden=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("index", [0, 1, 2])
def test_second_scale_is_applied_once(name: str, index: int) -> None:
    """N7: scale_2 of 0.5 and 2.0 times the usual; left out, applied twice or lost would be seen."""
    shape = ExpertShape(128, 128)
    z = activations(1, 128, seed=3)
    for factor in (0.5, 2.0):
        scale_2 = [0.004] * 3
        scale_2[index] *= factor
        record = expert_record(shape, 6, scale_2=tuple(scale_2))
        rows = compute(select_kernel(shape, name), arena_of(shape, [record]), [0], [0], z)
        assert_close(rows[0], dense_row(shape, record, z[0], round_hidden=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_row_depends_on_its_pair_alone(name: str) -> None:
    """One call, single calls, another order, more tokens and two threads give the same bits."""
    shape = ExpertShape(64, 48)
    kernel = select_kernel(shape, name)
    arena = arena_of(shape, [expert_record(shape, seed) for seed in range(3)])
    z = activations(70, 64, seed=4)
    rng = np.random.default_rng(11)
    bank_rows, tokens = rng.integers(-1, 3, 150), rng.integers(0, 70, 150)
    together = compute(kernel, arena, list(bank_rows), list(tokens), z)
    order = rng.permutation(150)
    assert np.array_equal(
        together[order], compute(kernel, arena, list(bank_rows[order]), list(tokens[order]), z)
    )
    for pair in range(0, 150, 10):
        alone = compute(kernel, arena, [bank_rows[pair]], [0], z[tokens[pair]][None].copy())
        assert np.array_equal(together[pair], alone[0])
    found: list[np.ndarray] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(compute(kernel, arena, list(bank_rows), list(tokens), z))
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 2
    assert all(np.array_equal(together, rows) for rows in found)


def test_every_code_and_scale_decodes() -> None:
    """All 16 E2M1 codes under all 256 E4M3 bytes, through a whole expert of the reference.

    Row o of w2 holds code c under scale s and sees h in one column only, so the row spells the
    decode table.
    """
    shape = ExpertShape(latent=4096, width=16)
    layout = RecordLayout(shape)
    record = expert_record(shape, 8)
    scale_bytes = np.repeat(np.arange(256, dtype=np.uint8), 16)
    codes = np.tile(np.arange(16, dtype=np.uint8), 256)
    w2 = np.zeros((4096, 8), np.uint8)
    w2[:, 3] = codes << 4  # column 7
    tensor(layout, record, "w2.weight")[:] = w2.ravel()
    tensor(layout, record, "w2.weight_scale")[:] = scale_bytes
    tensor(layout, record, "w2.weight_scale_2").view("<f4")[:] = 1.0
    z = activations(1, 4096, seed=5)
    x = bf16_float(z[0]).astype(np.float64)
    hidden = []
    for matrix in ("w1", "w3"):
        packed = tensor(layout, record, f"{matrix}.weight").reshape(16, 2048)
        scale = tensor(layout, record, f"{matrix}.weight_scale").reshape(16, 256)
        hidden.append(nvfp4_decode(packed, scale, np.float32(0.004)).astype(np.float64) @ x)
    h = bf16_float(bf16_bits(situ(hidden[0], hidden[1])))[7]
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    sign = np.where(scale_bytes & 0x80, -1.0, 1.0)
    exponent, mantissa = (scale_bytes >> 3 & 15).astype(int), (scale_bytes & 7) / 8
    value = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7))
    expected = bf16_float(bf16_bits(e2m1[codes] * sign * value * h))
    kernel = select_kernel(shape, "reference")
    got = bf16_float(compute(kernel, arena_of(shape, [record]), [0], [0], z)[0])
    is_nan = (scale_bytes & 0x7F) == 0x7F
    assert np.isnan(got[is_nan]).all()
    assert np.array_equal(got[~is_nan], expected[~is_nan])


@pytest.mark.parametrize("name", NAMES)
def test_nan_survives(name: str) -> None:
    """A NaN in an activation or a scale makes NaN rows, never plausible ones, and only its own."""
    shape = ExpertShape(64, 64)
    layout = RecordLayout(shape)
    good, bad = expert_record(shape, 1), expert_record(shape, 2)
    tensor(layout, bad, "w1.weight_scale_2").view("<f4")[:] = np.nan
    z = activations(2, 64, seed=6)
    z[1, 5] = 0x7FC0
    rows = bf16_float(
        compute(
            select_kernel(shape, name), arena_of(shape, [good, bad]), [0, 0, 1, 0], [0, 1, 0, 0], z
        )
    )
    assert np.isfinite(rows[[0, 3]]).all()
    assert np.isnan(rows[[1, 2]]).all()


@pytest.mark.parametrize("name", NAMES)
def test_read_only_arena_is_enough(name: str) -> None:
    """The kernel works in place on a mapping it may not write."""
    shape = ExpertShape(32, 32)
    arena = arena_of(shape, [expert_record(shape, 1)])
    arena.flags.writeable = False
    rows = compute(select_kernel(shape, name), arena, [0], [0], activations(1, 32, seed=1))
    assert (rows != POISON).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"bank_rows": np.array([2, 0], np.int32)},
            r"bank_rows\[0\] is 2, outside -1 \(none\) to 1",
        ),
        ({"bank_rows": np.array([0, -2], np.int32)}, r"bank_rows\[1\] is -2"),
        ({"tokens": np.array([0, 3], np.int32)}, r"tokens\[1\] is 3, outside 0 to 2"),
        ({"tokens": np.array([-1, 0], np.int32)}, r"tokens\[0\] is -1"),
        ({"tokens": np.array([0], np.int32)}, r"tokens has shape \(1,\), not \(2,\)"),
        ({"bank_rows": np.array([0, 1], np.int64)}, "bank_rows is int64, not int32"),
        ({"activations": np.zeros((3, 48), np.uint16)}, r"activations has shape \(3, 48\)"),
        ({"activations": np.zeros((3, 32), np.float32)}, "activations is float32, not uint16"),
        ({"activations": np.zeros((32, 3), np.uint16).T}, "activations is not C-contiguous"),
        ({"out": np.zeros((1, 32), np.uint16)}, r"out has shape \(1, 32\), not \(2, 32\)"),
        ({"arena": np.zeros((2, 4096), np.uint8)}, r"arena has shape \(2, 4096\)"),
        ({"arena": np.zeros(8192, np.uint8)}, "arena has shape"),
    ],
)
def test_misuse_is_named_and_changes_nothing(name: str, change: dict, named: str) -> None:
    """Each wrong array or index is one LocalProtocolError with the value; `out` stays as it was."""
    shape = ExpertShape(32, 160)
    arguments = {
        "arena": arena_of(shape, [expert_record(shape, n) for n in range(2)]),
        "bank_rows": np.array([0, 1], np.int32),
        "tokens": np.array([0, 2], np.int32),
        "activations": activations(3, 32, seed=1),
        "out": np.full((2, 32), POISON, np.uint16),
    } | change
    before = arguments["out"].copy()
    with pytest.raises(LocalProtocolError, match=named):
        select_kernel(shape, name).rows(**arguments)
    assert np.array_equal(arguments["out"], before)


@pytest.mark.parametrize("name", NAMES)
def test_no_pairs_is_a_call_that_does_nothing(name: str) -> None:
    """An empty dispatch is legal, also with no activation at all."""
    shape = ExpertShape(32, 32)
    none = np.zeros(0, np.int32)
    arena = arena_of(shape, [expert_record(shape, 1)])
    z, out = np.zeros((0, 32), np.uint16), np.zeros((0, 32), np.uint16)
    select_kernel(shape, name).rows(arena, none, none, z, out)


@pytest.mark.parametrize("name", NAMES)
def test_read_only_out_is_refused(name: str) -> None:
    """Rows that could not be stored are refused before they are computed."""
    shape = ExpertShape(32, 32)
    out = np.zeros((1, 32), np.uint16)
    out.flags.writeable = False
    zero = np.zeros(1, np.int32)
    with pytest.raises(LocalProtocolError, match="out is read-only"):
        select_kernel(shape, name).rows(
            arena_of(shape, [expert_record(shape, 1)]), zero, zero, activations(1, 32, seed=1), out
        )


def test_selection_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto" is "int16" where the native module exists, else the reference; names insist."""
    shape = ExpertShape(32, 32)
    assert select_kernel(shape).name == "int16"
    assert select_kernel(shape, "reference").kernel_id != select_kernel(shape).kernel_id
    with pytest.raises(ConfigError, match=r"kernel 'cuda' is not known: use auto, .* or reference"):
        select_kernel(shape, "cuda")
    monkeypatch.delitem(sys.modules, "shared.kernels.native", raising=False)
    monkeypatch.setitem(sys.modules, "shared._native", None)
    assert select_kernel(shape).name == "reference"
    for name in ("int16", "bf16"):
        with pytest.raises(ConfigError, match=f"kernel {name} needs the native module"):
            select_kernel(shape, name)
