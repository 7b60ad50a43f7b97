"""Many simulations: how a pod scales, and which of its figures decides. Pure.

Owns the questions; every answer is a list of lines. All runs of a question share one seed, so that
they differ by the figure in question and not by luck.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import numpy as np

from services.simulator.events import simulate
from services.simulator.feed import place_costs
from services.simulator.model import SimPlace, SimPod, SimStation, Workload
from services.simulator.routed import Routed, respread
from services.simulator.tally import LATENCY, Outcome
from shared.core.errors import ConfigError

NOTHING_CAME: Final = (
    "no token came to its end in the simulated time: raise --arrivals, or lower the times"
)
CHANGE: Final = 0.1  # of each figure
FLAT: Final = 0.01  # a step that gains less has met a limit
FLAT_STEPS: Final = 2
_TOKENS: Final = 200  # of one simulation, over all streams
_TOKENS_OF_STREAM: Final = 3  # at least: one to start with, two to measure
_COUNT: Final = "[0-9]{1,9}"
_RANGE: Final = re.compile(
    rf"(sparks|lanes|streams)=({_COUNT}(?:,{_COUNT})*|({_COUNT})\.\.({_COUNT}))\Z"
)
_COUNT_MAX: Final = 16_384


class Point(msgspec.Struct, frozen=True):
    """One line of a sweep."""

    name: str
    count: int
    outcome: Outcome
    limit: str


class Lever(msgspec.Struct, frozen=True):
    """What 10 % less of one figure gives."""

    figure: str
    value: float
    unit: str
    tokens_per_s: float  # gained
    ms_per_token: float  # saved, per stream


@dataclass(frozen=True, slots=True)
class Axis:
    """What a sweep varies, and over which counts."""

    name: str
    counts: tuple[int, ...]


def enough_tokens(streams: int) -> int:
    """Tokens per stream that make a rate believable without taking minutes."""
    return max(_TOKENS_OF_STREAM, -(-_TOKENS // streams))


def parse_axis(text: str) -> Axis:
    """`sparks=1..64` doubles from 1 to 64, `lanes=1,2,3` takes these; ConfigError otherwise."""
    found = _RANGE.fullmatch(text)
    if found is None:
        raise ConfigError(f"sweep {text!r}: write sparks=1..64, lanes=1..4096 or streams=1,2,4")
    if found[3] is None:
        counts = sorted({int(part) for part in found[2].split(",")})
    else:
        low, high = int(found[3]), int(found[4])
        doubled = [low << step for step in range(_COUNT_MAX.bit_length())]
        counts = [low, *(count for count in doubled[1:] if count < high), high]
    if not 1 <= counts[0] <= counts[-1] <= _COUNT_MAX or counts != sorted(counts):
        raise ConfigError(f"sweep {text!r}: counts rise from at least 1 to at most {_COUNT_MAX}")
    return Axis(found[1], tuple(dict.fromkeys(counts)))


def sweep(pod: SimPod, routed: Routed, work: Workload, axis: Axis, seed: int) -> Iterator[Point]:
    """Outcomes along an axis, as they are found.

    Ends early when two steps in a row gained less than 1 % with a resource busy all the time: more
    of the same would only queue for it.
    """
    best = 0.0
    flat = 0
    for count in axis.counts:
        at_pod, at_routed, at_work = _at(pod, routed, work, axis.name, count)
        outcome = simulate(at_pod, at_routed, at_work, seed=seed)
        yield Point(axis.name, count, outcome, outcome.limit)
        is_flat = outcome.limit != LATENCY and outcome.tokens_per_s < best * (1 + FLAT)
        flat = flat + 1 if is_flat else 0
        best = max(best, outcome.tokens_per_s)
        if flat == FLAT_STEPS:
            return


def saturated_at(points: list[Point]) -> Point | None:
    """The first point that no later one beats by 1 %, if there is one before the last."""
    for index, point in enumerate(points[:-1]):
        best_later = max(later.outcome.tokens_per_s for later in points[index + 1 :])
        if best_later < point.outcome.tokens_per_s * (1 + FLAT):
            return point
    return None


def what_decides(pod: SimPod, routed: Routed, work: Workload, seed: int) -> list[Lever]:
    """Each figure reduced by 10 % (a bandwidth: raised), largest gain first."""
    base = simulate(pod, routed, work, seed=seed)
    if not base.tokens:
        raise ConfigError(NOTHING_CAME)
    levers = []
    for figure, (value, unit, changed) in _figures(pod).items():
        outcome = simulate(changed, routed, work, seed=seed)
        gain = outcome.tokens_per_s - base.tokens_per_s
        saved_ms = 1000 / base.tokens_per_s_stream - 1000 / outcome.tokens_per_s_stream
        levers.append(Lever(figure, value, unit, gain, saved_ms))
    return sorted(levers, key=lambda lever: -lever.tokens_per_s)


def _at(
    pod: SimPod, routed: Routed, work: Workload, name: str, count: int
) -> tuple[SimPod, Routed, Workload]:
    if name == "sparks":
        at_pod, at_routed = with_sparks(pod, routed, count)
        return at_pod, at_routed, work
    streams = count if name == "streams" else max(count, work.streams)
    lanes = count if name == "lanes" else min(work.lanes, count)
    at_work = replace(work, streams=streams, lanes=lanes, tokens=enough_tokens(streams))
    return pod, routed, at_work


def with_sparks(pod: SimPod, routed: Routed, count: int) -> tuple[SimPod, Routed]:
    """The same pod with `count` Sparks that hold what its Sparks held, whatever their memory."""
    group = np.array([i for i, place in enumerate(pod.places) if place.tier == "spark"])
    if not len(group):
        raise ConfigError("this pod has no Spark whose number could be varied")
    like = pod.places[int(group[0])]
    sparks = tuple(replace(like, name=f"spark{index}") for index in range(count))
    resized = SimPod(pod.station, pod.places[: int(group[0])] + sparks)
    assignment = respread(routed.assignment, group, count)
    return resized, routed.relaid(assignment, place_costs(resized))


def _figures(pod: SimPod) -> Mapping[str, tuple[float, str, SimPod]]:
    """Figure -> its value, unit, and the pod in which it is 10 % better."""
    found: dict[str, tuple[float, str, SimPod]] = {}
    station = pod.station
    for name, title in _STATION_TIMES.items():
        value = getattr(station, name)
        if value:
            better = _station_with(station, name, value * (1 - CHANGE))
            found[title] = (value, "us", SimPod(better, pod.places))
    faster = _station_with(station, "link_bytes_per_s", station.link_bytes_per_s / (1 - CHANGE))
    found["link"] = (station.link_bytes_per_s / 1e9, "GB/s", SimPod(faster, pod.places))
    for tier in dict.fromkeys(place.tier for place in pod.places):
        like = next(place for place in pod.places if place.tier == tier)
        fixed = like.curve.fixed_us
        slope = float(like.curve.at(np.ones(1))[0]) - fixed
        for part, value in (("fixed", fixed), ("per expert", slope)):
            if value:
                better_pod = _with_tier(pod, tier, _SCALES[part])
                found[f"{tier} {part}"] = (value, "us", better_pod)
    return found


_STATION_TIMES: Final[Mapping[str, str]] = {
    "serial_us": "serial per layer",
    "shared_us": "shared experts per layer",
    "post_us": "post per message",
    "collect_us": "collect per message",
    "rest_us": "rest per token",
}


def _station_with(station: SimStation, name: str, value: float) -> SimStation:
    # replace() takes fields by keyword; which one is data here
    figures = {field: getattr(station, field) for field in station.__dataclass_fields__}
    return SimStation(**(figures | {name: value}))


def _with_tier(pod: SimPod, tier: str, change: Callable[[SimPlace], SimPlace]) -> SimPod:
    places = (change(place) if place.tier == tier else place for place in pod.places)
    return SimPod(pod.station, tuple(places))


def _fixed_better(place: SimPlace) -> SimPlace:
    curve = place.curve.scaled(fixed=1 - CHANGE)
    return replace(place, curve=curve, wire_us=place.wire_us * (1 - CHANGE))


def _slope_better(place: SimPlace) -> SimPlace:
    return replace(place, curve=place.curve.scaled(slope=1 - CHANGE))


_SCALES: Final[Mapping[str, Callable[[SimPlace], SimPlace]]] = {
    "fixed": _fixed_better,
    "per expert": _slope_better,
}
