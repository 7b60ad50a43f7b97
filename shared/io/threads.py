"""Threads that a process may leave behind: none of them is waited for when it exits.

For calls that can hang for longer than a stop may take, such as a read from a failing disk. Must
not know what runs on them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Final, Self, TypeVar

T = TypeVar("T")
_Task = Callable[[], None]


class DaemonThreads:
    """Runs callables on a few daemon threads, which start with the first one.

    Leaving the context lets every thread end after the work it has in hand, and waits for none.
    """

    def __init__(self, count: int, name: str) -> None:
        """`name` is what the threads are called; nothing runs yet."""
        self._count: Final = count
        self._name: Final = name
        self._threads: list[threading.Thread] = []
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        """The threads themselves."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let the threads end."""
        for _ in self._threads:
            self._tasks.put(None)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` in turn; the future has what it returned or raised."""
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()
        future: Future[T] = Future()
        self._tasks.put(lambda: _fulfil(future, work))
        return future

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # and with it what the work refers to, while this thread waits for the next


def _fulfil(future: Future[T], work: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - whoever waits for the future handles it
        future.set_exception(error)
    else:
        future.set_result(result)
