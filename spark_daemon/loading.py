"""Brings a node's bank into memory while the event loop lives, and tells everybody how far it is.

Owns the thread that loads, what the service manager and the Station hear meanwhile, and that a stop
is obeyed at once. Must not know how records are read, or what serves them afterwards.

The manager's start timeout is extended only while bytes move, or while the load waits its bounded
time for memory: a disk that hangs is killed in time. A Station that cannot be told changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from structlog.typing import FilteringBoundLogger

from shared.core.errors import ConfigError, MemoryFloorReached
from shared.core.loading import MemoryFloor, default_floor_bytes
from shared.core.names import NodeName
from shared.core.wire import Loading
from shared.io.arena import Arena, LoadPlan, LoadProgress, load_arena
from shared.io.bank_file import BankFile
from shared.io.link import StationUnreachable
from shared.io.memory import total_bytes
from shared.io.systemd import Notifier
from shared.io.threads import DaemonThreads
from spark_daemon.config import NodeConfig
from spark_daemon.parts import Connect

T = TypeVar("T")

LOOK_US: Final = 1_000_000
EXTENSION_US: Final = 30_000_000  # how long no byte may move before the manager ends the start
STOP_US: Final = 500_000  # for the loading thread to end; one that hangs is left behind


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReporter:
    """Tells the service manager and the Station how far a load is, about once a second.

    A load that is over before the first look is not reported.
    """

    name: NodeName
    incarnation: int
    bank: str
    notifier: Notifier
    connect: Connect
    log: FilteringBoundLogger
    look_us: int = LOOK_US
    extension_us: int = EXTENSION_US

    async def run(self, progress: LoadProgress) -> None:
        """Report until cancelled. The link to the Station is closed when this returns."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tell_manager(progress), name="load_status")
            tasks.create_task(self._tell_station(progress), name="load_reports")

    async def _tell_manager(self, progress: LoadProgress) -> None:
        seen_bytes, was_waiting = 0, False
        self.notifier.notify(STATUS=progress.text(self.bank))
        while True:
            await asyncio.sleep(self.look_us / 1e6)
            waits_for, done_bytes = progress.waits_for, progress.done_bytes
            fields: dict[str, str | int] = {"STATUS": progress.text(self.bank)}
            if done_bytes != seen_bytes or waits_for:
                fields["EXTEND_TIMEOUT_USEC"] = self.extension_us
            self.notifier.notify(**fields)
            if waits_for and not was_waiting:
                self.log.warning("bank_load_waits", bank=self.bank, reason=waits_for)
            seen_bytes, was_waiting = done_bytes, bool(waits_for)

    async def _tell_station(self, progress: LoadProgress) -> None:
        is_welcome = True
        while is_welcome:
            await asyncio.sleep(self.look_us / 1e6)
            try:
                async with asyncio.TaskGroup() as tasks:
                    await self._report(progress, tasks)
            except* StationUnreachable:
                pass  # nobody is told; the node says so when it joins and still finds none
            except* ConfigError:  # a refused key ends the node when it joins, not its load
                is_welcome = False

    async def _report(self, progress: LoadProgress, tasks: asyncio.TaskGroup) -> None:
        async with self.connect(tasks) as link:
            while True:
                total_bytes = progress.total_bytes
                link.send(
                    Loading(
                        sender=self.name,
                        incarnation=self.incarnation,
                        phase=progress.phase,
                        # whoever makes progress may move both between our two looks
                        done_bytes=min(progress.done_bytes, total_bytes),
                        total_bytes=total_bytes,
                    )
                )
                await asyncio.sleep(self.look_us / 1e6)


async def stage_bank(config: NodeConfig, reporter: LoadReporter, stop: asyncio.Event) -> bool:
    """Bring the bank to this node's disk if it is missing; False when `stop` was set first.

    Errors as in `ensure_bank`, in an ExceptionGroup.
    """
    if config.bank_service and not _is_there(config.bank):
        from spark_daemon.staging.stage import ensure_bank  # most nodes never pull a bank

        progress = LoadProgress("staging")
        work = ensure_bank(
            config,
            progress.move,
            notice=lambda line: reporter.log.info("bank_staging", bank=reporter.bank, detail=line),
        )
        await attend(work, progress, reporter, stop)
    return not stop.is_set()


async def load_bank(
    bank: BankFile, config: NodeConfig, reporter: LoadReporter, stop: asyncio.Event
) -> Arena | None:
    """All records of `bank` in memory as `config` wants them; None when `stop` was set first.

    Errors as in `load_arena`, in an ExceptionGroup.
    """
    progress = LoadProgress(total_bytes=bank.arena_bytes)
    plan = LoadPlan(pin=config.pin, floor=memory_floor(config))
    work = on_a_thread(partial(load_arena, bank, plan, progress), progress)
    try:
        return await attend(work, progress, reporter, stop)
    except* MemoryFloorReached as group:
        reporter.notifier.notify(STATUS=str(group.exceptions[0]))
        raise


def memory_floor(config: NodeConfig) -> MemoryFloor:
    """What the settings say, or the default for this machine, unit or container."""
    floor_bytes = config.memory_floor_bytes
    if floor_bytes is None:
        floor_bytes = default_floor_bytes(total_bytes() or 0)
    return MemoryFloor(floor_bytes, config.memory_wait_us)


def bank_title(config: NodeConfig) -> str:
    """What a bank is called before its header can be read."""
    return Path(config.bank).stem


def _is_there(bank: str) -> bool:
    """Whether there is a file to load; also where nobody may look, which opening it explains."""
    try:
        return Path(bank).exists()
    except OSError:
        return True


async def attend(
    work: Coroutine[Any, Any, T],
    progress: LoadProgress,
    reporter: LoadReporter,
    stop: asyncio.Event,
) -> T | None:
    """What `work` returns, told about while it runs; None when `stop` ended it first."""
    async with asyncio.TaskGroup() as tasks:
        working = tasks.create_task(work, name="load")
        stopping = tasks.create_task(stop.wait(), name="stop")
        telling = tasks.create_task(reporter.run(progress), name="load_reporter")
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        for task in (working, stopping, telling):
            task.cancel()
    return None if working.cancelled() else working.result()


async def on_a_thread(work: Callable[[], T], progress: LoadProgress) -> T:
    """Run `work` beside the loop; cancelling tells it to stop and waits for it, bounded."""
    with DaemonThreads(1, "k3-bank") as threads:
        running = asyncio.wrap_future(threads.submit(work))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            progress.stop.set()
            await asyncio.wait((running,), timeout=STOP_US / 1e6)
            if running.done():
                running.exception()  # LoadStopped, which is what was asked for
            raise
