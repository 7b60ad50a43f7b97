"""The life of a node process: connect, hold a session, connect again, until told to stop.

Runs on the event loop; the bank stays in memory from start to end, whatever happens to Stations.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from shared.io.link import StationUnreachable
from shared.io.systemd import Watchdog
from spark_daemon import lifecycle
from spark_daemon.health import Vitals, recheck_canary
from spark_daemon.lifecycle import Lifecycle, NodeState
from spark_daemon.parts import NodeParts
from spark_daemon.session import Session

START_EXTENSION_US: Final = 30_000_000  # a Station may come up much later than its nodes


class Node:
    """One expert node."""

    def __init__(self, parts: NodeParts) -> None:
        """Nothing runs before `run`."""
        self._parts = parts
        self._vitals = Vitals()
        self._life = Lifecycle()
        self._unreachable = ""

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; returns after the dispatch in hand and the goodbye.

        Errors come out in an ExceptionGroup: ConfigError when this node was refused for good,
        CanaryFailed, or what a part died of.
        """
        parts = self._parts
        async with asyncio.TaskGroup() as root:
            helpers = [
                root.create_task(
                    recheck_canary(self._vitals, parts.executor, parts.canary_period_us),
                    name="canary",
                )
            ]
            if parts.watchdog_us is not None:
                watchdog = Watchdog(parts.notifier, parts.watchdog_us, self._vitals.pulse)
                helpers.append(root.create_task(watchdog.run(), name="watchdog"))
            await self._live(stop)
            for helper in helpers:
                helper.cancel()

    async def _live(self, stop: asyncio.Event) -> None:
        while self._life.state is not NodeState.STOPPING:
            if stop.is_set():
                self._life, _ = self._life.apply(lifecycle.StopRequested())
                return
            if not self._vitals.was_ready:
                self._parts.notifier.notify(
                    EXTEND_TIMEOUT_USEC=START_EXTENSION_US, STATUS="joining the Station"
                )
            try:
                async with asyncio.TaskGroup() as tasks:
                    await self._connect_and_serve(tasks, stop)
            except* StationUnreachable as group:
                self._note_unreachable(group.exceptions[0])
            await self._pause(stop)

    async def _connect_and_serve(self, tasks: asyncio.TaskGroup, stop: asyncio.Event) -> None:
        async with self._parts.connect(tasks) as link:
            self._unreachable = ""
            session = Session(self._parts, self._vitals, self._life, link)
            self._life = await session.run(stop)

    async def _pause(self, stop: asyncio.Event) -> None:
        """Wait for the next attempt, or for `stop`."""
        if self._life.state is NodeState.STOPPING:
            return
        now_us = self._parts.now_us()
        if self._life.retry_at_us <= now_us:
            self._life, _ = self._life.apply(lifecycle.Disconnected(now_us))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout((self._life.retry_at_us - now_us) / 1e6):
                await stop.wait()

    def _note_unreachable(self, error: BaseException) -> None:
        """Say it once per spell, not once per attempt."""
        if not self._unreachable:
            self._parts.log.warning("station_unreachable", error=str(error))
        self._unreachable = str(error)
