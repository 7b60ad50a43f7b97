"""Real processes: a child follows its parent, an exit is noticed at once (case Z9)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import uvloop

from shared.core.errors import ConfigError
from shared.io.process import PARENT_VARIABLE, ParentGone, PidWatch, die_with_parent, tie_to_parent

LOOPS = pytest.mark.parametrize(
    "loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
ENVIRON = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

# The parent starts a child that ties itself to it, hands the child's pid on, then waits.
PARENT = """
import os, subprocess, sys
command = [sys.executable, "-c", sys.argv[1], str(os.getpid())]
child = subprocess.Popen(command, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""
CHILD = """
import sys, time
from shared.io.process import die_with_parent
die_with_parent(int(sys.argv[1]))
print("tied", flush=True)
time.sleep(60)
"""


@LOOPS
def test_a_child_ends_with_its_parent_and_a_stranger_notices(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """SIGKILL of the parent ends the child; a watch on the grandchild is set without polling."""

    async def main() -> None:
        parent = subprocess.Popen(  # noqa: ASYNC220 - returns at once
            [sys.executable, "-c", PARENT, CHILD],
            env=ENVIRON,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with parent:
            assert parent.stdout is not None
            grandchild = int(parent.stdout.readline())
            async with PidWatch(grandchild) as watch, asyncio.timeout(5):
                for _ in range(3):  # the loop has looked at the descriptor by then
                    await asyncio.sleep(0)

                assert not watch.exited.is_set()

                parent.kill()
                await watch.exited.wait()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


@LOOPS
def test_a_process_that_ended_before_the_watch_is_noticed(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """A zombie counts as ended; a pid nobody has raises."""

    async def main() -> None:
        child = subprocess.Popen([sys.executable, "-c", ""])  # noqa: ASYNC220
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - ends at once
        async with PidWatch(child.pid) as watch, asyncio.timeout(2):
            await watch.exited.wait()
        child.wait()
        with pytest.raises(ProcessLookupError):
            await PidWatch(child.pid).__aenter__()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


def test_a_watch_closes_its_descriptor() -> None:
    """Opening and closing many watches leaks nothing."""

    async def main() -> None:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(50):
            async with PidWatch(os.getpid()):
                pass

        assert len(os.listdir("/proc/self/fd")) == before

    asyncio.run(main())


def test_an_orphan_refuses_to_start() -> None:
    """A process whose parent is already another one is told so, with the pid it expected."""
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            "from shared.io.process import ParentGone, die_with_parent\n"
            "try:\n    die_with_parent(999999999)\n"
            "except ParentGone as error:\n    print(error)",
        ],
        env=ENVIRON,
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )

    assert "999999999 has ended" in ran.stdout


def test_an_impossible_signal_is_an_error() -> None:
    """The kernel's refusal is not swallowed."""
    with pytest.raises(OSError, match="PDEATHSIG"):
        die_with_parent(os.getppid(), signal_number=12345)


def test_the_variable_ties_a_process_to_the_one_that_set_it() -> None:
    """K3_PARENT_PID: absent means free, another process means too late, text means a mistake."""
    tie_to_parent({})
    with pytest.raises(ParentGone, match="999999999"):
        tie_to_parent({PARENT_VARIABLE: "999999999"})
    with pytest.raises(ConfigError, match="K3_PARENT_PID is 'init'"):
        tie_to_parent({PARENT_VARIABLE: "init"})
