"""The hot loop, on its real thread with the real fabric and kernel, in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shared.core.ring_layout import (
    HEADER_BYTES,
    Header,
    RowStatus,
    bell_offset,
    build_dispatch,
    parse_reply,
)
from shared.io import ring
from shared.io.fabric import AccessRefused, FabricError, Watch
from shared.io.fabric_shm import ShmFabric
from shared.kernels.codecs import bf16_bits
from spark_daemon.executor import BankIndex, Executor
from spark_daemon.ring_server import LeaseRings, RingServer, ServeCounters
from tests.support.fake_station import MODEL, RING, Lease, kernel, own_arena, tiny_placement

EPOCH = 9


class Slow:
    """The real kernel behind a gate, so that a test decides when a dispatch ends."""

    def __init__(self) -> None:
        self.inner = kernel()
        self.kernel_id, self.name, self.shape = self.inner.kernel_id, "slow", self.inner.shape
        self.gate = threading.Semaphore(0)  # one release lets one dispatch end
        self.entered = threading.Semaphore(0)

    def rows(self, *arrays: Any) -> None:
        self.entered.release()
        assert self.gate.acquire(timeout=10)
        self.inner.rows(*arrays)


class Bench:
    """A node's ring server and the Station's side of its rings."""

    def __init__(self, serving: Any = None) -> None:
        self.node, self.station = ShmFabric(spin_us=0), ShmFabric(spin_us=0)
        requests = self.node.register(RING.request_ring_bytes)
        replies = self.station.register(RING.reply_ring_bytes)
        arena, rows = own_arena("spark0")
        self.executor = Executor(serving or kernel(), arena, BankIndex(rows))
        self.counters = ServeCounters()
        self.reply_remote = self.node.connect(replies.descriptor)
        self.server = RingServer(
            LeaseRings(EPOCH, RING, requests, self.reply_remote),
            fabric=self.node,
            executor=self.executor,
            counters=self.counters,
            clock_ns=time.monotonic_ns,
        )
        self.lease = Lease(EPOCH, replies, RING, self.station.connect(requests.descriptor))
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.server.run()
        except FabricError as error:
            self.error = error

    def close(self) -> None:
        self.server.stop()
        if self.thread.ident is not None:
            self.thread.join(5)
            assert not self.thread.is_alive()
        self.node.close()
        self.station.close()

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something the ring thread does."""
        end = time.monotonic() + 5
        while not condition():
            assert time.monotonic() < end, "nothing happened"
            time.sleep(0.001)

    def answer(self, slot: int, generation: int) -> tuple[Header, Any, Any]:
        watch = Watch(self.lease.replies, slot, generation)
        assert self.station.wait_complete([[watch]], timeout_us=5_000_000) == 0
        frame = self.lease.read(slot, generation)
        assert isinstance(frame, ring.Frame), frame
        parsed = parse_reply(frame.header, frame.payload, RING.latent)
        assert parsed is not None
        return frame.header, parsed[1], parsed[2]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    made.thread.start()
    yield made
    made.close()


@pytest.fixture
def slow() -> Iterator[tuple[Bench, Slow]]:
    serving = Slow()
    made = Bench(serving)
    made.thread.start()
    yield made, serving
    serving.gate.release(100)
    made.close()


