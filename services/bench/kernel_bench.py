"""`k3 bench kernel`: expert kernels beside the memory's own speed, ggml and torch, in one loop.

Owns what is compared with what, and which figures have a target. Real K3 records lie in arenas much
larger than any cache and are used in turn, so that every lap reads memory. See kernel_laps.py for
what a rate is.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

from services.bench.energy import Meter
from services.bench.kernel_contenders import (
    ORDERS,
    Backend,
    Ggml,
    Kernel,
    Memory,
    Probe,
    Torch,
    our_backends,
)
from services.bench.kernel_errors import kernel_errors, peer_errors
from services.bench.kernel_laps import (
    LAP_EXPERTS_MAX,
    Contender,
    Stopwatch,
    Turn,
    median_rate,
    median_ratio,
    median_share,
    median_wall_ratio,
    median_wall_share,
    take_turns,
)
from services.bench.kernel_records import (
    Error,
    Rotation,
    cache_bytes,
    filled,
    records_that_fit,
    synthetic_activations,
    synthetic_record,
)
from services.bench.machine import machine_facts
from services.bench.peers import ggml
from services.bench.peers.ggml_rows import converted, stride_bytes
from services.bench.report import Figure, Report, at_least, at_most
from shared.core.errors import ConfigError
from shared.core.record import RecordLayout, can_interleave
from shared.core.shape import K3, ExpertShape

Peer: TypeAlias = Literal["ggml", "torch"]
Cells: TypeAlias = dict[tuple[int, int], dict[str, list[Turn]]]  # by (tokens, threads), by name

_DISTINCT: Final = 4  # records that an arena repeats
_TORCH_ROUNDS: Final = 3
_BEST: Final = "int16"  # the kernel that "auto" is
_SHARE_TARGET: Final = 0.75
_GGML_TARGETS: Final[Mapping[int, float]] = {1: 2.0, 8: 4.0}  # by tokens
_AVX2_TARGET: Final = 1.0
_ERROR_TARGETS: Final[Mapping[str, float]] = {"int16": 1e-4, "bf16": 2e-3}
_COSINE_TARGET: Final = 0.999999
_VARIANTS: Final[Mapping[ggml.Variant, str]] = {"native": "ggml", "avx2": "ggml_avx2"}


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0))


def _silent(_line: str) -> None:
    """Say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBench:
    """What to measure. `arena_bytes` per arena, as much as fits by default; no names of `backends`
    mean all; `peers` are fetched, compiled or imported only when named."""

    arena_bytes: int | None = None
    rounds: int = 9
    tokens: Sequence[int] = (1, 2, 4, 8, 16)
    threads: Sequence[int] = (1, 2)
    backends: Sequence[str] = ()
    peers: Sequence[Peer] = ()
    cache_dir: Path
    shape: ExpertShape = K3.expert
    cache_bytes: int = field(default_factory=cache_bytes)
    cpus: int = field(default_factory=_usable_cpus)
    meter: Callable[[], Meter] = Meter.open
    say: Callable[[str], None] = _silent

    def run(self) -> Report:
        """Measure; ConfigError without a back end of ours, or with too little memory or CPUs."""
        machine = machine_facts()  # first: its load is that before the measurement
        skipped: dict[str, str] = {}
        backends, thread_counts = self._chosen(), self._thread_counts(skipped)
        libraries = self._libraries(skipped)
        watch = Stopwatch(time.perf_counter_ns, time.process_time_ns, self._meter(skipped))
        ours, theirs = self._arenas(bool(libraries))
        self.say("kernel: comparing with float64")
        errors = kernel_errors(backends, self.shape)
        for name, library in libraries.items():
            errors[name] = peer_errors(library, self.shape)
        cells: Cells = {}
        for threads in thread_counts:
            with ExitStack() as stack:
                contenders: list[Contender] = list(self._kernels(backends, threads, ours, skipped))
                for name, library in libraries.items():
                    assert theirs is not None
                    peer = Ggml(name, library, self.shape, threads, theirs)
                    stack.callback(peer.close)
                    contenders.append(peer)
                self._measure(cells, contenders, threads, ours, watch, self.rounds)
        # torch's threads keep looking for work after a call: after everybody else
        if "torch" in self.peers:
            for threads in thread_counts:
                torch = [Torch(self.shape, threads, ours)]
                self._measure(cells, torch, threads, ours, watch, _TORCH_ROUNDS)
        figures = (*headline(cells, errors, skipped), *details(cells), *error_figures(errors))
        facts = {**machine, "records": len(ours.arena)}
        return Report("kernel", facts, figures, skipped)

    def _chosen(self) -> list[Backend]:
        every = list(our_backends())
        if not self.backends:
            return every
        wanted = [
            one for one in every if any(name in (one.name, one.kernel) for name in self.backends)
        ]
        known = {name for one in every for name in (one.name, one.kernel)}
        if unknown := [name for name in self.backends if name not in known]:
            raise ConfigError(
                f"back end {unknown[0]!r} is not known: use {', '.join(one.name for one in every)}"
            )
        return wanted

    def _thread_counts(self, skipped: dict[str, str]) -> list[int]:
        """Those with a CPU per thread: others share one, and a rate by processor time is too high
        by as much."""
        fitting = [threads for threads in self.threads if threads <= self.cpus]
        for threads in self.threads:
            if threads > self.cpus:
                skipped[f"kernel.threads{threads}"] = (
                    f"this process may use {self.cpus} CPUs: rates of {threads} threads would be "
                    "of more CPUs than there are"
                )
        if not fitting:
            raise ConfigError(
                f"{min(self.threads)} threads need as many CPUs, this process may use "
                f"{self.cpus}: give --threads {self.cpus} or fewer"
            )
        return fitting

    def _libraries(self, skipped: dict[str, str]) -> dict[str, Path]:
        """ggml's builds by name; what cannot be had is skipped with the reason."""
        found: dict[str, Path] = {}
        for variant, name in _VARIANTS.items():
            reason = skipped.get("kernel.ggml")  # what one build lacks the other lacks too
            if "ggml" not in self.peers:
                reason = "not asked for: give --peer ggml"
            if reason is None:
                try:
                    found[name] = ggml.build(self.cache_dir, variant, self.say)
                    continue
                except ConfigError as error:
                    reason = str(error)
            skipped[f"kernel.{name}"] = reason
        if "torch" not in self.peers:
            skipped["kernel.torch_bf16"] = "not asked for: give --peer torch"
        return found

    def _meter(self, skipped: dict[str, str]) -> Meter | None:
        try:
            return self.meter()
        except ConfigError as error:
            skipped["kernel.joules_per_expert"] = str(error)
            return None

    def _arenas(self, with_ggml: bool) -> tuple[Memory, Memory | None]:
        """Ours, which serves both orders, the probe and torch; ggml's has its own format."""
        stride = RecordLayout(self.shape).stride_bytes
        records = records_that_fit(
            self.arena_bytes,
            stride,
            arenas=2 if with_ggml else 1,
            lap_max=LAP_EXPERTS_MAX,
            cache_bytes=self.cache_bytes,
        )
        self.say(f"kernel: making {records} records of {stride / 1e6:.1f} MB")
        distinct = [synthetic_record(self.shape, seed) for seed in range(_DISTINCT)]
        x = synthetic_activations(max(self.tokens), self.shape.latent, _DISTINCT)
        ours = filled(distinct, stride, records)
        memory = Memory(ours, Rotation(records, LAP_EXPERTS_MAX), x)
        if not with_ggml:
            return memory, None
        self.say("kernel: making the same records in ggml's format")
        blocks = [converted(record, self.shape) for record in distinct]
        theirs = filled(blocks, stride_bytes(self.shape), records)
        return memory, Memory(theirs, Rotation(records, LAP_EXPERTS_MAX), x)

    def _kernels(
        self, backends: Sequence[Backend], threads: int, memory: Memory, skipped: dict[str, str]
    ) -> Iterator[Kernel]:
        orders = [order for order in ORDERS if order == "row-major" or can_interleave(self.shape)]
        for backend in backends:
            for order in orders:
                try:
                    yield Kernel(backend, self.shape, order, threads, memory)
                except ConfigError as error:
                    skipped[f"kernel.{backend.name}.threads{threads}"] = str(error)

    def _measure(
        self,
        cells: Cells,
        contenders: Sequence[Contender],
        threads: int,
        memory: Memory,
        watch: Stopwatch,
        rounds: int,
    ) -> None:
        """Add a cell of turns for each number of tokens."""
        probe = Probe(self.shape, threads, memory)
        for tokens in self.tokens:
            self.say(
                f"kernel: {tokens} tokens, {threads} threads: {rounds} rounds of "
                + (", ".join(one.name for one in contenders))
            )
            turns = take_turns(contenders, probe, tokens, rounds, watch)
            cells.setdefault((tokens, threads), {}).update(turns)


