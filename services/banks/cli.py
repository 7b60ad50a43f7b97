"""`k3 bank`: build, verify and show bank files.

Owns arguments, printing and exit statuses (0 right, 1 failed, 2 wrong usage, 78 a file or setting
that a person has to change). Must not know how a bank is made or checked.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click

from services.banks.builder import Progress, build
from shared.core import placement as placements
from shared.core.bank_header import BankHeader
from shared.core.errors import BankError, MeshError, PlacementError
from shared.io.bank_file import BankFile, RecordFault, verify

_FILE: Final = click.Path(path_type=Path)
_FAULTS_SHOWN_MAX: Final = 20


class _BankGroup(click.Group):
    """Ends each of our errors in one line and its own exit status."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except MeshError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(error.exit_status)


@click.group(name="bank", cls=_BankGroup)
def bank() -> None:
    """Build, verify and show bank files: the expert records of one node.

    Example: k3 bank build --checkpoint model/ --placement placement.json --node spark0
    --out spark0.k3bank

    Exit status: 0 right, 1 failed, 2 wrong usage, 78 damaged or unsuitable file.
    """


@bank.command(name="build")
@click.option("--checkpoint", type=_FILE, required=True, help="Folder of the model checkpoint.")
@click.option("--placement", type=_FILE, required=True, help="Placement file (JSON).")
@click.option("--node", required=True, help="Node of the placement whose experts to take.")
@click.option("--out", type=_FILE, required=True, help="File to write: NAME.k3bank.")
@click.option("--replace", is_flag=True, help="Replace an existing file at the end.")
def build_command(checkpoint: Path, placement: Path, node: str, out: Path, replace: bool) -> None:
    """Write the bank of one node; nothing appears at --out unless all of it is right."""
    # here, because it brings torch and the other commands must start without it
    from station.model.checkpoint import Checkpoint

    plan = placements.decode(_read(placement), source=str(placement))
    with Checkpoint.open(checkpoint) as source, _progress(f"bank {node}") as progress:
        header = build(source, plan, node, out, progress, replace=replace)
    with BankFile.open(out) as made:
        click.echo(f"{out}: {_summary(header)}, digest {made.digest}")


@bank.command(name="verify")
@click.argument("path", type=_FILE)
def verify_command(path: Path) -> None:
    """Compare every record of a bank with its hash and name the damaged ones.

    Example: k3 bank verify /var/lib/k3/banks/spark0.k3bank
    """
    faults: list[RecordFault] = []
    with BankFile.open(path) as opened, _progress("verify") as progress:
        for row, fault in verify(opened):
            if fault is not None:
                faults.append(fault)
            progress(row + 1, opened.rows)
    for fault in faults[:_FAULTS_SHOWN_MAX]:
        click.echo(str(fault), err=True)
    if faults:
        raise BankError(
            f"{path}: {len(faults)} of {opened.rows} records are damaged, the first is "
            f"{faults[0]}: build the bank again"
        )
    click.echo(f"{path}: intact: {_summary(opened.header)}, digest {opened.digest}")


@bank.command(name="show")
@click.argument("path", type=_FILE)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show_command(path: Path, as_json: bool) -> None:
    """Print what a bank holds, from its header alone.

    Example: k3 bank show --json spark0.k3bank
    """
    with BankFile.open(path) as opened:
        facts = _facts(opened)
    if as_json:
        click.echo(json.dumps(facts))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        click.echo(f"{name:{width}}  {value}")


def _facts(opened: BankFile) -> dict[str, object]:
    header = opened.header
    return {
        "path": str(opened.path),
        "digest": opened.digest,
        "name": header.name,
        "node": header.node,
        "tier": header.tier,
        "model_digest": header.model_digest,
        "placement_digest": header.placement_digest,
        "latent": header.shape.latent,
        "width": header.shape.width,
        "layout": header.layout,
        "records": opened.rows,
        "layers": len({layer for layer, _ in header.rows}),
        "record_bytes": opened.layout.record_bytes,
        "stride_bytes": opened.layout.stride_bytes,
        "file_bytes": opened.records_offset + opened.arena_bytes,
        "format_version": header.version,
        "producer": header.producer,
    }


def _summary(header: BankHeader) -> str:
    layout = header.record_layout
    size = len(header.rows) * layout.stride_bytes
    return (
        f"{len(header.rows)} experts of {layout.record_bytes} bytes for node {header.node} "
        f"({size / 1e6:.1f} MB)"
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PlacementError(
            f"{path}: cannot read the placement: {error.strerror}: check the path"
        ) from error


@contextmanager
def _progress(title: str) -> Iterator[Progress]:
    """A bar on a terminal; silence in a log."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
