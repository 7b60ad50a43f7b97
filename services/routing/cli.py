"""The verb `k3 trace`: record, look at, split and make up routing data.

Owns arguments, printing and exit statuses (0 done, 1 failed, 2 wrong usage, 78 a file or setting
that a person has to change). Must not know how traces are stored or made.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from services.pod.endpoint import token_option, url_option
from services.ranges import RealRange

if TYPE_CHECKING:
    from services.routing.file import LoadedTrace
    from services.routing.format import LossTotals, TraceMeta
    from services.routing.histogram import Histogram
    from services.routing.recorder import Recording
    from services.routing.synth import Progress, SynthParams
    from services.routing.trace import Trace
    from shared.core.shape import ModelShape

_PATH: Final = click.Path(path_type=Path)
_FILES = click.argument("files", nargs=-1, required=True, type=_PATH, metavar="FILE...")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_FILE_BYTES: Final = 256 * 2**20


@click.group()
def trace() -> None:
    """Record, show, split and make up routing data: which experts tokens choose.

    Example: k3 trace synth --out k3.k3trace, then: k3 trace histogram k3.k3trace
    """


@trace.command(epilog="Example: k3 trace record --out traces --seconds 600 --json")
@click.option("--out", "folder", required=True, type=_PATH, help="Folder for the files.")
@click.option("--name", default="routing", show_default=True, help="Files are NAME.0001.k3trace.")
@url_option
@token_option
@click.option("--seconds", type=RealRange(min=0.1), help="End after so many seconds.")
@click.option("--tokens", type=click.IntRange(min=1), help="End after so many tokens.")
@click.option(
    "--file-bytes",
    type=click.IntRange(min=2**20),
    default=_FILE_BYTES,
    show_default=True,
    help="Begin a new file before one grows larger.",
)
@click.option(
    "--files",
    "files_max",
    type=click.IntRange(1, 9999),
    default=8,
    show_default=True,
    help="Files kept; the oldest of NAME is deleted.",
)
@_JSON
def record(
    *,
    folder: Path,
    name: str,
    url: str,
    token: str | None,
    seconds: float | None,
    tokens: int | None,
    file_bytes: int,
    files_max: int,
    as_json: bool,
) -> int:
    """Record what a running pod routes, until a limit or Ctrl-C.

    Costs the pod nothing when nobody records. Expert numbers only: no text is recorded. Exit
    status: 0 recorded, 1 nothing came or the Station ended first.
    """
    import secrets
    import time

    from services.pod.endpoint import open_client
    from services.routing import recorder
    from services.routing.rotation import Rotation

    if not name or "/" in name or name.startswith("."):
        raise click.BadParameter(f"{name!r} is no file name", param_hint="--name")
    with open_client(url, token, idle_s=recorder.IDLE_S) as client, _record_line() as progress:
        done = recorder.record(
            client,
            Rotation(folder, name, file_bytes, files_max),
            recorder.Limits(seconds, tokens),
            recording=secrets.token_hex(8),
            created_s=time.time_ns() // 1_000_000_000,
            clock_s=time.monotonic,
            progress=progress,
        )
    if as_json:
        _print_json(done)
    else:
        _print_recording(done)
    return 0 if done.tokens and done.ended != "station stopped" else 1


@trace.command(epilog="Example: k3 trace info traces/routing.*.k3trace --json")
@_FILES
@_JSON
def info(*, files: tuple[Path, ...], as_json: bool) -> None:
    """Say what trace files hold; several files are read as one trace.

    Exit status: 0 sound (a torn last block is named and left out), 78 damaged or foreign.
    """
    loaded = _load(files)
    found = loaded.trace
    described = {
        **_sizes(found),
        "source": loaded.meta.source,
        "created_s": loaded.meta.created_s,
        "digest": found.digest,
        "tokens_dropped": loaded.losses.dropped,
        "tokens_incomplete": loaded.losses.incomplete,
        "parameters": loaded.meta.parameters,
        "notices": list(loaded.notices),
    }
    if as_json:
        _print_json(described)
        return
    for key, value in described.items():
        if key == "parameters" and isinstance(value, dict):
            for name, given in value.items():
                click.echo(f"  {name} = {given}")
        elif key != "notices":
            click.echo(f"{key.replace('_', ' ')}: {value}")


@trace.command(epilog="Example: k3 trace histogram routing.0001.k3trace --out histogram.json")
@_FILES
@click.option("--out", type=_PATH, help="Write the histogram to this JSON file.")
@_JSON
def histogram(*, files: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Count how often each expert of each layer was chosen.

    Exit status: 0 counted, 78 a wrong file.
    """
    from services.routing.histogram import Histogram, lines

    counted = Histogram.of(_load(files).trace)
    if out is not None:
        _write(out, msgspec.json.encode(counted))
    if as_json:
        _print_json(counted)
        return
    for line in lines(counted):
        click.echo(line)


