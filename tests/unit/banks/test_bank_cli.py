"""`k3 bank`: what it prints and how it ends."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from services.cli import k3
from shared.core import placement as placements
from shared.io.bank_file import BankFile
from station.model.checkpoint import Checkpoint
from tests.support.tiny_checkpoint import write_tiny_checkpoint


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(k3, ["bank", *(str(argument) for argument in arguments)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint and a placement beside it."""
    folder = tmp_path_factory.mktemp("model")
    write_tiny_checkpoint(folder / "checkpoint", seed=1, layers=2, experts=4, latent=32, width=32)
    with Checkpoint.open(folder / "checkpoint") as checkpoint:
        plan = placements.balanced(
            checkpoint.digest,
            checkpoint.config.shape,
            [("spark0", "spark", 1.0), ("spark1", "spark", 1.0)],
        )
    (folder / "placement.json").write_bytes(placements.encode(plan))
    return folder


def build_arguments(model: Path, out: Path, node: str = "spark1") -> list[str | Path]:
    return [
        "build", "--checkpoint", model / "checkpoint", "--placement", model / "placement.json",
        "--node", node, "--out", out,
    ]  # fmt: skip


def test_build_then_verify_then_show(model: Path, tmp_path: Path) -> None:
    """The commands fit together; no bar and no escape code when nobody watches."""
    out = tmp_path / "spark1.k3bank"
    built = run(*build_arguments(model, out))
    assert built.exit_code == 0, built.output
    with BankFile.open(out) as opened:
        digest = opened.digest
    assert f"2 experts of {opened.layout.record_bytes} bytes for node spark1" in built.output
    assert digest in built.output
    assert "\x1b" not in built.output

    verified = run("verify", out)
    assert verified.exit_code == 0
    assert "intact" in verified.output

    facts = json.loads(run("show", "--json", out).output)
    assert facts["digest"] == digest
    assert facts["records"] == 2
    assert facts["file_bytes"] == out.stat().st_size
    assert facts["node"] == "spark1"
    assert digest in run("show", out).output


def test_damage_ends_with_78(bank_path: Path) -> None:
    """Every damaged record is listed, the summary counts them, the status is EX_CONFIG."""
    with BankFile.open(bank_path) as opened:
        offset, stride = opened.records_offset, opened.layout.stride_bytes
    with bank_path.open("r+b") as file:
        for row in (2, 5):
            file.seek(offset + row * stride + 7)
            file.write(b"\xee\xee\xee")
    result = run("verify", bank_path)
    assert result.exit_code == 78
    assert "row 2 (layer 2, expert 9): the bytes of w1.weight changed" in result.output
    assert "row 5 " in result.output
    assert "2 of 12 records are damaged" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", [["show"], ["show", "--json"], ["verify"]])
def test_foreign_file_ends_with_78(tmp_path: Path, command: list[str]) -> None:
    """One line that says what and why."""
    foreign = tmp_path / "x.k3bank"
    foreign.write_bytes(b"{}" * 4096)
    result = run(*command, foreign)
    assert result.exit_code == 78
    assert result.output.count("\n") == 1
    assert "is not the magic of a bank file" in result.output


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"--node": "spark7"}, "no node 'spark7'"),
        ({"--placement": "/nowhere.json"}, "/nowhere.json: cannot read the placement"),
        ({"--checkpoint": "/nowhere"}, "/nowhere"),
    ],
)
def test_unsuitable_input_ends_with_78(
    model: Path, tmp_path: Path, change: dict[str, str], named: str
) -> None:
    """A missing or wrong part is named and nothing is written."""
    out = tmp_path / "spark1.k3bank"
    arguments = build_arguments(model, out)
    for option, value in change.items():
        arguments[arguments.index(option) + 1] = value
    result = run(*arguments)
    assert result.exit_code == 78, result.output
    assert named in result.output
    assert os.listdir(tmp_path) == []


def test_a_placement_without_end_is_refused(tmp_path: Path) -> None:
    """Nothing is read beyond the largest placement there can be."""
    endless = tmp_path / "placement.json"
    with endless.open("wb") as file:
        file.truncate(placements.FILE_BYTES_MAX + 1)
    result = run("plan", "--placement", endless)
    assert result.exit_code == 78
    assert f"{endless}: cannot read the placement: more than 67108864 bytes" in result.output


def test_existing_file_needs_replace(model: Path, tmp_path: Path) -> None:
    """The second build is refused, and done when asked for."""
    out = tmp_path / "spark1.k3bank"
    assert run(*build_arguments(model, out)).exit_code == 0
    refused = run(*build_arguments(model, out))
    assert refused.exit_code == 78
    assert "exists already" in refused.output
    assert run(*build_arguments(model, out), "--replace").exit_code == 0


def test_wrong_usage_ends_with_2_and_help_shows_an_example() -> None:
    """click's own statuses stay, and every command can be learned from --help."""
    assert run("build", "--node", "x").exit_code == 2
    assert run("nonsense").exit_code == 2
    for command in ([], ["verify"], ["show"]):
        shown = run(*command, "--help")
        assert shown.exit_code == 0
        assert "Example: k3 bank" in shown.output
