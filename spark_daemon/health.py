"""What shows that a node is well: progress of its ring server, and the canary from time to time.

Health is progress: systemd's watchdog is fed when the ring server moved or provably has nothing to
do, never because a timer fired. Must not know how serving works.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from shared.core.ring_layout import Rows
from shared.io.systemd import Pulse
from spark_daemon.canary import prove_again
from spark_daemon.executor import Executor
from spark_daemon.ring_server import RingServer, ServeCounters

CANARY_PERIOD_US: Final = 300_000_000


@dataclass(frozen=True, slots=True)
class Attested:
    """The canary this node was granted its lease for."""

    bank_row: int
    seed: int
    row: Rows


@dataclass(slots=True)
class Vitals:
    """What the parts of a node tell each other about its health. Mutable, event loop only."""

    counters: ServeCounters = field(default_factory=ServeCounters)
    server: RingServer | None = None  # while serving
    attested: Attested | None = None
    was_ready: bool = False

    @property
    def busy(self) -> bool:
        """Whether a dispatch is announced or in hand."""
        return self.server is not None and self.server.busy

    def pulse(self) -> Pulse:
        """What the watchdog goes by."""
        return Pulse(self.counters.progress, idle=not self.busy)


async def recheck_canary(vitals: Vitals, executor: Executor, period_us: int) -> None:
    """Prove the kernel again every `period_us` while serving; CanaryFailed ends the node."""
    while True:
        await asyncio.sleep(period_us / 1e6)
        attested = vitals.attested
        if attested is not None and vitals.server is not None:
            await asyncio.to_thread(
                prove_again,
                executor,
                attested.row,
                bank_row=attested.bank_row,
                seed=attested.seed,
            )
