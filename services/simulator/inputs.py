"""Gathers what a simulation needs from files, a seed or a running pod.

Owns the order in which figures override each other: pod description, then measured curves, then
the command line. Must not know how results are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from services.planner.assignment import Assignment
from services.planner.ledger import take_ledger
from services.planner.planning import MEASURED
from services.planner.pod import Pod
from services.planner.pod_file import read_pod
from services.planner.policies import POLICIES, plan
from services.routing import file as trace_files
from services.routing.synth import FITTED, synthesize
from services.routing.trace import Trace, check_model
from services.simulator.feed import fed, parse_status, place_costs, pod_of, with_curves
from services.simulator.model import Loss, SimPod
from services.simulator.routed import Routed, drawn
from shared.core import placement as placements
from shared.core.errors import ConfigError, PlacementError
from shared.core.placement import Placement
from shared.core.shape import K3, ModelShape

SYNTH_TOKENS: Final = 4705  # as many as the published comparison of policies had
SYNTH_REQUESTS: Final = 40
_DRAWN_TOKENS: Final = 2000
_PROPOSALS: Final = 1000  # per layer, of the planner's search
LOSS_S_MAX: Final = 3600.0  # longer is played for hours and says nothing new
_LOSS_FORM: Final = f"write NODE@SECONDS, for example spark3@5, at most {LOSS_S_MAX:.0f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where the figures come from, as the operator said; `status` is what --url answered."""

    pod: str | None
    placement: Path | None
    policy: str
    traces: Sequence[Path]
    synth_seed: int
    curves: Path | None
    status: Mapping[str, Any] | None
    is_one_host: bool
    cores: int | None
    seed: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """What to simulate, what it stands on, and what a pod itself measured (None: no pod)."""

    pod: SimPod
    routed: Routed
    policy: str
    source: str
    measured_layer_us: float | None = None


def prepare(sources: Sources, say: Callable[[str], None]) -> Prepared:
    """Read everything; ConfigError (and what is below it) for what cannot be used."""
    if sources.status is not None:
        return _of_running_pod(sources, sources.status)
    if sources.pod is None:
        raise ConfigError("no pod to simulate: give --pod k3-home-pod.toml, or --url of a pod")
    described = read_pod(sources.pod)
    pod = pod_of(described)
    if sources.curves is not None:
        measured = parse_status(_read(sources.curves), source=str(sources.curves))
        pod = with_curves(pod, measured, source=str(sources.curves))
    placement = None
    if sources.placement is not None:
        placement = placements.decode(_read(sources.placement), source=str(sources.placement))
    shape = K3 if placement is None else placement.shape
    digest = None if placement is None else placement.model_digest
    trace = _trace(sources, shape, digest, say)
    if placement is None:
        assignment = _planned(sources.policy, trace, described, shape, say)
        policy = sources.policy
    else:
        pod = _in_order_of(placement, pod)
        assignment = Assignment.of_placement(placement, [shape.routed_experts] * len(pod.places))
        policy = placement.policy
    return Prepared(pod, Routed.of(trace, assignment, place_costs(pod)), policy, described.name)


def loss_time_s(text: str) -> float:
    """When the loss that `text` describes happens; ConfigError when it says no such thing."""
    _, at, seconds = text.rpartition("@")
    try:
        at_s = float(seconds)
    except ValueError:
        at_s = -1.0
    if not at or not 0 <= at_s <= LOSS_S_MAX:
        raise ConfigError(f"loss {text!r} is not understood: {_LOSS_FORM}")
    return at_s


def parse_loss(text: str, rehome_s: float, pod: SimPod) -> Loss:
    """`NODE@SECONDS`; ConfigError for an unknown node, the Station's own tier, or no time."""
    name, at_s = text.rpartition("@")[0], loss_time_s(text)
    place = pod.index(name)
    if pod.places[place].is_station:
        raise ConfigError(f"{name} is the Station's own memory: without it there is no pod to lose")
    return Loss(place, at_s, rehome_s)


def parse_losses(texts: Sequence[str], rehome_s: float, pod: SimPod) -> list[Loss]:
    """As `parse_loss`; ConfigError also for a place that is lost twice."""
    losses = [parse_loss(text, rehome_s, pod) for text in texts]
    for index, loss in enumerate(losses):
        if any(loss.place == other.place for other in losses[:index]):
            name = pod.places[loss.place].name
            raise ConfigError(f"{name} is lost twice: a place that is gone does not come back")
    return losses


def overridden(pod: SimPod, **figures: float | None) -> SimPod:
    """Station figures given on the command line; None keeps what is there."""
    given: dict[str, Any] = {name: value for name, value in figures.items() if value is not None}
    return SimPod(replace(pod.station, **given), pod.places)


def with_spread(pod: SimPod, spread: float) -> SimPod:
    """Every hop beyond the Station's thread with this p99 over p50 around its mean."""
    places = (
        place if place.is_station else replace(place, curve=replace(place.curve, spread=spread))
        for place in pod.places
    )
    return SimPod(pod.station, tuple(places))


def _of_running_pod(sources: Sources, status: Mapping[str, Any]) -> Prepared:
    measured = fed(
        parse_status(status, source="--url"),
        source="--url",
        is_shared=sources.is_one_host,
        cores=sources.cores,
    )
    trace = drawn(measured.histogram, tokens=_DRAWN_TOKENS, top_k=measured.top_k, seed=sources.seed)
    routed = Routed.of(trace, measured.assignment, place_costs(measured.pod))
    return Prepared(measured.pod, routed, "as it runs", "running pod", measured.layer_us)


def _planned(
    policy: str, trace: Trace, pod: Pod, shape: ModelShape, say: Callable[[str], None]
) -> Assignment:
    """By one of the planner's policies, on the very trace that is then played."""
    ledger = take_ledger(pod, shape)
    for named in POLICIES:
        if named == policy:
            return plan(named, trace.histogram(), pod, ledger)
    assert policy == MEASURED, policy
    # here, because it brings a compiler that the named policies do without
    from services.planner.optimise import Effort, optimise

    say("planning by measured microseconds: about half a minute")
    effort = Effort(proposals=_PROPOSALS)  # no clock: equal arguments give equal plans
    return optimise(trace, pod, ledger, effort=effort, clock=lambda: 0.0).assignment


def _trace(
    sources: Sources, shape: ModelShape, digest: str | None, say: Callable[[str], None]
) -> Trace:
    if not sources.traces:
        say(f"making a synthetic trace of {SYNTH_TOKENS} tokens (seed {sources.synth_seed})")
        return synthesize(
            FITTED,
            requests=SYNTH_REQUESTS,
            tokens=SYNTH_TOKENS,
            shape=shape,
            seed=sources.synth_seed,
        )
    loaded = trace_files.load(sources.traces)
    for notice in loaded.notices:
        say(notice)
    source = ", ".join(map(str, sources.traces))
    check_model(loaded.trace, digest or loaded.trace.model_digest, shape, source=source)
    return loaded.trace


def _in_order_of(placement: Placement, pod: SimPod) -> SimPod:
    """The pod's places in the placement's order; PlacementError when they are not the same."""
    known = {place.name: place for place in pod.places}
    missing = [node.name for node in placement.nodes if node.name not in known]
    if missing:
        raise PlacementError(
            f"the placement has nodes that the pod has not: {', '.join(missing)}; give the pod "
            "description it was made for"
        )
    return SimPod(pod.station, tuple(known[node.name] for node in placement.nodes))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; name another file") from error
