"""The policy "measured": the least expected time of the slowest place, on routing that is known.

Steps, each of which only ever makes the plan better on the trace it is given:

1. start     cost-ranked, with kinds ordered by what a further expert costs, or by what the first
             one does, whichever is better here
2. sizes     how many experts of each layer a kind gets (sizes.py), free slots holding copies of
             the hottest experts of the slowest kind
3. copies    other copies that save more, chosen per token at run time like those (copies.py); at
             last those are dropped that are at places where no token would use one
4. search    single experts exchange homes (search.py), only where cross-validation inside the
             trace says that it helps requests it has not seen: mostly it does not, and what it
             gains alone it partly takes from the copies

Owns the order of steps, the budget and the cross-validation. Time comes from the clock passed in;
with a number of proposals instead of seconds the result depends on the seed alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec
import numpy as np

from services.planner import copies, kernel, search, sizes
from services.planner.assignment import NOWHERE, Assignment
from services.planner.cost import PlaceCosts
from services.planner.ledger import Ledger
from services.planner.pod import Pod
from services.planner.policies import Kind, kinds_of, plan
from services.planner.problem import Floats, Places, Problem, copy_rooms, some_layers
from services.routing.trace import Trace, split_requests
from shared.core.copy_choice import choose_copies
from shared.core.errors import PodError

Clock: TypeAlias = Callable[[], float]  # seconds, monotonic
OnProgress: TypeAlias = Callable[[int, float], None]  # (whole seconds, best objective in ms)

BUDGET_S: Final = 30.0
_SIZES_UNTIL: Final = 0.4  # shares of the budget
_COPIES_UNTIL: Final = 0.6
_TRIAL_UNTIL: Final = 0.8
_BATCH: Final = 8  # layers between two looks at the objective
_ROUND: Final = 250  # proposals per layer between two looks at the clock
_TRIAL_LAYERS: Final = 12
_TRIAL_SPLITS: Final = 3
_TRIAL_REQUESTS: Final = 6  # with fewer there is nothing to cross-validate
_TRIAL_PROPOSALS: Final = 4000


@dataclass(frozen=True, slots=True)
class Effort:
    """Seconds by the clock, or proposals of the search per layer: then no clock is looked at."""

    budget_s: float = BUDGET_S
    proposals: int | None = None


@dataclass(frozen=True, slots=True)
class Optimised:
    """The plan, its mean expert path on the trace, that of cost-ranked there, and what was done.

    `trial_gain` is what the search saved on requests that it had not seen, as a share of the time,
    least of all splits; None when that was not tried. The search is used when it is above 0.
    """

    assignment: Assignment
    objective_ms: float
    cost_ranked_ms: float
    trial_gain: float | None
    exchanges: int


class _Watch:
    """What is left of the budget, and the best objective after every second."""

    def __init__(self, effort: Effort, clock: Clock, on_progress: OnProgress | None) -> None:
        """Time runs from now on; one instance is one optimisation."""
        self.effort = effort
        self._clock = clock
        self._begun = clock()
        self._on_progress = on_progress
        self._second = 0
        self._best_ms = np.inf

    def is_over(self, share: float = 1.0) -> bool:
        """Whether this share of the budget is spent."""
        if self.effort.proposals is not None:
            return False
        return self._clock() - self._begun >= share * self.effort.budget_s

    def note(self, objective_ms: float | None = None) -> None:
        """Tell every second that has passed the best objective so far; then take a new one."""
        now = int(self._clock() - self._begun)
        while self._second < now:
            self._second += 1
            if self._on_progress is not None and np.isfinite(self._best_ms):
                self._on_progress(self._second, float(self._best_ms))
        if objective_ms is not None:
            self._best_ms = min(self._best_ms, objective_ms)


def optimise(
    trace: Trace,
    pod: Pod,
    ledger: Ledger,
    *,
    effort: Effort,
    clock: Clock,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> Optimised:
    """Plan on a trace; the best found when the budget ends, never worse there than cost-ranked.

    The budget bounds the steps, not the last one begun, and a first plan takes a few seconds
    whatever the budget is. PodError when bounds per layer leave no assignment.
    """
    watch = _Watch(effort, clock, on_progress)
    problem = Problem.of(trace, pod, ledger)
    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="planner") as pool:
        run = _Run(problem, watch, pool)
        run.begin()
        run.improve()
        trial_gain = None
        if not watch.is_over(_TRIAL_UNTIL) and len(trace.starts()) >= _TRIAL_REQUESTS:
            trial_gain = _trial(trace, pod, ledger, watch, pool, seed)
        exchanges = run.search(seed) if trial_gain is not None and trial_gain > 0 else 0
        run.drop_idle_copies()
    assignment = Assignment(run.home, run.copy, ledger.slots.copy())
    assignment.check(layer_max=ledger.layer_max)
    watch.note()
    return Optimised(assignment, run.objective_ms, run.cost_ranked_ms, trial_gain, exchanges)


class _Run:
    """A plan in the making: mutable, because it is improved layer by layer in place."""

    def __init__(
        self, problem: Problem, watch: _Watch, pool: ThreadPoolExecutor, *, is_trial: bool = False
    ) -> None:
        """Nothing is planned until `begin`; nobody is told the objective of a trial."""
        self.problem = problem
        self._watch = watch
        self._pool = pool
        self._is_trial = is_trial
        self._layers = list(range(len(problem.layers)))
        self.home = np.zeros(problem.calls.shape, np.int16)
        self.copy = np.full(problem.calls.shape, NOWHERE, np.int16)
        self.layer_us = np.zeros(len(problem.layers))
        self.cost_ranked_ms = np.inf
        self._kinds: tuple[Kind, ...] = ()

    @property
    def objective_ms(self) -> float:
        """Mean expert path of the trace's tokens."""
        return float(self.layer_us.sum()) / 1e3

    def begin(self) -> None:
        """Cost-ranked, by either order of kinds."""
        problem = self.problem
        best = np.inf
        for pod in (problem.pod, _by_first_expert(problem.pod)):
            try:
                home = plan("cost-ranked", problem.calls, pod, problem.ledger).home
            except PodError:
                if pod is problem.pod:
                    raise
                continue  # bounds per layer do not leave every order of kinds a way
            spent = self.scored(problem, home, self.copy)
            if pod is problem.pod:
                self.cost_ranked_ms = float(spent.sum()) / 1e3
            if spent.sum() < best:
                best = float(spent.sum())
                self.home, self.layer_us = home, spent
                kinds = sorted(kinds_of(pod), key=lambda kind: (kind.per_expert_us, kind.fixed_us))
                self._kinds = tuple(kinds)
        self._note()

    def improve(self) -> None:
        """Boundaries that pay, counting on copies of the hottest; then the copies that pay most."""
        start = Assignment.without_copies(self.home, self.problem.ledger.slots.tolist())
        shares = sizes.shares_of(self.problem, start, self._kinds)
        self._take_if_better(start.home, sizes.first_copies(self.problem, shares, start))
        better = sizes.exchange(self.problem, shares, each=self._each)
        while not self._watch.is_over(_SIZES_UNTIL):
            found = next(better, None)
            if found is None:
                break
            shares = found
            self._note()
        settled = sizes.settle(self.problem, shares)
        if settled is not None:
            copy = sizes.first_copies(self.problem, shares, settled)
            self._take_if_better(settled.home, copy)
        self._improve_copies()

    def _take_if_better(self, home: Places, copy: Places) -> None:
        spent = self.scored(self.problem, home, copy)
        if spent.sum() < self.layer_us.sum():
            self.home, self.copy, self.layer_us = home, copy, spent
        self._note()

    def _improve_copies(self) -> None:
        """Layer by layer, while time is left, the copies that save most instead of the hottest."""
        held = Assignment.without_copies(self.home, self.problem.ledger.slots.tolist())
        rooms = copy_rooms(held.layer_counts(), self.problem.ledger)

        def improve(layer: int) -> float:
            if self._watch.is_over(_COPIES_UNTIL):
                return 0.0
            routing = self.problem.layers[layer]
            copy = copies.choose(self.problem, layer, self.home[layer], rooms[layer])
            spent = kernel.layer_us(
                routing.ids, self.home[layer], copy, self.problem.table, np.empty(len(routing.ids))
            )
            if spent < self.layer_us[layer]:
                self.copy[layer], self.layer_us[layer] = copy, spent
            return 0.0

        for first in range(0, len(self._layers), _BATCH):
            self._each(improve, self._layers[first : first + _BATCH])
            self._note()

    def drop_idle_copies(self) -> None:
        """No copy where no token would use one: at places too slow to help, it is only read in."""
        costs = PlaceCosts.of(self.problem.pod.nodes)
        used = np.zeros(len(costs.fixed_us), np.int64)
        for routing, home, copy in zip(self.problem.layers, self.home, self.copy, strict=True):
            homes = home[routing.ids]
            chosen = choose_copies(homes, copy[routing.ids], costs.fixed_us, costs.per_expert_us)
            used += np.bincount(chosen[chosen != homes], minlength=len(used))
        # copies that are not chosen change no choice, so the objective stays
        self.copy[(self.copy != NOWHERE) & (used[self.copy] == 0)] = NOWHERE

    def _note(self) -> None:
        if not self._is_trial:
            self._watch.note(self.objective_ms)

    def search(self, seed: int) -> int:
        """Exchange homes until the budget ends; returns how many exchanges were kept."""
        proposals = self._watch.effort.proposals
        rounds, kept = 0, 0
        while not self._watch.is_over() and (proposals is None or rounds * _ROUND < proposals):
            kept += self.search_round(seed, rounds, _ROUND)
            rounds += 1
            self._note()
        return kept

    def search_round(self, seed: int, index: int, proposals: int) -> int:
        """Proposals in every layer; the number kept."""

        def improve(layer: int) -> float:
            return search.exchange_homes(
                self.problem,
                layer,
                self.home[layer],
                self.copy[layer],
                proposals=proposals,
                seed=(seed, index),
            )

        kept = int(sum(self._each(improve, self._layers)))
        self.layer_us = self.scored(self.problem, self.home, self.copy)
        return kept

    def scored(self, problem: Problem, home: Places, copy: Places) -> Floats:
        """Mean time of every layer on the tokens of a problem: float64 [layers]."""

        def value(layer: int) -> float:
            ids = problem.layers[layer].ids
            spent = np.empty(len(ids))
            return kernel.layer_us(ids, home[layer], copy[layer], problem.table, spent)

        return np.array(self._each(value, self._layers), np.float64)

    def _each(self, action: Callable[[int], float], layers: list[int]) -> list[float]:
        # layers share nothing that changes, so the order of threads changes nothing
        return list(self._pool.map(action, layers))


