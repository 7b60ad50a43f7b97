"""Hands the experts that tokens chose from the model thread to whoever records them.

Theory. Off, a layer pays one `if`. On, the lane keeps a small copy of each layer's ids, and a
forward pass that went through every layer is put into each listener's queue: bounded in tokens,
never waited for. What does not fit is counted and said, so a recording knows what it lacks. Tokens
whose pass did not come to its end are counted too; no listener ever sees part of a token.

Owns the hand-over between the two threads. Must not know HTTP or files.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from shared.core.routing_wire import PASS_TOKENS_MAX, Pass, Totals
from shared.core.shape import ModelShape

QUEUE_TOKENS: Final = 4096  # 12 MB of K3's ids per listener


class Listener:
    """One recorder's queue; filled by the model thread, emptied by the event loop."""

    def __init__(self, wake: Callable[[], None], *, tokens_max: int) -> None:
        """`wake` is called from the model thread when an empty queue gets something."""
        self._wake = wake
        self._tokens_max = tokens_max
        self._lock = threading.Lock()
        self._queue: deque[Pass] = deque()
        self._has_left = False
        self._held_tokens = 0
        self._sent = 0
        self._dropped = 0
        self._incomplete = 0

    def put(self, piece: Pass) -> None:
        """Queue a piece, or count it as dropped; never waits."""
        with self._lock:
            if self._has_left:
                return
            if self._held_tokens + piece.tokens > self._tokens_max:
                self._dropped += piece.tokens
                return
            was_empty = not self._queue
            self._queue.append(piece)
            self._held_tokens += piece.tokens
            if was_empty:
                self._wake()

    def end(self) -> None:
        """Take nothing any more: a pass that began before may still end after the loop is gone."""
        with self._lock:
            self._has_left = True
            self._queue.clear()

    def lose(self, tokens: int) -> None:
        """Count tokens whose pass did not come to its end."""
        with self._lock:
            self._incomplete += tokens

    def take(self) -> Pass | None:
        """The next piece, if there is one."""
        with self._lock:
            if not self._queue:
                return None
            piece = self._queue.popleft()
            self._held_tokens -= piece.tokens
            self._sent += piece.tokens
            return piece

    def totals(self) -> Totals:
        """What became of all tokens so far."""
        with self._lock:
            return Totals(sent=self._sent, dropped=self._dropped, incomplete=self._incomplete)


class RoutingTap:
    """Where lanes leave routing, and listeners come and go."""

    def __init__(self, shape: ModelShape) -> None:
        """Nobody listens yet."""
        self._shape = shape
        # replaced, never changed: the model thread reads it without a lock
        self._listeners: tuple[Listener, ...] = ()

    @property
    def listeners(self) -> int:
        """How many listen now."""
        return len(self._listeners)

    def listen(self, wake: Callable[[], None], *, tokens_max: int = QUEUE_TOKENS) -> Listener:
        """A new listener; it hears of passes that begin from now on. Event loop only."""
        listener = Listener(wake, tokens_max=tokens_max)
        self._listeners = (*self._listeners, listener)
        return listener

    def leave(self, listener: Listener) -> None:
        """End a listener. Event loop only."""
        listener.end()
        self._listeners = tuple(other for other in self._listeners if other is not listener)

    def open(self, request_id: str, position: int, tokens: int) -> RoutedPass | None:
        """A forward pass of `tokens` tokens from `position` on; None when nobody listens."""
        listeners = self._listeners
        if not listeners:
            return None
        return RoutedPass(listeners, self._shape, request_id, position, tokens=tokens)


class RoutedPass:
    """The routing of one forward pass while it runs. Model thread only."""

    def __init__(
        self,
        listeners: tuple[Listener, ...],
        shape: ModelShape,
        request_id: str,
        position: int,
        *,
        tokens: int,
    ) -> None:
        """Those who listened when it began hear of it."""
        self._listeners = listeners
        self._request_id = request_id
        self._position = position
        self._ids = np.empty((tokens, len(shape.moe_layers), shape.top_k), "<u2")
        self._layers_done = 0

    def add(self, ids: npt.NDArray[np.int64]) -> None:
        """The next layer's ids [tokens, top_k], best first, after its rows have come."""
        self._ids[:, self._layers_done] = ids
        self._layers_done += 1

    def close(self) -> None:
        """The pass is over: hand it on when every layer was added, else count its tokens."""
        tokens, layers, _ = self._ids.shape
        if self._layers_done < layers:
            for listener in self._listeners:
                listener.lose(tokens)
            return
        for start in range(0, tokens, PASS_TOKENS_MAX):
            ids = self._ids[start : start + PASS_TOKENS_MAX]
            piece = Pass(
                request=self._request_id,
                position=self._position + start,
                tokens=len(ids),
                ids=ids.tobytes(),
            )
            for listener in self._listeners:
                listener.put(piece)
