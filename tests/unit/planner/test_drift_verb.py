"""`k3 plan drift` as a person runs it: real files, exit statuses, what it prints and writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from services import cli
from services.planner import policies, proposal
from services.planner.drift_report import DriftReport
from services.planner.moves import apply_moves
from services.routing.file import save
from services.routing.format import TraceMeta
from services.routing.histogram import Histogram
from services.routing.trace import Trace
from shared.core import placement as placements
from shared.core.placement import Placement
from tests.unit.planner.small import RECORD_BYTES, routing, usual_pod

LAYERS, EXPERTS = 4, 24
POD = """
name = "small"
[token]
serial_us = 400.0
serial_basis = "assumed"
rest_ms = 1.8
rest_basis = "assumed"
"""
NODE = """
[[nodes]]
name = "{name}"
tier = "{tier}"
memory = "{memory} B"
memory_basis = "assumed"
{bound}
[nodes.cost]
fixed_us = {fixed}
fixed_basis = "assumed"
per_expert_us = {slope}
per_expert_basis = "assumed"
"""


@dataclass(frozen=True)
class Place:
    """A folder with a pod, a placement, and the routing it was planned on."""

    folder: Path
    plan: Trace
    placement: Placement

    def run(self, *more: str, plan: str = "plan.k3trace", live: str = "live.k3trace") -> int:
        """Run the verb; names of files are relative to the folder."""
        files = {"--pod": "pod.toml", "--placement": "placement.json"}
        files["--plan-histogram" if plan.endswith("json") else "--plan-trace"] = plan
        files["--live-histogram" if live.endswith("json") else "--live"] = live
        given = [text for key, name in files.items() for text in (key, str(self.folder / name))]
        return cli.run(["plan", "drift", *given, "--min-gain-ms", "0.001", *more])


def write_trace(path: Path, trace: Trace) -> None:
    """A trace file, and its histogram beside it."""
    meta = TraceMeta(
        model_digest=trace.model_digest,
        first_layer=trace.first_layer,
        layers=trace.layers,
        experts=trace.experts,
        top_k=trace.top_k,
        source="synthetic",
        recording="0" * 16,
        created_s=0,
    )
    save(path, trace, meta)
    path.with_suffix(".json").write_bytes(msgspec.json.encode(Histogram.of(trace)))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Planned on one workload; live.k3trace is another one, same.k3trace the same."""
    pod, ledger, shape = usual_pod(LAYERS, EXPERTS)
    nodes = "".join(
        NODE.format(
            name=node.name,
            tier=node.tier,
            memory=node.memory_bytes,
            bound=f"layer_experts_max = {node.layer_experts_max}" if node.layer_experts_max else "",
            fixed=node.fixed_us,
            slope=node.per_expert_us,
        )
        for node in pod.nodes
    )
    (tmp_path / "pod.toml").write_text(POD + nodes)
    plan, live = (routing(shape, tokens=300, requests=10, seed=seed) for seed in (1, 2))
    write_trace(tmp_path / "plan.k3trace", plan)
    write_trace(tmp_path / "live.k3trace", live)
    assignment = policies.plan("cost-ranked", plan.histogram(), pod, ledger)
    placement = assignment.to_placement(
        pod, shape, model_digest="m" * 32, policy="cost-ranked", trace_digest=plan.digest
    )
    (tmp_path / "placement.json").write_bytes(placements.encode(placement))
    return Place(tmp_path, plan, placement)


def assert_moves_lead_there(place: Place, out: Path, policy: str) -> None:
    """The written moves, carried out on the old placement, give the written new one."""
    proposed = proposal.decode(out.read_bytes(), source="moves")
    beside = out.with_suffix(".placement.json")
    moved_to = placements.decode(beside.read_bytes(), source="new")
    assert (proposed.policy, moved_to.policy) == (policy, policy)
    assert proposed.old_placement == place.placement.digest
    assert proposed.new_placement == moved_to.digest
    assert proposed.record_bytes == RECORD_BYTES
    has = {node.name: set(node.bank_rows) for node in place.placement.nodes}
    list(apply_moves(has, proposed.plan.moves))
    assert has == {node.name: set(node.bank_rows) for node in moved_to.nodes}


