"""Builds a node from its settings and runs it; turns every end into an exit status.

The only place that sets the event loop, installs signal handlers, takes a clock and draws random
numbers.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvloop
from structlog.typing import FilteringBoundLogger

from shared.core import wire
from shared.core.bank_header import BankHeader
from shared.core.errors import BankError, ConfigError, MeshError
from shared.core.wire import BankFacts, ToNode, ToStation
from shared.io import journal, keys
from shared.io.address import parse_address
from shared.io.arena import Arena
from shared.io.bank_file import BankFile
from shared.io.fabric import Fabric
from shared.io.fabric_shm import ShmFabric
from shared.io.link import NodeLink, connect
from shared.io.process import tie_to_parent
from shared.io.systemd import Notifier, watchdog_interval_us
from shared.kernels.select import select_kernel
from spark_daemon import config as configs
from spark_daemon.canary import Prover
from spark_daemon.config import Kind, NodeConfig
from spark_daemon.executor import BankIndex, Executor
from spark_daemon.loading import LoadReporter, bank_title, load_bank, stage_bank
from spark_daemon.node import Node
from spark_daemon.parts import Connect, NodeParts

CONNECT_US: Final = 1_000_000  # one attempt; also how long a stop may wait for it
RING_THREAD: Final = "k3-ring"


def main(
    kind: Kind,
    name: str,
    *,
    config_path: Path | None,
    overrides: Mapping[str, object | None],
    environ: Mapping[str, str],
) -> int:
    """Run node `name` until SIGTERM or SIGINT; the exit status of the process.

    0 after a stop, 75 when memory or a bank service was missing, 78 when a person has to act
    first, 1 after anything else, such as memory that changed. Every failure is one log line.
    """
    try:
        make_log = journal.configure(sys.stderr, environ, identifier=f"k3-{kind}")
    except ConfigError as error:
        print(f"k3-{kind}: {error.code}: {error}", file=sys.stderr)  # noqa: T201 - no log yet
        return error.exit_status
    log = make_log(node=name)
    failure: ExceptionGroup[Exception] | None = None
    try:
        config = configs.load(kind, name, path=config_path, overrides=overrides)
        tie_to_parent(environ)
        _serve(config, environ, log)
    except MeshError as error:
        failure = ExceptionGroup("node", [error])
    except ExceptionGroup as group:
        failure = group
    if failure is not None:
        return journal.log_failure(failure, log, "node_failed")
    log.info("node_stopped")
    return 0


def _serve(config: NodeConfig, environ: Mapping[str, str], log: FilteringBoundLogger) -> None:
    if not __debug__:
        raise ConfigError("python -O removes this program's own checks: run without it")
    notifier = Notifier.from_environ(environ)
    fabric = ShmFabric(spin_us=config.spin_us)
    ring_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=RING_THREAD)
    try:
        link = connector(config)  # checks address and keys before the bank is read: that takes long
        start = _Start(config, environ, log, notifier, fabric, ring_thread, link)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(start.run())
    finally:
        ring_thread.shutdown()
        fabric.close()


def connector(config: NodeConfig) -> Connect:
    """How this node opens a link; the key files are read once. Raises KeyRefused, ConfigError."""
    parse_address(config.station)
    own = keys.load_secret(Path(config.node_key))
    station = keys.load_public(Path(config.station_key))

    def open_link(
        tasks: asyncio.TaskGroup,
    ) -> AbstractAsyncContextManager[NodeLink[ToNode, ToStation]]:
        return connect(
            config.station,
            keys=own,
            station_key=station,
            decode=wire.decode_to_node,
            encode=wire.encode,
            tasks=tasks,
            timeout_us=CONNECT_US,
        )

    return open_link


def check_bank(header: BankHeader, config: NodeConfig) -> None:
    """BankError when a bank was built for another node or tier."""
    if header.node != config.name or header.tier != config.tier:
        raise BankError(
            f"{config.bank}: built for node {header.node} of tier {header.tier}, but this is "
            f"{config.name} of tier {config.tier}: name the right bank or build it for this node"
        )


@dataclass(frozen=True, slots=True)
class _Start:
    """From settings to a running node, on the event loop."""

    config: NodeConfig
    environ: Mapping[str, str]
    log: FilteringBoundLogger
    notifier: Notifier
    fabric: Fabric
    ring_thread: ThreadPoolExecutor
    link: Connect
    clock_ns: Callable[[], int] = time.monotonic_ns

    async def run(self) -> None:
        """Load the bank and serve it until SIGTERM or SIGINT."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        parts = await self._parts(stop)
        if parts is not None:
            await Node(parts).run(stop)

    async def _parts(self, stop: asyncio.Event) -> NodeParts | None:
        """What the node is made of; None when `stop` came before its bank was there."""
        config, incarnation, started_ns = self.config, secrets.randbits(63), self.clock_ns()
        reporter = LoadReporter(
            name=config.name,
            incarnation=incarnation,
            bank=bank_title(config),
            notifier=self.notifier,
            connect=self.link,
            log=self.log,
        )
        if not await stage_bank(config, reporter, stop):
            return None
        with BankFile.open(Path(config.bank)) as bank:
            header = bank.header
            check_bank(header, config)
            kernel = select_kernel(
                header.shape, config.kernel, header.layout, threads=config.kernel_threads
            )
            arena = await load_bank(bank, config, reporter, stop)
        if arena is None:
            return None
        self._log_loaded(header, arena, (self.clock_ns() - started_ns) // 1000)
        executor = Executor(kernel, arena.records, BankIndex(header.rows))
        reference = select_kernel(header.shape, "reference", header.layout)
        return NodeParts(
            name=config.name,
            tier=config.tier,
            bank=BankFacts(
                name=header.name,
                model_digest=header.model_digest,
                placement_digest=header.placement_digest,
                shape=header.shape,
                rows=len(header.rows),
            ),
            incarnation=incarnation,
            pid=os.getpid(),
            executor=executor,
            prover=Prover(executor, reference, header),
            fabric=self.fabric,
            ring_thread=self.ring_thread,
            connect=self.link,
            notifier=self.notifier,
            watchdog_us=watchdog_interval_us(self.environ, os.getpid()),
            canary_period_us=int(config.canary_period_s * 1e6),
            clock_ns=self.clock_ns,
            log=self.log,
        )

    def _log_loaded(self, header: BankHeader, arena: Arena, load_us: int) -> None:
        self.log.info(
            "bank_loaded",
            bank=header.name,
            rows=len(header.rows),
            arena_bytes=arena.records.nbytes,
            pages=arena.pages,
            load_us=load_us,
        )
