"""The lower bound against every placement there is, and what a slot is worth."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from services.planner.assignment import Assignment
from services.planner.bound import lower_bound
from services.planner.cost import PlaceCosts
from services.planner.ledger import take_ledger
from services.planner.marginal import slot_values
from services.planner.policies import plan
from services.planner.problem import Problem
from services.planner.programs import solve_binary
from services.planner.score import score
from tests.unit.planner.small import node, pod_of, routing, shape_of, usual_pod


@pytest.mark.parametrize("hbm", [0, 2, 4, 5])
@pytest.mark.parametrize("seed", range(3))
def test_no_placement_is_below_the_bound(hbm: int, seed: int) -> None:
    """All ways to put two layers of four experts on three places, scored one by one."""
    shape = shape_of(2, 4, 2)
    pod = pod_of(node("hbm", "hbm", hbm), node("grace", "grace", 3), node("spark", "spark", 5))
    ledger = take_ledger(pod, shape)
    trace = routing(shape, tokens=40, requests=4, seed=seed)

    bound = lower_bound(Problem.of(trace, pod, ledger))

    costs, nobody = PlaceCosts.of(pod.nodes), np.zeros(3, np.bool_)
    best = np.inf
    for homes in product(range(3), repeat=8):
        if all(homes.count(place) <= ledger.slots[place] for place in range(3)):
            home = np.array(homes).reshape(2, 4)
            assignment = Assignment.without_copies(home, ledger.slots.tolist())
            best = min(best, score(trace, assignment, costs, sparks=nobody).expert_path_ms)
    assert bound.expert_path_ms <= best * (1 + 1e-6)
    # loose, but not empty: two experts of a token cost 16 us in HBM
    assert bound.expert_path_ms >= 2 * 16 / 1e3


def test_the_bound_is_tight_where_one_expert_decides() -> None:
    """One expert per token, all alike: exactly the slots decide who touches the Spark."""
    shape = shape_of(1, 10, 1)
    pod = pod_of(node("hbm", "hbm", 6), node("spark", "spark", 4))
    ledger = take_ledger(pod, shape)
    trace = routing(shape, tokens=200, requests=4)

    bound = lower_bound(Problem.of(trace, pod, ledger))

    coldest = np.sort(trace.histogram()[0])[:4].sum() / 200
    assert bound.far == (1,)
    assert bound.touch_share == pytest.approx(coldest, abs=2e-2)
    assert bound.touch_share <= coldest + 1e-9
    base = plan("cost-ranked", trace.histogram(), pod, ledger)
    costs = PlaceCosts.of(pod.nodes)
    exact = score(trace, base, costs, sparks=np.array([False, True])).expert_path_ms
    assert bound.expert_path_ms == pytest.approx(exact, rel=2e-2)


def test_nothing_is_far_when_all_fit_near() -> None:
    """With room for everything in HBM, only HBM's own time is left."""
    shape = shape_of(2, 6, 2)
    pod = pod_of(node("hbm", "hbm", 12), node("spark", "spark", 12))
    trace = routing(shape, tokens=30)

    bound = lower_bound(Problem.of(trace, pod, take_ledger(pod, shape)))

    assert bound.expert_path_ms == pytest.approx(2 * 2 * 8 / 1e3)


def test_slots_are_worth_more_the_faster_they_are() -> None:
    """HBM above Sparks; and a slot saves time, it does not cost any."""
    pod, ledger, shape = usual_pod(layers=6, experts=48)
    trace = routing(shape, tokens=400, requests=20)
    problem = Problem.of(trace, pod, ledger)

    values = slot_values(problem, plan("cost-ranked", trace.histogram(), pod, ledger))

    by_tier = {value.tier: value.ms_per_token for value in values}
    assert [value.tier for value in values] == ["hbm", "rtx", "grace", "spark"]
    assert by_tier["hbm"] > by_tier["spark"] >= 0.0


@pytest.mark.parametrize("seed", range(5))
def test_programs_are_solved_exactly(seed: int) -> None:
    """Six variables in two rows each: the best of 64, tried one by one."""
    rng = np.random.default_rng(seed)
    cost, values = rng.normal(size=6), rng.integers(-2, 3, (6, 2)).astype(float)
    rows = np.stack([np.array([0, 0, 1, 1, 2, 2]), np.full(6, 3)], axis=1)
    lower, upper = np.array([-2.0, -2.0, -2.0, -1.0]), np.array([2.0, 2.0, 2.0, 1.0])

    taken = solve_binary(cost=cost, rows=rows, values=values, lower=lower, upper=upper)

    def sums(x: np.ndarray) -> np.ndarray:
        return np.bincount(rows.ravel(), weights=(values * x[:, None]).ravel(), minlength=4)

    fitting = [
        np.array(x)
        for x in product((0, 1), repeat=6)
        if (sums(np.array(x)) >= lower).all() and (sums(np.array(x)) <= upper).all()
    ]
    assert cost @ taken == pytest.approx(min(cost @ x for x in fitting))
    assert (sums(taken) >= lower - 1e-9).all()
    assert (sums(taken) <= upper + 1e-9).all()


def test_cost_ranked_is_optimal_for_a_linear_cost() -> None:
    """HiGHS over all (expert, kind) pairs, with and without the bounds per layer: no better."""
    from scipy.optimize import linprog

    pod, ledger, shape = usual_pod(layers=3, experts=18)
    trace = routing(shape, tokens=80)
    calls = trace.histogram()
    base = plan("cost-ranked", calls, pod, ledger)
    per_expert = PlaceCosts.of(pod.nodes).per_expert_us
    layers, experts, places = *calls.shape, len(per_expert)

    def row(*at: int | slice) -> np.ndarray:
        """The variables of a part of [layers, experts, places]."""
        mask = np.zeros((layers, experts, places))
        mask[at] = 1.0
        return mask.ravel()

    each = np.array([row(layer, e) for layer in range(layers) for e in range(experts)])
    budgets = np.array([row(slice(None), slice(None), p) for p in range(places)])
    bounds = np.array(
        [row(layer, slice(None), p) for layer in range(layers) for p in range(places)]
    )
    result = linprog(
        (calls[:, :, None] * per_expert).ravel(),
        A_ub=np.concatenate([budgets, bounds]),
        b_ub=np.concatenate([ledger.slots, np.tile(ledger.layer_max, layers)]),
        A_eq=each,
        b_eq=np.ones(layers * experts),
        bounds=(0, 1),
    )

    assert (calls * per_expert[base.home]).sum() == pytest.approx(result.fun)
