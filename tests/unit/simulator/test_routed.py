"""Routings: other Sparks, new homes, draws from a histogram, and sweeps over them."""

from __future__ import annotations

import numpy as np
import pytest

from services.planner.assignment import Assignment
from services.simulator.feed import place_costs
from services.simulator.routed import Routed, drawn, respread
from services.simulator.sweep import Axis, parse_axis
from shared.core.errors import ConfigError, TraceError
from tests.unit.simulator.world import place, pod, routed, trace

HOMES = [[0, 1, 2, 1, 2, 2], [1, 1, 2, 0, 0, 2]]


def three() -> tuple[Routed, Assignment]:
    """HBM and two Sparks; each of two layers asks for all six experts."""
    simulated = pod(
        place("hbm", "hbm", 0, 8), place("spark0", "spark", 9), place("spark1", "spark", 9)
    )
    routing = routed(simulated, HOMES, [[range(6), range(6)]])
    return routing, routing.assignment


def test_new_homes_are_even_and_only_for_orphans() -> None:
    """What spark1 held is with the heirs, the rest where it was."""
    routing, before = three()
    after = routing.rehomed(2, np.array([1])).assignment

    assert not (after.home == 2).any()
    assert (after.home[before.home != 2] == before.home[before.home != 2]).all()
    assert (routing.rehomed(2, np.array([1])).place == after.home).all()
    with pytest.raises(ConfigError, match="nobody inherits"):
        routing.rehomed(2, np.array([], np.int64))


def test_a_copy_becomes_the_home() -> None:
    """An orphan that has a copy moves there, and has none any more."""
    simulated = pod(place("spark0", "spark", 9), place("spark1", "spark", 9))
    routing = routed(simulated, [[0, 0, 1]], [[[0, 1, 2]]], copies=[[1, -1, 0]])
    after = routing.rehomed(0, np.array([1])).assignment

    assert after.home.tolist() == [[1, 1, 1]]
    assert after.copy.tolist() == [[-1, -1, -1]]


def test_other_numbers_of_sparks_hold_the_same() -> None:
    """Seven experts dealt over four Sparks: as even within a layer as can be."""
    _, before = three()
    after = respread(before, np.array([1, 2]), 4)

    assert (after.home[before.home == 0] == 0).all()
    assert after.layer_counts()[:, 1:].tolist() == [[2, 1, 1, 1], [1, 1, 1, 1]]
    with pytest.raises(ConfigError, match="last nodes"):
        respread(before, np.array([0, 1]), 4)


def test_draws_follow_the_histogram() -> None:
    """Twice as popular comes up about twice as often; never chosen, never while others are left."""
    histogram = np.array([[200, 100, 100, 100, 0]])
    ids = drawn(histogram, tokens=20_000, top_k=1, seed=3).ids

    found = np.bincount(ids.ravel(), minlength=5) / len(ids)
    assert found.tolist() == pytest.approx([0.4, 0.2, 0.2, 0.2, 0.0], abs=0.02)
    four = drawn(histogram, tokens=50, top_k=4, seed=3).ids
    assert {tuple(sorted(row)) for row in four[:, 0].tolist()} == {(0, 1, 2, 3)}


def test_a_trace_of_another_model_is_refused() -> None:
    """Layers and experts must be the placement's."""
    simulated = pod(place("spark0", "spark", 9))
    assignment = Assignment.without_copies(np.zeros((2, 4), np.int16), [8])

    with pytest.raises(TraceError, match="give a trace of this model"):
        Routed.of(trace([[[0]]], 4), assignment, place_costs(simulated))


@pytest.mark.parametrize(
    ("text", "axis"),
    [("sparks=1..64", Axis("sparks", (1, 2, 4, 8, 16, 32, 64))),
     ("lanes=3..20", Axis("lanes", (3, 6, 12, 20))), ("streams=4", Axis("streams", (4,))),
     ("lanes=4,1,2", Axis("lanes", (1, 2, 4))), ("lanes=5..5", Axis("lanes", (5,)))],
)  # fmt: skip
def test_a_sweep_is_understood(text: str, axis: Axis) -> None:
    """Ranges double and end where they should."""
    assert parse_axis(text) == axis


@pytest.mark.parametrize("text", ["", "lanes", "lanes=", "cats=1..2", "lanes=0..4", "lanes=4..1",
                                  "lanes=1..99999", "lanes=1..", "lanes=-1"])  # fmt: skip
def test_a_sweep_that_is_none(text: str) -> None:
    """One sentence with the form."""
    with pytest.raises(ConfigError, match="sweep"):
        parse_axis(text)
