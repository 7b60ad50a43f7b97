"""The verb `k3 plan drift`: does a placement still fit, and is moving experts worth it?

Owns arguments, files, the clock and printing. Exit status: 0 compared, 1 with --check when the
placement has become worse than allowed, 2 wrong usage, 78 a wrong file. Must not know how drift is
measured or moves are found.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from services.planner.planning import NAMES
from services.ranges import RealRange
from services.streams import table_console

if TYPE_CHECKING:
    from services.planner.drift_report import Found, Replan, Settings
    from services.planner.ledger import Ledger
    from services.planner.pod import Pod
    from services.routing.synth import Progress
    from shared.core.placement import Placement

_FILE: Final = click.Path(path_type=Path, dir_okay=False)
_PIPE_COLUMNS: Final = 160
_BITS_PER_BYTE: Final = 8
_FLOW_BYTES_PER_S: Final = 1e9  # of a pod that describes no fabric


class PlanCommand(click.Command):
    """`k3 plan`, which takes options only, with one word in front: `k3 plan drift`."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """The context of the command that is meant."""
        if args[:1] == [drift.name]:
            return drift.make_context(f"{info_name} {drift.name}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options, then the word."""
        super().format_options(ctx, formatter)
        with formatter.section("Commands"):
            formatter.write_dl([("drift", "Say whether a placement still fits live routing.")])


