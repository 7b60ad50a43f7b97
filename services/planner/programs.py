"""HiGHS as the planner uses it: one small program with 0-1 variables. Pure.

Owns the call of the solver. HiGHS comes inside SciPy: its own Python package prints a banner to
standard output before anybody can ask it not to, which no `--json` survives. Must not know what a
variable stands for.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def solve_binary(
    *,
    cost: Floats,
    rows: npt.NDArray[np.integer],
    values: Floats,
    lower: Floats,
    upper: Floats,
) -> npt.NDArray[np.bool_]:
    """Which variables are 1 where cost is least: bool [V].

    cost float64 [V]; every variable enters as many rows as any other: rows int [V, n] with values
    float64 [V, n]; lower and upper float64 [R] bound the rows. AssertionError when nothing fits.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csc_array

    width, entries = rows.shape
    starts = entries * np.arange(width + 1)
    matrix = csc_array((values.ravel(), rows.ravel(), starts), shape=(len(lower), width))
    result = milp(
        cost,
        constraints=LinearConstraint(matrix, lower, upper),
        integrality=np.ones(width),
        bounds=Bounds(0.0, 1.0),
    )
    assert result.x is not None, f"no solution: {result.message}"
    solution: npt.NDArray[np.bool_] = result.x > 0.5
    return solution
