"""One layer's experts over a real shm fabric, with a node that the test plays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from shared.core.errors import DeadlineExceeded, LayerFailed, NodeLost, Refused, RowCorrupt
from shared.core.placement import Placement, balanced
from shared.core.record import RecordLayout
from shared.core.ring_layout import (
    Header,
    RingShape,
    Rows,
    RowStatus,
    build_reply,
    parse_dispatch,
    reply_bytes,
)
from shared.core.shape import ExpertShape, ModelShape
from shared.io import ring
from shared.io.fabric_shm import ShmFabric
from shared.kernels import codecs
from shared.kernels.expert import ExpertKernel, select_kernel
from station.channel import NodeChannel
from station.deadline import DeadlinePolicy
from station.expert_path import ExpertPath, LayerWork, NodeReport, OnMiss, Waiting
from station.faults import NoFaults
from station.ledger import WorkKey
from station.local_experts import ColdStore, LocalTier
from station.places import Places

SHAPE = ModelShape(
    layers=2, first_moe_layer=1, experts=12, top_k=4, expert=ExpertShape(latent=32, width=16)
)
RING = RingShape(slots=2, max_tokens=8, max_rows=32, latent=32)
LAYER, EPOCH = 1, 7
NODE = 1  # place of the node the test plays; place 0 is the Station's own


class Records:
    """A checkpoint of random experts."""

    def __init__(self) -> None:
        self.layout = RecordLayout(SHAPE.expert)
        rng = np.random.default_rng(5)
        self.records = [self._record(rng) for _ in range(SHAPE.experts)]

    def _record(self, rng: np.random.Generator) -> bytes:
        data = np.zeros(self.layout.record_bytes, np.uint8)
        for matrix, shape in (("w1", (16, 32)), ("w3", (16, 32)), ("w2", (32, 16))):
            weight = rng.normal(size=shape).astype(np.float32)
            scale_2 = codecs.nvfp4_scale_2(weight)
            packed, scale = codecs.nvfp4_encode(weight, scale_2)
            parts = {
                f"{matrix}.weight": packed,
                f"{matrix}.weight_scale": scale,
                f"{matrix}.weight_scale_2": np.array([scale_2], np.float32),
                f"{matrix}.input_scale": np.ones(1, np.float32),
            }
            for tensor in self.layout.fields:
                if tensor.name in parts:
                    raw = np.ascontiguousarray(parts[tensor.name]).view(np.uint8).reshape(-1)
                    data[tensor.offset : tensor.offset + tensor.length] = raw
        return data.tobytes()

    def expert_record(self, layer: int, expert: int) -> bytes:
        """The record of an expert; the test's model has one MoE layer."""
        assert layer == LAYER
        return self.records[expert]


@dataclass
class Clock:
    """Time that moves when the test says so."""

    us: int = 1_000

    def now_us(self) -> int:
        """Current microsecond."""
        return self.us


