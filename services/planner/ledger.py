"""The byte ledger: how many experts each node can hold, and what the sums are. Pure.

Owns budgets in experts (floor-divided node by node, never pooled: a byte of one machine is no use
to another), the bound of experts per layer, and the power of each feed. Must not know traces or
policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from services.planner.pod import Pod, PodNode
from shared.core.errors import PodError
from shared.core.placement import Tier
from shared.core.record import RecordLayout
from shared.core.shape import ModelShape

GIB = 2**30


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """One node. `budget_slots` is what its bytes hold; `slots` what its layers allow of that.

    `padded_slots` counts records of a bank, which start at 4 KiB boundaries.
    """

    name: str
    tier: Tier
    memory_bytes: int
    reserved_bytes: int
    budget_bytes: int
    budget_slots: int
    padded_slots: int
    layer_max: int
    slots: int


@dataclass(frozen=True)
class Ledger:
    """Budgets of a pod for one model, in the order of the pod's nodes."""

    lines: tuple[LedgerLine, ...]
    experts: int
    expert_bytes: int

    @cached_property
    def slots(self) -> npt.NDArray[np.int64]:
        """Experts that each node may hold: int64 [P]."""
        return np.array([line.slots for line in self.lines], np.int64)

    @cached_property
    def layer_max(self) -> npt.NDArray[np.int64]:
        """Experts of one layer that each node may hold: int64 [P]."""
        return np.array([line.layer_max for line in self.lines], np.int64)

    @property
    def slots_total(self) -> int:
        """Slots of all nodes."""
        return int(self.slots.sum())

    @property
    def slots_spare(self) -> int:
        """Slots that the model leaves empty; negative when it does not fit."""
        return self.slots_total - self.experts

    @property
    def total_gib(self) -> float:
        """Bytes of all slots."""
        return self.slots_total * self.expert_bytes / GIB

    @property
    def spare_gib(self) -> float:
        """Bytes of the spare slots."""
        return self.slots_spare * self.expert_bytes / GIB


@dataclass(frozen=True, slots=True)
class FeedLine:
    """Watts on one feed: with nothing to do, at duty, and the worst case."""

    name: str
    continuous_w: float
    idle_w: float
    busy_w: float
    worst_w: float

    @property
    def over_w(self) -> float:
        """Watts that the worst case is beyond what the feed carries."""
        return max(0.0, self.worst_w - self.continuous_w)


def take_ledger(pod: Pod, shape: ModelShape) -> Ledger:
    """Budgets in experts; PodError when the pod cannot hold the model: by how much, and where."""
    record = RecordLayout(shape.expert)
    lines = tuple(_line(node, shape, record) for node in pod.nodes)
    ledger = Ledger(lines, shape.routed_experts, record.record_bytes)
    if ledger.slots_spare < 0:
        raise PodError(_shortfall(pod, ledger))
    return ledger


def feed_lines(pod: Pod, used: Sequence[int]) -> tuple[FeedLine, ...]:
    """Watts of each feed when each node holds `used` experts; one without experts stays idle."""
    lines = []
    for feed in pod.feeds:
        loads = [load for load in pod.loads if load.feed == feed.name]
        idle = sum(load.idle_w for load in loads)
        busy = sum(load.busy_w for load in loads)
        worst = sum(load.worst_w for load in loads)
        for node, count in zip(pod.nodes, used, strict=True):
            if node.power is not None and node.power.feed == feed.name:
                idle += node.power.idle_w
                busy += node.power.busy_w if count else node.power.idle_w
                worst += node.power.limit_w if count else node.power.idle_w
        lines.append(FeedLine(feed.name, feed.continuous_w, idle, busy, worst))
    return tuple(lines)


