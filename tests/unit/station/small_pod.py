"""A coordinator over a toy model, a real engine and a real expert path; its node never joined."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import structlog
from structlog.testing import LogCapture

from shared.io.link import LinkCounters
from station.admission import Admission, Limits
from station.coordinator import Coordinator
from station.engine import Engine, Stop
from station.expert_path import OnMiss
from station.membership import Membership
from station.routing_tap import RoutingTap
from tests.unit.station.toy_model import ToyModel
from tests.unit.station.world import SHAPE, World

PATIENCE_S = 10.0


class Pod:
    """Everything a test looks at."""

    def __init__(self, on_miss: OnMiss, limits: Limits) -> None:
        self.world = World()
        self.model = ToyModel()
        self.bugs: list[BaseException] = []
        self.log = LogCapture()
        self.engine = Engine(
            fabric=self.world.station,
            places=self.world.places,
            now_us=self.world.clock.now_us,
            on_bug=lambda _, error: self.bugs.append(error),
            torch_threads=1,
        )
        self.nodes = SimpleNamespace(
            places=self.world.places,
            membership=Membership(placement=self.world.placement, kernel_id=1, last_epoch=0),
            link=SimpleNamespace(keys_refused=3, counters=LinkCounters(malformed=2, oversized=1)),
            counters={},
            was_complete=False,
            missing=lambda: ["spark0"],
        )
        self.tap = RoutingTap(SHAPE)
        self.coordinator = Coordinator(
            model=self.model,
            model_name="toy",
            created_s=7,
            path=self.world.path(on_miss),
            engine=self.engine,
            nodes=self.nodes,  # duck-typed: no socket is needed here
            admission=Admission(limits),
            tap=self.tap,
            now_us=self.world.clock.now_us,
            log=structlog.wrap_logger(
                structlog.PrintLogger(),
                processors=[self.log],
                wrapper_class=structlog.BoundLogger,
            ),
        )

    def events(self) -> list[str]:
        """What was logged."""
        return [entry["event"] for entry in self.log.entries]


@asynccontextmanager
async def small_pod(on_miss: OnMiss = "exact", limits: Limits | None = None) -> AsyncIterator[Pod]:
    """A running pod; leaving the block ends its engine."""
    pod = Pod(on_miss, limits or Limits(active=2, waiting=1, prefill_tokens=4))
    pod.engine.start()
    try:
        yield pod
    finally:
        pod.engine.send(Stop())
        assert pod.engine.join(PATIENCE_S)
        pod.world.station.close()
        pod.world.node.close()
    assert pod.bugs == []
