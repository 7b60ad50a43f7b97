"""Names that become file names and wire identities."""

from __future__ import annotations

import msgspec
import pytest

from shared.core.errors import ConfigError
from shared.core.names import NodeName, checked_name

GOOD = ["a", "spark0", "0", "grace_1", "a.b-c", "x" * 64]
BAD = ["", "A", ".a", "-a", "a/b", "..", "a..b", "a\n", "a\0", "x" * 65, "ä", "a b"]


@pytest.mark.parametrize("name", GOOD)
def test_good_names_pass_unchanged(name: str) -> None:
    """A name in the alphabet is returned as it is."""
    assert name == checked_name(name, kind="node")


@pytest.mark.parametrize("name", BAD)
def test_bad_names_are_refused_everywhere(name: str) -> None:
    """What a file may not be called, a message may not carry either (one alphabet)."""
    with pytest.raises(ConfigError, match="node name"):
        checked_name(name, kind="node")
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(name, NodeName)
