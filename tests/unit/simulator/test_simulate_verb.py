"""`k3 simulate` on real files: its JSON, its tables and its exit statuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services import cli
from services.planner.assignment import Assignment
from services.planner.pod_file import read_pod
from services.routing.file import save
from shared.core import placement as placements
from tests.unit.routing.traces import SHAPE, meta_of, trace_of
from tests.unit.simulator.test_feed import status

POD = """
name = "small"
[token]
serial_us = 100.0
serial_basis = "assumed"
rest_ms = 0.2
rest_basis = "assumed"
[[nodes]]
name = "hbm"
tier = "hbm"
memory = "1 GiB"
memory_basis = "assumed"
cost = { fixed_us = 0.0, fixed_basis = "assumed", per_expert_us = 8.0, per_expert_basis = "assumed" }
[[nodes]]
name = "spark"
count = 2
tier = "spark"
memory = "1 GiB"
memory_basis = "assumed"
cost = { fixed_us = 184.5, fixed_basis = "measured", per_expert_us = 84.5, per_expert_basis = "measured" }
"""  # noqa: E501 - TOML has inline tables on one line


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A pod, a placement for it and a trace of the same model."""
    (tmp_path / "pod.toml").write_text(POD)
    trace = trace_of([30, 20])
    save(tmp_path / "in.k3trace", trace, meta_of(trace))
    pod = read_pod(str(tmp_path / "pod.toml"))
    home = np.arange(SHAPE.experts)[None].repeat(len(SHAPE.moe_layers), 0) % 3
    assignment = Assignment.without_copies(home, [home.size] * 3)
    placement = assignment.to_placement(
        pod, SHAPE, model_digest=trace.model_digest, policy="by hand", trace_digest=trace.digest
    )
    (tmp_path / "placement.json").write_bytes(placements.encode(placement))
    return tmp_path


def k3(files: Path, *arguments: object) -> int:
    """Exit status of one command line about the files."""
    given = ["--pod", files / "pod.toml", "--placement", files / "placement.json"]
    return cli.run(["simulate", *map(str, (*given, "--trace", files / "in.k3trace", *arguments))])


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON on stdout."""
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_one_run(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parts add up to the token, and a halved serial term is felt to the microsecond."""
    assert k3(files, "--json") == 0
    before = told(capsys)
    assert k3(files, "--json", "--serial-us", 50) == 0
    after = told(capsys)

    assert (before["pod"], before["policy"], before["phases"]) == ("small", "by hand", [])
    token_ms = before["outcome"]["token_ms"]["mean"]
    assert sum(before["outcome"]["parts_ms"].values()) == pytest.approx(token_ms)
    assert token_ms - after["outcome"]["token_ms"]["mean"] == pytest.approx(3 * 0.05, rel=0.02)

    assert k3(files) == 0
    text = capsys.readouterr().out
    assert "tok/s in all" in text
    assert "wait, slowest is a place of spark" in text


def test_a_lost_node_is_shown_in_phases(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before, while and after; the middle is slow."""
    assert k3(files, "--lose", "spark1@0.5", "--rehome-s", 1, "--json") == 0
    phases = told(capsys)["phases"]

    assert [phase["from_s"] for phase in phases] == [0.0, 0.5, 1.5]
    assert phases[1]["tokens_per_s"] < 0.5 * phases[0]["tokens_per_s"]
    assert phases[2]["tokens_per_s"] < phases[0]["tokens_per_s"]  # one Spark does the work of two


@pytest.mark.parametrize(
    ("option", "words"),
    [(["--what-decides"], "serial per layer"), (["--sweep", "sparks=1..4"], "no limit met up to 4"),
     (["--sweep", "lanes=1..64"], "limit: Station")],
)  # fmt: skip
def test_questions_have_tables(
    files: Path, option: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And an object for programs."""
    assert k3(files, *option, "--serial-us", 400) == 0
    assert words in capsys.readouterr().out
    assert k3(files, *option, "--json") == 0
    assert {"levers", "points"} & set(told(capsys))


def test_luck_makes_the_slowest_slower(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The mean of a hop stays, but a layer waits for the unluckiest of two."""
    assert k3(files, "--json") == 0
    even = told(capsys)["outcome"]
    assert k3(files, "--hop-spread", 3, "--json") == 0
    lucky = told(capsys)["outcome"]

    assert lucky["token_ms"]["mean"] > 1.02 * even["token_ms"]["mean"]
    assert lucky["token_ms"]["p99"] > 1.1 * even["token_ms"]["p99"]


def test_curves_of_a_status_file(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Spark measured at 30 + 20 k us is quicker than the described one."""
    (files / "status.json").write_text(json.dumps(status(2)))
    assert k3(files, "--json") == 0
    before = told(capsys)
    assert k3(files, "--curves", files / "status.json", "--json") == 0

    waits = told(capsys)["outcome"]["waits_ms"]
    assert sum(waits.values()) < 0.5 * sum(before["outcome"]["waits_ms"].values())


@pytest.mark.parametrize(
    ("arguments", "exit_status", "words"),
    [
        (["--lose", "spark9@1"], 78, "no place is called 'spark9'"),
        (["--lose", "hbm@1"], 78, "the Station's own memory"),
        (["--lose", "spark1"], 78, "write NODE@SECONDS"),
        (["--lose", "spark1@never"], 78, "write NODE@SECONDS"),
        (["--lose", "spark1@nan"], 78, "write NODE@SECONDS"),
        (["--streams", "2", "--lanes", "0"], 2, "--lanes"),
        (["--sweep", "dogs=1..2"], 78, "sweep 'dogs=1..2'"),
        (["--curves", "nowhere.json"], 78, "cannot be read"),
        (["--serial-us", "-1"], 2, "--serial-us"),
        (["--serial-us", "nan"], 2, "--serial-us"),
        (["--link-gbit", "nan"], 2, "--link-gbit"),
        (["--seed", "-1"], 2, "--seed"),
        (["--synth", "-1"], 2, "--synth"),
        (["--lose", "spark1@1", "--lose", "spark1@2"], 78, "spark1 is lost twice"),
        (["--lose", "spark1@3601"], 78, "at most 3600 s"),
        (["--lose", "spark1@1", "--tokens", "9"], 2, "leave out --tokens"),
        (["--arrivals", "1"], 2, "--arrivals needs --answer"),
        (["--arrivals", "1e-9", "--answer", "2"], 78, "no token came to its end"),
        (["--arrivals", "1e-9", "--answer", "2", "--what-decides"], 78, "no token came to its end"),
        (["--sweep", "lanes=1.." + "9" * 5000], 78, "sweep 'lanes="),
        (["--url", "http://127.0.0.1:1"], 2, "--url is a pod of its own"),
        (["--placement", "nowhere.json"], 78, "cannot be read"),
        (["--what-decides", "--lose", "spark1@1"], 2, "give one of --sweep"),
    ],
)
def test_what_cannot_be_simulated(
    files: Path,
    arguments: list[str],
    exit_status: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line that says what is wrong."""
    assert k3(files, *arguments) == exit_status
    captured = capsys.readouterr()
    assert words in captured.err
    assert not captured.out


def test_no_pod_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a description nor an address."""
    assert cli.run(["simulate"]) == 78
    assert "--pod k3-home-pod.toml" in capsys.readouterr().err


def test_a_placement_of_other_nodes(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The pod must have the nodes of the placement."""
    other = files / "pod.toml"
    other.write_text(POD.replace("count = 2", "count = 1"))

    assert k3(files) == 78
    assert "spark1" in capsys.readouterr().err
