"""A trace and a pod, arranged for the optimiser: one block of arrays per layer. Pure.

Owns the arrangement: ids by layer, which tokens chose which expert, cost tables, and where copies
have room. Must not know how an assignment gets better, or clocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from services.planner.cost import PlaceCosts
from services.planner.ledger import Ledger
from services.planner.pod import Pod
from services.planner.spread import apportion
from services.routing.trace import Trace

Places = npt.NDArray[np.int16]
Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LayerRouting:
    """One layer of a trace: ids uint16 [N, K]; the tokens that chose expert e are
    tokens[first[e]:first[e + 1]] (first int64 [E + 1], tokens int32 [N * K], ascending);
    order int64 [E] is the experts by calls, most first.
    """

    ids: npt.NDArray[np.uint16]
    first: Counts
    tokens: npt.NDArray[np.int32]
    order: Counts


@dataclass(frozen=True, slots=True)
class Problem:
    """Where may the experts of these layers live, and what would these tokens pay?

    request int32 [N]; calls int64 [layers, E]; table float64 [P, K + 1]: us of each place with 0
    to K experts of one token. Budgets are the ledger's, in the order of the pod's nodes.
    """

    layers: tuple[LayerRouting, ...]
    request: npt.NDArray[np.int32]
    calls: Counts
    table: Floats
    pod: Pod
    ledger: Ledger

    @classmethod
    def of(cls, trace: Trace, pod: Pod, ledger: Ledger) -> Problem:
        """Arrange a trace for a pod."""
        layers = tuple(
            _layer_routing(np.ascontiguousarray(trace.ids[:, layer]), trace.experts)
            for layer in range(trace.layers)
        )
        table = cost_table(PlaceCosts.of(pod.nodes), trace.top_k)
        return cls(layers, trace.request, trace.histogram(), table, pod, ledger)

    @property
    def experts(self) -> int:
        """E, of one layer."""
        return int(self.calls.shape[1])


def cost_table(costs: PlaceCosts, top_k: int) -> Floats:
    """float64 [P, K + 1]: us of each place with 0 to K experts of one token."""
    counts = np.broadcast_to(np.arange(top_k + 1)[:, None], (top_k + 1, len(costs.fixed_us)))
    table: Floats = np.ascontiguousarray(costs.place_us(counts).T)
    return table


def some_layers(trace: Trace, ledger: Ledger, picked: Counts) -> tuple[Trace, Ledger]:
    """A smaller problem: these layers of the trace, and their share of every budget, rounded up."""
    share = len(picked) / trace.layers
    lines = tuple(replace(line, slots=int(np.ceil(line.slots * share))) for line in ledger.lines)
    smaller = Ledger(lines, len(picked) * trace.experts, ledger.expert_bytes)
    return replace(trace, ids=np.ascontiguousarray(trace.ids[:, picked])), smaller


def copy_rooms(held: Counts, ledger: Ledger) -> Counts:
    """Copies that each place can take of each layer: int64 [layers, P], from held of that shape.

    What a place has to spare is shared out over the layers in proportion to what its bound per
    layer leaves; where the bound is all that limits a place, that is all of it.
    """
    rooms: Counts = np.maximum(ledger.layer_max - held, 0)
    spare = ledger.slots - held.sum(axis=0)
    for place, left in enumerate(spare.tolist()):
        room = rooms[:, place]
        if room.sum() > left:
            shared = apportion(left, room.astype(np.float64), np.zeros_like(room), room)
            rooms[:, place] = 0 if shared is None else shared
    return rooms


def _layer_routing(ids: npt.NDArray[np.uint16], experts: int) -> LayerRouting:
    flat = ids.ravel()
    calls = np.bincount(flat, minlength=experts)
    return LayerRouting(
        ids=ids,
        first=np.concatenate([[0], np.cumsum(calls)]).astype(np.int64),
        tokens=(np.argsort(flat, kind="stable") // ids.shape[1]).astype(np.int32),
        order=np.argsort(-calls, kind="stable"),
    )
