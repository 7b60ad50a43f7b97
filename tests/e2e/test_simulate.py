"""`k3 simulate --url` against the pod it is fed by: real processes, real hops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services import cli
from services.simulator.feed import parse_status
from tests.support.pod import running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
STEPS_MIN = 150


def test_a_pod_is_predicted_from_its_own_hops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fed with its hop tables and Station figures, the layer time is within issue C's 15 %.

    Input: node times by experts, the trip, the Station's own parts. Predicted: the wait for the
    slowest of five places, so a wrong queue, overlap or choice of the slowest shows.
    """
    with running(tmp_path, "--sparks", "2") as pod:
        questions = ("What is a bank?", "How does a token travel?", "What is a Spark?")
        for round_ in range(12):
            pod.complete(questions[round_ % 3], max_tokens=48)
            if pod.status()["decode"]["steps"] >= STEPS_MIN:
                break
        measured = parse_status(pod.status(), source="the pod")
        assert cli.run(["simulate", "--url", pod.url, "--one-host", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)

    layers = measured.decode["steps"] * measured.decode["layers_per_token"]
    for node in measured.nodes[1:]:
        assert 0 < node.dispatches <= layers
    assert told["outcome"]["layer_us"] == pytest.approx(told["measured_layer_us"], rel=0.15)
