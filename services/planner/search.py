"""Local search: pairs of experts of one layer exchange homes. Pure.

Owns the proposals and the rule of acceptance. Exchanges keep the number of experts of every place
and layer, so no bound can break. Must not know clocks.

A plain search overfits: with thousands of tokens and 82,432 experts there is always an exchange
that these tokens like. So an exchange must save more than T_MIN standard errors over requests, and
whether a search is worth anything at all on a trace is for cross-validation to say (optimise.py).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from services.planner import kernel
from services.planner.problem import Places, Problem

T_MIN: Final = 2.0


def exchange_homes(
    problem: Problem,
    layer: int,
    home: Places,
    copy: Places,
    *,
    proposals: int,
    seed: tuple[int, ...],
) -> int:
    """Try so many random exchanges in one layer and change `home` where they pay; how many did.

    home and copy int16 [E]. Equal seeds, equal proposals.
    """
    routing = problem.layers[layer]
    pairs = np.random.default_rng((*seed, layer)).integers(0, len(home), (proposals, 2))
    return int(
        kernel.swap_experts(
            routing.ids,
            routing.first,
            routing.tokens,
            problem.request,
            home,
            copy,
            problem.table,
            pairs,
            T_MIN,
        )
    )
