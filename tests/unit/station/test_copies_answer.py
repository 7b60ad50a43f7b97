"""A layer whose experts have copies, over real shared memory, with nodes that the test plays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import pytest

from shared.core.errors import NodeLost
from shared.core.placement import ExpertKey, Placement, balanced, check
from station.channel import NodeChannel, Ticket
from station.expert_path import NodeReport, Waiting
from tests.unit.station.test_expert_path import infinite_row, nan_row, swapped_pairs, unknown_expert
from tests.unit.station.world import EPOCH, SHAPE, World, expected, run, work

HBM, FIRST, SECOND, THIRD = range(4)  # places
Act = Callable[["Pod", Waiting], None]


def placed(*copies: tuple[int, int], costs: Sequence[float] = (0.0,) * 4) -> Placement:
    """The Station's tier and three Sparks with three experts each; `copies` are (from, to)."""
    nodes = balanced(
        "m",
        SHAPE,
        [("hbm", "hbm", 1.0), *((f"spark{i}", "spark", 1.0) for i in range(3))],
    )
    held: list[tuple[ExpertKey, ...]] = [()] * 4
    for source, target in copies:
        held[target] += nodes.nodes[source].rows
    placement = msgspec.structs.replace(
        nodes,
        nodes=tuple(
            msgspec.structs.replace(node, copies=held[place], per_expert_us=costs[place])
            for place, node in enumerate(nodes.nodes)
        ),
    )
    check(placement)
    return placement


class Pod(World):
    """A world with three nodes, each with its own rings."""

    def __init__(self, placement: Placement) -> None:
        super().__init__(placement=placement)
        self._rings: dict[int, tuple[object, object]] = {}

    def join(self, *places: int) -> list[NodeChannel]:
        """Grant these nodes a lease."""
        channels = []
        for place in places:
            channels.append(self.attach(place=place))
            self._rings[place] = (self.request_ring, self.reply)
        return channels

    def reply_to(self, ticket: Ticket, change: object = None) -> None:
        """The node of a ticket does its work, or spoils it."""
        self.request_ring, self.reply = self._rings[ticket.channel.place]
        self.answer(ticket.slot, ticket.generation, change=change)

    def answer_all(self, waiting: Waiting, *, but: int | None = None) -> list[Ticket]:
        """Every node answers, but one; the tickets that it owes."""
        for ticket in waiting.tickets:
            if ticket.channel.place != but:
                self.reply_to(ticket)
        return [ticket for ticket in waiting.tickets if ticket.channel.place == but]

    def rows(self) -> list[tuple[int, int, int]]:
        """(rows, copy rows, cold rows) of every place."""
        return [(each.rows, each.copy_rows, each.cold_rows) for each in self.places.stats]


@pytest.fixture
def pod() -> Iterator[Callable[[Placement], Pod]]:
    """Makes pods, closed afterwards."""
    made: list[Pod] = []

    def make(placement: Placement) -> Pod:
        made.append(Pod(placement))
        return made[-1]

    yield make
    for each in made:
        each.places.close()
        each.station.close()
        each.node.close()


Make = Callable[[Placement], Pod]


def owed(world: Pod, layer_ids: np.ndarray, place: int) -> int:
    """Pairs of a layer whose experts live at a place."""
    return int(
        np.isin(layer_ids, [expert for _, expert in world.placement.nodes[place].rows]).sum()
    )


def dies(world: Pod, waiting: Waiting) -> None:
    """The first Spark is lost while its rows are in flight; the others answer."""
    if world.answer_all(waiting, but=FIRST):
        world.places.detach(FIRST)


def is_late(world: Pod, waiting: Waiting) -> None:
    """The first Spark does not answer in time."""
    if world.answer_all(waiting, but=FIRST):
        world.clock.us = waiting.deadline_us


def sends(change: object) -> Act:
    """The first Spark's reply is spoilt."""

    def act(world: Pod, waiting: Waiting) -> None:
        for ticket in world.answer_all(waiting, but=FIRST):
            world.reply_to(ticket, change)

    return act


