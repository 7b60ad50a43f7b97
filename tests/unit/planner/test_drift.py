"""Drift: distances by value, what noise may not do (P2), when to say something (P6)."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.planner import drift, policies, proposal
from services.planner.drift import Gain, Limits, Mean, PathDrift, RoutingDrift
from services.planner.drift_report import Found, Settings, Sides, judge, pod_in_order
from services.planner.interval import Interval
from services.planner.ledger import Ledger
from services.planner.pod import Pod
from services.routing.trace import Trace
from shared.core.errors import PlacementError
from shared.core.placement import Placement
from shared.core.shape import ModelShape
from tests.unit.planner.small import pod_of, routing, usual_pod

LIMITS = Limits(min_gain_ms=0.001, min_gain_ms_per_gib=0.0, worse_max=0.05)
LAYERS, EXPERTS, TOKENS, REQUESTS = 4, 24, 400, 12


@pytest.fixture(scope="module")
def usual() -> tuple[Pod, Ledger, ModelShape]:
    """A pod with all tiers and room to spare on the Sparks."""
    return usual_pod(LAYERS, EXPERTS)


def traffic(shape: ModelShape, seed: int) -> Trace:
    """Hot and cold experts depend on the seed: two seeds are two workloads."""
    return routing(shape, tokens=TOKENS, requests=REQUESTS, seed=seed)


def placed_on(trace: Trace, usual: tuple[Pod, Ledger, ModelShape]) -> Placement:
    """The cost-ranked placement for a trace."""
    pod, ledger, shape = usual
    assignment = policies.plan("cost-ranked", trace.histogram(), pod, ledger)
    return assignment.to_placement(
        pod, shape, model_digest="m" * 32, policy="cost-ranked", trace_digest=trace.digest
    )


def judged(
    plan: Trace, live: Trace, usual: tuple[Pod, Ledger, ModelShape], limits: Limits = LIMITS
) -> Found:
    """The verdict on a cost-ranked placement of `plan` under `live`."""
    pod, ledger, _ = usual
    sides = Sides(plan.histogram(), live.histogram(), plan, live)
    found = Settings("cost-ranked", limits, holdout=0.25, seed=1, bytes_per_s=1e9)
    return judge(
        placed_on(plan, usual),
        pod,
        ledger,
        sides,
        found,
        replan=lambda trace: policies.plan("cost-ranked", trace.histogram(), pod, ledger),
    )


def noisy(trace: Trace, share: float, seed: int) -> Trace:
    """The trace with this share of its choices drawn anew, uniformly."""
    rng = np.random.default_rng(seed)
    ids = trace.ids.copy()
    for token, layer, slot in np.argwhere(rng.random(ids.shape) < share):
        free = np.setdiff1d(np.arange(trace.experts), ids[token, layer])
        ids[token, layer, slot] = rng.choice(free)
    return replace(trace, ids=ids)


def shuffled(trace: Trace, seed: int) -> Trace:
    """The same co-activation with other experts: every layer's ids permuted."""
    rng = np.random.default_rng(seed)
    ids = trace.ids.copy()
    for layer in range(trace.layers):
        ids[:, layer] = rng.permutation(trace.experts).astype(np.uint16)[ids[:, layer]]
    return replace(trace, ids=ids)


def test_distances_by_value(usual: tuple[Pod, Ledger, ModelShape]) -> None:
    """Total variation in all and by layer, on counts that can be checked by hand."""
    pod, ledger, _ = usual
    plan = np.array([[3, 1, 0, 0], [2, 2, 0, 0]])
    live = np.array([[0, 1, 3, 0], [1, 1, 2, 0]]) * 5

    found = drift.routing_drift(plan, live, pod, ledger)

    assert found.layers == (0.75, 0.5)
    assert found.total_variation == 0.625
    assert not found.is_identical
    assert drift.top_overlap(plan, live, 2) == 0.0  # (0,0), (1,0) against (0,2), (1,2)
    assert drift.top_overlap(plan, live, 4) == 0.5  # equal calls: by layer, then expert
    assert drift.top_overlap(plan, live, 0) == 1.0


def test_tops_are_the_fast_tiers(usual: tuple[Pod, Ledger, ModelShape]) -> None:
    """N is what the cheapest kind holds, then what all kinds but the dearest hold."""
    pod, ledger, shape = usual
    counts = traffic(shape, 1).histogram()

    overlaps = drift.routing_drift(counts, counts, pod, ledger).overlaps

    assert [(o.what, o.slots, o.kept) for o in overlaps] == [
        ("hbm", 12, 1.0),
        ("hbm, rtx, grace", 48, 1.0),
    ]


