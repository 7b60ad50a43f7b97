"""Puts a node's public key on a Station's allow-list."""

from __future__ import annotations

from pathlib import Path

from services.pod.files import write_atomic
from shared.core.errors import ConfigError
from shared.core.names import checked_name
from shared.io import keys


def admit(public_key: Path, allow_list: Path, *, name: str | None) -> str:
    """Copy a public key file to `allow_list` under its node's name, which is returned.

    Raises KeyRefused for a file that is no public key (a secret one above all), ConfigError when
    the node or the key is already listed differently.
    """
    public = keys.load_public(public_key)
    node = checked_name(name or public_key.name.removesuffix(keys.PUBLIC_SUFFIX), kind="node")
    listed = keys.load_allow_list(allow_list) if allow_list.exists() else {}
    if listed.get(public, node) != node:
        raise ConfigError(
            f"{allow_list} already admits this key as {listed[public]!r}: give every node its own"
        )
    target = allow_list / f"{node}{keys.PUBLIC_SUFFIX}"
    if node in listed.values() and listed.get(public) != node:
        raise ConfigError(
            f"{target} holds another key of {node}: remove that file first if it is no longer valid"
        )
    write_atomic(target, public_key.read_bytes())
    return node
