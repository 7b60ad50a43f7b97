"""Where every expert lives, as arrays: what policies make, scores read and a placement records.

Owns the arrays, their conservation laws and the step to a Placement. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from services.planner.pod import Pod
from shared.core.errors import PlacementError
from shared.core.placement import FORMAT_VERSION, PlacedNode, Placement, check
from shared.core.shape import ModelShape

Places = npt.NDArray[np.int16]
NOWHERE: Final = -1


@dataclass(frozen=True, slots=True)
class Assignment:
    """home int16 [layers, experts]: place of each expert. copy, of the same shape: place of a
    second copy, -1 where there is none. slots int64 [P]: budget of each place, in experts.

    Layer index l is model layer first_moe_layer + l; places count in the order of the pod's nodes.
    """

    home: Places
    copy: Places
    slots: npt.NDArray[np.int64]

    @classmethod
    def without_copies(cls, home: npt.NDArray[np.integer], slots: Sequence[int]) -> Assignment:
        """Every expert at its home only."""
        places = np.asarray(home, np.int16)
        return cls(places, np.full(places.shape, NOWHERE, np.int16), np.asarray(slots, np.int64))

    @property
    def places(self) -> int:
        """P."""
        return len(self.slots)

    @property
    def copies(self) -> int:
        """Experts that have a second copy."""
        return int(np.count_nonzero(self.copy != NOWHERE))

    def used(self) -> npt.NDArray[np.int64]:
        """Experts and copies that each place holds: int64 [P]."""
        total: npt.NDArray[np.int64] = self.layer_counts().sum(axis=0)
        return total

    def layer_counts(self) -> npt.NDArray[np.int64]:
        """Experts and copies of each layer that each place holds: int64 [layers, P]."""
        layers, width = len(self.home), self.places
        keys = np.arange(layers)[:, None] * width
        counts = np.bincount((keys + self.home).ravel(), minlength=layers * width)
        copied = (keys + self.copy)[self.copy != NOWHERE]
        counts += np.bincount(copied, minlength=layers * width)
        return counts.reshape(layers, width)

    def with_copies(self, copy: npt.NDArray[np.integer]) -> Assignment:
        """The same homes with other copies."""
        return replace(self, copy=np.asarray(copy, np.int16))

    def check(self, *, layer_max: npt.NDArray[np.integer] | None = None) -> None:
        """Conservation laws; PlacementError names the first that does not hold (P1, P5).

        Every home and copy is a place, no copy is where its expert lives, no budget is exceeded,
        and no place holds more of one layer than `layer_max` [P] allows. That every expert has one
        home and at most one copy is the shape of the arrays.
        """
        if self.home.shape != self.copy.shape or self.home.ndim != 2:
            raise PlacementError(f"homes {self.home.shape} and copies {self.copy.shape} differ")
        if self.home.size and not 0 <= int(self.home.min()) <= int(self.home.max()) < self.places:
            raise PlacementError(f"a home is none of the {self.places} places")
        if self.copy.size and not (
            NOWHERE <= int(self.copy.min()) <= int(self.copy.max()) < self.places
        ):
            raise PlacementError(f"a copy is at none of the {self.places} places")
        if (twice := np.argwhere(self.copy == self.home)).size:
            raise PlacementError(
                f"layer index {twice[0][0]} expert {twice[0][1]} has its copy where it lives"
            )
        counts = self.layer_counts()
        if (over := np.flatnonzero(counts.sum(axis=0) > self.slots)).size:
            place = int(over[0])
            raise PlacementError(
                f"place {place} holds {counts[:, place].sum()} experts, its budget is "
                f"{self.slots[place]}"
            )
        if layer_max is not None and (beyond := np.argwhere(counts > layer_max)).size:
            layer, place = beyond[0]
            raise PlacementError(
                f"place {place} holds {counts[layer, place]} experts of layer index {layer}, "
                f"at most {layer_max[place]} are allowed"
            )

    def to_placement(
        self, pod: Pod, shape: ModelShape, *, model_digest: str, policy: str, trace_digest: str
    ) -> Placement:
        """The placement file's value, checked; bank rows in layer order, then expert order.

        Costs are the pod's: the Station chooses between copies by them, as scores do.

        PlacementError when the arrays are not of this pod and shape, or a law does not hold.
        """
        expected = (len(shape.moe_layers), shape.experts)
        if self.home.shape != expected or self.places != len(pod.nodes):
            raise PlacementError(
                f"an assignment of {self.home.shape} experts to {self.places} places does not fit "
                f"{expected} experts and {len(pod.nodes)} nodes"
            )
        self.check()
        placement = Placement(
            version=FORMAT_VERSION,
            model_digest=model_digest,
            shape=shape,
            policy=policy,
            trace_digest=trace_digest,
            nodes=tuple(
                PlacedNode(
                    name=node.name,
                    tier=node.tier,
                    rows=_keys(self.home == place, shape),
                    copies=_keys(self.copy == place, shape),
                    fixed_us=node.fixed_us,
                    per_expert_us=node.per_expert_us,
                )
                for place, node in enumerate(pod.nodes)
            ),
        )
        check(placement)
        return placement

    @classmethod
    def of_placement(cls, placement: Placement, slots: Sequence[int]) -> Assignment:
        """The arrays of a placement; place indices count its nodes.

        PlacementError when an expert has more than one copy: a plan makes one at most.
        """
        first = placement.shape.first_moe_layer
        owner, _ = placement.homes()
        copy = np.full(owner.shape, NOWHERE, np.int16)
        for index, node in enumerate(placement.nodes):
            keys = np.array(node.copies, np.int64).reshape(-1, 2)
            if (again := np.flatnonzero(copy[keys[:, 0], keys[:, 1]] != NOWHERE)).size:
                layer, expert = node.copies[int(again[0])]
                raise PlacementError(
                    f"layer {layer} expert {expert} has more than one copy, node {node.name} holds "
                    "the second: plans have one copy of an expert at most; plan again"
                )
            copy[keys[:, 0], keys[:, 1]] = index
        return cls(owner[first:].astype(np.int16), copy[first:], np.asarray(slots, np.int64))


def _keys(held: npt.NDArray[np.bool_], shape: ModelShape) -> tuple[tuple[int, int], ...]:
    layers, experts = np.nonzero(held)
    return tuple(zip((layers + shape.first_moe_layer).tolist(), experts.tolist(), strict=True))
