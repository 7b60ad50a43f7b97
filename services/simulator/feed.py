"""Simulated pods from a pod description and from what a running pod measured. Pure.

Owns which figure of a description or of `k3 status --json` becomes which figure of the model. Must
not know how the JSON was fetched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta

from services.planner.assignment import Assignment
from services.planner.cost import PlaceCosts
from services.planner.pod import Pod
from services.simulator.curve import SIGMAS_OF_P99, CostCurve
from services.simulator.model import SimPlace, SimPod, SimStation
from services.simulator.routed import Counts
from shared.core.errors import ConfigError
from shared.core.placement import Tier
from station.hop_table import EXPERTS_MAX

DISPATCHES_MIN: Final = 200  # of a node, before its hop table is believed
LAYERS_MAX: Final = 1024
_BITS: Final = 8
_GIGA: Final = 1e9
_DECODE: Final = (
    "serial_us",
    "wait_us",
    "post_us",
    "local_experts_us",
    "shared_experts_us",
    "combine_us",
    "collect_us",
    "cold_us",
    "trip_us",
)

# bounds: a status may come from anything that answers at an address
Micros = Annotated[float, Meta(ge=0, le=1e12)]
Count = Annotated[int, Meta(ge=0, le=2**53)]


class HopPoint(msgspec.Struct, frozen=True):
    """Mean of a node's one-token dispatches of so many experts."""

    experts: Annotated[int, Meta(ge=1, le=EXPERTS_MAX)]
    dispatches: Count
    hop_us: Micros
    node_us: Micros
    node_us_sd: Micros = 0.0


class MeasuredNode(msgspec.Struct, frozen=True):
    """One node of a status, as far as a simulation is fed with it."""

    name: str
    tier: Tier
    experts: Annotated[int, Meta(ge=0, le=2**22)]
    rows: Count
    state: str = ""
    hops: tuple[HopPoint, ...] = ()

    @property
    def is_station(self) -> bool:
        """Whether the Station computes its experts itself."""
        return self.state == "local"

    @property
    def dispatches(self) -> int:
        """One-token dispatches that were answered."""
        return sum(point.dispatches for point in self.hops)


class MeasuredPod(msgspec.Struct, frozen=True):
    """`k3 status --json`, as far as a simulation is fed with it."""

    model: str
    decode: dict[str, Annotated[float, Meta(ge=0, le=1e15)]]
    nodes: Annotated[tuple[MeasuredNode, ...], Meta(min_length=1, max_length=4096)]


@dataclass(frozen=True, slots=True)
class FedPod:
    """A pod as measured: the model's figures, where its experts live, how often they are chosen.

    `layer_us` is what the pod itself measured per layer: to compare with, not an input.
    """

    pod: SimPod
    assignment: Assignment
    histogram: Counts
    top_k: int
    layer_us: float


def pod_of(pod: Pod) -> SimPod:
    """The model of a pod description; its marks say which figures are measured."""
    station = SimStation(serial_us=pod.serial_us, rest_us=1000 * pod.rest_ms)
    wire_us = 0.0
    if pod.fabric is not None:
        wire_us = 2 * pod.fabric.one_way_us
        station = replace(
            station,
            post_us=pod.fabric.message_us / 2,
            collect_us=pod.fabric.message_us / 2,
            link_bytes_per_s=pod.fabric.station_gbit_per_s * _GIGA / _BITS,
        )
    places = tuple(
        SimPlace(
            node.name,
            node.tier,
            CostCurve.linear(node.fixed_us, node.per_expert_us),
            wire_us=min(wire_us, node.fixed_us) if node.tier == "spark" else 0.0,
        )
        for node in pod.nodes
    )
    return SimPod(station, places)


def place_costs(pod: SimPod) -> PlaceCosts:
    """What the Station's choice of copies goes by: each curve as a straight line."""
    one = np.ones(1)
    fixed = [place.curve.fixed_us for place in pod.places]
    slope = [float(place.curve.at(one)[0]) - place.curve.fixed_us for place in pod.places]
    return PlaceCosts(np.array(fixed), np.array(slope))


def parse_status(status: Mapping[str, Any] | bytes, *, source: str) -> MeasuredPod:
    """The measured part of a status; ConfigError names what is missing."""
    try:
        if isinstance(status, bytes):
            return msgspec.json.decode(status, type=MeasuredPod)
        return msgspec.convert(status, MeasuredPod)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{source}: not what `k3 status --json` prints ({error}): use the k3 of the pod's "
            "version"
        ) from error


def layer_us(measured: MeasuredPod) -> float:
    """Microseconds per layer as the pod measured them; the token's rest is spread over layers."""
    return measured.decode["serial_us"] + measured.decode["wait_us"]