@trace.command(
    epilog="Example: k3 trace split all.k3trace --out-a plan.k3trace --out-b held-out.k3trace"
)
@_FILES
@click.option(
    "--fraction",
    type=RealRange(0.0, 1.0, min_open=True, max_open=True),
    default=0.75,
    show_default=True,
    help="Share of the tokens that goes to A.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Draws the requests of A.",
)
@click.option("--out-a", required=True, type=_PATH, help="First part, e.g. to plan on.")
@click.option("--out-b", required=True, type=_PATH, help="Second part, e.g. to score on.")
@_JSON
def split(
    *,
    files: tuple[Path, ...],
    fraction: float,
    seed: int,
    out_a: Path,
    out_b: Path,
    as_json: bool,
) -> None:
    """Split a trace in two, by request: no request is in both parts.

    Tokens of one request resemble each other; a split by token would flatter every plan. Exit
    status: 0 split, 2 wrong usage, 78 a wrong file or a single request.
    """
    from services.routing.file import save
    from services.routing.trace import split_requests

    if len({path.resolve() for path in (out_a, out_b, *files)}) < len({*files}) + 2:
        raise click.UsageError("--out-a, --out-b and FILE have to be different files")
    loaded = _load(files)
    parts = split_requests(loaded.trace, fraction, seed)
    for path, part, name in zip((out_a, out_b), parts, "ab", strict=True):
        said = {**loaded.meta.parameters, "split": name, "split_seed": seed}
        save(path, part, _meta_of(part, loaded.meta.source, said))
    report = {
        key: {"file": str(path), **_sizes(part), "digest": part.digest}
        for key, path, part in zip("ab", (out_a, out_b), parts, strict=True)
    }
    if as_json:
        _print_json(report)
        return
    for path, part in zip((out_a, out_b), parts, strict=True):
        click.echo(f"{path}: {part.tokens:,} tokens of {len(part.starts())} requests")