def _trial(
    trace: Trace, pod: Pod, ledger: Ledger, watch: _Watch, pool: ThreadPoolExecutor, seed: int
) -> float | None:
    """Least gain of the search over splits by request, on a few layers; None if it was not tried.

    The budget's shares hold here too: late in it the search is tried on plainer copies.
    """
    step = -(-trace.layers // _TRIAL_LAYERS)
    smaller, share = some_layers(trace, ledger, np.arange(0, trace.layers, step))
    proposals = watch.effort.proposals
    proposals = _TRIAL_PROPOSALS if proposals is None else proposals
    gains = []
    for index in range(_TRIAL_SPLITS):
        if watch.is_over(_TRIAL_UNTIL):
            return None
        inside, outside = split_requests(smaller, 2 / 3, seed + index)
        run = _Run(Problem.of(inside, pod, share), watch, pool, is_trial=True)
        try:
            run.begin()
        except PodError:
            return None  # what fits in all layers together need not fit in these few
        run.improve()
        unseen = Problem.of(outside, pod, share)
        before = run.scored(unseen, run.home, run.copy).sum()
        run.search_round(seed, index, proposals)
        after = run.scored(unseen, run.home, run.copy).sum()
        gains.append(float(1.0 - after / before) if before else 0.0)
        watch.note()
    return min(gains)


def _by_first_expert(pod: Pod) -> Pod:
    """The same nodes with the cost of a first expert as the cost of each."""
    nodes = tuple(
        msgspec.structs.replace(
            node,
            cost=msgspec.structs.replace(
                node.cost, fixed_us=0.0, per_expert_us=node.fixed_us + node.per_expert_us
            ),
        )
        for node in pod.nodes
    )
    return msgspec.structs.replace(pod, nodes=nodes)
