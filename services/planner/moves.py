"""From one placement to another: which records travel, in an order that never overfills a node.

Owns the list and its order. A record is read into its new node before the old one drops it, so
every expert is somewhere at every moment; where full nodes must exchange records, one record at a
time waits in staging space. Carrying moves out is the coordinator's work. Pure.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import msgspec

from shared.core.errors import PlacementError
from shared.core.placement import ExpertKey, Placement

Step: TypeAlias = Literal["move", "copy", "drop", "stage", "unstage"]

_FREES: Final = ("move", "drop", "stage")  # a row of the source
_Pair: TypeAlias = tuple[str, str]  # (source, target)


class Move(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One step with one expert's record; "" stands for no node.

    move: read into `target`, then `source` drops it. copy: read into `target`, `source` keeps it.
    drop: `source` forgets it, another node has it. stage: read from `source` into staging, then
    dropped there. unstage: read from staging into `target`.
    """

    step: Step
    layer: int
    expert: int
    source: str
    target: str


class NodeTraffic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One node's share. `seconds` is what its link takes for the larger direction."""

    name: str
    records_in: int
    records_out: int
    records_dropped: int
    rows_changed: int  # records that stay on the node, in another row: local copies
    bytes_in: int
    bytes_out: int
    seconds: float


class MovePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All moves in order. `staging_records` is the most that wait in staging at one time."""

    moves: tuple[Move, ...]
    nodes: tuple[NodeTraffic, ...]
    bytes_moved: int
    staging_records: int
    swaps: int
    seconds_longest: float


@dataclass(slots=True)
class _Pod:
    """What the nodes hold at one moment, as far as moves touch it."""

    free: dict[str, int]
    holders: dict[ExpertKey, set[str]] = field(default_factory=dict)
    waiting: dict[_Pair, deque[ExpertKey]] = field(default_factory=dict)  # leave the source
    copying: dict[str, deque[ExpertKey]] = field(default_factory=dict)  # by target; source keeps
    moves: list[Move] = field(default_factory=list)
    swaps: int = 0


def plan_moves(
    old: Placement,
    new: Placement,
    slots: Sequence[int],
    *,
    record_bytes: int,
    bytes_per_s: float,
) -> MovePlan:
    """Every record that travels from `old` to `new`, in order; slots [P] are in the nodes' order.

    Equal placements give no moves. PlacementError when the two are not of the same model and
    nodes, or either does not fit the slots.
    """
    _check_alike(old, new, slots)
    pod = _open(old, new, slots)
    while pod.waiting or pod.copying:
        if not _advance(pod):
            _swap(pod)
    moves = tuple(pod.moves)
    nodes = _traffic(old, new, moves, record_bytes, bytes_per_s)
    return MovePlan(
        moves=moves,
        nodes=nodes,
        bytes_moved=sum(node.bytes_in for node in nodes),
        staging_records=1 if pod.swaps else 0,
        swaps=pod.swaps,
        seconds_longest=max((node.seconds for node in nodes), default=0.0),
    )


def apply_moves(held: dict[str, set[ExpertKey]], moves: Sequence[Move]) -> Iterator[int]:
    """Carry the moves out on sets of records, in place; yields the records in staging after each.

    PlacementError when a source does not have a record, a target has it already, or a drop would
    leave an expert nowhere: the list was made for another placement.
    """
    staged: set[ExpertKey] = set()
    for move in moves:
        key = (move.layer, move.expert)
        origin = staged if move.step == "unstage" else held[move.source]
        if key not in origin or (move.target and key in held[move.target]):
            raise PlacementError(
                f"layer {move.layer} expert {move.expert}: cannot {move.step} from "
                f"{move.source or 'staging'} to {move.target or 'nowhere'}"
            )
        if move.target:
            held[move.target].add(key)
        if move.step == "stage":
            staged.add(key)
        if move.step != "copy":
            origin.discard(key)
        if move.step == "drop" and not any(key in records for records in held.values()):
            raise PlacementError(
                f"layer {move.layer} expert {move.expert} would be nowhere without {move.source}"
            )
        yield len(staged)


def _check_alike(old: Placement, new: Placement, slots: Sequence[int]) -> None:
    if (old.model_digest, old.shape) != (new.model_digest, new.shape):
        raise PlacementError("the two placements are of different models: plan for this one again")
    names = [[node.name for node in placement.nodes] for placement in (old, new)]
    if names[0] != names[1] or len(names[0]) != len(slots):
        raise PlacementError(
            f"the placements are of different nodes: {', '.join(names[0])} and "
            f"{', '.join(names[1])}, with {len(slots)} budgets; plan for the nodes there are"
        )
    for placement in (old, new):
        for node, budget in zip(placement.nodes, slots, strict=True):
            if len(node.bank_rows) > budget:
                raise PlacementError(
                    f"node {node.name} has {len(node.bank_rows):,} records and room for "
                    f"{budget:,}: describe the pod as it is, or plan again"
                )


def _open(old: Placement, new: Placement, slots: Sequence[int]) -> _Pod:
    """Who has what, and what must travel; copies that are not needed any more go first."""
    before = {node.name: set(node.bank_rows) for node in old.nodes}
    after = {node.name: set(node.bank_rows) for node in new.nodes}
    budgets = zip(old.nodes, slots, strict=True)
    room = {node.name: budget - len(node.bank_rows) for node, budget in budgets}
    leaving: dict[ExpertKey, list[str]] = {}
    coming: dict[ExpertKey, list[str]] = {}
    for name in before:
        for key in before[name] - after[name]:
            leaving.setdefault(key, []).append(name)
        for key in after[name] - before[name]:
            coming.setdefault(key, []).append(name)
    pod = _Pod(room)
    for key in sorted(leaving.keys() | coming.keys()):
        pod.holders[key] = {name for name, records in before.items() if key in records}
        sources, targets = leaving.get(key, []), coming.get(key, [])
        for source, target in zip(sources, targets, strict=False):  # the rest follows below
            pod.waiting.setdefault((source, target), deque()).append(key)
        for target in targets[len(sources) :]:
            pod.copying.setdefault(target, deque()).append(key)
        for source in sources[len(targets) :]:
            _emit(pod, "drop", key, source, "")
    return pod


def _advance(pod: _Pod) -> bool:
    """Move what has room now; False when every target is full."""
    moved = False
    for (source, target), keys in list(pod.waiting.items()):
        for _ in range(min(pod.free[target], len(keys))):
            _emit(pod, "move", keys.popleft(), source, target)
            moved = True
        if not keys:
            del pod.waiting[source, target]
    for target, keys in list(pod.copying.items()):
        for _ in range(min(pod.free[target], len(keys))):
            source = min(pod.holders[keys[0]])
            _emit(pod, "copy", keys.popleft(), source, target)
            moved = True
        if not keys:
            del pod.copying[target]
    return moved


def _swap(pod: _Pod) -> None:
    """Exchange records along a ring of full nodes, as often as each link of it has a record.

    There is one: every node that still expects a record is full and ends within its budget, so
    it still has one to give, to a node that is full as well.
    """
    ring = _ring(pod.waiting)
    links = [(ring[at - 1], ring[at]) for at in range(len(ring))]
    rounds = min(len(pod.waiting[link]) for link in links)
    for _ in range(rounds):
        source, target = links[0]
        key = pod.waiting[links[0]].popleft()
        _emit(pod, "stage", key, source, "")
        for link in reversed(links[1:]):  # each fills the row that the one before has freed
            _emit(pod, "move", pod.waiting[link].popleft(), *link)
        _emit(pod, "unstage", key, "", target)
    pod.swaps += rounds
    for link in links:
        if not pod.waiting[link]:
            del pod.waiting[link]


def _ring(pairs: dict[_Pair, deque[ExpertKey]]) -> list[str]:
    """Nodes of a cycle: each gives a record to the next, the last one to the first."""
    leads_to: dict[str, str] = {}
    for source, target in pairs:
        leads_to.setdefault(source, target)
    path = [next(iter(leads_to))]
    while (following := leads_to[path[-1]]) not in path:
        path.append(following)
    return path[path.index(following) :]


def _emit(pod: _Pod, step: Step, key: ExpertKey, source: str, target: str) -> None:
    """Note one step and its effect."""
    pod.moves.append(Move(step, *key, source, target))
    holders = pod.holders[key]
    if target:
        pod.free[target] -= 1
        holders.add(target)
    if step in _FREES:
        pod.free[source] += 1
        holders.discard(source)


def _traffic(
    old: Placement,
    new: Placement,
    moves: Sequence[Move],
    record_bytes: int,
    bytes_per_s: float,
) -> tuple[NodeTraffic, ...]:
    arrived = Counter(move.target for move in moves if move.target)
    left = Counter(move.source for move in moves if move.source and move.step != "drop")
    dropped = Counter(move.source for move in moves if move.step == "drop")
    return tuple(
        NodeTraffic(
            name=after.name,
            records_in=arrived[after.name],
            records_out=left[after.name],
            records_dropped=dropped[after.name],
            rows_changed=_rows_changed(before.bank_rows, after.bank_rows),
            bytes_in=arrived[after.name] * record_bytes,
            bytes_out=left[after.name] * record_bytes,
            seconds=max(arrived[after.name], left[after.name]) * record_bytes / bytes_per_s,
        )
        for before, after in zip(old.nodes, new.nodes, strict=True)
    )


def _rows_changed(before: Sequence[ExpertKey], after: Sequence[ExpertKey]) -> int:
    row_of = {key: row for row, key in enumerate(before)}
    return sum(row_of.get(key, row) != row for row, key in enumerate(after))
