"""What shows that a node is well: progress of its ring server, and the canary from time to time.

Health is progress: systemd's watchdog is fed when the ring server moved or provably has nothing to
do, never because a timer fired. Must not know how serving works.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import cycle
from typing import Final

from shared.io.systemd import Pulse
from spark_daemon.canary import CanaryFailed, Proved, Prover
from spark_daemon.ring_server import RingServer, ServeCounters

IDLE_LOOK_US: Final = 20_000


@dataclass(slots=True)
class Vitals:
    """What the parts of a node tell each other about its health. Mutable, event loop only."""

    counters: ServeCounters = field(default_factory=ServeCounters)
    server: RingServer | None = None  # while serving
    attested: Proved | None = None  # the canary this node was granted its lease for
    goldens: tuple[Proved, ...] = ()  # what its kernel made of the bank's, before it joined
    was_ready: bool = False
    failure: CanaryFailed | None = None
    failed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def busy(self) -> bool:
        """Whether a dispatch is announced or in hand."""
        return self.server is not None and self.server.busy

    def pulse(self) -> Pulse:
        """What the watchdog goes by."""
        return Pulse(self.counters.progress, idle=not self.busy)

    def fail(self, error: CanaryFailed) -> None:
        """This node must not serve any more; the first reason counts."""
        self.failure = self.failure or error
        self.failed.set()


async def recheck_canary(vitals: Vitals, prover: Prover, period_us: int) -> None:
    """Prove kernel and memory again every `period_us`, one golden after the other.

    And the canary of the lease while one is served. A proof waits for an idle moment, at most as
    long as a period: a node that is never idle proves itself beside its work, which takes
    milliseconds. CanaryFailed ends the node.
    """
    goldens = cycle(vitals.goldens)
    while True:
        await asyncio.sleep(period_us / 1e6)
        lease = vitals.attested if vitals.server is not None else None
        for proved in (lease, next(goldens, None)):
            if proved is not None:
                await _idle_moment(vitals, period_us)
                await asyncio.to_thread(prover.prove_again, proved)


async def _idle_moment(vitals: Vitals, limit_us: int) -> None:
    """Return when nothing is announced or in hand, or after `limit_us`."""
    for _ in range(limit_us // IDLE_LOOK_US):
        if not vitals.busy:
            return
        await asyncio.sleep(IDLE_LOOK_US / 1e6)
