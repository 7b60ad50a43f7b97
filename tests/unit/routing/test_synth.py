"""Synthetic traces: determined by their arguments, and each parameter does what it says."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from services.planner.cost import PlaceCosts
from services.planner.ledger import take_ledger
from services.planner.pod_file import read_pod
from services.planner.policies import POLICIES, plan
from services.planner.score import score
from services.routing import popularity
from services.routing.synth import FITTED, SynthParams, describe, synthesize
from services.routing.trace import Trace, check
from shared.core.errors import TraceError
from shared.core.shape import K3, ExpertShape, ModelShape
from tests.unit.routing.traces import same

SMALL = ModelShape(
    layers=3, first_moe_layer=1, experts=64, top_k=4, expert=ExpertShape(latent=32, width=16)
)
WIDE = msgspec.structs.replace(K3, layers=5)
PLAIN = SynthParams(clusters=8, clusters_active=0, topic_strength=0.0)
PUBLISHED_MS = {"contiguous": 38.6, "global": 31.1, "layer-balanced": 30.4, "cost-ranked": 27.7}


def made(tokens: int = 600, *, shape: ModelShape = SMALL, seed: int = 3, **params: object) -> Trace:
    """A trace in ten requests of plain traffic, but for `params`."""
    values = msgspec.structs.replace(PLAIN, **params)
    return synthesize(values, requests=10, tokens=tokens, shape=shape, seed=seed)


def top(trace: Trace, share: float) -> set[int]:
    """The hottest share of all experts, as flat indices."""
    counts = trace.histogram().ravel()
    return set(np.argsort(-counts, kind="stable")[: round(counts.size * share)].tolist())


def test_equal_arguments_give_equal_traces() -> None:
    """Whatever the threads do; another seed, or other traffic, is another trace."""
    one = made(clusters_active=2)

    check(one)
    assert same(made(clusters_active=2), one)
    assert not same(made(clusters_active=2, seed=4), one)
    assert not same(made(clusters_active=2, traffic=1), one)
    even = {"topics": 1, "topics_per_request": 1, "length_spread": 0.0}  # what else could differ
    assert not np.array_equal(made(**even).ids, made(**even, traffic=1).ids)
    assert (one.tokens, len(one.starts()), one.layers, one.experts) == (600, 10, 2, 64)


def test_the_law_is_what_is_drawn() -> None:
    """Without clusters and topics, counts follow the chances of the Zipf weights."""
    trace = made(20_000, zipf_exponent=1.2, zipf_offset=5.0, zipf_spread=0.0, cold_fraction=0.0)
    weights = popularity.zipf(64, exponent=1.2, offset=5.0, cold=0.0, penalty=0.0)
    expected = popularity.chances(weights, 4)

    for counts in trace.histogram():
        hottest = np.sort(counts)[::-1] / trace.tokens
        assert np.allclose(hottest, expected, rtol=0.08, atol=0.004)


def test_chances_are_those_of_drawing_without_replacement() -> None:
    """Against draws of numpy's own generator, one token after the other."""
    weights = np.array([8.0, 4.0, 2.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25] * 3)
    rng = np.random.default_rng(0)
    share = weights / weights.sum()
    drawn = np.zeros(len(weights))
    for _ in range(6000):
        drawn[rng.choice(len(weights), size=5, replace=False, p=share)] += 1

    assert popularity.chances(weights, 5).sum() == pytest.approx(5.0)
    assert np.allclose(drawn / 6000, popularity.chances(weights, 5), atol=0.03)


def test_the_first_choice_is_the_likeliest() -> None:
    """The router's order is best first, so a hot expert comes early."""
    trace = made(1000, shape=WIDE, zipf_exponent=1.5, zipf_offset=1.0)
    hottest = int(np.argmax(trace.histogram()[0]))
    where = np.argwhere(trace.ids[:, 0] == hottest)[:, 1]

    assert (where == 0).sum() > 5 * (where == 8).sum() > 0


def test_a_cold_tail_is_rare() -> None:
    """Half of the experts, their weights divided by e ^ penalty, are chosen that much less."""
    params = {"zipf_exponent": 0.0, "cold_fraction": 0.5, "cold_spread": 0.0}
    counts = np.sort(made(5000, **params, cold_penalty=3.0).histogram(), axis=1)
    expected = popularity.chances(np.repeat([np.exp(-3.0), 1.0], 32), 4)

    assert counts[:, :32].sum() / counts.sum() == pytest.approx(expected[:32].sum() / 4, rel=0.1)
    assert counts[:, 31].max() < counts[:, 32].min() / 5


def test_clusters_are_chosen_together() -> None:
    """A token's experts share clusters far oftener with the boost than without."""

    def pairs(boost: float) -> float:
        trace = made(3000, clusters=16, clusters_active=1, cluster_boost=boost)
        together = np.zeros((64, 64))
        for chosen in trace.ids[:, 0]:
            together[np.ix_(chosen, chosen)] += 1
        share = trace.histogram()[0] / trace.tokens
        lift = together / (np.outer(share, share) * trace.tokens + 1)
        return float(np.sort(lift[np.triu_indices(64, 1)])[-96:].mean())  # 16 x 6 pairs

    assert pairs(3.0) > 1.6 * pairs(0.0)