def test_only_shares_count(usual: tuple[Pod, Ledger, ModelShape]) -> None:
    """A histogram and its multiple are identical to the last bit, one count more is not."""
    pod, ledger, shape = usual
    plan = traffic(shape, 1).histogram()
    more = 3 * plan
    more[0, 0] += 1

    assert drift.routing_drift(plan, 3 * plan, pod, ledger).is_identical
    assert not drift.routing_drift(plan, more, pod, ledger).is_identical


def test_by_chance_is_what_sampling_does(usual: tuple[Pod, Ledger, ModelShape]) -> None:
    """Two samples of one law differ by about as much as is said."""
    pod, ledger, _ = usual
    rng = np.random.default_rng(3)
    law = rng.dirichlet(np.ones(200))
    samples = [rng.multinomial(5_000, law).reshape(2, 100) for _ in range(2)]

    found = drift.routing_drift(samples[0], samples[1], pod, ledger)

    assert found.by_chance == pytest.approx(found.total_variation, rel=0.2)


def test_identical_routing_moves_nothing(usual: tuple[Pod, Ledger, ModelShape]) -> None:
    """P2: same histogram, zero moves, even with limits of 0 and a planner that would move all."""
    pod, ledger, shape = usual
    plan = traffic(shape, 1)

    def never(_trace: Trace) -> policies.Assignment:
        raise AssertionError("asked for a new plan")

    found = judge(
        placed_on(plan, usual),
        pod,
        ledger,
        Sides(plan.histogram(), plan.histogram(), plan, plan),
        Settings("cost-ranked", Limits(0.0, 0.0, 0.0), 0.25, 1, 1e9),
        replan=never,
    )

    assert found.report.moves == 0
    assert found.proposal is None
    assert found.report.path.worse == 0
    assert not found.report.verdict.alert


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_noise_moves_nothing(seed: int) -> None:
    """P2: with 1 % of the choices drawn anew nothing is moved, and nobody is alarmed."""
    usual = usual_pod(LAYERS, EXPERTS)
    plan = traffic(usual[2], seed)

    found = judged(
        plan,
        noisy(plan, 0.01, seed),
        usual,
        Limits(min_gain_ms=0.02, min_gain_ms_per_gib=0.0, worse_max=0.05),
    )

    assert found.report.moves == 0
    assert not found.report.verdict.alert


def test_shuffled_popularity_alerts_and_pays(usual: tuple[Pod, Ledger, ModelShape]) -> None:
    """P6: other hot experts raise an alert, and a new plan with bytes and seconds is proposed."""
    pod, _, shape = usual
    plan = traffic(shape, 1)

    found = judged(plan, shuffled(plan, 2), usual)

    report = found.report
    assert report.verdict.alert
    assert report.verdict.replan
    assert report.path.worse > 0.05
    assert report.gain is not None
    assert report.gain.ci95_ms is not None
    assert report.gain.ci95_ms.low > 0
    assert found.proposal is not None
    assert found.placement is not None
    assert report.moves == len(found.proposal.plan.moves) > 0
    assert found.proposal.new_placement == found.placement.digest
    assert found.proposal.old_placement == report.placement
    assert [node.name for node in found.proposal.plan.nodes] == [node.name for node in pod.nodes]
    tier = np.array([node.tier for node in pod.nodes])
    old, new = (one.homes()[0][1:] for one in (placed_on(plan, usual), found.placement))
    stays = tier[old] == tier[new]
    assert 0 < stays.sum() < stays.size
    assert (old[stays] == new[stays]).all()
    assert report.tried is not None
    assert report.tried.seconds_longest == pytest.approx(
        max(max(n.bytes_in, n.bytes_out) for n in report.tried.nodes) / 1e9
    )


def test_a_gain_must_be_worth_its_bytes(usual: tuple[Pod, Ledger, ModelShape]) -> None:
    """The same drift: the alert stays, the moves do not."""
    plan = traffic(usual[2], 1)
    dear = msgspec.structs.replace(LIMITS, min_gain_ms_per_gib=1e9)

    found = judged(plan, shuffled(plan, 2), usual, dear)

    assert found.report.verdict.alert
    assert not found.report.verdict.replan
    assert found.proposal is None
    assert found.report.moves == 0
    assert any("ms per GiB moved" in reason for reason in found.report.verdict.reasons)


def test_dear_bytes_take_only_what_pays_most(usual: tuple[Pod, Ledger, ModelShape]) -> None:
    """With a price on a GiB a share of the exchanges is proposed: fewer records, more for each."""
    plan = traffic(usual[2], 1)
    live = shuffled(plan, 2)
    whole = judged(plan, live, usual).report
    assert whole.gain is not None
    assert whole.tried is not None
    price = 0.9 * whole.gain.gain_ms * 2**30 / whole.tried.bytes_moved

    part = judged(
        plan, live, usual, msgspec.structs.replace(LIMITS, min_gain_ms_per_gib=price)
    ).report

    assert whole.share is None
    assert part.share is not None
    assert part.gain is not None
    assert part.tried is not None
    assert part.verdict.replan
    assert 0 < part.tried.records < whole.tried.records
    assert part.gain.gain_ms / part.tried.records > whole.gain.gain_ms / whole.tried.records


