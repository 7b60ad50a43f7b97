"""The original plan's arithmetic, from plan-figures.md, and the shipped pod."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.planner.ledger import take_ledger
from services.planner.pod_file import read_pod
from services.planner.policies import plan
from services.planner.score import score
from services.routing.trace import SYNTHETIC, Trace
from services.simulator.events import Simulation, simulate
from services.simulator.feed import place_costs, pod_of
from services.simulator.inputs import overridden
from services.simulator.model import Loss, SimPod, SimStation, Workload
from services.simulator.phases import phases
from services.simulator.routed import Routed, drawn
from services.simulator.sweep import Axis, sweep, what_decides
from services.simulator.tally import Outcome
from shared.core.shape import K3
from tests.unit.simulator.world import FAST_LINK, place, pod, routed

LAYERS = len(K3.moe_layers)
REST_US = 1800.0  # between the 1.6 and 2 ms that the published rates imply
BEST_MS = 27.7  # the expert path of cost-ranked


def token(serial_us: float, expert_path_ms: float) -> Outcome:
    """A pod whose every layer waits as long as the published mean."""
    simulated = pod(
        place("spark0", "spark", 1000 * expert_path_ms / LAYERS),
        serial_us=serial_us,
        rest_us=REST_US,
    )
    routing = routed(simulated, [[0]] * LAYERS, [[[0]] * LAYERS])
    return simulate(simulated, routing, Workload(tokens=5))


@pytest.mark.parametrize(
    ("serial_us", "expert_path_ms", "published"),
    [(3030.0, BEST_MS, 3.2), (400.0, BEST_MS, 15.1), (400.0, 38.6, 12.9), (400.0, 31.1, 14.3),
     (400.0, 30.4, 14.5)],
)  # fmt: skip
def test_the_published_rates(serial_us: float, expert_path_ms: float, published: float) -> None:
    """92 x serial + expert path + rest, to the last printed digit or half of it more."""
    outcome = token(serial_us, expert_path_ms)

    assert outcome.tokens_per_s == pytest.approx(published, abs=0.06)
    assert outcome.expert_path_ms == pytest.approx(expert_path_ms, rel=1e-5)


def test_the_crossover() -> None:
    """Serial and expert path are equal at 301 us per layer; the plan prints 350."""
    crossover_us = 1000 * token(400.0, BEST_MS).expert_path_ms / LAYERS

    assert crossover_us == pytest.approx(301.1, abs=0.1)
    assert 300 <= crossover_us <= 350


@pytest.fixture(scope="module")
def home_pod() -> tuple[SimPod, Routed]:
    """The shipped pod under cost-ranked, with skewed routing drawn from a law."""
    described = read_pod("k3-home-pod.toml")
    rng = np.random.default_rng(0)
    law = 1e6 / (np.arange(K3.experts) + 25.0)
    law[K3.experts * 55 // 100 :] /= 8
    histogram = np.array([rng.permutation(law) for _ in range(LAYERS)]).astype(np.int64)
    trace = drawn(histogram, tokens=120, top_k=K3.top_k, seed=1)
    assignment = plan("cost-ranked", histogram, described, take_ledger(described, K3))
    simulated = pod_of(described)
    return simulated, Routed.of(trace, assignment, place_costs(simulated))


def test_the_description_becomes_the_model(home_pod: tuple[SimPod, Routed]) -> None:
    """The published Spark hop, the link of 392 Gb/s, the bet of 400 us."""
    simulated, _ = home_pod
    spark = simulated.places[simulated.index("spark7")]

    assert spark.curve.at(np.array([1.0, 3.0])).tolist() == [269.0, 438.0]
    assert simulated.station.serial_us == 400.0
    assert simulated.station.link_bytes_per_s == 49e9
    assert spark.is_remote
    assert spark.wire_us == pytest.approx(2 * 4.66)
    assert simulated.places[0].is_station


def test_the_expert_path_is_the_planner_s(home_pod: tuple[SimPod, Routed]) -> None:
    """Alone on an endless link, a token waits exactly as long as the scorer says, copies too."""
    described, routing = home_pod
    simulated = SimPod(
        SimStation(serial_us=0.0, link_bytes_per_s=FAST_LINK),
        tuple(replace(place, wire_us=0.0) for place in described.places),
    )
    spark = simulated.index("spark0")
    copies = np.where((routing.assignment.home == 1) & (np.arange(K3.experts) % 7 == 0), spark, -1)
    copied = routing.relaid(routing.assignment.with_copies(copies), routing.costs)
    steps = np.arange(routing.tokens, dtype=np.int32)
    tokens = Trace(SYNTHETIC, 1, K3.experts, np.zeros_like(steps), steps, routing.ids)
    sparks = np.array([place.is_remote for place in simulated.places])

    for played in (routing, copied):
        # a fifth is warm-up, so that every token of the trace is measured once
        outcome = simulate(simulated, played, Workload(tokens=routing.tokens * 5 // 4))
        scored = score(tokens, played.assignment, played.costs, sparks=sparks)
        assert outcome.token_ms is not None
        assert outcome.tokens == routing.tokens
        assert outcome.token_ms.mean == pytest.approx(scored.expert_path_ms, rel=1e-5)
    assert (copied.place != routing.place).any()


def test_the_serial_term_decides_most(home_pod: tuple[SimPod, Routed]) -> None:
    """10 % of 400 us are 3.68 ms per token; the order is that of the plan's own levers."""
    levers = what_decides(*home_pod, Workload(tokens=20), 0)

    assert levers[0].figure == "serial per layer"
    assert levers[0].ms_per_token == pytest.approx(3.68, rel=1e-3)
    assert all(lever.tokens_per_s > -1e-9 for lever in levers)
    names = [lever.figure for lever in levers]
    assert names.index("spark fixed") < names.index("rtx fixed")


