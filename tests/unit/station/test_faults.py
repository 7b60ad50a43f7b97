"""Fault points: off unless asked for, refused when misspelt, fired once and in order."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shared.core.errors import ConfigError
from station import faults
from station.faults import VARIABLE, NoFaults
from station.ledger import WorkKey


@pytest.fixture
def victims() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that would wait for ever."""
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    running = [subprocess.Popen(command) for _ in range(2)]
    yield running
    for process in running:
        process.kill()
        process.wait()


def test_nothing_without_the_variable() -> None:
    """Production."""
    assert isinstance(faults.from_environ({}, lambda _: None), NoFaults)


@pytest.mark.parametrize(
    "text",
    [
        "kill",
        "kill:spark0:1",
        "kill:spark0:1:x",
        "kill::1:2",
        "kill:a::2",
        "drop:spark0:1:2",
        "kill:a:1:2,,",
        "kill:a:-1:2",
        "kill:a:\u00b2:2",
        "kill:a:1:" + "9" * 5000,
    ],
)
def test_a_misspelt_fault_is_refused(text: str) -> None:
    """A fault that never fires would make a test prove nothing."""
    with pytest.raises(ConfigError, match="kill:NODE:STEP:LAYER"):
        faults.from_environ({VARIABLE: text}, lambda _: None)


def test_each_fault_kills_once_and_in_order(victims: list[subprocess.Popen[bytes]]) -> None:
    """Only the first that is left is armed, and only for its step and layer."""
    pids = {"a": victims[0].pid, "b": victims[1].pid}
    kills = faults.from_environ({VARIABLE: "kill:a:2:5,kill:b:2:4"}, pids.get)
    for step, layer in ((2, 4), (1, 5), (2, 6)):
        kills.after_post(WorkKey("r", step, layer))
    assert [victim.poll() for victim in victims] == [None, None]

    kills.after_post(WorkKey("r", 2, 5))
    assert victims[0].wait(10) == -signal.SIGKILL
    kills.after_post(WorkKey("r", 2, 5))
    assert victims[1].poll() is None
    kills.after_post(WorkKey("r", 2, 4))
    assert victims[1].wait(10) == -signal.SIGKILL
    kills.after_post(WorkKey("r", 2, 4))


def test_a_node_that_is_not_there_keeps_the_fault_armed(
    victims: list[subprocess.Popen[bytes]],
) -> None:
    """Without a process to kill the moment has not come."""
    pids: dict[str, int] = {}
    kills = faults.from_environ({VARIABLE: "kill:a:0:1"}, pids.get)
    kills.after_post(WorkKey("r", 0, 1))
    pids["a"] = victims[0].pid
    kills.after_post(WorkKey("r", 0, 1))

    assert victims[0].wait(10) == -signal.SIGKILL
