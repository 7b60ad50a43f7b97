"""`k3 trace record` on a running pod: what the model routed, in files that the other verbs read."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from services.routing.file import load
from shared.core.shape import ModelShape
from station.model.config import K3Config
from tests.support.pod import CHECKPOINT, ROOT, Pod, running
from tests.support.solo import Solo

QUESTIONS = ("What is a Spark?", "How many routed experts does Kimi-K3 have?")
MAX_TOKENS = 24

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


class NotingSolo(Solo):
    """Solo that keeps what the router chose: one [T, layers, top_k] per forward pass."""

    def __init__(self, checkpoint: Path, shape: ModelShape) -> None:
        super().__init__(checkpoint)
        self._first, self._last = shape.moe_layers[0], shape.moe_layers[-1]
        self._layers: list[np.ndarray] = []
        self.chosen: list[np.ndarray] = []

    def experts(self, layer: int, z: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """As Solo's, noted layer by layer."""
        if layer == self._first:
            self._layers = []
        self._layers.append(ids.numpy().copy())
        if layer == self._last:
            self.chosen.append(np.stack(self._layers, axis=1))
        return super().experts(layer, z, ids)


@pytest.fixture(scope="module")
def expected() -> list[np.ndarray]:
    """Router choices of every token of both answers, from one process without a pod."""
    solo = NotingSolo(CHECKPOINT, K3Config.from_file(CHECKPOINT).shape)
    routed = []
    for question in QUESTIONS:
        solo.chosen = []
        tokens = solo.tokens(question, max_tokens=MAX_TOKENS)
        # the pod does not run the model on the last token it may emit; the reference does
        last = len(solo.prompt(question)) + len(tokens) - (len(tokens) == MAX_TOKENS)
        routed.append(np.concatenate(solo.chosen)[:last])
    return routed


def k3(*arguments: str) -> subprocess.Popen[str]:
    """A command of the project, as a user would run it."""
    return subprocess.Popen(
        [sys.executable, "-m", "services.cli", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ask_both(pod: Pod) -> None:
    """Two requests at once, so that their tokens come mixed."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda q: pod.tokens(q, max_tokens=MAX_TOKENS), QUESTIONS))


def test_the_recording_is_what_the_model_routed(tmp_path: Path, expected: list[np.ndarray]) -> None:
    """Every token, layer and id in the router's order; Ctrl-C ends it with a summary."""
    with running(tmp_path / "pod", "--sparks", "2") as pod:
        pod.tokens(QUESTIONS[0], max_tokens=2)  # before anybody listens: not in the trace
        recorder = k3("trace", "record", "--url", pod.url, "--out", str(tmp_path / "t"), "--json")
        assert recorder.stderr is not None
        assert "recording" in recorder.stderr.readline()
        ask_both(pod)
        recorder.send_signal(signal.SIGINT)
        out, err = recorder.communicate(timeout=30)

    assert recorder.returncode == 0, err
    summary = json.loads(out)
    total = sum(map(len, expected))
    assert (summary["ended"], summary["tokens"], summary["requests"]) == ("interrupted", total, 2)
    assert (summary["tokens_dropped"], summary["tokens_incomplete"]) == (0, 0)

    trace = load([Path(file) for file in summary["files"]]).trace
    starts = [*trace.starts().tolist(), trace.tokens]
    got = [trace.ids[low:high] for low, high in pairwise(starts)]
    assert sorted(ids.tobytes() for ids in got) == sorted(
        ids.astype(np.uint16).tobytes() for ids in expected
    )
    assert (trace.step == np.concatenate([np.arange(len(ids)) for ids in got])).all()

    counted = k3("trace", "histogram", *summary["files"], "--json")
    counts = np.array(json.loads(counted.communicate(timeout=30)[0])["counts"])
    assert (counts.sum(axis=1) == total * trace.top_k).all()
    assert trace.model_digest == summary["model_digest"]
