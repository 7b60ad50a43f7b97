"""The GPU kernel against the reference and the definition; run by test_gpu_kernel.

Needs TRITON_INTERPRET=1 before anything imports triton, or a GPU: then the same checks run there.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from shared.core.errors import LocalProtocolError
from shared.core.record import RecordLayout
from shared.core.ring_layout import (
    Header,
    RingShape,
    RowStatus,
    build_dispatch,
    build_reply,
    parse_reply,
    unpack,
)
from shared.core.shape import ExpertShape
from shared.kernels.canary import agrees, canary_row
from shared.kernels.codecs import bf16_float, e4m3_float, nvfp4_decode
from shared.kernels.expert import ExpertKernel
from shared.kernels.gpu import make_gpu_kernel, make_gpu_ring
from shared.kernels.gpu.experts import GpuKernel
from shared.kernels.gpu.kernel import WORK_HEAD
from shared.kernels.gpu.memory import INTERPRETED, device, tensor_of
from shared.kernels.gpu.numerics import bf16_bits, e2m1_even, e2m1_odd, e4m3_scales, situ
from shared.kernels.gpu.ring import Ended, GpuRing
from shared.kernels.gpu.timing import measure
from shared.kernels.reference import ReferenceKernel
from shared.kernels.reference import situ as situ_exact
from shared.kernels.select import select_kernel
from tests.support.expert_records import activations, arena_of, expert_record, tensor

POISON = 0x7FC1  # a NaN: a row that is not written does not go unnoticed
SHAPE = ExpertShape(48, 80)
only_interpreted = pytest.mark.skipif(not INTERPRETED, reason="a GPU reads a copy of this arena")

if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 or a GPU", allow_module_level=True)


def compute(
    kernel: ExpertKernel,
    arena: np.ndarray,
    bank_rows: list[int],
    tokens: list[int],
    z: np.ndarray,
) -> np.ndarray:
    out = np.full((len(bank_rows), z.shape[1]), POISON, np.uint16)
    kernel.rows(arena, np.array(bank_rows, np.int32), np.array(tokens, np.int32), z, out)
    return out


def assert_close(rows: np.ndarray, expected: np.ndarray) -> None:
    """As far apart as two orders of a sum may be."""
    for row, want in zip(bf16_float(rows), bf16_float(expected), strict=True):
        assert np.abs(row - want).max() <= 2**-7 * np.abs(want).max()
        assert row @ want >= 0.99999 * np.linalg.norm(row) * np.linalg.norm(want)


def pages(array: np.ndarray) -> np.ndarray:
    """A copy in memory that a driver can pin."""
    copy = np.frombuffer(mmap.mmap(-1, array.nbytes), array.dtype).reshape(array.shape)
    copy[:] = array
    return copy


def records(shape: ExpertShape, count: int) -> np.ndarray:
    return pages(arena_of(shape, [expert_record(shape, seed) for seed in range(count)]))


@pytest.mark.parametrize("sizes", [(16, 16), (144, 48), (48, 144)])
def test_rows_follow_the_reference(sizes: tuple[int, int]) -> None:
    """Sizes that are no multiple of a tile or a step, an odd number of pairs, masked ones too."""
    shape = ExpertShape(*sizes)
    arena, z = records(shape, 2), activations(3, shape.latent, seed=9)
    pairs = [-1, 1, 0, 1, -1], [0, 1, 2, 0, 2]

    rows = compute(select_kernel(shape, "gpu"), arena, *pairs, z)

    expected = compute(ReferenceKernel(shape), arena, *pairs, z)
    assert bf16_float(expected)[1:4].any(axis=1).all(), "an expected row of zeros proves nothing"
    assert_close(rows, expected)
    assert not rows[[0, 4]].any()


def test_scales_of_gate_up_and_down_are_their_own() -> None:
    """N5, N7: each scale_2 alone is doubled; lost, shared or applied twice would be seen."""
    z = activations(1, SHAPE.latent, seed=2)
    scales = [(0.008, 0.004, 0.004), (0.004, 0.008, 0.004), (0.004, 0.004, 0.008)]
    arena = arena_of(SHAPE, [expert_record(SHAPE, 5, scale_2=scale) for scale in scales])
    rows = compute(GpuKernel(SHAPE), arena, [0, 1, 2], [0, 0, 0], z)

    assert_close(rows, compute(ReferenceKernel(SHAPE), arena, [0, 1, 2], [0, 0, 0], z))
    assert len({row.tobytes() for row in rows}) == 3


def test_a_row_depends_on_its_pair_alone() -> None:
    """19 tokens of one expert (two groups), 3 and 1 of others, shuffled or alone: the same bits."""
    kernel, arena = GpuKernel(SHAPE), records(SHAPE, 3)
    z = activations(19, SHAPE.latent, seed=4)
    bank_rows = np.array([1] * 19 + [0] * 3 + [2, -1])
    tokens = np.array([*range(19), 5, 0, 5, 7, 3])
    together = compute(kernel, arena, list(bank_rows), list(tokens), z)
    assert len({row.tobytes() for row in together}) == 23, "equal rows prove nothing"

    order = np.random.default_rng(1).permutation(24)
    shuffled = compute(kernel, arena, list(bank_rows[order]), list(tokens[order]), z)
    assert np.array_equal(together[order], shuffled)
    for pair in (0, 17, 20, 22):
        alone = compute(kernel, arena, [bank_rows[pair]], [0], z[tokens[pair]][None].copy())
        assert np.array_equal(together[pair], alone[0])
    for count in (3, 8):
        few = compute(kernel, arena, [1] * count, list(range(count)), z[:count])
        assert np.array_equal(together[:count], few)


def test_launch_obeys_the_count_on_the_device() -> None:
    """Replays with other counts in the same buffers; foreign rows and tokens are zero rows.

    Record 0 is all NaN and the scratch is poisoned, so whoever looked there would be seen.
    """
    kernel, arena = GpuKernel(SHAPE), records(SHAPE, 2)
    arena[0] = 0xFF
    z = activations(2, SHAPE.latent, seed=3)
    held, on_device = tensor_of(arena).to(device()), tensor_of(z.view(np.int16)).to(device())
    buffers = kernel.buffers(8)
    buffers.hidden.fill_(POISON)
    out = torch.full((8, SHAPE.latent), POISON, dtype=torch.int16, device=device())
    expected = compute(ReferenceKernel(SHAPE), arena, [1, 1], [0, 1], z)

    buffers.bank_rows.copy_(torch.tensor([-1, 2, 1, -7, 1, 1, 2**30, 1]))
    buffers.tokens.copy_(torch.tensor([0, 0, 1, 0, 0, 2, 0, -1]))
    for count in (5, 0, 8):
        out.fill_(POISON)
        buffers.count.copy_(torch.tensor([count, 2]))
        kernel.launch(held, buffers, on_device, out)
        rows = out.cpu().numpy().view(np.uint16)
        good = [pair for pair in (2, 4) if pair < count]
        zero = [pair for pair in (0, 1, 3, 5, 6, 7) if pair < count]
        assert_close(rows[good], expected[[1, 0]][: len(good)])
        assert not rows[zero].any()
        assert (rows[count:] == POISON).all()


def test_a_count_beyond_the_buffers_stays_inside() -> None:
    """A damaged count is cut to what was allocated; memory behind it keeps its bytes."""
    kernel, arena = GpuKernel(SHAPE), records(SHAPE, 1)
    buffers = kernel.buffers(16)
    z = tensor_of(activations(1, SHAPE.latent, seed=3).view(np.int16)).to(device())
    out = torch.full((17, SHAPE.latent), POISON, dtype=torch.int16, device=device())
    buffers.bank_rows.fill_(-1)
    buffers.count.copy_(torch.tensor([10_000, 1]))
    kernel.launch(tensor_of(arena).to(device()), buffers, z, out)
    assert not out[:16].any()
    assert (out[16] == POISON).all()
    assert len(buffers.work) == WORK_HEAD.value + 4 * 16


@only_interpreted
@pytest.mark.parametrize("sizes", [(48, 80), (16, 16)])
def test_no_byte_beyond_a_record_is_read(sizes: tuple[int, int]) -> None:
    """The last record ends where the mapping ends; the page behind it is forbidden.

    The scales behind w2 of the smaller shape are shorter than a step of its weights.
    """
    shape = ExpertShape(*sizes)
    layout = RecordLayout(shape)
    stride = layout.stride_bytes
    memory = mmap.mmap(-1, 2 * stride + mmap.PAGESIZE)
    view = np.frombuffer(memory, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    forbidden = view.ctypes.data + 2 * stride
    assert libc.mprotect(ctypes.c_void_p(forbidden), mmap.PAGESIZE, 0) == 0, ctypes.get_errno()
    slack = stride - layout.fields[8].offset - layout.fields[8].length
    arena = view[slack : slack + 2 * stride].reshape(2, stride)
    view[stride + slack : 2 * stride] = expert_record(shape, 3)[: stride - slack]
    z = activations(1, shape.latent, seed=7)
    rows = compute(GpuKernel(shape), arena, [1], [0], z)
    again = compute(GpuKernel(shape), arena_of(shape, [expert_record(shape, 3)]), [0], [0], z)
    assert np.array_equal(rows, again)
    assert libc.mprotect(ctypes.c_void_p(forbidden), mmap.PAGESIZE, 3) == 0


def test_a_held_arena_is_read_in_place() -> None:
    """A record that changes after `hold` changes the row; the arena may be read-only."""
    kernel, arena = GpuKernel(SHAPE), records(SHAPE, 1)
    z = activations(1, SHAPE.latent, seed=1)
    view = arena[:]
    view.flags.writeable = False
    kernel.hold(view, in_place=True)
    before = compute(kernel, view, [0], [0], z)
    arena[0, : RecordLayout(SHAPE).record_bytes] = expert_record(SHAPE, 77)
    after = compute(kernel, view, [0], [0], z)

    assert not np.array_equal(before, after)
    assert_close(after, compute(ReferenceKernel(SHAPE), arena, [0], [0], z))
    assert agrees(canary_row(kernel, view, 0, 5), canary_row(kernel, view, 0, 5), True)


def test_nan_and_infinity_stay_visible_and_apart() -> None:
    """A NaN scale, a NaN or infinite input give rows that are not finite, and only their own."""
    layout = RecordLayout(SHAPE)
    bad = expert_record(SHAPE, 2)
    tensor(layout, bad, "w2.weight_scale")[:] = 0x7F
    arena = arena_of(SHAPE, [expert_record(SHAPE, 1), bad])
    z = activations(3, SHAPE.latent, seed=6)
    z[1, 5], z[2, 5] = 0x7FC0, 0x7F80
    with np.errstate(invalid="ignore"):
        rows = bf16_float(compute(GpuKernel(SHAPE), arena, [0, 0, 0, 1, 0], [0, 1, 2, 0, 0], z))
    assert np.isfinite(rows[[0, 4]]).all()
    assert np.isnan(rows[[1, 3]]).all()
    assert not np.isfinite(rows[2]).all()


@triton.jit
def _decode(codes, packed, scales, even, odd):
    index = tl.arange(0, 256)
    tl.store(scales + index, e4m3_scales(tl.load(codes + index)))
    tl.store(even + index, e2m1_even(tl.load(packed + index)))
    tl.store(odd + index, e2m1_odd(tl.load(packed + index)))


def test_every_code_and_scale_decodes_exactly() -> None:
    """256 packed bytes and 256 E4M3 bytes, subnormals and both NaN among them."""
    byte = torch.arange(256, dtype=torch.uint8, device=device())
    scales, even, odd = (torch.zeros(256, device=device()) for _ in range(3))
    _decode[(1,)](byte, byte, scales, even, odd)
    plain = np.arange(256, dtype=np.uint8)
    expected = e4m3_float(plain)
    with np.errstate(invalid="ignore"):
        assert np.array_equal(scales.cpu().numpy() / 2.0**117, expected, equal_nan=True)
    weight = nvfp4_decode(np.tile(plain[:, None], 8), np.full((256, 1), 0x38, np.uint8), 1)
    assert np.array_equal(even.cpu().numpy() * 2.0**126, weight[:, 0])
    assert np.array_equal(odd.cpu().numpy() * 2.0**126, weight[:, 1])


@triton.jit
def _activate(g, u, h, bits):
    index = tl.arange(0, 4096)
    value = situ(tl.load(g + index), tl.load(u + index))
    tl.store(h + index, value)
    tl.store(bits + index, bf16_bits(value))


def test_activation_is_exact_to_float32() -> None:
    """SiTU within 2e-6 of float64, relative, down to tiny inputs; bf16 rounds to nearest even."""
    steps = np.concatenate([np.linspace(-80, 100, 2040), np.geomspace(1e-30, 1, 2048)])
    edge = [np.inf, -np.inf, np.nan, 0, 1e38, -1e38, 1, -0.0]
    g = np.concatenate([steps, edge]).astype(np.float32)
    u = np.concatenate([np.random.default_rng(0).permutation(steps), edge]).astype(np.float32)
    h = torch.zeros(4096, device=device())
    bits = torch.zeros(4096, dtype=torch.int16, device=device())
    _activate[(1,)](tensor_of(g).to(device()), tensor_of(u).to(device()), h, bits)
    got = h.cpu().numpy()

    exact = situ_exact(g[:-8].astype(np.float64), u[:-8].astype(np.float64))
    visible = np.abs(exact) > 1e-37  # below, the true value is no normal float
    assert (np.abs(got[:-8] - exact)[visible] / np.abs(exact[visible])).max() <= 2e-6
    assert got[-8] == 100
    assert abs(got[-7]) < 1e-30
    assert np.isnan(got[-6])
    assert got[-5] == 0
    rounded = bf16_float(bits.cpu().numpy().view(np.uint16))
    want = torch.from_numpy(got).to(torch.bfloat16).float().numpy()
    assert np.array_equal(rounded, want, equal_nan=True)


def test_misuse_is_named_and_changes_nothing() -> None:
    """Wrong indices, another order, an arena nobody holds; no pairs is a call that does nothing."""
    kernel, arena = GpuKernel(SHAPE), records(SHAPE, 2)
    z = activations(1, SHAPE.latent, seed=1)
    with pytest.raises(LocalProtocolError, match=r"bank_rows\[1\] is 2, outside -1 \(none\) to 1"):
        compute(kernel, arena, [0, 2], [0, 0], z)
    with pytest.raises(LocalProtocolError, match=r"tokens\[0\] is 1, outside 0 to 0"):
        compute(kernel, arena, [0], [1], z)
    with pytest.raises(LocalProtocolError, match="arena has shape"):
        compute(kernel, arena[:, :-16].copy(), [0], [0], z)
    with pytest.raises(LocalProtocolError, match="row-major"):
        make_gpu_kernel(ExpertShape(128, 128), "interleaved-4")
    with pytest.raises(LocalProtocolError, match="allocate it with mmap"):
        kernel.hold(
            pages(np.zeros((2, 8192), np.uint8)).ravel()[64:8256].reshape(1, 8192), in_place=True
        )
    with pytest.raises(LocalProtocolError, match="call hold"):
        ring_of(kernel, arena, hold=False)
    assert compute(kernel, arena, [], [], z).shape == (0, SHAPE.latent)


RING = RingShape(slots=3, max_tokens=4, max_rows=6, latent=SHAPE.latent)
LAYER, EPOCH, IDLE_POLLS = 2, 7, 3


class Rings:
    """Both rings in host memory, with what a Station does to them."""

    def __init__(self) -> None:
        self.requests = pages(np.zeros(RING.request_ring_bytes, np.uint8))
        self.replies = pages(np.full(RING.reply_ring_bytes, 0xA5, np.uint8))
        self.replies[: RING.bells_bytes] = 0

    def dispatch(self, slot: int, generation: int, pairs: list, z: np.ndarray, **change) -> None:
        payload = build_dispatch(np.array(pairs, np.uint16).reshape(-1, 2), z)
        header = Header(
            layer=LAYER,
            epoch=EPOCH,
            generation=generation,
            ticket=100 + generation,
            tokens=len(z),
            rows=len(pairs),
            payload_bytes=len(payload),
            time_us=50,
            compute_us=0,
            kernel_id=1,
        )._replace(**change)
        offset = RING.slot_offset(slot, RING.request_slot_bytes)
        self.requests[offset + 64 : offset + 64 + len(payload)] = payload
        self.requests[offset : offset + 64] = np.frombuffer(header.pack(), np.uint8)
        self.requests[: 8 * RING.slots].view(np.uint64)[slot] = generation

    def bell(self, slot: int) -> int:
        return int(self.replies[: 8 * RING.slots].view(np.uint64)[slot])

    def reply(self, slot: int) -> tuple[Header, bytes]:
        offset = RING.slot_offset(slot, RING.reply_slot_bytes)
        header = unpack(self.replies[offset : offset + 64].tobytes())
        assert header is not None
        return header, self.replies[offset + 64 : offset + 64 + header.payload_bytes].tobytes()


def ring_of(
    kernel: GpuKernel, arena: np.ndarray, *, hold: bool = True
) -> tuple[GpuRing, Rings, np.ndarray]:
    """A ring whose layer 2 has experts 1 and 4 in bank rows 0 and 1, and 5 in row 2 if any."""
    table = np.full((LAYER + 1, 6), -1, np.int32)
    table[LAYER, [1, 4]] = 0, 1
    if len(arena) > 2:
        table[LAYER, 5] = 2
    if hold:
        kernel.hold(arena, in_place=True)
    rings = Rings()
    ring = make_gpu_ring(
        kernel, RING, arena=arena, table=table, requests=rings.requests, replies=rings.replies
    )
    return ring, rings, table


def wait_for_end(ring: GpuRing) -> Ended:
    """A launch on a GPU returns at once; the interpreter's has ended."""
    deadline = time.monotonic() + 30
    while ring.ended is Ended.RUNNING and time.monotonic() < deadline:
        time.sleep(0.01)
    return ring.ended


