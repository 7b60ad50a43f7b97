"""A node's lease at the Station: who may be dispatched to, and under which epoch. Pure.

One value per lease; an event gives the next value. Stale or repeated events change nothing. A lost
lease never comes back: a returning node gets a new lease with a higher epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, assert_never

TTL_US: Final = 2_000_000
HEARTBEAT_US: Final = 250_000
CANARY_US: Final = 10_000_000  # from offer to a right canary row


class LeaseState(Enum):
    """Life of a lease."""

    OFFERED = "offered"
    SERVING = "serving"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Attested:
    """The node's canary row was right."""

    epoch: int
    now_us: int


@dataclass(frozen=True, slots=True)
class Renewed:
    """A heartbeat arrived."""

    epoch: int
    now_us: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The node is gone: goodbye, dead process, refused canary, fenced by the Station."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed."""

    now_us: int


Event = Attested | Renewed | Ended | Ticked

ALLOWED: Final[dict[LeaseState, frozenset[LeaseState]]] = {
    LeaseState.OFFERED: frozenset({LeaseState.SERVING, LeaseState.LOST}),
    LeaseState.SERVING: frozenset({LeaseState.LOST}),
    LeaseState.LOST: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Lease:
    """`expires_us` is absolute on the Station's monotonic clock."""

    node: str
    epoch: int
    expires_us: int
    state: LeaseState = LeaseState.OFFERED
    reason: str = ""

    @classmethod
    def offer(cls, node: str, epoch: int, now_us: int) -> Lease:
        """A new lease that must be attested in time."""
        return cls(node=node, epoch=epoch, expires_us=now_us + CANARY_US)

    def apply(self, event: Event) -> Lease:
        """The lease after `event`."""
        match event:
            case Attested(epoch=epoch, now_us=now_us):
                if epoch != self.epoch or self.state is not LeaseState.OFFERED:
                    return self
                return replace(self._to(LeaseState.SERVING), expires_us=now_us + TTL_US)
            case Renewed(epoch=epoch, now_us=now_us):
                if epoch != self.epoch or self.state is not LeaseState.SERVING:
                    return self
                return replace(self, expires_us=max(self.expires_us, now_us + TTL_US))
            case Ended(epoch=epoch, reason=reason):
                if epoch != self.epoch or self.state is LeaseState.LOST:
                    return self
                return replace(self._to(LeaseState.LOST), reason=reason)
            case Ticked(now_us=now_us):
                if now_us < self.expires_us or self.state is LeaseState.LOST:
                    return self
                silent = "no heartbeat" if self.state is LeaseState.SERVING else "no canary row"
                return replace(self._to(LeaseState.LOST), reason=f"{silent} in time")
            case _:
                assert_never(event)

    def _to(self, state: LeaseState) -> Lease:
        assert state in ALLOWED[self.state], f"{self.node}: {self.state} -> {state}"
        return replace(self, state=state)
