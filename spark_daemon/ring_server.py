"""Serves one lease's request ring: wait, copy, verify, compute, write the rows back.

Runs on one thread and holds no interpreter lock while it waits. Theory of operation:

- A bell is a wake-up. When a slot's bell differs from the value last handled, the slot is copied
  and the copy verified. A good frame is queued; the lowest ticket is served first.
- A frame that is refused is counted once per bell value and never answered. Because a bell may be
  seen before the bytes it announces, the slot stays under suspicion for a while and is looked at
  again, so that a frame that was merely late is served and one that is damaged is given up.
- The rows go into the same slot index and generation of the reply ring, which is how the Station
  knows which dispatch they answer.

Must not know sockets, leases beyond their epoch, or why it is stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from shared.core.ring_layout import (
    Header,
    Pairs,
    RingShape,
    Rows,
    Verdict,
    build_reply,
    parse_dispatch,
)
from shared.core.wire import NodeCounters
from shared.io.fabric import Fabric, Region, RemoteRegion
from shared.io.ring import Frame, bells, receive, send
from spark_daemon.executor import Executor

IDLE_WAIT_US: Final = 1_000_000  # every wait is bounded; an idle node looks around once a second
SUSPECT_WAIT_US: Final = 1_000
SUSPECT_US: Final = 100_000  # a late body follows its bell within microseconds; then it is damage
_U32_MAX: Final = 2**32 - 1


@dataclass(slots=True)
class ServeCounters:
    """What a node did since it started. Mutable: the ring thread counts, others only read."""

    dispatches: int = 0
    rows: int = 0
    refused_rows: int = 0
    corrupt_dispatches: int = 0
    progress: int = 0

    def snapshot(self) -> NodeCounters:
        """The part that travels in heartbeats."""
        return NodeCounters(
            dispatches=self.dispatches,
            rows=self.rows,
            refused_rows=self.refused_rows,
            corrupt_dispatches=self.corrupt_dispatches,
        )


@dataclass(frozen=True, slots=True)
class LeaseRings:
    """The memory of one lease: ring here, ring at the Station, and the geometry of both."""

    epoch: int
    shape: RingShape
    requests: Region
    replies: RemoteRegion


@dataclass(frozen=True, slots=True)
class _Pending:
    """A verified dispatch that waits for its turn; its arrays are views into a private copy."""

    header: Header
    pairs: Pairs
    activations: Rows
    noticed_ns: int


class RingServer:
    """The hot loop of a node; `run` is the body of its thread."""

    def __init__(
        self,
        rings: LeaseRings,
        *,
        fabric: Fabric,
        executor: Executor,
        counters: ServeCounters,
        clock_ns: Callable[[], int],
    ) -> None:
        """`clock_ns` is monotonic; `counters` outlive this lease."""
        self._rings = rings
        self._fabric = fabric
        self._executor = executor
        self._counters = counters
        self._clock_ns = clock_ns
        self._bells = bells(rings.requests, rings.shape)
        self._seen: npt.NDArray[np.uint64] = np.zeros(rings.shape.slots, np.uint64)
        self._pending: dict[int, _Pending] = {}
        self._suspects: dict[int, int] = {}  # slot -> when its bell was first noticed
        self._stopping = False
        self._waiting = False

    @property
    def busy(self) -> bool:
        """Whether any dispatch is in hand, queued, or announced by a bell."""
        return not self._waiting or bool(np.any(self._bells != self._seen))

    def run(self) -> None:
        """Serve until `stop`. FabricError when the Station's ring cannot be written any more."""
        while not self._stopping:
            self._look()
            if self._pending:
                self._serve(min(self._pending, key=self._ticket))
                continue
            self._waiting = True
            wait_us = SUSPECT_WAIT_US if self._suspects else IDLE_WAIT_US
            self._fabric.wait_changed(self._rings.requests, self._seen, wait_us)
            self._waiting = False
            self._counters.progress += 1

    def stop(self) -> None:
        """Make `run` return after the dispatch in hand; callable from any thread."""
        self._stopping = True
        self._fabric.interrupt()

    def _ticket(self, slot: int) -> int:
        return self._pending[slot].header.ticket

    def _look(self) -> None:
        """Take in every slot whose bell moved, and look again at those under suspicion."""
        now_ns = self._clock_ns()
        rung = self._bells.copy()
        for slot in np.flatnonzero(rung != self._seen).tolist():
            self._seen[slot] = rung[slot]
            self._pending.pop(slot, None)  # the Station gave the older dispatch up
            self._suspects.pop(slot, None)
            if not self._take(slot, now_ns):
                self._suspects[slot] = now_ns
                self._counters.corrupt_dispatches += 1
        for slot, since_ns in list(self._suspects.items()):
            if now_ns == since_ns:
                continue
            if self._take(slot, since_ns) or now_ns - since_ns > SUSPECT_US * 1000:
                del self._suspects[slot]

    def _take(self, slot: int, noticed_ns: int) -> bool:
        """Copy and verify a slot; whether a good dispatch was queued."""
        shape = self._rings.shape
        frame = receive(
            self._rings.requests,
            shape,
            slot,
            shape.request_slot_bytes,
            epoch=self._rings.epoch,
            generation=int(self._seen[slot]),
        )
        if isinstance(frame, Verdict):
            return False
        dispatch = _parse(frame, shape)
        if dispatch is None:
            return False
        self._pending[slot] = _Pending(frame.header, *dispatch, noticed_ns)
        return True

    def _serve(self, slot: int) -> None:
        work = self._pending.pop(slot)
        started_ns = self._clock_ns()
        outcome = self._executor.run(work.header.layer, work.pairs, work.activations)
        payload = build_reply(work.pairs, outcome.status, outcome.rows)
        header = work.header._replace(
            payload_bytes=len(payload),
            time_us=_u32_us(started_ns - work.noticed_ns),
            compute_us=_u32_us(self._clock_ns() - started_ns),
            kernel_id=self._executor.kernel.kernel_id,
        )
        # counted before the bell: who has seen an answer sees it counted
        self._counters.dispatches += 1
        self._counters.rows += len(work.pairs)
        self._counters.refused_rows += outcome.refused
        self._counters.progress += 1
        shape = self._rings.shape
        send(self._rings.replies, shape, slot, shape.reply_slot_bytes, header, payload)


def _parse(frame: Frame, shape: RingShape) -> tuple[Pairs, Rows] | None:
    """Pairs and activations of a verified frame, None when its counts break the ring's geometry.

    Rows are bounded apart from the length: few tokens with very many rows fit a request slot, but
    their answer would not fit the reply slot.
    """
    header = frame.header
    if header.rows > shape.max_rows or header.tokens > shape.max_tokens:
        return None
    return parse_dispatch(header, frame.payload, shape.latent)


def _u32_us(span_ns: int) -> int:
    return min(span_ns // 1000, _U32_MAX)
