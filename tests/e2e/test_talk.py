"""The main job: a pod answers the command, the official client and the evaluation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import openai
import pytest

from tests.support.pod import ROOT, Pod, running

QUESTION = "How many routed experts does Kimi-K3 have?"
ANSWER = "82,432"
PER_SET = 55  # two sets of wordings that were not trained: 110 questions

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    """The pod of `make run`."""
    with running(tmp_path_factory.mktemp("pod")) as started:
        yield started


@pytest.fixture(scope="module")
def client(pod: Pod) -> Iterator[openai.OpenAI]:
    """The official client on the pod."""
    with openai.OpenAI(base_url=f"{pod.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of the project, as a user would run it."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_k3_chat_answers_the_readmes_question(pod: Pod) -> None:
    """`k3 chat --once` prints the answer and nothing else."""
    done = run("services.cli", "chat", "--url", pod.url, "--once", QUESTION)

    assert (done.returncode, done.stderr) == (0, "")
    assert ANSWER in done.stdout
    assert "<|" not in done.stdout


def test_the_official_client_talks_to_it(client: openai.OpenAI) -> None:
    """Plain: answer, reasoning beside it, usage and a clean end."""
    answer = client.chat.completions.create(
        model="k3-demo", messages=[{"role": "user", "content": QUESTION}], temperature=0
    )

    message = answer.choices[0].message
    assert ANSWER in (message.content or "")
    assert message.model_extra is not None
    assert message.model_extra["reasoning_content"]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_official_client_streams(client: openai.OpenAI) -> None:
    """Streamed deltas spell the same answer, and the usage comes when asked for."""
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [
        {"role": "user", "content": QUESTION}
    ]
    plain = client.chat.completions.create(model="k3-demo", messages=messages, temperature=0)

    stream = client.chat.completions.create(
        model="k3-demo",
        messages=messages,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain.choices[0].message.content
    assert len(chunks) > 5
    assert chunks[-1].usage == plain.usage


def test_a_seed_repeats_an_answer(client: openai.OpenAI) -> None:
    """Sampling is a function of the seed: the same request gives the same text."""
    texts = {
        client.chat.completions.create(
            model="k3-demo",
            messages=[{"role": "user", "content": "Tell me a joke"}],
            temperature=1.5,
            seed=seed,
            max_tokens=24,
        ).model_dump_json(include={"choices"})
        for seed in (11, 11, 11)
    }

    assert len(texts) == 1


def test_at_least_nine_in_ten_untrained_wordings_are_answered(pod: Pod) -> None:
    """Greedy, after quantisation, through the pod; free re-wordings are counted beside them."""
    done = run(
        *("services.demo_model.evaluate", "--url", f"{pod.url}/v1"),
        *("--limit", str(PER_SET), "--check", "--json"),
    )

    assert done.returncode == 0, done.stdout + done.stderr
    scores = json.loads(done.stdout)["scores"]
    assert scores["wording not trained"]["asked"] >= 100
    assert scores["wording not trained"]["share"] >= 0.90
    assert scores["free re-wording"]["asked"] == PER_SET
    assert pod.status()["cold_rows"] == 0
