"""What waits to be answered, in an order that is fair between those who ask.

Pure: no clock, no socket. Must not know what is asked.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

Asker = TypeVar("Asker", bound=Hashable)
Item = TypeVar("Item")


class FairQueue(Generic[Asker, Item]):
    """One bounded queue per asker, served in turn: who asks much waits behind its own questions.

    Mutable; for one event loop.
    """

    def __init__(self, waiting_max: int) -> None:
        """At most `waiting_max` items wait per asker."""
        self._waiting_max: Final = waiting_max
        self._turns: OrderedDict[Asker, deque[Item]] = OrderedDict()  # next to be served first
        self._len = 0

    def __len__(self) -> int:
        """Items that wait, of all askers."""
        return self._len

    def put(self, asker: Asker, item: Item) -> bool:
        """Whether there was room for it; an asker that is new is served last."""
        waiting = self._turns.setdefault(asker, deque())
        if len(waiting) >= self._waiting_max:
            return False
        waiting.append(item)
        self._len += 1
        return True

    def take(self) -> tuple[Asker, Item] | None:
        """The next item and whose it is; its asker's next turn comes after all others'."""
        if not self._turns:
            return None
        asker, waiting = self._turns.popitem(last=False)
        item = waiting.popleft()
        self._len -= 1
        if waiting:
            self._turns[asker] = waiting
        return asker, item

    def forget(self, asker: Asker) -> int:
        """Drop what waits for `asker`; how many items that were."""
        dropped = len(self._turns.pop(asker, ()))
        self._len -= dropped
        return dropped
