"""`k3 bench simulate`: what the simulator predicts per layer against what real pods measure.

All pods run at once and answer in turn, so that they share whatever else the host does; only one
works at a time. Two predictions for each: fed with its own hop curves, and from the first pod's
figures alone, beside what taking the first pod's time unchanged would give. See
services/simulator/calibrate.py for what is input and what is predicted.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from services.bench.machine import machine_facts
from services.bench.pod import QUESTIONS
from services.bench.report import Figure, Report, at_most
from services.bench.running_pod import running_pod
from services.chat.client import served_model
from services.pod.endpoint import check_answer, open_client, transport_errors
from services.simulator.calibrate import Predicted, as_another, as_it_runs
from services.simulator.feed import MeasuredPod, between, layer_us, parse_status
from services.status.client import fetch_status

TARGET: Final = 0.15  # of the measured time: issue C's bound
_WARM_TOKENS: Final = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateBench:
    """Pods with each of `sparks` Sparks; `runs` answers of up to `tokens` tokens from each."""

    sparks: tuple[int, ...]
    checkpoint: Path | None
    tokens: int
    runs: int

    def run(self) -> Report:
        """Measure and predict; PodFailed when a pod does not start."""
        machine = machine_facts()  # first: its load is that before the measurement
        measured = self._measure()
        return Report("simulate", machine, figures(self.sparks, measured, cores=_cores()))

    def _measure(self) -> list[MeasuredPod]:
        with ExitStack() as stack:
            clients = [stack.enter_context(self._start(stack, count)) for count in self.sparks]
            models = [served_model(client) for client in clients]
            for client, model in zip(clients, models, strict=True):
                _ask(client, model, QUESTIONS[0], _WARM_TOKENS)
            before = [_status(client) for client in clients]
            for run in range(self.runs):
                for client, model in zip(clients, models, strict=True):
                    _ask(client, model, QUESTIONS[run % len(QUESTIONS)], self.tokens)
            after = [_status(client) for client in clients]
        return [between(*pair) for pair in zip(before, after, strict=True)]

    def _start(self, stack: ExitStack, count: int) -> httpx.Client:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="k3-bench-"))
        options = ["--sparks", str(count)]
        if self.checkpoint is not None:
            options += ["--checkpoint", str(self.checkpoint)]
        url = stack.enter_context(running_pod(Path(folder), options))
        return open_client(url, None)


def figures(
    sparks: Sequence[int], measured: Sequence[MeasuredPod], *, cores: int
) -> tuple[Figure, ...]:
    """Measured and predicted microseconds per layer, and by how much they differ."""
    found: list[Figure] = []
    for count, pod in zip(sparks, measured, strict=True):
        name = f"simulate.sparks_{count}"
        took_us = layer_us(pod)
        found.append(Figure(f"{name}.measured_us", round(took_us, 1), "us"))
        found.append(Figure(f"{name}.measured_wait_us", round(pod.decode["wait_us"], 1), "us"))
        found += _compared(f"{name}.own_curves", took_us, as_it_runs(pod, source=name))
        if pod is not measured[0]:
            unchanged = Predicted(layer_us(measured[0]), measured[0].decode["wait_us"])
            found += _compared(f"{name}.unchanged", took_us, unchanged, target=None)
            predicted = as_another(measured[0], pod.nodes, cores=cores, source=name)
            found += _compared(f"{name}.from_sparks_{sparks[0]}", took_us, predicted)
    return tuple(found)


def _compared(
    name: str, measured_us: float, predicted: Predicted, *, target: float | None = TARGET
) -> list[Figure]:
    """No target where nothing was predicted: such an error is what a prediction has to beat."""
    error = round(abs(predicted.layer_us / measured_us - 1), 4)
    return [
        Figure(f"{name}.predicted_us", round(predicted.layer_us, 1), "us"),
        Figure(f"{name}.predicted_wait_us", round(predicted.wait_us, 1), "us"),
        Figure(f"{name}.error", error, "fraction")
        if target is None
        else at_most(f"{name}.error", error, "fraction", target),
    ]


def _ask(client: httpx.Client, model: str, question: str, max_tokens: int) -> None:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": max_tokens,
    }
    with transport_errors(str(client.base_url)):
        check_answer(client.post("/v1/chat/completions", json=body))


def _status(client: httpx.Client) -> MeasuredPod:
    return parse_status(fetch_status(client), source=str(client.base_url))


def _cores() -> int:
    return len(os.sched_getaffinity(0))
