"""Shares of kinds: exchanges between layers keep every law and pay; homes follow the shares."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from services.planner import sizes
from services.planner.ledger import Ledger, take_ledger
from services.planner.policies import kinds_of, plan
from services.planner.problem import Problem, copy_rooms
from services.planner.sizes import Shares
from tests.unit.planner.small import node, pod_of, routing, shape_of

LAYERS, EXPERTS = 6, 48


def one_by_one(action: Callable[[int], float], layers: list[int]) -> list[float]:
    """No threads."""
    return [action(layer) for layer in layers]


def begun(
    seed: int, *, spare: int, per_layer: int = EXPERTS // 2
) -> tuple[Problem, Shares, Ledger]:
    """Cost-ranked on a pod whose Sparks are bounded per layer and have so much to spare.

    They hold `per_layer` experts of a layer in the mean.
    """
    shape = shape_of(LAYERS, EXPERTS, 4)
    total = shape.routed_experts
    cold = per_layer * LAYERS
    per_spark = cold // 2 + spare
    pod = pod_of(
        node("hbm", "hbm", total // 8),
        node("grace", "grace", total - total // 8 - cold),
        *(
            node(f"spark{n}", "spark", per_spark, layer_max=per_layer // 2 + 1 + spare)
            for n in range(2)
        ),
    )
    ledger = take_ledger(pod, shape)
    problem = Problem.of(routing(shape, tokens=150, requests=10, seed=seed), pod, ledger)
    start = plan("cost-ranked", problem.calls, pod, ledger)
    kinds = sorted(kinds_of(pod), key=lambda kind: kind.per_expert_us)
    return problem, sizes.shares_of(problem, start, tuple(kinds)), ledger


@pytest.mark.parametrize("spare", [0, 6])
@pytest.mark.parametrize("seed", range(3))
def test_exchanges_keep_the_laws_and_pay(seed: int, spare: int) -> None:
    """Every round: the same totals per kind, whole layers, bounds, no node emptied, less time."""
    problem, shares, _ = begun(seed, spare=spare)
    every = list(range(LAYERS))
    bound = np.array([problem.ledger.layer_max[list(k.places)].sum() for k in shares.kinds])
    least = np.minimum(shares.counts, [len(kind.places) for kind in shares.kinds])
    before = sizes.values_us(problem, shares, every, one_by_one).sum()

    rounds = list(sizes.exchange(problem, shares, each=one_by_one, steps=(2, 1)))

    for found in rounds:
        assert np.array_equal(found.counts.sum(axis=0), shares.counts.sum(axis=0))
        assert (found.counts.sum(axis=1) == EXPERTS).all()
        assert (found.counts <= bound).all()
        assert (found.counts >= least).all()
        after = sizes.values_us(problem, found, every, one_by_one).sum()
        assert after < before
        before = after
    assert rounds


def test_no_spark_is_left_without_a_layer() -> None:
    """With four experts per layer on two Sparks it would pay to empty them in some layers."""
    problem, shares, _ = begun(2, spare=4, per_layer=4)
    before = shares.counts[:, 2]
    assert (before >= 2).sum() > LAYERS / 2

    *_, found = sizes.exchange(problem, shares, each=one_by_one, steps=(2, 1))

    assert (found.counts[:, 2] >= np.minimum(before, 2)).all()


def test_homes_and_copies_follow_the_shares() -> None:
    """In every layer the hottest experts are in the first kind, and so on; copies fill the rest."""
    problem, shares, ledger = begun(1, spare=6)
    *_, shares = sizes.exchange(problem, shares, each=one_by_one, steps=(2, 1))

    settled = sizes.settle(problem, shares)

    assert settled is not None
    settled.check(layer_max=ledger.layer_max)
    kind_of = np.empty(settled.places, int)
    for index, kind in enumerate(shares.kinds):
        kind_of[list(kind.places)] = index
    for layer, routing_ in enumerate(problem.layers):
        found = kind_of[settled.home[layer][routing_.order]]
        assert found.tolist() == np.repeat(range(3), shares.counts[layer]).tolist()
    copies = sizes.first_copies(problem, shares, settled)
    both = settled.with_copies(copies)
    both.check(layer_max=ledger.layer_max)
    rooms = copy_rooms(settled.layer_counts(), ledger)
    assert both.copies == rooms[:, 2:].sum() > 0


def test_the_slowest_kind_is_relieved_by_the_one_with_room() -> None:
    """Grace decides most layers' time here, the Sparks have the spare slots; or nobody has any."""
    _, shares, _ = begun(0, spare=6)
    assert [shares.kinds[i].tier for i in (shares.relieved, shares.spare)] == ["grace", "spark"]

    assert begun(0, spare=0)[1].spare == -1
