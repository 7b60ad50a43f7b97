"""Plans by name, scored and held against the pod's limits. Pure but for the clock passed in.

Owns which policies there are and the order of the steps: plan, check the laws, check the power,
score. Must not know files or how results are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from services.planner import policies
from services.planner.assignment import Assignment
from services.planner.cost import PlaceCosts
from services.planner.holdout import compare_on, mean_gain
from services.planner.ledger import Ledger, check_power
from services.planner.pod import Pod
from services.planner.policies import POLICIES, PolicyName
from services.planner.report import (
    BoundFigures,
    GainFigures,
    PathFigures,
    PolicyFigures,
    SearchFigures,
    SlotFigures,
    path_figures,
    policy_figures,
)
from services.planner.score import score
from services.routing.trace import SYNTHETIC, Trace

MEASURED: Final = "measured"
NAMES: Final[tuple[str, ...]] = (*POLICIES, MEASURED)

Optimiser: TypeAlias = Callable[[Trace], tuple[Assignment, SearchFigures]]


@dataclass(frozen=True, slots=True)
class Planned:
    """One policy's result."""

    assignment: Assignment
    figures: PolicyFigures


def compare(
    names: Sequence[str],
    pod: Pod,
    ledger: Ledger,
    trace: Trace,
    *,
    held_out: Trace | None,
    optimise: Optimiser,
    clock_s: Callable[[], float],
) -> list[Planned]:
    """Plan on `trace` by each of `names`, score there and on `held_out`.

    `optimise` makes the policy "measured". PodError when a plan exceeds a feed in the worst case
    (H2), PlacementError when one breaks a conservation law (P5): nothing of it is returned.
    """
    costs = PlaceCosts.of(pod.nodes)
    histogram = trace.histogram()
    sparks = np.array([node.tier == "spark" for node in pod.nodes])

    def scored(assignment: Assignment, on: Trace) -> PathFigures:
        result = score(on, assignment, costs, sparks=sparks)
        return path_figures(result, on.request, pod, first_layer=on.first_layer)

    results = []
    for name in names:
        started = clock_s()
        search = None
        named = next((policy for policy in POLICIES if policy == name), None)
        if named is not None:
            assignment = policies.plan(named, histogram, pod, ledger)
        else:
            assert name == MEASURED, name
            assignment, search = optimise(trace)
        plan_s = clock_s() - started
        assignment.check(layer_max=ledger.layer_max)
        check_power(pod, assignment.used().tolist())
        figures = policy_figures(
            name,
            assignment,
            pod,
            plan_s=plan_s,
            in_sample=scored(assignment, trace),
            held_out=None if held_out is None else scored(assignment, held_out),
            synthetic=trace.model_digest == SYNTHETIC,
            search=search,
        )
        results.append(Planned(assignment, figures))
    return results


def held_out_gain(results: Sequence[Planned], held_out: Trace, pod: Pod) -> GainFigures | None:
    """What "measured" saves over cost-ranked, request by request; None unless both were planned."""
    plans = {result.figures.policy: result.assignment for result in results}
    base: PolicyName = "cost-ranked"
    if MEASURED not in plans or base not in plans:
        return None
    gain, interval = mean_gain([compare_on(held_out, pod, plans[MEASURED], plans[base])])
    return GainFigures(MEASURED, base, gain, interval)


def limits(
    assignment: Assignment, trace: Trace, pod: Pod, ledger: Ledger
) -> tuple[BoundFigures, tuple[SlotFigures, ...]]:
    """A lower bound on this trace, and what one more slot of each kind would be worth to a plan."""
    # here, because they bring a compiler and a solver that the named policies do without
    from services.planner.bound import lower_bound
    from services.planner.marginal import slot_values
    from services.planner.problem import Problem

    problem = Problem.of(trace, pod, ledger)

    def names(places: Sequence[int]) -> tuple[str, ...]:
        return tuple(pod.nodes[place].name for place in places)

    bound = lower_bound(problem)
    return (
        BoundFigures(bound.expert_path_ms, bound.touch_share, names(bound.far)),
        tuple(
            SlotFigures(value.tier, names(value.places), value.ms_per_token)
            for value in slot_values(problem, assignment)
        ),
    )
