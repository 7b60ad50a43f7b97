"""The verb `k3 keys`."""

from __future__ import annotations

import json
from pathlib import Path

import click

_FOLDER = Path("/etc/k3/keys")
_dir_option = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=_FOLDER,
    show_default=True,
    help="Folder of key files.",
)
_allow_list_option = click.option(
    "--allow-list",
    type=click.Path(path_type=Path, file_okay=False),
    default=_FOLDER / "nodes",
    show_default=True,
    help="Folder of admitted public keys, one NODE.key each.",
)


@click.group()
def keys() -> None:
    """Make keys and admit nodes."""


@keys.command(epilog="Example: k3 keys new spark0 --dir /etc/k3/keys")
@click.argument("name")
@_dir_option
def new(*, name: str, directory: Path) -> None:
    """Make the key pair NAME.key (public) and NAME.key_secret (mode 0600)."""
    from shared.io import keys as key_files

    pair = key_files.create(directory, name)
    click.echo(f"{directory / (name + key_files.PUBLIC_SUFFIX)}: {pair.public}")
    click.echo(
        f"next: copy the public file to the Station and run `k3 keys allow {name}.key` there",
        err=True,
    )


@keys.command(epilog="Example: k3 keys allow spark0.key")
@click.argument("public_key", type=click.Path(path_type=Path, dir_okay=False))
@_allow_list_option
@click.option("--name", help="Node that the key belongs to. [default: the file's name]")
def allow(*, public_key: Path, allow_list: Path, name: str | None) -> None:
    """Admit the node whose PUBLIC_KEY file this is. The Station reads the list when it starts."""
    from services.keys.admission import admit

    node = admit(public_key, allow_list, name=name)
    click.echo(f"{node} is admitted by {allow_list}; restart the Station to make it known")


@keys.command(name="list", epilog="Example: k3 keys list --json")
@_allow_list_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: node to public key.")
def list_command(*, allow_list: Path, as_json: bool) -> None:
    """Show the admitted nodes."""
    from shared.io import keys as key_files

    nodes = {node: public for public, node in key_files.load_allow_list(allow_list).items()}
    if as_json:
        click.echo(json.dumps(nodes))
        return
    for node, public in nodes.items():
        click.echo(f"{node:<20} {public}")
