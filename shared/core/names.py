"""Identifiers that cross a process border, and the alphabets they are limited to."""

from __future__ import annotations

import re
from typing import Annotated, Final, TypeAlias

import msgspec

from shared.core.errors import ConfigError

# \Z, not $: $ also matches before a trailing newline
NAME_PATTERN: Final = r"^(?!.*\.\.)[a-z0-9][a-z0-9_.-]{0,63}\Z"
NodeName: TypeAlias = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
# in settings: no operating system takes a NUL
_NO_NUL: Final = msgspec.Meta(max_length=4096, pattern=r"^[^\0]*\Z")
PathText: TypeAlias = Annotated[str, _NO_NUL, msgspec.Meta(min_length=1)]
OptionalPathText: TypeAlias = Annotated[str, _NO_NUL]  # "": none
_NAME: Final = re.compile(NAME_PATTERN)


def checked_name(name: str, *, kind: str) -> str:
    """Return `name` when it is safe as a file and node name, else raise ConfigError.

    The alphabet has no separator and `..` is refused, so a name can never leave its folder.
    """
    if not _NAME.match(name):
        raise ConfigError(
            f"{kind} name {name!r} is not allowed: use 1 to 64 of a-z, 0-9, '_', '.', '-', "
            "starting with a letter or digit and without '..'"
        )
    return name
