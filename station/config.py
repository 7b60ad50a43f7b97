"""The Station's settings: one TOML file, checked whole before anything starts."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from shared.core.errors import ConfigError
from shared.core.names import OptionalPathText, PathText
from shared.kernels.select import KernelName, KernelThreads
from station.admission import Limits
from station.deadline import DeadlinePolicy
from station.expert_path import OnMiss

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class RingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size of the rings a lease gets."""

    slots: Annotated[int, msgspec.Meta(ge=1, le=64)] = 16  # as in RingShape
    max_rows: Annotated[int, msgspec.Meta(ge=64, le=65535)] = 512
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 64


class StationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`k3-station`'s settings; paths are absolute or relative to the file."""

    checkpoint: PathText
    placement: PathText
    secret_key: PathText = "/etc/k3/keys/station.key_secret"  # noqa: S105 - a path
    allow_list: PathText = "/etc/k3/keys/nodes"
    control_address: str = "tcp://127.0.0.1:8381"
    allow_remote_control: bool = False
    http_host: str = "127.0.0.1"
    http_port: Port = 8380
    http_token_file: OptionalPathText = ""
    model_name: str = "kimi-k3"
    state_directory: PathText = "/var/lib/k3/station"
    on_miss: OnMiss = "exact"
    deadline: DeadlinePolicy = DeadlinePolicy()
    limits: Limits = Limits()
    ring: RingSettings = RingSettings()
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    kernel: KernelName = "auto"
    kernel_threads: KernelThreads = 1
    torch_threads: Annotated[int, msgspec.Meta(ge=1, le=512)] = 1
    spin_us: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    cold_records: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 64


def load(path: Path) -> StationConfig:
    """Read and check a settings file; ConfigError names file, field and remedy."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot read the Station's settings: {error.strerror}; "
            "give another path with --config, or make one with `k3 pod init`"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}; correct that line") from error
    try:
        config = msgspec.convert(data, StationConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}; see docs/operator.md for the settings") from error
    return _absolute(config, path.parent)


def _absolute(config: StationConfig, base: Path) -> StationConfig:
    fields = ("checkpoint", "placement", "secret_key", "allow_list", "state_directory")
    changes = {name: str(base / getattr(config, name)) for name in fields}
    if config.http_token_file:
        changes["http_token_file"] = str(base / config.http_token_file)
    return msgspec.structs.replace(config, **changes)
