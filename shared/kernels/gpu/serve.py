"""One launch that serves dispatches from a ring until it is told to stop: the persistent kernel.

Theory. The rings have the layout of `shared/core/ring_layout.py` and lie in host memory that the
GPU can reach. Program 0 watches the bells, the stop word and its bound on polls, copies the header
of the slot whose turn it is into device memory and gives the turn to all programs in one word. Then
all of them copy pairs and activations to device memory, order, compute and write the reply, with a
barrier of the grid after each step; program 0 writes the reply's header and publishes the slot's
generation with a release at system scope. Nobody looks at a slot after it was copied.

Uniform. All threads of a program must take the same branch, yet each may see another value of a
word that the host is writing. So a word of the host only ever enters an atomic on device memory,
which one thread executes and all threads get the result of.

Trust. Whoever rings a bell has verified the slot (checksum, epoch, token indices) and computes the
reply's checksum: it is zero here, and so are the reply's times. Sizes are checked again because a
wrong one would lead outside of memory: such a slot ends the kernel with REFUSED.

Bounds. A wait for a bell ends after `polls_max` looks (IDLE: launch again), one for the other
programs after SPINS_MAX (LOST). The host launches at most as many programs as run at once.

    state int64   turn, arrivals, offer, next slot, layer, epoch, generation, ticket, served [64]
    control int64 [0] stop, written by the host  [1] why it ended  [2] dispatches served
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from shared.core.ring_layout import HEADER_BYTES, MAGIC, RowStatus
from shared.core.ring_layout import VERSION as RING_VERSION
from shared.kernels.gpu.kernel import WORK_HEAD, hidden_rows, order_pairs, output_rows

STATE_WORDS: Final = 8 + 64
CONTROL_WORDS: Final = 8

STOPPED: Final = tl.constexpr(1)  # the host asked for it
IDLE: Final = tl.constexpr(2)  # no bell within polls_max looks
REFUSED: Final = tl.constexpr(3)  # a slot's sizes do not fit the ring
LOST: Final = tl.constexpr(4)  # another program did not arrive

_TURN: Final = tl.constexpr(0)
_ARRIVALS: Final = tl.constexpr(1)
_OFFER: Final = tl.constexpr(2)
_NEXT: Final = tl.constexpr(3)
_LAYER: Final = tl.constexpr(4)
_EPOCH: Final = tl.constexpr(5)
_GENERATION: Final = tl.constexpr(6)
_TICKET: Final = tl.constexpr(7)
_SERVED: Final = tl.constexpr(8)

_SLOTS_MAX: Final = tl.constexpr(64)
_END: Final = tl.constexpr(2**62)  # a turn from here on is the end, and says why
_BARRIERS: Final = tl.constexpr(5)  # of one dispatch
_SPINS_MAX: Final = tl.constexpr(2**28)  # minutes; the other programs need microseconds
_HEADER: Final = tl.constexpr(HEADER_BYTES)
_MAGIC: Final = tl.constexpr(MAGIC)
_RING_VERSION: Final = tl.constexpr(RING_VERSION)
_PAIR_BLOCK: Final = tl.constexpr(64)
_WORD_BLOCK: Final = tl.constexpr(1024)
_UNKNOWN_EXPERT: Final = tl.constexpr(RowStatus.UNKNOWN_EXPERT.value)
_NOT_FINITE: Final = tl.constexpr(RowStatus.NOT_FINITE.value)
_EXPONENT: Final = tl.constexpr(0x7F80)


@triton.jit(do_not_specialize=["n_rows", "polls_max", "kernel_id"])
def serve_launch(
    requests: tl.tensor,
    replies: tl.tensor,
    control: tl.tensor,
    polls_max: tl.tensor,
    arena: tl.tensor,
    n_rows: tl.tensor,
    table: tl.tensor,
    state: tl.tensor,
    work: tl.tensor,
    echo: tl.tensor,
    activations: tl.tensor,
    hidden: tl.tensor,
    out: tl.tensor,
    kernel_id: tl.tensor,
    LAYOUT: tl.constexpr,
    LATENT: tl.constexpr,
    WIDTH: tl.constexpr,
    OPERAND: tl.constexpr,
    RING: tl.constexpr,
    TABLE: tl.constexpr,
    PAIRS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    PTX: tl.constexpr,
) -> None:
    """Serve until the end.

    RING = (slots, bytes of the bells, of a request slot, of a reply slot, tokens, rows of a slot).
    TABLE = (layers, experts) of `table` int32: the bank row of each, -1 elsewhere. PTX: on a GPU.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    served = tl.zeros([], tl.int64)
    turn = await_turn(program, requests, control, state, work, served, polls_max, RING, LATENT, PTX)
    while turn < _END:
        slot = turn % _SLOTS_MAX
        request = requests + RING[1] + slot * RING[2] + _HEADER
        reply = replies + RING[1] + slot * RING[3]
        arrivals = served * _BARRIERS * programs
        take_dispatch(program, programs, request, table, state, work, echo, activations,
                      TABLE, LATENT, PAIRS)  # fmt: skip
        whole = barrier(state, arrivals + programs)
        order_pairs(program, programs, work, n_rows, PAIRS)
        whole &= barrier(state, arrivals + 2 * programs)
        hidden_rows(program, programs, arena, n_rows, work, activations, hidden,
                    LAYOUT, LATENT, WIDTH, PAIRS, OPERAND)  # fmt: skip
        whole &= barrier(state, arrivals + 3 * programs)
        output_rows(program, programs, arena, n_rows, work, hidden, out,
                    LAYOUT, LATENT, WIDTH, PAIRS, OPERAND)  # fmt: skip
        whole &= barrier(state, arrivals + 4 * programs)
        write_rows(program, programs, reply + _HEADER, work, echo, out, LATENT, PAIRS, ROW_BLOCK)
        whole &= barrier(state, arrivals + 5 * programs)
        served += 1
        if whole:
            if program == 0:
                write_header(reply, state, work, kernel_id, LATENT)
                tl.debug_barrier()
                publish(replies + slot * 8, tl.load(state + _GENERATION), PTX)
            turn = await_turn(
                program, requests, control, state, work, served, polls_max, RING, LATENT, PTX
            )
        else:
            turn = tl.full([], _END + LOST, tl.int64)
    if program == 0:
        tl.store(control + 2, served)
        tl.debug_barrier()
        publish((control + 1).to(tl.pointer_type(tl.uint8)), turn - _END, PTX)


