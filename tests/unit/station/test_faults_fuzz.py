"""Several lanes against a real node that lies, stalls, and comes and goes: tokens never change."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shared.core.errors import MeshError
from shared.io.fabric import Memory, RemoteRegion
from shared.io.fabric_shm import ShmFabric
from spark_daemon.executor import BankIndex, Executor
from spark_daemon.ring_server import LeaseRings, RingServer, ServeCounters
from station.backend import Finished, Token
from station.channel import NodeChannel
from station.deadline import DeadlinePolicy
from station.engine import Attach, Detach, Engine, Start, Stop
from station.lane import Lane, StepTimes
from station.routing_tap import RoutingTap
from tests.unit.station.toy_model import ToyModel, request
from tests.unit.station.world import NODE, RING, SHAPE, World

LANES, MAX_TOKENS, PREFILL_TOKENS = 4, 24, 12
PATIENCE_S = 30.0


def now_us() -> int:
    """The real clock."""
    return time.monotonic_ns() // 1000


class Liar:
    """The node's way to the Station's memory, which damages, drops, delays and repeats."""

    def __init__(self, remote: RemoteRegion, rng: random.Random) -> None:
        self._remote = remote
        self._rng = rng

    def write(self, offset: int, data: Memory | bytes) -> None:
        """Now and then a bit of a frame is flipped on the way."""
        copy = np.frombuffer(bytes(data), np.uint8).copy()
        if self._rng.random() < 0.1:
            copy[self._rng.randrange(len(copy))] ^= 1 << self._rng.randrange(8)
        self._remote.write(offset, copy)

    def ring(self, offset: int, value: int) -> None:
        """Now and then a bell is lost, late, early for the next generation, or rung twice."""
        fate = self._rng.random()
        if fate < 0.05:
            return
        if fate < 0.10:
            time.sleep(0.03)
        if fate < 0.15:
            self._remote.ring(offset, value + 1)
        self._remote.ring(offset, value)
        if fate > 0.95:
            self._remote.ring(offset, value)

    def close(self) -> None:
        """As told."""
        self._remote.close()


class Lease:
    """One lease of a real ring server on its own thread."""

    def __init__(self, world: World, epoch: int, rng: random.Random, pool: ThreadPoolExecutor):
        self.fabric = ShmFabric(spin_us=0)
        requests = self.fabric.register(RING.request_ring_bytes)
        replies = world.station.register(RING.reply_ring_bytes)
        keys = world.placement.nodes[NODE].rows
        tier = world.everything
        executor = Executor(
            world.kernel, tier._arena[[tier._row[key] for key in keys]], BankIndex(keys)
        )
        rings = LeaseRings(
            epoch, RING, requests, Liar(self.fabric.connect(replies.descriptor), rng)
        )
        self.server = RingServer(
            rings,
            fabric=self.fabric,
            executor=executor,
            counters=ServeCounters(),
            clock_ns=time.monotonic_ns,
        )
        self.running = pool.submit(self.server.run)
        self.channel = NodeChannel(
            node="spark0",
            place=NODE,
            epoch=epoch,
            shape=RING,
            request_ring=world.station.connect(requests.descriptor),
            reply_ring=replies,
            kernel_id=world.kernel.kernel_id,
            stats=world.places.stats[NODE],
            now_us=now_us,
            pause=lambda: None,
        )

    def close(self) -> None:
        """End the node's side."""
        self.server.stop()
        self.running.result(PATIENCE_S)
        self.fabric.close()


class RealClock:
    """Time that moves by itself."""

    now_us = staticmethod(now_us)


@pytest.mark.parametrize("seed", range(3))
def test_no_fault_of_a_node_changes_a_token(seed: int) -> None:
    """Exactly once, exactly right: flipped bits, lost, late and repeated bells, lost leases."""
    rng = random.Random(seed)
    world = World(clock=RealClock())  # duck-typed
    model = ToyModel()
    bugs: list[BaseException] = []
    engine = Engine(
        fabric=world.station,
        places=world.places,
        now_us=now_us,
        on_bug=lambda _, error: bugs.append(error),
        torch_threads=1,
    )
    path = world.path()
    path.deadline = DeadlinePolicy(floor_us=5_000, ceiling_us=10_000)
    requests = [
        request(f"r{seed}{number}", max_tokens=MAX_TOKENS, prompt=5 + 7 * number)
        for number in range(LANES)
    ]
    expected = [model.solo(world, each, PREFILL_TOKENS) for each in requests]
    got: list[list[Token | Finished]] = [[] for _ in requests]
    errors: list[MeshError | None] = []
    over = threading.Semaphore(0)

    def done(error: MeshError | None) -> None:
        errors.append(error)
        over.release()

    for each, events in zip(requests, got, strict=True):
        tap = RoutingTap(SHAPE)
        lane = Lane(each, model, path, PREFILL_TOKENS, events.append, now_us, StepTimes(), tap)
        engine.send(Start(lane, done))
    with ThreadPoolExecutor() as pool:
        leases: list[Lease] = []
        engine.start()
        epoch = 0
        while engine.is_alive and len(errors) < LANES and epoch < 2000:
            epoch += 1
            leases.append(Lease(world, epoch, rng, pool))
            engine.send(Attach(leases[-1].channel))
            time.sleep(rng.uniform(0.005, 0.06))
            if rng.random() < 0.5:
                engine.send(Detach(NODE, epoch))
                time.sleep(rng.uniform(0, 0.005))
            if len(leases) > 1:
                leases.pop(0).close()
        assert all(over.acquire(timeout=PATIENCE_S) for _ in range(LANES))
        engine.send(Stop())
        assert engine.join(PATIENCE_S)
        for lease in leases:
            lease.close()
    world.station.close()
    world.node.close()

    assert bugs == []
    assert errors == [None] * LANES
    for events, tokens in zip(got, expected, strict=True):
        assert [event.token_id for event in events if isinstance(event, Token)] == tokens
        assert isinstance(events[-1], Finished)
    stats = world.places.stats[NODE]
    assert stats.rows > 0, "the node served"
    assert stats.cold_rows > 0, "faults happened"
    served = stats.rows + stats.cold_rows + world.places.stats[0].rows
    prefill = sum(len(each.prompt_ids) for each in requests)
    assert served == 4 * (prefill + LANES * (MAX_TOKENS - 1))
