"""`k3 plan`: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from services.banks.builder import build
from services.cli import k3
from services.routing.trace import SYNTHETIC
from shared.core import placement as placements
from shared.io.bank_file import BankFile
from station.model.checkpoint import Checkpoint
from tests.support.tiny_checkpoint import write_tiny_checkpoint

POD = """
name = "tiny"
token = { serial_us = 400.0, serial_basis = "assumed", rest_ms = 1.8, rest_basis = "assumed" }
[[nodes]]
name = "hbm"
tier = "hbm"
memory = "200 B"
memory_basis = "measured"
ceiling = "HBM B"
cost = { fixed_us = 0.0, fixed_basis = "assumed", per_expert_us = 8.0, per_expert_basis = "fitted" }
[[nodes]]
name = "spark"
count = 2
tier = "spark"
memory = "1 MiB"
memory_basis = "measured"
layer_experts_max = 4
cost = { fixed_us = 184.5, fixed_basis = "measured", per_expert_us = 84.5, per_expert_basis = "measured" }
"""  # noqa: E501


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(k3, ["plan", *(str(argument) for argument in arguments)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint of 4 x 8 experts."""
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    write_tiny_checkpoint(folder, seed=1, layers=5, experts=8, latent=32, width=32)
    return folder


@pytest.fixture
def pod(tmp_path: Path, model: Path) -> Path:
    """A pod with room for ten experts at the Station and a few too many on two Sparks."""
    with Checkpoint.open(model) as checkpoint:
        record = checkpoint.layout.record_bytes
    path = tmp_path / "pod.toml"
    text = POD.replace("200 B", f"{10 * record} B").replace('ceiling = "HBM B"\n', "")
    path.write_text(text.replace("1 MiB", f"{13 * record} B"))
    return path


def test_the_plans_pod_is_compared_with_its_published_figures() -> None:
    """The must-show: ledger and four policies beside the plan's figures, and what that proves."""
    answer = run(
        "--pod", "k3-home-pod.toml", "--synth", "1", "--tokens", "300", "--requests", "8",
        "--policy", "cost-ranked", "--holdout", "0.25",
    )  # fmt: skip

    assert answer.exit_code == 0, answer.output
    assert "85,219 slots (1,474.6 GiB)" in answer.output
    assert "2,787 spare (48.2 GiB)" in answer.output
    assert answer.output.count("does not follow") == 2
    assert "8 x 5,704" in answer.output
    assert "feed rack strip: 1,217 W at duty" in answer.output
    line = next(line for line in answer.output.splitlines() if line.startswith("cost-ranked"))
    assert "27.7" in line
    assert line.rstrip().endswith("fitted")
    assert "agreement is by construction" in answer.output
    assert "73% published" in answer.output
    assert "tok/s agree by construction" in answer.output


def test_one_policy_is_written_checked_and_fit_for_banks(
    tmp_path: Path, model: Path, pod: Path
) -> None:
    """The file is a placement of this checkpoint from which a bank can be built; report beside."""
    out = tmp_path / "placement.json"
    answer = run(
        "--pod", pod, "--checkpoint", model, "--policy", "cost-ranked", "--synth", "3",
        "--tokens", "60", "--requests", "4", "--out", out, "--json",
    )  # fmt: skip

    assert answer.exit_code == 0, answer.output
    printed = json.loads(answer.stdout)
    assert json.loads((tmp_path / "placement.report.json").read_text()) == printed
    placement = placements.decode(out.read_bytes(), source="out")
    assert [len(node.rows) for node in placement.nodes] == [10, 11, 11]
    assert placement.policy == "cost-ranked"
    assert placement.trace_digest == printed["trace"]["digest"]
    assert printed["trace"]["model_digest"] == SYNTHETIC
    [policy] = printed["policies"]
    assert policy["experts"] == {"hbm": 10, "spark0": 11, "spark1": 11}
    assert policy["in_sample"]["expert_path_ms"] > 0
    with Checkpoint.open(model) as checkpoint:
        assert placement.model_digest == checkpoint.digest
        build(checkpoint, placement, "spark1", tmp_path / "spark1.k3bank")
    with BankFile.open(tmp_path / "spark1.k3bank") as bank:
        assert bank.header.rows == placement.node("spark1").bank_rows

    again = run(
        "--pod", pod, "--checkpoint", model, "--policy", "cost-ranked", "--synth", "3",
        "--tokens", "60", "--requests", "4", "--out", out,
    )  # fmt: skip
    assert again.exit_code == 0
    assert placements.decode(out.read_bytes(), source="out").digest == placement.digest