@triton.jit
def await_turn(
    program: tl.tensor,
    requests: tl.tensor,
    control: tl.tensor,
    state: tl.tensor,
    work: tl.tensor,
    served: tl.tensor,
    polls_max: tl.tensor,
    RING: tl.constexpr,
    LATENT: tl.constexpr,
    PTX: tl.constexpr,
) -> tl.tensor:
    """(served + 1) x 64 + slot of the next dispatch, or _END + reason; the same in all programs.

    After it, the dispatch's header lies in `state` and `work`.
    """
    last = (served + 1) * _SLOTS_MAX - 1
    polls = tl.zeros([], tl.int64)
    turn = tl.atomic_add(state + _TURN, 0, sem="acquire", scope="gpu")
    while turn <= last:
        if program == 0:
            seen = look(requests, control, state, last, polls < polls_max, RING)
            tl.atomic_xchg(state + _OFFER, seen, sem="relaxed", scope="gpu")
            offer = tl.atomic_add(state + _OFFER, 0, sem="relaxed", scope="gpu")
            if (offer > 0) & (offer < _END):
                slot = offer % _SLOTS_MAX
                copy_header(requests, slot, state, work, RING, PTX)
                tl.debug_barrier()
                if not header_fits(requests, slot, state, work, RING, LATENT):
                    offer = tl.full([], _END + REFUSED, tl.int64)
            tl.debug_barrier()
            tl.atomic_max(state + _TURN, offer, sem="release", scope="gpu")
        turn = tl.atomic_add(state + _TURN, 0, sem="acquire", scope="gpu")
        polls += 1
    tl.debug_barrier()
    return turn


@triton.jit
def look(
    requests: tl.tensor,
    control: tl.tensor,
    state: tl.tensor,
    last: tl.tensor,
    patient: tl.tensor,
    RING: tl.constexpr,
) -> tl.tensor:
    """What this thread would offer now: a turn, an end, or 0. Threads may disagree."""
    index = tl.arange(0, _SLOTS_MAX)
    bells = requests.to(tl.pointer_type(tl.int64))
    rung = tl.load(bells + index, index < RING[0], 0, volatile=True)
    fresh = rung > tl.load(state + _SERVED + index, index < RING[0], 0)
    first = tl.load(state + _NEXT).to(tl.int32)
    distance = tl.min(tl.where(fresh, (index + RING[0] - first) % RING[0], RING[0]), 0)
    offer = tl.where(distance < RING[0], last + 1 + (first + distance) % RING[0], 0)
    offer = tl.where(patient | (offer > 0), offer, _END + IDLE)
    return tl.where(tl.load(control, volatile=True) != 0, _END + STOPPED, offer)