def headline(
    cells: Cells, errors: Mapping[str, Error], skipped: dict[str, str]
) -> Iterator[Figure]:
    """The figures with a target; what they need and the run has not had is skipped."""
    best = _best_of(cells, "int16_")
    name = "kernel.t1.threads2.share_of_probe"
    if (turns := cells.get((1, 2), {}).get(best or "")) is not None:
        yield at_least(name, round(median_share(turns, 2), 3), "fraction", _SHARE_TARGET)
        wall = round(median_wall_share(turns), 3)
        yield Figure("kernel.t1.threads2.share_of_probe_wall", wall, "fraction")
    else:
        skipped[name] = "not measured in this run: it needs int16, 1 token and 2 threads"
    for tokens, target in _GGML_TARGETS.items():
        name = f"kernel.t{tokens}.threads2.vs_ggml"
        yield from _versus(name, cells, (tokens, 2), best, "ggml", target, skipped)
    avx2 = _best_of(cells, "int16_avx2.")
    name = "kernel.avx2.vs_ggml_avx2"
    yield from _versus(name, cells, (1, 2), avx2, "ggml_avx2", _AVX2_TARGET, skipped)
    native = {name: error for name, error in errors.items() if name.startswith(_BEST)}
    if native:
        worst = max(error.relative_rms for error in native.values())
        yield at_most("kernel.rel_err", worst, "fraction", _ERROR_TARGETS[_BEST])
        cosine = min(error.cosine for error in native.values())
        yield at_least("kernel.cosine", cosine, "cosine", _COSINE_TARGET)
    else:
        skipped["kernel.rel_err"] = skipped["kernel.cosine"] = "int16 was not measured"


