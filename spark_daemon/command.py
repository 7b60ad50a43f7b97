"""The command line of a node, the same for every tier.

Owns option names and help. Must not know how a node works.
"""

from __future__ import annotations

import os
from pathlib import Path

import click

from spark_daemon import daemon
from spark_daemon.config import Kind


def node_command(kind: Kind, *, default_name: str | None = None) -> click.Command:
    """The command `k3-KIND NAME`; NAME may be left out when there is a default."""

    # click takes even a default of None for a default, and then asks for no name
    name_argument = (
        click.argument("name", default=default_name) if default_name else click.argument("name")
    )

    @click.command(
        name=f"k3-{kind}",
        help=(
            f"Serve the bank NAME as a node of the {kind} tier until SIGTERM. Settings: "
            f"/etc/k3/{kind}/NAME.toml; options win over the file.\n\n"
            f"Example: k3-{kind} {default_name or 'spark0'} --station tcp://10.0.0.1:8381\n\n"
            "Exit status: 0 stopped, 1 failed, 2 wrong usage, 75 no memory or bank service now, "
            "78 settings, key, bank or kernel refused."
        ),
    )
    @name_argument
    @click.option("--config", "config_path", type=click.Path(path_type=Path), help="Settings file.")
    @click.option("--bank", help="Bank file. [/var/lib/k3/banks/NAME.k3bank]")
    @click.option("--station", help="Control address of the Station, tcp://HOST:PORT.")
    @click.option("--bank-service", help="Pull a missing bank from here, tcp://HOST:PORT. [never]")
    @click.option("--station-key", help="The Station's public key file.")
    @click.option("--node-key", help="This node's secret key file (mode 0600).")
    @click.option("--kernel", help="auto, int16, bf16, gpu or reference. [auto]")
    @click.option("--kernel-threads", type=int, help="Threads of the native kernel, 1 to 64. [1]")
    @click.option("--spin-us", type=int, help="Poll this long before sleeping. [0]")
    @click.option("--pin/--no-pin", default=None, help="Lock the bank in memory. [--pin]")
    @click.option(
        "--memory-floor-bytes",
        type=int,
        help="Memory that loading the bank leaves free. [2 GiB, or 5 % of a small machine]",
    )
    @click.option(
        "--memory-wait-us", type=int, help="How long to wait for that much memory. [30000000]"
    )
    @click.option(
        "--canary-period-s",
        type=float,
        help="Between two proofs of kernel and memory while the node is idle. [300]",
    )
    @click.pass_context
    def command(
        context: click.Context, /, name: str, config_path: Path | None, **overrides: object | None
    ) -> None:
        context.exit(
            daemon.main(
                kind, name, config_path=config_path, overrides=overrides, environ=os.environ
            )
        )

    return command
