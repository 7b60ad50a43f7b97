"""Kernels "int16" and "bf16": error, equal bits on every path, bad scales, extremes, threads."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.core.errors import ConfigError, LocalProtocolError
from shared.core.record import CHUNK, RecordLayout, RecordOrder
from shared.core.record_order import reorder
from shared.core.shape import K3, ExpertShape
from shared.kernels.codecs import bf16_bits, bf16_float
from shared.kernels.native import Backend, NativeKernel, backends
from shared.kernels.reference import situ
from tests.support.expert_records import activations, arena_of, dense_row, expert_record, tensor

USABLE = [backend for backend in backends() if backend.usable]
INT16 = [backend for backend in USABLE if backend.kernel == "int16"]
INTERLEAVED: RecordOrder = "interleaved-4"
POISON = 0x7FC1  # a NaN: a row that is not written does not go unnoticed
SHAPES = [(128, 128), (16, 16), (48, 208), (272, 144), (512, 256)]

every_backend = pytest.mark.parametrize(
    "backend", USABLE, ids=lambda backend: f"{backend.kernel}-{backend.isa}"
)


def make(
    shape: ExpertShape, backend: Backend, order: RecordOrder = "row-major", threads: int = 1
) -> NativeKernel:
    return NativeKernel(shape, order, name=backend.kernel, isa=backend.isa, threads=threads)


def compute(
    kernel: NativeKernel, arena: np.ndarray, bank_rows: list[int], tokens: list[int], z: np.ndarray
) -> np.ndarray:
    out = np.full((len(bank_rows), z.shape[1]), POISON, np.uint16)
    kernel.rows(arena, np.array(bank_rows, np.int32), np.array(tokens, np.int32), z, out)
    return out


def compute_f32(
    kernel: NativeKernel, arena: np.ndarray, bank_rows: list[int], tokens: list[int], z: np.ndarray
) -> np.ndarray:
    return kernel.rows_f32(arena, np.array(bank_rows, np.int32), np.array(tokens, np.int32), z)


def interleaved(shape: ExpertShape, records: list[np.ndarray]) -> np.ndarray:
    moved = [np.empty_like(record) for record in records]
    for record, out in zip(records, moved, strict=True):
        reorder(record, RecordLayout(shape), out, RecordLayout(shape, INTERLEAVED))
    return arena_of(shape, moved)


def random_record(shape: ExpertShape, seed: int, low: int = 0x20, high: int = 0x40) -> np.ndarray:
    """Any nibbles under scales of the codes low to high - 1; fast to make."""
    rng = np.random.default_rng(seed)
    layout = RecordLayout(shape)
    record = rng.integers(0, 256, layout.record_bytes, np.uint8)
    for field in layout.fields:
        data = record[field.offset : field.offset + field.length]
        if field.dtype == "F8_E4M3":
            data[:] = rng.integers(low, high, field.length, np.uint8)
        if field.dtype == "F32":
            data.view("<f4")[:] = 0.003
    return record


def assert_within_bound(
    kernel: str, rows_f32: np.ndarray, expected: np.ndarray, bf16_error: float = 3e-3
) -> None:
    """Relative error and cosine; a sum of few terms may cancel more of what bf16 rounded."""
    rows = rows_f32.astype(np.float64)
    bound = 1e-4 if kernel == "int16" else bf16_error
    norms = np.linalg.norm(rows), np.linalg.norm(expected)
    assert np.linalg.norm(rows - expected) <= bound * norms[1]
    assert rows @ expected >= (1 - bound**2) * norms[0] * norms[1]


@every_backend
@pytest.mark.parametrize("sizes", SHAPES)
def test_error_against_float64(backend: Backend, sizes: tuple[int, int]) -> None:
    """Both orders; w1 and w3 with unequal scale_2 (N5), none of the three being 1 (N7)."""
    shape = ExpertShape(*sizes)
    records = [
        expert_record(shape, 1, scale_2=(0.004, 0.008, 0.002)),
        expert_record(shape, 2, scale_2=(0.008, 0.004, 0.5)),
    ]
    z = activations(3, shape.latent, seed=9)
    pairs = [0, 1, 1], [0, 1, 2]
    rows = compute_f32(make(shape, backend), arena_of(shape, records), *pairs, z)
    for pair, (record, token) in enumerate(zip(*pairs, strict=True)):
        assert_within_bound(
            backend.kernel,
            rows[pair],
            dense_row(shape, records[record], z[token], round_hidden=False),
        )
    if shape.latent % CHUNK == 0 and shape.width % CHUNK == 0:
        other = make(shape, backend, INTERLEAVED)
        assert np.array_equal(rows, compute_f32(other, interleaved(shape, records), *pairs, z))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 12), st.integers(1, 70))
def test_error_for_any_shape_and_grouping(seed: int, latent: int, width: int, pairs: int) -> None:
    """Against float64; a product of few terms may cancel more of what int16 rounded."""
    shape = ExpertShape(16 * latent, 16 * width)
    records = [expert_record(shape, seed + n) for n in range(2)]
    rng = np.random.default_rng(seed)
    z = activations(5, shape.latent, seed)
    bank_rows, tokens = list(rng.integers(-1, 2, pairs)), list(rng.integers(0, 5, pairs))
    rows = compute_f32(NativeKernel(shape), arena_of(shape, records), bank_rows, tokens, z)
    expected = [
        [dense_row(shape, record, token, round_hidden=False) for token in z] for record in records
    ]
    for row, bank_row, token in zip(rows, bank_rows, tokens, strict=True):
        if bank_row < 0:
            assert not row.any()
        else:
            wanted = expected[bank_row][token]
            assert np.linalg.norm(row - wanted) <= 3e-4 * np.linalg.norm(wanted)


@pytest.mark.parametrize("kernel", sorted({backend.kernel for backend in USABLE}))
def test_error_at_k3_size(kernel: str) -> None:
    """The promise itself; one activation in 200 is 10 times larger than the others."""
    shape = K3.expert
    record = random_record(shape, 3)
    rng = np.random.default_rng(4)
    values = rng.standard_normal((2, shape.latent)) * np.where(
        rng.random((2, shape.latent)) < 0.005, 10, 1
    )
    z = bf16_bits(values * 0.1)
    rows = NativeKernel(shape, name=kernel, threads=2).rows_f32(
        arena_of(shape, [record]), np.zeros(2, np.int32), np.arange(2, dtype=np.int32), z
    )
    for row, token in zip(rows, z, strict=True):
        assert_within_bound(
            kernel, row, dense_row(shape, record, token, round_hidden=False), bf16_error=2e-3
        )


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.booleans(),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(1, 64),
)
def test_int16_has_one_answer(
    seed: int, in_order: bool, latent: int, width: int, tokens: int
) -> None:
    """Any shape, any T from 1 to 64, any instruction set, both orders, one thread or three."""
    step = CHUNK if in_order else 16
    shape = ExpertShape(step * (latent % 4 + 1 if in_order else latent), step * (width % 4 + 1))
    records = [random_record(shape, seed + n, 0, 0x7F) for n in range(2)]
    rng = np.random.default_rng(seed)
    z = activations(tokens, shape.latent, seed)
    pairs = list(rng.integers(-1, 2, tokens)), list(range(tokens))
    arena = arena_of(shape, records)
    expected = compute(make(shape, INT16[-1]), arena, *pairs, z)
    assert INT16[-1].isa == "portable"
    for backend in INT16[:-1]:
        assert np.array_equal(expected, compute(make(shape, backend), arena, *pairs, z))
    threaded = make(shape, INT16[0], threads=3)
    assert np.array_equal(expected, compute(threaded, arena, *pairs, z))
    if in_order:
        again = compute(make(shape, INT16[0], INTERLEAVED), interleaved(shape, records), *pairs, z)
        assert np.array_equal(expected, again)


@every_backend
@pytest.mark.parametrize("tokens", [1, 3, 8, 33])
def test_a_row_depends_on_its_pair_alone(backend: Backend, tokens: int) -> None:
    """16 experts at once or one by one, one or two threads, either order: the same bits."""
    shape = ExpertShape(384, 256)
    records = [random_record(shape, seed) for seed in range(16)]
    arena = arena_of(shape, records)
    z = activations(tokens, shape.latent, seed=tokens)
    bank_rows = [row for row in range(16) for _ in range(tokens)]
    which = list(range(tokens)) * 16
    one = make(shape, backend)
    together = compute(one, arena, bank_rows, which, z)
    assert len({row.tobytes() for row in together}) == len(together), "equal rows prove nothing"
    for threads, order in ((2, "row-major"), (2, INTERLEAVED), (1, INTERLEAVED)):
        kernel = make(shape, backend, order, threads)
        memory = arena if order == "row-major" else interleaved(shape, records)
        assert np.array_equal(together, compute(kernel, memory, bank_rows, which, z))
    for pair in range(0, len(bank_rows), max(1, len(bank_rows) // 24)):
        alone = compute(one, arena, [bank_rows[pair]], [0], z[which[pair]][None].copy())
        assert np.array_equal(together[pair], alone[0])


@every_backend
@pytest.mark.parametrize("threads", [1, 2])
def test_masked_pairs_are_zero_rows(backend: Backend, threads: int) -> None:
    """N1: bank row -1 at positions 0, 7 and 15 of 16 is zero work and zeros, never row 0.

    Row 0 is all NaN, and so is the token that only masked pairs have.
    """
    shape = ExpertShape(256, 256)
    poisoned = np.full(RecordLayout(shape).record_bytes, 0xFF, np.uint8)
    records = [poisoned, *(expert_record(shape, seed) for seed in range(1, 4))]
    bank_rows = [-1 if pair in (0, 7, 15) else pair % 3 + 1 for pair in range(16)]
    z = activations(2, shape.latent, seed=1)
    z[1] = 0x7FC0
    tokens = [1 if row < 0 else 0 for row in bank_rows]
    kernel = make(shape, backend, threads=threads)
    rows = compute(kernel, arena_of(shape, records), bank_rows, tokens, z)
    rows_f32 = compute_f32(kernel, arena_of(shape, records), bank_rows, tokens, z)
    for pair, bank_row in enumerate(bank_rows):
        if bank_row < 0:
            assert not rows[pair].any()
            assert not rows_f32[pair].any()
        else:
            expected = dense_row(shape, records[bank_row], z[0], round_hidden=False)
            assert_within_bound(backend.kernel, rows_f32[pair], expected)
            assert np.array_equal(rows[pair], bf16_bits(rows_f32[pair]))
    nothing = compute(kernel, arena_of(shape, records), [-1] * 4, [1] * 4, z)
    assert not nothing.any()


@every_backend
def test_every_code_and_scale_decodes(backend: Backend) -> None:
    """All 16 E2M1 codes under all 256 E4M3 bytes; a NaN or negative scale gives a NaN, no value.

    Row o of w2 holds code c under scale s and sees h in one column only, so the row spells the
    decode table, subnormal scales included.
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
    rows = compute_f32(make(shape, backend), arena_of(shape, [record]), [0], [0], z)[0]
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    exponent, mantissa = (scale_bytes >> 3 & 15).astype(int), (scale_bytes & 7) / 8
    value = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7))
    refused = scale_bytes >= 0x7F
    h = rows[(codes == 2) & (scale_bytes == 0x38)][0]  # code and scale of value 1
    assert abs(h) > 1e-3
    assert np.isnan(rows[refused]).all()
    assert np.array_equal(rows[~refused], (e2m1[codes] * value * h)[~refused].astype(np.float32))


