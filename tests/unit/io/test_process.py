"""Real processes: a child follows its parent (case Z9)."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from shared.core.errors import ConfigError
from shared.io.process import PARENT_VARIABLE, ParentGone, die_with_parent, tie_to_parent

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


def test_a_child_ends_with_its_parent() -> None:
    """SIGKILL of the parent ends the child, which nobody else tells."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD],
        env=ENVIRON,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with parent:
        assert parent.stdout is not None
        grandchild = os.pidfd_open(int(parent.stdout.readline()))
        try:
            assert _ended(grandchild, within_s=0) is False

            parent.kill()

            assert _ended(grandchild, within_s=5) is True
        finally:
            os.close(grandchild)


def _ended(pidfd: int, *, within_s: float) -> bool:
    """Whether the process of a pidfd ends in time (a zombie has ended)."""
    readable, _, _ = select.select([pidfd], [], [], within_s)
    return bool(readable)


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
