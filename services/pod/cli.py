"""The verbs `k3 up` and `k3 pod`."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Literal

import click

from services.pod.layout import SPARKS_MAX
from services.pod.paths import default_checkpoint, default_state_dir
from services.ranges import RealRange

_checkpoint_option = click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="Folder of a K3-architecture checkpoint. [default: the demonstration model]",
)
_sparks_option = click.option(
    "--sparks",
    type=click.IntRange(0, SPARKS_MAX),
    default=2,
    show_default=True,
    help="Spark nodes.",
)
_placement_option = click.option(
    "--policy",
    default="balanced",
    show_default=True,
    help="Which node holds which expert: balanced, contiguous or shuffled:SEED.",
)
_on_miss_option = click.option(
    "--on-miss",
    type=click.Choice(["exact", "fail"]),
    default="exact",
    show_default=True,
    help="When a node is lost: recompute its experts from the checkpoint, or fail the request.",
)
_dtype_option = click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="What the Station computes in.",
)


@click.command(epilog="Example: k3 up --sparks 4 --port 8380, then in another terminal: k3 chat")
@_sparks_option
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8380,
    show_default=True,
    help="Loopback port of the chat endpoint; 0 takes a free one and prints it.",
)
@_checkpoint_option
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    help="Keys, banks, settings and logs of the pod. [default: ~/.local/state/k3/embedded]",
)
@_placement_option
@_on_miss_option
@click.option(
    "--restart",
    type=click.Choice(["on-failure", "never"]),
    default="on-failure",
    show_default=True,
    help="Whether a process that died comes back.",
)
@click.option(
    "--restart-delay-s",
    type=RealRange(0, 600),
    default=0.5,
    show_default=True,
    help="Wait before the first restart; doubles while it keeps failing, up to 10 s.",
)
@_dtype_option
@click.option(
    "--spin-us",
    type=click.IntRange(0, 1_000_000),
    default=0,
    show_default=True,
    help="Microseconds of busy waiting before a wait sleeps; 0 suits shared cores.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show the processes' logs on stderr as well.")
def up(
    *,
    sparks: int,
    port: int,
    checkpoint: Path | None,
    state_dir: Path | None,
    policy: str,
    on_miss: Literal["exact", "fail"],
    restart: Literal["on-failure", "never"],
    restart_delay_s: float,
    dtype: Literal["float32", "bfloat16"],
    spin_us: int,
    verbose: bool,
) -> None:
    """Start a pod on this machine and keep it running until Ctrl-C.

    Station, Grace, RTX and Spark nodes run as processes of their own and talk over shared memory.
    When the pod can answer, one line starting with "ready:" is printed.
    """
    from services.pod.supervision import RestartPolicy
    from services.pod.up import UpOptions, run_pod

    delay_us = round(restart_delay_s * 1e6)
    run_pod(
        UpOptions(
            checkpoint=checkpoint or default_checkpoint(),
            state_dir=state_dir or default_state_dir(os.environ),
            sparks=sparks,
            port=port,
            placement=policy,
            on_miss=on_miss,
            dtype=dtype,
            spin_us=spin_us,
            restart=RestartPolicy(
                enabled=restart == "on-failure",
                delay_us=delay_us,
                delay_us_max=max(delay_us, 10_000_000),
            ),
            verbose=verbose,
            program=as_called(sys.argv[0]),
        )
    )


def as_called(argv_0: str) -> str:
    """A word that calls this program again in another shell: `.venv/bin/k3` is in no PATH."""
    return shlex.quote(argv_0) if Path(argv_0).name == "k3" else "k3"


@click.group()
def pod() -> None:
    """Lay out a pod for systemd."""


@pod.command(epilog="Example: k3 pod init --sparks 2, then the systemctl line that it prints")
@click.option(
    "--root",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("/"),
    show_default=True,
    help="Where the system's / is; settings name paths as seen from there.",
)
@_checkpoint_option
@_sparks_option
@_placement_option
@_on_miss_option
@click.option(
    "--port", type=click.IntRange(1, 65535), default=8380, show_default=True, help="Chat endpoint."
)
@click.option(
    "--control-port",
    type=click.IntRange(1, 65535),
    default=8381,
    show_default=True,
    help="Where nodes join the Station.",
)
@click.option("--model-name", default="k3-demo", show_default=True, help="Name clients ask for.")
@_dtype_option
def init(
    *,
    root: Path,
    checkpoint: Path | None,
    sparks: int,
    policy: str,
    on_miss: Literal["exact", "fail"],
    port: int,
    control_port: int,
    model_name: str,
    dtype: Literal["float32", "bfloat16"],
) -> None:
    """Write keys, placement, banks and settings of a one-host pod.

    Makes /etc/k3 (settings and keys) and /var/lib/k3/banks under ROOT. Keys are kept when they
    exist; everything else is renewed where it does not fit. The services run as user k3, so the
    checkpoint must be readable for it.
    """
    from services.pod.checkpoint import prepare_from
    from services.pod.layout import BANK_SERVICE_UNIT, PodPaths, unit_of
    from services.pod.prepare import PodPlan

    plan = PodPlan(
        checkpoint=(checkpoint or default_checkpoint()).resolve(),
        sparks=sparks,
        http_port=port,
        control_port=control_port,
        model_name=model_name,
        policy=policy,
        on_miss=on_miss,
        dtype=dtype,
    )
    layout = prepare_from(
        PodPaths.system(root.resolve()), plan, say=lambda line: click.echo(f"k3: {line}", err=True)
    )
    units = ["k3-pod.target", "k3-station.service", BANK_SERVICE_UNIT]
    units += [unit_of(node.name, node.tier) for node in layout.nodes]
    click.echo(f"settings in {layout.paths.config}, banks in {layout.paths.banks}")
    click.echo(f"next: systemctl enable {' '.join(units)} && systemctl start k3-pod.target")