def test_ring_serves_what_was_rung() -> None:
    """Two slots, one after a relaunch: whole reply as the executor would build it, then idle.

    Pairs: fine, unknown expert, beyond the table, not finite, fine again.
    """
    kernel, arena = GpuKernel(SHAPE), records(SHAPE, 3)
    arena[2, : RecordLayout(SHAPE).record_bytes] = 0x7F
    ring, rings, _ = ring_of(kernel, arena)
    z = activations(3, SHAPE.latent, seed=8)
    pairs = [(0, 1), (1, 3), (2, 700), (0, 5), (2, 4)]
    expected = compute(kernel, arena, [0, -1, -1, -1, 1], [0, 0, 0, 0, 2], z)
    rings.dispatch(1, 4, pairs, z)
    ring.launch(IDLE_POLLS)
    assert (wait_for_end(ring), ring.served) == (Ended.IDLE, 1)
    assert [rings.bell(slot) for slot in range(3)] == [0, 4, 0]
    header, payload = rings.reply(1)
    status = np.array([0, 1, 1, 2, 0], np.uint8)
    assert payload == build_reply(np.array(pairs, np.uint16), status, expected).tobytes()
    assert header == Header(LAYER, EPOCH, 4, 104, 3, 5, len(payload), 0, 0, kernel.kernel_id)

    rings.dispatch(0, 1, pairs[:1], z[:1])
    ring.launch(IDLE_POLLS)
    assert (wait_for_end(ring), ring.served) == (Ended.IDLE, 1), "a slot is served once"
    assert [rings.bell(slot) for slot in range(3)] == [1, 4, 0]
    parsed = parse_reply(*rings.reply(0), SHAPE.latent)
    assert parsed is not None
    assert np.array_equal(parsed[2], expected[:1])


