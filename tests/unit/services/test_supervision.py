"""What follows from the end of a process: the table of decisions, and its backoff."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.pod.supervision import (
    History,
    LeaveDown,
    Restart,
    RestartPolicy,
    StopPod,
    decide,
    ending,
)

POLICY = RestartPolicy()
ONE = History((0,))
KILLED = -9


def verdict(
    exit_status: int,
    *,
    history: History = ONE,
    policy: RestartPolicy = POLICY,
    is_station: bool = False,
    was_ready: bool = True,
) -> Restart | LeaveDown | StopPod:
    """`decide` with defaults of a node in a pod that has served."""
    return decide(
        policy, history, exit_status=exit_status, is_station=is_station, was_ready=was_ready
    )


@pytest.mark.parametrize("exit_status", [1, 2, KILLED, -15, -6])
@pytest.mark.parametrize("is_station", [False, True])
@pytest.mark.parametrize("was_ready", [False, True])
def test_a_first_failure_is_restarted(exit_status: int, is_station: bool, was_ready: bool) -> None:
    """Whatever process it is and whenever it fails."""
    assert verdict(exit_status, is_station=is_station, was_ready=was_ready) == Restart(500_000)


@pytest.mark.parametrize(("is_station", "was_ready"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("enabled", [False, True])
def test_a_refused_setting_stops_the_pod(is_station: bool, was_ready: bool, enabled: bool) -> None:
    """Exit 78 is never retried and becomes the pod's own status."""
    policy = RestartPolicy(enabled=enabled)

    decision = verdict(78, policy=policy, is_station=is_station, was_ready=was_ready)

    assert decision == StopPod("exit status 78", 78)


def test_a_node_that_refuses_when_it_comes_back_does_not_stop_a_pod_that_served() -> None:
    """Its bank was spoilt meanwhile: that node is lost, and losing a node costs time only."""
    assert verdict(78) == LeaveDown("exit status 78")


def test_a_clean_exit_was_wanted() -> None:
    """A node that was told to stop stays down; a Station that was told to stop ends the pod."""
    assert verdict(0, history=History()) == LeaveDown("exit status 0")
    assert verdict(0, history=History(), is_station=True) == StopPod("exit status 0", 0)


def test_before_the_pod_was_ready_it_cannot_go_on_without_a_process() -> None:
    """Otherwise `k3 up` would wait for a node that never comes."""
    assert isinstance(verdict(0, history=History(), was_ready=False), StopPod)
    never = RestartPolicy(enabled=False)
    assert isinstance(verdict(KILLED, policy=never, was_ready=False), StopPod)
    assert verdict(0, history=History(), is_station=True, was_ready=False) == StopPod(
        "exit status 0", 1
    )


def test_restart_never_leaves_a_node_down_and_ends_the_pod_with_its_station() -> None:
    """`--restart never`: the cold store serves a lost node's experts."""
    never = RestartPolicy(enabled=False)

    assert isinstance(verdict(KILLED, policy=never), LeaveDown)
    assert verdict(KILLED, policy=never, is_station=True) == StopPod(
        "killed by SIGKILL; --restart never", 1
    )


def test_too_many_failures_within_the_window_end_it() -> None:
    """Six failures in a minute are not an accident."""
    history = History(tuple(range(POLICY.failures_max + 1)))

    assert verdict(1, history=history) == LeaveDown("exit status 1; 6 failures within 60 s")
    assert isinstance(verdict(1, history=history, is_station=True), StopPod)


def test_failures_leave_the_window() -> None:
    """A process that fails once an hour is restarted for ever, with the first delay."""
    history = History()
    for hour in range(50):
        now_us = hour * 3_600_000_000
        history = history.failed(now_us, POLICY)

        assert history == History((now_us,))
        assert verdict(1, history=history) == Restart(POLICY.delay_us)


@given(
    delay_us=st.integers(0, 20_000_000),
    gaps_us=st.lists(st.integers(0, 120_000_000), max_size=40),
)
def test_delays_grow_but_are_bounded(delay_us: int, gaps_us: list[int]) -> None:
    """Within a window each delay is at least the one before, and none exceeds the maximum."""
    policy = RestartPolicy(delay_us=delay_us, delay_us_max=max(delay_us, 10_000_000))
    history, now_us = History(), 0
    before, before_count = 0, 0
    for gap_us in gaps_us:
        now_us += gap_us
        history = history.failed(now_us, policy)
        count = len(history.failures_us)

        decision = verdict(1, history=history, policy=policy)

        if count > policy.failures_max:
            assert isinstance(decision, LeaveDown)
            continue
        assert isinstance(decision, Restart)
        assert delay_us <= decision.delay_us <= policy.delay_us_max
        if count > before_count:
            assert decision.delay_us >= before
        before, before_count = decision.delay_us, count


def test_an_ending_in_words() -> None:
    """Signals by name; a number the system does not know stays a number."""
    assert ending(3) == "exit status 3"
    assert ending(-11) == "killed by SIGSEGV"
    assert ending(-99) == "killed by signal 99"
