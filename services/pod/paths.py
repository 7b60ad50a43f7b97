"""Default places: the state folder and the demonstration checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import services
from shared.core.errors import ConfigError


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """$XDG_STATE_HOME/k3/embedded, or ~/.local/state/k3/embedded; ConfigError without a home."""
    base = Path(environ.get("XDG_STATE_HOME", ""))
    if not base.is_absolute():  # the XDG specification says to ignore a relative one
        try:
            base = Path.home() / ".local" / "state"
        except RuntimeError as error:
            raise ConfigError(
                "this user has no home directory for the pod's state: set HOME or give --state-dir"
            ) from error
    return base / "k3" / "embedded"


def default_checkpoint() -> Path:
    """The demonstration model that ships with the project."""
    return Path(services.__file__).parent / "demo_model" / "checkpoint"
