"""Settings of the bank service: one TOML file whose defaults suffice on the Station's host.

Owns the names, bounds and defaults. Every defect is one ConfigError that names the file, the field
and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import msgspec

from shared.core.errors import ConfigError
from shared.core.names import OptionalPathText, PathText
from shared.io.address import check_listen_address
from shared.io.settings import read_settings

CONFIG_FILE: Final = Path("/etc/k3/banks.toml")
RATE_BYTES_PER_S_MIN: Final = 2**20  # slower, one range would keep a node waiting for seconds


class BankServiceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checked settings; paths are absolute, or as given on the command line.

    `rate_bytes_per_s` bounds all nodes together, 0 is no limit. Without a `checkpoint` a single
    record comes from banks only.
    """

    address: Annotated[str, msgspec.Meta(max_length=256)] = "tcp://127.0.0.1:8382"
    allow_remote: bool = False
    secret_key: PathText = "/etc/k3/keys/station.key_secret"  # noqa: S105 - a path
    allow_list: PathText = "/etc/k3/keys/nodes"
    folders: Annotated[tuple[PathText, ...], msgspec.Meta(min_length=1, max_length=64)] = (
        "/var/lib/k3/banks",
    )
    checkpoint: OptionalPathText = ""
    rate_bytes_per_s: Annotated[int, msgspec.Meta(ge=0, le=2**50)] = 0

    def __post_init__(self) -> None:
        """A limit is none at all or large enough to serve a range within a second."""
        if 0 < self.rate_bytes_per_s < RATE_BYTES_PER_S_MIN:
            raise ValueError(
                f"rate_bytes_per_s is {self.rate_bytes_per_s}: use 0 for no limit, or at least "
                f"{RATE_BYTES_PER_S_MIN}"
            )


def load(path: Path | None, overrides: Mapping[str, object | None]) -> BankServiceConfig:
    """Read and check the settings; `overrides` that are None were not given.

    Without `path` the file is /etc/k3/banks.toml and may be missing; a `path` must exist. Relative
    paths in the file count from its folder. Raises ConfigError.
    """
    file = path or CONFIG_FILE
    written = read_settings(file, must_exist=path is not None)
    given = {field: value for field, value in overrides.items() if value is not None}
    try:
        config = msgspec.convert(written, BankServiceConfig)
        config = msgspec.convert({**_absolute(config, file.parent), **given}, BankServiceConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {error}; see docs/operator.md for the settings") from error
    check_listen_address(config.address, allow_remote=config.allow_remote, setting="allow_remote")
    if config.checkpoint and not Path(config.checkpoint).is_dir():
        raise ConfigError(
            f"{file}: checkpoint {config.checkpoint} is not a folder: name the folder that holds "
            "config.json, or leave the setting out"
        )
    return config


def _absolute(config: BankServiceConfig, base: Path) -> dict[str, object]:
    values: dict[str, object] = msgspec.structs.asdict(config)
    for field in ("secret_key", "allow_list"):
        values[field] = str(base / getattr(config, field))
    if config.checkpoint:
        values["checkpoint"] = str(base / config.checkpoint)
    values["folders"] = tuple(str(base / folder) for folder in config.folders)
    return values