def check_power(pod: Pod, used: Sequence[int]) -> None:
    """Case H2: PodError when the worst case of a placement is beyond a feed; names the feed."""
    for line in feed_lines(pod, used):
        if line.over_w > 0:
            loaded = [
                node.name
                for node, count in zip(pod.nodes, used, strict=True)
                if node.power is not None and node.power.feed == line.name and count
            ]
            uncapped = [node.name for node in pod.nodes if node.power and not node.power.is_capped]
            remedy = "cap the clock of its nodes" if uncapped else "move a load to another feed"
            raise PodError(
                f"feed {line.name!r} carries {line.continuous_w:g} W, the worst case of this "
                f"placement is {line.worst_w:.0f} W, {line.over_w:.0f} W more "
                f"({len(loaded)} nodes with experts on it): {remedy}, or leave nodes of it empty"
            )


def published_differences(pod: Pod, ledger: Ledger) -> list[str]:
    """Sentences on each published sum that does not follow from the counts."""
    published = pod.published
    if published is None:
        return []
    by_name = {line.name: line.slots for line in ledger.lines}
    differences = [
        f"{published.source} gives {name} {slots:,} experts; its bytes give {by_name[name]:,}"
        if name in by_name
        else f"{published.source} gives {slots:,} experts to {name}, which is not in this pod"
        for name, slots in published.slots.items()
        if by_name.get(name) != slots
    ]
    counts = (
        ("slots", published.slots_total, ledger.slots_total),
        ("spare slots", published.slots_spare, ledger.slots_spare),
    )
    for what, printed, found in counts:
        if printed is not None and printed != found:
            differences.append(f"{published.source} prints {printed:,} {what}; it is {found:,}")
    sizes = (
        ("in all", published.total_gib, ledger.total_gib, ledger.slots_total),
        ("spare", published.spare_gib, ledger.spare_gib, ledger.slots_spare),
    )
    for what, printed_gib, found_gib, slots in sizes:
        if printed_gib is not None and abs(printed_gib - found_gib) >= 0.05:
            differences.append(
                f"{published.source} prints {printed_gib:,.1f} GiB {what}; {slots:,} slots of "
                f"{ledger.expert_bytes:,} bytes are {found_gib:,.1f} GiB"
            )
    return differences


def padding_note(ledger: Ledger) -> str | None:
    """What is lost where a budget is filled with a bank's page-aligned records, or None."""
    short = [
        f"{line.name} {line.padded_slots:,} of {line.slots:,}"
        for line in ledger.lines
        if line.padded_slots < line.slots
    ]
    if not short:
        return None
    return (
        "records of a bank start at 4 KiB boundaries; with that padding these budgets hold less: "
        f"{', '.join(short)}"
    )


def _line(node: PodNode, shape: ModelShape, record: RecordLayout) -> LedgerLine:
    budget_slots = node.budget_bytes // record.record_bytes
    layer_max = min(node.layer_experts_max or shape.experts, shape.experts)
    return LedgerLine(
        name=node.name,
        tier=node.tier,
        memory_bytes=node.memory_bytes,
        reserved_bytes=node.reserved_bytes,
        budget_bytes=node.budget_bytes,
        budget_slots=budget_slots,
        padded_slots=node.budget_bytes // record.stride_bytes,
        layer_max=layer_max,
        slots=min(budget_slots, layer_max * len(shape.moe_layers)),
    )


def _shortfall(pod: Pod, ledger: Ledger) -> str:
    missing = -ledger.slots_spare
    tiers = {
        tier: sum(line.slots for line in ledger.lines if line.tier == tier) for tier in pod.tiers
    }
    held = ", ".join(f"{tier} {slots:,}" for tier, slots in tiers.items())
    last = ledger.lines[-1]
    if last.slots < last.budget_slots:
        remedy = f"raise layer_experts_max of tier {last.tier}, whose bytes hold more, or add nodes"
    else:
        remedy = f"give tier {last.tier} more memory or more nodes"
    return (
        f"pod {pod.name} cannot hold the model: {ledger.slots_total:,} slots ({held}) for "
        f"{ledger.experts:,} experts, {missing:,} too few "
        f"({missing * ledger.expert_bytes / GIB:,.1f} GiB): {remedy}"
    )
