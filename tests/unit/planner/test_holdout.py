"""Held-out proof: nothing planned on is scored, and the interval is over requests."""

from __future__ import annotations

import numpy as np
import pytest

from services.planner.assignment import Assignment
from services.planner.cost import PlaceCosts
from services.planner.holdout import Paired, compare_on, hold_out, mean_gain
from services.planner.policies import plan
from services.planner.score import score
from services.routing.trace import Trace
from shared.core.errors import TraceError
from tests.unit.planner.small import routing, usual_pod


def test_planners_never_see_what_they_are_scored_on() -> None:
    """Both get the same requests, none of which is held out; together they are all there are."""
    pod, ledger, shape = usual_pod()
    trace = routing(shape, tokens=120, requests=12)
    seen: list[Trace] = []

    def planner(part: Trace) -> Assignment:
        seen.append(part)
        return plan("cost-ranked", part.histogram(), pod, ledger)

    found = hold_out(trace, pod, planner, planner, fraction=0.75, seed=3)

    held = set(found.held_out.request.tolist())
    assert len(seen) == 2
    for part in seen:
        assert not set(part.request.tolist()) & held
        assert set(part.request.tolist()) | held == set(trace.request.tolist())
    assert found.paired.gain == 0.0
    assert len(found.paired.ours_ms) == len(held)


def test_sums_by_request_are_the_scorers() -> None:
    """Request by request against the scorer on that request alone."""
    pod, ledger, shape = usual_pod()
    trace = routing(shape, tokens=90, requests=6)
    plans = [plan(name, trace.histogram(), pod, ledger) for name in ("cost-ranked", "contiguous")]
    costs, nobody = PlaceCosts.of(pod.nodes), np.zeros(len(pod.nodes), np.bool_)

    paired = compare_on(trace, pod, plans[0], plans[1])

    for index, request in enumerate(np.unique(trace.request)):
        alone = trace.select(trace.request == request)
        for sums, assignment in zip((paired.ours_ms, paired.base_ms), plans, strict=True):
            expected = score(alone, assignment, costs, sparks=nobody).token_ms.sum()
            assert sums[index] == pytest.approx(expected)
    assert paired.gain > 0


def test_the_interval_is_of_requests_not_tokens() -> None:
    """Equal gains leave no doubt; requests that disagree leave more, and more so if few."""
    base = np.full(40, 100.0)
    rng = np.random.default_rng(0)
    unlike = rng.uniform(1.0, 100.0, 40)  # the length of a request is no reason for doubt
    certain = mean_gain([Paired(0.95 * unlike, unlike)])
    noisy = base * rng.normal(0.95, 0.1, 40)

    many, few = mean_gain([Paired(noisy, base)]), mean_gain([Paired(noisy[:10], base[:10])])

    assert certain[0] == pytest.approx(0.05)
    assert certain[1] == pytest.approx((0.05, 0.05))
    widths = [high - low for _, (low, high) in (many, few)]
    # normal theory: 2 x 1.96 x 0.1 / sqrt(requests)
    assert widths[0] == pytest.approx(2 * 1.96 * 0.1 / np.sqrt(40), rel=0.35)
    assert widths[1] > 1.3 * widths[0]
    low, high = many[1]
    assert low < many[0] < high


def test_more_seeds_narrow_the_interval() -> None:
    """The mean of four like runs is known about twice as well as one."""
    rng = np.random.default_rng(1)
    runs = [Paired(100.0 * rng.normal(0.95, 0.1, 30), np.full(30, 100.0)) for _ in range(4)]

    one, four = mean_gain(runs[:1])[1], mean_gain(runs)[1]

    assert (one.high - one.low) / (four.high - four.low) == pytest.approx(2.0, rel=0.4)


def test_runs_that_disagree_widen_the_interval() -> None:
    """Requests of a run agree to the last digit, runs do not: the next run is not known so well."""
    base = np.full(30, 100.0)
    runs = [Paired(share * base, base) for share in (0.93, 0.94, 0.95, 0.96, 0.97)]

    gain, (low, high) = mean_gain(runs)

    assert gain == pytest.approx(0.05)
    # five runs of deviation 0.0141: 0.0063 for their mean
    assert high - low == pytest.approx(2 * 1.96 * 0.0063, rel=0.15)


def test_where_nothing_is_spent_nothing_is_saved() -> None:
    """A pod whose places cost nothing: 0, and neither a warning nor a number unknown to JSON."""
    assert mean_gain([Paired(np.zeros(3), np.zeros(3))]) == (0.0, (0.0, 0.0))


def test_one_request_cannot_be_split() -> None:
    """Said before anything is planned."""
    pod, _, shape = usual_pod()
    trace = routing(shape, requests=1)

    def never(_part: Trace) -> Assignment:
        raise AssertionError("planned although there is nothing to hold out")

    with pytest.raises(TraceError, match="split"):
        hold_out(trace, pod, never, never, fraction=0.75, seed=1)
