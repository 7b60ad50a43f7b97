"""The processes of an embedded pod: their commands and environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from services.pod.layout import BANK_SERVICE, STATION, PodLayout
from shared.core.placement import Tier
from shared.io.process import PARENT_VARIABLE

_MODULES: Mapping[Tier, str] = {
    "spark": "spark_daemon",
    "grace": "services.grace",
    "rtx": "services.rtx",
}
# what systemd gave to `k3 up` itself: a child must not answer for it
_OURS_ALONE = frozenset({"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "JOURNAL_STREAM"})


@dataclass(frozen=True, slots=True)
class Child:
    """One process to keep running."""

    name: str
    argv: tuple[str, ...]
    is_station: bool


def children_of(layout: PodLayout) -> tuple[Child, ...]:
    """The Station, every node and the bank service, in start order."""
    python = (sys.executable, "-m")
    station = Child(
        STATION, (*python, "station", "--config", str(layout.paths.station_config)), True
    )
    nodes = (
        Child(
            node.name,
            (*python, _MODULES[node.tier], node.name, "--config", str(node.config)),
            False,
        )
        for node in layout.nodes
    )
    banks = Child(
        BANK_SERVICE,
        (*python, "services.bank_service", "--config", str(layout.paths.banks_config)),
        False,
    )
    return (station, *nodes, banks)


def environment(environ: Mapping[str, str], *, parent_pid: int) -> dict[str, str]:
    """What the children inherit: one compute thread each, tied to this process.

    Several processes share few cores here; a thread pool per process would only fight itself.
    """
    inherited = {name: value for name, value in environ.items() if name not in _OURS_ALONE}
    return {
        **inherited,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        # a folder `services` or `shared` where the operator happens to stand is not our code
        "PYTHONSAFEPATH": "1",
        PARENT_VARIABLE: str(parent_pid),
    }