def between(before: MeasuredPod, after: MeasuredPod) -> MeasuredPod:
    """What was measured between two statuses of one pod, which hold means since its start."""
    old = {node.name: node for node in before.nodes}
    layers = [_layers_of(pod.decode) for pod in (before, after)]
    counted = max(layers[1] - layers[0], 1e-9)
    decode = {
        name: (value * layers[1] - before.decode.get(name, 0.0) * layers[0]) / counted
        for name, value in after.decode.items()
    }
    decode["steps"] = after.decode["steps"] - before.decode["steps"]
    decode["layers_per_token"] = counted / max(decode["steps"], 1e-9)
    nodes = tuple(_node_between(old[node.name], node) for node in after.nodes)
    return MeasuredPod(after.model, decode, nodes)


def with_curves(pod: SimPod, measured: MeasuredPod, *, source: str) -> SimPod:
    """The same pod with the hop curves that another one measured.

    By node name, else by tier: the curve of a tier is the mean over its nodes. Station figures
    stay. ConfigError when nothing that was measured fits a place.
    """
    trip_us = measured.decode.get("trip_us", 0.0)
    warm = [node for node in measured.nodes if node.dispatches >= DISPATCHES_MIN]
    names = {node.name: curve_of([node], trip_us) for node in warm}
    tiers = {
        tier: curve_of([node for node in warm if node.tier == tier], trip_us)
        for tier in {node.tier for node in warm}
    }
    places = []
    for place in pod.places:
        curve = names.get(place.name) or tiers.get(place.tier)
        places.append(place if curve is None else replace(place, curve=curve, wire_us=trip_us))
    if tuple(places) == pod.places:
        raise ConfigError(
            f"{source}: no hop curve for any place of this pod: every curve needs "
            f"{DISPATCHES_MIN} answered dispatches of one token; let the pod answer something first"
        )
    return SimPod(pod.station, tuple(places))


def curve_of(
    nodes: Sequence[MeasuredNode], trip_us: float, *, is_shared: bool = False
) -> CostCurve:
    """The curve of like nodes: their own share of the hop, by experts, plus the trip.

    Nodes that share a host are slow together, because the host is: their spread is left out, or
    the slowest of many would be drawn from luck that they do not have.
    """
    count: dict[int, int] = {}
    total: dict[int, float] = {}
    varied = 0.0
    for point in (point for node in nodes for point in node.hops if point.dispatches):
        count[point.experts] = count.get(point.experts, 0) + point.dispatches
        total[point.experts] = total.get(point.experts, 0.0) + point.dispatches * point.node_us
        varied += point.dispatches * (point.node_us_sd / max(point.node_us, 1.0)) ** 2
    points = {k: total[k] / count[k] + trip_us for k in count}
    if is_shared:
        return CostCurve.measured(points, weights=count)
    sigma = math.sqrt(math.log1p(varied / max(1, sum(count.values()))))
    return CostCurve.measured(points, weights=count, spread=math.exp(SIGMAS_OF_P99 * sigma))


def likeness(
    pod: SimPod, nodes: Sequence[MeasuredNode], layers: int
) -> tuple[SimPod, Assignment, Counts]:
    """A pod with other nodes but the figures of this one: each node is like its tier here.

    Only names, tiers and numbers of experts are taken from `nodes`; all experts are taken as
    equally popular. ConfigError for a tier that this pod has not.
    """
    tiers = {place.tier: place for place in reversed(pod.places)}
    if missing := {node.tier for node in nodes} - set(tiers):
        raise ConfigError(f"no {', '.join(sorted(missing))} was measured to be like")
    places = tuple(replace(tiers[node.tier], name=node.name) for node in nodes)
    return SimPod(pod.station, places), *_laid_out(nodes, [1.0] * len(nodes), layers)