def test_held_out_requests_are_not_planned_on(model: Path, pod: Path) -> None:
    """Tokens and requests of the two parts add up, and both are scored."""
    answer = run(
        "--pod", pod, "--checkpoint", model, "--tokens", "80", "--requests", "8",
        "--policy", "global", "--holdout", "0.25", "--json",
    )  # fmt: skip

    [policy] = json.loads(answer.stdout)["policies"]
    inside, outside = policy["in_sample"], policy["held_out"]
    assert inside["tokens"] + outside["tokens"] == 80
    assert inside["requests"] + outside["requests"] == 8
    assert inside["tokens"] > outside["tokens"] > 0
    assert outside["ci95_ms"][0] <= outside["expert_path_ms"] <= outside["ci95_ms"][1]


def test_measured_comes_with_its_proof(model: Path, pod: Path) -> None:
    """The search, the paired gain on requests kept out, the bound and what a slot is worth."""
    answer = run(
        "--pod", pod, "--checkpoint", model, "--tokens", "80", "--requests", "8",
        "--holdout", "0.25", "--budget-s", "1", "--json",
    )  # fmt: skip

    assert answer.exit_code == 0, answer.output
    report = json.loads(answer.stdout)
    assert [policy["policy"] for policy in report["policies"]] == [
        "contiguous", "global", "layer-balanced", "cost-ranked", "measured",
    ]  # fmt: skip
    measured, ranked = report["policies"][-1], report["policies"][-2]
    assert measured["search"]["budget_s"] == 1.0
    assert measured["in_sample"]["expert_path_ms"] <= ranked["in_sample"]["expert_path_ms"] + 1e-9
    gain = 1 - measured["held_out"]["expert_path_ms"] / ranked["held_out"]["expert_path_ms"]
    assert report["held_out_gain"]["gain"] == pytest.approx(gain)
    assert report["bound"]["expert_path_ms"] <= ranked["in_sample"]["expert_path_ms"]
    assert [value["tier"] for value in report["slot_values"]] == ["hbm", "spark"]


def usage(*arguments: str | Path) -> tuple[str, ...]:
    return tuple(map(str, arguments))


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (usage("--pod", "k3-home-pod", "--out", "p.json"), 2, "choose its --policy"),
        (
            usage("--pod", "k3-home-pod", "--out", "p.json", "--policy", "global", "--tokens", "9",
                  "--requests", "3"),
            2,
            "give --checkpoint",
        ),
        (usage("--pod", "k3-home-pod", "--trace", "t", "--synth", "1"), 2, "not both"),
        (usage("--pod", "k3-home-pod", "--holdout", "1"), 2, "holdout"),
        (usage("--pod", "k3-home-pod", "--holdout", "nan"), 2, "holdout"),
        (usage("--pod", "none.toml"), 78, r"error[pod_invalid]: none.toml: no such file"),
        (usage("--pod", "embedded"), 78, "error[pod_invalid]: pod embedded cannot hold the model"),
        (usage("--pod", "k3-home-pod", "--trace", "none.k3trace"), 78, "error[trace_invalid]"),
        (usage("--pod", "k3-home-pod", "--checkpoint", "none"), 78, "error[checkpoint_invalid]"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line_and_its_own_status(
    arguments: tuple[str, ...], status: int, said: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Usage is 2, what a person has to change is 78; nothing is written."""
    monkeypatch.chdir(tmp_path)
    answer = run(*arguments)

    assert answer.exit_code == status, answer.output
    assert said in answer.output
    assert list(tmp_path.iterdir()) == []


def test_a_plan_beyond_a_feed_is_refused(tmp_path: Path, model: Path, pod: Path) -> None:
    """Case H2: both Sparks hold experts, so both may draw their worst; nothing is written."""
    power = 'power = { feed = "strip", idle_w = 40, busy_w = 90, worst_w = 101, basis = "assumed" }'
    feed = '[[feeds]]\nname = "strip"\ncontinuous_w = 200\nbasis = "measured"\n'
    pod.write_text(f"{pod.read_text()}{power}\n{feed}")
    answer = run(
        "--pod", pod, "--checkpoint", model, "--policy", "global", "--tokens", "20",
        "--requests", "2", "--out", tmp_path / "placement.json",
    )  # fmt: skip

    assert answer.exit_code == 78
    assert "'strip' carries 200 W, the worst case of this placement is 202 W" in answer.output
    assert list(tmp_path.iterdir()) == [pod]


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, model: Path, pod: Path) -> None:
    """The placement's folder is a file."""
    answer = run(
        "--pod", pod, "--checkpoint", model, "--policy", "global", "--tokens", "20",
        "--requests", "2", "--out", pod / "placement.json",
    )  # fmt: skip
    assert answer.exit_code == 78
    assert "cannot write" in answer.output