@every_backend
@pytest.mark.parametrize("place", ["w1", "w3", "w2"])
def test_a_bad_scale_is_never_a_plausible_row(backend: Backend, place: str) -> None:
    """One negative or NaN scale byte, in either order, puts a NaN in the row: it is refused."""
    shape = ExpertShape(256, 384)
    for byte in (0x7F, 0x80, 0xB8, 0xFF):
        record = expert_record(shape, byte)
        scales = tensor(RecordLayout(shape), record, f"{place}.weight_scale")
        scales[byte * 7 % len(scales)] = byte
        z = activations(5, shape.latent, seed=byte)
        pairs = [0] * 5, list(range(5))
        rows = compute(make(shape, backend), arena_of(shape, [record]), *pairs, z)
        assert np.isnan(bf16_float(rows)).any(axis=1).all()
        other = compute(make(shape, backend, INTERLEAVED), interleaved(shape, [record]), *pairs, z)
        assert np.array_equal(rows, other)


@every_backend
@pytest.mark.parametrize("place", ["w1", "w3", "w2"])
def test_a_bad_scale_2_is_never_a_plausible_row(backend: Backend, place: str) -> None:
    """A negative, infinite or NaN scale_2 gives NaN only; without it SiTU hides an infinity."""
    shape = ExpertShape(128, 144)
    z = activations(2, shape.latent, seed=1)
    for value in (-1e-3, -np.inf, np.inf, np.nan, -1e-45):
        record = expert_record(shape, 3)
        tensor(RecordLayout(shape), record, f"{place}.weight_scale_2").view("<f4")[:] = value
        arena = arena_of(shape, [record, expert_record(shape, 4)])
        rows = bf16_float(compute(make(shape, backend), arena, [0, 0, 1], [0, 1, 0], z))
        assert np.isnan(rows[:2]).all(), value
        assert np.isfinite(rows[2]).all()


