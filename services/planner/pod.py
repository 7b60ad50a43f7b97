"""What a pod is made of: memory and what is reserved of it, hop costs, feeds, marks. Pure values.

Owns the values and the rules between their numbers. Every number carries a mark that says how it is
known. Must not know files (pod_file reads them), models or experts.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from shared.core.names import NodeName
from shared.core.placement import Tier

Basis: TypeAlias = Literal["measured", "arithmetic", "fitted", "assumed"]
Micros: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Watts: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
# printed to terminals and on pages: nothing in a text may steer one
_PRINTABLE: Final = r"^[^\x00-\x1f\x7f-\x9f]*\Z"
Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=200, pattern=_PRINTABLE)]
Title: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=_PRINTABLE)]
_Printed: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a pod description: no key but those that are named here."""


class HopCost(Part, frozen=True, kw_only=True):
    """A dispatch of k > 0 experts to a place takes fixed_us + per_expert_us x k."""

    fixed_us: Micros
    fixed_basis: Basis
    per_expert_us: Micros
    per_expert_basis: Basis


class NodePower(Part, frozen=True, kw_only=True):
    """What one node draws. `worst_w` is under the clock cap; `uncapped_w` is drawn without it."""

    feed: Title
    idle_w: Watts
    busy_w: Watts
    worst_w: Watts
    basis: Basis
    uncapped_w: Watts | None = None
    is_capped: bool = True

    def __post_init__(self) -> None:
        """ValueError unless idle <= busy <= worst <= uncapped, and the uncapped draw is known."""
        _check_draw(self.idle_w, self.busy_w, self.worst_w)
        if self.uncapped_w is None and not self.is_capped:
            raise ValueError("is_capped is false, so uncapped_w is needed")
        if self.uncapped_w is not None and self.uncapped_w < self.worst_w:
            raise ValueError(f"uncapped_w {self.uncapped_w} is below worst_w {self.worst_w}")

    @property
    def limit_w(self) -> float:
        """The most it can draw as it is set now."""
        return self.worst_w if self.is_capped or self.uncapped_w is None else self.uncapped_w


class Load(Part, frozen=True, kw_only=True):
    """What else hangs on a feed, whatever the placement is: the Station's host, switches."""

    name: Title
    feed: Title
    idle_w: Watts
    busy_w: Watts
    worst_w: Watts
    basis: Basis

    def __post_init__(self) -> None:
        """ValueError unless idle <= busy <= worst."""
        _check_draw(self.idle_w, self.busy_w, self.worst_w)


class Feed(Part, frozen=True, kw_only=True):
    """A supply and what it can carry without end."""

    name: Title
    continuous_w: Watts
    basis: Basis


class Fabric(Part, frozen=True, kw_only=True):
    """Links between the Station and its nodes, and the Station's own work per dispatch."""

    station_gbit_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e6)]
    flow_gbit_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e6)]
    one_way_us: Micros
    message_us: Micros
    basis: Basis


class TokenCost(Part, frozen=True, kw_only=True):
    """What a token costs apart from its experts: per MoE layer at the Station, and the rest."""

    serial_us: Micros
    serial_basis: Basis
    rest_ms: Annotated[float, msgspec.Meta(ge=0, le=1e6)]
    rest_basis: Basis


class PublishedPolicy(Part, frozen=True, kw_only=True):
    """One line of a published comparison of policies."""

    name: Title
    expert_path_ms: _Printed
    tokens_per_s: _Printed


class Published(Part, frozen=True, kw_only=True):
    """What somebody else printed about this pod; compared with our figures, never used for one."""

    source: Text
    slots: dict[NodeName, int] = {}
    slots_total: int | None = None
    slots_spare: int | None = None
    total_gib: _Printed | None = None
    spare_gib: _Printed | None = None
    spark_touch: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    policies: tuple[PublishedPolicy, ...] = ()


class Reservation(msgspec.Struct, frozen=True):
    """Memory that experts cannot have."""

    what: str
    bytes: int
    basis: Basis


class PodNode(msgspec.Struct, frozen=True, kw_only=True):
    """One place that holds experts.

    `ceiling_bytes` caps the experts' budget below what is left of the memory. `layer_experts_max`
    caps the experts of one layer, None where only the budget counts.
    """

    name: NodeName
    tier: Tier
    memory_bytes: int
    cost: HopCost
    reservations: tuple[Reservation, ...] = ()
    ceiling_bytes: int | None = None
    layer_experts_max: int | None = None
    memory_basis: Basis = "assumed"
    power: NodePower | None = None

    def __post_init__(self) -> None:
        """ValueError when more is reserved than there is, or a bound is where none may be."""
        if self.reserved_bytes > self.memory_bytes:
            raise ValueError(
                f"reservations are {self.reserved_bytes} bytes, "
                f"{self.reserved_bytes - self.memory_bytes} more than the memory of "
                f"{self.memory_bytes}"
            )
        if self.layer_experts_max is not None and self.tier != "spark":
            raise ValueError("layer_experts_max is for Sparks only")

    @property
    def reserved_bytes(self) -> int:
        """Sum of the reservations."""
        return sum(item.bytes for item in self.reservations)

    @property
    def budget_bytes(self) -> int:
        """Bytes for experts: what is left of the memory, at most the ceiling."""
        left = self.memory_bytes - self.reserved_bytes
        return left if self.ceiling_bytes is None else min(left, self.ceiling_bytes)

    @property
    def fixed_us(self) -> float:
        """Cost of touching this place in a layer at all."""
        return self.cost.fixed_us

    @property
    def per_expert_us(self) -> float:
        """Cost of each expert on top."""
        return self.cost.per_expert_us


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """All places, in the order that place indices count; and what a token costs elsewhere."""

    name: str
    nodes: tuple[PodNode, ...]
    token: TokenCost
    fabric: Fabric | None = None
    feeds: tuple[Feed, ...] = ()
    loads: tuple[Load, ...] = ()
    published: Published | None = None

    def __post_init__(self) -> None:
        """ValueError when names repeat, nobody is there, or a load hangs on no known feed."""
        if not self.nodes:
            raise ValueError("there is no node")
        names = [("node", node.name) for node in self.nodes]
        names += [("feed", feed.name) for feed in self.feeds]
        names += [("load", load.name) for load in self.loads]
        for (kind, name), count in Counter(names).items():
            if count > 1:
                raise ValueError(f"{count} {kind}s have the name {name!r}")
        feeds = {feed.name for feed in self.feeds}
        used = [(node.name, node.power.feed) for node in self.nodes if node.power is not None]
        used += [(load.name, load.feed) for load in self.loads]
        for name, feed in used:
            if feed not in feeds:
                raise ValueError(f"{name} hangs on feed {feed!r}, which is not described")

    @property
    def serial_us(self) -> float:
        """The Station's own time per MoE layer."""
        return self.token.serial_us

    @property
    def rest_ms(self) -> float:
        """What a token costs beside its MoE layers' serial part and experts."""
        return self.token.rest_ms

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Kinds of memory, in the order of the nodes."""
        return tuple(dict.fromkeys(node.tier for node in self.nodes))

    def place(self, name: str) -> int:
        """Index of a node; KeyError when there is none of that name."""
        for index, node in enumerate(self.nodes):
            if node.name == name:
                return index
        raise KeyError(name)


def _check_draw(idle_w: float, busy_w: float, worst_w: float) -> None:
    if not all(map(math.isfinite, (idle_w, busy_w, worst_w))) or not idle_w <= busy_w <= worst_w:
        raise ValueError(f"idle_w {idle_w}, busy_w {busy_w} and worst_w {worst_w} must not fall")