@dataclass
class World:
    """A Station and a node that share one process and real memory."""

    records: Records = field(default_factory=Records)
    clock: Clock = field(default_factory=Clock)
    reports: list[NodeReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.placement: Placement = balanced(
            "m", SHAPE, [("hbm", "hbm", 1.0), ("spark0", "spark", 2.0)]
        )
        self.kernel: ExpertKernel = select_kernel(SHAPE.expert, "auto")
        self.station, self.node = ShmFabric(spin_us=0), ShmFabric(spin_us=0)
        self.places = Places(
            self.placement,
            {0: LocalTier(self.kernel, SHAPE.expert, self.records, self.placement.nodes[0].rows)},
        )
        self.everything = LocalTier(
            self.kernel, SHAPE.expert, self.records, [(LAYER, e) for e in range(SHAPE.experts)]
        )

    def attach(self) -> NodeChannel:
        """Grant the node a lease."""
        self.request_ring = self.node.register(RING.request_ring_bytes)
        reply_ring = self.station.register(RING.reply_ring_bytes)
        self.reply = self.node.connect(reply_ring.descriptor)
        channel = NodeChannel(
            node="spark0",
            place=NODE,
            epoch=EPOCH,
            shape=RING,
            request_ring=self.station.connect(self.request_ring.descriptor),
            reply_ring=reply_ring,
            kernel_id=self.kernel.kernel_id,
            stats=self.places.stats[NODE],
            now_us=self.clock.now_us,
            pause=lambda: None,
        )
        self.places.attach(channel)
        return channel

    def path(self, on_miss: OnMiss = "exact") -> ExpertPath:
        """An expert path over this world."""
        return ExpertPath(
            places=self.places,
            cold_store=ColdStore(self.kernel, SHAPE.expert, self.records, capacity=3),
            on_miss=on_miss,
            deadline=DeadlinePolicy(),
            now_us=self.clock.now_us,
            report=self.reports.append,
            faults=NoFaults(),
        )

    def answer(
        self,
        slot: int,
        generation: int = 1,
        *,
        change: Callable[[Header, np.ndarray, np.ndarray, Rows], Header] | None = None,
    ) -> None:
        """Do a node's work for the dispatch in `slot`; `change` may spoil the answer in place."""
        frame = ring.receive(
            self.request_ring,
            RING,
            slot,
            RING.request_slot_bytes,
            epoch=EPOCH,
            generation=generation,
        )
        assert isinstance(frame, ring.Frame)
        parsed = parse_dispatch(frame.header, frame.payload, RING.latent)
        assert parsed is not None
        pairs, activations = parsed[0].copy(), parsed[1]
        rows = self.everything.rows(
            LAYER, pairs[:, 1].astype(np.int64), pairs[:, 0].astype(np.int64), activations
        )
        status = np.zeros(len(rows), np.uint8)
        header = frame.header._replace(
            payload_bytes=reply_bytes(len(rows), RING.latent),
            time_us=3,
            compute_us=5,
            kernel_id=self.kernel.kernel_id,
        )
        if change is not None:
            header = change(header, pairs, status, rows)
        payload = build_reply(pairs, status, rows)
        ring.send(self.reply, RING, slot, RING.reply_slot_bytes, header, payload)


@pytest.fixture
def world() -> Iterator[World]:
    """A fresh world, closed afterwards."""
    made = World()
    yield made
    made.places.close()
    made.station.close()
    made.node.close()


def work(tokens: int = 3) -> LayerWork:
    """A layer in which every token touches both places."""
    rng = np.random.default_rng(tokens)
    ids = np.stack([rng.permutation(SHAPE.experts)[: SHAPE.top_k] for _ in range(tokens)])
    activations = codecs.bf16_bits(rng.normal(size=(tokens, 32)).astype(np.float32))
    return LayerWork(WorkKey("r", 0, LAYER), ids.astype(np.int64), activations)


def expected(world: World, layer: LayerWork) -> Rows:
    """All rows computed in one place."""
    tokens = np.repeat(np.arange(len(layer.ids)), SHAPE.top_k)
    return world.everything.rows(LAYER, layer.ids.reshape(-1), tokens, layer.activations)


def run(
    path: ExpertPath, layer: LayerWork, when_waiting: Callable[[Waiting], None]
) -> tuple[Rows, int]:
    """Drive the generator; `when_waiting` acts at each wait. Returns rows and waits."""
    walk = path.rows(layer, lambda: None)
    waits = 0
    while True:
        try:
            waiting = next(walk)
        except StopIteration as stop:
            return stop.value, waits
        waits += 1
        when_waiting(waiting)


def test_rows_are_those_of_one_place(world: World) -> None:
    """Splitting over the Station and a node changes no bit, and nothing is cold."""
    world.attach()
    layer = work()

    rows, waits = run(world.path(), layer, lambda _: world.answer(0))

    assert np.array_equal(expected(world, layer), rows)
    assert (waits, layer.cold_rows) == (1, 0)
    stats = world.places.stats
    assert stats[0].rows + stats[NODE].rows == layer.ids.size
    assert stats[NODE].hop.p50_us is not None


def test_a_node_that_never_joined_is_served_by_the_cold_store(world: World) -> None:
    """Case L14: exact, and the rows say where they came from."""
    layer = work()

    rows, waits = run(world.path(), layer, lambda _: None)

    assert np.array_equal(expected(world, layer), rows)
    assert waits == 0
    assert layer.cold_rows == world.places.stats[NODE].cold_rows > 0


def test_a_node_lost_while_rows_are_in_flight(world: World) -> None:
    """Case L1: the lease is fenced, the layer is completed exactly."""
    world.attach()
    layer = work()

    rows, _ = run(world.path(), layer, lambda _: world.places.detach(NODE))

    assert np.array_equal(expected(world, layer), rows)
    assert layer.cold_rows > 0


def test_a_late_node_costs_time_and_its_rows_become_duplicates(world: World) -> None:
    """The deadline passes, the cold store answers, the late reply is counted and dropped."""
    channel = world.attach()
    layer = work()

    def wait(waiting: Waiting) -> None:
        world.clock.us = waiting.deadline_us

    rows, _ = run(world.path(), layer, wait)
    world.answer(0)
    channel.reap()

    assert np.array_equal(expected(world, layer), rows)
    assert world.reports == [NodeReport("spark0", EPOCH, missed=True)]
    stats = world.places.stats[NODE]
    assert stats.duplicate_rows == stats.cold_rows == layer.cold_rows > 0
    assert stats.missed_layers == 1


def test_an_answer_after_a_miss_is_reported(world: World) -> None:
    """Membership hears that a doubted node serves again."""
    world.attach()
    path = world.path()

    def miss(waiting: Waiting) -> None:
        world.clock.us = waiting.deadline_us

    run(path, work(), miss)
    run(path, work(), lambda _: world.answer(1))

    assert [report.missed for report in world.reports] == [True, False]


def nan_row(header: Header, _: np.ndarray, __: np.ndarray, rows: Rows) -> Header:
    """The node's memory is bad: a NaN that it does not notice."""
    rows[1, 3] = 0x7FC0
    return header


def infinite_row(header: Header, _: np.ndarray, __: np.ndarray, rows: Rows) -> Header:
    """An infinity that the node does not notice."""
    rows[0, 0] = 0x7F80
    return header


def swapped_pairs(header: Header, pairs: np.ndarray, _: np.ndarray, __: Rows) -> Header:
    """A reply to other pairs."""
    pairs[:] = pairs[::-1].copy()
    return header


def other_ticket(header: Header, _: np.ndarray, __: np.ndarray, ___: Rows) -> Header:
    """A reply to another dispatch."""
    return header._replace(ticket=header.ticket + 1)


def old_epoch(header: Header, _: np.ndarray, __: np.ndarray, ___: Rows) -> Header:
    """A reply of an earlier lease."""
    return header._replace(epoch=EPOCH - 1)


def other_kernel(header: Header, _: np.ndarray, __: np.ndarray, ___: Rows) -> Header:
    """Rows of a kernel whose bits differ."""
    return header._replace(kernel_id=header.kernel_id ^ 1)


def unknown_expert(header: Header, _: np.ndarray, status: np.ndarray, rows: Rows) -> Header:
    """The node says that it does not hold an expert."""
    status[0] = RowStatus.UNKNOWN_EXPERT.value
    rows[0] = 0
    return header


@pytest.mark.parametrize(
    ("change", "counter"),
    [
        (nan_row, "corrupt_rows"),
        (infinite_row, "corrupt_rows"),
        (swapped_pairs, "corrupt_rows"),
        (other_ticket, "stale_rows"),
        (old_epoch, "stale_rows"),
        (other_kernel, "stale_rows"),
        (unknown_expert, "refused_rows"),
    ],
)
def test_what_is_not_proved_is_not_used(
    world: World, change: Callable[[Header, np.ndarray, np.ndarray, Rows], Header], counter: str
) -> None:
    """Every wrong answer is refused, counted, and computed again from the cold store."""
    world.attach()
    layer = work()

    rows, _ = run(world.path(), layer, lambda _: world.answer(0, change=change))

    assert np.array_equal(expected(world, layer), rows)
    assert getattr(world.places.stats[NODE], counter) > 0
    assert layer.cold_rows > 0


def test_a_torn_reply_is_read_again(world: World) -> None:
    """Case N16: a bell before its body makes the Station look again, not believe."""
    channel = world.attach()
    layer = work()
    looks: list[int] = []

    def finish_the_write() -> None:
        looks.append(1)
        if len(looks) == 2:
            world.answer(0)

    channel._pause = finish_the_write

    def ring_too_early(_: Waiting) -> None:
        world.reply.ring(0, 1)

    rows, _ = run(world.path(), layer, ring_too_early)

    assert np.array_equal(expected(world, layer), rows)
    assert (len(looks), layer.cold_rows) == (2, 0)


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda world, waiting: world.places.detach(NODE), NodeLost),
        (
            lambda world, waiting: setattr(world.clock, "us", waiting.deadline_us),
            DeadlineExceeded,
        ),
        (lambda world, waiting: world.answer(0, change=nan_row), RowCorrupt),
        (lambda world, waiting: world.answer(0, change=unknown_expert), Refused),
    ],
)
def test_fail_names_the_culprit(
    world: World, act: Callable[[World, Waiting], None], error: type[LayerFailed]
) -> None:
    """on_miss = fail: one typed error with node, layer, experts and microseconds."""
    world.attach()
    layer = work()

    with pytest.raises(error) as failure:
        run(world.path("fail"), layer, lambda waiting: act(world, waiting))

    assert (failure.value.node, failure.value.layer) == ("spark0", LAYER)
    held = {expert for _, expert in world.placement.nodes[NODE].rows}
    assert set(failure.value.experts) <= held
    assert failure.value.experts
    assert failure.value.elapsed_us >= 0


