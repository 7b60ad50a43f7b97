"""Laws that hold for any pod: nothing is served twice, equal seeds, more never hurts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.simulator.events import Simulation, simulate
from services.simulator.inputs import overridden
from services.simulator.model import Loss, SimPod, Workload
from services.simulator.routed import Routed, drawn
from services.simulator.sweep import with_sparks
from shared.core.placement import Tier
from tests.unit.simulator.world import place, pod, routed

LAYERS, EXPERTS, TOP_K = 3, 12, 4
TIERS: tuple[Tier, ...] = ("hbm", "grace", "rtx", "spark", "spark", "spark")


def some_pod(seed: int) -> tuple[SimPod, Routed]:
    """A pod with places of all tiers, random figures and random homes, some with copies."""
    rng = np.random.default_rng(seed)
    places = [
        place(
            f"{tier}{index}", tier, rng.uniform(0, 200), rng.uniform(5, 90), wire_us=rng.uniform()
        )
        for index, tier in enumerate(TIERS)
    ]
    simulated = pod(
        *places,
        serial_us=rng.uniform(0, 300),
        shared_us=rng.uniform(0, 50),
        post_us=rng.uniform(0, 5),
        collect_us=rng.uniform(0, 5),
        rest_us=rng.uniform(0, 50),
        link_bytes_per_s=10 ** rng.uniform(8, 11),
    )
    homes = rng.integers(0, len(TIERS), (LAYERS, EXPERTS))
    copies = np.where(rng.random(homes.shape) < 0.3, (homes + 1) % len(TIERS), -1)
    ids = drawn(np.ones((LAYERS, EXPERTS), np.int64), tokens=50, top_k=TOP_K, seed=seed).ids
    return simulated, routed(simulated, homes, ids, copies=copies.tolist())


@given(seed=st.integers(0, 10**6), streams=st.integers(1, 5), prompt=st.sampled_from([0, 7]))
@settings(max_examples=40, deadline=None)
def test_every_pair_is_served_once(seed: int, streams: int, prompt: int) -> None:
    """One lane: tokens x layers x top_k rows and not one more; and time has no gaps."""
    simulated, routing = some_pod(seed)
    work = Workload(
        streams=streams, tokens=10, prompt_tokens=prompt, answer_tokens=5, prefill_tokens=4
    )
    tally = Simulation(simulated, routing, work, losses=(), seed=seed).run()
    outcome = tally.outcome(simulated, streams=streams, layers=LAYERS)
    decoded = outcome.tokens - len(tally.first_token_ns) if prompt else outcome.tokens

    assert outcome.rows == (decoded + outcome.prompt_tokens) * LAYERS * TOP_K
    assert outcome.experts <= outcome.rows
    assert outcome.cold_experts == 0
    if not prompt:
        assert outcome.token_ms is not None
        assert sum(outcome.parts_ms.values()) == pytest.approx(outcome.token_ms.mean)


@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_a_step_visits_each_pair_once(seed: int, tokens: int) -> None:
    """Against a count pair by pair, repeated tokens and copies included."""
    _, routing = some_pod(seed)
    chosen = np.random.default_rng(seed).integers(0, 50, tokens)
    visits = routing.visits(chosen)
    rows: dict[tuple[int, int], int] = {}
    experts: dict[tuple[int, int], set[int]] = {}
    for token in chosen.tolist():
        for layer in range(LAYERS):
            for expert, where in zip(
                routing.ids[token, layer].tolist(),
                routing.place[token, layer].tolist(),
                strict=True,
            ):
                rows[layer, where] = rows.get((layer, where), 0) + 1
                experts.setdefault((layer, where), set()).add(expert)

    keys = list(zip(visits.layer.tolist(), visits.place.tolist(), strict=True))
    assert dict(zip(keys, visits.rows.tolist(), strict=True)) == rows
    assert dict(zip(keys, visits.experts.tolist(), strict=True)) == {
        key: len(found) for key, found in experts.items()
    }


def test_equal_seeds_give_equal_results() -> None:
    """Luck, starts and arrivals all come from the seed."""
    simulated, routing = some_pod(3)
    lucky = SimPod(
        simulated.station,
        tuple(replace(p, curve=replace(p.curve, spread=2.0)) for p in simulated.places),
    )
    work = Workload(streams=6, lanes=3, seconds=0.2, prompt_tokens=3, answer_tokens=4,
                    arrivals_per_s=900.0)  # fmt: skip
    first, again, other = (simulate(lucky, routing, work, seed=seed) for seed in (5, 5, 6))

    assert first == again
    assert first != other


@given(seed=st.integers(0, 10**6), which=st.integers(0, len(TIERS) - 1))
@settings(max_examples=30, deadline=None)
def test_a_faster_place_is_never_slower(seed: int, which: int) -> None:
    """One stream: halving one curve cannot lose a token."""
    simulated, routing = some_pod(seed)
    quick = [
        replace(p, curve=p.curve.scaled(fixed=0.5, slope=0.5), wire_us=p.wire_us / 2)
        if index == which
        else p
        for index, p in enumerate(simulated.places)
    ]
    faster = SimPod(simulated.station, tuple(quick))
    work = Workload(tokens=20)

    before = simulate(simulated, routing, work).tokens_per_s
    assert simulate(faster, routing, work).tokens_per_s >= before * (1 - 1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_more_lanes_give_more_until_something_is_full(seed: int) -> None:
    """Throughput rises to a plateau, and does not fall from it by more than 3 %."""
    simulated, routing = some_pod(seed)
    rates = []
    for lanes in (1, 2, 4, 8, 16, 32):
        work = Workload(streams=lanes, lanes=lanes, tokens=30)
        outcome = simulate(simulated, routing, work)
        rates.append(outcome.tokens_per_s)
        own_ms = sum(outcome.parts_ms[name] for name in ("serial", "message", "local", "rest"))
        assert outcome.tokens_per_s * own_ms <= 1000 * 1.01  # the thread is one

    assert all(after >= before * 0.97 for before, after in pairwise(rates))
    assert rates[1] > rates[0]
    few = simulate(simulated, routing, Workload(streams=64, lanes=64, tokens=3))
    assert few.tokens_per_s == pytest.approx(rates[-1], rel=0.1)
    most = simulate(simulated, routing, Workload(streams=64, lanes=64, tokens=30))
    assert max(most.station, most.link_in, most.link_out, *most.places.values()) > 0.95


@pytest.mark.parametrize("seed", range(3))
def test_losing_a_node_costs_time(seed: int) -> None:
    """Cold experts cost more than their node, and new homes bring most of it back."""
    simulated, routing = some_pod(seed)
    simulated = overridden(simulated, detect_us=1000.0)
    loss = Loss(simulated.index("spark3"), at_s=0.05, rehome_s=100.0)
    healthy = simulate(simulated, routing, Workload(seconds=0.2))
    lost = simulate(simulated, routing, Workload(seconds=0.2), losses=[loss])
    helped = simulate(
        simulated, routing, Workload(seconds=0.2), losses=[replace(loss, rehome_s=0.05)]
    )

    assert lost.tokens < helped.tokens <= healthy.tokens
    assert lost.cold_experts > helped.cold_experts > 0


def test_a_node_ten_times_slower_is_worse_than_none() -> None:
    """P9: two Sparks and one with ten times the hop are slower than the two alone."""
    good = [place(f"spark{index}", "spark", 184.5, 84.5) for index in range(2)]
    slow = place("spark2", "spark", 1845.0, 845.0)
    homes = np.arange(EXPERTS)[None].repeat(LAYERS, 0) % 3
    ids = drawn(np.ones((LAYERS, EXPERTS), np.int64), tokens=50, top_k=TOP_K, seed=1).ids
    three = pod(*good, slow)
    with_slow = routed(three, homes, ids)
    two, without = with_sparks(SimPod(three.station, (*good, good[0])), with_slow, 2)

    work = Workload(tokens=40)
    assert simulate(two, without, work).tokens_per_s > 2 * (
        simulate(three, with_slow, work).tokens_per_s
    )
