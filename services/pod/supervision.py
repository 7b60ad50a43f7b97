"""What to do when a process of the pod ends. Pure: no clock, no process, no log.

The rules are systemd's `Restart=on-failure` with `RestartPreventExitStatus=78`: a refused setting
is never retried, a clean exit was somebody's wish, anything else is restarted with growing delays
until it has failed too often within the window. A pod that has served goes on without a node.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

from shared.core.errors import EXIT_CONFIG, EXIT_FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How often and how fast a failed process comes back."""

    enabled: bool = True
    delay_us: int = 500_000  # before the first restart; doubles with every failure in the window
    delay_us_max: int = 10_000_000
    failures_max: int = 5
    window_us: int = 60_000_000


@dataclass(frozen=True, slots=True)
class History:
    """When one process failed, oldest first, as far as the window reaches."""

    failures_us: tuple[int, ...] = ()

    def failed(self, now_us: int, policy: RestartPolicy) -> History:
        """One more failure; those that left the window are forgotten."""
        recent = [at for at in self.failures_us if now_us - at < policy.window_us]
        return replace(self, failures_us=(*recent, now_us))


@dataclass(frozen=True, slots=True)
class Restart:
    """Start it again after a while."""

    delay_us: int


@dataclass(frozen=True, slots=True)
class LeaveDown:
    """Go on without it: the Station serves its experts from the cold store."""

    reason: str


@dataclass(frozen=True, slots=True)
class StopPod:
    """The pod cannot go on; `exit_status` is what `k3 up` ends with."""

    reason: str
    exit_status: int


Decision = Restart | LeaveDown | StopPod


def decide(
    policy: RestartPolicy,
    history: History,
    *,
    exit_status: int,
    is_station: bool,
    was_ready: bool,
) -> Decision:
    """What follows from a process that ended on its own.

    `exit_status` is negative for a signal; `history` already counts this failure; `was_ready` says
    whether the whole pod has served before, so that it can go on without one node.
    """
    reason = ending(exit_status)
    if exit_status == EXIT_CONFIG:
        if was_ready and not is_station:
            return LeaveDown(reason)
        return StopPod(reason, EXIT_CONFIG)
    if exit_status == 0:
        if is_station:
            return StopPod(reason, 0 if was_ready else EXIT_FAILED)
        return _without(reason, is_station=is_station, was_ready=was_ready)
    failures = len(history.failures_us)
    if not policy.enabled:
        return _without(f"{reason}; --restart never", is_station=is_station, was_ready=was_ready)
    if failures > policy.failures_max:
        seconds = policy.window_us // 1_000_000
        return _without(
            f"{reason}; {failures} failures within {seconds} s",
            is_station=is_station,
            was_ready=was_ready,
        )
    return Restart(min(policy.delay_us << (failures - 1), policy.delay_us_max))


def ending(exit_status: int) -> str:
    """An exit status in words."""
    if exit_status >= 0:
        return f"exit status {exit_status}"
    try:
        return f"killed by {signal.Signals(-exit_status).name}"
    except ValueError:
        return f"killed by signal {-exit_status}"


def _without(reason: str, *, is_station: bool, was_ready: bool) -> Decision:
    if is_station or not was_ready:
        return StopPod(reason, EXIT_FAILED)
    return LeaveDown(reason)
