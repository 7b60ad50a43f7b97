"""Scores against a loop that a person can check, and the choice between copies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.planner import policies
from services.planner.assignment import Assignment
from services.planner.cost import PlaceCosts
from services.planner.interval import mean_interval
from services.planner.report import path_figures
from services.planner.score import place_counts, score
from shared.core.copy_choice import choose_copies
from shared.core.errors import TraceError
from tests.unit.planner.small import routing, shape_of, usual_pod


def naive_us(counts: list[int], costs: PlaceCosts) -> float:
    """Slowest place with work."""
    times = [
        costs.fixed_us[place] + costs.per_expert_us[place] * count
        for place, count in enumerate(counts)
        if count
    ]
    return max(times, default=0.0)


def naive_choice(homes: list[int], copies: list[int], costs: PlaceCosts) -> list[int]:
    """One by one in router order; a copy is used when the slowest place gets no slower."""
    places = list(homes)
    counts = [places.count(place) for place in range(len(costs.fixed_us))]
    best = naive_us(counts, costs)
    for k, copy in enumerate(copies):
        if copy < 0:
            continue
        counts[homes[k]] -= 1
        counts[copy] += 1
        after = naive_us(counts, costs)
        if after <= best:
            places[k], best = copy, after
        else:
            counts[homes[k]] += 1
            counts[copy] -= 1
    return places


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_choice_is_the_rule_one_by_one(data: st.DataObject) -> None:
    """Any homes, copies and costs: the vectorised choice is the naive one, rows independent."""
    places, rows, top_k = (data.draw(st.integers(*ends)) for ends in ((2, 5), (1, 6), (1, 6)))
    costs = PlaceCosts(*(
        np.array(data.draw(st.lists(st.sampled_from([0.0, 8.0, 93.0, 184.5]),
                                    min_size=places, max_size=places)))
        for _ in range(2)
    ))  # fmt: skip
    seed = data.draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    homes = rng.integers(0, places, (rows, top_k)).astype(np.int16)
    copies = rng.integers(-1, places, (rows, top_k)).astype(np.int16)
    copies[copies == homes] = -1

    chosen = choose_copies(homes, copies, costs.fixed_us, costs.per_expert_us)
    expected = [
        naive_choice(*lines, costs)  # type: ignore[arg-type]
        for lines in zip(homes.tolist(), copies.tolist(), strict=True)
    ]
    assert chosen.tolist() == expected
    for before, after in zip(homes.tolist(), expected, strict=True):
        counted = [[line.count(place) for place in range(places)] for line in (before, after)]
        assert naive_us(counted[1], costs) <= naive_us(counted[0], costs) + 1e-9


def with_random_copies(assignment: Assignment, seed: int) -> Assignment:
    """Copies of a quarter of all experts, anywhere but at home; more slots than they need."""
    rng = np.random.default_rng(seed)
    copy = rng.integers(0, assignment.places, assignment.home.shape)
    copy[(copy == assignment.home) | (rng.random(copy.shape) > 0.25)] = -1
    roomy = Assignment.without_copies(assignment.home, [10**6] * assignment.places)
    return roomy.with_copies(copy)


@pytest.mark.parametrize("copied", [False, True])
def test_scores_are_those_of_the_naive_loop(copied: bool) -> None:
    """Time of each token-layer, counts, touches, shares and the slowest places, with and without
    copies, over more tokens than one block."""
    pod, ledger, shape = usual_pod(layers=3, experts=24)
    trace = routing(shape, tokens=300)
    costs = PlaceCosts.of(pod.nodes)
    assignment = policies.plan("cost-ranked", trace.histogram(), pod, ledger)
    if copied:
        assignment = with_random_copies(assignment, 5)
        assignment.check()
    sparks = np.array([node.tier == "spark" for node in pod.nodes])

    result = score(trace, assignment, costs, sparks=sparks)
    counts = place_counts(trace, assignment, costs)
    touched, slowest = 0, np.zeros_like(result.slowest)
    for token in range(trace.tokens):
        for layer in range(trace.layers):
            ids = trace.ids[token, layer]
            places = naive_choice(
                assignment.home[layer, ids].tolist(), assignment.copy[layer, ids].tolist(), costs
            )
            line = [places.count(place) for place in range(len(pod.nodes))]
            assert counts[token, layer].tolist() == line
            us = naive_us(line, costs)
            assert result.layer_us[token, layer] == pytest.approx(us)
            touched += any(sparks[place] for place in places)
            slowest[layer] += [count > 0 and naive_us([0] * p + [count], costs) == us
                               for p, count in enumerate(line)]  # fmt: skip
    assert result.spark_touches == touched
    assert result.spark_touch == touched / (300 * 3)
    assert result.selections.tolist() == counts.sum(axis=(0, 1)).tolist()
    assert result.touches.tolist() == (counts > 0).sum(axis=(0, 1)).tolist()
    assert (result.slowest <= slowest).all(), "of places that tie, one is said to be the slowest"
    assert result.slowest.sum() == 300 * 3
    assert result.load.sum() == pytest.approx(1.0)


def test_figures_are_in_the_words_of_the_pod() -> None:
    """Tokens per second are from 92 x serial + expert path + rest; shares per tier sum to one."""
    pod, ledger, shape = usual_pod()
    trace = routing(shape)
    assignment = policies.plan("global", trace.histogram(), pod, ledger)
    costs = PlaceCosts.of(pod.nodes)
    sparks = np.array([node.tier == "spark" for node in pod.nodes])
    result = score(trace, assignment, costs, sparks=sparks)

    figures = path_figures(result, trace.request, pod, first_layer=trace.first_layer)
    assert figures.expert_path_ms == pytest.approx(result.layer_us.sum() / 40 / 1e3)
    assert 1e3 / figures.tokens_per_s == pytest.approx(4 * 0.4 + figures.expert_path_ms + 1.8)
    assert list(figures.load) == ["hbm", "grace", "rtx", "spark"]
    assert sum(figures.load.values()) == pytest.approx(1)
    assert sum(figures.slowest.values()) == pytest.approx(1)
    assert [line.layer for line in figures.layers] == [1, 2, 3, 4]
    assert figures.ci95_ms is not None
    assert figures.ci95_ms.low <= figures.expert_path_ms <= figures.ci95_ms.high


def test_requests_are_resampled_not_tokens() -> None:
    """Two requests that differ make a wide interval, however many tokens each has."""
    request = np.repeat([3, 9], 1000)
    values = np.where(request == 3, 1.0, 2.0)

    interval = mean_interval(values, request)
    assert interval == (1.0, 2.0)
    alike = mean_interval(values, np.arange(2000))
    assert alike is not None
    assert alike.high - alike.low < 0.1
    assert mean_interval(values, np.zeros(2000, int)) is None


def test_a_trace_of_another_shape_is_refused() -> None:
    """Nothing is scored with experts of another model."""
    pod, ledger, shape = usual_pod()
    assignment = policies.plan("contiguous", routing(shape).histogram(), pod, ledger)
    with pytest.raises(TraceError, match="trace of this model"):
        score(
            routing(shape_of(3, 24)), assignment, PlaceCosts.of(pod.nodes), sparks=np.zeros(5, bool)
        )