@click.command(
    epilog="Example: k3 plan drift --pod k3-home-pod.toml --placement placement.json "
    "--plan-trace plan.k3trace --live traces/routing.0001.k3trace --check"
)
@click.option("--pod", "pod_name", required=True, help="Pod description: a file, or a shipped one.")
@click.option("--placement", type=_FILE, required=True, help="The placement in use.")
@click.option(
    "--plan-trace", type=_FILE, multiple=True, help="Routing that it was planned on; repeatable."
)
@click.option("--plan-histogram", type=_FILE, help="A histogram of that, instead.")
@click.option("--live", type=_FILE, multiple=True, help="Live routing; repeatable.")
@click.option("--live-histogram", type=_FILE, help="A histogram of that, instead.")
@click.option(
    "--policy", type=click.Choice(NAMES), help="Of the new plan. [default: the placement's]"
)
@click.option(
    "--budget-s",
    type=RealRange(1, 3600),
    default=30.0,
    show_default=True,
    help="Seconds for a new plan by `measured`.",
)
@click.option(
    "--holdout",
    type=RealRange(0, 1, min_open=True, max_open=True),
    default=0.25,
    show_default=True,
    help="Share of the live requests that the new plan does not see and is judged on.",
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=1, show_default=True)
@click.option(
    "--min-gain-ms",
    type=RealRange(0, 1e6),
    default=0.1,
    show_default=True,
    help="Move nothing for less, per token.",
)
@click.option(
    "--min-gain-per-gib",
    type=RealRange(0, 1e6),
    default=0.001,
    show_default=True,
    help="Move nothing for less, in ms per token and GiB moved.",
)
@click.option(
    "--max-worse",
    type=RealRange(0, 1e6),
    default=5.0,
    show_default=True,
    help="Alert when the predicted ms are worse by more than so many percent.",
)
@click.option(
    "--bytes-per-s",
    type=RealRange(1, 1e15),
    help="Of a node's link. [default: the pod's flow_gbit_per_s]",
)
@click.option("--out", type=_FILE, help="Write the moves here when they are worth it.")
@click.option("--check", is_flag=True, help="Exit with 1 on an alert.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def drift(pod_name: str, placement: Path, check: bool, as_json: bool, **options: Any) -> int:
    """Compare live routing with what a placement was planned on.

    Says how far routing has moved, what the placement is predicted to cost now, and what a new plan
    would gain on requests that it has not seen. Moves are proposed only when the gain is no chance
    and worth its bytes; with --out they are written, and the new placement beside them.

    Exit status: 0 compared, 1 with --check on an alert, 2 wrong usage, 78 a wrong file.
    """
    from services.planner.drift_inputs import RoutingFiles, read_sides
    from services.planner.drift_report import judge, pod_in_order
    from services.planner.ledger import take_ledger
    from services.planner.pod_file import read_pod
    from shared.io.placement_file import read_placement

    plan_files = RoutingFiles(options["plan_trace"], options["plan_histogram"])
    live_files = RoutingFiles(options["live"], options["live_histogram"])
    for files, name in ((plan_files, "--plan-trace"), (live_files, "--live")):
        if bool(files.traces) == (files.histogram is not None):
            raise click.UsageError(f"give {name} or its histogram, one of the two")
    placed = read_placement(placement)
    pod = pod_in_order(read_pod(pod_name), placed)
    ledger = take_ledger(pod, placed.shape)
    settings = _settings(options, pod, placed)
    sides = read_sides(placed, plan_files, live_files, progress=_progress)
    replan = _planner(settings.policy, pod, ledger, options["budget_s"])
    found = judge(placed, pod, ledger, sides, settings, replan=replan)
    if as_json:
        click.echo(found.report.to_json())
    else:
        _show(found)
    if options["out"] is not None:
        _write(options["out"], found)
    return 1 if check and found.report.verdict.alert else 0


def _settings(options: dict[str, Any], pod: Pod, placed: Placement) -> Settings:
    from services.planner.drift import Limits
    from services.planner.drift_report import Settings

    policy = options["policy"] or placed.policy
    if policy not in NAMES:
        raise click.UsageError(
            f"the placement was made by {policy!r}, which cannot plan on routing: choose a --policy"
        )
    flow = _FLOW_BYTES_PER_S
    if pod.fabric is not None:
        flow = pod.fabric.flow_gbit_per_s * 1e9 / _BITS_PER_BYTE
    limits = Limits(
        min_gain_ms=options["min_gain_ms"],
        min_gain_ms_per_gib=options["min_gain_per_gib"],
        worse_max=options["max_worse"] / 100,
    )
    return Settings(
        policy=policy,
        limits=limits,
        holdout=options["holdout"],
        seed=options["seed"],
        bytes_per_s=options["bytes_per_s"] or flow,
    )


def _planner(policy: str, pod: Pod, ledger: Ledger, budget_s: float) -> Replan:
    """What makes the new plan, by name."""
    from services.planner import policies

    for name in policies.POLICIES:
        if name == policy:
            return lambda trace: policies.plan(name, trace.histogram(), pod, ledger)
    from services.planner.optimise import Effort, optimise

    effort = Effort(budget_s)
    return lambda trace: (
        optimise(trace, pod, ledger, effort=effort, clock=time.monotonic).assignment
    )


def _write(path: Path, found: Found) -> None:
    """The proposal and the placement it leads to, read back before they are written (P5)."""
    from services.planner import proposal as proposals
    from services.pod.files import write_atomic
    from shared.core import placement as placements

    if found.proposal is None or found.placement is None:
        click.echo(f"{path}: not written, there is nothing to move", err=True)
        return
    beside = path.with_suffix(".placement.json")
    moves, placed = proposals.encode(found.proposal), placements.encode(found.placement)
    proposals.decode(moves, source=str(path))
    placements.decode(placed, source=str(beside))
    write_atomic(beside, placed)
    write_atomic(path, moves)
    click.echo(
        f"{path}: {len(found.proposal.plan.moves):,} moves; new placement in {beside}", err=True
    )


def _show(found: Found) -> None:
    from services.planner.drift_table import drift_lines, traffic_table

    console = table_console(_PIPE_COLUMNS)
    if found.report.tried is not None:
        console.print(traffic_table(found.report.tried))
    for line in drift_lines(found.report):
        console.print(line, markup=False)


def _progress() -> Progress:
    """Tells a terminal how far a synthetic trace is; silent elsewhere."""
    is_terminal = sys.stderr.isatty()

    def tell(done: int, total: int) -> None:
        if is_terminal:
            text = f"fitting routing to a histogram: layer {done} of {total}"
            click.echo(f"\r{text}", nl=done == total, err=True)

    return tell
