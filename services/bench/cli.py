"""The verb `k3 bench`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from services.pod.endpoint import token_option
from services.pod.layout import SPARKS_MAX
from services.ranges import RealRange
from services.streams import table_console

if TYPE_CHECKING:
    from rich.table import Table

    from services.bench.kernel_bench import Peer
    from services.bench.report import Report

_PIPE_COLUMNS: Final = 120


def spark_counts(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[int, ...]:
    """Parse `1,2,4,8`: how many Sparks to measure with, each once."""
    try:
        counts = tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers such as 1,2,4") from None
    if not all(0 <= count <= SPARKS_MAX for count in counts):
        raise click.BadParameter(f"{value!r}: each count must be from 0 to {SPARKS_MAX}")
    return tuple(dict.fromkeys(counts))


def counts_up_to(most: int) -> Callable[[click.Context, click.Parameter, str], tuple[int, ...]]:
    """A callback that parses `1,2,4`: counts from 1 to `most`, each once."""

    def parse(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[int, ...]:
        try:
            counts = tuple(int(part) for part in value.split(","))
        except ValueError:
            raise click.BadParameter(f"{value!r} is not a list of numbers such as 1,2,4") from None
        if not all(1 <= count <= most for count in counts):
            raise click.BadParameter(f"{value!r}: each count must be from 1 to {most}")
        return tuple(dict.fromkeys(counts))

    return parse


@click.group()
def bench() -> None:
    """Measure, and print a table or JSON."""


@bench.command(epilog="Example: k3 bench pod --sparks 1,2,4,8 --json")
@click.option("--url", help="Measure this running pod instead of starting one.")
@token_option
@click.option(
    "--sparks",
    callback=spark_counts,
    default="2",
    show_default=True,
    help="Start pods with so many Sparks, one after the other: 1,2,4,8.",
)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="Folder of the checkpoint for started pods. [default: the demonstration model]",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="What started pods compute in.",
)
@click.option(
    "--tokens", type=click.IntRange(16, 4096), default=64, show_default=True, help="Per answer."
)
@click.option(
    "--runs", type=click.IntRange(1, 1000), default=5, show_default=True, help="Median of so many."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--check", is_flag=True, help="Exit 1 when a target is missed.")
def pod(
    *,
    url: str | None,
    token: str | None,
    sparks: tuple[int, ...],
    checkpoint: Path | None,
    dtype: str,
    tokens: int,
    runs: int,
    as_json: bool,
    check: bool,
) -> int:
    """Tokens per second of one user, and where a layer's microseconds go.

    Greedy decoding over HTTP, prefill excluded and given by itself, after a warm-up.
    """
    from services.bench.pod_bench import PodBench

    plan = PodBench(
        url=url,
        token=token,
        sparks=sparks,
        checkpoint=checkpoint,
        dtype=dtype,
        tokens=tokens,
        runs=runs,
    )
    return _present(plan.run(), as_json=as_json, check=check)


@bench.command(epilog="Example: k3 bench bank --bytes 4e9 --dir /var/lib/k3 --check")
@click.option(
    "--bytes",
    "payload_bytes",
    type=click.FloatRange(2e7, 1e13),
    default=1e9,
    show_default=True,
    help="Experts to build a bank of; twice as much disk is needed.",
)
@click.option(
    "--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="Median of so many."
)
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    help="Folder on the disk to measure. [default: the temporary folder]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--check", is_flag=True, help="Exit 1 when a target is missed.")
def bank(
    *, payload_bytes: float, rounds: int, folder: Path | None, as_json: bool, check: bool
) -> int:
    """Building a bank of real K3 records against `cp --sparse=never` of the same bytes.

    Source cold and warm in the page cache; both sides end with fsync.
    """
    import tempfile

    from services.bench.bank_bench import BankBench

    plan = BankBench(
        payload_bytes=int(payload_bytes),
        rounds=rounds,
        folder=folder or Path(tempfile.gettempdir()),
    )
    return _present(plan.run(), as_json=as_json, check=check)


@bench.command(epilog="Example: k3 bench census --json --check")
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="Folder of the checkpoint. [default: all of K3's structure, synthesised: 400 MB]",
)
@click.option(
    "--runs", type=click.IntRange(1, 1000), default=5, show_default=True, help="Median of so many."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--check", is_flag=True, help="Exit 1 when a target is missed.")
def census(*, checkpoint: Path | None, runs: int, as_json: bool, check: bool) -> int:
    """Seconds of a census, against safetensors' own listing of names, dtypes and shapes."""
    from services.bench.census import CensusBench

    return _present(CensusBench(checkpoint, runs).run(), as_json=as_json, check=check)