@every_backend
def test_a_sum_that_overflows_on_its_way_is_refused(backend: Backend) -> None:
    """One lane leaves float32, later columns take it back: NaN, no saturated SiTU."""
    shape = ExpertShape(512, 16)
    layout = RecordLayout(shape)
    record = expert_record(shape, 5)
    codes = tensor(layout, record, "w1.weight").reshape(16, 4, 64)
    codes[:] = 0
    codes[:, 0, :4] = 0x77  # +6 in columns 0 to 7 of the first chunk
    codes[:, 1, :4] = 0xFF  # -6 in those of the second
    tensor(layout, record, "w1.weight_scale")[:] = 0x7E  # 448
    tensor(layout, record, "w3.weight")[:] = 0
    z = np.zeros((2, 512), np.uint16)
    unit = 256 if backend.kernel == "bf16" else 1  # the part of its scales that comes last
    for token, chunk, value in ((0, 0, 1.7e34), (0, 1, 1.4e34), (1, 0, 1.2e34), (1, 1, 1.2e34)):
        z[token, chunk * CHUNK : chunk * CHUNK + 8] = bf16_bits(np.float32(value * unit))
    kernel, arena = make(shape, backend), arena_of(shape, [record])
    rows = bf16_float(compute(kernel, arena, [0, 0], [0, 1], z))
    assert np.isnan(rows[0]).all()
    assert np.isfinite(rows[1]).all()


