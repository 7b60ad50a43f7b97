"""Settings of a node: one TOML file, overridden by the command line, defaults for the rest.

Owns the names, bounds and defaults of the settings. Every defect is one ConfigError that names the
file, the field and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from shared.core.errors import ConfigError
from shared.core.loading import WAIT_US
from shared.core.names import NodeName, PathText, checked_name
from shared.core.placement import Tier
from shared.io.settings import read_settings
from shared.kernels.select import KernelName, KernelThreads

CONFIG_ROOT: Final = Path("/etc/k3")
BANK_ROOT: Final = Path("/var/lib/k3/banks")
STATION_ADDRESS: Final = "tcp://127.0.0.1:8381"
_PATHS: Final = ("bank", "station_key", "node_key")

Kind: TypeAlias = Literal["spark", "grace", "rtx"]


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checked settings of one node."""

    name: NodeName
    tier: Tier
    bank: PathText
    station: Annotated[str, msgspec.Meta(max_length=256)]
    station_key: PathText
    node_key: PathText
    bank_service: Annotated[str, msgspec.Meta(max_length=256)] = ""  # "": never pull a bank
    spin_us: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    kernel: KernelName = "auto"
    kernel_threads: KernelThreads = 1
    pin: bool = True
    memory_floor_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None  # None: by the machine
    memory_wait_us: Annotated[int, msgspec.Meta(ge=0, le=3_600_000_000)] = WAIT_US
    canary_period_s: Annotated[float, msgspec.Meta(ge=0.05, le=86_400)] = 300


def load(
    kind: Kind, name: str, *, path: Path | None, overrides: Mapping[str, object | None]
) -> NodeConfig:
    """Settings of node `name`; `overrides` that are None were not given.

    Without `path` the file is /etc/k3/KIND/NAME.toml and may be missing; a `path` must exist. Its
    relative paths count from its folder, those of `overrides` from the working directory. Raises
    ConfigError.
    """
    checked_name(name, kind="node")
    file = path or CONFIG_ROOT / kind / f"{name}.toml"
    written = _from_folder(file.parent, read_settings(file, must_exist=path is not None))
    if written.get("name", name) != name:
        raise ConfigError(
            f"settings file {file}: its name is {written['name']!r}, but node {name!r} was asked "
            "for: name the file of that node"
        )
    given = {field: value for field, value in overrides.items() if value is not None}
    merged = {**_defaults(kind, name), **written, **given}
    try:
        return msgspec.convert(merged, NodeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"settings of node {name!r} ({file} and command line): {error}; correct that setting"
        ) from error


def _defaults(kind: Kind, name: str) -> dict[str, object]:
    keys = CONFIG_ROOT / "keys"
    return {
        "name": name,
        "tier": kind,
        "bank": str(BANK_ROOT / f"{name}.k3bank"),
        "station": STATION_ADDRESS,
        "station_key": str(keys / "station.key"),
        "node_key": str(keys / f"{name}.key_secret"),
    }


def _from_folder(folder: Path, written: Mapping[str, object]) -> dict[str, object]:
    """Settings with the paths among them made independent of the working directory."""
    paths = {}
    for field in _PATHS:
        path = written.get(field)
        if isinstance(path, str) and path:  # anything else is refused with the field's name
            paths[field] = str(folder / path)
    return {**written, **paths}
