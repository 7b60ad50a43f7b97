"""The verb `k3 simulate`: predict a pod's speed, and say what decides it.

Owns arguments and printing. Exit status: 0 simulated, 1 a pod that does not answer, 2 wrong usage,
78 a pod, placement, trace or figure that a person has to change.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from services.planner.planning import NAMES
from services.pod.endpoint import open_client, token_option
from services.ranges import RealRange
from services.simulator.inputs import (
    Prepared,
    Sources,
    loss_time_s,
    overridden,
    parse_losses,
    prepare,
    with_spread,
)
from services.simulator.model import SimPod, Workload
from services.simulator.sweep import NOTHING_CAME, enough_tokens
from services.streams import table_console
from shared.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

_ANSWER_S: Final = 10.0
_PIPE_COLUMNS: Final = 120
_AFTER_LOSS_S: Final = 10.0
_MICROS: Final = RealRange(min=0, max=1e9)
_SEED: Final = click.IntRange(min=0)
_FILE: Final = click.Path(path_type=Path, dir_okay=False)


@click.command(
    epilog="Examples: k3 simulate --pod k3-home-pod.toml --what-decides; "
    "k3 simulate --pod k3-home-pod.toml --sweep sparks=1..64"
)
@click.option("--pod", help="Pod description: a file, or the name of a shipped one.")
@click.option("--url", help="Take the figures a running pod has measured, and compare with it.")
@token_option
@click.option("--placement", type=_FILE, help="Where the experts live. [default: by --policy]")
@click.option("--policy", type=click.Choice(NAMES), default="cost-ranked", show_default=True)
@click.option("--trace", "traces", type=_FILE, multiple=True, help="Routing; may be repeated.")
@click.option(
    "--synth",
    "synth_seed",
    type=_SEED,
    default=1,
    help="Seed of a synthetic trace.",
)
@click.option("--curves", type=_FILE, help="Hop curves from a file of `k3 status --json`.")
@click.option("--hop-spread", type=RealRange(1, 100), help="p99 over p50 of every hop.")
@click.option("--serial-us", type=_MICROS, help="Station's own time per layer.")
@click.option("--shared-us", type=_MICROS, help="Station's time per layer while rows travel.")
@click.option("--message-us", type=_MICROS, help="Station's time per dispatch, and per reply.")
@click.option("--link-gbit", type=RealRange(min=1e-6, max=1e6), help="Station's link.")
@click.option("--rest-ms", type=_MICROS, help="Per token, beside the layers.")
@click.option("--cold-us", type=_MICROS, help="One expert of a lost place.  [default: 1347]")
@click.option("--cores", type=click.IntRange(1, 1024), help="All on one host with so many cores.")
@click.option("--one-host", is_flag=True, help="With --url: its nodes share a host.")
@click.option("--streams", type=click.IntRange(1, 16_384), default=1, show_default=True)
@click.option("--lanes", type=click.IntRange(1, 16_384), help="Groups of streams. [default: all]")
@click.option("--tokens", type=click.IntRange(2, 10**6), help="Per stream. [default: 200 in all]")
@click.option("--prompt", "prompt_tokens", type=click.IntRange(0, 2**20), default=0)
@click.option("--answer", "answer_tokens", type=click.IntRange(1, 2**20), help="[default: no end]")
@click.option("--prefill", type=click.IntRange(1, 2**12), default=64, help="Tokens per chunk.")
@click.option("--arrivals", type=RealRange(0, 1e6), default=0.0, help="Requests per second.")
@click.option("--lose", "losses", multiple=True, help="NODE@SECONDS: a node is gone from then on.")
@click.option("--rehome-s", type=RealRange(0, 1e6), default=20.0, show_default=True)
@click.option("--sweep", "sweep_text", help="sparks=1..64, lanes=1..4096 or streams=1,2,4.")
@click.option("--what-decides", is_flag=True, help="What 10 % of each figure gives.")
@click.option("--seed", type=_SEED, default=0, show_default=True, help="Of everything drawn.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def simulate(**options: Any) -> None:
    """Tokens per second of a pod, for one and many streams, and what decides them.

    An event model of tokens on their way through the layers: the Station's one thread, a queue per
    place, the Station's link, lanes, prefill chunks, lost nodes and copies.
    """
    _check_together(options)
    work = _workload(options)
    prepared = prepare(_sources(options), _say)
    prepared = replace(prepared, pod=_overridden(prepared.pod, options))
    if options["sweep_text"]:
        _sweep(prepared, work, options)
    elif options["what_decides"]:
        _decide(prepared, work, options)
    else:
        _once(prepared, work, options)


def _check_together(options: dict[str, Any]) -> None:
    """UsageError for options of which one would silently win."""
    if options["url"] and any(options[name] for name in ("pod", "placement", "traces", "curves")):
        raise click.UsageError(
            "--url is a pod of its own: leave out --pod, --placement, --trace and --curves"
        )
    asked = [name for name in ("sweep_text", "what_decides", "losses") if options[name]]
    if len(asked) > 1:
        raise click.UsageError("give one of --sweep, --what-decides and --lose")
    if options["tokens"] and (options["losses"] or options["sweep_text"]):
        raise click.UsageError("--lose and --sweep set how long it is played: leave out --tokens")
    if options["arrivals"] and not options["answer_tokens"]:
        raise click.UsageError("--arrivals needs --answer: a request that never ends is the last")


def _once(prepared: Prepared, work: Workload, options: dict[str, Any]) -> None:
    from services.simulator import table
    from services.simulator.events import Simulation
    from services.simulator.phases import phases

    pod = prepared.pod
    losses = parse_losses(options["losses"], options["rehome_s"], pod)
    run = Simulation(pod, prepared.routed, work, losses=losses, seed=options["seed"])
    tally = run.run()
    outcome = tally.outcome(pod, streams=work.streams, layers=prepared.routed.layers)
    if not outcome.tokens:
        raise ConfigError(NOTHING_CAME)
    emitted_s = [at / 1e9 for at in tally.emitted_ns]
    stretches = phases(pod, losses, emitted_s, outcome.seconds) if losses else ()
    crossover_us = 1000 * outcome.expert_path_ms / prepared.routed.layers
    if options["as_json"]:
        found = {"outcome": outcome, "crossover_serial_us": crossover_us, "phases": stretches}
        _print_json(prepared, found)
        return
    console = _console(prepared)
    for line in table.headline(outcome, work):
        console.print(line, markup=False)
    console.print(_layer_words(prepared, outcome.layer_us, crossover_us), markup=False)
    console.print()
    console.print(table.parts_table(outcome))
    console.print()
    console.print(table.utilisation_table(outcome))
    if stretches:
        console.print()
        console.print(table.phases_table(stretches))


def _sweep(prepared: Prepared, work: Workload, options: dict[str, Any]) -> None:
    from services.simulator import table
    from services.simulator.sweep import parse_axis, sweep

    axis = parse_axis(options["sweep_text"])
    points = []
    for point in sweep(prepared.pod, prepared.routed, work, axis, options["seed"]):
        points.append(point)
        if sys.stderr.isatty():
            _say(f"{axis.name} {point.count}: {point.outcome.tokens_per_s:.2f} tok/s")
    if options["as_json"]:
        _print_json(prepared, {"axis": axis.name, "points": points})
        return
    console = _console(prepared)
    console.print(table.sweep_table(axis, points))
    console.print(table.sweep_words(axis, points), markup=False)
    if axis.name == "sparks":
        console.print("each Spark holds its share of what the pod's Sparks held, whatever fits")


def _decide(prepared: Prepared, work: Workload, options: dict[str, Any]) -> None:
    from services.simulator import table
    from services.simulator.sweep import what_decides

    levers = what_decides(prepared.pod, prepared.routed, work, options["seed"])
    if options["as_json"]:
        _print_json(prepared, {"levers": levers})
        return
    _console(prepared).print(table.levers_table(levers))


def _workload(options: dict[str, Any]) -> Workload:
    """The command line's workload; with losses it is played for a time, else for tokens."""
    streams = max(options["streams"], options["lanes"] or 1)
    ends = [loss_time_s(text) for text in options["losses"]]
    seconds = max(ends) + options["rehome_s"] + _AFTER_LOSS_S if ends else None
    return Workload(
        streams=streams,
        lanes=options["lanes"] or streams,
        tokens=options["tokens"] or enough_tokens(streams),
        seconds=seconds,
        prompt_tokens=options["prompt_tokens"],
        answer_tokens=options["answer_tokens"],
        prefill_tokens=options["prefill"],
        arrivals_per_s=options["arrivals"],
    )