def test_a_lost_spark_is_the_published_degraded_rate(home_pod: tuple[SimPod, Routed]) -> None:
    """About 20 ms per token until its experts have new homes, then the old rate."""
    simulated, routing = home_pod
    loss = Loss(simulated.index("spark3"), at_s=3.0, rehome_s=4.0)
    tally = Simulation(simulated, routing, Workload(seconds=10.0), losses=[loss], seed=0).run()
    found = phases(simulated, [loss], [at / 1e9 for at in tally.emitted_ns], 10.0)
    healthy, degraded, rehomed = (phase.tokens_per_s for phase in found)

    assert rehomed == pytest.approx(healthy, rel=0.03)
    assert 8 < 1000 / degraded - 1000 / healthy < 40


def test_more_sparks_help_less_and_less(home_pod: tuple[SimPod, Routed]) -> None:
    """Rising rates with falling gains, and the Station is never the limit of one stream."""
    simulated, routing = home_pod
    points = list(sweep(simulated, routing, Workload(tokens=20), Axis("sparks", (1, 4, 16, 64)), 0))
    rates = [point.outcome.tokens_per_s for point in points]

    assert rates == sorted(rates)
    assert rates[1] - rates[0] > rates[2] - rates[1] > rates[3] - rates[2]
    assert {point.limit for point in points} == {"latency"}


def test_lanes_saturate_the_station(home_pod: tuple[SimPod, Routed]) -> None:
    """At 400 us serial the one thread is full from a few lanes on, and the sweep stops there."""
    simulated, routing = home_pod
    points = list(sweep(simulated, routing, Workload(), Axis("lanes", (1, 2, 4, 8, 16, 4096)), 0))

    assert points[0].limit == "latency"
    assert points[-1].limit == "Station"
    assert points[-1].count < 4096
    quick = list(
        sweep(overridden(simulated, serial_us=50.0), routing, Workload(), Axis("lanes", (8,)), 0)
    )
    assert quick[0].limit != "Station"
