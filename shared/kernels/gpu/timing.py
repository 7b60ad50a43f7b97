"""Times the GPU kernel beside a plain read of the same records, in one CUDA graph each.

Owns the random arena, the rotation over it that keeps caches out, and the read probe. Under the
interpreter it runs, so that it is known to work, but its numbers mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl

from shared.core.record import RecordLayout
from shared.core.shape import K3, ExpertShape
from shared.kernels.gpu.experts import Buffers, GpuKernel
from shared.kernels.gpu.memory import INTERPRETED, device

_REPLAYS: Final = 7
_PROBE_WORDS: Final = tl.constexpr(4096)


@dataclass(frozen=True, slots=True)
class Timing:
    """One dispatch of `experts` experts with `tokens` tokens each, best of some replays."""

    experts: int
    tokens: int
    kernel_us: float
    probe_us: float  # the same records, read and nothing else
    gb_per_s: float  # of the kernel
    share_of_probe: float


def measure(
    shape: ExpertShape = K3.expert,
    *,
    arena_bytes: int = 4 * 10**9,
    in_place: bool = False,
    experts: int = 16,
    tokens: tuple[int, ...] = (1, 2, 4, 8, 16),
    launches: int = 12,
) -> list[Timing]:
    """Time dispatches of `experts` experts from an arena of `arena_bytes`, per number of tokens.

    in_place: the arena lies in pinned host memory and is read from there, else in device memory.
    Each launch takes the next records, so that `launches` x `experts` records pass before one comes
    again; choose them to exceed the GPU's cache.
    """
    kernel = GpuKernel(shape)
    rows = max(experts, arena_bytes // kernel.layout.stride_bytes)
    arena = _random_arena(kernel.layout, rows, in_place=in_place)
    picks = [[(launch * experts + e) % rows for e in range(experts)] for launch in range(launches)]
    probe_us = _best_us(_probes(arena, kernel, picks))
    return [_timed(kernel, arena, picks, count, probe_us) for count in tokens]


def _timed(
    kernel: GpuKernel, arena: torch.Tensor, picks: list[list[int]], tokens: int, probe_us: float
) -> Timing:
    experts = len(picks[0])
    latent = kernel.shape.latent
    z = torch.randn((experts * tokens, latent), device=device()).to(torch.bfloat16)
    z_bits = z.view(torch.int16)
    out = torch.empty_like(z_bits)
    buffers = [_filled(kernel, rows, tokens) for rows in picks]

    def launch() -> None:
        for each in buffers:
            kernel.launch(arena, each, z_bits, out)

    kernel_us = _best_us(launch) / len(picks)
    read_us = probe_us / len(picks)
    read_bytes = experts * kernel.layout.record_bytes
    return Timing(
        experts, tokens, kernel_us, read_us, read_bytes / kernel_us / 1e3, read_us / kernel_us
    )


def _filled(kernel: GpuKernel, rows: list[int], tokens: int) -> Buffers:
    pairs = len(rows) * tokens
    buffers = kernel.buffers(pairs)
    buffers.bank_rows.copy_(torch.tensor(rows, dtype=torch.int32).repeat_interleave(tokens))
    buffers.tokens.copy_(torch.arange(pairs, dtype=torch.int32))
    buffers.count.copy_(torch.tensor([pairs, pairs], dtype=torch.int32))
    return buffers


def _random_arena(layout: RecordLayout, rows: int, *, in_place: bool) -> torch.Tensor:
    """Any nibbles under sane scales, uint8 [rows, stride]."""
    where = torch.device("cpu") if in_place else device()
    pinned = in_place and not INTERPRETED
    arena = torch.empty(
        (rows, layout.stride_bytes), dtype=torch.uint8, device=where, pin_memory=pinned
    )
    arena.random_(0, 256)
    for field in layout.fields:
        part = arena[:, field.offset : field.offset + field.length]
        if field.dtype == "F8_E4M3":
            part.random_(0x20, 0x40)
        elif field.dtype == "F32":
            part.copy_(torch.tensor([0.003]).view(torch.uint8).expand_as(part))
    return arena


@triton.jit
def _probe_launch(
    arena: tl.tensor, rows: tl.tensor, count: tl.tensor, seen: tl.tensor, STRIDE: tl.constexpr
) -> None:
    """Read `count` records whole; a trace of them is kept, or the compiler would drop the loads."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    tiles: tl.constexpr = (STRIDE // 4 + _PROBE_WORDS - 1) // _PROBE_WORDS
    total = tl.zeros([_PROBE_WORDS], tl.int32)
    for item in range(program, count * tiles, programs):
        record = item // tiles
        words = arena + tl.load(rows + record).to(tl.int64) * STRIDE
        index = (item - record * tiles) * _PROBE_WORDS + tl.arange(0, _PROBE_WORDS)
        total |= tl.load(words.to(tl.pointer_type(tl.int32)) + index, index < STRIDE // 4, 0)
    tl.store(seen + program, tl.max(total, 0))


def _probes(arena: torch.Tensor, kernel: GpuKernel, picks: list[list[int]]) -> Callable[[], None]:
    seen = torch.zeros(kernel.programs, dtype=torch.int32, device=device())
    lists = [torch.tensor(rows, dtype=torch.int32, device=device()) for rows in picks]

    def launch() -> None:
        for rows in lists:
            _probe_launch[(kernel.programs,)](
                arena, rows, len(rows), seen, STRIDE=kernel.layout.stride_bytes
            )

    return launch


def _best_us(launch: Callable[[], None]) -> float:
    """Shortest time of all launches together, after a first run that compiles."""
    launch()
    if INTERPRETED:
        begin_us = time.perf_counter_ns() / 1e3
        launch()
        return time.perf_counter_ns() / 1e3 - begin_us
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    best_us = float("inf")
    for _ in range(_REPLAYS):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best_us = min(best_us, begin.elapsed_time(end) * 1e3)
    return best_us
