"""Small pods with hand-picked figures, and routings in which every token does the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from services.planner.assignment import Assignment
from services.routing.trace import SYNTHETIC, Trace
from services.simulator.curve import CostCurve
from services.simulator.feed import place_costs
from services.simulator.model import SimPlace, SimPod, SimStation
from services.simulator.routed import Routed
from shared.core.placement import Tier

FAST_LINK = 1e18  # bytes per second: no row takes a nanosecond


def place(
    name: str, tier: Tier, fixed_us: float, per_expert_us: float = 0.0, *, wire_us: float = 0.0
) -> SimPlace:
    """A place with a straight curve."""
    return SimPlace(name, tier, CostCurve.linear(fixed_us, per_expert_us), wire_us)


def pod(*places: SimPlace, serial_us: float = 100.0, **figures: Any) -> SimPod:
    """A pod on an endless link, with nothing but the serial term unless it is given."""
    return SimPod(
        SimStation(serial_us=serial_us, **({"link_bytes_per_s": FAST_LINK} | figures)), places
    )


def trace(ids: Sequence[Sequence[Sequence[int]]] | np.ndarray, experts: int) -> Trace:
    """A trace of one request: ids [tokens, layers, top_k]."""
    array = np.array(ids, np.uint16)
    steps = np.arange(len(array), dtype=np.int32)
    return Trace(SYNTHETIC, 0, experts, np.zeros_like(steps), steps, array)


def routed(
    simulated: SimPod,
    homes: Sequence[Sequence[int]] | np.ndarray,
    ids: Sequence[Sequence[Sequence[int]]] | np.ndarray,
    *,
    copies: Sequence[Sequence[int]] | None = None,
) -> Routed:
    """`ids` [tokens, layers, top_k] over `homes` (and copies) [layers, experts]."""
    home = np.array(homes, np.int16)
    assignment = Assignment.without_copies(home, [home.size] * len(simulated.places))
    if copies is not None:
        assignment = assignment.with_copies(np.array(copies, np.int16))
    return Routed.of(trace(ids, home.shape[1]), assignment, place_costs(simulated))
