"""Which node holds which expert, at which bank row: read by banks, nodes and Station alike.

Pure: a placement is a value with a digest; making a good one is the planner's work. A file holds
the value beside its digest, so a damaged file is refused and not served from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
import numpy as np

from shared.core.errors import PlacementError
from shared.core.names import NodeName
from shared.core.shape import ModelShape

Tier: TypeAlias = Literal["hbm", "rtx", "grace", "spark"]
FILE_BYTES_MAX: Final = 64 * 2**20  # every expert of K3 takes 1 MB
FORMAT_VERSION: Final = 2
PLACES_MAX: Final = 2**22  # layers x experts; K3 has 83,328. Bounds what a hostile file allocates
ExpertKey: TypeAlias = tuple[int, int]  # (layer, expert)
NOWHERE: Final = -1  # no place
_Micros: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class PlacedNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One node: the experts that live there, and second copies of experts that live elsewhere.

    A dispatch of k > 0 experts takes fixed_us + per_expert_us x k, as the plan reckoned: what the
    choice between copies goes by. Both are 0 where nobody planned.
    """

    name: NodeName
    tier: Tier
    rows: tuple[tuple[int, int], ...]
    copies: tuple[tuple[int, int], ...] = ()
    fixed_us: _Micros = 0.0
    per_expert_us: _Micros = 0.0

    @property
    def bank_rows(self) -> tuple[tuple[int, int], ...]:
        """(layer, expert) of every row of the node's bank: its own experts, then the copies."""
        return self.rows + self.copies


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checked placement: every expert of the model has exactly one home."""

    version: Literal[2]
    model_digest: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    shape: ModelShape
    policy: str
    nodes: tuple[PlacedNode, ...]
    trace_digest: Annotated[str, msgspec.Meta(max_length=128)] = ""  # "" was made without a trace

    def node(self, name: str) -> PlacedNode:
        """The entry of one node; PlacementError when the placement does not know it."""
        for node in self.nodes:
            if node.name == name:
                return node
        known = ", ".join(node.name for node in self.nodes)
        raise PlacementError(f"placement has no node {name!r}: it knows {known}")

    @property
    def digest(self) -> str:
        """Hex digest of the canonical bytes: what banks and leases are compared by."""
        return hashlib.blake2b(_canonical(self), digest_size=16).hexdigest()

    def homes(self) -> tuple[np.ndarray, np.ndarray]:
        """(node index, bank row) per expert: two int32 [layers, experts], -1 where none."""
        size = (self.shape.layers, self.shape.experts)
        owner = np.full(size, -1, np.int32)
        row = np.full(size, -1, np.int32)
        for index, node in enumerate(self.nodes):
            keys = np.array(node.rows, np.int32).reshape(-1, 2)
            owner[keys[:, 0], keys[:, 1]] = index
            row[keys[:, 0], keys[:, 1]] = np.arange(len(keys), dtype=np.int32)
        return owner, row

    def holders(self) -> np.ndarray:
        """Places that have each expert: int32 [H, layers, experts], its home first, then copies.

        Copies come in the order of the nodes; -1 where there is none. H is 1 without copies.
        """
        ranks = [self.homes()[0]]
        for index, node in enumerate(self.nodes):
            for key in node.copies:
                rank = next((r for r in ranks[1:] if r[key] == NOWHERE), None)
                if rank is None:
                    rank = np.full(ranks[0].shape, NOWHERE, np.int32)
                    ranks.append(rank)
                rank[key] = index
        return np.stack(ranks)

    @property
    def has_costs(self) -> bool:
        """Whether the plan said what its places cost."""
        return any(node.fixed_us > 0 or node.per_expert_us > 0 for node in self.nodes)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What lies on disk."""

    version: int
    checksum: str  # the placement's digest
    placement: Placement


class _AnyFile(msgspec.Struct, frozen=True):
    """The one field that every format has."""

    version: int


def encode(placement: Placement) -> bytes:
    """The file of a placement: equal placements have equal bytes."""
    return _json(_File(FORMAT_VERSION, placement.digest, placement))


def decode(data: bytes, *, source: str) -> Placement:
    """Parse and check; any defect is one PlacementError that names `source`."""
    try:
        version = msgspec.json.decode(data, type=_AnyFile).version
        if version != FORMAT_VERSION:
            raise PlacementError(
                f"{source}: placement of format {version}, this program reads {FORMAT_VERSION}: "
                "make placement and banks again, with `k3 plan` or `k3 pod init`"
            )
        file = msgspec.json.decode(data, type=_File)
    except msgspec.DecodeError as error:
        raise PlacementError(
            f"{source}: not a placement of format {FORMAT_VERSION}: {error}; make it again"
        ) from error
    if file.checksum != file.placement.digest:
        raise PlacementError(
            f"{source}: the contents do not have the checksum beside them: the file is damaged or "
            "was edited by hand; make it again"
        )
    check(file.placement, source=source)
    return file.placement


def _canonical(placement: Placement) -> bytes:
    """Equal placements have equal bytes, so a digest of them means something."""
    return _json(placement)