def _show_params(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    """`--list-params`: the names, then leave; read off the struct, so that they cannot differ."""
    if not value:
        return
    from services.routing.synth import FITTED, describe

    for name, given, meaning in describe(FITTED):
        click.echo(f"{name:<20} {given:<9g} {meaning}")
    ctx.exit()


@trace.command(
    epilog="Example: k3 trace synth --out shifted.k3trace --param shift_kept=0.35 --param traffic=1"
)
@click.option("--out", required=True, type=_PATH, help="File to write.")
@click.option("--tokens", type=click.IntRange(1, 10**7), default=4705, show_default=True)
@click.option("--requests", type=click.IntRange(min=1), default=40, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--fit",
    type=_PATH,
    metavar="HISTOGRAM.json",
    help="Take popularity and sizes from `k3 trace histogram --out`, not from the law.",
)
@click.option(
    "--checkpoint",
    type=_PATH,
    help="Sizes of this checkpoint's model. [default: Kimi-K3's, or the histogram's]",
)
@click.option(
    "--param",
    "params",
    multiple=True,
    metavar="NAME=VALUE",
    help="Change a parameter; may be repeated.",
)
@click.option(
    "--list-params",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_params,
    help="List the parameters with their values and meanings, and exit.",
)
@_JSON
def synth(
    *,
    out: Path,
    tokens: int,
    requests: int,
    seed: int,
    fit: Path | None,
    checkpoint: Path | None,
    params: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make up a trace from named parameters; equal arguments give equal traces.

    The defaults meet the original plan's table of placement policies. Exit status: 0 made, 2 wrong
    usage, 78 a wrong file, or parameters that do not go together.
    """
    from services.routing import histogram as histograms
    from services.routing.file import save
    from services.routing.synth import synthesize

    chosen = _params(params)
    fitted = None if fit is None else histograms.read(fit)
    shape = _shape(fitted, checkpoint)
    with _layer_bar() as progress:
        made = synthesize(
            chosen,
            requests=requests,
            tokens=tokens,
            shape=shape,
            seed=seed,
            fit=None if fitted is None else fitted.array(),
            progress=progress,
        )
    said: dict[str, Any] = {**msgspec.to_builtins(chosen), "seed": seed}
    if fitted is not None:
        said["fitted_to"] = fitted.trace_digest
    save(out, made, _meta_of(made, "synthetic", said))
    if as_json:
        _print_json({"file": str(out), **_sizes(made), "digest": made.digest, "parameters": said})
        return
    click.echo(f"{out}: {made.tokens:,} tokens of {requests} requests, digest {made.digest[:16]}")


def _params(given: tuple[str, ...]) -> SynthParams:
    from services.routing.synth import FITTED, SynthParams

    values: dict[str, object] = msgspec.to_builtins(FITTED)
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.BadParameter(f"{text!r}: write NAME=VALUE", param_hint="--param")
        values[name] = value
    try:
        return msgspec.convert(values, SynthParams, strict=False)
    except msgspec.ValidationError as error:
        raise click.BadParameter(
            f"{error}; `k3 trace synth --list-params` lists them", param_hint="--param"
        ) from error


def _shape(fitted: Histogram | None, checkpoint: Path | None) -> ModelShape:
    from shared.core.errors import TraceError
    from shared.core.shape import K3

    if checkpoint is None:
        return K3 if fitted is None else fitted.shape()
    from station.model.config import K3Config

    shape = K3Config.from_file(checkpoint).shape
    if fitted is not None and fitted.array().shape != (len(shape.moe_layers), shape.experts):
        raise TraceError(
            f"the histogram is not of the model in {checkpoint}: leave one of them out"
        )
    return shape


def _load(files: tuple[Path, ...]) -> LoadedTrace:
    """Files as one trace; what was left out is said on stderr."""
    from services.routing.file import load

    loaded = load(files)
    for notice in loaded.notices:
        click.echo(f"k3: warning: {notice}", err=True)
    return loaded


def _meta_of(made: Trace, source: Any, parameters: dict[str, Any]) -> TraceMeta:
    import secrets
    import time

    from services.routing.format import TraceMeta

    return TraceMeta(
        model_digest=made.model_digest,
        first_layer=made.first_layer,
        layers=made.layers,
        experts=made.experts,
        top_k=made.top_k,
        source=source,
        created_s=time.time_ns() // 1_000_000_000,
        recording=secrets.token_hex(8),
        parameters=parameters,
    )


def _sizes(found: Trace) -> dict[str, int | str]:
    return {
        "model_digest": found.model_digest,
        "tokens": found.tokens,
        "requests": len(found.starts()),
        "first_layer": found.first_layer,
        "layers": found.layers,
        "experts": found.experts,
        "top_k": found.top_k,
    }


def _write(path: Path, data: bytes) -> None:
    from shared.core.errors import TraceError
    from shared.io.files import replace_file

    try:
        replace_file(path, data)
    except OSError as error:
        raise TraceError(f"{path}: cannot write: {error.strerror}; choose another --out") from error


def _print_json(value: object) -> None:
    click.echo(msgspec.json.encode(value).decode())


def _print_recording(done: Recording) -> None:
    click.echo(
        f"recorded {done.tokens:,} tokens of {done.requests} requests in {done.seconds:.0f} s "
        f"({done.ended})"
    )
    if done.tokens_dropped:
        click.echo(f"NOT recorded: {done.tokens_dropped:,} tokens, this side read too slowly")
    if done.tokens_incomplete:
        click.echo(f"left out: {done.tokens_incomplete:,} tokens that ended before the last layer")
    if done.files_dropped:
        click.echo(f"deleted by rotation: {done.files_dropped} files of this recording")
    for path in done.files:
        click.echo(path)


@contextmanager
def _record_line() -> Iterator[Any]:
    """Tokens so far, on a terminal; in a log one line, once the Station has answered."""
    if not sys.stderr.isatty():
        lines = iter(["recording; Ctrl-C ends it"])

        def begin(_tokens: int, _losses: LossTotals) -> None:
            for line in lines:
                click.echo(line, err=True)

        yield begin
        return
    from rich.console import Console

    with Console(stderr=True).status("recording; Ctrl-C ends it") as status:

        def show(tokens: int, losses: LossTotals) -> None:
            missing = f", {losses.dropped:,} dropped" if losses.dropped else ""
            status.update(f"recording; Ctrl-C ends it: {tokens:,} tokens{missing}")

        yield show


@contextmanager
def _layer_bar() -> Iterator[Progress | None]:
    """Layers done, on a terminal; silence in a log."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress as bars
    from rich.console import Console

    with bars.Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("layers", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
