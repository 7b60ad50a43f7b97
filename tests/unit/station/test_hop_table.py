"""Hops by experts: means, deviation, what is counted, and the trip beside the node's share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from station.hop_table import HopTable
from tests.unit.station.world import NODE, World, run, work


@pytest.fixture
def world() -> Iterator[World]:
    """A Station and a node with a lease; the node says 3 us queue and 5 us compute."""
    made = World()
    made.attach()
    yield made
    made.places.close()
    made.station.close()
    made.node.close()


def test_points_are_means_by_experts() -> None:
    """Two hops of one expert and one of three; the deviation is of the node's share."""
    table = HopTable()
    assert table.points() == []
    for experts, hop_us, node_us in ((3, 400, 90), (1, 300, 40), (1, 200, 60)):
        table.observe(experts, hop_us, node_us)

    assert table.points() == [
        {"experts": 1, "dispatches": 2, "hop_us": 250.0, "node_us": 50.0, "node_us_sd": 10.0},
        {"experts": 3, "dispatches": 1, "hop_us": 400.0, "node_us": 90.0, "node_us_sd": 0.0},
    ]


def test_a_hop_of_one_token_is_counted(world: World) -> None:
    """100 us from post to return, 8 of them the node's: the trip is 92."""
    layer = work(tokens=1)

    def wait(_: object) -> None:
        world.clock.us += 100
        world.answer(0)

    run(world.path(), layer, wait)

    experts = world.places.stats[NODE].rows
    assert world.places.stats[NODE].hops.points() == [
        {"experts": experts, "dispatches": 1, "hop_us": 100.0, "node_us": 8.0, "node_us_sd": 0.0}
    ]
    assert (layer.times.wait_us, layer.times.trip_us, layer.times.collect_us) == (100, 92, 0)


def test_a_chunk_of_tokens_is_not(world: World) -> None:
    """With three tokens rows and experts differ: the curve would be another one."""
    run(world.path(), work(tokens=3), lambda _: world.answer(0))

    assert world.places.stats[NODE].answers == 1
    assert world.places.stats[NODE].hops.points() == []
