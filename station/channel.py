"""The Station's end of one lease: post dispatches into a node's ring, take rows out of its replies.

Owned by the engine thread alone, from the grant to the fence. Decides nothing about misses: it
reports what it sees, and its counters say what it refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shared.core.ring_layout import (
    Header,
    Pairs,
    RingShape,
    Rows,
    Verdict,
    build_dispatch,
    parse_reply,
)
from shared.io import ring
from shared.io.fabric import FabricError, Region, RemoteRegion, Watch
from station.deadline import HopCurve
from station.hop_table import HopTable
from station.ledger import Positions
from station.slots import SlotTable

TORN_REREADS: Final = 8


class NodeStats:
    """What the Station has seen of one node since it started, over all its leases."""

    def __init__(self) -> None:
        """All zero."""
        self.rows = 0
        self.copy_rows = 0  # those of `rows` whose expert lives elsewhere
        self.dispatches = 0
        self.duplicate_rows = 0
        self.stale_rows = 0
        self.corrupt_rows = 0
        self.refused_rows = 0
        self.cold_rows = 0  # rows owed by this node that the cold store computed
        self.missed_layers = 0
        self.losses = 0
        self.last_loss = ""
        self.answers = 0
        self.queue_us = 0  # sum over answers, as the node reports it
        self.compute_us = 0
        self.hop = HopCurve()
        self.hops = HopTable()


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """One dispatch in flight; `positions` are the layer's pairs it carries, in wire order."""

    number: int
    channel: NodeChannel
    slot: int
    generation: int
    positions: Positions
    pairs: Pairs
    tokens: int
    posted_us: int

    @property
    def watch(self) -> Watch:
        """The bell that announces the reply."""
        return Watch(self.channel.reply_ring, self.slot, self.generation)


class Answer(NamedTuple):
    """A verified reply: rows uint16 [R, latent] (bf16 bits) and a status byte per row."""

    rows: Rows
    status: npt.NDArray[np.uint8]
    queue_us: int
    compute_us: int

    @property
    def node_us(self) -> int:
        """The node's own share of the hop."""
        return self.queue_us + self.compute_us


class NodeChannel:
    """Dispatching under one lease."""

    def __init__(
        self,
        *,
        node: str,
        place: int,
        epoch: int,
        shape: RingShape,
        request_ring: RemoteRegion,
        reply_ring: Region,
        kernel_id: int,
        stats: NodeStats,
        now_us: Callable[[], int],
        pause: Callable[[], None],
    ) -> None:
        """Take ownership of both rings; `place` is the node's index in the placement.

        `pause` waits about a hundred microseconds between two looks at a torn frame.
        """
        self.node = node
        self.place = place
        self.epoch = epoch
        self.shape = shape
        self.reply_ring = reply_ring
        self.stats = stats
        self.in_doubt = False  # missed a deadline and has not answered since
        self._request_ring = request_ring
        self._request_slot_bytes = shape.request_slot_bytes
        self._reply_slot_bytes = shape.reply_slot_bytes
        self._kernel_id = kernel_id
        self._slots = SlotTable(shape.slots)
        self._late: dict[int, Ticket] = {}
        self._bells = ring.bells(reply_ring, shape)
        self._now_us = now_us
        self._pause = pause

    def post(
        self,
        number: int,
        layer: int,
        positions: Positions,
        pairs: Pairs,
        activations: Rows,
        budget_us: int,
    ) -> Ticket | None:
        """Write a dispatch; None when every slot is taken (the node is far behind).

        FabricError when the node's ring cannot be written; the slot is free again then.
        """
        self.reap()
        taken = self._slots.acquire()
        if taken is None:
            return None
        slot, generation = taken
        ticket = Ticket(
            number, self, slot, generation, positions, pairs, len(activations), self._now_us()
        )
        payload = build_dispatch(pairs, activations)
        header = Header(
            layer=layer,
            epoch=self.epoch,
            generation=generation,
            ticket=number,
            tokens=len(activations),
            rows=len(pairs),
            payload_bytes=len(payload),
            time_us=budget_us,
            compute_us=0,
            kernel_id=self._kernel_id,
        )
        try:
            ring.send(
                self._request_ring, self.shape, slot, self._request_slot_bytes, header, payload
            )
        except FabricError:
            self._slots.release(slot)
            raise
        self.stats.dispatches += 1
        return ticket

    @property
    def is_silent(self) -> bool:
        """Whether the ring is full of dispatches that nobody waits for any more."""
        return self._slots.is_all_abandoned

    def has_rung(self, ticket: Ticket) -> bool:
        """Whether the reply's bell shows; a wake-up, not a proof."""
        return int(self._bells[ticket.slot]) == ticket.generation

    def take(self, ticket: Ticket) -> Answer | None:
        """The verified reply, or None when what lies in the slot must not be used (counted).

        A bell may overtake its body, so a frame that does not verify is read again for a moment
        before it is called corrupt; the slot is then kept out of use until the next reap.
        """
        for _ in range(TORN_REREADS):
            answer = self._read(ticket)
            if isinstance(answer, Answer):
                self._slots.release(ticket.slot)
                hop_us = self._now_us() - ticket.posted_us
                self.stats.hop.observe(hop_us)
                if ticket.tokens == 1:
                    self.stats.hops.observe(len(ticket.pairs), hop_us, answer.node_us)
                self.stats.answers += 1
                self.stats.queue_us += answer.queue_us
                self.stats.compute_us += answer.compute_us
                return answer
            self._pause()
        rows = len(ticket.positions)
        if answer is Verdict.CORRUPT:
            self.stats.corrupt_rows += rows
        else:
            self.stats.stale_rows += rows
        self.abandon(ticket)
        return None

    def abandon(self, ticket: Ticket) -> None:
        """Stop waiting; rows that still come are duplicates."""
        self._slots.abandon(ticket.slot)
        self._late[ticket.slot] = ticket

    def reap(self) -> None:
        """Count late replies and free their slots."""
        for slot, ticket in list(self._late.items()):
            if self.has_rung(ticket):
                if isinstance(self._read(ticket), Answer):
                    self.stats.duplicate_rows += len(ticket.positions)
                del self._late[slot]
                self._slots.release(slot)

    def close(self) -> None:
        """Fence: deregister the reply ring first, so nothing the node still writes is seen."""
        self.reply_ring.close()
        self._request_ring.close()
        self._late.clear()  # tickets know their channel: a cycle would keep the rings' memory

    def _read(self, ticket: Ticket) -> Answer | Verdict:
        frame = ring.receive(
            self.reply_ring,
            self.shape,
            ticket.slot,
            self._reply_slot_bytes,
            epoch=self.epoch,
            generation=ticket.generation,
        )
        if isinstance(frame, Verdict):
            return frame
        header = frame.header
        if header.ticket != ticket.number or header.kernel_id != self._kernel_id:
            return Verdict.STALE_GENERATION
        parsed = parse_reply(header, frame.payload, self.shape.latent)
        if parsed is None or parsed[0].tobytes() != ticket.pairs.tobytes():
            return Verdict.CORRUPT
        _, status, values = parsed
        return Answer(values, status, header.time_us, header.compute_us)