def _json(value: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value, order="deterministic"), indent=0)


def check(placement: Placement, *, source: str = "placement") -> None:
    """Conservation: names are distinct, every expert of every MoE layer has exactly one home.

    A copy is of an expert that lives on another node, and no node has two copies of one expert.
    """
    shape = placement.shape
    names = [node.name for node in placement.nodes]
    if len(set(names)) != len(names):
        raise PlacementError(f"{source}: node names repeat: {sorted(names)}")
    if shape.layers * shape.experts > PLACES_MAX:
        raise PlacementError(
            f"{source}: {shape.layers} layers x {shape.experts} experts exceed {PLACES_MAX} places"
        )
    seen = np.zeros((shape.layers, shape.experts), np.int32)
    for node in placement.nodes:
        _check_inside(node, shape, source)
        for layer, expert in node.rows:
            seen[layer, expert] += 1
    wrong = np.argwhere(seen[shape.first_moe_layer :] != 1)
    if len(wrong):
        layer, expert = int(wrong[0][0]) + shape.first_moe_layer, int(wrong[0][1])
        raise PlacementError(
            f"{source}: {len(wrong)} experts are not placed exactly once; first is layer {layer} "
            f"expert {expert}, placed {int(seen[layer, expert])} times"
        )
    for node in placement.nodes:
        if len(held := set(node.bank_rows)) != len(node.bank_rows):
            layer, expert = next(key for key in node.copies if node.bank_rows.count(key) > 1)
            raise PlacementError(
                f"{source}: node {node.name} holds layer {layer} expert {expert} twice "
                f"({len(node.bank_rows) - len(held)} such rows): a copy belongs on another node"
            )


def _check_inside(node: PlacedNode, shape: ModelShape, source: str) -> None:
    for layer, expert in node.bank_rows:
        if layer not in shape.moe_layers or not 0 <= expert < shape.experts:
            raise PlacementError(
                f"{source}: node {node.name} holds layer {layer} expert {expert}, "
                f"outside layers {shape.moe_layers} x {shape.experts} experts"
            )


def balanced(
    model_digest: str, shape: ModelShape, nodes: Sequence[tuple[str, Tier, float]]
) -> Placement:
    """Spread every layer over the nodes in proportion to their weights, largest remainder first.

    `nodes` are (name, tier, weight). Within a layer ids are dealt round-robin, so that neighbouring
    ids, which release order makes neighbours on disk, end up on different nodes.
    """
    total = sum(weight for _, _, weight in nodes)
    rows: list[list[ExpertKey]] = [[] for _ in nodes]
    for layer in shape.moe_layers:
        credit = np.zeros(len(nodes))
        for expert in range(shape.experts):
            credit += [weight / total for _, _, weight in nodes]
            # a layer-dependent tie-break keeps equal nodes equal over the whole model
            taken = int(np.argmax(np.roll(credit, layer)) - layer) % len(nodes)
            credit[taken] -= 1
            rows[taken].append((layer, expert))
    return _made(model_digest, shape, "balanced", nodes, rows)


def contiguous(
    model_digest: str, shape: ModelShape, nodes: Sequence[tuple[str, Tier, float]]
) -> Placement:
    """Give each node one slice of consecutive expert ids of every layer."""
    total = sum(weight for _, _, weight in nodes)
    edges = np.cumsum([0.0] + [weight / total for _, _, weight in nodes]) * shape.experts
    bounds = np.rint(edges).astype(int)
    rows: list[list[ExpertKey]] = [
        [(layer, expert) for layer in shape.moe_layers for expert in range(low, high)]
        for low, high in pairwise(bounds.tolist())
    ]
    return _made(model_digest, shape, "contiguous", nodes, rows)


def shuffled(
    model_digest: str, shape: ModelShape, nodes: Sequence[tuple[str, Tier, float]], *, seed: int
) -> Placement:
    """A random home for every expert, drawn from `seed`."""
    weights = np.array([weight for _, _, weight in nodes])
    rng = np.random.default_rng(seed)
    rows: list[list[ExpertKey]] = [[] for _ in nodes]
    homes = rng.choice(
        len(nodes), p=weights / weights.sum(), size=(len(shape.moe_layers), shape.experts)
    )
    for line, layer in enumerate(shape.moe_layers):
        for expert in range(shape.experts):
            rows[homes[line, expert]].append((layer, expert))
    return _made(model_digest, shape, f"shuffled:{seed}", nodes, rows)


def _made(
    model_digest: str,
    shape: ModelShape,
    policy: str,
    nodes: Sequence[tuple[str, Tier, float]],
    rows: list[list[ExpertKey]],
) -> Placement:
    placement = Placement(
        version=FORMAT_VERSION,
        model_digest=model_digest,
        shape=shape,
        policy=policy,
        nodes=tuple(
            PlacedNode(name=name, tier=tier, rows=tuple(keys))
            for (name, tier, _), keys in zip(nodes, rows, strict=True)
        ),
    )
    check(placement)
    return placement