@every_backend
def test_rows_over_what_is_still_read_are_refused(backend: Backend) -> None:
    """`out` may not lie over activations, arena or pairs, not even by one row."""
    shape = ExpertShape(128, 128)
    kernel = make(shape, backend)
    stride = RecordLayout(shape).stride_bytes
    memory = np.zeros(stride + 2**16, np.uint8)
    memory[:stride] = arena_of(shape, [expert_record(shape, 1)])[0]
    z = activations(4, 128, seed=1)
    memory[stride : stride + z.nbytes] = z.view(np.uint8).ravel()
    before = memory.copy()
    arena = memory[:stride].reshape(1, stride)
    inside = memory[stride : stride + z.nbytes].view(np.uint16).reshape(4, 128)
    rows, tokens = np.array([0, -1, 0, 0], np.int32), np.arange(4, dtype=np.int32)
    for first in (stride - 256, stride, stride + z.nbytes - 256):
        out = memory[first : first + z.nbytes].view(np.uint16).reshape(4, 128)
        with pytest.raises(LocalProtocolError, match="out overlaps"):
            kernel.rows(arena, rows, tokens, inside, out)
        assert np.array_equal(before, memory)
    pairs = z.view(np.int32)[0, :4]
    pairs[:] = 0
    with pytest.raises(LocalProtocolError, match="out overlaps"):
        kernel.rows(arena, pairs, tokens, inside, z)
    beside = memory[stride + z.nbytes : stride + 2 * z.nbytes].view(np.uint16).reshape(4, 128)
    kernel.rows(arena, rows, tokens, inside, beside)
    assert beside[0].any()


