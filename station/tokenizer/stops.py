"""Stop strings: cut a growing text exactly before the first one that completes.

Owns the matching only; what a stop means for a request is decided elsewhere. The result does not
depend on how the text arrives: one character at a time or all at once gives the same cut.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Feed text; get back the part that can no longer belong to a stop string.

    The stop that *completes* first wins, the longer one when two complete at the same character.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are not empty strings; no stops at all passes every text through."""
        self._automata = [_Automaton(stop) for stop in stops]
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that is now certain. After a match everything further is dropped."""
        if self.matched is not None or not text:
            return ""
        buffer, start = self._held + text, len(self._held)
        for position in range(start, len(buffer)):
            completed = [a.stop for a in self._automata if a.advance(buffer[position])]
            if completed:
                self.matched = max(completed, key=len)
                self._held = ""
                return buffer[: position + 1 - len(self.matched)]
        hold = max((automaton.length for automaton in self._automata), default=0)
        self._held = buffer[len(buffer) - hold :]
        return buffer[: len(buffer) - hold]

    def finish(self) -> str:
        """The generation is over: what was held is text after all."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """Knuth-Morris-Pratt for one stop string: how much of it the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._border = [0] * len(stop)  # longest proper prefix of stop[:i + 1] that also ends it
        matched = 0
        for index in range(1, len(stop)):
            while matched and stop[index] != stop[matched]:
                matched = self._border[matched - 1]
            matched += stop[index] == stop[matched]
            self._border[index] = matched

    def advance(self, character: str) -> bool:
        """Whether `character` completes the stop string."""
        while self.length and character != self.stop[self.length]:
            self.length = self._border[self.length - 1]
        self.length += character == self.stop[self.length]
        return self.length == len(self.stop)