def test_drift_alerts_and_writes_moves(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1 with --check; the moves lead from the old placement file to the new one."""
    out = place.folder / "moves.json"

    assert place.run("--check", "--out", str(out)) == 1

    said = capsys.readouterr().out
    assert "ALERT" in said
    assert "verdict: re-plan" in said
    assert_moves_lead_there(place, out, "cost-ranked")


def test_the_same_routing_is_silent(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """P2 and P6: status 0, zero moves, no file."""
    out = place.folder / "moves.json"

    assert place.run("--check", "--max-worse", "0", "--out", str(out), live="plan.k3trace") == 0

    captured = capsys.readouterr()
    assert "verdict: keep the placement, 0 moves" in captured.out
    assert "ALERT" not in captured.out
    assert "not written" in captured.err
    assert not out.exists()


def test_histograms_do_when_there_is_no_trace(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both sides are then predicted on fitted routing; the same histogram still moves nothing."""
    assert place.run("--check", "--json", live="live.json") == 1
    report = msgspec.json.decode(capsys.readouterr().out, type=DriftReport)
    assert place.run("--check", "--json", plan="plan.json", live="plan.json") == 0
    same = msgspec.json.decode(capsys.readouterr().out, type=DriftReport)

    assert any("fitted to the histograms" in note for note in report.notes)
    assert report.moves > 0
    assert same.routing.is_identical
    assert same.moves == 0


def test_a_plan_by_search_is_possible(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """--policy measured makes the new plan; its moves conserve experts like any other."""
    out = place.folder / "moves.json"

    assert place.run("--policy", "measured", "--budget-s", "1", "--out", str(out)) == 0

    assert "new plan (measured)" in capsys.readouterr().out
    assert_moves_lead_there(place, out, "measured")


def spoil_pod(place: Place) -> None:
    """A pod with another node."""
    pod = place.folder / "pod.toml"
    pod.write_text(pod.read_text().replace('"spark1"', '"spark7"'))


def spoil_trace(place: Place) -> None:
    """Routing of a model with fewer experts."""
    shape = usual_pod(LAYERS, EXPERTS - 4)[2]
    write_trace(place.folder / "live.k3trace", routing(shape))


def spoil_histogram(place: Place) -> None:
    """A histogram of another model."""
    counted = Histogram.of(place.plan)
    other = msgspec.structs.replace(counted, model_digest="other")
    (place.folder / "live.json").write_bytes(msgspec.json.encode(other))


def spoil_placement(place: Place) -> None:
    """One digit of the placement changed."""
    path = place.folder / "placement.json"
    path.write_bytes(path.read_bytes().replace(b"cost-ranked", b"cost-rankee", 1))


@pytest.mark.parametrize(
    ("spoil", "live", "words"),
    [
        (spoil_pod, "live.k3trace", "give the pod description that the placement was made for"),
        (spoil_trace, "live.k3trace", "give a trace of this model"),
        (spoil_histogram, "live.json", "give one of this model"),
        (spoil_placement, "live.k3trace", "damaged"),
    ],
)
def test_wrong_files_are_one_error(
    place: Place,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Place], None],
    live: str,
    words: str,
) -> None:
    """Status 78, one line that says what to give instead."""
    spoil(place)

    assert place.run(live=live) == 78

    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_placement_without_an_end_is_refused(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """A device is read up to a bound, not until memory is full."""
    path = place.folder / "placement.json"
    path.unlink()
    path.symlink_to("/dev/zero")

    assert place.run() == 78

    assert "more than 67108864 bytes" in capsys.readouterr().err


def test_other_routing_than_was_planned_on_is_refused(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """A verdict against the wrong routing would be worth nothing; a split explains itself."""
    assert place.run(plan="live.k3trace") == 78

    assert "k3 trace split" in capsys.readouterr().err


def test_a_placement_without_routing_says_so(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """`k3 pod init` plans without routing: what is given is taken on trust, the policy is asked."""
    plain = msgspec.structs.replace(place.placement, trace_digest="", policy="balanced")
    (place.folder / "placement.json").write_bytes(placements.encode(plain))

    assert place.run() == 2
    assert "choose a --policy" in capsys.readouterr().err
    assert place.run("--policy", "cost-ranked") == 0
    assert "taken on trust" in capsys.readouterr().out


def test_one_side_given_twice_or_not_at_all(place: Place) -> None:
    """Wrong usage is status 2."""
    assert place.run("--live-histogram", str(place.folder / "live.json")) == 2
    assert cli.run(["plan", "drift", "--pod", "x", "--placement", "y", "--live", "z"]) == 2


def test_help_names_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    """`k3 plan --help` says that there is more, and `k3 plan drift --help` what."""
    assert cli.run(["plan", "--help"]) == 0
    assert "drift" in capsys.readouterr().out
    assert cli.run(["plan", "drift", "--help"]) == 0
    assert "k3 plan drift" in capsys.readouterr().out
