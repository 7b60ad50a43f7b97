"""The node's decisions, without a clock or a socket."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core import wire
from shared.core.ring_layout import RingShape
from spark_daemon.lifecycle import (
    BACKOFF_US_MAX,
    BACKOFF_US_MIN,
    GRANT_US,
    Beat,
    CloseLease,
    Connected,
    Disconnected,
    Event,
    Fail,
    Greet,
    LeaseBroken,
    Lifecycle,
    NodeState,
    OpenLease,
    Received,
    SayGoodbye,
    Serve,
    StopRequested,
    Ticked,
)

BEAT_US, TTL_US = 250_000, 2_000_000
STATION = 42


def signed(incarnation: int = STATION) -> dict[str, Any]:
    return {"sender": "station", "incarnation": incarnation}


def offer(epoch: int, incarnation: int = STATION) -> wire.LeaseOffer:
    return wire.LeaseOffer(
        epoch=epoch,
        ring=RingShape(slots=4, max_tokens=8, max_rows=64, latent=32),
        reply_ring=wire.RegionDescriptor("shm", "a", "b", 4096, 1),
        canary_bank_row=0,
        canary_seed=1,
        heartbeat_us=BEAT_US,
        ttl_us=TTL_US,
        **signed(incarnation),
    )


def got(message: wire.ToNode, now_us: int = 0) -> Received:
    return Received(message, now_us)


def granted(epoch: int, now_us: int = 0, incarnation: int = STATION) -> Received:
    return got(wire.LeaseGranted(epoch=epoch, **signed(incarnation)), now_us)


def seen(epoch: int, now_us: int, incarnation: int = STATION) -> Received:
    return got(wire.HeartbeatSeen(epoch=epoch, **signed(incarnation)), now_us)


def after(*events: Event) -> Lifecycle:
    life = Lifecycle()
    for event in events:
        life, _ = life.apply(event)
    return life


def serving(epoch: int = 5, now_us: int = 0) -> Lifecycle:
    return after(Connected(now_us), got(offer(epoch), now_us), granted(epoch, now_us))


def test_a_connection_is_greeted_and_greeted_again() -> None:
    """Hello at once, then with a pause that doubles from 0.1 s to 2 s."""
    life, actions = Lifecycle().apply(Connected(1_000))
    assert actions == (Greet(),)
    pauses = []
    now_us = 1_000
    for _ in range(7):
        pauses.append(life.due_us - now_us)
        assert life.apply(Ticked(life.due_us - 1)) == (life, ())
        now_us = life.due_us
        life, actions = life.apply(Ticked(now_us))
        assert actions == (Greet(),)

    assert pauses == [100_000, 200_000, 400_000, 800_000, 1_600_000, 2_000_000, 2_000_000]
    assert pauses[0] == BACKOFF_US_MIN
    assert pauses[-1] == BACKOFF_US_MAX


def test_nobody_is_greeted_without_a_connection() -> None:
    """Time alone does nothing while there is no link; the shell connects when it is due."""
    life = after(Connected(0), Disconnected(10))

    assert life.due_us > 10
    assert life.apply(Ticked(10**9)) == (life, ())


def test_an_offer_is_opened_and_a_grant_served() -> None:
    """The way from Hello to serving."""
    life, actions = after(Connected(0)).apply(got(offer(5), 70))
    assert (life.state, actions) == (NodeState.OFFERED, (OpenLease(offer(5)),))
    assert life.due_us == 70 + GRANT_US

    life, actions = life.apply(granted(5, 90))
    assert (life.state, actions) == (NodeState.SERVING, (Serve(5),))
    assert life.expires_us == 90 + TTL_US

    life, actions = life.apply(Ticked(90))
    assert actions == (Beat(5),)
    assert life.due_us == 90 + BEAT_US


def test_an_answered_heartbeat_keeps_the_lease() -> None:
    """Each answer moves the end of the lease; without one it ends after ttl, exactly."""
    life, _ = serving().apply(seen(5, now_us=1_500_000))

    still, _ = life.apply(Ticked(1_500_000 + TTL_US - 1))
    assert still.state is NodeState.SERVING
    lost, actions = life.apply(Ticked(1_500_000 + TTL_US))
    assert lost.state is NodeState.JOINING
    assert actions == (CloseLease(5, "no heartbeat answer of the Station in time"),)


def test_an_offer_without_grant_ends() -> None:
    """A Station that forgets its offer does not hold the node for ever."""
    life = after(Connected(0), got(offer(5), 0))

    lost, actions = life.apply(Ticked(GRANT_US))
    assert lost.state is NodeState.JOINING
    assert actions == (CloseLease(5, "no grant of the Station in time"),)


@pytest.mark.parametrize(
    "event",
    [
        granted(4),
        granted(5, incarnation=1),
        got(wire.LeaseRevoked(epoch=4, reason="old", **signed())),
        got(wire.LeaseRevoked(epoch=5, reason="other", **signed(1))),
        got(offer(5)),
        got(offer(3)),
        LeaseBroken(4, "old ring", 0),
        got(wire.HelloRefused(code="x", text="late", permanent=True, **signed())),
    ],
    ids=str,
)
def test_old_news_changes_nothing(event: Event) -> None:
    """Case L2, the fence: other epochs, other Stations and replays are ignored."""
    for life in (serving(5), after(Connected(0), got(offer(5)))):
        if life.state is NodeState.OFFERED and event == got(offer(5)):
            continue
        assert life.apply(event) == (life, ())
    assert serving(5).apply(seen(4, 10))[0] == serving(5)
    assert serving(5).apply(seen(5, 10, incarnation=1))[0] == serving(5)


def test_the_fence_outlives_the_lease() -> None:
    """After a loss an offer must be above the last one taken, unless it is another Station's."""
    lost, _ = serving(5).apply(Disconnected(0))
    joining, _ = lost.apply(Connected(0))

    assert joining.apply(got(offer(5))) == (joining, ())
    assert joining.apply(got(offer(6)))[1] == (OpenLease(offer(6)),)
    assert joining.apply(got(offer(1, incarnation=43)))[1] == (OpenLease(offer(1, 43)),)


