"""One layer's routed experts: split, dispatch, compute what is ours, collect, and never guess.

Theory. `rows` is a generator that yields whenever it has to wait for nodes, so that the engine can
run other lanes meanwhile; it holds no clock and no thread of its own. Every pair the router chose
is opened in a ledger and leaves it exactly once: by a node's verified row, by the Station's own
tier, or - when the place it was sent to is missing, late, lost or wrong - by another place that
holds a copy of the expert, each asked once. When none is left the declared policy decides: `exact`
computes it from the cold store, `fail` ends the request with one error that names the culprit. No
policy skips a pair.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shared.core.errors import (
    DeadlineExceeded,
    LayerFailed,
    MeshError,
    NodeLost,
    Refused,
    RowCorrupt,
)
from shared.core.placement import NOWHERE
from shared.core.ring_layout import Rows, RowStatus, all_finite, finite_rows
from shared.io.fabric import FabricError
from station.channel import Answer, NodeChannel, Ticket
from station.deadline import DeadlinePolicy, budget_us
from station.faults import Faults
from station.ledger import LayerLedger, Positions, WorkKey
from station.local_experts import ColdStore
from station.places import Places
from station.split import Share, chunks, group, local_tokens, split

OnMiss: TypeAlias = Literal["exact", "fail"]
_Mask: TypeAlias = npt.NDArray[np.bool_]
_OK: Final = RowStatus.OK.value
_NOT_FINITE: Final = RowStatus.NOT_FINITE.value


class Waiting(NamedTuple):
    """What a lane waits for: the replies of `tickets`, at most until `deadline_us`."""

    tickets: tuple[Ticket, ...]
    deadline_us: int


class Cause(Enum):
    """Why a pair did not come from the place that was asked for it."""

    NODE_LOST = "node lost"
    UNREACHABLE = "its ring cannot be written"
    NODE_BEHIND = "no free slot"
    DEADLINE = "deadline exceeded"
    CORRUPT = "rows corrupt or not finite"
    REFUSED = "rows refused"


_FAILURE: Final[dict[Cause, type[LayerFailed]]] = {
    Cause.NODE_LOST: NodeLost,
    Cause.UNREACHABLE: NodeLost,
    Cause.NODE_BEHIND: DeadlineExceeded,
    Cause.DEADLINE: DeadlineExceeded,
    Cause.CORRUPT: RowCorrupt,
    Cause.REFUSED: Refused,
}


@dataclass(frozen=True, slots=True)
class Orphans:
    """Pairs that the place that was asked for them will not answer."""

    place: int
    positions: Positions
    cause: Cause


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What the membership should hear about a lease after a layer."""

    node: str
    epoch: int
    missed: bool


@dataclass(slots=True)
class LayerTimes:
    """Microseconds of one layer's expert path.

    `trip_us` is what the last answer's hop took beside the node's own share: both ways, wake-ups
    and the Station's return from its wait.
    """

    post_us: int = 0
    local_us: int = 0
    wait_us: int = 0
    collect_us: int = 0
    cold_us: int = 0
    trip_us: int = 0


@dataclass(slots=True)
class LayerWork:
    """One layer of one lane: ids int64 [T, K] and activations uint16 (bf16 bits) [T, latent]."""

    key: WorkKey
    ids: npt.NDArray[np.int64]
    activations: Rows
    cold_rows: int = 0
    times: LayerTimes = field(default_factory=LayerTimes)


