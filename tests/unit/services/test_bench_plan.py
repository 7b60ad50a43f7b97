"""`k3 bench plan` on a small pod and model: every figure is there and means what it says."""

from __future__ import annotations

import pytest

from services import cli
from services.bench.plan_bench import PlanBench
from tests.unit.planner.small import usual_pod


def test_a_small_pod_is_measured_whole() -> None:
    """Two seeds: gains with intervals and without targets, policies, bound, objective, slots."""
    pod, _, shape = usual_pod(layers=3, experts=32)
    bench = PlanBench(seeds=2, budget_s=2.0, tokens=200, requests=12, pod=pod, shape=shape)

    report = bench.run()

    figures = {figure.name: figure for figure in report.figures}
    values = {name: figure.value for name, figure in figures.items()}
    assert figures["plan.policy_s_max"].target == 2.0
    for what in ("heldout", "shifted"):
        low, high = (values[f"plan.{what}.ci95_{end}"] for end in ("low", "high"))
        assert low <= values[f"plan.{what}.gain_vs_cost_ranked"] <= high
        assert values[f"plan.{what}.ci95"] == pytest.approx((high - low) / 2)
        least = values[f"plan.{what}.gain_least_seed"]
        assert least <= values[f"plan.{what}.gain_vs_cost_ranked"]
        assert figures[f"plan.{what}.gain_vs_cost_ranked"].target is None
    assert values["plan.measured.in_sample"] <= values["plan.cost_ranked.in_sample"]
    assert 0 < values["plan.bound.expert_path"] <= values["plan.cost_ranked.in_sample"]
    assert {f"plan.slot_value.{tier}" for tier in ("hbm", "rtx", "grace", "spark")} <= set(values)
    skipped = dict(report.skipped)
    # on a busy machine the time may not suffice to try the search: then it is said
    assert ("plan.search.trial_gain_mean" in values) != (
        skipped.pop("plan.search.trial_gain_mean", None) is not None
    )
    assert skipped == {"targets of gains": "fewer than 5 seeds: give more --seeds"}


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--requests", "500", "--tokens", "400"], 78, "give fewer --requests"),
        (["--pod", "no-such-pod"], 78, "no-such-pod"),
        (["--budget-s", "nan"], 2, "--budget-s"),
        (["--seeds", "0"], 2, "--seeds"),
    ],
)
def test_wrong_arguments_are_one_error(
    arguments: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any trace is made."""
    assert cli.run(["bench", "plan", *arguments]) == status
    assert said in capsys.readouterr().err
