"""Requests as the endpoint sees them: tokens, one end, cancels, refusals, readiness, liveness."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from shared.core.errors import MeshError, NodeLost, RequestError, RequestRefused
from station.__main__ import _guard
from station.backend import Finished, Token, TokenEvent
from station.coordinator import JOIN_GRACE_US, STALL_US
from station.engine import Stop
from tests.unit.station.small_pod import Pod, small_pod
from tests.unit.station.toy_model import request

pytestmark = pytest.mark.asyncio
PATIENCE_S = 10.0


async def collect(stream: AsyncGenerator[TokenEvent, None]) -> list[TokenEvent]:
    """All events."""
    async with asyncio.timeout(PATIENCE_S):
        return [event async for event in stream]


async def until(holds: Callable[[], bool]) -> None:
    """Wait for the engine's thread."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - the engine's thread sets no event
            await asyncio.sleep(0.001)


def tokens_of(pod: Pod, name: str, **fields: Any) -> list[int]:
    """The truth."""
    return pod.model.solo(pod.world, request(name, **fields), 4)


async def test_a_request_is_its_tokens_and_one_end() -> None:
    """Long prompts are read in chunks; the totals count what was delivered."""
    async with small_pod() as pod:
        events = await collect(pod.coordinator.generate(request("a", prompt=9)))

        *tokens, end = events
        assert [event.token_id for event in tokens] == tokens_of(pod, "a", prompt=9)
        assert isinstance(end, Finished)
        assert end.cold_rows == pod.coordinator.totals.cold_rows > 0
        totals = pod.coordinator.totals
        assert (totals.requests, totals.tokens, totals.cancelled, totals.failed) == (1, 6, 0, 0)
        assert pod.coordinator.admission.open == 0
        assert pod.events() == ["request_finished"]


async def test_requests_at_once_do_not_disturb_each_other() -> None:
    """Three requests, two lanes: each gets what it would get alone."""
    async with small_pod() as pod:
        names = ["a", "b", "c"]
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(collect(pod.coordinator.generate(request(name))))
                for name in names
            ]
        for name, task in zip(names, running, strict=True):
            ids = [event.token_id for event in task.result() if isinstance(event, Token)]
            assert ids == tokens_of(pod, name)


async def test_closing_a_stream_cancels_its_lane_before_it_returns() -> None:
    """Not when the garbage collector finds it; the slot and the admission are free again."""
    async with small_pod() as pod:
        stream = pod.coordinator.generate(request("a", max_tokens=50))
        assert isinstance(await anext(stream), Token)
        assert pod.coordinator.totals.tokens == 1, "tokens are counted as they are delivered"
        await stream.aclose()

        assert pod.coordinator.totals.cancelled == 1
        assert pod.coordinator.admission.open == 0
        await until(lambda: pod.engine.active == 0)
        assert pod.events() == ["request_cancelled"]


async def test_a_waiting_request_that_goes_away_leaves_nothing() -> None:
    """Cancelled before it ever ran; then the queue is free for others."""
    async with small_pod() as pod:
        first = [pod.coordinator.generate(request(name, max_tokens=50)) for name in "ab"]
        for stream in first:
            await anext(stream)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(collect(pod.coordinator.generate(request("c"))))
            await until(lambda: pod.coordinator.admission.open == 3)
            with pytest.raises(RequestRefused, match="already has 3"):
                await anext(pod.coordinator.generate(request("d")))
            waiting.cancel()
        for stream in first:
            await stream.aclose()

        assert pod.coordinator.admission.open == 0
        assert len(await collect(pod.coordinator.generate(request("e")))) == 7


async def test_a_layer_that_fails_ends_its_request_by_name() -> None:
    """The policy `fail`: one typed error with node, layer, experts, microseconds."""
    async with small_pod("fail") as pod:
        with pytest.raises(NodeLost, match="node spark0, layer 1, experts"):
            await collect(pod.coordinator.generate(request("a")))

        assert pod.coordinator.totals.failed == 1
        assert pod.coordinator.admission.open == 0
        (entry,) = pod.log.entries
        assert (entry["event"], entry["node"], entry["layer"]) == ("request_failed", "spark0", 1)


async def test_what_does_not_fit_the_context_never_starts() -> None:
    """The prompt and the wish must fit together."""
    async with small_pod() as pod:
        with pytest.raises(RequestError, match="context is 64"):
            await collect(pod.coordinator.generate(request("a", max_tokens=62)))

        assert pod.coordinator.totals.requests == 0


async def test_stopping_ends_open_streams_with_an_error_and_refuses_new_ones() -> None:
    """A stream that simply ends would look like an answer."""
    async with small_pod() as pod:
        stream = pod.coordinator.generate(request("a", max_tokens=60))
        await anext(stream)
        pod.engine.send(Stop())
        with pytest.raises(RequestRefused):
            await collect(stream)
        with pytest.raises(RequestRefused):
            await collect(pod.coordinator.generate(request("b")))

        await until(lambda: not pod.engine.is_alive)
        assert pod.coordinator.readiness() == (False, "the model thread has ended")
        assert pod.coordinator.liveness() == (False, "the model thread has ended")


async def test_a_station_without_its_model_thread_ends() -> None:
    """It could only refuse; a new process can serve."""
    async with small_pod() as pod, asyncio.timeout(PATIENCE_S):
        pod.engine.send(Stop())
        with pytest.raises(MeshError, match="restart the Station"):
            await _guard(pod.engine)


async def test_ready_means_every_node_has_served_once() -> None:
    """Afterwards a lost node degrades an exact pod; a pod that may not miss is not ready."""
    async with small_pod() as pod:
        assert pod.coordinator.readiness() == (False, "waiting for spark0")
        pod.nodes.was_complete = True
        assert pod.coordinator.readiness() == (
            True,
            "degraded but exact: the cold store serves spark0",
        )
        pod.nodes.missing = list
        assert pod.coordinator.readiness() == (True, "ready")
    async with small_pod("fail") as pod:
        pod.nodes.was_complete = True
        assert pod.coordinator.readiness() == (False, "waiting for spark0")


async def test_a_node_that_never_comes_is_waited_for_a_bounded_time() -> None:
    """A Station that starts while a node is down serves exactly, so it is ready after a minute."""
    async with small_pod() as pod:
        pod.world.clock.us += JOIN_GRACE_US
        assert not pod.coordinator.readiness()[0]
        pod.world.clock.us += 1
        assert pod.coordinator.readiness()[0]
    async with small_pod("fail") as pod:
        pod.world.clock.us += JOIN_GRACE_US + 1
        assert not pod.coordinator.readiness()[0]


async def test_alive_means_progress_not_presence() -> None:
    """Work that does not move is not alive however well the event loop answers."""
    async with small_pod() as pod:
        clock = pod.world.clock
        clock.us += 10 * STALL_US
        assert pod.coordinator.liveness() == (True, "alive"), "no work, no stall"
        pod.engine.active = 1
        assert pod.coordinator.liveness()[0]
        clock.us += STALL_US + 1
        alive, reason = pod.coordinator.liveness()
        assert (alive, "no progress for" in reason) == (False, True)
        pod.engine.progress += 1
        assert pod.coordinator.liveness()[0]
        pod.engine.active = 0
