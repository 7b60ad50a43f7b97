"""The trace as a value: histogram, split by request, and what counts as a defect."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.routing.trace import SYNTHETIC, Trace, check, check_model, split_requests
from shared.core.errors import TraceError
from shared.core.shape import K3
from tests.unit.routing.traces import SHAPE, same, trace_of


def test_a_histogram_counts_every_choice() -> None:
    """Against a count in plain Python; sums are tokens x top_k in every layer."""
    trace = trace_of([3, 5, 1])
    expected = np.zeros((3, SHAPE.experts), np.int64)
    for token in trace.ids.tolist():
        for layer, chosen in enumerate(token):
            for expert in chosen:
                expected[layer, expert] += 1

    counts = trace.histogram()

    assert counts.dtype == np.int64
    assert counts.tolist() == expected.tolist()
    assert (counts.sum(axis=1) == 9 * SHAPE.top_k).all()


@given(
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=12),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**32),
)
def test_a_split_shares_no_request_and_loses_no_token(
    lengths: list[int], fraction: float, seed: int
) -> None:
    """Whole requests on either side, none on both, none empty; the seed decides."""
    trace = trace_of(lengths)

    one, other = split_requests(trace, fraction, seed)

    assert not set(one.request.tolist()) & set(other.request.tolist())
    assert min(one.tokens, other.tokens) > 0
    assert one.tokens + other.tokens == trace.tokens
    for number, length in enumerate(lengths):
        part = one if number in one.request else other
        mine = part.request == number
        assert mine.sum() == length
        assert np.array_equal(part.ids[mine], trace.ids[trace.request == number])
    assert same(split_requests(trace, fraction, seed)[0], one)


def test_a_split_comes_as_near_to_its_fraction_as_whole_requests_allow() -> None:
    """Four equal requests at three quarters: three and one, whatever the seed."""
    for seed in range(5):
        one, other = split_requests(trace_of([10] * 4), 0.75, seed)
        assert (one.tokens, other.tokens) == (30, 10)


def test_the_seed_draws_the_requests() -> None:
    """Ten seeds give several different halves of ten equal requests."""
    firsts = {
        tuple(sorted(set(split_requests(trace_of([3] * 10), 0.5, seed)[0].request.tolist())))
        for seed in range(10)
    }

    assert len(firsts) > 5


def test_one_request_cannot_be_split() -> None:
    """By token would be possible, and wrong."""
    with pytest.raises(TraceError, match="1 request"):
        split_requests(trace_of([9]), 0.5, 1)


def _with(**changes: object) -> Trace:
    return replace(trace_of([3, 2]), **changes)


def _beyond() -> np.ndarray:
    ids = trace_of([3, 2]).ids.copy()
    ids[4, 2, 3] = SHAPE.experts
    return ids


def _twice() -> np.ndarray:
    ids = trace_of([3, 2]).ids.copy()
    ids[1, 2, 3] = ids[1, 2, 0]
    return ids


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        (_with(ids=_beyond()), "token 4 chose an expert beyond the 24 of layer 3"),
        (_with(ids=_twice()), "token 1 chose one expert twice in layer 3"),
        (_with(request=np.array([0, 0, 1, 1, 0], np.int32)), "not together"),
        (_with(step=np.array([0, 1, 1, 0, 1], np.int32)), "do not rise"),
        (_with(step=np.array([-1, 0, 1, 0, 1], np.int32)), "negative"),
        (_with(step=np.arange(4, dtype=np.int32)), "4 steps for 5 tokens"),
        (trace_of([1]).select(np.array([False])), "no token"),
    ],
)
def test_a_defect_is_named(trace: Trace, words: str) -> None:
    """One error that says what and where."""
    with pytest.raises(TraceError, match=words) as failure:
        check(trace, source="t.k3trace")

    assert str(failure.value).startswith("t.k3trace: ")


def test_a_trace_belongs_to_its_model() -> None:
    """A recording to its model, a synthetic trace to any of its shape."""
    check_model(trace_of([2]), "m" * 8, SHAPE, source="t")
    check_model(trace_of([2], digest=SYNTHETIC), "anything", SHAPE, source="t")
    with pytest.raises(TraceError, match="recorded from model mmmmmmmm"):
        check_model(trace_of([2]), "another", SHAPE, source="t")
    with pytest.raises(TraceError, match="16 of 896 experts in 92 layers"):
        check_model(trace_of([2], digest=SYNTHETIC), "m" * 8, K3, source="t")


def test_the_digest_covers_everything() -> None:
    """Any other content is another digest."""
    trace = trace_of([3, 2])
    ids = trace.ids.copy()
    ids[0, 0] = ids[0, 0][::-1]
    others = [
        replace(trace, ids=ids),
        replace(trace, request=trace.request + 1),
        replace(trace, step=trace.step + 1),
        replace(trace, model_digest="n"),
        replace(trace, first_layer=0),
        replace(trace, experts=25),
    ]

    assert len({trace.digest, *(other.digest for other in others)}) == 1 + len(others)
    assert trace_of([3, 2]).digest == trace.digest
