"""`k3 bench bank`: the builder against `cp --sparse=never` and fsync, on records of real size.

Owns the comparison: same bytes, same disk, same run, source cold or warm in the page cache, the
results durable on both sides. The checkpoint is synthetic and opened beforehand.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from services.banks.builder import SUFFIX, build
from services.bench.machine import machine_facts
from services.bench.report import Figure, Report, at_most
from services.synth.sizes import k3_experts
from services.synth.writer import write
from shared.core.errors import ConfigError
from shared.core.placement import Placement, balanced
from shared.core.record import RecordLayout
from shared.core.shape import K3
from station.model.checkpoint import Checkpoint

Cache: TypeAlias = Literal["cold", "warm"]
Clock: TypeAlias = Callable[[], float]  # seconds, monotonic

_NODE: Final = "spark0"
_READ_BYTES: Final = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class BankBench:
    """How many bytes of experts (rounded up to records), how often, and on which disk."""

    payload_bytes: int
    rounds: int
    folder: Path
    clock: Clock = time.perf_counter

    def run(self) -> Report:
        """Medians over the rounds; `bank.*.vs_cp` is the builder's time over that of cp."""
        machine = machine_facts()  # first: its load is that before the measurement
        record_bytes = RecordLayout(K3.expert).record_bytes
        experts = -(-self.payload_bytes // record_bytes)
        payload = experts * record_bytes
        _require_space(self.folder, 2 * payload + payload // 8)
        figures = [Figure("bank.payload_bytes", payload, "B")]
        with tempfile.TemporaryDirectory(prefix="k3-bench-", dir=self.folder) as scratch:
            checkpoint = Path(scratch) / "checkpoint"
            write(checkpoint, k3_experts(experts), 1)
            with Checkpoint.open(checkpoint) as source:
                shape = source.config.shape
                plan = balanced(source.digest, shape, [(_NODE, "spark", 1.0)])
                shards = _expert_shards(checkpoint, payload // 2)
                pair = _Pair(source, plan, shards, Path(scratch), self.clock)
                base = _resident_bytes("VmRSS")
                _reset_peak()
                for cache in ("cold", "warm"):
                    figures += self._compare(pair, cache, payload)
                peak = _resident_bytes("VmHWM")
        figures.append(Figure("bank.peak_bytes", peak, "B"))
        figures.append(Figure("bank.peak_growth_bytes", peak - base, "B"))
        return Report("bank", machine, tuple(figures))

    def _compare(self, pair: _Pair, cache: Cache, payload: int) -> list[Figure]:
        copies, builds = [], []
        for turn in range(self.rounds):
            # whoever comes second may find a busier or a quieter disk: take turns
            for copying in (True, False) if turn % 2 == 0 else (False, True):
                pair.prepare(cache)
                if copying:
                    copies.append(pair.copy())
                else:
                    builds.append(pair.build())
        copy_s, build_s = statistics.median(copies), statistics.median(builds)
        return [
            at_most(f"bank.{cache}.vs_cp", build_s / copy_s, "x", 1.0),
            Figure(f"bank.{cache}.build_gb_per_s", payload / build_s / 1e9, "GB/s"),
            Figure(f"bank.{cache}.cp_gb_per_s", payload / copy_s / 1e9, "GB/s"),
        ]


@dataclass(frozen=True, slots=True)
class _Pair:
    """The two ways to the same bytes; each returns seconds and removes what it wrote."""

    source: Checkpoint
    plan: Placement
    shards: tuple[Path, ...]
    scratch: Path
    clock: Clock

    def prepare(self, cache: Cache) -> None:
        """Bring the shards into the page cache or out of it, with nothing left to write back."""
        os.sync()
        for shard in self.shards:
            with shard.open("rb", buffering=0) as file:
                if cache == "cold":
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                else:
                    while file.read(_READ_BYTES):
                        pass

    def build(self) -> float:
        """The bank, hashed and synced."""
        bank = self.scratch / f"{_NODE}{SUFFIX}"
        begun = self.clock()
        build(self.source, self.plan, _NODE, bank)
        taken = self.clock() - begun
        bank.unlink()
        return taken

    def copy(self) -> float:
        """The shards, copied and synced."""
        copies = [self.scratch / f"{shard.name}.copy" for shard in self.shards]
        begun = self.clock()
        for shard, copy in zip(self.shards, copies, strict=True):
            subprocess.run(["cp", "--sparse=never", shard, copy], check=True)  # noqa: S603, S607 both paths are ours
        for copy in copies:
            with copy.open("rb") as file:
                os.fsync(file.fileno())
        taken = self.clock() - begun
        for copy in copies:
            copy.unlink()
        return taken


def _expert_shards(checkpoint: Path, least_bytes: int) -> tuple[Path, ...]:
    """The shards that hold experts: all others are tiny."""
    return tuple(
        shard
        for shard in sorted(checkpoint.glob("*.safetensors"))
        if shard.stat().st_size >= least_bytes
    )


def _require_space(folder: Path, size: int) -> None:
    try:
        found = os.statvfs(folder)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot use it: {error.strerror}: name another --dir"
        ) from error
    free = found.f_bavail * found.f_frsize
    if free < size:
        raise ConfigError(
            f"{folder}: the benchmark needs {size / 1e9:.1f} GB, there are {free / 1e9:.1f}: "
            "give fewer --bytes, or another --dir"
        )


def _reset_peak() -> None:
    """Let VmHWM start again from what is resident now (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _resident_bytes(field: str) -> int:
    """A line of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ConfigError(f"/proc/self/status has no {field}: this needs Linux")