@triton.jit
def copy_header(
    requests: tl.tensor,
    slot: tl.tensor,
    state: tl.tensor,
    work: tl.tensor,
    RING: tl.constexpr,
    PTX: tl.constexpr,
) -> None:
    """Take the bell, then the header behind it, into device memory."""
    generation = observe(requests + slot * 8, PTX)
    header = requests + RING[1] + slot * RING[2]
    halves, words = header.to(tl.pointer_type(tl.uint16)), header.to(tl.pointer_type(tl.int32))
    longs = header.to(tl.pointer_type(tl.int64))
    tl.store(state + _LAYER, tl.load(halves + 3).to(tl.int64))
    tl.store(state + _EPOCH, tl.load(longs + 1))
    tl.store(state + _GENERATION, generation)
    tl.store(state + _TICKET, tl.load(longs + 3))
    tl.store(work, tl.load(words + 9))
    tl.store(work + 1, tl.load(words + 8))
    tl.store(work + 2, tl.load(words))
    tl.store(work + 3, tl.load(halves + 2).to(tl.int32))
    tl.store(work + 4, tl.load(words + 10))
    tl.store(state + _SERVED + slot, generation)
    tl.store(state + _NEXT, (slot + 1) % RING[0])


@triton.jit
def header_fits(
    requests: tl.tensor,
    slot: tl.tensor,
    state: tl.tensor,
    work: tl.tensor,
    RING: tl.constexpr,
    LATENT: tl.constexpr,
) -> tl.tensor:
    """Whether the copied header is ours and its sizes fit the ring and each other."""
    rows, tokens = tl.load(work), tl.load(work + 1)
    ours = (tl.load(work + 2) == _MAGIC) & (tl.load(work + 3) == _RING_VERSION)
    inside = (rows >= 0) & (rows <= RING[5]) & (tokens >= 0) & (tokens <= RING[4])
    return ours & inside & (tl.load(work + 4) == aligned(rows * 4) + tokens * (LATENT * 2))


