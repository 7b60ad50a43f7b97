"""One connection to the Station: messages in, lifecycle decisions, actions out.

Runs on the event loop. Decides nothing: Lifecycle says what to do and this file does it, one event
at a time. When it returns no lease is held.
"""

from __future__ import annotations

import asyncio
from typing import Final, assert_never

from shared.core import wire
from shared.core.errors import (
    BankError,
    CheckpointError,
    ConfigError,
    DigestMismatch,
    KeyRefused,
    PlacementError,
    RemoteProtocolError,
)
from shared.io.fabric import FabricError
from shared.io.link import NodeLink, StationUnreachable
from spark_daemon import lifecycle
from spark_daemon.canary import CanaryFailed
from spark_daemon.health import Vitals
from spark_daemon.held_lease import HeldLease, check_offer, open_rings
from spark_daemon.lifecycle import Action, Event, Lifecycle, NodeState
from spark_daemon.parts import NodeParts

EVENTS_MAX: Final = 64
TICK_US_MAX: Final = 1_000_000
REASON_CHARS_MAX: Final = 512  # of wire.Text
GOODBYE_US: Final = 200_000  # for the goodbye to leave the socket before it is closed
_REFUSALS: Final[dict[str, type[ConfigError]]] = {
    error.code: error
    for error in (BankError, CheckpointError, DigestMismatch, KeyRefused, PlacementError)
}


def refusal(code: str, text: str) -> ConfigError:
    """The error for a permanent refusal, of the class that has the Station's code."""
    known = _REFUSALS.get(code)
    if known is not None:
        return known(f"the Station refused this node: {text}")
    return ConfigError(f"the Station refused this node ({code}): {text}")