def fed(measured: MeasuredPod, *, source: str, is_shared: bool, cores: int | None = None) -> FedPod:
    """A running pod as a model of itself.

    Station figures are its means over decode steps; a node's experts are taken as equally popular,
    and the nodes as popular as the rows they computed. `is_shared`: all runs on one host. Its
    `cores` are for a pod of other nodes; a pod as it is has waited for them in what it measured.
    ConfigError while the pod has not decoded enough to know.
    """
    decode, nodes = measured.decode, measured.nodes
    remote = [node for node in nodes if not node.is_station]
    if not decode.get("steps") or not decode.get("layers_per_token"):
        raise _too_little(source, "the Station")
    for node in remote:
        # without curve it is not known what a node costs, be it absent or never asked
        if node.dispatches < DISPATCHES_MIN:
            raise _too_little(source, node.name)
    if missing := [name for name in _DECODE if name not in decode]:
        raise ConfigError(
            f"{source}: its decode times lack {', '.join(missing)}: use the k3 of the pod's version"
        )
    layers = round(decode["layers_per_token"])
    if not 1 <= layers <= min(LAYERS_MAX, sum(node.experts for node in nodes)):
        raise ConfigError(f"{source}: {layers} layers per token: is this the status of a pod?")
    counted = decode["steps"] * decode["layers_per_token"]
    rows = {node.name: max(1, node.rows) for node in nodes}
    sent = sum(point.experts * point.dispatches for node in remote for point in node.hops)
    remote_share = sum(rows[node.name] for node in remote) / sum(rows.values())
    top_k = max(1, round(sent / counted / remote_share))
    asked = sum(node.dispatches for node in remote) / counted
    popularity = [rows[node.name] / max(node.experts, 1) for node in nodes]
    assignment, histogram = _laid_out(nodes, popularity, layers)
    own_share = 1 - remote_share
    own = CostCurve.linear(0.0, decode["local_experts_us"] / max(top_k * own_share, 1e-9))
    trip_us = decode["trip_us"]
    places = tuple(
        SimPlace(
            node.name,
            node.tier,
            curve_of([node], trip_us, is_shared=is_shared),
            wire_us=trip_us,
        )
        if not node.is_station
        else SimPlace(node.name, "hbm", own)
        for node in nodes
    )
    pod = SimPod(_station(decode, asked, cores), places)
    return FedPod(pod, assignment, histogram, top_k, layer_us(measured))


def _too_little(source: str, who: str) -> ConfigError:
    return ConfigError(
        f"{source}: the pod has decoded too little to be simulated ({who}): let every node answer "
        f"{DISPATCHES_MIN} dispatches of one token first, for example with `k3 bench pod --url`"
    )


def _station(decode: Mapping[str, float], asked: float, cores: int | None) -> SimStation:
    """The Station's terms; its serial term holds the token's rest, spread over the layers."""
    overlapped = decode["shared_experts_us"] + decode["local_experts_us"]
    messages = decode["post_us"] + decode["collect_us"]
    serial_us = decode["serial_us"] - overlapped - messages - decode["cold_us"]
    return SimStation(
        serial_us=max(0.0, serial_us),
        before_share=1 - min(1.0, decode["combine_us"] / max(serial_us, 1.0)),
        shared_us=decode["shared_experts_us"],
        post_us=decode["post_us"] / asked if asked else 0.0,
        collect_us=decode["collect_us"] / asked if asked else 0.0,
        cores=cores,
    )


def _laid_out(
    nodes: Sequence[MeasuredNode], popularity: Sequence[float], layers: int
) -> tuple[Assignment, Counts]:
    """An assignment with as many experts per node, and a histogram as popular."""
    experts = sum(node.experts for node in nodes) // layers
    home = np.empty((layers, experts), np.int16)
    share = np.array([node.experts for node in nodes], np.float64) / layers
    for layer in range(layers):
        # what a node's share of a layer has left over takes turns over the layers
        edges = np.floor(np.cumsum(np.concatenate([[0.0], share])) + layer / layers + 1e-9)
        edges[0], edges[-1] = 0, experts
        home[layer] = np.repeat(np.arange(len(nodes)), np.diff(edges).astype(np.int64))
    histogram = np.rint(1e4 * np.array(popularity)[home]).astype(np.int64)
    return Assignment.without_copies(home, [node.experts for node in nodes]), histogram


def _node_between(before: MeasuredNode, after: MeasuredNode) -> MeasuredNode:
    old = {point.experts: point for point in before.hops}
    hops = tuple(
        _point_between(old.get(point.experts, HopPoint(point.experts, 0, 0.0, 0.0)), point)
        for point in after.hops
    )
    kept = tuple(point for point in hops if point.dispatches)
    return msgspec.structs.replace(after, rows=after.rows - before.rows, hops=kept)


def _point_between(before: HopPoint, after: HopPoint) -> HopPoint:
    count = after.dispatches - before.dispatches
    if not count:
        return HopPoint(after.experts, 0, 0.0, 0.0)

    def of(value: Callable[[HopPoint], float]) -> float:
        total = after.dispatches * value(after) - before.dispatches * value(before)
        return total / count

    mean_us = of(lambda point: point.node_us)
    squared = of(lambda point: point.node_us**2 + point.node_us_sd**2)
    deviation_us = math.sqrt(max(0.0, squared - mean_us**2))
    return HopPoint(after.experts, count, of(lambda point: point.hop_us), mean_us, deviation_us)


def _layers_of(decode: Mapping[str, float]) -> float:
    return decode["steps"] * decode.get("layers_per_token", 0.0)
