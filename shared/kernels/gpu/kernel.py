"""The expert kernel in Triton: three launches that turn a dispatch into rows.

Theory. A launch works on the pairs in `work` (device memory, int32), whose count only the device
reads, so a captured graph replays with another count. `order` sorts the pairs by bank row. `hidden`
(gate and up) and `output` (down) walk over items = (place in that order, tile of outputs); a place
that starts a group of up to GROUP pairs of one expert computes that tile for all of them, so a
record is read once per group. Program i takes items i, i + programs, ...: any grid fits any count.

Exact. An output is one accumulator of a matrix product whose steps along the inputs are fixed by
BLOCK_IN; no atomics, no split sums. The other columns of the product are other pairs: they are
computed beside an output and never enter its sum.

Reads. Records are read in place at arena + row x stride, wherever the arena lies: device memory,
pinned host memory or unified memory. Every load is masked by the true sizes. A pair whose bank row
or token lies outside its range touches no record and gets a row of zeros.

Must not know rings, numpy or how a kernel is chosen.

    work    [0] pairs  [1] tokens  [WORK_HEAD ..] bank rows, token of each pair, order, begin,
            each PAIRS long; order and begin are written by `order`
    layout  (stride, then for w1, w3, w2: weight, weight_scale, weight_scale_2), offsets in bytes
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from shared.kernels.gpu.numerics import (
    WEIGHT_UNIT,
    bf16_bits,
    bf16_even,
    bf16_odd,
    e2m1_even,
    e2m1_odd,
    e4m3_scales,
    situ,
)

WORK_HEAD: Final = tl.constexpr(16)
GROUP: Final = tl.constexpr(16)  # pairs of one expert that share a read of its record
# The tile defines the bits of a row. 32 outputs are two warps of the mma instruction that all GPUs
# have; 128 inputs keep a step in 168 registers, so that six programs share a multiprocessor and
# their loads in flight cover the latency of its memory.
BLOCK_OUT: Final = tl.constexpr(32)
BLOCK_IN: Final = tl.constexpr(128)
STAGES: Final = tl.constexpr(3)  # steps whose loads are in flight
ORDER_BLOCK: Final = tl.constexpr(32)  # pairs that `order` compares at a time
_NOWHERE: Final = tl.constexpr(2**31 - 1)  # sorts behind every bank row


@triton.jit(do_not_specialize=["n_rows"])  # or every arena size would be compiled
def order_launch(work: tl.tensor, n_rows: tl.tensor, PAIRS: tl.constexpr) -> None:
    """Fill order and begin of `work`. Any grid."""
    order_pairs(tl.program_id(0), tl.num_programs(0), work, n_rows, PAIRS)


@triton.jit(do_not_specialize=["n_rows"])
def hidden_launch(
    arena: tl.tensor,
    n_rows: tl.tensor,
    work: tl.tensor,
    activations: tl.tensor,
    hidden: tl.tensor,
    LAYOUT: tl.constexpr,
    LATENT: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    OPERAND: tl.constexpr,
) -> None:
    """Write hidden [PAIRS, WIDTH] from activations [tokens, LATENT]. Any grid."""
    hidden_rows(tl.program_id(0), tl.num_programs(0), arena, n_rows, work, activations, hidden,
                LAYOUT, LATENT, WIDTH, PAIRS, OPERAND)  # fmt: skip


@triton.jit(do_not_specialize=["n_rows"])
def output_launch(
    arena: tl.tensor,
    n_rows: tl.tensor,
    work: tl.tensor,
    hidden: tl.tensor,
    out: tl.tensor,
    LAYOUT: tl.constexpr,
    LATENT: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    OPERAND: tl.constexpr,
) -> None:
    """Write out [PAIRS, LATENT] from hidden [PAIRS, WIDTH]. Any grid."""
    output_rows(tl.program_id(0), tl.num_programs(0), arena, n_rows, work, hidden, out,
                LAYOUT, LATENT, WIDTH, PAIRS, OPERAND)  # fmt: skip


@triton.jit
def pair_count(work: tl.tensor, PAIRS: tl.constexpr) -> tl.tensor:
    """Pairs in `work`; a wrong count cannot lead outside of it."""
    return tl.minimum(tl.load(work), PAIRS)


@triton.jit
def bank_rows_of(
    work: tl.tensor, pair: tl.tensor, there: tl.tensor, n_rows: tl.tensor, PAIRS: tl.constexpr
) -> tl.tensor:
    """Bank row int32 of each pair, _NOWHERE where its row or its token is out of range."""
    row = tl.load(work + WORK_HEAD + pair, there, -1)
    token = tl.load(work + WORK_HEAD + PAIRS + pair, there, -1)
    good = (row >= 0) & (row < n_rows) & (token >= 0) & (token < tl.load(work + 1))
    return tl.where(good, row, _NOWHERE)


@triton.jit
def order_pairs(
    program: tl.tensor, programs: tl.tensor, work: tl.tensor, n_rows: tl.tensor, PAIRS: tl.constexpr
) -> None:
    """Sort by (bank row, pair): order[place] = pair, begin[place] = the first place of its row."""
    count = pair_count(work, PAIRS)
    order = work + WORK_HEAD + 2 * PAIRS
    begin = order + PAIRS
    for first in range(program * ORDER_BLOCK, count, programs * ORDER_BLOCK):
        pair = first + tl.arange(0, ORDER_BLOCK)
        row = bank_rows_of(work, pair, pair < count, n_rows, PAIRS)
        less_rows = tl.zeros([ORDER_BLOCK], tl.int32)
        place = tl.zeros([ORDER_BLOCK], tl.int32)
        for other_first in range(0, count, ORDER_BLOCK):
            other = other_first + tl.arange(0, ORDER_BLOCK)
            other_row = bank_rows_of(work, other, other < count, n_rows, PAIRS)
            less = (other_row[None, :] < row[:, None]) & (other < count)[None, :]
            tie = (other_row[None, :] == row[:, None]) & (other[None, :] < pair[:, None])
            less_rows += tl.sum(less.to(tl.int32), 1)
            place += tl.sum((less | tie).to(tl.int32), 1)
        tl.store(order + place, pair, pair < count)
        tl.store(begin + place, less_rows, pair < count)


@triton.jit
def group_at(work: tl.tensor, place: tl.tensor, PAIRS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """(pair int32 [GROUP], there bool [GROUP]) of the group that starts at `place`."""
    order = work + WORK_HEAD + 2 * PAIRS
    begin = order + PAIRS
    member = place + tl.arange(0, GROUP)
    there = tl.load(begin + member, member < pair_count(work, PAIRS), -1) == tl.load(begin + place)
    return tl.load(order + member, there, 0), there


@triton.jit
def hidden_rows(
    program: tl.tensor,
    programs: tl.tensor,
    arena: tl.tensor,
    n_rows: tl.tensor,
    work: tl.tensor,
    activations: tl.tensor,
    hidden: tl.tensor,
    LAYOUT: tl.constexpr,
    LATENT: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    OPERAND: tl.constexpr,
) -> None:
    """hidden[pair] = SiTU of the gate and up products, bf16 bits int16."""
    tiles: tl.constexpr = (WIDTH + BLOCK_OUT - 1) // BLOCK_OUT
    order = work + WORK_HEAD + 2 * PAIRS
    for item in range(program, pair_count(work, PAIRS) * tiles, programs):
        place = item // tiles
        row = bank_rows_of(work, tl.load(order + place), True, n_rows, PAIRS)
        starts = (place - tl.load(order + PAIRS + place)) % GROUP == 0
        if starts & (row < n_rows):
            pair, there = group_at(work, place, PAIRS)
            token = tl.load(work + WORK_HEAD + PAIRS + pair, there, 0)
            record = arena + row.to(tl.int64) * LAYOUT[0]
            first = (item - place * tiles) * BLOCK_OUT
            g = product(record, LAYOUT[1], LAYOUT[2], LAYOUT[3], activations, token, there, first,
                        WIDTH, LATENT, OPERAND)  # fmt: skip
            u = product(record, LAYOUT[4], LAYOUT[5], LAYOUT[6], activations, token, there, first,
                        WIDTH, LATENT, OPERAND)  # fmt: skip
            output = first + tl.arange(0, BLOCK_OUT)
            tl.store(
                hidden + pair[None, :] * WIDTH + output[:, None],
                bf16_bits(situ(g, u)),
                there[None, :] & (output < WIDTH)[:, None],
            )


@triton.jit
def output_rows(
    program: tl.tensor,
    programs: tl.tensor,
    arena: tl.tensor,
    n_rows: tl.tensor,
    work: tl.tensor,
    hidden: tl.tensor,
    out: tl.tensor,
    LAYOUT: tl.constexpr,
    LATENT: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    OPERAND: tl.constexpr,
) -> None:
    """out[pair] = the down product of hidden[pair], zeros without a record; bf16 bits int16."""
    tiles: tl.constexpr = (LATENT + BLOCK_OUT - 1) // BLOCK_OUT
    order = work + WORK_HEAD + 2 * PAIRS
    for item in range(program, pair_count(work, PAIRS) * tiles, programs):
        place = item // tiles
        if (place - tl.load(order + PAIRS + place)) % GROUP == 0:
            row = bank_rows_of(work, tl.load(order + place), True, n_rows, PAIRS)
            pair, there = group_at(work, place, PAIRS)
            first = (item - place * tiles) * BLOCK_OUT
            y = tl.zeros([BLOCK_OUT, GROUP], tl.float32)
            if row < n_rows:
                record = arena + row.to(tl.int64) * LAYOUT[0]
                y = product(record, LAYOUT[7], LAYOUT[8], LAYOUT[9], hidden, pair, there, first,
                            LATENT, WIDTH, OPERAND)  # fmt: skip
            output = first + tl.arange(0, BLOCK_OUT)
            tl.store(
                out + pair[None, :] * LATENT + output[:, None],
                bf16_bits(y),
                there[None, :] & (output < LATENT)[:, None],
            )


@triton.jit
def product(
    record: tl.tensor,
    WEIGHT: tl.constexpr,
    SCALE: tl.constexpr,
    SCALE_2: tl.constexpr,
    x: tl.tensor,
    x_rows: tl.tensor,
    x_there: tl.tensor,
    first_output: tl.tensor,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    OPERAND: tl.constexpr,
) -> tl.tensor:
    """float32 [BLOCK_OUT, GROUP]: a tile of the matrix at WEIGHT times the rows `x_rows` of x.

    x is bf16 bits [any, INPUTS], 4-byte aligned; rows that are not there count as zeros. OPERAND is
    bf16, or float32 for the interpreter, which cannot multiply bf16: both hold an operand exactly.
    """
    output = first_output + tl.arange(0, BLOCK_OUT)
    output_there = (output < OUTPUTS)[:, None]
    words = x.to(tl.pointer_type(tl.int32))  # two inputs each, the even column first
    total = tl.zeros([BLOCK_OUT, GROUP], tl.float32)
    for first in tl.range(0, INPUTS, BLOCK_IN, num_stages=STAGES):
        block = first // 16 + tl.arange(0, BLOCK_IN // 16)
        byte = first // 2 + tl.arange(0, BLOCK_IN // 2)
        block_there, byte_there = block < INPUTS // 16, byte < INPUTS // 2
        codes = tl.load(
            record + SCALE + output[:, None] * (INPUTS // 16) + block[None, :],
            output_there & block_there[None, :],
            0,
        )
        packed = tl.load(
            record + WEIGHT + output[:, None] * (INPUTS // 2) + byte[None, :],
            output_there & byte_there[None, :],
            0,
        )
        inputs = tl.load(
            words + x_rows[None, :] * (INPUTS // 2) + byte[:, None],
            x_there[None, :] & byte_there[:, None],
            0,
        )
        scales = e4m3_scales(codes)[:, :, None].broadcast_to(BLOCK_OUT, BLOCK_IN // 16, 8)
        scales = scales.reshape(BLOCK_OUT, BLOCK_IN // 2)
        # exact: a code times a scale has at most 6 significant bits, bf16 holds 8
        even, odd = (
            (e2m1_even(packed) * scales).to(OPERAND),
            (e2m1_odd(packed) * scales).to(OPERAND),
        )
        total = tl.dot(even, bf16_even(inputs, OPERAND), total)
        total = tl.dot(odd, bf16_odd(inputs, OPERAND), total)
    scale_2 = tl.load((record + SCALE_2).to(tl.pointer_type(tl.float32)))
    return total / WEIGHT_UNIT * scale_2