def test_a_newer_offer_replaces_the_lease() -> None:
    """The Station starts over: the old ring closes before the new one opens."""
    life, actions = serving(5).apply(got(offer(6), 10))

    assert life.state is NodeState.OFFERED
    assert actions == (CloseLease(5, "replaced by a new offer"), OpenLease(offer(6)))


def test_losing_a_lease_closes_it_once() -> None:
    """Revocation, broken ring and disconnect each give exactly one CloseLease."""
    for event in (
        got(wire.LeaseRevoked(epoch=5, reason="fenced", **signed()), 9),
        LeaseBroken(5, "fenced", 9),
        Disconnected(9),
    ):
        life, actions = serving(5).apply(event)
        assert [type(action) for action in actions] == [CloseLease]
        assert life.state is NodeState.JOINING
        assert life.due_us == 9 + BACKOFF_US_MIN
        assert life.apply(LeaseBroken(5, "again", 10)) == (life, ())


def test_a_permanent_refusal_fails_and_another_does_not() -> None:
    """The shell turns Fail into the exit status 78."""

    def refused(permanent: bool) -> Received:
        return got(
            wire.HelloRefused(code="digest_mismatch", text="t", permanent=permanent, **signed())
        )

    life = after(Connected(0))
    assert life.apply(refused(True))[1] == (Fail("digest_mismatch", "t"),)
    assert life.apply(refused(False)) == (life, ())


def test_stopping_closes_then_says_goodbye_and_is_final() -> None:
    """The dispatch in hand ends before the Station is told; nothing happens afterwards."""
    life, actions = serving(5).apply(StopRequested())

    assert actions == (CloseLease(5, "the node stops"), SayGoodbye(5, "the node stops"))
    _, actions = serving(5).apply(StopRequested("its canary failed"))
    assert actions == (CloseLease(5, "its canary failed"), SayGoodbye(5, "its canary failed"))
    for event in (Connected(1), got(offer(9)), Ticked(10**9), Disconnected(2), StopRequested()):
        assert life.apply(event) == (life, ())
    assert after(Connected(0)).apply(StopRequested())[1] == ()


epochs = st.integers(1, 4)
stations = st.integers(1, 2)
events = st.one_of(
    st.builds(Connected, st.just(0)),
    st.builds(Disconnected, st.just(0)),
    st.builds(lambda e, i: got(offer(e, i)), epochs, stations),
    st.builds(lambda e, i: granted(e, 0, i), epochs, stations),
    st.builds(lambda e, i: seen(e, 0, i), epochs, stations),
    st.builds(
        lambda e, i: got(wire.LeaseRevoked(epoch=e, reason="r", **signed(i))), epochs, stations
    ),
    st.builds(LeaseBroken, epochs, st.just("r"), st.just(0)),
    st.builds(Ticked, st.sampled_from([0, TTL_US, GRANT_US, 10**9])),
    st.builds(StopRequested),
)


@given(st.lists(events, max_size=30))
def test_any_history_opens_and_closes_in_pairs(history: list[Event]) -> None:
    """Case L7: however a Station or a network flaps, at most one lease is open, each is closed
    once, only an open one is served, and taken epochs of one Station only rise."""
    life = Lifecycle()
    opened: int | None = None
    last: dict[int, int] = {}
    station = 0
    for event in history:
        life, actions = life.apply(event)
        for action in actions:
            match action:
                case OpenLease(offer=taken):
                    assert opened is None
                    if taken.incarnation == station:
                        assert taken.epoch > last[station]
                    opened, station = taken.epoch, taken.incarnation
                    last[station] = taken.epoch
                case Serve(epoch=epoch) | Beat(epoch=epoch):
                    assert opened == epoch
                case CloseLease(epoch=epoch):
                    assert opened == epoch
                    opened = None
                case _:
                    pass
        holds = life.state in (NodeState.OFFERED, NodeState.SERVING)
        assert holds == (opened is not None) == (life.offer is not None)
