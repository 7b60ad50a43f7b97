"""Taking turns: laps of kernels and of the read probe, in one loop, each over fresh records.

Owns the order of laps and what a lap costs. Must not know which kernels there are, or what their
figures are called.

Two times of a lap are kept. Wall time is what a user waits. Processor time of all threads of this
process, divided by how many there are, is what the work took: on a machine that does other things
too, only it can be compared, so rates and ratios are made of it unless they say otherwise.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from services.bench.energy import Meter
from services.bench.kernel_records import Rotation

Clock: TypeAlias = Callable[[], int]  # nanoseconds
Action: TypeAlias = Callable[[], object]

LAP_EXPERTS_MAX: Final = 16  # as many as a token of K3 asks for
_LAP_NS: Final = 60_000_000
_SLOW_NS: Final = 400_000_000
_SLOW_ROUNDS: Final = 3


class Contender(Protocol):
    """Something that reads records."""

    @property
    def name(self) -> str:
        """Its part of a figure's name."""

    @property
    def rotation(self) -> Rotation:
        """Of the arena it reads; contenders may share one."""

    @property
    def packed_bytes(self) -> int:
        """What it reads of each record."""

    def prepare(self, records: range, tokens: int) -> Action:
        """A call for every token and each of these records, with nothing left to set up."""


@dataclass(frozen=True, slots=True)
class Lap:
    """What one call took."""

    wall_ns: int
    cpu_ns: int  # of all threads together
    experts: int
    packed_bytes: int
    joules: float | None

    def gb_per_s(self, threads: int) -> float:
        """By processor time, as if `threads` threads had worked all the time."""
        return self.packed_bytes / (self.cpu_ns / threads)

    @property
    def wall_gb_per_s(self) -> float:
        """By wall time."""
        return self.packed_bytes / self.wall_ns


@dataclass(frozen=True, slots=True)
class Turn:
    """A lap and that of the read probe right before it."""

    lap: Lap
    probe: Lap


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Clocks: wall, processor time of the process, and energy where it can be read."""

    wall_ns: Clock
    cpu_ns: Clock
    meter: Meter | None

    def lap(self, contender: Contender, experts: int, tokens: int) -> Lap:
        """Let a contender run once over the next records of its rotation."""
        action = contender.prepare(contender.rotation.take(experts), tokens)
        energy = self.meter.read_uj() if self.meter else ()
        cpu_ns, wall_ns = self.cpu_ns(), self.wall_ns()
        action()
        wall_ns, cpu_ns = self.wall_ns() - wall_ns, self.cpu_ns() - cpu_ns
        joules = self.meter.joules(energy, self.meter.read_uj()) if self.meter else None
        return Lap(
            wall_ns=max(1, wall_ns),
            cpu_ns=max(1, cpu_ns),
            experts=experts,
            packed_bytes=experts * contender.packed_bytes,
            joules=joules,
        )


def take_turns(
    contenders: Sequence[Contender], probe: Contender, tokens: int, rounds: int, watch: Stopwatch
) -> dict[str, list[Turn]]:
    """By name, a turn per round. A contender so slow that its laps take most of the time has three.

    Laps are of 1 to 16 records, for about the same time each.
    """
    experts, slow = {}, set()
    for contender in contenders:
        watch.lap(contender, 1, tokens)  # the first call finds memory and caches in no usual state
        taken = watch.lap(contender, 1, tokens)
        experts[contender.name] = max(1, min(LAP_EXPERTS_MAX, _LAP_NS // taken.wall_ns))
        if taken.wall_ns > _SLOW_NS:
            slow.add(contender.name)
        # results and scratch memory of a whole lap, once before it counts
        watch.lap(contender, experts[contender.name], tokens)
    watch.lap(probe, LAP_EXPERTS_MAX, tokens)
    turns: dict[str, list[Turn]] = {contender.name: [] for contender in contenders}
    for turn in range(rounds):
        for contender in contenders:
            if contender.name in slow and turn >= _SLOW_ROUNDS:
                continue
            before = watch.lap(probe, LAP_EXPERTS_MAX, tokens)
            lap = watch.lap(contender, experts[contender.name], tokens)
            turns[contender.name].append(Turn(lap, before))
    return turns


def median_rate(turns: Sequence[Turn], threads: int) -> float:
    """GB/s of a contender."""
    return statistics.median(turn.lap.gb_per_s(threads) for turn in turns)


def median_share(turns: Sequence[Turn], threads: int) -> float:
    """Of the probe's rate right before, as a fraction."""
    return statistics.median(
        turn.lap.gb_per_s(threads) / turn.probe.gb_per_s(threads) for turn in turns
    )


def median_ratio(ours: Sequence[Turn], theirs: Sequence[Turn], threads: int) -> float:
    """Of two contenders' rates within the same round; the rounds that both have had."""
    pairs = zip(ours, theirs, strict=False)
    return statistics.median(a.lap.gb_per_s(threads) / b.lap.gb_per_s(threads) for a, b in pairs)


def median_wall_ratio(ours: Sequence[Turn], theirs: Sequence[Turn]) -> float:
    """As `median_ratio`, by wall time."""
    pairs = zip(ours, theirs, strict=False)
    return statistics.median(a.lap.wall_gb_per_s / b.lap.wall_gb_per_s for a, b in pairs)


def median_wall_share(turns: Sequence[Turn]) -> float:
    """As `median_share`, by wall time."""
    return statistics.median(turn.lap.wall_gb_per_s / turn.probe.wall_gb_per_s for turn in turns)