@dataclass(slots=True)
class ExpertPath:
    """What all layers share; used by the engine thread alone."""

    places: Places
    cold_store: ColdStore
    on_miss: OnMiss
    deadline: DeadlinePolicy
    now_us: Callable[[], int]
    report: Callable[[NodeReport], None]
    faults: Faults
    _next_ticket: int = 1

    def rows(
        self, work: LayerWork, meanwhile: Callable[[], None]
    ) -> Generator[Waiting, None, Rows]:
        """Rows uint16 [T * K, latent] in flat position order.

        `meanwhile` runs once, after the dispatches are on their way (shared experts).
        """
        run = _LayerRun(self, work)
        try:
            run.post()
            self.faults.after_post(work.key)
            meanwhile()
            run.compute_local()
            run.settle_orphans()
            while run.tickets:
                began_us = self.now_us()
                yield Waiting(tuple(run.tickets), run.deadline_us)
                came_us = self.now_us()
                work.times.wait_us += came_us - began_us
                run.collect()
                work.times.collect_us += self.now_us() - came_us
                run.settle_orphans()
        finally:
            # cancelled or failed: nobody waits for these any more
            run.abandon_rest()
        assert run.ledger.is_complete, f"{work.key}: layer closed with pending pairs"
        return run.out

    def take_ticket(self) -> int:
        """A number no other dispatch of this Station has."""
        number = self._next_ticket
        self._next_ticket += 1
        return number


