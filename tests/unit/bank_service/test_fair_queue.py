"""Who is served next, and what a status line says: pure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.bank_service.fair_queue import FairQueue
from services.bank_service.traffic import Traffic


def test_askers_take_turns() -> None:
    """One that asks much waits behind its own questions, not before the others'."""
    queue: FairQueue[str, int] = FairQueue(8)
    for item in range(6):
        assert queue.put("greedy", item)
    queue.put("modest", 100)
    queue.put("late", 200)

    served = [queue.take() for _ in range(8)]

    assert served == [
        ("greedy", 0), ("modest", 100), ("late", 200),
        ("greedy", 1), ("greedy", 2), ("greedy", 3), ("greedy", 4), ("greedy", 5),
    ]  # fmt: skip
    assert queue.take() is None


def test_a_full_asker_disturbs_nobody() -> None:
    """What is over the bound is refused; others still have all of their room."""
    queue: FairQueue[str, int] = FairQueue(2)

    assert [queue.put("greedy", item) for item in range(4)] == [True, True, False, False]
    assert [queue.put("modest", item) for item in range(3)] == [True, True, False]
    assert len(queue) == 4


def test_forgetting_an_asker_drops_only_its_items() -> None:
    """A node that left is not served, and may come back."""
    queue: FairQueue[str, int] = FairQueue(4)
    for item in range(3):
        queue.put("gone", item)
        queue.put("here", item)

    assert queue.forget("gone") == 3
    assert queue.forget("gone") == 0
    assert len(queue) == 3
    assert {queue.take() for _ in range(3)} == {("here", 0), ("here", 1), ("here", 2)}
    assert queue.put("gone", 7)
    assert queue.take() == ("gone", 7)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_nobody_is_served_twice_while_another_waits(steps: list[tuple[str, bool]]) -> None:
    """Between two turns of one asker, everyone who waited at the first had a turn."""
    queue: FairQueue[str, int] = FairQueue(4)
    waiting: dict[str, int] = dict.fromkeys("abc", 0)
    owed: dict[str, set[str]] = {name: set() for name in "abc"}  # must be served before NAME again
    for number, (name, is_put) in enumerate(steps):
        if is_put:
            assert queue.put(name, number) == (waiting[name] < 4)
            waiting[name] = min(4, waiting[name] + 1)
            continue
        taken = queue.take()
        assert (taken is None) == (not any(waiting.values()))
        if taken is None:
            continue
        served = taken[0]
        assert not owed[served]
        waiting[served] -= 1
        owed[served] = {other for other in "abc" if other != served and waiting[other]}
        for others in owed.values():
            others.discard(served)
        assert len(queue) == sum(waiting.values())


def test_the_status_counts_anew_each_time() -> None:
    """Nodes and rate since the last look."""
    traffic = Traffic()
    traffic.add("spark0", 3_000_000)
    traffic.add("spark1", 1_000_000)
    traffic.add("spark0", 1_000_000)

    assert traffic.summary(2_000_000) == "2 nodes pull at 2.5 MB/s"
    assert traffic.summary(2_000_000) == "no node pulls"
    traffic.add("spark1", 1)
    assert traffic.summary(0) == "1 node pulls at 1.0 MB/s"
