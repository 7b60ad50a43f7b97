"""Places: which channel serves a node right now, and that no ring outlives its lease."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.station.world import EPOCH, NODE, World


@pytest.fixture
def world() -> Iterator[World]:
    """A Station and a node without a lease."""
    made = World()
    yield made
    made.places.close()
    made.station.close()
    made.node.close()


def test_nobody_serves_before_a_lease(world: World) -> None:
    """The Station's own tier needs none."""
    assert world.places.channel(NODE) is None
    assert list(world.places.local) == [0]
    assert world.places.name(NODE) == "spark0"


def test_a_new_lease_fences_the_old(world: World) -> None:
    """Same node, same place: tickets of the old channel are lost, its ring is closed."""
    old = world.attach()
    new = world.attach()

    assert world.places.channel(NODE) is new
    assert world.places.is_open(new)
    assert not world.places.is_open(old)
    assert old.reply_ring.is_closed
    assert not new.reply_ring.is_closed


def test_detaching_twice_is_harmless(world: World) -> None:
    """A loss may be noticed in two ways at once."""
    channel = world.attach()
    assert channel.epoch == EPOCH
    world.places.detach(NODE)
    world.places.detach(NODE)

    assert world.places.channel(NODE) is None
    assert channel.reply_ring.is_closed


def test_counters_outlive_leases(world: World) -> None:
    """What an operator reads is the node's history, not the lease's."""
    world.attach().stats.rows += 5
    world.attach().stats.rows += 1

    assert world.places.stats[NODE].rows == 6


def test_closing_fences_everything(world: World) -> None:
    """The end of the engine's thread."""
    channel = world.attach()
    world.places.close()

    assert channel.reply_ring.is_closed
    assert world.places.channel(NODE) is None