def test_a_full_ring_is_a_miss_not_a_wait(world: World) -> None:
    """When a node is so far behind that no slot is free, its rows come from the cold store."""
    world.attach()
    path = world.path()

    def miss(waiting: Waiting) -> None:
        world.clock.us = waiting.deadline_us

    for _ in range(RING.slots):
        run(path, work(), miss)
    layer = work()
    rows, waits = run(path, layer, miss)

    assert np.array_equal(expected(world, layer), rows)
    assert waits == 0


def test_a_cancelled_layer_gives_its_slots_back(world: World) -> None:
    """Closing the generator abandons the dispatch; its late reply frees the slot."""
    channel = world.attach()
    path = world.path()
    for generation in range(1, 6):
        walk = path.rows(work(), lambda: None)
        next(walk)
        walk.close()
        world.answer(0, generation)
        channel.reap()

    layer = work()
    rows, _ = run(path, layer, lambda _: world.answer(0, 6))

    assert np.array_equal(expected(world, layer), rows)
    assert layer.cold_rows == 0


def test_a_long_prefill_is_cut_into_dispatches(world: World) -> None:
    """More tokens than a slot holds travel in several tickets, and come back whole."""
    world.attach()
    layer = work(tokens=14)

    def answer_all(waiting: Waiting) -> None:
        for ticket in waiting.tickets:
            world.answer(ticket.slot, ticket.generation)

    rows, waits = run(world.path(), layer, answer_all)

    assert np.array_equal(expected(world, layer), rows)
    assert waits == 1
    assert world.places.stats[NODE].dispatches == 2
