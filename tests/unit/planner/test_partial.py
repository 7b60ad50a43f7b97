"""Exchanges out of a new plan: any set of them is a placement, the most valuable come first."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.planner import policies
from services.planner.assignment import Assignment
from services.planner.partial import exchanged, exchanges, records_in
from services.planner.policies import Kind, kinds_of
from tests.unit.planner.small import histogram_of, usual_pod

KINDS = [
    Kind("hbm", 8.0, 0.0, (0,)), Kind("grace", 53.0, 0.0, (1,)), Kind("spark", 84.5, 184.5, (2, 3)),
]  # fmt: skip
SLOTS = [6, 6, 6, 6]


def test_pairs_by_value() -> None:
    """The hottest that comes takes the row of the coldest that leaves; unpaired moves are left."""
    old = Assignment.without_copies(np.array([[0, 0, 1, 1, 2, 3]]), SLOTS)
    new = Assignment.without_copies(np.array([[1, 3, 0, 0, 0, 2]]), SLOTS)
    calls = np.array([[5, 3, 9, 20, 8, 1]])

    swaps = exchanges(old, new, KINDS, calls, top_k=2)

    # costs 8, 53 and 84.5 + 92.25: (8 - 3) x 168.75 for expert 4, then (20 - 5) x 45 for 3
    assert swaps.layer.tolist() == [0, 0]
    assert swaps.coming.tolist() == [4, 3]
    assert swaps.leaving.tolist() == [1, 0]
    assert exchanged(old, swaps, 1).home.tolist() == [[0, 2, 1, 1, 0, 3]]
    assert exchanged(old, swaps, 2).home.tolist() == [[1, 2, 1, 0, 0, 3]]
    assert records_in(old, exchanged(old, swaps, 2)) == 4


def test_what_is_worth_nothing_or_has_a_copy_stays() -> None:
    """A cold expert for a hot one is no gain; a copied expert's place may be taken by its copy."""
    old = Assignment.without_copies(np.array([[0, 0, 1, 1]]), SLOTS)
    new = Assignment.without_copies(np.array([[1, 0, 0, 1]]), SLOTS)

    assert len(exchanges(old, new, KINDS, np.array([[5, 0, 6, 0]]), top_k=2)) == 1
    assert len(exchanges(old, new, KINDS, np.array([[6, 0, 5, 0]]), top_k=2)) == 0
    copied = old.with_copies(np.array([[-1, -1, 2, -1]]))
    assert len(exchanges(copied, new, KINDS, np.array([[5, 0, 6, 0]]), top_k=2)) == 0
    assert len(exchanges(old, new, KINDS[:1], np.array([[5, 0, 6, 0]]), top_k=2)) == 0


def test_a_record_that_is_there_is_not_read() -> None:
    """A copy that becomes the home, a home that becomes the copy, a new copy."""
    old = Assignment.without_copies(np.array([[0, 0, 0]]), SLOTS)
    old = old.with_copies(np.array([[2, 2, -1]]))
    new = Assignment.without_copies(np.array([[2, 1, 0]]), SLOTS)
    new = new.with_copies(np.array([[0, 0, 3]]))

    assert records_in(old, new) == 2


@settings(max_examples=60, deadline=None)
@given(seeds=st.tuples(st.integers(0, 10_000), st.integers(0, 10_000)), share=st.floats(0, 1))
def test_any_first_part_keeps_every_count(seeds: tuple[int, int], share: float) -> None:
    """Nodes hold as many experts of every layer as before, whatever is taken of the new plan."""
    pod, ledger, shape = usual_pod()
    histograms = [histogram_of(shape, seed) for seed in seeds]
    old, new = (policies.plan("cost-ranked", counts, pod, ledger) for counts in histograms)

    swaps = exchanges(old, new, kinds_of(pod), histograms[1], top_k=shape.top_k)
    made = exchanged(old, swaps, int(share * len(swaps)))

    made.check(layer_max=ledger.layer_max)
    assert (made.layer_counts() == old.layer_counts()).all()
    assert records_in(old, made) == 2 * int(share * len(swaps))
