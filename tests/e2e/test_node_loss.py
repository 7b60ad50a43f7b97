"""Losing a node costs time, never a wrong token."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pod import CHECKPOINT, Pod, running
from tests.support.solo import PREFILL_TOKENS, Solo

QUESTION = "What is a Spark?"
MAX_TOKENS = 16
VICTIM = "spark0"
HOT, SEED = 2.0, 3  # a hot sample notices what the arg-max of a confident model forgives
FIRST, MIDDLE, LAST = 1, 4, 8  # MoE layers of the demo model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def solo() -> Solo:
    """The oracle."""
    return Solo(CHECKPOINT)


def step_of(token: int, solo: Solo) -> int:
    """The forward pass that produces a token: the last prefill chunk makes token 0."""
    chunks = -(-len(solo.prompt(QUESTION)) // PREFILL_TOKENS)
    return chunks - 1 + token


@pytest.mark.parametrize("temperature", [0.0, HOT])
@pytest.mark.parametrize("token", [0, 1, 7])
def test_sigkill_at_any_moment_changes_no_token(
    tmp_path: Path, solo: Solo, token: int, temperature: float
) -> None:
    """Cases L1, L11, L14: tokens 0, 1, 7 x first, middle, last MoE layer; then the node returns."""
    expected = solo.tokens(QUESTION, max_tokens=MAX_TOKENS, temperature=temperature, seed=SEED)
    assert len(expected) > token + 1, "the moment must lie inside the answer"
    sampling = {"temperature": temperature, "top_p": 1.0, "seed": SEED}
    # a fired fault arms the next one, so later layers come first: one loss per request
    layers = (LAST, MIDDLE, FIRST)
    fault = ",".join(f"kill:{VICTIM}:{step_of(token, solo)}:{layer}" for layer in layers)
    env = {"K3_FAULT": fault}
    with running(tmp_path, "--sparks", "2", "--restart-delay-s", "0.5", env=env) as pod:
        station = pod.children()["station"]
        epoch = pod.node(VICTIM)["epoch"]
        for number, layer in enumerate(layers, start=1):
            cold_before = pod.status()["cold_rows"]

            answer = pod.complete(QUESTION, max_tokens=MAX_TOKENS, **sampling)

            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["token_ids"] == expected, layer
            after = pod.status()
            victim = pod.node(VICTIM)
            assert victim["losses"] == number, layer
            assert victim["last_loss"], layer
            assert after["cold_rows"] > cold_before, layer
            assert answer.json()["k3"]["cold_rows"] == after["cold_rows"] - cold_before
            pod.wait_until(
                f"{VICTIM} serves again after layer {layer}",
                lambda: pod.node(VICTIM)["state"] == "serving",
            )
            assert pod.node(VICTIM)["epoch"] > epoch
            epoch = pod.node(VICTIM)["epoch"]
        assert pod.children()["station"] == station
        healthy = pod.complete(QUESTION, max_tokens=MAX_TOKENS, **sampling)
        assert healthy.json()["choices"][0]["token_ids"] == expected


def test_on_miss_fail_names_node_layer_experts_and_microseconds(tmp_path: Path, solo: Solo) -> None:
    """One typed error, and the pod goes on when the node is back."""
    env = {"K3_FAULT": f"kill:{VICTIM}:{step_of(1, solo)}:{MIDDLE}"}
    options = ("--sparks", "1", "--on-miss", "fail", "--restart-delay-s", "0.5")
    with running(tmp_path, *options, "--policy", "contiguous", env=env) as pod:
        answer = pod.complete(QUESTION, max_tokens=MAX_TOKENS)

        error = answer.json()["error"]
        assert answer.status_code in (502, 503, 504)
        assert error["type"] in ("node_lost", "layer_deadline_exceeded")
        for words in (f"node {VICTIM}", "layer ", "experts [", " us)"):
            assert words in error["message"]
        pod.wait_until("the node is back", lambda: pod.node(VICTIM)["state"] == "serving")
        expected = solo.tokens(QUESTION, max_tokens=MAX_TOKENS)
        assert pod.tokens(QUESTION, max_tokens=MAX_TOKENS) == expected


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[tuple[Pod, int]]:
    """A pod one of whose Sparks is stopped, and that Spark's process id."""
    with running(tmp_path, "--sparks", "2") as pod:
        victim = pod.children()[VICTIM]
        os.kill(victim, signal.SIGSTOP)
        try:
            yield pod, victim
        finally:
            os.kill(victim, signal.SIGCONT)


def test_a_frozen_node_is_served_around_and_found(frozen: tuple[Pod, int], solo: Solo) -> None:
    """Case L16: SIGSTOP costs a deadline, then the node is lost by name; thawed, it joins again."""
    pod, victim = frozen

    assert pod.tokens(QUESTION, max_tokens=MAX_TOKENS) == solo.tokens(
        QUESTION, max_tokens=MAX_TOKENS
    )
    pod.wait_until("the frozen node is lost", lambda: pod.node(VICTIM)["state"] == "lost")
    epoch = pod.node(VICTIM)["epoch"]
    os.kill(victim, signal.SIGCONT)
    pod.wait_until("it serves again", lambda: pod.node(VICTIM)["state"] == "serving")
    assert pod.node(VICTIM)["epoch"] > epoch
