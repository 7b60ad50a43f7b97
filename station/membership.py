"""Which nodes serve, under which epoch: events in, actions out. Pure: no clock, no socket.

Theory. A node says Hello and gets an offer under a fresh epoch; when its canary row is right it is
granted and serves; heartbeats renew it; silence, a goodbye, a dead process or too many missed
deadlines end it. An ended lease never revives: the node's next Hello gets a higher epoch. A second
Hello of the process that serves ends its old lease first; one of another process of that name is
refused until the first is gone. What a node says before its Hello, while it loads its bank, is
remembered for people only: it decides nothing, and is forgotten when the node falls silent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeAlias, assert_never

from shared.core import lease as leases
from shared.core.lease import Lease, LeaseState
from shared.core.loading import Phase
from shared.core.placement import Placement
from shared.core.wire import PROTOCOL_VERSION, Hello, Loading

MISSES_TO_LOSE: Final = 3  # consecutive layers in which a node was the culprit
LOADING_US_MAX: Final = 5_000_000  # a loading node says every second how far it is


@dataclass(frozen=True, slots=True)
class HelloCame:
    """A node asks for a lease."""

    hello: Hello
    now_us: int


@dataclass(frozen=True, slots=True)
class LoadingCame:
    """A node says how far its bank is."""

    loading: Loading
    now_us: int


@dataclass(frozen=True, slots=True)
class LoadingEnded:
    """The connection over which a node reported its load is closed."""

    node: str


@dataclass(frozen=True, slots=True)
class CanaryJudged:
    """The offered node's canary row was compared with the Station's own."""

    node: str
    epoch: int
    right: bool
    now_us: int


@dataclass(frozen=True, slots=True)
class HeartbeatCame:
    """A node reports progress."""

    node: str
    epoch: int
    now_us: int


@dataclass(frozen=True, slots=True)
class NodeEnded:
    """A node is gone: goodbye, process exit, unreachable."""

    node: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class LayerMissed:
    """A node was the culprit of a layer: late, damaged or unreachable."""

    node: str
    epoch: int


@dataclass(frozen=True, slots=True)
class LayerServed:
    """A node answered in time."""

    node: str
    epoch: int


@dataclass(frozen=True, slots=True)
class TimePassed:
    """A moment on the Station's monotonic clock."""

    now_us: int


Event: TypeAlias = (
    LoadingCame
    | LoadingEnded
    | HelloCame
    | CanaryJudged
    | HeartbeatCame
    | NodeEnded
    | LayerMissed
    | LayerServed
    | TimePassed
)


@dataclass(frozen=True, slots=True)
class Offer:
    """Register a reply ring for the node and send it a LeaseOffer."""

    hello: Hello
    epoch: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Tell the node that it serves, and dispatch to it from now on."""

    node: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Answer a heartbeat."""

    node: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """No lease for this Hello."""

    node: str
    code: str
    text: str
    permanent: bool


@dataclass(frozen=True, slots=True)
class Fence:
    """Deregister the lease's region, stop dispatching under it, and tell the node if it listens."""

    node: str
    epoch: int
    reason: str


