"""A new plan made like the old placement where that costs nothing: same node, same bank row. Pure.

Owns the rule: a record that stays among like nodes stays on its node, and on its row as far as a
bank without holes allows. A plan says which kind of node an expert deserves; which of eight like
Sparks it was dealt to is chance, and chance is not worth a byte. Must not know why a plan changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from services.planner.assignment import NOWHERE, Assignment, Places
from services.planner.policies import Kind
from shared.core.placement import ExpertKey, PlacedNode, Placement, check


def keep_nodes(
    old: Assignment, new: Assignment, kinds: Sequence[Kind], layer_max: npt.NDArray[np.integer]
) -> Assignment:
    """`new` with the same experts and copies in every kind, on their `old` nodes where they can be.

    Both of one shape and within budgets and `layer_max` [P], and so is the result. A kind whose
    newcomers find no room beside those that stay (only where budgets and bounds per layer leave
    hardly a choice) is as `new` has it. PlacementError when `old` or `new` breaks a law.
    """
    old.check(layer_max=layer_max)
    new.check(layer_max=layer_max)
    home, copy = new.home.copy(), new.copy.copy()
    for kind in kinds:
        kept = _kept(old, new, kind)
        if _settle(*kept, new, kind, layer_max):
            for target, chosen in zip((home, copy), kept, strict=True):
                target[chosen != NOWHERE] = chosen[chosen != NOWHERE]
    result = Assignment(home, copy, new.slots)
    result.check(layer_max=layer_max)
    return result


def _kept(old: Assignment, new: Assignment, kind: Kind) -> tuple[Places, Places]:
    """(home, copy) of what `new` has in this kind and `old` has there too; -1 elsewhere."""
    places = np.array(kind.places)
    old_home, old_copy = (
        np.where(np.isin(places_of, places), places_of, np.int16(NOWHERE))
        for places_of in (old.home, old.copy)
    )
    nowhere = np.full(old.home.shape, NOWHERE, np.int16)
    either = np.where(old_home != NOWHERE, old_home, old_copy)
    home = np.where(np.isin(new.home, places), either, nowhere)
    # a copy may stay where the expert's home was: the record is the same
    free_copy = np.where(old_copy != home, old_copy, nowhere)
    free_home = np.where(old_home != home, old_home, nowhere)
    other = np.where(free_copy != NOWHERE, free_copy, free_home)
    return home, np.where(np.isin(new.copy, places), other, nowhere)


def _settle(
    home: Places, copy: Places, new: Assignment, kind: Kind, layer_max: npt.NDArray[np.integer]
) -> bool:
    """Give the newcomers of a kind a node, in place; False when one finds no room."""
    places = np.array(kind.places)
    counts = np.stack([(home == p).sum(axis=1) + (copy == p).sum(axis=1) for p in places], axis=1)
    room = new.slots[places] - counts.sum(axis=0)
    bound = np.asarray(layer_max)[places]
    for records, planned, other in ((home, new.home, copy), (copy, new.copy, home)):
        for layer, expert in np.argwhere(np.isin(planned, places) & (records == NOWHERE)):
            open_to = (room > 0) & (counts[layer] < bound) & (places != other[layer, expert])
            if not open_to.any():
                return False
            # the node with the fewest of the layer, then the one with most room
            rank = np.where(
                open_to, counts[layer] * (1 + room.max()) - room, np.iinfo(np.int64).max
            )
            chosen = int(rank.argmin())
            records[layer, expert] = places[chosen]
            counts[layer, chosen] += 1
            room[chosen] -= 1
    return True


def keep_rows(old: Placement, new: Placement) -> Placement:
    """`new` with its bank rows in `old`'s order where they can be; nodes are matched by name.

    A bank has no holes and its copies come last, so a record leaves its row when its bank shrinks
    past it or when it turns from home to copy. PlacementError when `new` breaks a law.
    """
    before = {node.name: node for node in old.nodes}
    nodes = tuple(
        _ordered(before[node.name], node) if node.name in before else node for node in new.nodes
    )
    placement = msgspec.structs.replace(new, nodes=nodes)
    check(placement)
    return placement


def _ordered(old: PlacedNode, new: PlacedNode) -> PlacedNode:
    row_of = {key: row for row, key in enumerate(old.bank_rows)}
    return msgspec.structs.replace(
        new,
        rows=_arranged(new.rows, row_of, 0),
        copies=_arranged(new.copies, row_of, len(new.rows)),
    )


def _arranged(
    keys: Sequence[ExpertKey], row_of: dict[ExpertKey, int], first_row: int
) -> tuple[ExpertKey, ...]:
    """The keys on rows first_row, first_row + 1, ...; those that have a row among them keep it."""
    rows: list[ExpertKey | None] = [None] * len(keys)
    moved = []
    for key in keys:
        row = row_of.get(key, -1) - first_row
        if 0 <= row < len(keys):
            rows[row] = key
        else:
            moved.append(key)
    coming = iter(moved)
    return tuple(next(coming) if key is None else key for key in rows)
