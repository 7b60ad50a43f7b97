"""An embedded pod for the time of a measurement: `k3 up` as a child process."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from services.pod.supervisor import PodFailed
from shared.io.process import PARENT_VARIABLE

START_S: Final = 240.0
STOP_S: Final = 10.0
_READY: Final = re.compile(rb"^ready: (http://\S+)/v1 ", re.MULTILINE)


@contextlib.contextmanager
def running_pod(state_dir: Path, options: Sequence[str]) -> Iterator[str]:
    """Start `k3 up --port 0` with `options`; yields its URL and stops it at the end.

    The pod's progress goes to stderr. Raises PodFailed when it ends or is not ready in START_S.
    """
    command = [sys.executable, "-m", "services.cli", "up", "--port", "0"]
    process = subprocess.Popen(  # noqa: S603 - our own command line
        [*command, "--state-dir", str(state_dir), *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
    )
    try:
        yield _await_ready(process)
    finally:
        _end(process)


def _await_ready(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None, "started with a pipe"
    descriptor = process.stdout.fileno()
    limit = time.monotonic() + START_S
    text = b""
    while (left_s := limit - time.monotonic()) > 0:
        if not select.select([descriptor], [], [], left_s)[0]:
            break
        chunk = os.read(descriptor, 65_536)
        text += chunk
        if found := _READY.search(text):
            return found[1].decode("ascii")
        if not chunk:
            raise PodFailed(f"the pod ended with status {process.wait()} before it was ready")
    raise PodFailed(f"the pod was not ready within {START_S:g} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
