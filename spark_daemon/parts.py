"""Everything a running node is made of; built in daemon.py, replaced piece by piece in tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from structlog.typing import FilteringBoundLogger

from shared.core.names import NodeName
from shared.core.placement import Tier
from shared.core.wire import BankFacts, ToNode, ToStation
from shared.io.fabric import Fabric
from shared.io.link import NodeLink
from shared.io.systemd import Notifier
from spark_daemon.canary import Prover
from spark_daemon.executor import Executor

Connect = Callable[[asyncio.TaskGroup], AbstractAsyncContextManager[NodeLink[ToNode, ToStation]]]


@dataclass(frozen=True, slots=True)
class NodeParts:
    """The parts and the facts of one node process."""

    name: NodeName
    tier: Tier
    bank: BankFacts
    incarnation: int
    pid: int
    executor: Executor
    prover: Prover
    fabric: Fabric
    ring_thread: ThreadPoolExecutor  # one worker
    connect: Connect
    notifier: Notifier
    watchdog_us: int | None
    canary_period_us: int
    clock_ns: Callable[[], int]
    log: FilteringBoundLogger

    def now_us(self) -> int:
        """This process's monotonic clock."""
        return self.clock_ns() // 1000
