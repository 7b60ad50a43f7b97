"""A lease: every event in every state."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.core.lease import (
    ALLOWED,
    CANARY_US,
    TTL_US,
    Attested,
    Ended,
    Lease,
    LeaseState,
    Renewed,
    Ticked,
)

EPOCH = 7


def offered() -> Lease:
    return Lease.offer("spark0", EPOCH, now_us=1_000)


def serving() -> Lease:
    return offered().apply(Attested(EPOCH, now_us=2_000))


def test_a_right_canary_starts_serving() -> None:
    """An attested offer serves and expires one ttl later."""
    lease = serving()

    assert lease.state is LeaseState.SERVING
    assert lease.expires_us == 2_000 + TTL_US


def test_an_offer_without_canary_is_lost_in_time() -> None:
    """An offer that is never attested ends, and says why."""
    early = offered().apply(Ticked(1_000 + CANARY_US - 1))
    late = offered().apply(Ticked(1_000 + CANARY_US))

    assert early.state is LeaseState.OFFERED
    assert (late.state, late.reason) == (LeaseState.LOST, "no canary row in time")


def test_silence_ends_a_serving_lease() -> None:
    """Without heartbeats the lease is lost exactly one ttl after the last one."""
    renewed = serving().apply(Renewed(EPOCH, now_us=500_000))

    assert renewed.apply(Ticked(500_000 + TTL_US - 1)).state is LeaseState.SERVING
    lost = renewed.apply(Ticked(500_000 + TTL_US))
    assert (lost.state, lost.reason) == (LeaseState.LOST, "no heartbeat in time")


def test_a_heartbeat_never_shortens_a_lease() -> None:
    """Events may be reordered: an older renewal leaves the later expiry."""
    lease = serving().apply(Renewed(EPOCH, now_us=900_000))

    assert lease.apply(Renewed(EPOCH, now_us=100_000)) == lease


def test_heartbeats_do_not_revive_an_offer_or_a_lost_lease() -> None:
    """Only a serving lease is renewed (case L10: a returning node is a new lease)."""
    lost = serving().apply(Ended(EPOCH, "goodbye"))

    assert offered().apply(Renewed(EPOCH, now_us=5_000)) == offered()
    assert lost.apply(Renewed(EPOCH, now_us=5_000)) is lost
    assert lost.apply(Attested(EPOCH, now_us=5_000)) is lost


events = st.one_of(
    st.builds(Attested, st.sampled_from([EPOCH - 1, EPOCH, EPOCH + 1]), st.integers(0, 2**40)),
    st.builds(Renewed, st.sampled_from([EPOCH - 1, EPOCH, EPOCH + 1]), st.integers(0, 2**40)),
    st.builds(Ended, st.sampled_from([EPOCH - 1, EPOCH, EPOCH + 1]), st.just("gone")),
    st.builds(Ticked, st.integers(0, 2**40)),
)


@given(st.lists(events, max_size=12))
def test_any_history_stays_in_the_transition_table(history: list[object]) -> None:
    """Case L2: foreign epochs change nothing, LOST has no way out, the first reason stays."""
    lease = offered()
    for event in history:
        after = lease.apply(event)  # type: ignore[arg-type]
        assert after.state is lease.state or after.state in ALLOWED[lease.state]
        if getattr(event, "epoch", EPOCH) != EPOCH or lease.state is LeaseState.LOST:
            assert after is lease
        lease = after
