"""The verb `k3 plan`: byte ledger, policies on a trace, a placement file.

Owns arguments, files, the clock and printing. Exit status: 0 planned, 2 wrong usage, 78 a pod,
trace, model or folder that a person has to change. Must not know how a plan is made or scored.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from services.planner.drift_cli import PlanCommand
from services.planner.planning import NAMES
from services.ranges import RealRange
from services.streams import table_console

if TYPE_CHECKING:
    from services.planner.assignment import Assignment
    from services.planner.ledger import Ledger
    from services.planner.planning import Optimiser
    from services.planner.pod import Pod
    from services.planner.report import PlanReport, SearchFigures, TraceFigures
    from services.routing.trace import Trace
    from shared.core.placement import Placement
    from shared.core.shape import ModelShape

_FILE: Final = click.Path(path_type=Path)
_TOKENS_MAX: Final = 10_000_000
_PIPE_COLUMNS: Final = 220


@click.command(
    cls=PlanCommand,
    epilog="Example: k3 plan --pod k3-home-pod.toml --policy all --synth 1 --holdout 0.25",
)
@click.option("--pod", "pod_name", required=True, help="Pod description: a file, or a shipped one.")
@click.option(
    "--policy",
    type=click.Choice(["all", *NAMES]),
    default="all",
    show_default=True,
    help="How experts are placed; measured searches for the least expected time.",
)
@click.option("--trace", "traces", type=_FILE, multiple=True, help="Recorded routing to plan on.")
@click.option(
    "--synth",
    type=click.IntRange(0, 2**31 - 1),
    metavar="SEED",
    help="Plan on synthetic routing instead. [default: 1, without --trace]",
)
@click.option(
    "--tokens",
    type=click.IntRange(1, _TOKENS_MAX),
    default=4705,
    show_default=True,
    help="Tokens of the synthetic routing.",
)
@click.option(
    "--requests",
    type=click.IntRange(1, _TOKENS_MAX),
    default=40,
    show_default=True,
    help="Requests of the synthetic routing.",
)
@click.option(
    "--holdout",
    type=RealRange(0, 1, min_open=True, max_open=True),
    metavar="SHARE",
    help="Keep this share of the requests out of planning and score on them too.",
)
@click.option(
    "--split-seed",
    type=click.IntRange(0, 2**31 - 1),
    default=1,
    show_default=True,
    help="Which requests are kept out.",
)
@click.option("--checkpoint", type=_FILE, help="Folder of the model, for its shape and digest.")
@click.option(
    "--shape",
    type=click.Choice(["k3"]),
    help="Plan for a model of this shape without its checkpoint. [default: k3]",
)
@click.option("--out", type=_FILE, help="Write the placement of the one policy asked for.")
@click.option(
    "--report",
    "folder",
    type=_FILE,
    metavar="DIR",
    help="Write plan.json, pictures and report.html there.",
)
@click.option(
    "--budget-s",
    type=RealRange(0.1, 3600),
    default=30.0,
    show_default=True,
    help="Seconds that the policy measured may take.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(
    *,
    pod_name: str,
    policy: str,
    traces: tuple[Path, ...],
    synth: int | None,
    tokens: int,
    requests: int,
    holdout: float | None,
    split_seed: int,
    checkpoint: Path | None,
    shape: str | None,
    out: Path | None,
    folder: Path | None,
    budget_s: float,
    as_json: bool,
) -> None:
    """Say which expert should live where, and what a token would then cost.

    First the byte ledger of the pod, then each policy scored on routing, recorded (`k3 trace
    record`) or synthetic. With --out one policy's placement is written, and its report beside it;
    with --report everything found, with pictures, as a page that opens offline.

    Exit status: 0 planned, 2 wrong usage, 78 a pod that cannot hold or feed the model, or a wrong
    file.
    """
    if traces and synth is not None:
        raise click.UsageError("give --trace or --synth, not both")
    if checkpoint is not None and shape is not None:
        raise click.UsageError("give --checkpoint or --shape, not both")
    if out is not None and policy == "all":
        raise click.UsageError("--out writes one placement: choose its --policy")

    asked = _Asked(traces, 1 if synth is None else synth, tokens, requests, holdout, split_seed)
    names = NAMES if policy == "all" else (policy,)
    _plan(
        pod_name,
        names,
        asked,
        checkpoint=checkpoint,
        out=out,
        folder=folder,
        budget_s=budget_s,
        json=as_json,
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """The routing to plan on."""

    traces: tuple[Path, ...]
    synth_seed: int
    tokens: int
    requests: int
    holdout: float | None
    split_seed: int


def _plan(
    pod_name: str,
    names: Sequence[str],
    asked: _Asked,
    *,
    checkpoint: Path | None,
    out: Path | None,
    folder: Path | None,
    budget_s: float,
    json: bool,
) -> None:
    from services.planner.ledger import take_ledger
    from services.planner.planning import MEASURED, compare, held_out_gain, limits
    from services.planner.pod_file import read_pod
    from services.planner.report import PlanReport, agreement_notes, ledger_figures

    pod = read_pod(pod_name)
    model_digest, shape = _model(checkpoint)
    ledger = take_ledger(pod, shape)
    report = PlanReport(pod=pod.name, ledger=ledger_figures(pod, ledger))
    if not json:
        _show_ledger(report)
    trace, facts = _routing(asked, model_digest, shape)
    if out is not None and model_digest is None and facts.synthetic:
        raise click.UsageError("--out needs the model's digest: give --checkpoint")
    planned_on, held_out = _split(trace, asked)
    results = compare(
        names,
        pod,
        ledger,
        planned_on,
        held_out=held_out,
        optimise=_optimiser(pod, ledger, budget_s),
        clock_s=time.perf_counter,
    )
    figures = tuple(result.figures for result in results)
    notes = tuple(agreement_notes(pod, figures, synthetic=facts.synthetic))
    gain = None if held_out is None else held_out_gain(results, held_out, pod)
    report = msgspec.structs.replace(
        report, trace=facts, policies=figures, held_out_gain=gain, notes=notes
    )
    if names[-1] == MEASURED:
        bound, values = limits(results[-1].assignment, planned_on, pod, ledger)
        report = msgspec.structs.replace(report, bound=bound, slot_values=values)
    if json:
        click.echo(report.to_json())
    else:
        _show_policies(report)
    if folder is not None:
        from services.planner.report_folder import draw, write_folder

        paths = write_folder(folder, report, draw(report, results, pod, planned_on, held_out))
        click.echo(f"{', '.join(map(str, paths))}", err=True)
    if out is not None:
        placement = results[0].assignment.to_placement(
            pod,
            shape,
            model_digest=model_digest or trace.model_digest,
            policy=names[0],
            trace_digest=planned_on.digest,
        )
        _write(out, placement, report)


def _model(checkpoint: Path | None) -> tuple[str | None, ModelShape]:
    """(digest, shape) of the model; without a checkpoint no digest and Kimi-K3's shape."""
    from shared.core.shape import K3

    if checkpoint is None:
        return None, K3
    # here, because it brings torch
    from station.model.checkpoint import Checkpoint

    with Checkpoint.open(checkpoint) as opened:
        return opened.digest, opened.config.shape