def _best_of(cells: Cells, prefix: str) -> str | None:
    """The first measured name with a prefix: back ends and orders come best first."""
    names = [name for turns in cells.values() for name in turns]
    return next((name for name in names if name.startswith(prefix)), None)


def _versus(
    name: str,
    cells: Cells,
    cell: tuple[int, int],
    ours: str | None,
    theirs: str,
    target: float,
    skipped: dict[str, str],
) -> Iterator[Figure]:
    turns = cells.get(cell, {})
    if ours not in turns or theirs not in turns:
        tokens, threads = cell
        skipped[name] = skipped.get(f"kernel.{theirs}") or (
            f"not measured in this run: it needs int16, {theirs}, {tokens} tokens and {threads} "
            "threads"
        )
        return
    ratio = median_ratio(turns[ours], turns[theirs], cell[1])
    yield at_least(name, round(ratio, 3), "ratio", target)
    yield Figure(f"{name}_wall", round(median_wall_ratio(turns[ours], turns[theirs]), 3), "ratio")


def details(cells: Cells) -> Iterator[Figure]:
    """Of every contender and cell: GB/s (median, best, best by wall time), share of the probe."""
    for (tokens, threads), by_name in cells.items():
        cell = f"t{tokens}.threads{threads}"
        probes = [turn.probe.gb_per_s(threads) for turns in by_name.values() for turn in turns]
        if probes:
            yield _rate(f"kernel.read_probe.{cell}.gb_per_s", statistics.median(probes))
            yield _rate(f"kernel.read_probe.{cell}.gb_per_s_best", max(probes))
        for name, turns in by_name.items():
            base = f"kernel.{name}.{cell}"
            yield _rate(f"{base}.gb_per_s", median_rate(turns, threads))
            best = max(turn.lap.gb_per_s(threads) for turn in turns)
            yield _rate(f"{base}.gb_per_s_best", best)
            best = max(turn.lap.wall_gb_per_s for turn in turns)
            yield _rate(f"{base}.wall_gb_per_s_best", best)
            share = round(median_share(turns, threads), 4)
            yield Figure(f"{base}.share_of_probe", share, "fraction")
            joules = [
                turn.lap.joules / turn.lap.experts for turn in turns if turn.lap.joules is not None
            ]
            if joules:
                yield Figure(f"{base}.joules_per_expert", statistics.median(joules), "J")


def error_figures(errors: Mapping[str, Error]) -> Iterator[Figure]:
    """Against float64, with the targets of our kernels."""
    for name, error in errors.items():
        target = _ERROR_TARGETS.get(name.partition("_")[0])
        value = error.relative_rms
        if target is None:
            yield Figure(f"kernel.{name}.rel_err", value, "fraction")
        else:
            yield at_most(f"kernel.{name}.rel_err", value, "fraction", target)
        yield Figure(f"kernel.{name}.cosine", error.cosine, "cosine")


def _rate(name: str, value: float) -> Figure:
    return Figure(name, round(value, 3), "GB/s")
