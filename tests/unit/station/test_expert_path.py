"""One layer's experts over a real shm fabric, with a node that the test plays."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from shared.core.errors import DeadlineExceeded, LayerFailed, NodeLost, Refused, RowCorrupt
from shared.core.ring_layout import (
    Header,
    Rows,
    RowStatus,
)
from shared.io import ring
from station.expert_path import NodeReport, Waiting
from tests.unit.station.world import (
    EPOCH,
    LAYER,
    NODE,
    RING,
    World,
    expected,
    run,
    work,
)


@pytest.fixture
def world() -> Iterator[World]:
    """A fresh world, closed afterwards."""
    made = World()
    yield made
    made.places.close()
    made.station.close()
    made.node.close()


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


def spoil(world: World, ticket_slot: int, generation: int) -> None:
    """Answer with a frame whose payload was damaged after it was sealed."""
    world.answer(ticket_slot, generation)
    offset = RING.slot_offset(ticket_slot, RING.reply_slot_bytes)
    world.reply.write(offset + 64 + 200, b"\x55\xaa")


def test_a_layer_that_is_missed_twice_is_one_miss(world: World) -> None:
    """Two dispatches of one layer to one node: the node was the culprit of one layer."""
    world.attach()
    layer = work(tokens=14)

    def miss(waiting: Waiting) -> None:
        assert len(waiting.tickets) == 2
        world.clock.us = waiting.deadline_us

    run(world.path(), layer, miss)

    assert world.reports == [NodeReport("spark0", EPOCH, missed=True)]
    assert world.places.stats[NODE].missed_layers == 1


def test_a_node_whose_frames_are_damaged_is_reported_and_can_recover(world: World) -> None:
    """Garbage is as bad as silence: membership hears of it, and of the first good answer."""
    world.attach()
    path = world.path()
    layer = work()

    rows, _ = run(path, layer, lambda waiting: spoil(world, 0, waiting.tickets[0].generation))
    assert np.array_equal(expected(world, layer), rows)
    assert layer.cold_rows > 0
    run(path, work(), lambda _: world.answer(0, 2))

    assert [report.missed for report in world.reports] == [True, False]


def test_an_empty_reply_is_refused(world: World) -> None:
    """A sealed frame without any row, of a node that is wrong or hostile."""
    world.attach()
    layer = work()

    def answer_nothing(waiting: Waiting) -> None:
        ticket = waiting.tickets[0]
        header = Header(LAYER, EPOCH, ticket.generation, ticket.number, 0, 0, 0, 0, 0,
                        world.kernel.kernel_id)  # fmt: skip
        ring.send(world.reply, RING, 0, RING.reply_slot_bytes, header, np.zeros(0, np.uint8))

    rows, _ = run(world.path(), layer, answer_nothing)

    assert np.array_equal(expected(world, layer), rows)
    assert world.places.stats[NODE].corrupt_rows > 0


def test_a_ring_full_of_lost_dispatches_is_reported(world: World) -> None:
    """A node that answers nothing any more must not stay a serving node for ever."""
    world.attach()
    path = world.path()

    def miss(waiting: Waiting) -> None:
        world.clock.us = waiting.deadline_us

    for _ in range(RING.slots):
        run(path, work(), miss)
    world.reports.clear()
    run(path, work(), miss)

    assert world.reports == [NodeReport("spark0", EPOCH, missed=True)]


def test_a_ring_full_of_work_is_no_fault(world: World) -> None:
    """While dispatches are in flight a full ring says nothing about the node."""
    world.attach()
    path = world.path()
    busy = [path.rows(work(), lambda: None) for _ in range(RING.slots)]
    for walk in busy:
        next(walk)
    layer = work()

    rows, waits = run(path, layer, lambda _: None)

    assert np.array_equal(expected(world, layer), rows)
    assert (waits, world.reports) == (0, [])
    for walk in busy:
        walk.close()


def test_a_ring_that_cannot_be_written_costs_the_node_not_the_request(world: World) -> None:
    """The policy serves its pairs, the node is reported, and no slot is lost on the way."""
    channel = world.attach()
    path = world.path()
    channel._request_ring.close()
    for _ in range(RING.slots + 1):
        layer = work()
        rows, waits = run(path, layer, lambda _: None)
        assert np.array_equal(expected(world, layer), rows)
        assert waits == 0

    assert world.reports == [NodeReport("spark0", EPOCH, missed=True)] * (RING.slots + 1)
    assert channel._slots.acquire() is not None
    with pytest.raises(NodeLost):
        run(world.path("fail"), work(), lambda _: None)


def test_a_bug_while_rows_are_taken_does_not_lose_the_other_slots(world: World) -> None:
    """An error in the middle of a collection surfaces as itself, and slots are not freed twice."""
    channel = world.attach()
    layer = work(tokens=14)

    class BugError(Exception):
        """Not of the project's tree."""

    def broken(_: object) -> None:
        raise BugError

    def answer_all(waiting: Waiting) -> None:
        for ticket in waiting.tickets:
            world.answer(ticket.slot, ticket.generation)
        channel.take = broken

    with pytest.raises(BugError):
        run(world.path(), layer, answer_all)

    del channel.take
    assert set(channel._late) == {1}, "the dispatch that was not reached is abandoned"
    channel.reap()
    assert channel._slots.acquire() is not None


def test_a_cold_store_that_cannot_read_ends_the_request_by_name(world: World) -> None:
    """The error names the node whose rows were missing and says why the last resort failed."""
    path = world.path()
    world.records.fails = 1

    with pytest.raises(NodeLost, match=r"the cold store cannot help.*check the disk") as failure:
        run(path, work(), lambda _: None)

    assert failure.value.node == "spark0"
    layer = work()
    rows, _ = run(path, layer, lambda _: None)
    assert np.array_equal(expected(world, layer), rows)


def test_a_closed_channel_keeps_no_ring_alive(world: World) -> None:
    """Late tickets point back at their channel; without the cut, ring memory waits for the GC."""
    channel = world.attach()
    walk = world.path().rows(work(), lambda: None)
    next(walk)
    walk.close()
    gc.collect()
    gc.disable()
    try:
        world.places.detach(NODE)
        gone = weakref.ref(channel)
        del channel
        del walk
        assert gone() is None
    finally:
        gc.enable()
