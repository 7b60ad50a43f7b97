"""A lane: one sequence walking the layers, token after token, as a generator. Decides; never waits.

Theory. The lane yields a `Waiting` whenever rows are in flight and is resumed by the engine when
they came or their deadline passed, and None at every layer boundary, so that other lanes and
cancels get their turn. The step of a WorkKey counts forward passes: prefill chunks first, then one
per token.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch

from station.backend import Finished, GenerationRequest, Token
from station.expert_path import ExpertPath, LayerTimes, LayerWork, Waiting
from station.ledger import WorkKey
from station.model.moe import combine
from station.model.network import K3Text, MoeWork, Residual
from station.model.state import SequenceState
from station.routing_tap import RoutedPass, RoutingTap
from station.sampling import sample, step_rng

Walk: TypeAlias = Generator[Waiting | None, None, None]


@dataclass(slots=True)
class StepTimes:
    """Where the microseconds of decode steps went; sums over all layers of all steps."""

    steps: int = 0
    layers: int = 0
    total_us: int = 0
    post_us: int = 0
    local_us: int = 0
    wait_us: int = 0
    collect_us: int = 0
    cold_us: int = 0
    trip_us: int = 0
    shared_us: int = 0
    combine_us: int = 0

    def add_layer(self, times: LayerTimes, shared_us: int, combine_us: int) -> None:
        """One MoE layer."""
        self.layers += 1
        self.post_us += times.post_us
        self.local_us += times.local_us
        self.wait_us += times.wait_us
        self.collect_us += times.collect_us
        self.cold_us += times.cold_us
        self.trip_us += times.trip_us
        self.shared_us += shared_us
        self.combine_us += combine_us


@dataclass(slots=True, eq=False)
class Lane:
    """One running request."""

    request: GenerationRequest
    model: K3Text
    path: ExpertPath
    prefill_tokens: int
    emit: Callable[[Token | Finished], None]
    now_us: Callable[[], int]
    times: StepTimes
    tap: RoutingTap
    waiting: Waiting | None = None
    cold_rows: int = 0
    _step: int = 0
    _position: int = 0
    walk: Walk = field(init=False)

    def __post_init__(self) -> None:
        """Start the walk; nothing runs before the first resume."""
        self.walk = self._run()

    def _run(self) -> Walk:
        request = self.request
        state = self.model.new_state()
        prompt = request.prompt_ids
        logits: torch.Tensor | None = None
        for start in range(0, len(prompt), self.prefill_tokens):
            ids = prompt[start : start + self.prefill_tokens]
            is_last = start + len(ids) == len(prompt)
            logits = yield from self._forward(ids, state, wants_logits=is_last)
        for position in range(request.max_tokens):
            assert logits is not None, "a prompt has at least one token"
            rng = step_rng(request.seed or 0, position)
            token = sample(logits.numpy(), request.temperature, request.top_p, rng)
            if token in request.stop_ids:
                self.emit(Finished("stop", self.cold_rows))
                return
            self.emit(Token(token))
            if position + 1 < request.max_tokens:
                logits = yield from self._forward((token,), state, wants_logits=True)
        self.emit(Finished("length", self.cold_rows))

    def _forward(
        self, ids: tuple[int, ...], state: SequenceState, *, wants_logits: bool
    ) -> Generator[Waiting | None, None, torch.Tensor | None]:
        began_us = self.now_us()
        residual = self.model.begin(torch.tensor(ids), state)
        record = self.tap.open(self.request.request_id, self._position, len(ids))
        try:
            for layer in range(self.model.config.num_hidden_layers):
                work = self.model.attend(layer, residual, state)
                if work is not None:
                    yield from self._experts(residual, work, record, count=len(ids) == 1)
                yield None
        finally:
            if record is not None:
                record.close()
        self._step += 1
        self._position += len(ids)
        logits = self.model.logits(residual) if wants_logits else None
        if len(ids) == 1:
            self.times.steps += 1
            self.times.total_us += self.now_us() - began_us
        return logits

    def _experts(
        self, residual: Residual, work: MoeWork, record: RoutedPass | None, *, count: bool
    ) -> Generator[Waiting, None, None]:
        shared: list[torch.Tensor] = []
        shared_us = 0

        def meanwhile() -> None:
            nonlocal shared_us
            began_us = self.now_us()
            shared.append(self.model.shared(work))
            shared_us = self.now_us() - began_us

        layer_work = LayerWork(
            key=WorkKey(self.request.request_id, self._step, work.layer),
            ids=work.ids.numpy(),
            activations=work.z.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16),
        )
        rows = yield from self.path.rows(layer_work, meanwhile)
        began_us = self.now_us()
        tokens, top_k = layer_work.ids.shape
        values = torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16)
        routed = combine(values.view(tokens, top_k, -1), work.weights)
        self.model.finish(work.layer, residual, work, routed, shared[0])
        self.cold_rows += layer_work.cold_rows
        if record is not None:
            record.add(layer_work.ids)
        if count:
            self.times.add_layer(layer_work.times, shared_us, self.now_us() - began_us)
