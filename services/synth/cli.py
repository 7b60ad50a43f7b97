"""The verb `k3 synth`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from services.synth.sizes import SynthSizes


@click.command(epilog="Example: k3 synth /tmp/k3 --k3-experts 16")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--layers", type=int, help="Layers; the first is dense. [default: 4]")
@click.option("--experts", type=int, help="Routed experts per layer. [default: 16]")
@click.option("--top-k", type=int, help="Experts per token. [default: 4]")
@click.option("--latent", type=int, help="Inputs of an expert. [default: 128]")
@click.option("--width", type=int, help="Inner width of an expert. [default: 128]")
@click.option("--hidden", type=int, help="Width of the residual stream. [default: 64]")
@click.option("--vocab", type=int, help="Tokens. [default: 512]")
@click.option("--shards", type=int, help="Files. [default: one per layer and three]")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the weights.")
@click.option("--k3-structure", is_flag=True, help="All layers, experts and tensors of K3, tiny.")
@click.option("--k3-experts", type=int, metavar="N", help="N experts of K3's real size.")
@click.option("--replace", is_flag=True, help="Replace an older synthetic checkpoint.")
def synth(
    *,
    directory: Path,
    shards: int | None,
    seed: int,
    k3_structure: bool,
    k3_experts: int | None,
    replace: bool,
    **sizes: int | None,
) -> None:
    """Write a synthetic checkpoint to DIRECTORY, in the exact layout of the NVFP4 release.

    The same sizes and seed always give the same files. DIRECTORY appears complete or not at all.
    Exit status: 0 written, 2 wrong usage, 78 impossible sizes or no room.
    """
    from services.progress import byte_bar
    from services.synth.writer import write

    chosen = _sizes(sizes, shards, k3_structure=k3_structure, k3_experts=k3_experts)
    with byte_bar("synth") as progress:
        written = write(directory, chosen, seed, progress, replace=replace)
    click.echo(
        f"{directory}: {written.tensors:,} tensors, {written.payload_bytes:,} bytes in "
        f"{written.shards:,} shards"
    )


def _sizes(
    given: dict[str, int | None],
    shards: int | None,
    *,
    k3_structure: bool,
    k3_experts: int | None,
) -> SynthSizes:
    from services.synth import sizes as presets

    own: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if k3_structure and k3_experts is not None:
        raise click.UsageError("--k3-structure and --k3-experts exclude each other")
    if own and (k3_structure or k3_experts is not None):
        name = next(iter(own)).replace("_", "-")
        raise click.UsageError(f"--{name} is fixed by the K3 preset: leave one of them out")
    if k3_structure:
        return presets.k3_structure(shards)
    if k3_experts is not None:
        return presets.k3_experts(k3_experts, shards)
    return presets.SynthSizes(**own, shards=shards)
