"""A child process that ends with its parent.

Linux only (prctl). Must not know what the processes do.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping
from typing import Final

from shared.core.errors import ConfigError, MeshError

PARENT_VARIABLE: Final = "K3_PARENT_PID"
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


class ParentGone(MeshError):
    """The process that started this one ended before it could be tied to it."""

    code = "parent_gone"


def die_with_parent(parent_pid: int, *, signal_number: int = signal.SIGTERM) -> None:
    """Ask the kernel to send `signal_number` to this process when its parent ends.

    `parent_pid` is what the parent said its pid is (an argument or variable, not `os.getppid()`,
    which would already name the reaper if the parent was quick to die). Raises ParentGone when that
    process is not the parent any more, OSError when the kernel refuses. The kernel ties the signal
    to the parent's *thread*: start children from a thread that lives as long as its process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal_number), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    # From here on the kernel watches; a parent that ended before is found by looking once.
    if os.getppid() != parent_pid:
        raise ParentGone(
            f"parent process {parent_pid} has ended: this process only lives as its child; "
            "start it through the parent again"
        )


def tie_to_parent(environ: Mapping[str, str]) -> None:
    """`die_with_parent` of the process that set K3_PARENT_PID; nothing without the variable."""
    parent = environ.get(PARENT_VARIABLE, "")
    if parent:
        if not parent.isdigit():
            raise ConfigError(f"{PARENT_VARIABLE} is {parent!r}: it must be a process id, or unset")
        die_with_parent(int(parent))
