"""The verb `k3 census`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import click


@click.command(epilog="Example: k3 census /raid/Kimi-K3-NVFP4 --json")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--scales", is_flag=True, help="Read all block scales too: a tenth of all bytes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def census(*, directory: Path, scales: bool, as_json: bool) -> None:
    """Say what the checkpoint in DIRECTORY holds, to the byte, and how it differs from K3's.

    Reads the index, the header of every shard and the scale scalars of the experts: seconds,
    however large the checkpoint. Exit status: 0 sound, 78 damaged or not a checkpoint.
    """
    from services.census.reader import take_census
    from services.census.table import lines
    from services.progress import byte_bar

    with byte_bar("scales") if scales else nullcontext() as progress:
        taken = take_census(directory, progress)
    if as_json:
        click.echo(taken.to_json())
        return
    for line in lines(taken):
        click.echo(line)
