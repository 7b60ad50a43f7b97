"""The Station's own experts: resident ones, and the cold store of last resort."""

from __future__ import annotations

import numpy as np
import pytest

from shared.core.errors import CheckpointError
from shared.core.ring_layout import Rows
from shared.kernels import codecs
from shared.kernels.select import select_kernel
from station.local_experts import ColdStore, LocalTier
from tests.unit.station.world import LAYER, SHAPE, Records

CAPACITY = 3


@pytest.fixture(scope="module")
def activations() -> Rows:
    """Two tokens."""
    rng = np.random.default_rng(3)
    return codecs.bf16_bits(rng.normal(size=(2, SHAPE.expert.latent)).astype(np.float32))


@pytest.fixture
def records() -> Records:
    """A checkpoint that can be told to fail."""
    return Records()


@pytest.fixture
def tier(records: Records) -> LocalTier:
    """Every expert, resident: the truth."""
    kernel = select_kernel(SHAPE.expert)
    return LocalTier(kernel, SHAPE.expert, records, [(LAYER, e) for e in range(SHAPE.experts)])


@pytest.fixture
def store(records: Records) -> ColdStore:
    """Room for three records."""
    return ColdStore(select_kernel(SHAPE.expert), SHAPE.expert, records, capacity=CAPACITY)


def ids(*experts: int) -> np.ndarray:
    """Expert ids of one token."""
    return np.array(experts, np.int64)


def test_more_experts_than_fit_at_once(
    store: ColdStore, tier: LocalTier, activations: Rows
) -> None:
    """A layer may need more records than the store holds, in any order, each several times."""
    experts = ids(9, 1, 5, 1, 7, 3, 9, 11, 0)
    tokens = np.arange(len(experts)) % 2

    rows = store.rows(LAYER, experts, tokens, activations)

    assert np.array_equal(rows, tier.rows(LAYER, experts, tokens, activations))
    assert store.records_read == 7


def test_the_latest_records_are_kept(store: ColdStore, activations: Rows) -> None:
    """The least recently used one goes first."""
    zero = np.zeros(1, np.int64)
    for expert in (0, 1, 2, 0, 3, 0):
        store.rows(LAYER, ids(expert), zero, activations)
    assert store.records_read == 4
    store.rows(LAYER, ids(1), zero, activations)
    assert store.records_read == 5


def test_a_read_that_fails_spoils_no_other_expert(
    store: ColdStore, records: Records, tier: LocalTier, activations: Rows
) -> None:
    """An error while a full store makes room must not leave two experts in one row of the arena.

    It did: the next record took the last row, and the expert that lived there answered with it.
    """
    zero = np.zeros(1, np.int64)
    for expert in range(CAPACITY):
        store.rows(LAYER, ids(expert), zero, activations)
    records.fails = 1
    with pytest.raises(CheckpointError):
        store.rows(LAYER, ids(7), zero, activations)

    for expert in (8, 2, 1, 0, 8, 7):
        rows = store.rows(LAYER, ids(expert), zero, activations)
        assert np.array_equal(rows, tier.rows(LAYER, ids(expert), zero, activations)), expert


def test_a_tier_knows_how_many_it_holds(tier: LocalTier) -> None:
    """What the log says at the start."""
    assert len(tier) == SHAPE.experts
