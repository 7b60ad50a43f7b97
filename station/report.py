"""The pod's state as JSON and as metrics: reads counters, changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, Protocol

import msgspec

from shared.core.lease import LeaseState
from station.admission import Admission
from station.backend import Metric, Sample
from station.channel import NodeStats
from station.lane import StepTimes
from station.membership import LoadReport
from station.nodes import Nodes


@dataclass(slots=True)
class Totals:
    """What the pod has done since it started."""

    requests: int = 0
    failed: int = 0
    cancelled: int = 0
    tokens: int = 0
    cold_rows: int = 0
    times: StepTimes = field(default_factory=StepTimes)


class ReportedPod(Protocol):
    """What a report reads of the coordinator."""

    model_name: str
    nodes: Nodes
    totals: Totals

    @property
    def on_miss(self) -> str:
        """The declared policy."""

    @property
    def admission(self) -> Admission:
        """Open and refused requests."""

    @property
    def cold_store_reads(self) -> int:
        """Records the cold store read."""

    def readiness(self) -> tuple[bool, str]:
        """Whether requests can be served, and the state in words."""


def status(pod: ReportedPod) -> dict[str, object]:
    """What `k3 status --json` prints; see docs/operator.md for every field."""
    ready, reason = pod.readiness()
    totals = pod.totals
    return {
        "model": pod.model_name,
        "ready": ready,
        "state": reason,
        "on_miss": pod.on_miss,
        "requests": {
            "total": totals.requests,
            "open": pod.admission.open,
            "failed": totals.failed,
            "cancelled": totals.cancelled,
            "refused": pod.admission.refused,
        },
        "tokens": totals.tokens,
        "cold_rows": totals.cold_rows,
        "cold_records_read": pod.cold_store_reads,
        "keys_refused": pod.nodes.link.keys_refused,
        "control": asdict(pod.nodes.link.counters),
        "decode": decode_times(totals.times),
        "nodes": [_node(pod, place) for place in range(len(pod.nodes.places.stats))],
    }


def decode_times(times: StepTimes) -> dict[str, float | int]:
    """Means over decode steps: microseconds per token and, per MoE layer, by kind of work.

    `serial_us` is a layer's share of everything that is not waiting for nodes.
    """
    if not times.steps or not times.layers:
        return {"steps": times.steps}
    layers = times.layers
    busy_us = times.total_us - times.wait_us
    return {
        "steps": times.steps,
        "token_us": round(times.total_us / times.steps, 1),
        "layers_per_token": round(layers / times.steps, 2),
        "serial_us": round(busy_us / layers, 1),
        "wait_us": round(times.wait_us / layers, 1),
        "post_us": round(times.post_us / layers, 1),
        "local_experts_us": round(times.local_us / layers, 1),
        "shared_experts_us": round(times.shared_us / layers, 1),
        "combine_us": round(times.combine_us / layers, 1),
        "collect_us": round(times.collect_us / layers, 1),
        "cold_us": round(times.cold_us / layers, 1),
        "trip_us": round(times.trip_us / layers, 1),
    }


def _node(pod: ReportedPod, place: int) -> dict[str, object]:
    places = pod.nodes.places
    placed = places.placement.nodes[place]
    stats = places.stats[place]
    counters = pod.nodes.counters.get(placed.name)
    lease = pod.nodes.membership.leases.get(placed.name)
    load = pod.nodes.membership.loads.get(placed.name)
    epoch = 0 if lease is None else lease.epoch
    if place in places.local:
        state = "local"
    elif load is not None:
        state = load.phase
    else:
        state = "absent" if lease is None else lease.state.value
    return {
        "name": placed.name,
        "tier": placed.tier,
        "state": state,
        "epoch": epoch,
        "loading": None if load is None else _load(load),
        "experts": len(placed.rows),
        "rows": stats.rows,
        "copy_rows": stats.copy_rows,
        "dispatches": stats.dispatches,
        "duplicates": stats.duplicate_rows,
        "stale_rows": stats.stale_rows,
        "corrupt_rows": stats.corrupt_rows,
        "refused_rows": stats.refused_rows,
        "cold_rows": stats.cold_rows,
        "missed_layers": stats.missed_layers,
        "losses": stats.losses,
        "last_loss": stats.last_loss,
        "hop_us": {"p50": stats.hop.p50_us, "p99": stats.hop.p99_us},
        "queue_us_mean": _mean(stats.queue_us, stats.answers),
        "compute_us_mean": _mean(stats.compute_us, stats.answers),
        "hops": stats.hops.points(),
        "reported": None if counters is None else msgspec.structs.asdict(counters),
    }


def _load(load: LoadReport) -> dict[str, int]:
    return {"done_bytes": load.done_bytes, "total_bytes": load.total_bytes}


def metrics(pod: ReportedPod) -> Sequence[Metric]:
    """Prometheus families; node counters carry the labels node and tier."""
    totals = pod.totals
    places = pod.nodes.places
    link = pod.nodes.link
    frames_refused = link.counters.malformed + link.counters.oversized
    serving = [lease.state is LeaseState.SERVING for lease in pod.nodes.membership.leases.values()]

    def per_node(name: str, help_text: str, value: Callable[[NodeStats], int]) -> Metric:
        samples = [
            Sample({"node": placed.name, "tier": placed.tier}, float(value(stats)))
            for placed, stats in zip(places.placement.nodes, places.stats, strict=True)
        ]
        return Metric(name, "counter", help_text, samples)

    def one(name: str, kind: Literal["counter", "gauge"], help_text: str, value: float) -> Metric:
        return Metric(name, kind, help_text, [Sample({}, float(value))])

    return [
        one("k3_requests_total", "counter", "Requests admitted.", totals.requests),
        one("k3_requests_failed_total", "counter", "Requests ended by an error.", totals.failed),
        one("k3_requests_cancelled_total", "counter", "Requests cancelled.", totals.cancelled),
        one("k3_requests_refused_total", "counter", "Requests refused.", pod.admission.refused),
        one("k3_requests_open", "gauge", "Requests running or waiting.", pod.admission.open),
        one("k3_tokens_total", "counter", "Tokens generated.", totals.tokens),
        one("k3_keys_refused_total", "counter", "Connections refused by key.", link.keys_refused),
        one("k3_frames_refused_total", "counter", "Control frames refused.", frames_refused),
        one("k3_nodes_serving", "gauge", "Nodes with a granted lease.", sum(serving)),
        per_node("k3_rows_total", "Rows a node or tier answered.", lambda s: s.rows),
        per_node("k3_copy_rows_total", "Rows answered as a copy.", lambda s: s.copy_rows),
        per_node("k3_cold_rows_total", "Rows the cold store computed.", lambda s: s.cold_rows),
        per_node("k3_duplicate_rows_total", "Rows that came twice.", lambda s: s.duplicate_rows),
        per_node("k3_stale_rows_total", "Rows of an old lease or slot.", lambda s: s.stale_rows),
        per_node("k3_corrupt_rows_total", "Rows refused as damaged.", lambda s: s.corrupt_rows),
        per_node("k3_missed_layers_total", "Layer deadlines missed.", lambda s: s.missed_layers),
        per_node("k3_node_losses_total", "Leases that ended.", lambda s: s.losses),
    ]


def _mean(total: int, count: int) -> float | None:
    return round(total / count, 1) if count else None
