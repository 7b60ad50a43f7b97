"""A real pod for end-to-end tests: `k3 up` as a user starts it, and questions to its endpoint."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = Path(os.environ.get("K3_CK", ROOT / "services" / "demo_model" / "checkpoint"))
READY = re.compile(r"ready: (http://[^/\s]+)")
START_S = 60.0
STOP_S = 15.0


class Pod:
    """A running pod."""

    def __init__(self, process: subprocess.Popen[str], url: str, state: Path) -> None:
        self.process = process
        self.url = url
        self.state = state
        self.client = httpx.Client(base_url=url, timeout=60.0)

    def status(self) -> dict[str, Any]:
        """What `k3 status --json` prints."""
        answer = self.client.get("/k3/status")
        answer.raise_for_status()
        return answer.json()

    def node(self, name: str) -> dict[str, Any]:
        """One node's entry of the status."""
        return next(node for node in self.status()["nodes"] if node["name"] == name)

    def complete(self, question: str, *, max_tokens: int = 24, **fields: object) -> httpx.Response:
        """A greedy chat completion that reports its token ids."""
        body = {
            "model": "k3-demo",
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": max_tokens,
            "return_token_ids": True,
            **fields,
        }
        return self.client.post("/v1/chat/completions", json=body)

    def tokens(self, question: str, *, max_tokens: int = 24) -> list[int]:
        """Greedy token ids of an answer."""
        answer = self.complete(question, max_tokens=max_tokens)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]

    def children(self) -> dict[str, int]:
        """Process ids by child name, from the command lines below this pod."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except (OSError, ValueError):
                continue
            # between fork and exec, and as a zombie, a child has no command line of its own
            if parent == self.process.pid and len(words) > 3 and words[1] == "-m":
                found[child_name(words)] = int(entry.name)
        return found

    def wait_until(self, what: str, is_true: Callable[[], bool], *, seconds: float = 30.0) -> None:
        """Poll until something holds; the failure says what and shows the status."""
        deadline = time.monotonic() + seconds
        while not is_true():
            assert self.process.poll() is None, f"the pod ended while waiting until {what}"
            assert time.monotonic() < deadline, f"not in {seconds} s: {what}\n{self.status()}"
            time.sleep(0.05)

    def stop(self) -> int:
        """Ctrl-C; the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(STOP_S)


def child_name(words: Sequence[str]) -> str:
    """`station`, `banks`, or the node's name of `python -m spark_daemon NAME ...`."""
    services = {"station": "station", "services.bank_service": "banks"}
    return services.get(words[2], words[3])


def start(
    state: Path, *options: str, env: dict[str, str] | None = None, checkpoint: Path = CHECKPOINT
) -> subprocess.Popen[str]:
    """`k3 up` on a free port; output is read by the caller."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "services.cli", "up", "--port", "0"),
            *("--state-dir", str(state), "--checkpoint", str(checkpoint), *options),
        ],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextmanager
def running(
    state: Path, *options: str, env: dict[str, str] | None = None, checkpoint: Path = CHECKPOINT
) -> Iterator[Pod]:
    """A pod that is ready, and certainly gone afterwards."""
    process = start(state, *options, env=env, checkpoint=checkpoint)
    try:
        pod = Pod(process, _ready_url(process), state)
        with pod.client:
            yield pod
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
        if process.stdout is not None:
            process.stdout.close()


def _ready_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    lines: list[str] = []
    deadline = time.monotonic() + START_S
    for line in process.stdout:
        lines.append(line)
        if match := READY.search(line):
            return match.group(1)
        assert time.monotonic() < deadline, "".join(lines)
    raise AssertionError(f"the pod ended before it was ready:\n{''.join(lines)}")
