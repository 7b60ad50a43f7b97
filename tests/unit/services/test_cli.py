"""The command line as a whole: help, exit statuses, and how fast it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from services import cli
from services.pod.cli import as_called
from shared.core.errors import BankError, MeshError

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`k3 ARGUMENTS` as a process."""
    return subprocess.run(
        [sys.executable, "-m", "services.cli", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_help_groups_the_verbs() -> None:
    """Every verb stands under its section, in the order of the table."""
    answer = run("--help")

    assert answer.returncode == 0, answer.stderr
    words = [line.split()[0] for line in answer.stdout.splitlines() if line.strip()]
    shown = words[words.index("Run:") :]
    expected = ["Run:", "up", "chat", "Look:", "status", "bench", "Prepare:"]
    expected += ["census", "synth", "bank", "keys", "pod"]
    assert [word for word in shown if word in expected] == expected


@pytest.mark.parametrize("verb", list(cli.VERBS))
def test_every_verb_has_help_with_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The verb's module exists, and its help shows how to use it or its parts."""
    assert cli.run([verb, "--help"]) == 0
    text = capsys.readouterr().out
    command = cli.k3.get_command(click.Context(cli.k3), verb)
    if isinstance(command, click.Group):
        for name in command.commands:
            assert cli.run([verb, name, "--help"]) == 0
            text += capsys.readouterr().out

    assert f"k3 {verb}" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["status", "--url", "http://127.0.0.1:1"],
        ["up", "--help"],
        ["keys", "--help"],
        ["census", "/nowhere"],
        ["synth", "/nowhere", "--layers", "0"],
    ],
)
def test_looking_does_not_load_torch(arguments: list[str]) -> None:
    """torch costs seconds: only verbs that open a checkpoint may import it."""
    code = (
        "import sys; from services.cli import run; run(sys.argv[1:]);"
        "sys.exit('torch' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, timeout=30
    )

    assert answer.returncode == 0


def test_our_errors_are_one_line_with_their_status() -> None:
    """`k3: error[code]: message` on stderr, nothing on stdout, no traceback."""
    answer = run("status", "--url", "http://127.0.0.1:1")

    assert (answer.returncode, answer.stdout) == (1, "")
    assert answer.stderr.startswith("k3: error[pod_unreachable]: no pod answers at http://")
    assert answer.stderr.count("\n") == 1
    assert "k3 up" in answer.stderr


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (MeshError("x"), 1),
        (BankError("x"), 78),
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
        (click.UsageError("x"), 2),
        (BrokenPipeError(), 1),
        (OSError(28, "No space left on device"), 1),
    ],
)
def test_every_end_has_its_exit_status(
    raised: BaseException, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0, 1 failed, 2 usage, 78 configuration, 130 interrupted."""

    def fail(*_args: object, **_named: object) -> None:
        raise raised

    monkeypatch.setattr(click.Group, "invoke", fail)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # a broken pipe replaces it

    assert cli.run(["status"]) == status


@pytest.mark.parametrize(
    "arguments",
    [["nope"], ["up", "--sparks", "17"], ["up", "--port", "65536"], ["chat", "--json"]],
)
def test_wrong_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """click's own message, and nothing is started."""
    assert cli.run(arguments) == 2
    assert "Error" in capsys.readouterr().err


def test_a_command_returns_its_own_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verb's return value is the exit status; None is success."""
    for returned, status in ((None, 0), (0, 0), (1, 1)):
        monkeypatch.setattr(cli.k3, "main", lambda *_a, value=returned, **_n: value)

        assert cli.run([]) == status


@pytest.mark.parametrize(
    ("argv_0", "shown"),
    [
        (".venv/bin/k3", ".venv/bin/k3"),
        ("/home/me/my pod/.venv/bin/k3", "'/home/me/my pod/.venv/bin/k3'"),
        ("/work/services/cli.py", "k3"),
    ],
)
def test_the_lines_to_copy_name_the_program_as_it_was_called(argv_0: str, shown: str) -> None:
    """A shell can run what `k3 up` prints; `python -m` leaves no such name."""
    assert as_called(argv_0) == shown
