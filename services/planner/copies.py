"""Second copies of experts in the slots that homes leave free: which experts, and where. Pure.

Owns the greedy choice: in every layer the copy that saves most on the trace comes next, as the
Station would use it, until the layer's room is full or no copy saves anything. A copy is a choice
made at run time, and the Station never takes one that makes a layer slower, so copies do no harm on
tokens that nobody has seen: they overfit far less than moves of homes do. No copy is where its
expert lives. Must not know clocks.
"""

from __future__ import annotations

import numpy as np

from services.planner import kernel
from services.planner.assignment import NOWHERE
from services.planner.problem import Counts, Places, Problem


def choose(problem: Problem, layer: int, home: Places, room: Counts) -> Places:
    """Places of the copies of one layer: int16 [E], -1 where there is none.

    home int16 [E]; room int64 [P]: copies that each place can take of this layer.
    """
    routing = problem.layers[layer]
    copy = np.full(len(home), NOWHERE, np.int16)
    kernel.place_copies(
        routing.ids, routing.first, routing.tokens, home, copy, problem.table, room.copy()
    )
    return copy
