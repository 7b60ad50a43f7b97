"""The model thread: turns, waits, deadlines, losses, cancels, bugs, and every way it can end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from shared.core.errors import LocalProtocolError, MeshError, RequestRefused
from station.admission import Limits
from station.channel import NodeChannel, Ticket
from station.engine import Attach, Cancel, Command, Detach, Engine, Start, Stop
from station.expert_path import Waiting
from tests.unit.station.world import EPOCH, LAYER, NODE, RING, World

PATIENCE_S = 10.0
FAR_US = 60_000_000
Walk = Generator[Waiting | None, None, None]


def now_us() -> int:
    """The real clock: deadlines must wake a thread that really sleeps."""
    return time.monotonic_ns() // 1000


@dataclass
class Scripted:
    """A lane as the engine sees it, whose walk is the test's."""

    name: str
    walk: Walk
    waiting: Waiting | None = None
    ends: list[MeshError | None] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def request(self) -> Any:
        """What the engine reads of a request."""
        return SimpleNamespace(request_id=self.name)

    def start(self) -> Start:
        """The command that runs it."""

        def done(error: MeshError | None) -> None:
            self.ends.append(error)
            self.ended.set()

        return Start(self, done)  # duck-typed: the engine needs no more of a lane

    def result(self) -> MeshError | None:
        """How it ended."""
        assert self.ended.wait(PATIENCE_S), f"lane {self.name} never ended"
        assert len(self.ends) == 1
        return self.ends[0]


@dataclass
class Rig:
    """An engine over a world, not started."""

    world: World
    engine: Engine
    bugs: list[tuple[str, BaseException]]

    def send(self, *commands: Command) -> None:
        """Send several commands."""
        for command in commands:
            self.engine.send(command)

    def lane(self, name: str, walk: Walk) -> Scripted:
        """Start a lane."""
        lane = Scripted(name, walk)
        self.engine.send(lane.start())
        return lane


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A fresh engine; ended and closed afterwards."""
    world = World()
    bugs: list[tuple[str, BaseException]] = []
    engine = Engine(
        fabric=world.station,
        places=world.places,
        now_us=now_us,
        on_bug=lambda request, error: bugs.append((request, error)),
        torch_threads=1,
    )
    yield Rig(world, engine, bugs)
    if engine.is_alive:
        engine.send(Stop())
        assert engine.join(PATIENCE_S)
    world.station.close()
    world.node.close()


def post(channel: NodeChannel, number: int = 1) -> Ticket:
    """One dispatch of one pair."""
    pairs = np.array([[0, 1]], np.uint16)
    positions = np.zeros(1, np.int64)
    ticket = channel.post(number, LAYER, positions, pairs, np.zeros((1, 32), np.uint16), 1000)
    assert ticket is not None
    return ticket


def waits_for(
    channel: NodeChannel, seen: list[str], *, deadline_us: int, posted: threading.Event
) -> Walk:
    """A walk that posts, waits once, and notes that it was resumed."""
    ticket = post(channel)
    posted.set()
    yield Waiting((ticket,), deadline_us)
    seen.append("resumed")


def steps(name: str, count: int, seen: list[str]) -> Walk:
    """A walk that is always ready."""
    for number in range(count):
        seen.append(f"{name}{number}")
        yield None


def test_lanes_take_turns(rig: Rig) -> None:
    """At every layer boundary the other lanes come first; progress counts every resume."""
    seen: list[str] = []
    lanes = [rig.lane(name, steps(name, 3, seen)) for name in "abc"]
    rig.engine.start()

    assert [lane.result() for lane in lanes] == [None] * 3
    assert seen == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]
    assert rig.engine.progress == 12
    assert rig.engine.active == 0


def test_a_lane_that_waits_sleeps_until_its_bell(rig: Rig) -> None:
    """Others run meanwhile; nothing but the reply resumes it."""
    channel = rig.world.attach()
    seen: list[str] = []
    posted = threading.Event()
    waiting = rig.lane("w", waits_for(channel, seen, deadline_us=now_us() + FAR_US, posted=posted))
    rig.engine.start()
    assert posted.wait(PATIENCE_S)
    other = rig.lane("o", steps("o", 2, seen))
    assert other.result() is None
    assert seen == ["o0", "o1"]
    assert rig.engine.active == 1

    rig.world.answer(0)

    assert waiting.result() is None
    assert seen == ["o0", "o1", "resumed"]


def test_a_deadline_wakes_the_thread(rig: Rig) -> None:
    """No bell ever rings: the lane is resumed when its time is over, not before."""
    channel = rig.world.attach()
    deadline_us = now_us() + 50_000
    lane = rig.lane(
        "late", waits_for(channel, [], deadline_us=deadline_us, posted=threading.Event())
    )
    rig.engine.start()

    assert lane.result() is None
    assert now_us() >= deadline_us


@pytest.mark.parametrize("how", ["detached", "replaced"])
def test_the_end_of_a_lease_wakes_its_lanes(rig: Rig, how: str) -> None:
    """A loss, or a new lease of the same node, resumes at once whoever waits for the old one."""
    channel = rig.world.attach()
    posted = threading.Event()
    lane = rig.lane("l", waits_for(channel, [], deadline_us=now_us() + FAR_US, posted=posted))
    rig.engine.start()
    assert posted.wait(PATIENCE_S)

    if how == "detached":
        rig.send(Detach(NODE, EPOCH + 1))  # of another lease: nothing happens
        rig.send(Detach(NODE, EPOCH))
    else:
        attached: list[NodeChannel] = []
        attach, rig.world.places.attach = rig.world.places.attach, attached.append
        rig.world.attach()
        rig.world.places.attach = attach
        rig.send(Attach(attached[0]))

    assert lane.result() is None
    assert not rig.world.places.is_open(channel)
    assert channel.reply_ring.is_closed


def test_a_detach_of_an_older_lease_is_ignored(rig: Rig) -> None:
    """A fence that was overtaken by a new lease must not end the new one."""
    channel = rig.world.attach()
    seen: list[str] = []
    rig.send(Detach(NODE, EPOCH - 1))
    lane = rig.lane("l", steps("l", 1, seen))
    rig.engine.start()

    assert lane.result() is None
    assert rig.world.places.is_open(channel)


def test_cancel_closes_a_walk_wherever_it_is(rig: Rig) -> None:
    """Cleanup runs on the engine's thread, `done` is called once, other lanes go on."""
    channel = rig.world.attach()
    posted = threading.Event()
    closed: list[str] = []

    def walk() -> Walk:
        try:
            yield from waits_for(channel, [], deadline_us=now_us() + FAR_US, posted=posted)
        finally:
            closed.append(threading.current_thread().name)

    lane = rig.lane("c", walk())
    rig.engine.start()
    assert posted.wait(PATIENCE_S)
    rig.send(Cancel("nobody"), Cancel("c"), Cancel("c"))

    assert lane.result() is None
    assert closed == ["k3-model"]
    assert rig.lane("n", steps("n", 1, [])).result() is None


