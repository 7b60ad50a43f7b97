"""A placement that `k3 plan` could have made, with second copies, served by a real pod."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from services.banks.builder import build
from services.planner import policies
from services.planner.assignment import Assignment
from services.planner.ledger import take_ledger
from services.planner.pod import Pod
from services.planner.pod_file import read_pod
from services.pod.checkpoint import prepare_from
from services.pod.children import children_of, environment
from services.pod.layout import PodLayout, PodPaths
from services.pod.ports import reserve
from services.pod.prepare import PodPlan
from services.routing.synth import FITTED, synthesize
from shared.core import placement as placements
from shared.core.placement import Placement
from station.model.checkpoint import Checkpoint
from tests.support.pod import CHECKPOINT, ROOT
from tests.support.solo import PREFILL_TOKENS, Solo

QUESTION = "What is a Spark?"
READY_S = 60.0
VICTIM, KILLED_AT, KILLED_IN = "spark0", 8, 4  # node, token, layer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def cost_ranked(checkpoint: Checkpoint) -> tuple[Pod, Assignment]:
    """The embedded pod by the cost-ranked policy, without copies."""
    pod, shape = read_pod("embedded"), checkpoint.config.shape
    trace = synthesize(FITTED, requests=4, tokens=50, shape=shape, seed=1)
    return pod, policies.plan("cost-ranked", trace.histogram(), pod, take_ledger(pod, shape))


def with_full_slots(checkpoint: Checkpoint) -> Placement:
    """Copies in every slot that is spare."""
    pod, assignment = cost_ranked(checkpoint)
    copy, left = np.full(assignment.home.shape, -1), assignment.slots - assignment.used()
    for key in np.random.default_rng(0).permutation(assignment.home.size).tolist():
        layer, expert = divmod(key, checkpoint.config.shape.experts)
        place = int(np.argmax(left))
        if left[place] > 0 and assignment.home[layer, expert] != place:
            copy[layer, expert] = place
            left[place] -= 1
    full = assignment.with_copies(copy)
    assert full.copies > 60, "nearly all spare slots are to be filled"
    return placement_of(full, pod, checkpoint)


def with_copies_of(victim: str, checkpoint: Checkpoint) -> Placement:
    """Each expert of one Spark has a copy on another node, by turns."""
    pod, assignment = cost_ranked(checkpoint)
    place = pod.place(victim)
    others = [other for other in range(len(pod.nodes)) if other != place]
    copy = np.full(assignment.home.shape, -1)
    held = assignment.home == place
    copy[held] = np.resize(others, int(held.sum()))
    roomy = Assignment(assignment.home, copy.astype(np.int16), assignment.slots * 2)
    return placement_of(roomy, pod, checkpoint)


def placement_of(assignment: Assignment, pod: Pod, checkpoint: Checkpoint) -> Placement:
    """As `k3 plan --out` writes it."""
    return assignment.to_placement(
        pod,
        checkpoint.config.shape,
        model_digest=checkpoint.digest,
        policy="test",
        trace_digest="",
    )


@contextmanager
def prepared(
    tmp_path: Path, placed: Callable[[Checkpoint], Placement]
) -> Iterator[tuple[PodLayout, str]]:
    """The files of a pod with this placement, and the address it will serve under."""
    held = ExitStack()
    http_port, control_port, banks_port = (reserve(held, 0, option="none") for _ in range(3))
    plan = PodPlan(
        checkpoint=CHECKPOINT,
        sparks=2,
        http_port=http_port,
        control_port=control_port,
        banks_port=banks_port,
        model_name="k3-demo",
        pin=False,
    )
    layout = prepare_from(PodPaths.embedded(tmp_path), plan, say=lambda _line: None)
    with Checkpoint.open(CHECKPOINT) as checkpoint:
        placement = placed(checkpoint)
        for node in layout.nodes:
            path = layout.paths.bank(node.name)
            build(checkpoint, placement, node.name, path, replace=True)
    layout.paths.placement.write_bytes(placements.encode(placement))
    with held:
        yield layout, f"http://127.0.0.1:{http_port}"


@contextmanager
def serving(layout: PodLayout, url: str, **env: str) -> Iterator[httpx.Client]:
    """The pod's own processes, ended afterwards; the client of a ready Station."""
    environ = environment({**os.environ, **env}, parent_pid=os.getpid())
    started = [
        subprocess.Popen(
            child.argv, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for child in children_of(layout)
    ]
    try:
        with httpx.Client(base_url=url, timeout=60.0) as client:
            wait_until_ready(client, started)
            yield client
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(15.0)


def wait_until_ready(client: httpx.Client, started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all nodes serve; a process that ended is a failure at once."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        assert [process.poll() for process in started] == [None] * len(started)
        try:
            nodes = client.get("/k3/status").json()["nodes"]
        except (httpx.TransportError, KeyError):
            nodes = []
        if nodes and {node["state"] for node in nodes} == {"local", "serving"}:
            return
        time.sleep(0.1)
    raise AssertionError(f"not all nodes serve after {READY_S} s: {nodes}")


def ask(client: httpx.Client, max_tokens: int) -> list[int]:
    """Greedy token ids of the answer."""
    body = {
        "model": "k3-demo",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "return_token_ids": True,
    }
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


@pytest.fixture(scope="module")
def solo() -> Solo:
    """The oracle: one process."""
    return Solo(CHECKPOINT)


def test_a_planned_placement_with_copies_gives_the_same_tokens(tmp_path: Path, solo: Solo) -> None:
    """Banks hold rows and copies, every canary is right, experts answer from homes and copies."""
    with (
        prepared(tmp_path, with_full_slots) as (layout, url),
        serving(layout, url) as client,
    ):
        tokens = ask(client, 24)
        status = client.get("/k3/status").json()

    assert tokens == solo.tokens(QUESTION, max_tokens=24)
    assert len(tokens) > 8
    assert status["cold_rows"] == 0
    assert all(node["rows"] > node["copy_rows"] for node in status["nodes"])
    assert sum(node["copy_rows"] for node in status["nodes"]) > 0


def test_copies_serve_when_their_home_is_killed(tmp_path: Path, solo: Solo) -> None:
    """Case L1, replica first: SIGKILL in the middle of a layer costs no cold row, then or later."""
    chunks = -(-len(solo.prompt(QUESTION)) // PREFILL_TOKENS)
    fault = f"kill:{VICTIM}:{chunks - 1 + KILLED_AT}:{KILLED_IN}"
    with (
        prepared(tmp_path, lambda checkpoint: with_copies_of(VICTIM, checkpoint)) as (layout, url),
        serving(layout, url, K3_FAULT=fault) as client,
    ):
        expected = solo.tokens(QUESTION, max_tokens=16)
        assert len(expected) > KILLED_AT
        assert ask(client, KILLED_AT) == expected[:KILLED_AT]
        before = nodes_of(client)
        assert before[VICTIM]["state"] == "serving"

        assert ask(client, 16) == expected
        lost = nodes_of(client)
        assert lost[VICTIM]["state"] == "lost"

        assert ask(client, 16) == expected
        after = nodes_of(client)
        assert client.get("/k3/status").json()["cold_rows"] == 0

    assert before[VICTIM]["rows"] > 0
    assert after[VICTIM]["rows"] == lost[VICTIM]["rows"]
    others = [name for name in after if name != VICTIM]
    assert sum(after[name]["copy_rows"] - lost[name]["copy_rows"] for name in others) > 0


def nodes_of(client: httpx.Client) -> dict[str, dict[str, Any]]:
    """The nodes of the status by name."""
    return {node["name"]: node for node in client.get("/k3/status").json()["nodes"]}
