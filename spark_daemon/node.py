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
from spark_daemon.canary import CanaryFailed
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
        CanaryFailed after its lease was left, or what a part died of.
        """
        parts = self._parts
        async with asyncio.TaskGroup() as root:
            ending = asyncio.Event()  # the operator's wish, or a failed canary
            helpers = [
                root.create_task(_follow(stop, ending), name="stop"),
                root.create_task(self._drain_when_failed(ending), name="drain"),
            ]
            if parts.watchdog_us is not None:
                watchdog = Watchdog(parts.notifier, parts.watchdog_us, self._vitals.pulse)
                helpers.append(root.create_task(watchdog.run(), name="watchdog"))
            await self._prove_goldens(ending)
            helpers.append(root.create_task(self._recheck(), name="canary"))
            await self._live(ending)
            for helper in helpers:
                helper.cancel()
            if self._vitals.failure is not None:
                raise self._vitals.failure

    async def _prove_goldens(self, ending: asyncio.Event) -> None:
        """Every golden of the bank by the serving kernel, before anything is promised."""
        prover = self._parts.prover
        for golden in prover.header.goldens:
            if ending.is_set():
                return
            try:
                proved = await asyncio.to_thread(prover.prove_golden, golden)
            except CanaryFailed as error:
                self._vitals.fail(error)
                await ending.wait()
                return
            self._vitals.goldens += (proved,)

    async def _recheck(self) -> None:
        parts = self._parts
        try:
            await recheck_canary(self._vitals, parts.prover, parts.canary_period_us)
        except CanaryFailed as error:
            self._vitals.fail(error)

    async def _drain_when_failed(self, ending: asyncio.Event) -> None:
        """Say what the canary found, then end this node as an operator would."""
        await self._vitals.failed.wait()
        error = self._vitals.failure
        assert error is not None, "failed without a failure"
        self._parts.log.error(
            "canary_failed",
            layer=error.layer,
            expert=error.expert,
            bank_row=error.bank_row,
            difference=f"{error.difference:.3g}",
            error=str(error),
        )
        self._parts.notifier.notify(STATUS=f"canary failed: {error}")
        ending.set()

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


async def _follow(stop: asyncio.Event, ending: asyncio.Event) -> None:
    await stop.wait()
    ending.set()