@pytest.mark.parametrize("on_miss", ["exact", "fail"])
@pytest.mark.parametrize(
    "act", [dies, is_late, sends(nan_row), sends(swapped_pairs), sends(unknown_expert)]
)
@pytest.mark.parametrize("tokens", [3, 20])
def test_a_copy_answers_what_the_home_does_not(
    pod: Make, act: Act, on_miss: str, tokens: int
) -> None:
    """Case L14, replica first: lost, late, damaged or refused, the rows are exact and none is cold,
    under either policy; a miss is not a failure while a copy answers."""
    world = pod(placed((FIRST, SECOND)))
    world.join(FIRST, SECOND, THIRD)
    layer = work(tokens)

    rows, waits = run(world.path(on_miss), layer, lambda waiting: act(world, waiting))

    assert np.array_equal(expected(world, layer), rows)
    assert (waits, layer.cold_rows) == (2, 0)
    stats = world.places.stats
    assert sum(each.rows for each in stats) == layer.ids.size
    assert 0 < stats[SECOND].copy_rows == owed(world, layer.ids, FIRST) - stats[FIRST].rows
    assert [each.copy_rows for each in stats] == [0, 0, stats[SECOND].copy_rows, 0]


def test_the_late_row_of_the_home_is_a_duplicate(pod: Make) -> None:
    """The copy's row counts, the home's is dropped when it comes, and only the home is blamed."""
    world = pod(placed((FIRST, SECOND)))
    home, _, _ = world.join(FIRST, SECOND, THIRD)
    layer = work()
    late: list[Ticket] = []

    def act(waiting: Waiting) -> None:
        owes = world.answer_all(waiting, but=FIRST)
        late.extend(owes)
        if owes:
            world.clock.us = waiting.deadline_us

    rows, _ = run(world.path(), layer, act)
    for ticket in late:
        world.reply_to(ticket)
    home.reap()

    assert np.array_equal(expected(world, layer), rows)
    stats = world.places.stats[FIRST]
    assert stats.duplicate_rows == owed(world, layer.ids, FIRST) > 0
    assert (stats.rows, stats.missed_layers) == (0, 1)
    assert world.reports == [NodeReport("spark0", EPOCH, missed=True)]


def test_a_second_dispatch_has_its_own_budget(pod: Make) -> None:
    """After a missed deadline the copy gets as long as any dispatch, and no longer."""
    world = pod(placed((FIRST, SECOND)))
    world.join(FIRST, SECOND, THIRD)
    deadlines: list[int] = []

    def act(waiting: Waiting) -> None:
        deadlines.append(waiting.deadline_us)
        world.answer_all(waiting, but=FIRST if len(deadlines) == 1 else SECOND)
        world.clock.us = waiting.deadline_us

    layer = work()
    rows, waits = run(world.path(), layer, act)

    assert np.array_equal(expected(world, layer), rows)
    first, second = deadlines
    assert (waits, second - first) == (2, world.path().deadline.ceiling_us)
    assert layer.cold_rows == owed(world, layer.ids, FIRST) > 0


@pytest.mark.parametrize("was_there", [False, True])
def test_a_home_that_does_not_serve_is_not_asked(pod: Make, was_there: bool) -> None:
    """A copy stands in from the start: no orphan, one dispatch, no second wait, no cold row."""
    world = pod(placed((FIRST, SECOND)))
    world.join(FIRST, SECOND, THIRD)
    if was_there:
        run(world.path(), work(), lambda waiting: void(world.answer_all(waiting)))
    world.places.detach(FIRST)
    before = world.places.stats[SECOND].dispatches
    layer = work()

    rows, waits = run(world.path(), layer, lambda waiting: void(world.answer_all(waiting)))

    assert np.array_equal(expected(world, layer), rows)
    assert (waits, layer.cold_rows) == (1, 0)
    assert world.places.stats[SECOND].copy_rows == owed(world, layer.ids, FIRST) > 0
    assert world.places.stats[SECOND].dispatches == before + 1


def void(_: object) -> None:
    """Nothing to return."""


def test_when_every_holder_is_lost_the_cold_store_answers(pod: Make) -> None:
    """Exact; with on_miss = fail the error names the holder that was asked last."""
    for on_miss in ("exact", "fail"):
        world = pod(placed((FIRST, SECOND)))
        world.join(FIRST, SECOND, THIRD)
        layer = work()

        def both_die(waiting: Waiting, world: Pod = world) -> None:
            lost = FIRST if world.places.channel(FIRST) is not None else SECOND
            world.answer_all(waiting, but=lost)
            world.places.detach(lost)

        walk = world.path(on_miss)
        if on_miss == "fail":
            with pytest.raises(NodeLost) as failure:
                run(walk, layer, both_die)
            assert failure.value.node == "spark1"
            continue
        rows, _ = run(walk, layer, both_die)
        assert np.array_equal(expected(world, layer), rows)
        assert layer.cold_rows == owed(world, layer.ids, FIRST) > 0
        assert world.places.stats[SECOND].copy_rows == 0