def _sources(options: dict[str, Any]) -> Sources:
    status = None
    if options["url"]:
        from services.status.client import fetch_status

        with open_client(options["url"], options["token"], idle_s=_ANSWER_S) as client:
            status = fetch_status(client)
    return Sources(
        pod=options["pod"],
        placement=options["placement"],
        policy=options["policy"],
        traces=options["traces"],
        synth_seed=options["synth_seed"],
        curves=options["curves"],
        status=status,
        is_one_host=options["one_host"] or options["cores"] is not None,
        cores=options["cores"],
        seed=options["seed"],
    )


def _overridden(pod: SimPod, options: dict[str, Any]) -> SimPod:
    gbit, rest_ms = options["link_gbit"], options["rest_ms"]
    if options["hop_spread"] is not None:
        pod = with_spread(pod, options["hop_spread"])
    return overridden(
        pod,
        serial_us=options["serial_us"],
        shared_us=options["shared_us"],
        post_us=options["message_us"],
        collect_us=options["message_us"],
        link_bytes_per_s=None if gbit is None else gbit * 1e9 / 8,
        rest_us=None if rest_ms is None else rest_ms * 1000,
        cold_us=options["cold_us"],
        cores=options["cores"],
    )


def _layer_words(prepared: Prepared, layer_us: float, crossover_us: float) -> str:
    if prepared.measured_layer_us is None:
        return (
            f"a layer takes {layer_us:.0f} us; the serial part would cost as much as the experts "
            f"at {crossover_us:.0f} us per layer"
        )
    ratio = layer_us / prepared.measured_layer_us
    return (
        f"a layer takes {layer_us:.0f} us, the pod measured {prepared.measured_layer_us:.0f} us "
        f"(ratio {ratio:.2f})"
    )


def _print_json(prepared: Prepared, found: dict[str, Any]) -> None:
    head: dict[str, Any] = {"pod": prepared.source, "policy": prepared.policy}
    if prepared.measured_layer_us is not None:
        head["measured_layer_us"] = prepared.measured_layer_us
    click.echo(msgspec.json.encode(head | found).decode())


def _console(prepared: Prepared) -> Console:
    console = table_console(_PIPE_COLUMNS)
    console.print(f"{prepared.source}, experts placed {prepared.policy}", markup=False)
    return console


def _say(text: str) -> None:
    click.echo(f"k3: {text}", err=True)
