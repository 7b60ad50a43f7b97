"""What the table of one shard says about experts and everything else. Pure.

Owns the recognition of expert tensors by name and the accounts: bytes, tensors, scattered reads and
storage order of every expert. Works on whole columns of a table; must not know files or figures of
a particular model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np

from station.model.safetensors_header import I64, HeaderTable, TensorType
from station.model.tensor_table import IGNORED_PREFIXES, PREFIX

_LAYERS: Final = f"{PREFIX}model.layers."
_EXPERTS: Final = ".block_sparse_moe.experts."
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,4}")
_ExpertRow: TypeAlias = tuple[int, int, str]  # position in the file, expert, part such as w1.weight


class Group(Enum):
    """Whose bytes they are."""

    EXPERTS = "experts"
    TEXT = "text"  # the language model without its routed experts
    VISION = "vision"
    OTHER = "other"


class Order(Enum):
    """How the experts of a layer follow each other in a file."""

    LEXICOGRAPHIC = "lexicographic"  # 0, 1, 10, 11, ..., 2, 20
    NUMERIC = "numeric"
    EITHER = "either"  # too few experts to tell
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class LayerAccount:
    """The experts of one layer. Counters map a value to the number of experts that have it."""

    experts: int
    tensors: Counter[int]
    bytes: Counter[int]
    reads: Counter[int]
    kinds: Counter[tuple[str, ...]]


@dataclass(frozen=True, eq=False)
class LayerPart:
    """Expert tensors of one layer in one shard, one array entry per tensor in file order.

    `part` indexes `parts`, texts such as `w1.weight U8 [3072, 1792]`; `start` is the offset in the
    shard's data; `follows` says that the tensor before it in the file is of the same expert.
    """

    expert: I64
    part: I64
    parts: tuple[str, ...]
    start: I64
    length: I64
    follows: np.ndarray[tuple[int], np.dtype[np.bool_]]

    @cached_property
    def account(self) -> LayerAccount:
        """The accounts of these tensors."""
        ids, index = np.unique(self.expert, return_inverse=True)
        tensors = np.bincount(index, minlength=len(ids))
        reads = np.bincount(index[~self.follows], minlength=len(ids))
        size = np.zeros(len(ids), np.int64)
        np.add.at(size, index, self.length)
        return LayerAccount(
            experts=len(ids),
            tensors=Counter(tensors.tolist()),
            bytes=Counter(size.tolist()),
            reads=Counter(reads.tolist()),
            kinds=self._kinds(index, tensors),
        )

    @cached_property
    def order(self) -> Order:
        """How the experts follow each other in this file."""
        sequences = (self.expert[self.part == number] for number in range(len(self.parts)))
        return merged_order(_sequence_order(sequence.tolist()) for sequence in sequences)

    def _kinds(self, index: I64, tensors: I64) -> Counter[tuple[str, ...]]:
        """Which sets of parts the experts consist of."""
        ranks = np.argsort(np.argsort(self.parts))[self.part]
        sets = np.split(ranks[np.lexsort((ranks, index))], np.cumsum(tensors)[:-1])
        texts = sorted(self.parts)
        counted = Counter(part_set.tobytes() for part_set in sets)
        return Counter(
            {
                tuple(texts[rank] for rank in np.frombuffer(key, ranks.dtype)): count
                for key, count in counted.items()
            }
        )

    @staticmethod
    def join(pieces: Sequence[LayerPart]) -> LayerPart:
        """One part of what several shards hold of a layer; places lose their meaning."""
        if len(pieces) == 1:
            return pieces[0]
        parts = tuple(dict.fromkeys(text for piece in pieces for text in piece.parts))
        renumbered = [
            np.array([parts.index(text) for text in piece.parts])[piece.part] for piece in pieces
        ]
        return LayerPart(
            expert=np.concatenate([piece.expert for piece in pieces]),
            part=np.concatenate(renumbered),
            parts=parts,
            start=np.concatenate([piece.start for piece in pieces]),
            length=np.concatenate([piece.length for piece in pieces]),
            follows=np.concatenate([piece.follows for piece in pieces]),
        )


@dataclass(frozen=True, slots=True)
class Tally:
    """A number of tensors and their bytes."""

    tensors: int
    bytes: int

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.tensors + other.tensors, self.bytes + other.bytes)


NOTHING: Final = Tally(0, 0)


@dataclass(frozen=True, slots=True)
class ShardLedger:
    """The accounts of one shard."""

    groups: Mapping[Group, Tally]
    dtypes: Mapping[str, Tally]
    layers: Mapping[int, LayerPart]
    fp8_attention: bool


def shard_ledger(table: HeaderTable) -> ShardLedger:
    """Account for every tensor of one shard."""
    rows: dict[int, list[_ExpertRow]] = {}
    numbers = _Numbers()
    groups = dict.fromkeys(Group, NOTHING)
    fp8_attention = False
    for position, name in enumerate(table.names):
        head, _, tail = name.partition(_EXPERTS)
        if tail and (layer := numbers[head.removeprefix(_LAYERS)]) is not None:
            number, _, part = tail.partition(".")
            if part and (expert := numbers[number]) is not None and head.startswith(_LAYERS):
                rows.setdefault(layer, []).append((position, expert, part))
                continue
        group = _group(name)
        groups[group] += Tally(1, int(table.lengths[position]))
        is_fp8 = table.types[position][0] == "F8_E4M3"
        fp8_attention = fp8_attention or (is_fp8 and ".self_attn." in name)
    for layer_rows in rows.values():
        positions = [position for position, _, _ in layer_rows]
        groups[Group.EXPERTS] += Tally(len(positions), int(table.lengths[positions].sum()))
    return ShardLedger(
        groups=groups,
        dtypes=_dtypes(table),
        layers={layer: _layer_part(table, layer_rows) for layer, layer_rows in rows.items()},
        fp8_attention=fp8_attention,
    )


class _Numbers(dict[str, int | None]):
    """Layer and expert numbers as names spell them; None for what is no such number."""

    def __missing__(self, text: str) -> int | None:
        self[text] = number = int(text) if _NUMBER.fullmatch(text) else None
        return number


def _group(name: str) -> Group:
    if name.startswith(PREFIX):
        return Group.TEXT
    return Group.VISION if name.startswith(IGNORED_PREFIXES) else Group.OTHER


def _dtypes(table: HeaderTable) -> dict[str, Tally]:
    tallies: dict[str, Tally] = {}
    count = Counter(table.types)
    total: Counter[TensorType] = Counter()
    sizes = dict(zip(table.types, table.lengths.tolist(), strict=True))  # same type, same size
    for kind, tensors in count.items():
        total[kind] = tensors * sizes[kind]
        tallies[kind[0]] = tallies.get(kind[0], NOTHING) + Tally(tensors, total[kind])
    return tallies


def _layer_part(table: HeaderTable, rows: Sequence[_ExpertRow]) -> LayerPart:
    position = np.array([row[0] for row in rows], np.int64)
    expert = np.array([row[1] for row in rows], np.int64)
    numbers: dict[tuple[str, TensorType], int] = {}
    part = [numbers.setdefault((row[2], table.types[row[0]]), len(numbers)) for row in rows]
    follows = np.zeros(len(rows), np.bool_)
    follows[1:] = (np.diff(position) == 1) & (np.diff(expert) == 0)
    return LayerPart(
        expert=expert,
        part=np.array(part, np.int64),
        parts=tuple(f"{name} {dtype} {list(shape)}" for name, (dtype, shape) in numbers),
        start=table.starts[position],
        length=table.lengths[position],
        follows=follows,
    )


def _sequence_order(ids: list[int]) -> Order:
    numeric = all(one < other for one, other in pairwise(ids))
    texts = [str(expert) for expert in ids]
    lexicographic = all(one < other for one, other in pairwise(texts))
    if numeric and lexicographic:
        return Order.EITHER
    if numeric:
        return Order.NUMERIC
    return Order.LEXICOGRAPHIC if lexicographic else Order.OTHER


def merged_order(orders: Iterable[Order]) -> Order:
    """The order that all have; those that fit either way do not count."""
    told = set(orders) - {Order.EITHER}
    if len(told) > 1:
        return Order.OTHER
    return told.pop() if told else Order.EITHER
