"""From what a step asks of the places to nanoseconds by layer.

Owns the lookup in the curves and the luck of each dispatch. Must not know queues or time.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from services.simulator.curve import CostCurve
from services.simulator.model import SimPod
from services.simulator.routed import Visits

Visit: TypeAlias = tuple[int, int, int, int]  # place, nanoseconds, experts, rows


class Costing:
    """Costs of dispatches; places with equal curves are looked up together."""

    def __init__(self, pod: SimPod, rng: np.random.Generator) -> None:
        """`rng` gives each dispatch its luck, where a curve has any."""
        curves: dict[CostCurve, int] = {}
        which = [curves.setdefault(place.curve, len(curves)) for place in pod.places]
        self._which = np.array(which)
        self._curves = tuple(curves)
        self._share = pod.station.expert_token_share
        self._rng = rng

    def layers(self, visits: Visits, layers: int) -> list[list[Visit]]:
        """Visits with their cost, one list per layer."""
        cost_ns = np.rint(self.cost_us(visits) * 1000).astype(np.int64)
        columns = (visits.place, cost_ns, visits.experts, visits.rows)
        rows: list[Visit] = list(zip(*(column.tolist() for column in columns), strict=True))
        edges = np.searchsorted(visits.layer, np.arange(layers + 1)).tolist()
        return [rows[low:high] for low, high in pairwise(edges)]

    def cost_us(self, visits: Visits) -> npt.NDArray[np.float64]:
        """Microseconds of each visit: further tokens of an expert cost their share of one."""
        effective = visits.experts + self._share * (visits.rows - visits.experts)
        out = np.empty(len(effective))
        which = self._which[visits.place]
        for index, curve in enumerate(self._curves):
            chosen = which == index
            out[chosen] = curve.sampled(effective[chosen], self._rng)
        return out