Action: TypeAlias = Offer | Grant | Acknowledge | Refuse | Fence


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How far a node was when it last said so."""

    phase: Phase
    done_bytes: int
    total_bytes: int
    came_us: int


@dataclass(slots=True)
class Membership:
    """Leases of all nodes of a placement (but not of the Station's own tier)."""

    placement: Placement
    kernel_id: int
    last_epoch: int
    leases: dict[str, Lease] = field(default_factory=dict)
    misses: dict[str, int] = field(default_factory=dict)
    holders: dict[str, int] = field(default_factory=dict)  # node -> incarnation that was offered
    loads: dict[str, LoadReport] = field(default_factory=dict)

    def apply(self, event: Event) -> list[Action]:
        """Move the state and return what the shell must do, in order."""
        match event:
            case LoadingCame(loading=loading, now_us=now_us):
                self._loading(loading, now_us)
                return []
            case LoadingEnded(node=node):
                self.loads.pop(node, None)
                return []
            case HelloCame(hello=hello, now_us=now_us):
                return self._hello(hello, now_us)
            case CanaryJudged(node=node, epoch=epoch, right=right, now_us=now_us):
                return self._canary(node, epoch, right=right, now_us=now_us)
            case HeartbeatCame(node=node, epoch=epoch, now_us=now_us):
                return self._heartbeat(node, epoch, now_us)
            case NodeEnded(node=node, epoch=epoch, reason=reason):
                return self._end(node, epoch, reason)
            case LayerMissed(node=node, epoch=epoch):
                return self._missed(node, epoch)
            case LayerServed(node=node, epoch=epoch):
                if self._is_current(node, epoch):
                    self.misses[node] = 0
                return []
            case TimePassed(now_us=now_us):
                return self._tick(now_us)
            case _:
                assert_never(event)

    def _loading(self, loading: Loading, now_us: int) -> None:
        """Remember it, unless nobody waits for the node or it holds a lease already."""
        node = loading.sender
        current = self.leases.get(node)
        is_held = current is not None and current.state is not LeaseState.LOST
        if is_held or node not in (placed.name for placed in self.placement.nodes):
            return
        self.loads[node] = LoadReport(
            loading.phase, loading.done_bytes, loading.total_bytes, now_us
        )

    def _hello(self, hello: Hello, now_us: int) -> list[Action]:
        refusal = self._refusal(hello)
        if refusal is not None:
            return [refusal]
        node = hello.sender
        actions: list[Action] = []
        current = self.leases.get(node)
        if current is not None and current.state is not LeaseState.LOST:
            if self.holders.get(node) != hello.incarnation:
                return [self._taken(node, current)]
            actions += self._end(node, current.epoch, "the node started again")
        self.loads.pop(node, None)
        self.holders[node] = hello.incarnation
        self.last_epoch += 1
        self.leases[node] = Lease.offer(node, self.last_epoch, now_us)
        self.misses[node] = 0
        return [*actions, Offer(hello, self.last_epoch)]

    def _taken(self, node: str, current: Lease) -> Refuse:
        """Two living processes of one name would take the lease from each other for ever."""
        return Refuse(
            node,
            "name_taken",
            f"another process serves as {node} under epoch {current.epoch}: stop one of them; its "
            f"lease ends when it stops, or {leases.TTL_US // 1_000_000} s after it falls silent",
            permanent=False,
        )

    def _refusal(self, hello: Hello) -> Refuse | None:
        placed = {node.name: node for node in self.placement.nodes}.get(hello.sender)
        bank = hello.bank

        def refuse(code: str, text: str) -> Refuse:
            return Refuse(hello.sender, code, text, permanent=True)

        if hello.protocol != PROTOCOL_VERSION:
            return refuse(
                "remote_protocol_error",
                f"node speaks control protocol {hello.protocol}, the Station {PROTOCOL_VERSION}: "
                "install the same version on both",
            )
        if placed is None:
            return refuse("placement_invalid", f"the placement has no node {hello.sender!r}")
        if placed.tier == "hbm" or not placed.bank_rows:
            return refuse(
                "placement_invalid",
                f"the placement gives node {hello.sender} no experts that a node could serve",
            )
        if placed.tier != hello.tier:
            return refuse(
                "placement_invalid",
                f"node {hello.sender} is of tier {hello.tier}, placed as {placed.tier}",
            )
        if bank.model_digest != self.placement.model_digest:
            return refuse(
                "digest_mismatch",
                f"bank {bank.name} was built from model {bank.model_digest[:16]}, the Station "
                f"serves {self.placement.model_digest[:16]}: build the bank again",
            )
        if bank.placement_digest != self.placement.digest or bank.rows != len(placed.bank_rows):
            return refuse(
                "digest_mismatch",
                f"bank {bank.name} was built for placement {bank.placement_digest[:16]}, the "
                f"Station uses {self.placement.digest[:16]}: build the bank again",
            )
        if hello.kernel_id != self.kernel_id:
            return refuse(
                "config_invalid",
                f"node {hello.sender} computes with kernel {hello.kernel_name} "
                f"({hello.kernel_id:#x}), the Station with {self.kernel_id:#x}: results would "
                "depend on where an expert lives; choose the same kernel",
            )
        return None

    def _canary(self, node: str, epoch: int, *, right: bool, now_us: int) -> list[Action]:
        if not self._is_current(node, epoch):
            return []
        if not right:
            return [
                *self._end(node, epoch, "wrong canary row"),
                Refuse(
                    node,
                    "canary_failed",
                    f"node {node} computed a wrong canary row: its memory, bank or kernel is bad: "
                    "compare its bank by `k3 bank verify --source`, then test its memory",
                    permanent=False,
                ),
            ]
        before = self.leases[node]
        after = before.apply(leases.Attested(epoch, now_us))
        self.leases[node] = after
        return [Grant(node, epoch)] if after is not before else []

    def _heartbeat(self, node: str, epoch: int, now_us: int) -> list[Action]:
        if not self._is_current(node, epoch):
            # the node believes in a lease that is over; telling it again is harmless
            return [Fence(node, epoch, "this lease is over")]
        self.leases[node] = self.leases[node].apply(leases.Renewed(epoch, now_us))
        return [Acknowledge(node, epoch)]

    def _missed(self, node: str, epoch: int) -> list[Action]:
        if not self._is_current(node, epoch):
            return []
        self.misses[node] = self.misses.get(node, 0) + 1
        if self.misses[node] < MISSES_TO_LOSE:
            return []
        reason = f"missed deadlines or sent damaged rows in {MISSES_TO_LOSE} layers in a row"
        return self._end(node, epoch, reason)

    def _tick(self, now_us: int) -> list[Action]:
        actions: list[Action] = []
        for node, load in list(self.loads.items()):
            if now_us - load.came_us > LOADING_US_MAX:
                del self.loads[node]
        for node, lease in list(self.leases.items()):
            after = lease.apply(leases.Ticked(now_us))
            if after is not lease:
                self.leases[node] = after
                actions.append(Fence(node, after.epoch, after.reason))
        return actions

    def _end(self, node: str, epoch: int, reason: str) -> list[Action]:
        if not self._is_current(node, epoch):
            return []
        self.leases[node] = self.leases[node].apply(leases.Ended(epoch, reason))
        return [Fence(node, epoch, reason)]

    def _is_current(self, node: str, epoch: int) -> bool:
        lease = self.leases.get(node)
        return lease is not None and lease.epoch == epoch and lease.state is not LeaseState.LOST
