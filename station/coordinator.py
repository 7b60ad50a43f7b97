"""The coordinator: requests become lanes, lanes become token streams, and the pod's state in words.

The event-loop side of the Station. It admits, starts and cancels; the engine thread does the work.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final, assert_never

from structlog.typing import FilteringBoundLogger

from shared.core.errors import LayerFailed, MeshError
from station import report
from station.admission import Admission, check_length
from station.backend import Finished, GenerationRequest, Metric, Token, TokenEvent
from station.engine import Cancel, Engine, Start
from station.expert_path import ExpertPath
from station.lane import Lane
from station.model.network import K3Text
from station.nodes import Nodes
from station.routing_tap import RoutingTap

JOIN_GRACE_US: Final = 60_000_000  # how long a started pod waits for its nodes to come
STALL_US: Final = 10_000_000  # work without progress for this long is not alive


@dataclass(frozen=True, slots=True)
class _Ended:
    """The lane is over: normally, or with the error that ended it."""

    error: MeshError | None


class Coordinator:
    """The pod as the chat endpoint sees it; see ChatBackend."""

    def __init__(
        self,
        *,
        model: K3Text,
        model_name: str,
        created_s: int,
        path: ExpertPath,
        engine: Engine,
        nodes: Nodes,
        admission: Admission,
        tap: RoutingTap,
        now_us: Callable[[], int],
        log: FilteringBoundLogger,
    ) -> None:
        """Wire the parts; nothing runs yet."""
        self.model_name = model_name
        self.context_length = model.config.context_length
        self.created_s = created_s
        self.nodes = nodes
        self.totals = report.Totals()
        self._model = model
        self._path = path
        self._engine = engine
        self._admission = admission
        self._tap = tap
        self._slots = asyncio.Semaphore(admission.limits.active)
        self._now_us = now_us
        self._log = log
        self._progress = (0, now_us())
        self._started_us = now_us()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """See ChatBackend."""
        check_length(len(request.prompt_ids), request.max_tokens, self.context_length)
        self._admission.enter()
        try:
            async with self._slots, aclosing(self._run(request)) as events:
                async for event in events:
                    yield event
        finally:
            self._admission.leave()

    def status(self) -> dict[str, object]:
        """See ChatBackend."""
        return report.status(self)

    def readiness(self) -> tuple[bool, str]:
        """Ready once every node has served, or had JOIN_GRACE_US to come; a node that is missing
        after that only degrades an exact pod.
        """
        if not self._engine.is_alive:
            return False, "the model thread has ended"
        missing = self.nodes.missing()
        if not missing:
            return True, "ready"
        names = ", ".join(missing)
        joined = self.nodes.was_complete or self._now_us() - self._started_us > JOIN_GRACE_US
        if joined and self._path.on_miss == "exact":
            return True, f"degraded but exact: the cold store serves {names}"
        return False, f"waiting for {names}"

    def liveness(self) -> tuple[bool, str]:
        """Alive while work moves, or while there is none."""
        if not self._engine.is_alive:
            return False, "the model thread has ended"
        progress, since_us = self._progress
        if self._engine.progress != progress or self._engine.active == 0:
            self._progress = (self._engine.progress, self._now_us())
            return True, "alive"
        stalled_us = self._now_us() - since_us
        if stalled_us > STALL_US:
            return False, f"no progress for {stalled_us} us with {self._engine.active} requests"
        return True, "alive"

    def metrics(self) -> Sequence[Metric]:
        """See ChatBackend."""
        return report.metrics(self)

    @property
    def on_miss(self) -> str:
        """The declared policy."""
        return self._path.on_miss

    @property
    def admission(self) -> Admission:
        """Open and refused requests."""
        return self._admission

    @property
    def cold_store_reads(self) -> int:
        """Records read from the checkpoint for the cold store."""
        return self._path.cold_store.records_read

    async def _run(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        loop = asyncio.get_running_loop()
        # bounded by the request itself: max_tokens tokens, one Finished, one _Ended
        events: asyncio.Queue[TokenEvent | _Ended] = asyncio.Queue(request.max_tokens + 2)

        def deliver(event: TokenEvent | _Ended) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        if request.seed is None:
            request = replace(request, seed=secrets.randbits(63))
        lane = Lane(
            request=request,
            model=self._model,
            path=self._path,
            prefill_tokens=self._admission.limits.prefill_tokens,
            emit=deliver,
            now_us=self._now_us,
            times=self.totals.times,
            tap=self._tap,
        )
        log = self._log.bind(request=request.request_id)
        self.totals.requests += 1
        self._engine.send(Start(lane, lambda error: deliver(_Ended(error))))
        ended = False
        tokens = 0
        try:
            while True:
                event = await events.get()
                match event:
                    case _Ended(error=error):
                        ended = True
                        if error is not None:
                            self._note_failure(log, error)
                            raise error
                        return
                    case Token():
                        tokens += 1
                        self.totals.tokens += 1
                        yield event
                    case Finished():
                        ended = True  # whether or not the caller comes back for the end
                        # the endpoint writes the one line per request that operators read
                        log.debug(
                            "request_finished",
                            reason=event.reason,
                            tokens=tokens,
                            cold_rows=event.cold_rows,
                        )
                        yield event
                    case _:
                        assert_never(event)
        finally:
            self.totals.cold_rows += lane.cold_rows
            if not ended:
                self._engine.send(Cancel(request.request_id))
                self.totals.cancelled += 1
                log.debug("request_cancelled", tokens=tokens)

    def _note_failure(self, log: FilteringBoundLogger, error: MeshError) -> None:
        self.totals.failed += 1
        if isinstance(error, LayerFailed):
            log = log.bind(
                node=error.node,
                layer=error.layer,
                experts=list(error.experts),
                elapsed_us=error.elapsed_us,
            )
        log.error("request_failed", code=error.code, error=str(error))