class Session:
    """Drives the lifecycle over one connection."""

    def __init__(
        self,
        parts: NodeParts,
        vitals: Vitals,
        life: Lifecycle,
        link: NodeLink[wire.ToNode, wire.ToStation],
    ) -> None:
        """`life` is the node's state so far; `run` returns the state after this connection."""
        self._parts = parts
        self._vitals = vitals
        self._life = life
        self._link = link
        self._events: asyncio.Queue[Event] = asyncio.Queue(EVENTS_MAX)
        self._held: HeldLease | None = None

    async def run(self, stop: asyncio.Event) -> Lifecycle:
        """Serve until the connection ends or `stop` is set.

        A canary that fails is told to `vitals`, whose owner then sets `stop`. Raises ConfigError
        after a permanent refusal, and whatever the ring thread dies of.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                helpers = (
                    tasks.create_task(self._listen(), name="control"),
                    tasks.create_task(self._await_stop(stop), name="stop"),
                )
                await self._drive(tasks)
                for helper in helpers:
                    helper.cancel()
        finally:
            await self._close_held()
        return self._life

    async def _listen(self) -> None:
        try:
            while True:
                message = await self._link.receive()
                await self._events.put(lifecycle.Received(message, self._parts.now_us()))
        except StationUnreachable:
            await self._events.put(lifecycle.Disconnected(self._parts.now_us()))

    async def _await_stop(self, stop: asyncio.Event) -> None:
        await stop.wait()
        failure = self._vitals.failure
        reason = lifecycle.STOPS if failure is None else str(failure)
        await self._events.put(lifecycle.StopRequested(reason))

    async def _drive(self, tasks: asyncio.TaskGroup) -> None:
        event: Event = lifecycle.Connected(self._parts.now_us())
        while True:
            try:
                await self._step(event, tasks)
            except StationUnreachable:
                await self._step(lifecycle.Disconnected(self._parts.now_us()), tasks)
            if self._life.state is NodeState.STOPPING or not self._life.is_connected:
                return
            event = await self._next_event()

    async def _next_event(self) -> Event:
        wait_us = min(self._life.due_us - self._parts.now_us(), TICK_US_MAX)
        try:
            async with asyncio.timeout(max(0, wait_us) / 1e6):
                return await self._events.get()
        except TimeoutError:
            return lifecycle.Ticked(self._parts.now_us())

    async def _step(self, event: Event, tasks: asyncio.TaskGroup) -> None:
        self._life, actions = self._life.apply(event)
        for action in actions:
            await self._perform(action, tasks)

    async def _perform(self, action: Action, tasks: asyncio.TaskGroup) -> None:
        match action:
            case lifecycle.Greet():
                self._greet()
            case lifecycle.OpenLease(offer=offer):
                await self._open(offer, tasks)
            case lifecycle.Serve(epoch=epoch):
                self._serve(epoch, tasks)
            case lifecycle.Beat(epoch=epoch):
                self._link.send(
                    wire.Heartbeat(
                        sender=self._parts.name,
                        incarnation=self._parts.incarnation,
                        epoch=epoch,
                        busy=self._vitals.busy,
                        counters=self._vitals.counters.snapshot(),
                    )
                )
            case lifecycle.CloseLease(epoch=epoch, reason=reason):
                await self._close_held()
                stops = self._life.state is NodeState.STOPPING
                say = self._parts.log.info if stops else self._parts.log.warning
                say("lease_ended", epoch=epoch, reason=reason)
            case lifecycle.SayGoodbye(epoch=epoch, reason=reason):
                await self._say_goodbye(epoch, reason)
            case lifecycle.Fail(code=code, text=text):
                raise refusal(code, text)
            case _:
                assert_never(action)

    def _greet(self) -> None:
        parts = self._parts
        self._link.send(
            wire.Hello(
                sender=parts.name,
                incarnation=parts.incarnation,
                protocol=wire.PROTOCOL_VERSION,
                tier=parts.tier,
                pid=parts.pid,
                bank=parts.bank,
                kernel_id=parts.executor.kernel.kernel_id,
                kernel_name=parts.executor.kernel.name,
            )
        )

    async def _open(self, offer: wire.LeaseOffer, tasks: asyncio.TaskGroup) -> None:
        parts = self._parts
        try:
            check_offer(offer, latent=parts.bank.shape.latent, bank_rows=parts.bank.rows)
            rings = open_rings(offer, parts.fabric)
        except (FabricError, RemoteProtocolError) as error:
            broken = lifecycle.LeaseBroken(offer.epoch, str(error), parts.now_us())
            await self._step(broken, tasks)
            return
        self._held = HeldLease.of(
            rings,
            fabric=parts.fabric,
            executor=parts.executor,
            counters=self._vitals.counters,
            clock_ns=parts.clock_ns,
        )
        try:
            proved = await asyncio.get_running_loop().run_in_executor(
                parts.ring_thread,
                lambda: parts.prover.prove(offer.canary_bank_row, offer.canary_seed),
            )
        except CanaryFailed as error:
            self._vitals.fail(error)  # the lease is closed when `stop` follows
            return
        self._vitals.attested = proved
        self._link.send(
            wire.LeaseAccepted(
                sender=parts.name,
                incarnation=parts.incarnation,
                epoch=offer.epoch,
                request_ring=rings.requests.descriptor,
                canary_row=proved.row.tobytes(),
            )
        )

    def _serve(self, epoch: int, tasks: asyncio.TaskGroup) -> None:
        assert self._held is not None, "granted without open rings"
        running = self._held.serve(self._parts.ring_thread)
        self._vitals.server = self._held.server
        tasks.create_task(self._watch_ring(running, epoch), name="ring")
        if not self._vitals.was_ready:
            self._vitals.was_ready = True
            self._parts.notifier.notify(READY=1)
        bank = self._parts.bank
        self._parts.notifier.notify(STATUS=f"serving {bank.rows} experts of {bank.name}")
        self._parts.log.info(
            "node_serving",
            node=self._parts.name,
            epoch=epoch,
            rows=bank.rows,
            kernel=self._parts.executor.kernel.name,
        )

    async def _watch_ring(self, running: asyncio.Future[None], epoch: int) -> None:
        """End the lease when its ring thread cannot answer; any other error ends the node."""
        try:
            await asyncio.shield(running)
        except FabricError as error:
            await self._events.put(lifecycle.LeaseBroken(epoch, str(error), self._parts.now_us()))

    async def _close_held(self) -> None:
        held, self._held = self._held, None
        self._vitals.server = None
        if held is not None:
            await held.close()

    async def _say_goodbye(self, epoch: int, reason: str) -> None:
        self._link.send(
            wire.Goodbye(
                sender=self._parts.name,
                incarnation=self._parts.incarnation,
                epoch=epoch,
                reason=reason[:REASON_CHARS_MAX],
            )
        )
        try:
            async with asyncio.timeout(GOODBYE_US / 1e6):
                while not _is_farewell(await self._events.get(), epoch):
                    pass
        except TimeoutError:
            return  # a Station that does not answer sees the connection close


def _is_farewell(event: Event, epoch: int) -> bool:
    match event:
        case lifecycle.Disconnected():
            return True
        case lifecycle.Received(message=wire.LeaseRevoked(epoch=revoked)):
            return revoked == epoch
        case _:
            return False
