"""What a node does next: joins, proves its kernel, serves, loses its lease, joins again. Pure.

One value per process; an event gives the next value and the actions the shell has to take, in
order. Times are microseconds of this process's monotonic clock. Messages of an old epoch, and
offers that are not above the last one taken from the same Station process, change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, assert_never

from shared.core import wire

BACKOFF_US_MIN: Final = 100_000
BACKOFF_US_MAX: Final = 2_000_000
GRANT_US: Final = 10_000_000  # from an offer taken to its grant
BEAT_US_MIN: Final = 10_000  # whatever an offer asks for
NEVER_US: Final = 2**63 - 1
STOPS: Final = "the node stops"


class NodeState(Enum):
    """Where a node is in its life."""

    JOINING = "joining"  # no lease; greets the Station when there is a connection
    OFFERED = "offered"  # answered an offer, waits for the grant
    SERVING = "serving"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class Connected:
    """The Station admitted this node's key."""

    now_us: int


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection ended, or could not be made."""

    now_us: int


@dataclass(frozen=True, slots=True)
class Received:
    """A message of the Station."""

    message: wire.ToNode
    now_us: int


@dataclass(frozen=True, slots=True)
class LeaseBroken:
    """The shell cannot go on with a lease, e.g. the Station's ring is gone."""

    epoch: int
    reason: str
    now_us: int


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed."""

    now_us: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The process is to end: the operator wants it, or its canary failed."""

    reason: str = STOPS


Event = Connected | Disconnected | Received | LeaseBroken | Ticked | StopRequested


@dataclass(frozen=True, slots=True)
class Greet:
    """Send a Hello."""


@dataclass(frozen=True, slots=True)
class OpenLease:
    """Register the request ring, reach the reply ring, compute the canary, answer."""

    offer: wire.LeaseOffer


@dataclass(frozen=True, slots=True)
class Serve:
    """Start the ring server."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Beat:
    """Send a heartbeat."""

    epoch: int


@dataclass(frozen=True, slots=True)
class CloseLease:
    """Finish the dispatch in hand, then close the request ring and the rest of the lease."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class SayGoodbye:
    """Tell the Station that this node stops on purpose, and why."""

    epoch: int
    reason: str = STOPS


@dataclass(frozen=True, slots=True)
class Fail:
    """End the process: the Station refused this node for good."""

    code: str
    text: str


