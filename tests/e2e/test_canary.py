"""A node whose canary fails leaves the pod; the pod's tokens are those of before."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.memory_rot import flip_in_memory, record_of
from tests.support.pod import CHECKPOINT, running
from tests.support.solo import Solo
from tests.support.tampered_bank import tamper

QUESTION = "What is a Spark?"
MAX_TOKENS = 16
VICTIM = "spark0"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def test_a_node_that_fails_its_canary_costs_time_and_no_token(tmp_path: Path) -> None:
    """First its memory rots: it leaves by name of layer and expert, comes back with the bank read
    again. Then its bank is another one with right hashes: it never comes back, and the cold store
    serves its experts. Every answer has the oracle's token ids."""
    expected = Solo(CHECKPOINT).tokens(QUESTION, max_tokens=MAX_TOKENS)
    with running(tmp_path, "--sparks", "1", "--restart-delay-s", "0.3") as pod:
        bank = next(tmp_path.rglob(f"{VICTIM}.k3bank"))
        settings = next(tmp_path.rglob(f"{VICTIM}.toml"))
        with settings.open("a") as file:
            file.write("\ncanary_period_s = 0.1\n")
        epoch = pod.node(VICTIM)["epoch"]
        os.kill(pod.children()[VICTIM], signal.SIGKILL)
        pod.wait_until("the new setting counts", lambda: serves_above(epoch, pod.node(VICTIM)))
        epoch = pod.node(VICTIM)["epoch"]

        _, (layer, expert), record = record_of(bank, 2)
        assert flip_in_memory(pod.children()[VICTIM], record) >= 1
        pod.wait_until("memory read again", lambda: serves_above(epoch, pod.node(VICTIM)))
        assert f"goodbye: layer {layer} expert {expert} " in pod.node(VICTIM)["last_loss"]
        assert pod.tokens(QUESTION, max_tokens=MAX_TOKENS) == expected

        golden, (layer, expert), _ = record_of(bank, 5)
        tamper(bank, golden.bank_row)
        os.kill(pod.children()[VICTIM], signal.SIGKILL)
        log = next(tmp_path.rglob(f"{VICTIM}.log"))
        found = f"layer {layer} expert {expert} (bank row {golden.bank_row}): the canary row"
        pod.wait_until("the changed bank is refused", lambda: found in log.read_text())
        pod.wait_until("it is left down", lambda: VICTIM not in pod.children())
        cold = pod.status()["cold_rows"]
        assert pod.tokens(QUESTION, max_tokens=MAX_TOKENS) == expected
        assert pod.status()["cold_rows"] > cold
        assert pod.node(VICTIM)["state"] == "lost"


def serves_above(epoch: int, node: dict[str, object]) -> bool:
    """Whether a node serves under a later lease."""
    at = node["epoch"]
    return node["state"] == "serving" and isinstance(at, int) and at > epoch
