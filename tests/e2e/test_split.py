"""The promise of the split: any number of Sparks, any placement, the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pod import CHECKPOINT, running
from tests.support.solo import Solo

QUESTIONS = ("What is a Spark?", "How many routed experts does Kimi-K3 have?")
MAX_TOKENS = 24

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Greedy token ids of the model in one process."""
    solo = Solo(CHECKPOINT)
    return [solo.tokens(question, max_tokens=MAX_TOKENS) for question in QUESTIONS]


@pytest.mark.parametrize("policy", ["balanced", "contiguous", "shuffled:7"])
@pytest.mark.parametrize("sparks", [1, 2, 4, 8])
def test_tokens_do_not_depend_on_the_split(
    tmp_path: Path, expected: list[list[int]], sparks: int, policy: str
) -> None:
    """Greedy ids equal those of one process, and every row came from its home."""
    with running(tmp_path, "--sparks", str(sparks), "--policy", policy) as pod:
        got = [pod.tokens(question, max_tokens=MAX_TOKENS) for question in QUESTIONS]
        status = pod.status()

    assert got == expected
    assert all(len(ids) > 8 for ids in got), "an answer this short would prove little"
    assert status["cold_rows"] == 0
    assert len(status["nodes"]) == 3 + sparks
    assert all(node["rows"] > 0 for node in status["nodes"])
    assert {node["state"] for node in status["nodes"]} == {"local", "serving"}