Action = Greet | OpenLease | Serve | Beat | CloseLease | SayGoodbye | Fail


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """State of a node between two events."""

    state: NodeState = NodeState.JOINING
    is_connected: bool = False
    offer: wire.LeaseOffer | None = None  # of the lease that is offered or served
    fence: tuple[int, int] = (-1, -1)  # Station incarnation and epoch of the last offer taken
    backoff_us: int = BACKOFF_US_MIN
    retry_at_us: int = 0  # when to connect or greet again
    expires_us: int = NEVER_US
    beat_at_us: int = NEVER_US

    @property
    def due_us(self) -> int:
        """When time alone will cause something: the shell sends Ticked then."""
        if self.state is NodeState.JOINING:
            return self.retry_at_us
        return min(self.expires_us, self.beat_at_us)

    def apply(self, event: Event) -> tuple[Lifecycle, tuple[Action, ...]]:
        """The next value and what to do."""
        if self.state is NodeState.STOPPING:
            return self, ()
        match event:
            case Connected(now_us=now_us):
                return _retry_after(replace(self, is_connected=True), now_us), (Greet(),)
            case Disconnected(now_us=now_us):
                lost, actions = self._lose("the connection to the Station ended", now_us)
                if not actions:
                    lost = _retry_after(self, now_us)
                return replace(lost, is_connected=False), actions
            case Received(message=message, now_us=now_us):
                return self._receive(message, now_us)
            case LeaseBroken(epoch=epoch, reason=reason, now_us=now_us):
                held = self.offer is not None and self.offer.epoch == epoch
                return self._lose(reason, now_us) if held else (self, ())
            case Ticked(now_us=now_us):
                return self._tick(now_us)
            case StopRequested(reason=reason):
                return self._stop(reason)
            case _:
                assert_never(event)

    def _receive(self, message: wire.ToNode, now_us: int) -> tuple[Lifecycle, tuple[Action, ...]]:
        match message:
            case wire.LeaseOffer():
                return self._take(message, now_us)
            case wire.LeaseGranted(incarnation=incarnation, epoch=epoch):
                held = self._holds(incarnation, epoch, NodeState.OFFERED)
                if self.offer is None or not held:
                    return self, ()
                serving = replace(
                    self,
                    state=NodeState.SERVING,
                    backoff_us=BACKOFF_US_MIN,
                    expires_us=now_us + self.offer.ttl_us,
                    beat_at_us=now_us,
                )
                return serving, (Serve(epoch),)
            case wire.HeartbeatSeen(incarnation=incarnation, epoch=epoch):
                held = self._holds(incarnation, epoch, NodeState.SERVING)
                if self.offer is None or not held:
                    return self, ()
                return replace(self, expires_us=now_us + self.offer.ttl_us), ()
            case wire.LeaseRevoked(incarnation=incarnation, epoch=epoch, reason=reason):
                held = self._holds(incarnation, epoch)
                return self._lose(reason, now_us) if held else (self, ())
            case wire.HelloRefused(code=code, text=text, permanent=permanent):
                if self.state is not NodeState.JOINING:
                    return self, ()
                return self, (Fail(code, text),) if permanent else ()
            case _:
                assert_never(message)

    def _take(self, offer: wire.LeaseOffer, now_us: int) -> tuple[Lifecycle, tuple[Action, ...]]:
        incarnation, epoch = self.fence
        if offer.incarnation == incarnation and offer.epoch <= epoch:
            return self, ()
        closing = (CloseLease(self.offer.epoch, "replaced by a new offer"),) if self.offer else ()
        offered = replace(
            self,
            state=NodeState.OFFERED,
            offer=offer,
            fence=(offer.incarnation, offer.epoch),
            expires_us=now_us + GRANT_US,
            beat_at_us=NEVER_US,
        )
        return offered, (*closing, OpenLease(offer))

    def _tick(self, now_us: int) -> tuple[Lifecycle, tuple[Action, ...]]:
        if self.state is NodeState.JOINING:
            if not self.is_connected or now_us < self.retry_at_us:
                return self, ()
            return _retry_after(self, now_us), (Greet(),)
        assert self.offer is not None, "a node that is offered or serving has an offer"
        if now_us >= self.expires_us:
            missing = "heartbeat answer" if self.state is NodeState.SERVING else "grant"
            return self._lose(f"no {missing} of the Station in time", now_us)
        if now_us < self.beat_at_us:
            return self, ()
        beat_us = max(BEAT_US_MIN, self.offer.heartbeat_us)
        return replace(self, beat_at_us=now_us + beat_us), (Beat(self.offer.epoch),)

    def _stop(self, reason: str) -> tuple[Lifecycle, tuple[Action, ...]]:
        stopping = replace(self, state=NodeState.STOPPING, offer=None)
        if self.offer is None:
            return stopping, ()
        epoch = self.offer.epoch
        return stopping, (CloseLease(epoch, reason), SayGoodbye(epoch, reason))

    def _lose(self, reason: str, now_us: int) -> tuple[Lifecycle, tuple[Action, ...]]:
        if self.offer is None:
            return self, ()
        joining = replace(
            self,
            state=NodeState.JOINING,
            offer=None,
            expires_us=NEVER_US,
            beat_at_us=NEVER_US,
        )
        return _retry_after(joining, now_us), (CloseLease(self.offer.epoch, reason),)

    def _holds(self, incarnation: int, epoch: int, state: NodeState | None = None) -> bool:
        if self.offer is None or (self.offer.incarnation, self.offer.epoch) != (incarnation, epoch):
            return False
        return state is None or self.state is state


def _retry_after(life: Lifecycle, now_us: int) -> Lifecycle:
    return replace(
        life,
        retry_at_us=now_us + life.backoff_us,
        backoff_us=min(2 * life.backoff_us, BACKOFF_US_MAX),
    )
