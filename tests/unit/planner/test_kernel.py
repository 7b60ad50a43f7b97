"""The compiled loops against the scorer, against brute force, and against their own promises."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from services.planner import kernel
from services.planner.assignment import Assignment
from services.planner.copies import choose
from services.planner.cost import PlaceCosts
from services.planner.ledger import Ledger
from services.planner.pod import Pod
from services.planner.policies import plan
from services.planner.problem import Places, Problem, copy_rooms
from services.planner.score import score
from services.routing.trace import Trace
from tests.unit.planner.small import routing, usual_pod


def problem_of(seed: int, tokens: int = 60) -> tuple[Problem, Trace, Pod, Ledger]:
    """A small problem with five places."""
    pod, ledger, shape = usual_pod()
    trace = routing(shape, tokens=tokens, requests=12, seed=seed)
    return Problem.of(trace, pod, ledger), trace, pod, ledger


def spent_us(problem: Problem, layer: int, home: Places, copy: Places) -> np.ndarray:
    """Cost of every token in one layer."""
    ids = problem.layers[layer].ids
    out = np.empty(len(ids))
    mean = kernel.layer_us(ids, home, copy, problem.table, out)
    assert mean == pytest.approx(out.mean())
    return out


@pytest.mark.parametrize("seed", range(5))
def test_tokens_cost_what_the_scorer_says(seed: int) -> None:
    """Random homes and random copies: the rule of shared/core/copy_choice.py, token by token."""
    problem, trace, pod, ledger = problem_of(seed)
    rng = np.random.default_rng(seed)
    size = problem.calls.shape
    home = rng.integers(0, len(pod.nodes), size).astype(np.int16)
    copy = rng.integers(-1, len(pod.nodes), size).astype(np.int16)
    copy[copy == home] = -1
    nobody = np.zeros(len(pod.nodes), np.bool_)
    expected = score(
        trace, Assignment(home, copy, ledger.slots), PlaceCosts.of(pod.nodes), sparks=nobody
    ).layer_us

    for layer in range(size[0]):
        found = spent_us(problem, layer, home[layer], copy[layer])

        assert found == pytest.approx(expected[:, layer])


def test_routing_is_indexed_by_expert() -> None:
    """Every (token, expert) once, tokens ascending, hottest experts first."""
    problem, trace, *_ = problem_of(0)
    for layer, routing_ in enumerate(problem.layers):
        for expert in range(problem.experts):
            hits = routing_.tokens[routing_.first[expert] : routing_.first[expert + 1]]
            assert hits.tolist() == np.flatnonzero((trace.ids[:, layer] == expert).any(1)).tolist()
        assert (np.diff(problem.calls[layer][routing_.order]) <= 0).all()


@pytest.mark.parametrize("seed", range(4))
def test_copies_come_near_the_best_set(seed: int) -> None:
    """Room for two copies on the RTX card: greedy against every pair of experts."""
    problem, trace, pod, ledger = problem_of(seed)
    home = plan("cost-ranked", trace.histogram(), pod, ledger).home[0]
    rtx = pod.place("rtx")
    room = np.where(np.arange(5) == rtx, 2, 0)

    copy = choose(problem, 0, home, room)

    def saved(experts: tuple[int, ...]) -> float:
        tried = np.full(len(home), -1, np.int16)
        tried[list(experts)] = rtx
        return float((before - spent_us(problem, 0, home, tried)).sum())

    before = spent_us(problem, 0, home, np.full(len(home), -1, np.int16))
    elsewhere = np.flatnonzero(home != rtx)
    best = max(saved(pair) for pair in combinations(elsewhere.tolist(), 2))
    chosen = tuple(np.flatnonzero(copy == rtx).tolist())
    assert set(chosen) <= set(elsewhere.tolist())
    assert 1 <= len(chosen) <= 2
    assert saved(chosen) >= 0.8 * best
    assert best > 0


def test_copies_keep_their_room_and_never_harm() -> None:
    """Every token of every layer is at most as slow as without copies."""
    problem, trace, pod, ledger = problem_of(7)
    base = plan("cost-ranked", trace.histogram(), pod, ledger)
    rooms = copy_rooms(base.layer_counts(), ledger)
    none = np.full(problem.experts, -1, np.int16)
    for layer, room in enumerate(rooms):
        copy = choose(problem, layer, base.home[layer], room)

        assert (np.bincount(copy[copy >= 0], minlength=len(room)) <= room).all()
        assert (copy != base.home[layer]).all()
        before, after = (spent_us(problem, layer, base.home[layer], c) for c in (none, copy))
        assert (after <= before).all()


def test_exchanges_keep_counts_and_pay() -> None:
    """Homes per place stay, time falls, and an impossible bar lets nothing pass."""
    problem, trace, pod, ledger = problem_of(3, tokens=200)
    home = plan("contiguous", trace.histogram(), pod, ledger).home[0]
    copy = np.full(len(home), -1, np.int16)
    routing_ = problem.layers[0]
    pairs = np.random.default_rng(0).integers(0, len(home), (400, 2))

    def swapped(t_min: float) -> tuple[int, Places]:
        changed = home.copy()
        kept = kernel.swap_experts(
            routing_.ids, routing_.first, routing_.tokens, problem.request, changed, copy,
            problem.table, pairs, t_min,
        )  # fmt: skip
        return kept, changed

    kept, changed = swapped(2.0)
    assert kept > 0
    assert np.array_equal(np.bincount(changed, minlength=5), np.bincount(home, minlength=5))
    assert spent_us(problem, 0, changed, copy).sum() < spent_us(problem, 0, home, copy).sum()
    assert swapped(0.0)[0] > kept
    assert swapped(1e9)[0] == 0


def test_exchanges_count_a_token_of_both_experts_once() -> None:
    """Pair by pair, an exchange is kept exactly when the sum over all tokens falls.

    With copies, exchanging two experts of one token can change its time.
    """
    decided = set()
    for seed in range(8):
        problem, _, pod, _ = problem_of(seed, tokens=12)
        rng = np.random.default_rng(seed)
        home = rng.integers(0, len(pod.nodes), problem.experts).astype(np.int16)
        copy = rng.integers(-1, len(pod.nodes), problem.experts).astype(np.int16)
        copy[copy == home] = -1
        routing_ = problem.layers[0]
        before = spent_us(problem, 0, home, copy).sum()
        for one, other in combinations(range(problem.experts), 2):
            changed = home.copy()
            changed[[one, other]] = home[[other, one]]
            if home[one] == home[other] or (copy[[one, other]] == changed[[one, other]]).any():
                continue
            saves = spent_us(problem, 0, changed, copy).sum() < before - 1e-6

            found = home.copy()
            kernel.swap_experts(
                routing_.ids, routing_.first, routing_.tokens, problem.request, found, copy,
                problem.table, np.array([[one, other]]), 0.0,
            )  # fmt: skip

            assert np.array_equal(found, changed if saves else home)
            decided.add(saves)
    assert decided == {True, False}
