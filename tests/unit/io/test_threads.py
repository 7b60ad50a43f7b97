"""Daemon threads: results come back, and a thread that hangs keeps nobody."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from shared.io.threads import DaemonThreads


def test_results_and_errors_come_back() -> None:
    """In the future of each call; a failed one ends no thread."""
    with DaemonThreads(2, "test-threads") as threads:
        bad = threads.submit(lambda: 1 // 0)
        good = [threads.submit(lambda n=n: n * n) for n in range(20)]

        assert [future.result(5) for future in good] == [n * n for n in range(20)]
        with pytest.raises(ZeroDivisionError):
            bad.result(5)
        assert sum(t.name == "test-threads" for t in threading.enumerate()) == 2


def test_threads_end_with_the_context() -> None:
    """No thread is left where none hangs, and a cancelled call never runs."""
    ran: list[int] = []
    gate = threading.Event()
    with DaemonThreads(1, "test-ends") as threads:
        first = threads.submit(gate.wait)
        second = threads.submit(lambda: ran.append(1))
        assert second.cancel()
        gate.set()
        assert first.result(5)
    for thread in threading.enumerate():
        if thread.name == "test-ends":
            thread.join(5)
            assert not thread.is_alive()
    assert ran == []


def test_a_process_exits_while_a_call_hangs() -> None:
    """What a thread pool of the standard library would wait for, for ever."""
    code = (
        "import threading\n"
        "from shared.io.threads import DaemonThreads\n"
        "with DaemonThreads(1, 'hangs') as threads:\n"
        "    threads.submit(threading.Event().wait)\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=10, check=True)
