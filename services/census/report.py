"""What a census found: the JSON object and its numbers. Pure.

Owns the shape of `k3 census --json`, which is stable: fields are added, never renamed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from services.census.ledger import (
    NOTHING,
    Group,
    LayerPart,
    ShardLedger,
    Tally,
    merged_order,
)


class Share(msgspec.Struct, frozen=True):
    """Tensors and bytes of one kind."""

    tensors: int
    bytes: int


class ExpertCensus(msgspec.Struct, frozen=True):
    """The routed experts. The dicts map a value to how many have it: one entry means uniform.

    `layers` is text such as `1-92`; `reads_per_expert` counts contiguous pieces in the file;
    `parts` are the tensors of the most common kind of expert, `kinds` the number of kinds.
    """

    experts: int
    layers: str
    experts_per_layer: dict[int, int]
    bytes_per_expert: dict[int, int]
    tensors_per_expert: dict[int, int]
    reads_per_expert: dict[int, int]
    uniform: bool
    kinds: int
    parts: tuple[str, ...]
    order: str


class ScaleCensus(msgspec.Struct, frozen=True):
    """The scalars of all experts. `first_bad` names a tensor that is negative or not finite."""

    scalars: int
    unequal_w1_w3: int
    negative: int
    not_finite: int
    first_bad: str | None
    input_scales: int
    input_scales_not_one: int


class BlockScales(msgspec.Struct, frozen=True):
    """All block scales of all experts, when they were read."""

    scales: int
    negative: int
    nan: int
    first_bad: str | None


class Census(msgspec.Struct, frozen=True):
    """A whole checkpoint."""

    directory: str
    layout: str
    shards: int
    tensors: int
    payload_bytes: int
    header_bytes: int
    file_bytes: int
    indexed: bool
    expert: Share
    text: Share
    vision: Share
    other: Share
    dtypes: dict[str, Share]
    experts: ExpertCensus
    scales: ScaleCensus | None = None
    block_scales: BlockScales | None = None
    differences: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The object as one line of JSON."""
        return msgspec.json.encode(self).decode()


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """One shard: its file's size and the accounts of its table."""

    file_bytes: int
    header_bytes: int
    ledger: ShardLedger


def census_of(
    directory: str, shards: Sequence[ShardFacts], scales: ScaleCensus | None, *, indexed: bool
) -> Census:
    """Add up all shards; `differences` are left for whoever compares."""
    ledgers = [shard.ledger for shard in shards]
    groups = {group: _sum(ledger.groups[group] for ledger in ledgers) for group in Group}
    total = _sum(groups.values())
    experts = _experts(ledgers)
    dtypes = sorted({dtype for ledger in ledgers for dtype in ledger.dtypes})
    return Census(
        directory=directory,
        layout=_layout(experts, fp8_attention=any(ledger.fp8_attention for ledger in ledgers)),
        shards=len(shards),
        tensors=total.tensors,
        payload_bytes=total.bytes,
        header_bytes=sum(shard.header_bytes for shard in shards),
        file_bytes=sum(shard.file_bytes for shard in shards),
        indexed=indexed,
        expert=_share(groups[Group.EXPERTS]),
        text=_share(groups[Group.TEXT]),
        vision=_share(groups[Group.VISION]),
        other=_share(groups[Group.OTHER]),
        dtypes={
            dtype: _share(_sum(ledger.dtypes.get(dtype, NOTHING) for ledger in ledgers))
            for dtype in dtypes
        },
        experts=experts,
        scales=scales,
    )


def _experts(ledgers: Iterable[ShardLedger]) -> ExpertCensus:
    layers: dict[int, list[LayerPart]] = {}
    for ledger in ledgers:
        for layer, part in ledger.layers.items():
            layers.setdefault(layer, []).append(part)
    accounts = {layer: LayerPart.join(parts).account for layer, parts in sorted(layers.items())}
    sizes = _counted(account.bytes for account in accounts.values())
    kinds: Counter[tuple[str, ...]] = Counter()
    for account in accounts.values():
        kinds.update(account.kinds)
    return ExpertCensus(
        experts=sum(account.experts for account in accounts.values()),
        layers=_ranges(list(accounts)),
        experts_per_layer=dict(Counter(account.experts for account in accounts.values())),
        bytes_per_expert=sizes,
        tensors_per_expert=_counted(account.tensors for account in accounts.values()),
        reads_per_expert=_counted(account.reads for account in accounts.values()),
        uniform=len(kinds) <= 1,
        kinds=len(kinds),
        parts=kinds.most_common(1)[0][0] if kinds else (),
        order=merged_order(part.order for parts in layers.values() for part in parts).value,
    )


def _layout(experts: ExpertCensus, *, fp8_attention: bool) -> str:
    """`nvfp4-mixed` and `mxfp4` are the two releases."""
    if not experts.experts:
        return "no experts"
    if experts.kinds > 1:
        return "experts of several kinds"
    types = {part.rsplit(" [", 1)[0] for part in experts.parts}
    if {"w1.weight U8", "w1.weight_scale F8_E4M3", "w1.weight_scale_2 F32"} <= types:
        return "nvfp4-mixed" if fp8_attention else "nvfp4"
    if {"w1.weight_packed U8", "w1.weight_scale U8"} <= types:
        return "mxfp4"
    return "unknown"


def _ranges(layers: Sequence[int]) -> str:
    """`1-92` or `1-3,5`."""
    texts: list[str] = []
    start = 0
    for stop in range(1, len(layers) + 1):
        if stop == len(layers) or layers[stop] != layers[stop - 1] + 1:
            first, last = layers[start], layers[stop - 1]
            texts.append(f"{first}-{last}" if last > first else str(first))
            start = stop
    return ",".join(texts)


def _counted(counters: Iterable[Counter[int]]) -> dict[int, int]:
    total: Counter[int] = Counter()
    for counter in counters:
        total.update(counter)
    return dict(sorted(total.items()))


def _sum(tallies: Iterable[Tally]) -> Tally:
    return sum(tallies, NOTHING)


def _share(tally: Tally) -> Share:
    return Share(tally.tensors, tally.bytes)
