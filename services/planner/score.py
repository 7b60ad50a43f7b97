"""What an assignment costs on a trace: microseconds per token and layer, touches, loads. Pure.

Owns the exact objective: the slowest place of a layer decides, and copies are chosen by the rule
that the Station follows at run time. Must not know how an assignment was made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from services.planner.assignment import Assignment
from services.planner.cost import PlaceCosts
from services.routing.trace import Trace
from shared.core.copy_choice import choose_copies
from shared.core.errors import TraceError

_TOKENS: Final = 256  # at once: bounds the memory of the counts


@dataclass(frozen=True, slots=True)
class Score:
    """Results over N tokens of a trace; layer index l is as in the trace.

    layer_us float32 [N, layers]: time of each token-layer. selections int64 [P]: (token, expert)
    pairs that each place computes. touches int64 [P]: token-layers in which a place has work.
    slowest int64 [layers, P]: tokens for which a place decides the layer's time.
    spark_touches: token-layers in which at least one of the places named as Sparks has work.
    """

    layer_us: npt.NDArray[np.float32]
    selections: npt.NDArray[np.int64]
    touches: npt.NDArray[np.int64]
    slowest: npt.NDArray[np.int64]
    spark_touches: int

    @property
    def token_ms(self) -> npt.NDArray[np.float64]:
        """Expert path of each token, ms: float64 [N]. Its mean is the objective."""
        total: npt.NDArray[np.float64] = self.layer_us.sum(axis=1, dtype=np.float64)
        return total / 1e3

    @property
    def expert_path_ms(self) -> float:
        """Mean expert path of a token."""
        return float(self.token_ms.mean())

    @property
    def spark_touch(self) -> float:
        """Share of token-layers that wait for at least one Spark."""
        return self.spark_touches / self.layer_us.size

    @property
    def load(self) -> npt.NDArray[np.float64]:
        """Share of all selections that each place computes: float64 [P]."""
        share: npt.NDArray[np.float64] = self.selections / self.selections.sum()
        return share


def score(
    trace: Trace, assignment: Assignment, costs: PlaceCosts, *, sparks: npt.NDArray[np.bool_]
) -> Score:
    """Score every token of the trace; sparks bool [P] marks the places that count as Sparks.

    TraceError when the trace is of another shape than the assignment.
    """
    _check_shapes(trace, assignment)
    layer_us = np.empty((trace.tokens, trace.layers), np.float32)
    selections = np.zeros(assignment.places, np.int64)
    touches = np.zeros(assignment.places, np.int64)
    slowest = np.zeros((trace.layers, assignment.places), np.int64)
    spark_touches = 0
    for first, counts in _counted(trace, assignment, costs):
        spent = costs.place_us(counts)
        layer_us[first : first + len(counts)] = spent.max(axis=2)
        selections += counts.sum(axis=(0, 1))
        busy = counts > 0
        touches += busy.sum(axis=(0, 1))
        spark_touches += int(busy[:, :, sparks].any(axis=2).sum())
        _add_slowest(slowest, spent)
    return Score(layer_us, selections, touches, slowest, spark_touches)


def place_counts(trace: Trace, assignment: Assignment, costs: PlaceCosts) -> npt.NDArray[np.uint8]:
    """Experts per place of every token-layer after copies were chosen: uint8 [N, layers, P]."""
    _check_shapes(trace, assignment)
    counts = np.empty((trace.tokens, trace.layers, assignment.places), np.uint8)
    for first, part in _counted(trace, assignment, costs):
        counts[first : first + len(part)] = part
    return counts


def _counted(
    trace: Trace, assignment: Assignment, costs: PlaceCosts
) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """(first token, counts int64 [n, layers, P]) in blocks of tokens."""
    layers, width = trace.layers, assignment.places
    base = np.arange(layers)[:, None] * trace.experts
    home, copy = assignment.home.ravel(), assignment.copy.ravel()
    has_copies = assignment.copies > 0
    for first in range(0, trace.tokens, _TOKENS):
        flat = base + trace.ids[first : first + _TOKENS]
        places = home[flat]
        if has_copies:
            places = choose_copies(
                places.reshape(-1, trace.top_k),
                copy[flat].reshape(-1, trace.top_k),
                costs.fixed_us,
                costs.per_expert_us,
            ).reshape(places.shape)
        lines = np.arange(len(places) * layers).reshape(-1, layers, 1) * width
        counts = np.bincount((lines + places).ravel(), minlength=len(places) * layers * width)
        yield first, counts.reshape(-1, layers, width)


def _add_slowest(slowest: npt.NDArray[np.int64], spent: npt.NDArray[np.float64]) -> None:
    layers, width = slowest.shape
    keys = np.arange(layers) * width + spent.argmax(axis=2)
    slowest += np.bincount(keys.ravel(), minlength=layers * width).reshape(layers, width)


def _check_shapes(trace: Trace, assignment: Assignment) -> None:
    if (trace.layers, trace.experts) != assignment.home.shape:
        raise TraceError(
            f"the trace has {trace.layers} layers of {trace.experts} experts, the assignment is of "
            f"{assignment.home.shape}: give a trace of this model"
        )
