"""Predictions that a running pod can refute. Pure.

Owns two of them. `as_it_runs`: the layer time of a pod fed with its own hop curves and Station
figures. The wait for the slowest place is predicted, but the trip that goes in was measured where
the wait ends: it shows that the parts add up, no more. `as_another`: the layer time of a pod with
other nodes, from figures of the first pod alone; there, nodes compete for the host's cores, so the
trip is found such that the first pod comes out as measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from services.planner.assignment import Assignment
from services.simulator.events import simulate
from services.simulator.feed import (
    FedPod,
    MeasuredNode,
    MeasuredPod,
    fed,
    likeness,
    place_costs,
)
from services.simulator.model import SimPlace, SimPod, Workload
from services.simulator.routed import Counts, Routed, drawn

_TOKENS: Final = 200
_HALVINGS: Final = 12  # of the measured time: a fraction of a permille is left


@dataclass(frozen=True, slots=True)
class Predicted:
    """Microseconds per layer, and how many of them the Station waits for rows."""

    layer_us: float
    wait_us: float


def as_it_runs(measured: MeasuredPod, *, source: str, seed: int = 0) -> Predicted:
    """The pod that was measured, from its own figures."""
    own = fed(measured, source=source, is_shared=True)
    return _predicted(own.pod, own.assignment, own.histogram, own.top_k, seed)


def as_another(
    measured: MeasuredPod, nodes: Sequence[MeasuredNode], *, cores: int, source: str, seed: int = 0
) -> Predicted:
    """A pod with `nodes`, of which only the placement is known, from another one's figures."""
    own = fed(measured, source=source, is_shared=True, cores=cores)
    trip_us = _trip_us(own, seed)
    pod, assignment, histogram = likeness(
        _with_trip(own.pod, trip_us), nodes, len(own.assignment.home)
    )
    return _predicted(pod, assignment, histogram, own.top_k, seed)


def _trip_us(own: FedPod, seed: int) -> float:
    """The trip with which the pod takes as long as it did, or 0 when it cannot be that fast."""
    low, high = 0.0, own.layer_us
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        pod = _with_trip(own.pod, middle)
        predicted = _predicted(pod, own.assignment, own.histogram, own.top_k, seed)
        is_slower = predicted.layer_us > own.layer_us
        low, high = (low, middle) if is_slower else (middle, high)
    return low


def _with_trip(pod: SimPod, trip_us: float) -> SimPod:
    return SimPod(pod.station, tuple(_place_with(place, trip_us) for place in pod.places))


def _place_with(place: SimPlace, trip_us: float) -> SimPlace:
    if place.is_station:
        return place
    added = trip_us - place.wire_us
    curve = replace(place.curve, us=tuple(max(0.0, us + added) for us in place.curve.us))
    return replace(place, curve=curve, wire_us=trip_us)


def _predicted(
    pod: SimPod, assignment: Assignment, histogram: Counts, top_k: int, seed: int
) -> Predicted:
    trace = drawn(histogram, tokens=_TOKENS, top_k=top_k, seed=seed)
    routed = Routed.of(trace, assignment, place_costs(pod))
    outcome = simulate(pod, routed, Workload(tokens=_TOKENS), seed=seed)
    wait_us = 1000 * sum(outcome.waits_ms.values()) / routed.layers
    return Predicted(outcome.layer_us, wait_us)
