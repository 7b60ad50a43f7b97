"""The hot wait: groups, modes, timeouts, interrupts, and two processes that never lose a ring."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shared._native import ffi, lib

TIMED_OUT, INTERRUPTED, BAD_ARGUMENT = -1, -2, -3
MS = 1_000_000
LONG_NS = 10_000 * MS  # a bound, never the expected length

PEER = """
import mmap, sys
from shared._native import ffi, lib
memory = mmap.mmap(int(sys.argv[1]), 4096)
base = ffi.from_buffer("uint8_t[]", memory)
bells, words = ffi.cast("uint64_t *", base), ffi.cast("uint32_t *", base + 1024)
rounds, spin_ns = int(sys.argv[2]), int(sys.argv[3])
watched, expected, group = ffi.new("uint64_t *[1]", [bells]), ffi.new("uint64_t[1]"), [0]
for turn in range(1, rounds + 1):
    expected[0] = turn
    found = lib.k3_wait(
        watched, expected, group, 1, 1, 0, words, ffi.NULL, 0, spin_ns, 10_000_000_000
    )
    if found != 0:
        sys.exit(f"turn {turn}: {found}")
    for _ in range(turn % 64):
        pass
    lib.k3_ring(bells + 1, turn, words + 16)
"""


class Words:
    """Bells and wake words in ordinary memory, and a wait with defaults."""

    def __init__(self, bells: int) -> None:
        self.bells = ffi.new("uint64_t[]", bells)
        self.wake = ffi.new("uint32_t[2]")
        self.interrupt = ffi.new("uint32_t *")

    def wait(
        self,
        expected: list[int],
        group: list[int],
        *,
        groups: int = 1,
        mode: int = 0,
        seen: int = 0,
        spin_ns: int = 0,
        timeout_ns: int = 0,
    ) -> int:
        watched = ffi.new("uint64_t *[]", [self.bells + i for i in range(len(expected))])
        return lib.k3_wait(
            watched, expected, group, len(expected), groups, mode, self.wake, self.interrupt, seen,
            spin_ns, timeout_ns,
        )  # fmt: skip

    def wait_in_thread(self, **arguments) -> tuple[threading.Thread, list[int]]:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(self.wait(**arguments)))
        thread.start()
        return thread, found

    def until_asleep(self, sleepers: int = 1) -> None:
        limit = time.monotonic() + 10
        while self.wake[1] != sleepers:
            assert time.monotonic() < limit, "nobody went to sleep"
            time.sleep(0.001)


def test_lowest_complete_group_is_returned() -> None:
    """A group counts when all its bells have their value; of several, the lowest number."""
    words = Words(4)
    expected, group = [5, 6, 7, 8], [2, 1, 1, 2]
    assert words.wait(expected, group, groups=3) == TIMED_OUT
    words.bells[1] = 6
    assert words.wait(expected, group, groups=3) == TIMED_OUT
    words.bells[0], words.bells[3] = 5, 8
    assert words.wait(expected, group, groups=3) == 2
    words.bells[2] = 7
    assert words.wait(expected, group, groups=3) == 1


def test_mode_1_waits_for_a_change() -> None:
    """In mode 1 a bell counts as soon as it differs from the given value."""
    words = Words(2)
    assert words.wait([0, 0], [0, 0], mode=1) == TIMED_OUT
    words.bells[0] = 2**64 - 1
    assert words.wait([0, 0], [0, 0], mode=1) == TIMED_OUT
    words.bells[1] = 1
    assert words.wait([0, 0], [0, 0], mode=1) == 0


@pytest.mark.parametrize("spin_ns", [0, 5 * MS, LONG_NS])
def test_timeout_is_kept(spin_ns: int) -> None:
    """A wait for nothing ends after its timeout, not before, whether it spins, sleeps or both."""
    words = Words(1)
    start = time.monotonic_ns()
    assert words.wait([1], [0], spin_ns=spin_ns, timeout_ns=30 * MS) == TIMED_OUT
    assert 30 * MS <= time.monotonic_ns() - start < 5_000 * MS
    assert words.wake[1] == 0


def test_group_without_bells_is_never_complete() -> None:
    """Nothing to wait for is a sleep until the timeout, not an answer."""
    words = Words(1)
    assert words.wait([], [], groups=0, timeout_ns=MS) == TIMED_OUT
    assert words.wait([], [], groups=3, timeout_ns=MS) == TIMED_OUT
    words.bells[0] = 1
    assert words.wait([1], [2], groups=3) == 2


def test_interrupt_ends_a_sleep() -> None:
    """An interrupt wakes a sleeper without any bell, and stays visible until it is seen."""
    words = Words(1)
    thread, found = words.wait_in_thread(expected=[], group=[], groups=0, timeout_ns=LONG_NS)
    words.until_asleep()
    lib.k3_interrupt(words.interrupt, words.wake)
    thread.join(10)
    assert found == [INTERRUPTED]
    assert words.wait([1], [0], seen=0, timeout_ns=LONG_NS) == INTERRUPTED
    assert words.wait([1], [0], seen=1) == TIMED_OUT
    words.bells[0] = 1
    assert words.wait([1], [0], seen=0) == 0, "a complete group comes first"


def test_one_ring_wakes_every_sleeper() -> None:
    """Two lanes asleep on one wake word for different bells are both woken by one bare ring."""
    words = Words(2)
    first, found_first = words.wait_in_thread(expected=[1], group=[0], timeout_ns=LONG_NS)
    second, found_second = words.wait_in_thread(
        expected=[2, 1], group=[1, 0], groups=2, timeout_ns=LONG_NS
    )
    words.until_asleep(2)
    words.bells[0], words.bells[1] = 1, 1  # without a ring nobody hears it
    lib.k3_ring(ffi.NULL, 0, words.wake)
    first.join(10)
    second.join(10)
    assert found_first == [0]
    assert found_second == [0]


def test_every_ring_moves_the_counter() -> None:
    """A sleeper hands the kernel the counter it saw; only a change of it stops a sleep in time."""
    words = Words(1)
    lib.k3_ring(words.bells, 1, words.wake)
    lib.k3_ring(ffi.NULL, 0, words.wake)
    lib.k3_interrupt(words.interrupt, words.wake)
    assert (words.wake[0], words.interrupt[0], words.bells[0]) == (3, 1, 1)
    words.wake[0] = 2**32 - 1
    lib.k3_ring(ffi.NULL, 0, words.wake)
    assert words.wake[0] == 0


def test_waiting_releases_the_gil() -> None:
    """Python goes on while a thread waits: the ring below comes from this very interpreter."""
    words = Words(1)
    thread, found = words.wait_in_thread(
        expected=[9], group=[0], spin_ns=LONG_NS, timeout_ns=LONG_NS
    )
    lib.k3_ring(words.bells, 9, ffi.NULL)
    thread.join(10)
    assert found == [0]


@pytest.mark.parametrize(
    "arguments",
    [
        {"expected": [1], "group": [1]},
        {"expected": [1], "group": [-1]},
        {"expected": [1], "group": [0], "groups": 65},
        {"expected": [1], "group": [0], "groups": -1},
        {"expected": [1], "group": [0], "mode": 2},
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict) -> None:
    """A group or mode that does not exist is answered at once, never waited for."""
    assert Words(1).wait(**arguments, timeout_ns=LONG_NS) == BAD_ARGUMENT


@pytest.mark.parametrize(
    ("rounds", "spin_ns", "peer_spin_ns"),
    [(50_000, 0, 0), (50_000, 0, MS), (5_000, MS, 0), (2_000, MS // 20, MS // 20)],
)
def test_two_processes_never_lose_a_ring(rounds: int, spin_ns: int, peer_spin_ns: int) -> None:
    """Ping-pong over a memfd: a turn depends on the ring before it, so a lost ring is a timeout.

    Where only the peer spins, its answer comes just while this side goes to sleep, and its growing
    delay moves the ring in steps of some 20 ns over every instruction of falling asleep.
    """
    fd = os.memfd_create("k3-bell-test")
    try:
        os.ftruncate(fd, 4096)
        base = ffi.from_buffer("uint8_t[]", mmap.mmap(fd, 4096))
        bells, words = ffi.cast("uint64_t *", base), ffi.cast("uint32_t *", base + 1024)
        peer = subprocess.Popen(
            [sys.executable, "-c", PEER, str(fd), str(rounds), str(peer_spin_ns)],
            pass_fds=[fd],
            stderr=subprocess.PIPE,
            cwd=Path(__file__).parents[3],
        )
        try:
            watched, expected = ffi.new("uint64_t *[1]", [bells + 1]), ffi.new("uint64_t[1]")
            for turn in range(1, rounds + 1):
                lib.k3_ring(bells, turn, words)
                expected[0] = turn
                found = lib.k3_wait(
                    watched, expected, [0], 1, 1, 0, words + 16, ffi.NULL, 0, spin_ns, LONG_NS
                )
                assert found == 0, f"turn {turn} of {rounds} was lost"
            assert peer.wait(10) == 0
            assert (words[1], words[17]) == (0, 0), "somebody is still counted as asleep"
        finally:
            peer.kill()
            assert peer.stderr is not None
            peer.stderr.close()
            peer.wait()
    finally:
        os.close(fd)
