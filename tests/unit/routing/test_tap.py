"""The tap on the model thread: whole tokens only, never waiting, every loss counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from shared.core.errors import MeshError
from shared.core.routing_wire import PASS_TOKENS_MAX, Pass, Totals, pass_ids
from station.backend import Token
from station.routing_tap import Listener, RoutingTap
from tests.unit.routing.traces import SHAPE, ids_of
from tests.unit.station.small_pod import small_pod
from tests.unit.station.toy_model import ToyModel, request
from tests.unit.station.world import LAYER
from tests.unit.station.world import SHAPE as TOY


def run_pass(tap: RoutingTap, tokens: int, *, layers: int | None = None, name: str = "r") -> None:
    """A forward pass, through `layers` layers or all."""
    ids = ids_of(tokens)
    record = tap.open(name, 0, tokens)
    if record is not None:
        for layer in range(ids.shape[1] if layers is None else layers):
            record.add(ids[:, layer].astype(np.int64))
        record.close()


def taken(listener: Listener) -> list[Pass]:
    """Everything in the queue."""
    return list(iter(listener.take, None))


def test_nobody_listens_nothing_is_kept() -> None:
    """Off, a pass is None and the hot path has nothing to do."""
    tap = RoutingTap(SHAPE)

    assert tap.open("r", 0, 5) is None
    listener = tap.listen(lambda: None)
    assert tap.open("r", 0, 5) is not None
    tap.leave(listener)
    assert tap.open("r", 0, 5) is None


def test_a_long_pass_travels_in_pieces() -> None:
    """Together they are the pass; every piece knows its position."""
    tap = RoutingTap(SHAPE)
    listener = tap.listen(lambda: None)
    tokens = 2 * PASS_TOKENS_MAX + 3

    run_pass(tap, tokens)
    pieces = taken(listener)

    assert [piece.position for piece in pieces] == [0, PASS_TOKENS_MAX, 2 * PASS_TOKENS_MAX]
    got = np.concatenate([pass_ids(piece, SHAPE) for piece in pieces])
    assert np.array_equal(got, ids_of(tokens))


def test_a_full_queue_drops_and_counts() -> None:
    """Each listener has its own bound; what one misses another gets; taking makes room."""
    tap = RoutingTap(SHAPE)
    woken: list[str] = []
    slow = tap.listen(lambda: woken.append("slow"), tokens_max=5)
    quick = tap.listen(lambda: woken.append("quick"), tokens_max=50)

    for _ in range(4):
        run_pass(tap, 2)

    assert woken == ["slow", "quick"], "once, when an empty queue gets something"
    assert [piece.tokens for piece in taken(slow)] == [2, 2]
    assert slow.totals() == Totals(sent=4, dropped=4, incomplete=0)
    assert len(taken(quick)) == 4
    run_pass(tap, 2)
    assert len(taken(slow)) == 1


def test_a_pass_that_ends_on_its_way_is_counted_not_sent() -> None:
    """Also one that did not begin its first layer; never half a token."""
    tap = RoutingTap(SHAPE)
    listener = tap.listen(lambda: None)

    run_pass(tap, 3, layers=2)
    run_pass(tap, 1, layers=0)

    assert taken(listener) == []
    assert listener.totals() == Totals(sent=0, dropped=0, incomplete=4)


def test_who_left_is_not_called_any_more() -> None:
    """A pass may end after its listener's event loop is gone."""
    tap = RoutingTap(SHAPE)
    calls: list[int] = []
    listener = tap.listen(lambda: calls.append(1))
    record = tap.open("r", 0, 1)
    assert record is not None
    tap.leave(listener)

    for layer in range(3):
        record.add(ids_of(1)[:, layer].astype(np.int64))
    record.close()

    assert calls == []
    assert listener.take() is None


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - the engine's thread sets no event
            await asyncio.sleep(0.001)


def _chosen(prompt: tuple[int, ...], tokens: list[int], world: object) -> np.ndarray:
    """What the toy model routes for prompt and tokens, one token at a time in one process."""
    model, out = ToyModel(), []
    attend = model.attend

    def noting(layer: int, residual: object, state: object) -> object:
        work = attend(layer, residual, state)
        if work is not None:
            out.append(work.ids.numpy())
        return work

    model.attend = noting
    model.solo(world, request("a", max_tokens=len(tokens), prompt=len(prompt)), 4)
    return np.concatenate(out)


@pytest.mark.asyncio
async def test_a_request_is_recorded_as_the_model_routed_it() -> None:
    """Prefill chunks and decode steps, positions without a gap, against a run of its own."""
    async with small_pod() as pod:
        listener = pod.tap.listen(lambda: None)
        prompt = request("a", prompt=9)
        events = [event async for event in pod.coordinator.generate(prompt)]
        tokens = [event.token_id for event in events if isinstance(event, Token)]
        pieces = taken(listener)

        expected = _chosen(prompt.prompt_ids, tokens, pod.world)

    assert [piece.position for piece in pieces] == [0, 4, 8, *range(9, 14)]
    got = np.concatenate([pass_ids(piece, TOY) for piece in pieces])
    assert LAYER == 1
    assert np.array_equal(got[:, 0], expected[: len(got)])
    assert listener.totals() == Totals(sent=14, dropped=0, incomplete=0)


@pytest.mark.asyncio
async def test_a_failed_layer_leaves_its_tokens_out() -> None:
    """The pod may not miss a node and has none: the first chunk ends on its way."""
    async with small_pod("fail") as pod:
        listener = pod.tap.listen(lambda: None)
        with pytest.raises(MeshError):
            async for _ in pod.coordinator.generate(request("a", prompt=9)):
                pass
        await _until(lambda: listener.totals().incomplete > 0)

        assert taken(listener) == []
        assert listener.totals() == Totals(sent=0, dropped=0, incomplete=4)
