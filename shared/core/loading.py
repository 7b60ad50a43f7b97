"""How a bank comes into memory: in which steps, and whether there is room for the next one. Pure.

A step is taken only while the machine keeps a floor of free memory. On a machine whose GPU shares
the memory a load that takes the last of it freezes everything; one that waits, or ends, does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, TypeAlias

Phase: TypeAlias = Literal["staging", "loading"]  # from another place to disk; from disk to memory

STEP_BYTES: Final = 256 * 2**20
FLOOR_BYTES_MAX: Final = 2 * 2**30
FLOOR_SHARE: Final = 20  # of a small machine one part in so many stays free
WAIT_US: Final = 30_000_000


class Verdict(Enum):
    """What to do about the next step."""

    PROCEED = "proceed"
    WAIT = "wait"
    GIVE_UP = "give_up"


@dataclass(frozen=True, slots=True)
class MemoryFloor:
    """How much memory a load leaves free, and how long it waits for others to free some."""

    floor_bytes: int
    wait_us: int = WAIT_US

    def judge(self, available_bytes: int | None, *, step_bytes: int, waited_us: int) -> Verdict:
        """Whether a step of `step_bytes` may begin after `waited_us` of waiting for it.

        `available_bytes` is None where the kernel does not say: then nothing is held back.
        """
        if available_bytes is None or not self.missing_bytes(available_bytes, step_bytes):
            return Verdict.PROCEED
        return Verdict.WAIT if waited_us < self.wait_us else Verdict.GIVE_UP

    def missing_bytes(self, available_bytes: int, step_bytes: int) -> int:
        """What has to be freed before a step of `step_bytes` leaves the floor untouched."""
        return max(0, self.floor_bytes + step_bytes - available_bytes)


def default_floor_bytes(memory_bytes: int) -> int:
    """The floor of a machine with `memory_bytes` of memory when its settings name none."""
    return min(FLOOR_BYTES_MAX, memory_bytes // FLOOR_SHARE)


def steps(rows: int, *, stride_bytes: int, step_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges [first, last) that cover `rows` records in order.

    Each takes at most `step_bytes`, but one record at least.
    """
    count = max(1, step_bytes // stride_bytes)
    for first in range(0, rows, count):
        yield first, min(first + count, rows)


def part_of(done_bytes: int, total_bytes: int) -> str:
    """`12.3 of 98.7 GiB`, or in MiB what is less than one GiB, for a person."""
    unit, name = (2**30, "GiB") if total_bytes >= 2**30 else (2**20, "MiB")
    return f"{done_bytes / unit:.1f} of {total_bytes / unit:.1f} {name}"