def test_a_bug_in_one_lane_ends_that_request_alone(rig: Rig) -> None:
    """The log hears of it by request, the client gets one error, the pod lives."""

    def buggy() -> Walk:
        yield None
        raise ZeroDivisionError

    def stubborn() -> Walk:
        try:
            while True:
                yield None
        finally:
            raise KeyError("while closing")

    seen: list[str] = []
    lanes = [
        rig.lane("bug", buggy()),
        rig.lane("close", stubborn()),
        rig.lane("ok", steps("s", 5, seen)),
    ]
    rig.engine.start()
    error = lanes[0].result()
    rig.send(Cancel("close"))

    assert isinstance(error, MeshError)
    assert "bug" in str(error)
    lanes[1].result()
    assert lanes[2].result() is None
    assert len(seen) == 5
    assert sorted((request, type(bug)) for request, bug in rig.bugs) == [
        ("bug", ZeroDivisionError),
        ("close", KeyError),
    ]
    assert rig.engine.is_alive


def test_an_error_of_the_tree_ends_its_request(rig: Rig) -> None:
    """It is passed on as it is, and is no bug."""
    failure = LocalProtocolError("as told")

    def walk() -> Walk:
        yield None
        raise failure

    lane = rig.lane("e", walk())
    rig.engine.start()

    assert lane.result() is failure
    assert rig.bugs == []


def test_stop_ends_every_request_with_an_error(rig: Rig) -> None:
    """Running, not yet started, and sent too late: none waits for ever, none looks finished."""
    channel = rig.world.attach()
    posted = threading.Event()
    running = rig.lane("r", waits_for(channel, [], deadline_us=now_us() + FAR_US, posted=posted))
    rig.engine.start()
    assert posted.wait(PATIENCE_S)
    rig.send(Stop())
    queued = rig.lane("q", steps("q", 1, []))
    assert rig.engine.join(PATIENCE_S)
    late = rig.lane("l", steps("l", 1, []))
    rig.send(Cancel("l"), Detach(NODE, EPOCH), Stop())

    for lane in (running, queued, late):
        assert isinstance(lane.result(), RequestRefused)
    assert channel.reply_ring.is_closed
    assert rig.engine.active == 0


def test_a_lease_granted_after_the_end_is_closed(rig: Rig) -> None:
    """Nobody would ever fence it."""
    rig.engine.start()
    rig.send(Stop())
    assert rig.engine.join(PATIENCE_S)
    channel = rig.world.attach()
    rig.send(Attach(channel))

    assert channel.reply_ring.is_closed


@dataclass
class Broken:
    """A fabric whose wait fails."""

    interrupt: Callable[[], None]

    def wait_complete(self, *_: object, **__: object) -> int:
        """As a provider with a bug."""
        raise LocalProtocolError("wait was not understood")


def test_the_death_of_the_thread_is_heard_by_everybody(rig: Rig) -> None:
    """Its own error is logged once; requests end, later ones are refused, nothing hangs."""
    channel = rig.world.attach()
    posted = threading.Event()
    lane = rig.lane("r", waits_for(channel, [], deadline_us=now_us() + FAR_US, posted=posted))
    rig.engine._fabric = Broken(rig.world.station.interrupt)
    rig.engine.start()

    assert isinstance(lane.result(), RequestRefused)
    assert rig.engine.join(PATIENCE_S)
    assert [type(bug) for _, bug in rig.bugs] == [LocalProtocolError]
    assert not rig.engine.is_alive
    assert isinstance(rig.lane("l", steps("l", 1, [])).result(), RequestRefused)


def test_the_most_lanes_an_operator_may_ask_for_can_wait_at_once(rig: Rig) -> None:
    """The native wait has a bound, and the settings allow no more."""
    most = 64
    msgspec.convert({"active": most}, Limits)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"active": most + 1}, Limits)
    channel = rig.world.attach(msgspec.structs.replace(RING, slots=most))
    deadline_us = now_us() + FAR_US
    posted = [threading.Event() for _ in range(most)]
    lanes = [
        rig.lane(str(number), waits_for(channel, [], deadline_us=deadline_us, posted=event))
        for number, event in enumerate(posted)
    ]
    rig.engine.start()
    assert all(event.wait(PATIENCE_S) for event in posted)
    rig.send(Detach(NODE, EPOCH))

    assert all(lane.result() is None for lane in lanes)
    assert rig.bugs == []
