"""What a bank will hold and cost, known before a byte is read. Pure.

Owns the plain split of the original plan, the record order of each node kind, the header without
hashes and the figures of a dry run. Must not know files.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from services.banks.goldens import draft_goldens
from shared.core import placement as placements
from shared.core.bank_header import FORMAT_VERSION, BankHeader, Hasher, encode
from shared.core.errors import BankError, PlacementError
from shared.core.placement import PlacedNode, Placement, Tier, check
from shared.core.record import RecordLayout, RecordOrder, can_interleave
from shared.core.shape import ExpertShape, ModelShape

PLAIN_BUDGET_BYTES: Final = 100 * 2**30  # of one Spark's 121.69 GiB
# the release stores a shard's tensors by dtype, then by name: an expert's six scalars, its three
# scale tensors and its three weights are one contiguous piece each
READS_PER_EXPERT: Final = 3
PRODUCER: Final = "k3-pod"
_REST: Final = "hbm"

LayoutChoice: TypeAlias = Literal["auto"] | RecordOrder

# The order that the usual kernel of a node kind reads fastest. A GPU kernel gives each warp whole
# rows of the release's tensors; the CPU kernel reads four rows as one stream, because four streams
# cost half the memory bandwidth.
ORDER_OF_TIER: Final[dict[Tier, RecordOrder]] = {
    "hbm": "row-major",
    "rtx": "row-major",
    "spark": "row-major",
    "grace": "interleaved-4",
}


class BankPlan(msgspec.Struct, frozen=True):
    """Figures of one bank; `payload_bytes` is without padding and header, `file_bytes` with."""

    node: str
    tier: str
    experts: int
    layers: int
    record_bytes: int
    payload_bytes: int
    file_bytes: int
    reads: int
    layout: str


def plain_split(
    model_digest: str, shape: ModelShape, sparks: int, *, budget_bytes: int = PLAIN_BUDGET_BYTES
) -> Placement:
    """The same n consecutive experts of every layer on each Spark: row = layer x n + rank.

    n is what fits into `budget_bytes`, 62 for K3; layers count from the first MoE layer. The rest
    stays with the Station, as node "hbm". PlacementError when a Spark would get nothing.
    """
    slots = budget_bytes // RecordLayout(shape.expert).record_bytes
    each = min(slots // len(shape.moe_layers), shape.experts // sparks)
    if each < 1:
        raise PlacementError(
            f"{sparks} Sparks of {budget_bytes} bytes cannot hold one of {shape.experts} experts "
            f"of each of {len(shape.moe_layers)} layers: use another number of Sparks"
        )

    def rows(first: int, last: int) -> tuple[tuple[int, int], ...]:
        return tuple((layer, expert) for layer in shape.moe_layers for expert in range(first, last))

    nodes = [
        PlacedNode(name=f"spark{i}", tier="spark", rows=rows(i * each, (i + 1) * each))
        for i in range(sparks)
    ]
    if sparks * each < shape.experts:
        rest = rows(sparks * each, shape.experts)
        nodes.insert(0, PlacedNode(name=_REST, tier="hbm", rows=rest))
    placement = Placement(
        version=placements.FORMAT_VERSION,
        model_digest=model_digest,
        shape=shape,
        policy="plain",
        nodes=tuple(nodes),
    )
    check(placement)
    return placement


def record_order(layout: LayoutChoice, tier: Tier, shape: ExpertShape) -> RecordOrder:
    """The order of a bank's records: as asked, or with "auto" the one of its node's kind.

    "auto" falls back to row-major for shapes that cannot be interleaved; BankError where such an
    order was asked for by name.
    """
    if layout == "auto":
        return ORDER_OF_TIER[tier] if can_interleave(shape) else "row-major"
    try:
        return RecordLayout(shape, layout).order
    except ValueError as error:
        raise BankError(f"--layout {layout}: {error}, or auto") from error


def draft_header(
    name: str,
    placement: Placement,
    placed: PlacedNode,
    producer: str,
    layout: LayoutChoice = "auto",
) -> BankHeader:
    """The header with hashes and goldens' values to come; its encoding has the final length.

    PlacementError when the node has no experts, BankError when they cannot have that layout.
    """
    count = len(placed.bank_rows)
    if not count:
        raise PlacementError(f"placement gives node {placed.name} no experts: it needs no bank")
    order = record_order(layout, placed.tier, placement.shape.expert)
    return BankHeader(
        version=FORMAT_VERSION,
        name=name,
        node=placed.name,
        tier=placed.tier,
        model_digest=placement.model_digest,
        placement_digest=placement.digest,
        shape=placement.shape.expert,
        layout=order,
        rows=placed.bank_rows,
        record_hashes=("0" * 64,) * count,
        source_hashes=("0" * 64,) * count,
        tensor_checks=("0" * 96,) * count,
        goldens=draft_goldens(placed.bank_rows, RecordLayout(placement.shape.expert, order)),
        producer=producer,
    )


def bank_plan(
    placement: Placement, placed: PlacedNode, *, hasher: Hasher, layout: LayoutChoice = "auto"
) -> BankPlan:
    """Figures of one node's bank, to the byte; PlacementError and BankError as `draft_header`."""
    header = draft_header(placed.name, placement, placed, PRODUCER, layout)  # needs no hashes
    record = header.record_layout
    count = len(placed.bank_rows)
    return BankPlan(
        node=placed.name,
        tier=placed.tier,
        experts=count,
        layers=len({layer for layer, _ in placed.bank_rows}),
        record_bytes=record.record_bytes,
        payload_bytes=count * record.record_bytes,
        file_bytes=len(encode(header, hasher=hasher)) + count * record.stride_bytes,
        reads=count * READS_PER_EXPERT,
        layout=header.layout,
    )