def test_one_request_proves_nothing(usual: tuple[Pod, Ledger, ModelShape]) -> None:
    """Without requests to keep out there is no gain to speak of, so nothing moves."""
    plan = traffic(usual[2], 1)
    live = shuffled(plan, 2)
    live = replace(live, request=np.zeros_like(live.request))

    found = judged(plan, live, usual)

    assert found.report.gain is None
    assert found.report.path.worse_ci95 is None
    assert found.report.verdict.alert
    assert not found.report.verdict.replan
    assert any("one request" in note for note in found.report.notes)


def mean(ms: float) -> Mean:
    """A mean without an interval."""
    return Mean(ms, None, 10, 2)


def path_of(worse: float, interval: Interval | None) -> PathDrift:
    """A prediction that is worse by this share."""
    return PathDrift(mean(10.0), mean(10.0 * (1 + worse)), worse, interval)


ROUTING = RoutingDrift(0.1, 0.01, (0.1,), (), is_identical=False)


@pytest.mark.parametrize(
    ("worse", "interval", "alert"),
    [
        (0.06, Interval(0.01, 0.1), True),
        (0.06, Interval(-0.01, 0.1), False),
        (0.06, None, True),
        (0.05, Interval(0.04, 0.06), False),
        (-0.2, Interval(-0.3, -0.1), False),
    ],
)
def test_when_to_alert(worse: float, interval: Interval | None, alert: bool) -> None:
    """Beyond the limit, and not by chance."""
    verdict = drift.decide(ROUTING, path_of(worse, interval), None, 0, LIMITS)

    assert verdict.alert is alert


@pytest.mark.parametrize(
    ("gain_ms", "interval", "gib", "replan"),
    [
        (1.0, Interval(0.5, 1.5), 100, True),
        (1.0, Interval(0.0, 1.5), 100, False),
        (1.0, None, 100, False),
        (1.0, Interval(0.5, 1.5), 101, False),
        (0.4, Interval(0.3, 0.5), 1, False),
        (1.0, Interval(0.5, 1.5), 0, False),
    ],
)
def test_when_to_plan_again(
    gain_ms: float, interval: Interval | None, gib: int, replan: bool
) -> None:
    """A gain that is no chance, of at least 0.5 ms, and of 0.01 ms per GiB."""
    gain = Gain(mean(10.0), mean(10.0 - gain_ms), gain_ms, interval)
    limits = Limits(min_gain_ms=0.5, min_gain_ms_per_gib=0.01, worse_max=0.05)

    verdict = drift.decide(ROUTING, path_of(0.0, None), gain, gib * 2**30, limits)

    assert verdict.replan is replan
    assert verdict.reasons


def test_identical_routing_outweighs_any_gain() -> None:
    """P2, whatever a search claims to have found."""
    gain = Gain(mean(10.0), mean(1.0), 9.0, Interval(8.0, 10.0))
    same = msgspec.structs.replace(ROUTING, is_identical=True)

    assert not drift.decide(same, path_of(0.0, None), gain, 1, LIMITS).replan


def test_sizes_in_the_unit_that_fits() -> None:
    """A small pod's moves are not 0.0 GiB."""
    sizes = (0, 1023, 1024, 3 * 2**20, 2 * 2**40)

    words = [drift.size_words(size) for size in sizes]

    assert words == ["0 B", "1023 B", "1.0 KiB", "3.0 MiB", "2,048.0 GiB"]


def test_pod_follows_the_placement(usual: tuple[Pod, Ledger, ModelShape]) -> None:
    """Nodes are matched by name and tier, whatever their order; others are refused."""
    pod, _, shape = usual
    placement = placed_on(traffic(shape, 1), usual)
    turned = pod_of(*reversed(pod.nodes))

    assert pod_in_order(turned, placement).nodes == pod.nodes
    with pytest.raises(PlacementError, match="give the pod description"):
        pod_in_order(pod_of(*pod.nodes[1:]), placement)


def test_a_proposal_is_read_back_or_refused(usual: tuple[Pod, Ledger, ModelShape]) -> None:
    """Round trip; any flipped byte, another format or other text is one PlacementError."""
    plan = traffic(usual[2], 1)
    found = judged(plan, shuffled(plan, 2), usual)
    assert found.proposal is not None
    data = proposal.encode(found.proposal)

    assert proposal.decode(data, source="p") == found.proposal
    rng = np.random.default_rng(0)
    for at in rng.integers(0, len(data) - 1, 200).tolist():
        damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(PlacementError, match=r"^p: "):
            proposal.decode(damaged, source="p")
    with pytest.raises(PlacementError, match=r"^p: "):
        proposal.decode(data.replace(b'"version":1', b'"version":2', 1), source="p")
