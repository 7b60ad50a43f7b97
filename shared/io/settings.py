"""Settings files: one TOML table, read whole and bounded.

Owns the words about a file that is missing, unreadable, too large or not TOML. Must not know what
the settings mean.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from shared.core.errors import ConfigError

_FILE_BYTES_MAX: Final = 64 * 1024


def read_settings(file: Path, *, must_exist: bool) -> dict[str, object]:
    """The table in `file`, empty for one that may be missing; ConfigError names file and remedy."""
    try:
        with file.open("rb") as stream:
            data = stream.read(_FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        if must_exist:
            raise ConfigError(f"settings file {file} does not exist: correct --config") from None
        return {}
    except OSError as error:
        raise ConfigError(
            f"cannot read settings file {file}: {error.strerror}: make it readable for this user"
        ) from error
    if len(data) > _FILE_BYTES_MAX:
        raise ConfigError(f"settings file {file} is larger than {_FILE_BYTES_MAX} bytes")
    try:
        return msgspec.toml.decode(data, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"settings file {file} is not TOML: {error}; correct it") from error