def test_the_stations_own_tier_may_hold_the_copy(pod: Make) -> None:
    """Its rows need no second wait."""
    world = pod(placed((FIRST, HBM)))
    world.join(FIRST, SECOND, THIRD)
    layer = work()

    rows, waits = run(world.path(), layer, lambda waiting: dies(world, waiting))

    assert np.array_equal(expected(world, layer), rows)
    assert (waits, layer.cold_rows) == (1, 0)
    assert world.places.stats[HBM].copy_rows == owed(world, layer.ids, FIRST) > 0


def test_the_stations_own_tier_may_be_the_home(pod: Make) -> None:
    """A copy on a node relieves it where that makes no layer slower: here it costs a tenth."""
    world = pod(placed((HBM, FIRST), costs=(100.0, 10.0, 10.0, 10.0)))
    world.join(FIRST, SECOND, THIRD)
    layer = work()

    rows, waits = run(world.path(), layer, lambda waiting: void(world.answer_all(waiting)))

    assert np.array_equal(expected(world, layer), rows)
    assert (waits, layer.cold_rows) == (1, 0)
    assert world.places.stats[HBM].rows == 0
    assert world.places.stats[FIRST].copy_rows == owed(world, layer.ids, HBM) > 0


def test_no_holder_is_asked_twice(pod: Make) -> None:
    """Three holders that all refuse: three dispatches, then the cold store, never a loop."""
    world = pod(placed((FIRST, SECOND), (FIRST, THIRD)))
    world.join(FIRST, SECOND, THIRD)
    mine = [expert for _, expert in world.placement.nodes[FIRST].rows]
    layer = work(1)
    layer.ids[0, :3], layer.ids[0, 3] = mine, world.placement.nodes[HBM].rows[0][1]

    def refuse(waiting: Waiting) -> None:
        for ticket in waiting.tickets:
            world.reply_to(ticket, refuse_all)

    def refuse_all(header: object, _: object, status: np.ndarray, __: object) -> object:
        status[:] = 1
        return header

    rows, waits = run(world.path(), layer, refuse)

    assert np.array_equal(expected(world, layer), rows)
    assert (waits, layer.cold_rows) == (3, 3)
    assert [each.dispatches for each in world.places.stats] == [0, 1, 1, 1]
    assert world.rows()[THIRD] == (0, 0, 3), "cold rows are those of the holder asked last"


@pytest.mark.parametrize("seed", range(4))
def test_nodes_that_fail_at_random_change_no_row_and_lose_none(pod: Make, seed: int) -> None:
    """Conservation over 60 layers: each pair is accounted by one holder or the cold store."""
    rng = np.random.default_rng(seed)
    copies = ((FIRST, SECOND), (FIRST, THIRD), (SECOND, THIRD), (THIRD, HBM))
    world = pod(placed(*copies, costs=(5.0, 30.0, 20.0, 10.0)))
    path = world.path()
    asked = cold = 0

    def act(waiting: Waiting) -> None:
        for ticket in waiting.tickets:
            match rng.integers(0, 8):
                case 0:
                    world.places.detach(ticket.channel.place)
                case 1:
                    continue  # late
                case 2 if world.places.is_open(ticket.channel):
                    world.reply_to(ticket, (infinite_row, unknown_expert)[rng.integers(0, 2)])
                case _ if world.places.is_open(ticket.channel):
                    world.reply_to(ticket)
                case _:
                    continue
        world.clock.us = waiting.deadline_us

    for _ in range(60):
        for place in (FIRST, SECOND, THIRD):
            if world.places.channel(place) is None and rng.random() < 0.5:
                world.join(place)
        layer = work(int(rng.integers(3, 20)))
        rows, waits = run(path, layer, act)

        assert np.array_equal(expected(world, layer), rows)
        assert waits <= 3
        asked += layer.ids.size
        cold += layer.cold_rows
    totals = np.array(world.rows()).sum(axis=0)
    assert totals[0] + totals[2] == asked
    assert totals[2] == cold > 0
    assert totals[1] > 0