@bench.command(epilog="Example: k3 bench simulate --sparks 2,4 --check")
@click.option(
    "--sparks",
    callback=spark_counts,
    default="2,4",
    show_default=True,
    help="Pods with so many Sparks; the others are also predicted from the first.",
)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="Folder of the checkpoint. [default: the demonstration model]",
)
@click.option(
    "--tokens", type=click.IntRange(16, 4096), default=64, show_default=True, help="Per answer."
)
@click.option(
    "--runs", type=click.IntRange(1, 1000), default=12, show_default=True, help="Answers per pod."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--check", is_flag=True, help="Exit 1 when a target is missed.")
def simulate(
    *,
    sparks: tuple[int, ...],
    checkpoint: Path | None,
    tokens: int,
    runs: int,
    as_json: bool,
    check: bool,
) -> int:
    """Time per layer as `k3 simulate` predicts it, against what embedded pods measure."""
    from services.bench.simulate_bench import SimulateBench

    plan = SimulateBench(sparks=sparks, checkpoint=checkpoint, tokens=tokens, runs=runs)
    return _present(plan.run(), as_json=as_json, check=check)


@bench.command(epilog="Example: k3 bench plan --seeds 5 --check")
@click.option(
    "--seeds",
    type=click.IntRange(1, 1000),
    default=5,
    show_default=True,
    help="Synthetic traces; gains have a target from 5 on.",
)
@click.option(
    "--budget-s",
    type=RealRange(0, 3600),
    default=15.0,
    show_default=True,
    help="Seconds that ours may take on each.",
)
@click.option(
    "--tokens",
    type=click.IntRange(100, 1_000_000),
    default=4705,
    show_default=True,
    help="Tokens of a trace.",
)
@click.option(
    "--requests",
    type=click.IntRange(4, 100_000),
    default=40,
    show_default=True,
    help="Requests of a trace.",
)
@click.option("--pod", "pod_name", default="k3-home-pod", show_default=True, help="As of k3 plan.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--check", is_flag=True, help="Exit 1 when a target is missed.")
def plan(
    *,
    seeds: int,
    budget_s: float,
    tokens: int,
    requests: int,
    pod_name: str,
    as_json: bool,
    check: bool,
) -> int:
    """Seconds per policy, and what ours saves on requests that it was not planned on.

    Kimi-K3's shape and synthetic routing; a plan sees three quarters of the requests and is scored
    on the others. About 30 seconds per seed on two quiet cores.
    """
    from services.bench.plan_bench import PlanBench
    from services.planner.pod_file import read_pod
    from shared.core.errors import ConfigError

    if requests > tokens:
        raise ConfigError(f"{requests} requests of {tokens} tokens: give fewer --requests")
    measured = PlanBench(
        seeds=seeds, budget_s=budget_s, tokens=tokens, requests=requests, pod=read_pod(pod_name)
    )
    return _present(measured.run(), as_json=as_json, check=check)


@bench.command(epilog="Example: k3 bench kernel --peer ggml --check")
@click.option(
    "--bytes",
    "arena_bytes",
    type=RealRange(1e8, 1e13),
    help="Records to use in turn, much more than a cache holds. [default: 4e9, or what fits]",
)
@click.option(
    "--tokens",
    callback=counts_up_to(64),
    default="1,2,4,8,16",
    show_default=True,
    help="Tokens that share an expert.",
)
@click.option(
    "--threads", callback=counts_up_to(1024), default="1,2", show_default=True, help="Threads."
)
@click.option(
    "--backend", "backends", multiple=True, help="Only these of ours: int16, bf16_avx512, ..."
)
@click.option(
    "--peer",
    "peers",
    multiple=True,
    type=click.Choice(["ggml", "torch"]),
    help="Beside ours: ggml's NVFP4 (fetched by pip and compiled, 77 MB), torch's dequantise.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 1000),
    default=9,
    show_default=True,
    help="Median of so many.",
)
@click.option("--quick", is_flag=True, help="1 and 8 tokens, int16, most threads, 3 rounds.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--check", is_flag=True, help="Exit 1 when a target is missed.")
def kernel(
    *,
    arena_bytes: float | None,
    tokens: tuple[int, ...],
    threads: tuple[int, ...],
    backends: tuple[str, ...],
    peers: tuple[Peer, ...],
    rounds: int,
    quick: bool,
    as_json: bool,
    check: bool,
) -> int:
    """Expert kernels on real K3 records in memory, beside a plain read of the same records.

    GB/s of packed weights by processor time of all threads. Every back end and order that this
    processor can run, in turns; about two minutes on two quiet cores.
    """
    import os

    from services.bench.kernel_bench import KernelBench
    from services.bench.kernel_table import kernel_tables
    from services.bench.peers.ggml import default_cache_dir

    plan = KernelBench(
        arena_bytes=None if arena_bytes is None else int(arena_bytes),
        tokens=(1, 8) if quick else tokens,
        threads=(max(threads),) if quick else threads,
        backends=backends or ("int16",) if quick else backends,
        peers=peers,
        rounds=3 if quick else rounds,
        cache_dir=default_cache_dir(os.environ),
        say=_say_on_terminal,
    )
    return _present(plan.run(), as_json=as_json, check=check, tables=kernel_tables)


def _say_on_terminal(line: str) -> None:
    if sys.stderr.isatty():
        click.echo(line, err=True)


def _one_table(report: Report) -> Iterable[Table]:
    return (report.table(),)


def _present(
    report: Report,
    *,
    as_json: bool,
    check: bool,
    tables: Callable[[Report], Iterable[Table]] = _one_table,
) -> int:
    """Print a report; the exit status."""
    from services.bench.report import machine_line

    if as_json:
        click.echo(report.to_json())
    else:
        console = table_console(_PIPE_COLUMNS)
        console.print(machine_line(report.machine), markup=False)
        for before, table in enumerate(tables(report)):
            if before:
                console.print()
            console.print(table)
    return 1 if check and report.missed else 0
