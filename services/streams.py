"""The standard streams of a command, made usable whatever the shell did to them.

Owns closed streams and text that an encoding cannot hold. Must not know what is printed.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def open_streams() -> None:
    """Open closed standard streams on /dev/null and let no character be an error.

    Python gives None for a stream that the shell closed (`k3 status >&-`), and the next file or
    socket would get its number. Bytes that are no text, and letters that the locale's encoding does
    not have, become a replacement character. For the process's entry point only.
    """
    for name, flags, mode in (("stdin", os.O_RDONLY, "r"), ("stdout", os.O_WRONLY, "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode, encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")


def table_console(pipe_columns: int) -> Console:
    """Where a report's tables go: as wide as the terminal, or `pipe_columns` when there is none."""
    from rich.console import Console  # not before something is printed: `k3 --help` must be quick

    width = None if sys.stdout.isatty() else pipe_columns
    return Console(highlight=False, soft_wrap=True, width=width)
