"""Where a decode step's time goes, from two readings of the pod's status. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from services.bench.report import Figure

# figure -> field of the status: microseconds per MoE layer
LAYER_PARTS: Final[Mapping[str, str]] = {
    "layer.serial_us": "serial_us",
    "layer.wait_us": "wait_us",
    "layer.post_us": "post_us",
    "layer.local_experts_us": "local_experts_us",
    "layer.shared_experts_us": "shared_experts_us",
    "layer.combine_us": "combine_us",
}


def layer_figures(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Figure, ...]:
    """Means over the steps between two statuses; none when there was no step.

    `serial_us` is everything of a layer that is not waiting; the other parts but `wait_us` lie
    within it. A status holds means since the start, so sums are taken back out of them.
    """
    old, new = before["decode"], after["decode"]
    layers = _layers(new) - _layers(old)
    if layers <= 0:
        return ()
    figures = [
        Figure(name, round((_sum(new, field) - _sum(old, field)) / layers, 1), "us")
        for name, field in LAYER_PARTS.items()
    ]
    if (compute := _node_mean(before, after, "compute_us_mean")) is not None:
        figures.append(Figure("node.compute_us", compute, "us"))
    if (queue := _node_mean(before, after, "queue_us_mean")) is not None:
        figures.append(Figure("node.queue_us", queue, "us"))
    if (hop := _slowest_hop(after)) is not None:
        figures.append(Figure("node.hop_us_p50", hop, "us"))
    return tuple(figures)


def _layers(decode: Mapping[str, float]) -> float:
    return decode["steps"] * decode.get("layers_per_token", 0.0)


def _sum(decode: Mapping[str, float], field: str) -> float:
    return decode.get(field, 0.0) * _layers(decode)


def _slowest_hop(after: Mapping[str, Any]) -> float | None:
    """Median hop of the node that a layer most often waits for, over its last 512 hops."""
    medians = [node["hop_us"]["p50"] for node in after["nodes"]]
    return max((median for median in medians if median is not None), default=None)


def _node_mean(before: Mapping[str, Any], after: Mapping[str, Any], field: str) -> float | None:
    """Mean per dispatch over all nodes between the two readings, prefill included."""
    old = {node["name"]: node for node in before["nodes"]}
    total = 0.0
    dispatches = 0
    for node in after["nodes"]:
        earlier = old.get(node["name"], {"dispatches": 0})
        dispatches += node["dispatches"] - earlier["dispatches"]
        total += node["dispatches"] * (node[field] or 0.0)
        total -= earlier["dispatches"] * (earlier.get(field) or 0.0)
    return round(total / dispatches, 1) if dispatches > 0 else None