class _LayerRun:
    """State of one layer while it runs."""

    def __init__(self, path: ExpertPath, work: LayerWork) -> None:
        self.path = path
        self.work = work
        self.ledger = LayerLedger(work.key, work.ids)
        self.out = np.empty((work.ids.size, work.activations.shape[1]), np.uint16)
        self.tickets: list[Ticket] = []
        self.orphans: list[Orphans] = []
        self.opened_us = path.now_us()
        self.deadline_us = self.opened_us
        self._local: list[tuple[int, Positions]] = []
        self._is_copy: _Mask | None = None  # [T * K]; None where no expert of the layer has one
        self._asked: _Mask | None = None  # [T * K, places], once a place failed
        self._blamed: set[NodeChannel] = set()
        self._top_k = work.ids.shape[1]
        self._trips_us: list[int] = []

    def post(self) -> None:
        """Dispatch every pair that a node computes; remember what is ours and what nobody has."""
        layer, ids, copies = self.work.key.layer, self.work.ids, self.path.places.copies
        if copies.is_in(layer):
            chosen = copies.choose(layer, ids)
            self._is_copy = copies.are_copies(layer, ids.reshape(-1), chosen)
            shares = group(chosen)
        else:
            shares = split(ids, copies.home[layer])
        self._send(shares, self.opened_us)
        self.work.times.post_us += self.path.now_us() - self.opened_us

    def compute_local(self) -> None:
        """The Station's own tiers work while remote rows travel."""
        began_us = self.path.now_us()
        local, self._local = self._local, []
        for place, positions in local:
            tier = self.path.places.local[place]
            experts = self.ledger.experts(positions)
            tokens = positions // self._top_k
            rows = tier.rows(self.work.key.layer, experts, tokens, self.work.activations)
            if not all_finite(rows):
                good = finite_rows(rows)
                self.orphans.append(Orphans(place, positions[~good], Cause.CORRUPT))
                positions, rows = positions[good], rows[good]
            self._account(place, positions, rows)
            self._credit(place, positions)
        self.work.times.local_us += self.path.now_us() - began_us

    def collect(self) -> None:
        """Take what has come; give up on what is lost or too late."""
        began_us = self.path.now_us()
        late = began_us >= self.deadline_us
        for ticket in tuple(self.tickets):
            channel = ticket.channel
            is_open = self.path.places.is_open(channel)
            has_rung = is_open and channel.has_rung(ticket)
            if is_open and not has_rung and not late:
                continue
            # forgotten first: whatever happens next, its slot is not given back a second time
            self.tickets.remove(ticket)
            if has_rung:
                self._take(ticket, began_us)
            elif is_open:
                self._give_up(ticket)
            else:
                self.orphans.append(Orphans(channel.place, ticket.positions, Cause.NODE_LOST))
        if self._trips_us:
            # whoever answered earlier only waited for the last one
            self.work.times.trip_us = min(self._trips_us)

    def settle_orphans(self) -> None:
        """Ask other holders of pairs that were missed; apply the policy where none is left."""
        while self.orphans:
            orphans, self.orphans = self.orphans, []
            for orphan in orphans:
                left = self._ask_copies(orphan)
                if not len(left):
                    continue
                if self.path.on_miss == "fail":
                    raise self._failure(orphan.place, left, orphan.cause)
                self._compute_cold(Orphans(orphan.place, left, orphan.cause))

    def abandon_rest(self) -> None:
        """Release the slots of dispatches that are still out."""
        for ticket in self.tickets:
            if self.path.places.is_open(ticket.channel):
                ticket.channel.abandon(ticket)
        self.tickets = []

    def _send(self, shares: Iterable[Share], began_us: int) -> None:
        """Post what nodes compute, with a budget from `began_us` on; put aside what is ours."""
        places = self.path.places
        remote: list[tuple[NodeChannel, Positions]] = []
        for place, positions in shares:
            channel = places.channel(place)
            if place in places.local:
                self._local.append((place, positions))
            elif channel is None:
                self.orphans.append(Orphans(place, positions, Cause.NODE_LOST))
            else:
                remote.append((channel, positions))
        if not remote:
            return
        curves = [channel.stats.hop for channel, _ in remote]
        budget = budget_us(self.path.deadline, curves)
        self.deadline_us = max(self.deadline_us, began_us + budget)
        for channel, positions in remote:
            self._dispatch(channel, positions, budget)

    def _ask_copies(self, orphan: Orphans) -> Positions:
        """Send missed pairs to another holder that serves; returns those that have none left.

        Each place is asked once per pair, so a layer ends after as many budgets as an expert has
        holders.
        """
        layer, copies = self.work.key.layer, self.path.places.copies
        if self._is_copy is None:
            return orphan.positions
        if self._asked is None:
            places = len(self.path.places.stats)
            self._asked = np.zeros((self.work.ids.size, places), np.bool_)
        positions = orphan.positions
        self._asked[positions, orphan.place] = True
        experts = self.ledger.experts(positions)
        others = copies.other(layer, experts, self._asked[positions])
        self._is_copy[positions] = copies.are_copies(layer, experts, others)
        found = others != NOWHERE
        if found.any():
            asked = positions[found]
            shares = [Share(place, asked[at]) for place, at in group(others[found])]
            self._send(shares, self.path.now_us())
            self.compute_local()
        left: Positions = positions[~found]
        return left

    def _dispatch(self, channel: NodeChannel, positions: Positions, budget: int) -> None:
        shape = channel.shape
        for piece in chunks(
            positions, self._top_k, max_rows=shape.max_rows, max_tokens=shape.max_tokens
        ):
            tokens, index = local_tokens(piece, self._top_k)
            every = self.work.activations
            activations = every if len(tokens) == len(every) else every[tokens]
            pairs = np.empty((len(piece), 2), np.uint16)
            pairs[:, 0] = index
            pairs[:, 1] = self.ledger.experts(piece)
            try:
                ticket = channel.post(
                    self.path.take_ticket(),
                    self.work.key.layer,
                    piece,
                    pairs,
                    activations,
                    budget,
                )
            except FabricError:
                self._blame(channel)
                self.orphans.append(Orphans(channel.place, piece, Cause.UNREACHABLE))
                continue
            if ticket is not None:
                self.tickets.append(ticket)
                continue
            self.orphans.append(Orphans(channel.place, piece, Cause.NODE_BEHIND))
            if channel.is_silent:  # else what is in flight will tell
                self._blame(channel)

    def _take(self, ticket: Ticket, came_us: int) -> None:
        channel = ticket.channel
        answer = channel.take(ticket)
        if answer is None:
            self._blame(channel)
            self.orphans.append(Orphans(channel.place, ticket.positions, Cause.CORRUPT))
            return
        self._trips_us.append(came_us - ticket.posted_us - answer.node_us)
        self._keep(ticket, answer)
        if channel.in_doubt:
            channel.in_doubt = False
            self.path.report(NodeReport(channel.node, channel.epoch, missed=False))

    def _keep(self, ticket: Ticket, answer: Answer) -> None:
        """Account what is good in a verified reply; the rest is orphaned."""
        channel = ticket.channel
        if not answer.status.any() and all_finite(answer.rows):
            self._account(channel.place, ticket.positions, answer.rows)
            self._credit(channel.place, ticket.positions)
            return
        good = answer.status == _OK
        bad_values = ~good & (answer.status == _NOT_FINITE)
        bad_values |= good & ~finite_rows(answer.rows)
        refused = ~good & ~bad_values
        kept = good & ~bad_values
        self._account(channel.place, ticket.positions[kept], answer.rows[kept])
        self._credit(channel.place, ticket.positions[kept])
        for mask, cause in ((bad_values, Cause.CORRUPT), (refused, Cause.REFUSED)):
            if mask.any():
                count = int(mask.sum())
                if cause is Cause.CORRUPT:
                    channel.stats.corrupt_rows += count
                else:
                    channel.stats.refused_rows += count
                self.orphans.append(Orphans(channel.place, ticket.positions[mask], cause))

    def _give_up(self, ticket: Ticket) -> None:
        """The deadline passed without this reply."""
        channel = ticket.channel
        channel.abandon(ticket)
        if self._blame(channel):
            channel.stats.missed_layers += 1
        self.orphans.append(Orphans(channel.place, ticket.positions, Cause.DEADLINE))

    def _blame(self, channel: NodeChannel) -> bool:
        """Report a culprit, once per layer however many dispatches it failed; whether it did."""
        if channel in self._blamed:
            return False
        self._blamed.add(channel)
        channel.in_doubt = True
        self.path.report(NodeReport(channel.node, channel.epoch, missed=True))
        return True

    def _compute_cold(self, orphan: Orphans) -> None:
        positions = self.ledger.pending_of(orphan.positions)
        if not len(positions):
            return
        began_us = self.path.now_us()
        experts = self.ledger.experts(positions)
        tokens = positions // self._top_k
        try:
            rows = self.path.cold_store.rows(
                self.work.key.layer, experts, tokens, self.work.activations
            )
        except MeshError as error:
            raise self._failure(
                orphan.place, positions, orphan.cause, f"; the cold store cannot help: {error}"
            ) from error
        good = finite_rows(rows)
        if not good.all():
            raise self._failure(orphan.place, positions[~good], Cause.CORRUPT)
        self._account(orphan.place, positions, rows)
        self.path.places.stats[orphan.place].cold_rows += len(positions)
        self.work.cold_rows += len(positions)
        self.work.times.cold_us += self.path.now_us() - began_us

    def _account(self, place: int, positions: Positions, rows: Rows) -> None:
        delivery = self.ledger.account(positions)
        if not delivery.duplicates:
            self.out[positions] = rows
            return
        self.out[positions[delivery.accepted]] = rows[delivery.accepted]
        self.path.places.stats[place].duplicate_rows += delivery.duplicates

    def _credit(self, place: int, positions: Positions) -> None:
        """Count rows that a place answered, and how many of them as a copy."""
        stats = self.path.places.stats[place]
        stats.rows += len(positions)
        if self._is_copy is not None:
            # of a few pairs, which is all there are in decoding, numpy's count takes twice as long
            stats.copy_rows += self._is_copy[positions].tolist().count(True)

    def _failure(
        self, place: int, positions: Positions, cause: Cause, detail: str = ""
    ) -> LayerFailed:
        return _FAILURE[cause](
            f"{self.work.key.request_id}: {cause.value}{detail}",
            node=self.path.places.name(place),
            layer=self.work.key.layer,
            experts=sorted({int(expert) for expert in self.ledger.experts(positions)}),
            elapsed_us=self.path.now_us() - self.opened_us,
        )
