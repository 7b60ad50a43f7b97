"""`k3 bench census`: a census against safetensors' own Python API listing the same checkpoint.

Both see the same files in the same page cache, in turns. The census does more (every check, the
index, the scale scalars); the reference opens each shard and asks for names, dtypes and shapes.
"""

from __future__ import annotations

import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from safetensors import safe_open

from services.bench.machine import machine_facts
from services.bench.report import Figure, Report, at_most
from services.census.reader import take_census
from services.synth.sizes import k3_structure
from services.synth.writer import write
from station.model.shard_index import SHARD_SUFFIX

VS_SAFETENSORS_MAX: Final = 0.5
_SYNTH_SEED: Final = 0


@dataclass(frozen=True, slots=True)
class CensusBench:
    """What to count; without `checkpoint` all of K3's structure is synthesised for the occasion."""

    checkpoint: Path | None
    runs: int

    def run(self) -> Report:
        """Measure both; medians of `runs`."""
        machine = machine_facts()  # first: its load is that before the measurement
        if self.checkpoint is not None:
            return Report("census", machine, self._measure(self.checkpoint))
        with tempfile.TemporaryDirectory(prefix="k3-bench-") as folder:
            directory = Path(folder) / "k3"
            seconds, _, _ = _timed(lambda: write(directory, k3_structure(), _SYNTH_SEED).tensors)
            synth = Figure("census.synth_s", round(seconds, 3), "s")
            return Report("census", machine, (*self._measure(directory), synth))

    def _measure(self, directory: Path) -> tuple[Figure, ...]:
        ours: list[tuple[float, float]] = []
        theirs: list[tuple[float, float]] = []
        for _ in range(self.runs):
            seconds, cpu_s, listed = _timed(lambda: _list_with_safetensors(directory))
            theirs.append((seconds, cpu_s))
            seconds, cpu_s, tensors = _timed(lambda: take_census(directory).tensors)
            ours.append((seconds, cpu_s))
            assert listed == tensors, "both count the tensors of the same files"
        wall, cpu = (statistics.median(column) for column in zip(*ours, strict=True))
        their_wall, their_cpu = (statistics.median(column) for column in zip(*theirs, strict=True))
        return (
            at_most("census.vs_safetensors", wall / their_wall, "ratio", VS_SAFETENSORS_MAX),
            Figure("census.cpu.vs_safetensors", cpu / their_cpu, "ratio"),
            Figure("census.seconds", round(wall, 3), "s"),
            Figure("census.safetensors_seconds", round(their_wall, 3), "s"),
            Figure("census.tensors", tensors, "tensors"),
        )


def _list_with_safetensors(directory: Path) -> int:
    """Names, dtypes and shapes of every tensor, as the library's documentation asks for them."""
    count = 0
    for path in sorted(directory.glob(f"*{SHARD_SUFFIX}")):
        with safe_open(path, framework="np") as shard:
            listed = []
            for name in shard.keys():  # noqa: SIM118 - not a dict
                tensor = shard.get_slice(name)
                listed.append((name, tensor.get_dtype(), tensor.get_shape()))
            count += len(listed)
    return count


def _timed(action: Callable[[], int]) -> tuple[float, float, int]:
    """Wall seconds, CPU seconds of this process and the children it waited for, and the result."""
    cpu_before, before = _cpu_s(), time.monotonic_ns()
    result = action()
    return (time.monotonic_ns() - before) / 1e9, _cpu_s() - cpu_before, result


def _cpu_s() -> float:
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