@every_backend
@pytest.mark.parametrize(
    ("sizes", "order"),
    [((272, 144), "row-major"), ((16, 16), "row-major"), ((128, 128), "interleaved-4")],
)
def test_no_byte_beyond_a_record_is_read(
    backend: Backend, sizes: tuple[int, int], order: RecordOrder
) -> None:
    """The last record ends where the mapping ends; the page behind it is forbidden.

    Rows end inside a chunk in two shapes; a whole chunk would reach over the smaller one's end.
    With one chunk in every matrix a record is the same in both orders.
    """
    shape = ExpertShape(*sizes)
    layout = RecordLayout(shape)
    stride = layout.stride_bytes
    memory = mmap.mmap(-1, 2 * stride + mmap.PAGESIZE)
    view = np.frombuffer(memory, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    forbidden = view.ctypes.data + 2 * stride
    assert libc.mprotect(ctypes.c_void_p(forbidden), mmap.PAGESIZE, 0) == 0, ctypes.get_errno()
    # end of the last tensor that is read = end of the arena, so shift the arena inside the mapping
    slack = stride - layout.fields[8].offset - layout.fields[8].length
    arena = view[slack : slack + 2 * stride].reshape(2, stride)
    record = expert_record(shape, 3)[: stride - slack]
    view[stride + slack : 2 * stride] = record
    z = activations(1, shape.latent, seed=7)
    kernel = make(shape, backend, order)
    rows = compute(kernel, arena, [1], [0], z)
    again = compute(kernel, arena_of(shape, [expert_record(shape, 3)]), [0], [0], z)
    assert np.array_equal(rows, again)
    assert libc.mprotect(ctypes.c_void_p(forbidden), mmap.PAGESIZE, 3) == 0


@every_backend
def test_extreme_activations(backend: Backend) -> None:
    """NaN and infinity give NaN rows, only their own; huge, tiny and zero give finite ones."""
    shape = ExpertShape(256, 144)
    arena = arena_of(shape, [expert_record(shape, 1)])
    z = activations(8, shape.latent, seed=6)
    z[0, 200] = 0x7FC0
    z[1, 3] = 0x7F80
    z[2, 77] = 0xFF80
    z[3] = 0
    z[4] = 0x0001  # the smallest subnormal
    z[5] = bf16_bits(bf16_float(z[5]) * np.float32(1e30))
    z[6] = bf16_bits(bf16_float(z[6]) * np.float32(1e-30))
    rows = bf16_float(compute(make(shape, backend), arena, [0] * 8, list(range(8)), z))
    assert np.isnan(rows[:2]).all()
    assert np.isnan(rows[2]).all()
    assert not rows[3].any()
    assert not rows[4].any()
    assert np.isfinite(rows[3:]).all()
    assert np.abs(rows[5]).max() > 1
    assert np.abs(rows[6]).max() < 1e-20
    assert np.abs(rows[7]).max() > 0.01


def test_activation_has_the_same_bits_everywhere() -> None:
    """SiTU of every back end within 2e-6 of float64, one answer; saturated, NaN at the ends."""
    from shared._native import ffi, lib

    rng = np.random.default_rng(0)
    ends = [np.inf, -np.inf, np.nan, 0.0, -0.0, 1e38, -1e38, 1e-38]
    small = np.geomspace(1e-30, 1, 1024)
    usual = np.concatenate([np.linspace(-80, 100, 14_336), small, -small])
    n = len(usual)
    g = np.concatenate([usual, np.repeat(ends, 8)]).astype(np.float32)
    u = np.concatenate([rng.permutation(g[:n]), np.tile(ends, 8)]).astype(np.float32)
    found = []
    for backend in USABLE:
        h = np.empty_like(g)
        views = [ffi.from_buffer("float[]", values) for values in (g, u, h)]
        lib.k3_backend_situ(backend.number, *views, len(g))
        found.append(h)
    h = found[0]
    exact = situ(g[:n].astype(np.float64), u[:n].astype(np.float64))
    assert (np.abs(h[:n] - exact) <= 2e-6 * np.abs(exact) + 1e-37).all()
    is_nan = np.isnan(g) | np.isnan(u)
    assert np.isnan(h[is_nan]).all()
    assert np.isfinite(h[~is_nan]).all()
    at_ends = h[n:].reshape(8, 8)  # by g and u
    assert at_ends[0, 0] == at_ends[5, 5] == 100
    assert at_ends[0, 1] == at_ends[5, 6] == -100
    assert np.nanmax(np.abs(at_ends[[1, 6]])) < 1e-30
    assert np.nanmax(np.abs(at_ends[[3, 4]])) == 0
    for other in found[1:]:
        assert np.array_equal(h, other, equal_nan=True)


def test_flushing_subnormals_changes_no_bit() -> None:
    """A thread whose processor flushes subnormals to zero gets the rows of one that does not.

    Subnormal scales, activations from 1 to 2^-130 and scale_2 from 1 to 2^-120 put subnormals
    wherever they can occur: in h, in products and in rows.
    """
    flush = _flush_subnormals()
    shape = ExpertShape(128, 144)
    layout = RecordLayout(shape)
    records = []
    for exponent in (0, 40, 80, 85, 90, 95, 100, 105, 110, 120):
        for low in (0, 0x20):
            record = random_record(shape, exponent, low, low + 4)
            tensor(layout, record, "w2.weight_scale_2").view("<f4")[:] = 2.0**-exponent
            records.append(record)
    z = activations(14, 128, seed=2)
    for token in range(14):
        z[token] = bf16_bits(bf16_float(z[token]) * np.float32(2.0 ** (-10 * token)))
    pairs = np.divmod(np.arange(14 * len(records)), 14)
    arena = arena_of(shape, records)
    for backend in INT16:
        kernel = make(shape, backend)
        found: list[np.ndarray] = []

        def call(before: Callable[[], None], kernel: NativeKernel = kernel) -> None:
            before()
            found.append(compute(kernel, arena, *map(list, pairs), z))  # noqa: B023 - same turn

        for before in (lambda: None, flush):
            thread = threading.Thread(target=call, args=(before,))
            thread.start()
            thread.join(30)
        plain, flushed = found
        assert np.isfinite(bf16_float(plain)).all()
        smallest = np.abs(bf16_float(plain)[plain & 0x7FFF != 0]).min()
        assert 2.0**-126 <= smallest < 2.0**-120, "nothing came near the subnormals"
        assert np.array_equal(plain, flushed)


def _flush_subnormals() -> Callable[[], None]:
    """A function that makes the calling thread flush subnormals (x86), or a skip."""
    if os.uname().machine != "x86_64":
        pytest.skip("how to flush subnormals is known here for x86 only")
    # stmxcsr [rsp-4]; or dword [rsp-4], 0x8040; ldmxcsr [rsp-4]; ret
    code = bytes.fromhex("0fae5c24fc 814c24fc40800000 0fae5424fc c3")
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    call = ctypes.CFUNCTYPE(None)(address)
    call.page = page
    return call


# ---- threads ----


def test_two_callers_share_a_pool() -> None:
    """Many calls from four Python threads at once: every row is right and all of them end."""
    shape = ExpertShape(512, 512)
    kernel = NativeKernel(shape, threads=3, spin_us=50)
    arena = arena_of(shape, [random_record(shape, seed) for seed in range(4)])
    z = activations(4, 512, seed=1)
    pairs = [0, 1, 2, 3, -1, 2], [0, 1, 2, 3, 0, 1]
    expected = compute(NativeKernel(shape), arena, *pairs, z)
    wrong: list[int] = []

    def caller(which: int) -> None:
        for _ in range(60):
            if not np.array_equal(expected, compute(kernel, arena, *pairs, z)):
                wrong.append(which)

    callers = [threading.Thread(target=caller, args=(which,)) for which in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join(40)
    assert not any(thread.is_alive() for thread in callers)
    assert not wrong


def test_a_thousand_small_calls_and_a_refused_one() -> None:
    """No call leaves the pool unusable, not even one that raises."""
    shape = ExpertShape(256, 256)
    kernel = NativeKernel(shape, threads=2)
    arena = arena_of(shape, [random_record(shape, 1)])
    z = activations(1, 256, seed=1)
    expected = compute(kernel, arena, [0], [0], z)
    for call in range(1000):
        if call % 100 == 50:
            with pytest.raises(LocalProtocolError, match=r"bank_rows\[0\] is 1, outside"):
                compute(kernel, arena, [1], [0], z)
        assert np.array_equal(expected, compute(kernel, arena, [0], [0], z))


def test_a_pool_ends_with_its_kernel() -> None:
    """The threads are there while the kernel is, and not after."""
    before = len(os.listdir("/proc/self/task"))
    kernel = NativeKernel(ExpertShape(16, 16), threads=4, cpus=sorted(os.sched_getaffinity(0)))
    assert len(os.listdir("/proc/self/task")) == before + 3
    del kernel
    assert len(os.listdir("/proc/self/task")) == before


def test_a_forked_child_computes_alone() -> None:
    """A fork takes none of the workers along; the child's rows are right all the same."""
    shape = ExpertShape(256, 256)
    kernel = NativeKernel(shape, threads=2)
    arena = arena_of(shape, [random_record(shape, 1)])
    z = activations(2, 256, seed=1)
    expected = compute(kernel, arena, [0, 0], [0, 1], z)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)  # ends a child that waits for workers it does not have
        same = np.array_equal(expected, compute(kernel, arena, [0, 0], [0, 1], z))
        del kernel
        os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"threads": 0}, "threads 0 is outside 1 to 1024"),
        ({"threads": 1025}, "threads 1025 is outside"),
        ({"threads": 2, "cpus": [100_000]}, r"refused 1 more threads on CPUs \[100000\]"),
        ({"threads": 2, "cpus": [-1]}, "cpus: -1 is outside 0 to"),
        ({"threads": 2, "cpus": [2**31]}, "cpus: 2147483648 is outside 0 to"),
        ({"spin_us": -1}, "spin_us -1 is outside 0 to"),
        ({"spin_us": 2**62}, "spin_us 4611686018427387904 is outside 0 to"),
        ({"isa": "sparc"}, "was not built .* use isa auto or .*portable"),
    ],
)
def test_settings_that_cannot_be_had(arguments: dict, named: str) -> None:
    """Each is one ConfigError with the value and what to do instead."""
    with pytest.raises(ConfigError, match=named):
        NativeKernel(ExpertShape(16, 16), **arguments)


def test_the_probe_reads_and_time_is_counted() -> None:
    """The read probe and calls add to the processor time that a bench divides by."""
    shape = ExpertShape(512, 512)
    kernel = NativeKernel(shape, threads=2)
    arena = arena_of(shape, [random_record(shape, 1)])
    before = kernel.cpu_ns()
    kernel.read_probe(np.zeros(8 << 20, np.uint8))
    after_probe = kernel.cpu_ns()
    compute(kernel, arena, [0], [0], activations(1, 512, seed=1))
    assert before < after_probe < kernel.cpu_ns()