def work(tokens: int = 2, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    experts = [expert for layer, expert in tiny_placement().node("spark0").rows if layer == 1]
    pairs = np.array([(t, e) for t in range(tokens) for e in experts], np.uint16)
    return pairs, bf16_bits(rng.normal(0, 1, (tokens, MODEL.expert.latent)).astype(np.float32))


def test_grouping_does_not_change_a_row(bench: Bench) -> None:
    """One dispatch of many tokens, and one per token, give the same bits."""
    pairs, activations = work(tokens=4)
    bench.lease.dispatch(0, 1, 1, pairs, activations)
    _, _, together = bench.answer(0, 1)

    for token in range(4):
        mine = pairs[:, 0] == token
        alone = pairs[mine].copy()
        alone[:, 0] = 0
        bench.lease.dispatch(1, token + 1, 1, alone, activations[token : token + 1])
        assert np.array_equal(bench.answer(1, token + 1)[2], together[mine])


def test_an_empty_dispatch_is_answered(bench: Bench) -> None:
    """No pairs is a legal dispatch with a legal answer."""
    bench.lease.dispatch(0, 1, 1, np.zeros((0, 2), np.uint16), work()[1])

    header, status, rows = bench.answer(0, 1)
    assert (header.rows, len(status), rows.shape) == (0, 0, (0, RING.latent))


def test_a_slot_serves_generation_after_generation(bench: Bench) -> None:
    """Each generation of a slot is answered once, whatever the value before it."""
    pairs, activations = work()
    for generation in (1, 2, 3, 1000, 2**63):
        bench.lease.dispatch(3, generation, 1, pairs, activations, ticket=generation)
        assert bench.answer(3, generation)[0].ticket == generation
    assert bench.counters.dispatches == 5


def test_the_largest_dispatch_fits_its_reply(bench: Bench) -> None:
    """max_rows rows of max_tokens tokens."""
    rng = np.random.default_rng(1)
    pairs = np.stack(
        [rng.integers(0, RING.max_tokens, RING.max_rows), rng.integers(0, 8, RING.max_rows)], 1
    ).astype(np.uint16)
    activations = work(tokens=RING.max_tokens)[1]
    bench.lease.dispatch(0, 1, 2, pairs, activations)

    assert bench.answer(0, 1)[0].rows == RING.max_rows


def test_waiting_dispatches_are_served_in_ticket_order(slow: tuple[Bench, Slow]) -> None:
    """While one dispatch is in hand, the oldest ticket goes next, not the lowest slot."""
    bench, serving = slow
    pairs, activations = work()
    bench.lease.dispatch(3, 1, 1, pairs, activations, ticket=50)
    assert serving.entered.acquire(timeout=5)
    for slot, ticket in ((0, 9), (1, 7), (2, 8)):
        bench.lease.dispatch(slot, 1, 1, pairs, activations, ticket=ticket)
    assert bench.server.busy
    serving.gate.release(100)

    waited = {bench.answer(slot, 1)[0].ticket: bench.answer(slot, 1)[0] for slot in (0, 1, 2)}
    starts = [waited[ticket].time_us for ticket in (7, 8, 9)]
    assert starts == sorted(starts)
    bench.until(lambda: not bench.server.busy)


def test_a_slot_that_is_used_again_serves_only_the_newest(slow: tuple[Bench, Slow]) -> None:
    """The Station gave the older dispatch up; its answer would be nobody's."""
    bench, serving = slow
    pairs, activations = work()
    bench.lease.dispatch(0, 1, 1, pairs, activations, ticket=1)
    assert serving.entered.acquire(timeout=5)
    bench.lease.dispatch(1, 1, 1, pairs, activations, ticket=2)
    bench.lease.dispatch(1, 2, 1, pairs, activations, ticket=3)
    serving.gate.release(100)

    assert bench.answer(1, 2)[0].ticket == 3
    assert bench.counters.dispatches == 2


def test_a_slot_whose_bell_moved_on_is_not_answered_for_the_past(
    slow: tuple[Bench, Slow],
) -> None:
    """A verified dispatch that waits its turn is dropped when its slot is rung again, also while
    the new frame is not whole yet."""
    bench, serving = slow
    pairs, activations = work()
    bench.lease.dispatch(0, 1, 1, pairs, activations, ticket=1)
    assert serving.entered.acquire(timeout=5)
    bench.lease.dispatch(1, 1, 1, pairs, activations, ticket=3)
    bench.lease.dispatch(2, 1, 1, pairs, activations, ticket=2)
    serving.gate.release()
    assert serving.entered.acquire(timeout=5)  # ticket 2 is in hand, ticket 3 waits
    assert bench.lease.requests is not None
    bench.lease.requests.ring(bell_offset(1), 2)
    serving.gate.release(100)
    bench.until(lambda: bench.counters.corrupt_dispatches == 1 and not bench.server.busy)

    assert bench.counters.dispatches == 2
    assert not ring.bells(bench.lease.replies, RING)[1]


def test_queue_and_compute_time_are_measured(slow: tuple[Bench, Slow]) -> None:
    """The header says how long a dispatch waited in the node and how long it was computed."""
    bench, serving = slow
    pairs, activations = work()
    began = time.monotonic_ns()
    bench.lease.dispatch(0, 1, 1, pairs, activations)
    assert serving.entered.acquire(timeout=5)
    time.sleep(0.02)
    serving.gate.release(100)
    header = bench.answer(0, 1)[0]
    took_us = (time.monotonic_ns() - began) // 1000

    assert 20_000 <= header.compute_us <= took_us
    assert header.time_us + header.compute_us <= took_us
    assert header.kernel_id == serving.kernel_id


def test_a_bell_before_its_body_is_served_once_the_body_is_there(bench: Bench) -> None:
    """Case N16: the frame is refused, counted once, and served when it is whole."""
    pairs, activations = work()
    payload = build_dispatch(pairs, activations)
    header = Header(1, EPOCH, 1, 1, len(activations), len(pairs), len(payload), 0, 0, 0)
    sealed = header._replace(checksum=ring.checksum(header, payload))
    remote = bench.lease.requests
    assert remote is not None
    at = RING.slot_offset(2, RING.request_slot_bytes)
    remote.ring(bell_offset(2), 1)
    bench.until(lambda: bench.counters.corrupt_dispatches == 1)
    remote.write(at, sealed.pack())
    remote.write(at + HEADER_BYTES, payload)

    assert bench.answer(2, 1)[0].ticket == 1
    assert bench.counters.corrupt_dispatches == 1


def test_damage_is_given_up_and_the_node_sleeps_again(bench: Bench) -> None:
    """A frame that stays bad costs one count and a tenth of a second of attention; then the loop
    waits as before, and the slot's next generation is served."""
    remote = bench.lease.requests
    assert remote is not None
    remote.ring(bell_offset(1), 1)
    bench.until(lambda: bench.counters.corrupt_dispatches == 1)
    bench.until(lambda: not bench.server._suspects)
    pairs, activations = work()
    bench.lease.dispatch(1, 2, 1, pairs, activations)

    assert bench.answer(1, 2)[0].rows == len(pairs)
    assert bench.counters.corrupt_dispatches == 1
    assert int(ring.bells(bench.lease.replies, RING)[1]) == 2


def test_stopping_finishes_the_dispatch_in_hand(slow: tuple[Bench, Slow]) -> None:
    """The row in hand is answered, the next one is not begun."""
    bench, serving = slow
    pairs, activations = work()
    bench.lease.dispatch(0, 1, 1, pairs, activations, ticket=1)
    assert serving.entered.acquire(timeout=5)
    bench.lease.dispatch(1, 1, 1, pairs, activations, ticket=2)
    bench.server.stop()
    serving.gate.release(100)
    bench.thread.join(5)

    assert not bench.thread.is_alive()
    assert bench.answer(0, 1)[0].ticket == 1
    assert bench.counters.dispatches == 1


def test_an_unreachable_station_ends_the_loop_with_a_fabric_error(bench: Bench) -> None:
    """The lease is broken, not the process: the shell asks for a new lease."""
    bench.reply_remote.close()
    pairs, activations = work()
    bench.lease.dispatch(0, 1, 1, pairs, activations)
    bench.thread.join(5)

    assert isinstance(bench.error, AccessRefused)


def test_health_is_progress(slow: tuple[Bench, Slow]) -> None:
    """Stuck in a dispatch: busy and no progress. Afterwards: progress, then idle."""
    bench, serving = slow
    bench.until(lambda: not bench.server.busy)
    before = bench.counters.progress
    pairs, activations = work()
    bench.lease.dispatch(0, 1, 1, pairs, activations)
    assert serving.entered.acquire(timeout=5)
    stuck = bench.counters.progress
    assert bench.server.busy
    assert bench.counters.progress == stuck
    serving.gate.release(100)
    bench.until(lambda: not bench.server.busy)

    assert bench.counters.progress > max(before, stuck)


def test_every_pair_has_a_status_and_unknown_ones_index_nothing() -> None:
    """Case N1 at the executor: the highest ids, a layer the bank lacks, -1 and duplicates."""
    arena, rows = own_arena("spark0")
    executor = Executor(kernel(), arena, BankIndex(rows))
    mine = [expert for layer, expert in rows if layer == 1]
    _, activations = work(tokens=1)
    ids = np.array([65_535, mine[0], 2**16 - 1, mine[0], len(rows) + 50], np.uint16)
    pairs = np.stack([np.zeros(5, np.uint16), ids], 1)

    outcome = executor.run(1, pairs, activations)
    nothing = executor.run(0, pairs, activations)

    unknown = RowStatus.UNKNOWN_EXPERT.value
    assert outcome.status.tolist() == [unknown, 0, unknown, 0, unknown]
    assert outcome.refused == 3
    assert outcome.rows[1].any()
    assert np.array_equal(outcome.rows[1], outcome.rows[3])
    assert not outcome.rows[[0, 2, 4]].any()
    assert (nothing.status == unknown).all()
    assert not nothing.rows.any()


def test_a_bank_may_hold_the_last_expert_id() -> None:
    """Id 65535 is looked up like any other."""
    index = BankIndex([(3, 65_535), (3, 0), (70, 1)])

    assert index.rows(3, np.array([0, 65_535, 7], np.uint16)).tolist() == [1, 0, -1]
    assert index.rows(70, np.array([0, 1, 2], np.uint16)).tolist() == [-1, 2, -1]
    assert index.rows(4, np.array([0], np.uint16)).tolist() == [-1]


def test_broken_weights_are_a_status_not_a_row() -> None:
    """A NaN scale in one record spoils that expert only; its row is zero, never NaN."""
    arena, rows = own_arena("spark0")
    scale = MODEL.expert.width * MODEL.expert.latent // 2
    arena[0, scale] = 0x7F  # E4M3 NaN
    executor = Executor(kernel(), arena, BankIndex(rows))
    layer = rows[0][0]
    mine = [expert for at, expert in rows if at == layer]
    _, activations = work(tokens=1)
    pairs = np.array([(0, expert) for expert in mine], np.uint16)

    outcome = executor.run(layer, pairs, activations)

    assert outcome.status.tolist() == [RowStatus.NOT_FINITE.value] + [0] * (len(mine) - 1)
    assert not outcome.rows[0].any()
    assert outcome.rows[1:].any(axis=1).all()