def test_topics_set_requests_apart() -> None:
    """With strong topics, two halves of a request resemble each other more than two requests."""
    trace = made(8000, topics=8, topics_per_request=1, topic_strength=1.5)

    def shares(tokens: np.ndarray) -> np.ndarray:
        return trace.select(tokens).histogram() / tokens.sum()

    inside, across = [], []
    odd = trace.step % 2 == 1
    for number in range(9):
        mine, next_one = trace.request == number, trace.request == number + 1
        inside.append(np.abs(shares(mine & odd) - shares(mine & ~odd)).sum())
        across.append(np.abs(shares(mine) - shares(next_one)).sum())
    assert np.mean(across) > 1.5 * np.mean(inside)


@pytest.mark.parametrize("kept", [0.35, 0.7])
def test_a_shift_keeps_the_share_it_names(kept: float) -> None:
    """The published transfer: 35 % of the hottest 9,558 of 82,432 on another population."""
    before = synthesize(FITTED, requests=20, tokens=1200, shape=WIDE, seed=1)
    shifted = msgspec.structs.replace(FITTED, shift_kept=kept, traffic=1)
    after = synthesize(shifted, requests=20, tokens=1200, shape=WIDE, seed=1)
    hot = top(before, FITTED.shift_top)

    assert len(hot & top(after, FITTED.shift_top)) / len(hot) == pytest.approx(kept, abs=0.07)


def test_other_traffic_of_a_model_has_its_popularity() -> None:
    """No shift: the same top experts under other requests and draws, not under another seed."""
    one, other, stranger = (
        synthesize(
            msgspec.structs.replace(FITTED, traffic=traffic),
            requests=20,
            tokens=1200,
            shape=WIDE,
            seed=seed,
        )
        for traffic, seed in ((0, 1), (1, 1), (0, 2))
    )
    hot = top(one, FITTED.shift_top)

    assert len(hot & top(other, FITTED.shift_top)) / len(hot) > 0.75
    assert len(hot & top(stranger, FITTED.shift_top)) / len(hot) < 0.25


def test_a_fit_has_the_marginals_of_the_histogram() -> None:
    """Per layer and expert within a few percent, although clusters and topics stay."""
    rng = np.random.default_rng(7)
    law = np.stack([rng.permutation(np.linspace(1, 12, 64) ** 1.5) for _ in range(2)])
    shares = law / law.sum(axis=1, keepdims=True)
    counts = np.rint(shares * 1e6).astype(np.int64)
    params = msgspec.structs.replace(FITTED, clusters=16, topics=4)

    trace = synthesize(params, requests=60, tokens=24_000, shape=SMALL, seed=2, fit=counts)

    check(trace)
    got = trace.histogram() / (trace.tokens * SMALL.top_k)
    assert 0.5 * np.abs(got - shares).sum(axis=1).max() < 0.03
    often = shares * trace.tokens * SMALL.top_k > 1000
    assert np.abs(got / shares - 1)[often].max() < 0.12
    assert np.abs(got / shares - 1)[often].mean() < 0.05


def test_a_fit_never_draws_what_was_never_seen() -> None:
    """Experts with no count stay out as long as others suffice."""
    counts = np.full((2, 64), 100, np.int64)
    counts[:, 10:30] = 0

    trace = synthesize(PLAIN, requests=4, tokens=500, shape=SMALL, seed=0, fit=counts)

    assert trace.histogram()[:, 10:30].sum() == 0


@pytest.mark.parametrize(
    ("params", "fields", "words"),
    [
        ({}, {"requests": 30, "tokens": 20}, "30 requests of 20 tokens"),
        ({"clusters": 65}, {}, "65 clusters of 64"),
        ({"clusters": 2, "clusters_active": 3}, {}, "3 active of 2"),
        ({"topics": 1}, {}, "2 topics per request of 1"),
        ({}, {"shape": msgspec.structs.replace(SMALL, experts=2**16)}, "a trace holds 65535"),
        ({}, {"fit": np.ones((3, 64), np.int64)}, "the model"),
        ({}, {"fit": np.zeros((2, 64), np.int64)}, "layer 1 is no count"),
        ({}, {"fit": np.eye(2, 64, dtype=np.int64)}, "layer 1 is no count"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    params: dict[str, int], fields: dict[str, object], words: str
) -> None:
    """Before anything is drawn."""
    arguments = {"requests": 4, "tokens": 20, "shape": SMALL, "seed": 0, **fields}
    with pytest.raises(TraceError, match=words):
        synthesize(msgspec.structs.replace(PLAIN, **params), **arguments)


def test_every_parameter_is_described() -> None:
    """`--list-params` shows all of them, each with a meaning."""
    described = describe(FITTED)

    assert [name for name, _, _ in described] == list(SynthParams.__struct_fields__)
    assert all(len(meaning) > 15 for _, _, meaning in described)


def test_the_fitted_parameters_meet_the_plans_table() -> None:
    """All four policies within 3 % on a third of the tokens; the fit itself was made on seed 0."""
    trace = synthesize(FITTED, requests=40, tokens=1500, shape=K3, seed=1)
    pod = read_pod("k3-home-pod.toml")
    ledger, costs = take_ledger(pod, K3), PlaceCosts.of(pod.nodes)
    sparks = np.array([node.tier == "spark" for node in pod.nodes])

    found = {
        policy: score(
            trace, plan(policy, trace.histogram(), pod, ledger), costs, sparks=sparks
        ).expert_path_ms
        for policy in POLICIES
    }

    assert found == pytest.approx(PUBLISHED_MS, rel=0.03)
