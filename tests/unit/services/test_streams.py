"""Commands whose standard streams were closed, are full, or cannot hold the text."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NARROW = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
DEAD = "http://127.0.0.1:1"


def shell(command: str, environ: Mapping[str, str] | None = None) -> tuple[int, str]:
    """`k3 COMMAND` in a shell: exit status and everything it said."""
    answer = subprocess.run(
        ["/bin/sh", "-c", f'exec "$PYTHON" -m services.cli {command}'],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable, **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=30,
    )
    return answer.returncode, answer.stdout


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("--help >&-", 0, ""),
        ("--help >&- 2>&- <&-", 0, ""),
        ("--help >/dev/full", 1, "k3: error[os_error]: [Errno 28] No space left on device\n"),
        (f"status --url {DEAD} 2>&-", 1, ""),
    ],
)
def test_a_stream_that_cannot_be_used_is_no_trace(command: str, status: int, said: str) -> None:
    """Closed is /dev/null; what was lost on a full disk is a failure that says so."""
    assert shell(command) == (status, said)


def test_text_that_the_locale_cannot_hold_is_replaced() -> None:
    """In a POSIX locale without UTF-8 mode every stream is ASCII."""
    code = "from services.streams import open_streams as o; o(); print(input(), 'caf\\u00e9')"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **NARROW},
        input=b"a\xff\n",
        capture_output=True,
        timeout=30,
    )

    assert answer.stderr == b""
    assert answer.stdout == b"a? caf?\n"


def test_an_argument_is_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    """Right bytes go on (here to a pod that is not there); wrong ones are a usage error."""
    good = tmp_path / "good"
    good.write_bytes("na\u00efve".encode())
    bad = tmp_path / "bad"
    bad.write_bytes(b"\xff")

    status, said = shell(f'chat --url {DEAD} --once "$(cat {good})"', NARROW)
    assert (status, said.startswith("k3: error[pod_unreachable]")) == (1, True)
    status, said = shell(f'chat --url {DEAD} --once "$(cat {bad})"')
    assert (status, "is not text in UTF-8" in said) == (2, True)