def test_bell_comes_after_the_rows_and_stop_ends_it() -> None:
    """A watcher that sees the bell finds a whole reply; the stop word ends a launch that waits.

    Shows the order of stores in one thread of the interpreter, not a GPU's memory model.
    """
    kernel, arena = GpuKernel(SHAPE), records(SHAPE, 2)
    ring, rings, _ = ring_of(kernel, arena)
    z = activations(2, SHAPE.latent, seed=8)
    expected = compute(kernel, arena, [1, 0], [1, 0], z)
    server = threading.Thread(target=ring.launch, args=(2**31 - 1,))
    patience = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # look between any two steps of the interpreter
    server.start()
    try:
        rings.dispatch(2, 9, [(1, 4), (0, 1)], z)
        deadline = time.monotonic() + 30
        while rings.bell(2) != 9 and time.monotonic() < deadline:
            time.sleep(0)
        header, payload = rings.reply(2)
    finally:
        sys.setswitchinterval(patience)
        ring.stop()
        server.join(30)
    assert not server.is_alive()
    assert (wait_for_end(ring), ring.served) == (Ended.STOPPED, 1)
    parsed = parse_reply(header, payload, SHAPE.latent)
    assert header.generation == 9
    assert parsed is not None
    assert np.array_equal(parsed[1], [RowStatus.OK.value] * 2)
    assert np.array_equal(parsed[2], expected)


