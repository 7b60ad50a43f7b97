"""Fault points: moments at which a test may break something on purpose; nothing in production.

A fault is named by the environment of `k3-station` (K3_FAULT) and fires once, so that a test can
lose a node exactly while a given token is in a given layer. See docs/decisions.md.
"""

from __future__ import annotations

import os
import re
import signal
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from shared.core.errors import ConfigError
from station.ledger import WorkKey

VARIABLE: Final = "K3_FAULT"
_KILL: Final = re.compile(r"kill:(?P<node>[^:]+):(?P<step>[0-9]{1,9}):(?P<layer>[0-9]{1,9})")


class Faults(Protocol):
    """What the expert path asks at its fault points."""

    def after_post(self, key: WorkKey) -> None:
        """The layer's dispatches are on their way, none was collected."""


class NoFaults:
    """Production."""

    def after_post(self, key: WorkKey) -> None:
        """Nothing happens."""


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL `node` when a request's forward pass `step` has posted `layer`."""

    node: str
    step: int
    layer: int


class KillNodes:
    """Kills in the given order; only the first that is left is armed."""

    def __init__(self, kills: list[Kill], pid_of: Callable[[str], int | None]) -> None:
        """`pid_of` names the process that holds a node's lease."""
        self._kills = deque(kills)
        self._pid_of = pid_of

    def after_post(self, key: WorkKey) -> None:
        """Fire when this is the moment."""
        if not self._kills:
            return
        kill = self._kills[0]
        if (kill.step, kill.layer) != (key.step, key.layer):
            return
        pid = self._pid_of(kill.node)
        if pid is not None:
            self._kills.popleft()
            os.kill(pid, signal.SIGKILL)


def from_environ(environ: Mapping[str, str], pid_of: Callable[[str], int | None]) -> Faults:
    """`K3_FAULT="kill:NODE:STEP:LAYER[,kill:...]"`; NoFaults without the variable."""
    text = environ.get(VARIABLE, "")
    if not text:
        return NoFaults()
    kills = []
    for part in text.split(","):
        words = _KILL.fullmatch(part)
        if words is None:
            raise ConfigError(f"{VARIABLE}: {part!r} is not kill:NODE:STEP:LAYER; unset it")
        kills.append(Kill(words["node"], int(words["step"]), int(words["layer"])))
    return KillNodes(kills, pid_of)
