"""Splitting a layer's pairs over places loses nothing and repeats nothing."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from station.split import chunks, local_tokens, split


@st.composite
def routings(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Ids [T, K] with distinct experts per token, and an owner per expert."""
    experts = draw(st.integers(4, 40))
    tokens = draw(st.integers(1, 12))
    top_k = draw(st.integers(1, min(8, experts)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)])
    owner = rng.integers(0, draw(st.integers(1, 6)), experts).astype(np.int32)
    return ids.astype(np.int64), owner


@given(routings())
def test_every_pair_goes_to_its_owner_exactly_once(routing: tuple[np.ndarray, np.ndarray]) -> None:
    """Case N3: the shares partition the pairs, and each pair's share is its owner's."""
    ids, owner = routing

    shares = split(ids, owner)

    together = np.concatenate([share.positions for share in shares])
    assert sorted(together.tolist()) == list(range(ids.size))
    for share in shares:
        assert (owner[ids.reshape(-1)[share.positions]] == share.place).all()
        assert (np.diff(share.positions) > 0).all()
    assert [share.place for share in shares] == sorted({share.place for share in shares})


@given(routings(), st.integers(8, 20), st.integers(1, 6))
def test_chunks_fit_a_slot_and_keep_tokens_whole(
    routing: tuple[np.ndarray, np.ndarray], max_rows: int, max_tokens: int
) -> None:
    """No dispatch exceeds a slot, no token is cut in two, nothing is lost."""
    ids, owner = routing
    top_k = ids.shape[1]
    for share in split(ids, owner):
        pieces = chunks(share.positions, top_k, max_rows=max_rows, max_tokens=max_tokens)

        assert np.concatenate(pieces).tolist() == share.positions.tolist()
        seen: set[int] = set()
        for piece in pieces:
            tokens = set((piece // top_k).tolist())
            assert len(piece) <= max_rows
            assert len(tokens) <= max_tokens
            assert not tokens & seen
            seen |= tokens


@given(routings())
def test_local_tokens_are_the_distinct_ones(routing: tuple[np.ndarray, np.ndarray]) -> None:
    """As numpy's own unique with its inverse, for every share of every split."""
    ids, owner = routing
    for share in split(ids, owner):
        tokens, index = local_tokens(share.positions, ids.shape[1])

        distinct, inverse = np.unique(share.positions // ids.shape[1], return_inverse=True)
        assert tokens.tolist() == distinct.tolist()
        assert index.tolist() == inverse.tolist()
        assert index.dtype == np.uint16


def test_each_token_travels_once() -> None:
    """Pairs of one token share one activation."""
    tokens, index = local_tokens(np.array([0, 2, 8, 11, 9]), 4)

    assert tokens.tolist() == [0, 2]
    assert index.tolist() == [0, 0, 1, 1, 1]
