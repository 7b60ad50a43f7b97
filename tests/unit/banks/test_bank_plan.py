"""The dry run: the published figures of K3, and the plain split by value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from services.banks.builder import build
from services.banks.plan import bank_plan, plain_split
from services.cli import k3, run
from shared.core import placement as placements
from shared.core.errors import PlacementError
from shared.core.placement import Placement
from shared.core.shape import K3, ExpertShape, ModelShape
from shared.io.bank_file import blake3_digest
from tests.unit.banks.conftest import SHAPE, RandomExperts


def test_eight_sparks_are_planned_without_a_checkpoint() -> None:
    """plan-figures.md: 5,704 experts, 98.699 GiB, 17,112 reads a Spark; eight banks 847.8 GB."""
    options = ["--split", "plain", "--sparks", "8", "--shape", "k3", "--json"]
    result = CliRunner().invoke(k3, ["bank", "plan", *options])
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert [entry["node"] for entry in report["banks"]] == [f"spark{i}" for i in range(8)]
    for entry in report["banks"]:
        assert (entry["experts"], entry["reads"], entry["layers"]) == (5704, 17_112, 92)
        assert entry["payload_bytes"] == 5704 * 18_579_480 == 105_977_353_920
        assert f"{entry['payload_bytes'] / 2**30:.3f}" == "98.699"
    assert report["payload_bytes"] == 847_818_831_360


def test_plan_for_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    """The same figures as a table, through `k3` itself."""
    assert run(["bank", "plan", "--split", "plain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[4].split()[:4] == ["spark3", "5,704", "92", "98.699"]
    assert lines[4].split()[-2:] == ["17,112", "row-major"]
    assert lines[-1] == "8 banks: 45,632 experts, 847,818,831,360 bytes (847.8 GB)"


def test_plain_split_numbers_rows_by_layer_and_rank() -> None:
    """Row = layer x 62 + rank, layers from the first with experts; Spark s has ranks of 62 s on."""
    placement = plain_split("m", K3, 8)
    for spark in (0, 3, 7):
        rows = placement.node(f"spark{spark}").rows
        for layer, rank in ((1, 0), (1, 61), (2, 0), (92, 61)):
            assert rows[(layer - 1) * 62 + rank] == (layer, 62 * spark + rank)
    assert len(placement.node("hbm").rows) == 92 * (896 - 8 * 62)


@pytest.mark.parametrize(("experts", "sparks", "rest"), [(8, 2, 0), (9, 2, 92), (8, 8, 0)])
def test_small_models_are_split_evenly(experts: int, sparks: int, rest: int) -> None:
    """With room for everything each Spark gets its share; what does not divide stays behind."""
    shape = ModelShape(93, 1, experts, 2, ExpertShape(latent=32, width=32))
    placement = plain_split("m", shape, sparks)
    held = {node.name: len(node.rows) for node in placement.nodes}
    assert held.pop("hbm", 0) == rest
    assert set(held.values()) == {92 * (experts // sparks)}


def test_split_without_experts_is_refused() -> None:
    """More Sparks than experts, or a budget below one expert a layer."""
    with pytest.raises(PlacementError, match=r"9 Sparks .* cannot hold one of 8 experts"):
        plain_split("m", ModelShape(3, 1, 8, 2, ExpertShape(latent=32, width=32)), 9)
    with pytest.raises(PlacementError, match="use another number of Sparks"):
        plain_split("m", K3, 8, budget_bytes=2**30)


def test_planned_size_is_the_built_size(
    tmp_path: Path, source: RandomExperts, placement: Placement
) -> None:
    """To the byte, header and padding included."""
    path = tmp_path / "grace.k3bank"
    build(source, placement, "grace", path)
    plan = bank_plan(placement, placement.node("grace"), hasher=blake3_digest)
    assert path.stat().st_size == plan.file_bytes
    assert plan.payload_bytes == 12 * source.layout.record_bytes


def test_plan_of_a_placement_file(tmp_path: Path) -> None:
    """Every node with a bank, or the one asked for; the Station's own experts have none."""
    nodes = [("hbm", "hbm", 1.0), ("grace", "grace", 1.0), ("spark0", "spark", 2.0)]
    file = tmp_path / "placement.json"
    file.write_bytes(placements.encode(placements.balanced("m", SHAPE, nodes)))  # type: ignore[arg-type]
    shown = CliRunner().invoke(k3, ["bank", "plan", "--placement", str(file), "--json"])
    assert [b["node"] for b in json.loads(shown.output)["banks"]] == ["grace", "spark0"]
    one = CliRunner().invoke(k3, ["bank", "plan", "--placement", str(file), "--node", "spark0"])
    assert one.output.splitlines()[1].split()[:2] == ["spark0", "12"]


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        ([], 2, "give --placement FILE or --split plain"),
        (["--split", "plain", "--placement", "x"], 2, "not both"),
        (["--split", "plain", "--sparks", "0"], 2, "--sparks"),
        (["--split", "plain", "--node", "spark8"], 78, "no node 'spark8'"),
        (["--placement", "/nowhere"], 78, "/nowhere: cannot read the placement"),
    ],
)
def test_plans_that_cannot_be_made(arguments: list[str], status: int, named: str) -> None:
    """Wrong usage is 2, a wrong file or node 78; both say what."""
    result = CliRunner().invoke(k3, ["bank", "plan", *arguments])
    assert result.exit_code == status, result.output
    assert named in result.output
