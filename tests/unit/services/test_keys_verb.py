"""`k3 keys`: making identities and admitting nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services import cli
from shared.io import keys

Capture = pytest.CaptureFixture[str]


def test_from_a_new_key_to_an_admitted_node(tmp_path: Path, capsys: Capture) -> None:
    """new, allow and list fit together, and the Station's own loader sees the node."""
    node, station = tmp_path / "node", tmp_path / "station" / "nodes"

    assert cli.run(["keys", "new", "spark0", "--dir", str(node)]) == 0
    shown = capsys.readouterr().out
    public = str(node / "spark0.key")
    assert cli.run(["keys", "allow", public, "--allow-list", str(station)]) == 0
    assert cli.run(["keys", "allow", public, "--allow-list", str(station)]) == 0  # again: the same
    capsys.readouterr()
    assert cli.run(["keys", "list", "--json", "--allow-list", str(station)]) == 0

    pair = keys.load_secret(node / "spark0.key_secret")
    assert json.loads(capsys.readouterr().out) == {"spark0": pair.public}
    assert pair.public in shown
    assert pair.secret not in shown
    assert dict(keys.load_allow_list(station)) == {pair.public: "spark0"}


def test_an_identity_is_never_replaced_by_accident(tmp_path: Path, capsys: Capture) -> None:
    """`new` twice is status 78, and the first key stays."""
    assert cli.run(["keys", "new", "a", "--dir", str(tmp_path)]) == 0
    before = (tmp_path / "a.key_secret").read_bytes()

    assert cli.run(["keys", "new", "a", "--dir", str(tmp_path)]) == 78
    assert "already exists" in capsys.readouterr().err
    assert (tmp_path / "a.key_secret").read_bytes() == before


@pytest.mark.parametrize(
    ("file", "name", "text"),
    [
        ("other.key_secret", "spark1", "holds a secret key"),
        ("other.key", "spark0", "holds another key of spark0"),
        ("spark0.key", "spark1", "already admits this key as 'spark0'"),
        ("missing.key", None, "cannot read key file"),
        ("other.key", "../x", "is not allowed"),
    ],
)
def test_what_is_not_admitted(
    tmp_path: Path, capsys: Capture, file: str, name: str | None, text: str
) -> None:
    """One error each, status 78, and the list stays as it is."""
    allowed = tmp_path / "nodes"
    for made in ("spark0", "other"):
        keys.create(tmp_path, made)
    assert (
        cli.run(["keys", "allow", str(tmp_path / "spark0.key"), "--allow-list", str(allowed)]) == 0
    )
    before = dict(keys.load_allow_list(allowed))
    named = [] if name is None else ["--name", name]

    answer = cli.run(["keys", "allow", str(tmp_path / file), "--allow-list", str(allowed), *named])

    assert answer == 78
    assert text in capsys.readouterr().err
    assert dict(keys.load_allow_list(allowed)) == before
