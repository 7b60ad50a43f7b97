"""Which slot of a node's ring carries which dispatch. Pure.

A slot is FREE, IN_FLIGHT (a dispatch waits for its reply) or ABANDONED (its deadline passed; a late
reply may still land there, so it is not used again until that reply was seen). Every use of a slot
has its own generation, so an old reply can never be taken for a new one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from shared.core.errors import LocalProtocolError


class SlotState(Enum):
    """State of one slot."""

    FREE = "free"
    IN_FLIGHT = "in_flight"
    ABANDONED = "abandoned"


@dataclass(slots=True)
class SlotTable:
    """Slots of one lease."""

    count: int
    _state: list[SlotState] = field(init=False)
    _generation: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """All free, generation 0 = never used."""
        self._state = [SlotState.FREE] * self.count
        self._generation = [0] * self.count

    def acquire(self) -> tuple[int, int] | None:
        """(slot, generation) of a free slot, or None when all are taken."""
        for slot, state in enumerate(self._state):
            if state is SlotState.FREE:
                self._state[slot] = SlotState.IN_FLIGHT
                self._generation[slot] += 1
                return slot, self._generation[slot]
        return None

    def release(self, slot: int) -> None:
        """The reply was taken, in time or late: the slot may be used again."""
        self._expect(slot, SlotState.IN_FLIGHT, SlotState.ABANDONED)
        self._state[slot] = SlotState.FREE

    def abandon(self, slot: int) -> None:
        """Nobody waits any more; keep the slot until its reply was seen."""
        self._expect(slot, SlotState.IN_FLIGHT)
        self._state[slot] = SlotState.ABANDONED

    @property
    def is_all_abandoned(self) -> bool:
        """Whether every slot was given up: nothing is in flight that could free one."""
        return all(state is SlotState.ABANDONED for state in self._state)

    def _expect(self, slot: int, *states: SlotState) -> None:
        if self._state[slot] not in states:
            raise LocalProtocolError(f"slot {slot} is {self._state[slot].value}")