def _routing(
    asked: _Asked, model_digest: str | None, shape: ModelShape
) -> tuple[Trace, TraceFigures]:
    from services.planner.report import TraceFigures
    from services.routing.file import load
    from services.routing.synth import FITTED, sized, synthesize
    from services.routing.trace import SYNTHETIC, check_model

    notices: tuple[str, ...] = ()
    if asked.traces:
        loaded = load(asked.traces)
        trace, notices = loaded.trace, loaded.notices
        source = ", ".join(map(str, asked.traces))
        check_model(trace, model_digest or trace.model_digest, shape, source=source)
        if lost := loaded.losses.dropped + loaded.losses.incomplete:
            notices = (*notices, f"{lost:,} tokens were lost while it was recorded")
    else:
        source = f"synthetic, seed {asked.synth_seed}"
        trace = synthesize(
            sized(FITTED, shape),
            requests=min(asked.requests, asked.tokens),
            tokens=asked.tokens,
            shape=shape,
            seed=asked.synth_seed,
            progress=_layer_line,
        )
    facts = TraceFigures(
        source=source,
        digest=trace.digest,
        model_digest=trace.model_digest,
        synthetic=trace.model_digest == SYNTHETIC,
        tokens=trace.tokens,
        requests=len(trace.starts()),
        notices=notices,
    )
    return trace, facts


def _layer_line(done: int, total: int) -> None:
    """Tells a terminal how far the synthetic routing is."""
    if sys.stderr.isatty():
        text = f"synthetic routing: layer {done} of {total}"
        click.echo(f"\r{text}", nl=done == total, err=True)


def _split(trace: Trace, asked: _Asked) -> tuple[Trace, Trace | None]:
    """(tokens to plan on, tokens kept out), by request."""
    from services.routing.trace import split_requests

    if asked.holdout is None:
        return trace, None
    return split_requests(trace, 1.0 - asked.holdout, asked.split_seed)


def _optimiser(pod: Pod, ledger: Ledger, budget_s: float) -> Optimiser:
    """The policy `measured`, bound to this pod and the wall clock; its compiler is loaded late."""

    def run(trace: Trace) -> tuple[Assignment, SearchFigures]:
        from services.planner.optimise import Effort, optimise
        from services.planner.report import SearchFigures

        seconds: list[float] = []

        def note(second: int, objective_ms: float) -> None:
            seconds.extend([objective_ms] * (second - len(seconds)))
            if sys.stderr.isatty():
                line = f"measured: {second} of {budget_s:g} s, {objective_ms:.2f} ms"
                click.echo(f"\r{line}", err=True, nl=False)

        result = optimise(
            trace,
            pod,
            ledger,
            effort=Effort(budget_s=budget_s),
            clock=time.monotonic,
            on_progress=note,
        )
        if sys.stderr.isatty():
            click.echo(err=True)
        figures = SearchFigures(budget_s, tuple(seconds), result.trial_gain, result.exchanges)
        return result.assignment, figures

    return run


def _write(path: Path, placement: Placement, report: PlanReport) -> None:
    """The placement, read back before it is written (P5), and the report beside it."""
    from services.pod.files import write_atomic
    from shared.core import placement as placements

    data = placements.encode(placement)
    placements.decode(data, source=str(path))
    write_atomic(path, data)
    beside = path.with_suffix(".report.json")
    write_atomic(beside, report.to_json().encode() + b"\n")
    click.echo(f"{path}: placement {placement.digest}; report in {beside}", err=True)


def _show_ledger(report: PlanReport) -> None:
    from services.planner.table import ledger_lines, ledger_table

    console = table_console(_PIPE_COLUMNS)
    console.print(f"pod {report.pod}", markup=False)
    console.print(ledger_table(report.ledger))
    for line in ledger_lines(report):
        console.print(line, markup=False)


def _show_policies(report: PlanReport) -> None:
    from services.planner.table import load_table, policy_lines, policy_table, trace_line

    console = table_console(_PIPE_COLUMNS)
    console.print("")
    console.print(trace_line(report), markup=False)
    console.print(policy_table(report))
    console.print("")
    console.print(load_table(report))
    for line in policy_lines(report):
        console.print(line, markup=False)
