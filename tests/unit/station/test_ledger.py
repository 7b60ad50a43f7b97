"""The ledger accounts every pair once, against a dict that counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.core.errors import LocalProtocolError
from station.ledger import LayerLedger, WorkKey

KEY = WorkKey("r1", 0, 3)


class LedgerAgainstDict(RuleBasedStateMachine):
    """Deliver any positions in any order, any number of times: each is accepted once."""

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(7)
        self.ids = np.stack([rng.permutation(20)[:4] for _ in range(3)]).astype(np.int64)
        self.ledger = LayerLedger(KEY, self.ids)
        self.accepted: dict[int, int] = {}

    @rule(positions=st.lists(st.integers(0, 11), max_size=8))
    def deliver(self, positions: list[int]) -> None:
        """A delivery may repeat positions, within itself and with earlier ones."""
        offered = np.array(positions, np.int64)

        delivery = self.ledger.account(offered)

        assert len(delivery.accepted) == len(positions)
        assert delivery.duplicates == len(positions) - int(delivery.accepted.sum())
        for position in offered[delivery.accepted].tolist():
            self.accepted[position] = self.accepted.get(position, 0) + 1

    @precondition(lambda self: len(self.accepted) == 12)
    @rule()
    def is_closed(self) -> None:
        """A complete layer accepts nothing more."""
        assert self.ledger.is_complete
        assert not self.ledger.account(np.arange(12)).accepted.any()

    @invariant()
    def once_at_most(self) -> None:
        """PENDING -> ACCOUNTED at most once, and pending is the exact rest."""
        assert all(count == 1 for count in self.accepted.values())
        owed = sorted(set(range(12)) - set(self.accepted))
        assert self.ledger.pending.tolist() == owed
        assert self.ledger.is_complete is (not owed)


TestLedgerAgainstDict = LedgerAgainstDict.TestCase


def test_a_layer_opens_with_distinct_experts() -> None:
    """A router row that names an expert twice is a bug of this process."""
    with pytest.raises(LocalProtocolError, match="distinct"):
        LayerLedger(KEY, np.array([[1, 2, 1]], np.int64))


@pytest.mark.parametrize("position", [-1, 4])
def test_a_foreign_position_is_refused(position: int) -> None:
    """Nothing outside the opened pairs can be accounted, and nothing changes."""
    ledger = LayerLedger(KEY, np.array([[3, 1], [0, 2]], np.int64))

    with pytest.raises(LocalProtocolError):
        ledger.account(np.array([0, position]))

    assert ledger.pending.tolist() == [0, 1, 2, 3]


def test_experts_are_named_by_position() -> None:
    """An error can name the experts that are still owed."""
    ledger = LayerLedger(KEY, np.array([[3, 1], [0, 2]], np.int64))
    ledger.account(np.array([1, 2]))

    assert ledger.experts(ledger.pending).tolist() == [3, 2]
    assert ledger.pending_of(np.array([2, 3])).tolist() == [3]