@pytest.mark.parametrize(
    ("pairs", "tokens", "change"),
    [(7, 1, {}), (1, 5, {}), (1, 1, {"rows": 2**31}), (1, 1, {"payload_bytes": 16})],
)
def test_slot_that_does_not_fit_ends_the_kernel(pairs: int, tokens: int, change: dict) -> None:
    """Sizes that would lead outside of the ring: nothing is computed, nothing is published."""
    kernel, arena = GpuKernel(SHAPE), records(SHAPE, 2)
    ring, rings, _ = ring_of(kernel, arena)
    z = activations(tokens, SHAPE.latent, seed=8)
    rings.dispatch(0, 1, [(0, 1)] * pairs, z, **change)
    ring.launch(IDLE_POLLS)
    assert (wait_for_end(ring), ring.served) == (Ended.REFUSED, 0)
    assert rings.bell(0) == 0


def test_timing_runs() -> None:
    """The measurement a person runs on a GPU works; here its numbers only have to be numbers."""
    (timing,) = measure(SHAPE, arena_bytes=3 * 8192, experts=2, tokens=(1,), launches=1)
    assert (timing.experts, timing.tokens) == (2, 1)
    assert timing.kernel_us > 0
    assert timing.share_of_probe > 0
    assert timing.gb_per_s == pytest.approx(
        2 * RecordLayout(SHAPE).record_bytes / timing.kernel_us / 1e3
    )
