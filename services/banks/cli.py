"""`k3 bank`: plan, build, verify, list and show bank files.

Owns arguments, printing and exit statuses (0 right, 1 failed, 2 wrong usage, 78 a file or setting
that a person has to change). Must not know how a bank is made or checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final, get_args

import click
import msgspec

from services.banks.builder import SUFFIX, build
from services.banks.goldens import check_goldens
from services.banks.listing import BankEntry, list_banks
from services.banks.plan import BankPlan, LayoutChoice, bank_plan, plain_split
from services.banks.progress import shown_progress
from services.banks.staging_cli import record_command, stage_command
from services.banks.target import choose_target
from services.banks.verify import verify_against
from shared.core.bank_header import BankHeader
from shared.core.errors import BankError
from shared.core.placement import Placement
from shared.core.record import RecordOrder
from shared.core.shape import K3, ModelShape
from shared.io.bank_file import BankFile, RecordFault, blake3_digest, verify
from shared.io.placement_file import read_placement

if TYPE_CHECKING:
    from station.model.checkpoint import Checkpoint

_FILE: Final = click.Path(path_type=Path)
_FAULTS_SHOWN_MAX: Final = 20
_SPARKS_MAX: Final = 64
_SHAPES: Final = {"k3": K3}
_NO_SPLIT: Final = "give --placement FILE or --split plain"


@click.group(name="bank")
def bank() -> None:
    """Plan, build, verify and show bank files: the expert records of one node.

    Example: k3 bank build --checkpoint model/ --placement placement.json --node spark0
    --out spark0.k3bank

    Exit status: 0 right, 1 failed, 2 wrong usage, 78 damaged or unsuitable file.
    """


_layout_option: Final = click.option(
    "--layout",
    type=click.Choice(["auto", *get_args(RecordOrder)]),
    default="auto",
    show_default=True,
    help="Order of the bytes in a record: auto is row-major for GPUs and, where the experts' sizes "
    "allow it, interleaved-4 for the CPU of a grace node.",
)


bank.add_command(stage_command)
bank.add_command(record_command)


def _split_options(command: Callable[..., object]) -> Callable[..., object]:
    """What says which expert belongs to which node."""
    for option in (
        click.option(
            "--sparks",
            type=click.IntRange(1, _SPARKS_MAX),
            default=8,
            show_default=True,
            help="Sparks of the plain split.",
        ),
        click.option(
            "--split",
            type=click.Choice(["plain"]),
            help="Instead of a placement: the same number of consecutive experts of every layer "
            "on each Spark.",
        ),
        click.option("--placement", type=_FILE, help="Placement file (JSON)."),
    ):
        command = option(command)
    return command


@bank.command(name="plan")
@_split_options
@_layout_option
@click.option(
    "--shape",
    type=click.Choice(list(_SHAPES)),
    default="k3",
    show_default=True,
    help="Model to split.",
)
@click.option("--node", help="Only this node's bank.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan_command(
    *,
    placement: Path | None,
    split: str | None,
    sparks: int,
    layout: LayoutChoice,
    shape: str,
    node: str | None,
    as_json: bool,
) -> None:
    """Print what each bank would hold, without reading a checkpoint.

    Example: k3 bank plan --split plain --sparks 8 --shape k3
    """
    found = _placement(placement, split, sparks, digest="0" * 64, shape=_SHAPES[shape])
    served = [n for n in found.nodes if n.tier != "hbm" and n.bank_rows]
    nodes = [found.node(node)] if node else served
    plans = [bank_plan(found, placed, hasher=blake3_digest, layout=layout) for placed in nodes]
    total = sum(plan.payload_bytes for plan in plans)
    if as_json:
        banks = msgspec.to_builtins(plans)
        click.echo(json.dumps({"policy": found.policy, "banks": banks, "payload_bytes": total}))
        return
    for line in _plan_lines(plans, total):
        click.echo(line)


@bank.command(name="build")
@click.option("--checkpoint", type=_FILE, required=True, help="Folder of the model checkpoint.")
@_split_options
@_layout_option
@click.option("--node", required=True, help="Node of the placement whose experts to take.")
@click.option("--out", type=_FILE, help="File to write: NAME.k3bank.")
@click.option(
    "--out-dir",
    "folders",
    type=_FILE,
    multiple=True,
    help="Instead of --out: write NODE.k3bank into this folder; give several, the first with room "
    "is used.",
)
@click.option("--replace", is_flag=True, help="Replace an existing file at the end.")
def build_command(
    *,
    checkpoint: Path,
    placement: Path | None,
    split: str | None,
    sparks: int,
    layout: LayoutChoice,
    node: str,
    out: Path | None,
    folders: tuple[Path, ...],
    replace: bool,
) -> None:
    """Write the bank of one node; nothing has its name unless all of it is right.

    A build that was interrupted, or ran out of disk space, is continued by the same command.

    Example: k3 bank build --checkpoint model/ --split plain --sparks 8 --node spark3
    --out-dir /banks --out-dir /banks2
    """
    if (out is None) == (not folders):
        raise click.UsageError("give either --out or --out-dir")
    if placement is None and split is None:
        raise click.UsageError(_NO_SPLIT)
    with ExitStack() as stack:
        # a placement is read before the checkpoint, whose headers take long
        found = None if placement is None else _read_placement(placement, split)
        source = stack.enter_context(_open_checkpoint(checkpoint))
        if found is None:
            shape = source.config.shape
            found = _placement(None, split, sparks, digest=source.digest, shape=shape)
        size = bank_plan(found, found.node(node), hasher=blake3_digest, layout=layout)
        path = out or choose_target(folders, node + SUFFIX, size.file_bytes, replace=replace)
        display = stack.enter_context(shown_progress(f"bank {node}", size.record_bytes))
        try:
            header = build(
                source,
                found,
                node,
                path,
                display.progress,
                layout=layout,
                replace=replace,
                keep_partial=True,
                notice=display.notice,
            )
        except KeyboardInterrupt:
            display.notice("interrupted: finished records are kept for the next build")
            raise
    with BankFile.open(path) as made:
        click.echo(f"{path}: {_summary(header)}, digest {made.digest}")


@bank.command(name="verify")
@click.argument("path", type=_FILE)
@click.option("--source", type=_FILE, help="Compare with this checkpoint too, byte by byte.")
def verify_command(path: Path, source: Path | None) -> None:
    """Compare every record of a bank with its hash and name the damaged ones.

    Also computes the bank's goldens from its records: what a record gives, whatever its hash says.

    Example: k3 bank verify /var/lib/k3/banks/spark0.k3bank --source /models/k3
    """
    faults: list[RecordFault] = []
    with ExitStack() as stack:
        opened = stack.enter_context(BankFile.open(path))
        checked: Iterator[tuple[int, RecordFault | None]] = verify(opened)
        if source is not None:
            checked = verify_against(opened, stack.enter_context(_open_checkpoint(source)))
        display = stack.enter_context(shown_progress("verify", opened.layout.record_bytes))
        for row, fault in checked:
            if fault is not None:
                faults.append(fault)
            display.progress(row + 1, opened.rows)
        seen = {fault.row for fault in faults}
        faults += [fault for fault in check_goldens(opened) if fault.row not in seen]
    for fault in faults[:_FAULTS_SHOWN_MAX]:
        click.echo(str(fault), err=True)
    if faults:
        raise BankError(
            f"{path}: {len(faults)} of {opened.rows} records are damaged"
            f"{'' if source is None else f' or differ from {source}'}, the first is "
            f"{faults[0]}: build the bank again"
        )
    verdict = "intact" if source is None else f"intact and equal to {source}"
    click.echo(f"{path}: {verdict}: {_summary(opened.header)}, digest {opened.digest}")


@bank.command(name="ls")
@click.argument("folders", type=_FILE, nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def ls_command(folders: tuple[Path, ...], as_json: bool) -> None:
    """List the banks of folders, finished or not.

    Example: k3 bank ls /var/lib/k3/banks
    """
    entries = [entry for folder in folders for entry in list_banks(folder)]
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(entries)))
        return
    for entry in entries:
        click.echo(_listed(entry))


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


def _open_checkpoint(folder: Path) -> Checkpoint:
    # here, because it brings torch and the other commands must start without it
    from station.model.checkpoint import Checkpoint

    return Checkpoint.open(folder)


def _placement(
    path: Path | None, split: str | None, sparks: int, *, digest: str, shape: ModelShape
) -> Placement:
    if path is not None:
        return _read_placement(path, split)
    if split is None:
        raise click.UsageError(_NO_SPLIT)
    return plain_split(digest, shape, sparks)


def _read_placement(path: Path, split: str | None) -> Placement:
    if split is not None:
        raise click.UsageError("give --placement or --split, not both")
    return read_placement(path)


def _plan_lines(plans: list[BankPlan], total: int) -> Iterator[str]:
    titles = f"{'node':12} {'experts':>9} {'layers':>6} {'GiB':>9} {'file bytes':>17}"
    yield f"{titles} {'reads':>9}  layout"
    for plan in plans:
        yield (
            f"{plan.node:12} {plan.experts:9,} {plan.layers:6} {plan.payload_bytes / 2**30:9.3f} "
            f"{plan.file_bytes:17,} {plan.reads:9,}  {plan.layout}"
        )
    experts = sum(plan.experts for plan in plans)
    yield f"{len(plans)} banks: {experts:,} experts, {total:,} bytes ({total / 1e9:.1f} GB)"


def _listed(entry: BankEntry) -> str:
    size = f"{entry.path}: {entry.file_bytes / 1e6:.1f} MB"
    match entry.state:
        case "whole":
            return (
                f"{size}, {entry.records} {entry.layout} records for node {entry.node}, "
                f"digest {entry.digest}"
            )
        case "unfinished":
            return f"{size}, unfinished, {entry.records} records: {entry.problem}"
        case "damaged":
            return f"{size}, damaged: {entry.problem}"


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
        "goldens": len(header.goldens),
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
        f"({size / 1e6:.1f} MB, {header.layout})"
    )