@triton.jit
def take_dispatch(
    program: tl.tensor,
    programs: tl.tensor,
    payload: tl.tensor,
    table: tl.tensor,
    state: tl.tensor,
    work: tl.tensor,
    echo: tl.tensor,
    activations: tl.tensor,
    TABLE: tl.constexpr,
    LATENT: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Copy pairs and activations out of the slot; experts become bank rows."""
    rows, tokens = tl.load(work), tl.load(work + 1)
    layer = tl.load(state + _LAYER)
    pairs = payload.to(tl.pointer_type(tl.int32))
    for first in range(program * _PAIR_BLOCK, rows, programs * _PAIR_BLOCK):
        pair = first + tl.arange(0, _PAIR_BLOCK)
        word = tl.load(pairs + pair, pair < rows, 0)
        token, expert = word & 0xFFFF, (word >> 16) & 0xFFFF
        known = (pair < rows) & (layer < TABLE[0]) & (expert < TABLE[1])
        bank_row = tl.load(table + layer * TABLE[1] + expert, known, -1)
        tl.store(echo + pair, word, pair < rows)
        tl.store(work + WORK_HEAD + pair, bank_row, pair < rows)
        tl.store(work + WORK_HEAD + PAIRS + pair, token, pair < rows)
    words = (payload + tl.multiple_of(aligned(rows * 4), 16)).to(tl.pointer_type(tl.int32))
    copies = activations.to(tl.pointer_type(tl.int32))
    total = tokens * (LATENT // 2)
    for first in range(program * _WORD_BLOCK, total, programs * _WORD_BLOCK):
        index = first + tl.arange(0, _WORD_BLOCK)
        tl.store(copies + index, tl.load(words + index, index < total, 0), index < total)


@triton.jit
def write_rows(
    program: tl.tensor,
    programs: tl.tensor,
    payload: tl.tensor,
    work: tl.tensor,
    echo: tl.tensor,
    out: tl.tensor,
    LATENT: tl.constexpr,
    PAIRS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
) -> None:
    """The reply's pairs, status bytes and rows; a row that is not finite is zeros and says so."""
    rows = tl.load(work)
    pairs = payload.to(tl.pointer_type(tl.int32))
    status = payload + aligned(rows * 4)
    values = payload + tl.multiple_of(aligned(rows * 4) + aligned(rows), 16)
    column = tl.arange(0, ROW_BLOCK)
    for row in range(program, rows, programs):
        bits = tl.load(out + row * LATENT + column, column < LATENT, 0)
        broken = tl.max(((bits & _EXPONENT) == _EXPONENT).to(tl.int32), 0)
        unknown = tl.load(work + WORK_HEAD + row) < 0
        said = tl.where(unknown, _UNKNOWN_EXPERT, broken * _NOT_FINITE)
        tl.store(
            values.to(tl.pointer_type(tl.int16)) + row * LATENT + column,
            tl.where(broken > 0, 0, bits).to(tl.int16),
            column < LATENT,
        )
        tl.store(pairs + row, tl.load(echo + row))
        tl.store(status + row, said.to(tl.uint8))
    if program == 0:
        pad = rows + tl.arange(0, 16)
        tl.store(pairs + pad, tl.zeros([16], tl.int32), pad < aligned(rows * 4) // 4)
        tl.store(status + pad, tl.zeros([16], tl.uint8), pad < aligned(rows))


@triton.jit
def write_header(
    header: tl.tensor,
    state: tl.tensor,
    work: tl.tensor,
    kernel_id: tl.tensor,
    LATENT: tl.constexpr,
) -> None:
    """The reply's 64 bytes; times and checksum are the host's to fill in."""
    halves, words = header.to(tl.pointer_type(tl.int16)), header.to(tl.pointer_type(tl.int32))
    longs = header.to(tl.pointer_type(tl.int64))
    rows = tl.load(work)
    tl.store(words, tl.full([], _MAGIC, tl.int32))
    tl.store(halves + 2, tl.full([], _RING_VERSION, tl.int16))
    tl.store(halves + 3, tl.load(state + _LAYER).to(tl.int16))
    tl.store(longs + 1, tl.load(state + _EPOCH))
    tl.store(longs + 2, tl.load(state + _GENERATION))
    tl.store(longs + 3, tl.load(state + _TICKET))
    tl.store(words + 8, tl.load(work + 1))
    tl.store(words + 9, rows)
    tl.store(words + 10, aligned(rows * 4) + aligned(rows) + rows * (LATENT * 2))
    tl.store(words + 11, tl.full([], 0, tl.int32))
    tl.store(words + 12, tl.full([], 0, tl.int32))
    tl.store(words + 13, kernel_id.to(tl.int32))
    tl.store(longs + 7, tl.full([], 0, tl.int64))


@triton.jit
def aligned(length: tl.tensor) -> tl.tensor:
    """The next multiple of 16."""
    return (length + 15) // 16 * 16


@triton.jit
def barrier(state: tl.tensor, arrivals: tl.tensor) -> tl.tensor:
    """Wait until the grid has arrived `arrivals` times in all; False when that took too long."""
    tl.debug_barrier()
    arrived = tl.atomic_add(state + _ARRIVALS, 1, sem="acq_rel", scope="gpu") + 1
    spins = tl.zeros([], tl.int64)
    while (arrived < arrivals) & (spins < _SPINS_MAX):
        arrived = tl.atomic_add(state + _ARRIVALS, 0, sem="acquire", scope="gpu")
        spins += 1
    tl.debug_barrier()
    return arrived >= arrivals


@triton.jit
def observe(word: tl.tensor, PTX: tl.constexpr) -> tl.tensor:
    """int64 at `word`, loaded with acquire at system scope: what was written before it is seen."""
    longs = word.to(tl.pointer_type(tl.int64))
    if PTX:
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b64 $0, [$1];",
            "=l,l",
            [longs],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    else:  # noqa: RET505 - Triton compiles only the branch of a constant if it has an else
        return tl.load(longs)


@triton.jit
def publish(word: tl.tensor, value: tl.tensor, PTX: tl.constexpr) -> None:
    """Store int64 at `word` with release at system scope, by one thread: all before it is seen."""
    longs = word.to(tl.pointer_type(tl.int64))
    if PTX:
        # not atomic_xchg: over PCIe, host memory may know no atomics
        tl.inline_asm_elementwise(
            "{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x; "
            "setp.eq.u32 first, thread, 0; @first st.release.sys.global.b64 [$1], $2; "
            "mov.b32 $0, 0; }",
            "=r,l,l",
            [longs, value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(longs, value)
