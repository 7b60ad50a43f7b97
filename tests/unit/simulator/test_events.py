"""The event model against sums done by hand, one effect at a time."""

from __future__ import annotations

import pytest

from services.simulator.events import simulate
from services.simulator.model import Loss, SimPod, Workload
from services.simulator.phases import phases
from services.simulator.routed import Routed
from services.simulator.tally import Outcome
from tests.unit.simulator.world import place, pod, routed

ONE = [[[0]]]  # one token, one layer, expert 0


def play(simulated: SimPod, routing: Routed, **workload: object) -> Outcome:
    """Twenty tokens per stream unless asked otherwise."""
    work = Workload(**({"tokens": 20} | workload))  # type: ignore[arg-type]
    return simulate(simulated, routing, work)


def token_us(outcome: Outcome) -> float:
    """Mean time of a token."""
    assert outcome.token_ms is not None
    return 1000 * outcome.token_ms.mean


def test_one_node_one_layer() -> None:
    """Serial, one hop, rest: nothing overlaps."""
    simulated = pod(place("spark0", "spark", 184.5, 84.5), rest_us=10.0)
    outcome = play(simulated, routed(simulated, [[0]], ONE))

    assert token_us(outcome) == pytest.approx(100 + 269 + 10)
    assert outcome.tokens_per_s == pytest.approx(1e6 / 379)
    assert outcome.layer_us == pytest.approx(369)
    assert outcome.parts_ms["serial"] == pytest.approx(0.1)
    assert outcome.waits_ms == pytest.approx({"spark0": 0.269})


def test_two_nodes_and_their_messages() -> None:
    """The second dispatch leaves 5 us later; its three experts make it the slowest."""
    nodes = [place(f"spark{index}", "spark", 184.5, 84.5) for index in (0, 1)]
    simulated = pod(*nodes, post_us=5.0, collect_us=7.0)
    outcome = play(simulated, routed(simulated, [[0, 1, 1, 1]], [[[0, 1, 2, 3]]]))

    assert token_us(outcome) == pytest.approx(60 + 2 * 5 + 438 + 2 * 7 + 40)
    assert outcome.waits_ms == pytest.approx({"spark1": 0.438})
    assert outcome.parts_ms["message"] == pytest.approx(0.024)


@pytest.mark.parametrize(("shared_us", "expected"), [(0.0, 369.0), (200.0, 369.0), (400.0, 516.0)])
def test_shared_and_hbm_experts_overlap_with_the_journey(shared_us: float, expected: float) -> None:
    """Two HBM experts at 8 us and the shared ones cost only what is beyond the hop of 269 us."""
    simulated = pod(
        place("hbm", "hbm", 0.0, 8.0), place("spark0", "spark", 184.5, 84.5), shared_us=shared_us
    )
    outcome = play(simulated, routed(simulated, [[0, 0, 1]], [[[0, 1, 2]]]))

    assert token_us(outcome) == pytest.approx(expected)


def test_layers_without_a_remote_expert_wait_for_nobody() -> None:
    """All in HBM: the Station alone."""
    simulated = pod(place("hbm", "hbm", 0.0, 8.0))
    outcome = play(simulated, routed(simulated, [[0], [0]], [[[0], [0]]]))

    assert token_us(outcome) == pytest.approx(2 * 108)
    assert (outcome.limit, outcome.station) == ("Station", pytest.approx(1.0))


def test_two_lanes_queue_at_one_node() -> None:
    """A node is one server: 100 us of each hop of 150 occupy it, so two lanes take turns."""
    simulated = pod(place("spark0", "spark", 150.0, wire_us=50.0), serial_us=0.0)
    routing = routed(simulated, [[0]], ONE)
    alone = play(simulated, routing)
    two = play(simulated, routing, streams=2, lanes=2, tokens=100)

    assert token_us(alone) == pytest.approx(150)
    assert token_us(two) == pytest.approx(200, rel=0.01)
    assert two.tokens_per_s == pytest.approx(1e6 / 100, rel=0.01)
    assert two.limit == "spark0"


def test_a_lane_works_while_another_waits() -> None:
    """400 us serial and a hop of 300: two lanes need 800 us, not 1,400; the Station is full."""
    simulated = pod(place("spark0", "spark", 300.0), serial_us=400.0)
    routing = routed(simulated, [[0]], ONE)
    two = play(simulated, routing, streams=2, lanes=2, tokens=100)

    assert two.tokens_per_s == pytest.approx(2 / 800e-6, rel=0.01)
    assert two.station == pytest.approx(1.0, abs=0.01)
    assert two.parts_ms["queue"] == pytest.approx(0.1, rel=0.05)


def test_the_link_is_shared_both_ways() -> None:
    """7,168 bytes at 7.168 MB/s are 1 ms: out to each node in turn, back as rows."""
    nodes = [place(f"spark{index}", "spark", 100.0 + 500.0 * index) for index in (0, 1)]
    simulated = pod(*nodes, link_bytes_per_s=7.168e6)
    routing = routed(simulated, [[0, 1]], [[[0, 1]]])
    outcome = play(simulated, routing)

    # the second leaves after 2 ms, answers at 2.6, and its row is back at 3.6
    assert token_us(outcome) == pytest.approx(100 + 2000 + 600 + 1000)
    assert outcome.link_out == pytest.approx(2000 / 3700)
    quick = pod(nodes[0], place("spark1", "spark", 0.0), link_bytes_per_s=7.168e6)
    # here the answers come at 1.1 and 2.0, so the second row crosses after the first, until 3.1
    assert token_us(play(quick, routed(quick, [[0, 1]], [[[0, 1]]]))) == pytest.approx(100 + 3100)
    lanes = play(simulated, routing, streams=8, lanes=8, tokens=50)
    assert lanes.tokens_per_s == pytest.approx(1e6 / 2000, rel=0.03)
    assert lanes.limit == "link out"
    four = pod(place("spark0", "spark", 100.0), link_bytes_per_s=7.168e6)
    rows = routed(four, [[0, 0, 0, 0]], [[[0, 1, 2, 3]]])
    lanes = play(four, rows, streams=8, lanes=8, tokens=50)
    assert lanes.tokens_per_s == pytest.approx(1e6 / 4000, rel=0.03)
    assert lanes.limit == "link in"


def test_rtx_and_grace_do_not_cross_the_link() -> None:
    """They are on the Station's host."""
    simulated = pod(place("grace", "grace", 0.0, 53.0), link_bytes_per_s=1.0)
    outcome = play(simulated, routed(simulated, [[0]], ONE))

    assert token_us(outcome) == pytest.approx(153)


def test_a_batch_reads_an_expert_once() -> None:
    """Two tokens of one lane choose one expert: its reading is paid once and a tenth."""
    simulated = pod(place("spark0", "spark", 100.0, 50.0), token_share=0.2, expert_token_share=0.1)
    outcome = play(simulated, routed(simulated, [[0]], ONE), streams=2, lanes=1)

    assert token_us(outcome) == pytest.approx(100 * 1.2 + 100 + 50 * 1.1)
    assert (outcome.rows, outcome.experts) == (32, 16)  # 40 tokens, 8 of them warm-up


def test_a_prompt_is_read_in_chunks() -> None:
    """Ten tokens at four a step: three steps, then one token per step; the answer's first token
    comes with the last chunk."""
    simulated = pod(place("spark0", "spark", 100.0, 50.0), token_share=0.5, expert_token_share=0.0)
    outcome = play(
        simulated, routed(simulated, [[0]], ONE),
        seconds=1.0, prompt_tokens=10, prefill_tokens=4, answer_tokens=5,
    )  # fmt: skip

    assert outcome.first_token_ms is not None
    # 100 us for the first token of a step and 50 for each further one, and a hop of 150
    assert outcome.first_token_ms.p99 == pytest.approx(0.4 + 0.4 + 0.3)
    assert token_us(outcome) == pytest.approx(250)
    assert sum(outcome.parts_ms.values()) == pytest.approx(0.25)
    assert outcome.prompt_tokens / outcome.tokens == pytest.approx(10 / 5, rel=0.01)
    assert outcome.tokens_per_s == pytest.approx(5 / (1100e-6 + 4 * 250e-6), rel=0.01)


def test_requests_that_come_too_fast_wait_for_a_stream() -> None:
    """Half the rate that can be served leaves the pod idle half the time; twice it queues up."""
    simulated = pod(place("spark0", "spark", 150.0), serial_us=100.0)
    routing = routed(simulated, [[0]], ONE)
    calm, crowded = (
        play(simulated, routing, seconds=2.0, prompt_tokens=1, answer_tokens=9, arrivals_per_s=r)
        for r in (200.0, 800.0)
    )

    assert calm.tokens_per_s == pytest.approx(200 * 9, rel=0.2)
    assert crowded.tokens_per_s == pytest.approx(4000, rel=0.01)
    assert calm.first_token_ms is not None
    assert crowded.first_token_ms is not None
    assert crowded.first_token_ms.p50 > 50 * calm.first_token_ms.p50


def test_cores_of_one_host_are_shared() -> None:
    """Three places at 100 us on two cores, one of them the Station's while it works."""
    nodes = [place(f"grace{index}", "grace", 100.0) for index in range(3)]
    free = pod(*nodes, serial_us=0.0, shared_us=50.0)
    crowded = pod(*nodes, serial_us=0.0, shared_us=50.0, cores=2)
    ids = [[[0, 1, 2]]]

    assert token_us(play(free, routed(free, [[0, 1, 2]], ids))) == pytest.approx(100)
    two = [[[0, 1]]]
    assert token_us(play(crowded, routed(crowded, [[0, 1, 2]], two))) == pytest.approx(150)
    # one starts at once, one when the Station's core is free at 50, the third at 100
    assert token_us(play(crowded, routed(crowded, [[0, 1, 2]], ids))) == pytest.approx(200)


class TestLoss:
    """A place that is gone costs time, then others take over; copies take over at once."""

    def pair(self) -> SimPod:
        """Two Sparks of 100 us."""
        return pod(
            place("spark0", "spark", 100.0), place("spark1", "spark", 100.0),
            cold_us=1000.0, detect_us=5000.0,
        )  # fmt: skip

    def test_cold_until_it_is_rehomed(self) -> None:
        """200 us per token, 1,100 while its expert is cold, 200 again."""
        simulated = self.pair()
        outcome = simulate(
            simulated, routed(simulated, [[0]], ONE), Workload(seconds=0.4),
            losses=[Loss(0, at_s=0.10011, rehome_s=0.1)],
        )  # fmt: skip

        # the hop in flight when it is lost is given up 5 ms later
        assert outcome.tokens == pytest.approx(0.3 / 200e-6 + 0.095 / 1100e-6, abs=4)
        assert outcome.cold_experts == pytest.approx(0.095 / 1100e-6, abs=2)
        assert outcome.parts_ms["cold"] > 0

    def test_a_copy_needs_no_cold_store(self) -> None:
        """Nothing is computed cold but what was in flight; the copy's place now has both."""
        simulated = pod(
            place("spark0", "spark", 100, 50), place("spark1", "spark", 100, 50), detect_us=0.0
        )
        routing = routed(simulated, [[0, 1]], [[[0, 1]]], copies=[[1, -1]])
        outcome = simulate(
            simulated, routing, Workload(seconds=0.3), losses=[Loss(0, at_s=0.1, rehome_s=10.0)]
        )

        assert outcome.cold_experts <= 1
        # 250 us with two places, 300 with one
        assert outcome.tokens == pytest.approx(0.1 / 250e-6 + 0.2 / 300e-6, abs=8)

    def test_a_copy_takes_over_within_a_token(self) -> None:
        """From the next layer on, not from the next token: only what was in flight is cold."""
        layers = 50
        simulated = pod(place("spark0", "spark", 100), place("spark1", "spark", 150), detect_us=0.0)
        routing = routed(simulated, [[0]] * layers, [[[0]] * layers], copies=[[1]] * layers)
        outcome = simulate(
            simulated, routing, Workload(seconds=0.3), losses=[Loss(0, at_s=0.1025, rehome_s=10.0)]
        )

        assert outcome.cold_experts <= 1

    def test_new_homes_of_one_leave_another_lost(self) -> None:
        """Expert 1 is served by its copy before and after expert 0 finds a new home."""
        nodes = [place(f"spark{index}", "spark", 100.0) for index in range(3)]
        simulated = pod(*nodes, place("spark3", "spark", 200.0), detect_us=0.0)
        routing = routed(simulated, [[0, 1]], [[[0, 1]]], copies=[[-1, 3]])
        losses = [Loss(1, at_s=0.05, rehome_s=50.0), Loss(0, at_s=0.1, rehome_s=0.1)]
        outcome = simulate(simulated, routing, Workload(seconds=1.0), losses=losses)

        # 300 us per token, and for 0.1 s one cold expert, which takes longer than the hop beside it
        cold = 0.1 / 1447e-6
        assert outcome.cold_experts == pytest.approx(cold, abs=4)
        assert outcome.tokens == pytest.approx(0.05 / 200e-6 + 0.85 / 300e-6 + cold, abs=8)

    def test_phases_say_what_happened(self) -> None:
        """Two at once are one change; whoever has no heir left finds no new home."""
        both = [Loss(index, at_s=0.1, rehome_s=0.1) for index in (0, 1)]

        found = phases(self.pair(), both, [], 0.4)

        assert [phase.what for phase in found] == [
            "all places", "spark0 lost, its experts cold; spark1 lost, its experts cold"
        ]  # fmt: skip

    def test_the_only_place_of_a_tier_has_no_heir(self) -> None:
        """Its experts stay cold: 1,100 us per token to the end."""
        simulated = pod(
            place("grace", "grace", 100.0), place("spark0", "spark", 100.0),
            cold_us=1000.0, detect_us=0.0,
        )  # fmt: skip
        loss = Loss(0, at_s=0.1, rehome_s=0.1)
        outcome = simulate(
            simulated, routed(simulated, [[0]], ONE), Workload(seconds=0.4), losses=[loss]
        )

        assert outcome.tokens == pytest.approx(0.1 / 200e-6 + 0.3 / 1100e-6, abs=4)
        assert len(phases(simulated, [loss], [], 0.4)) == 2

    def test_what_was_in_flight_is_given_up(self) -> None:
        """Lost 50 us into a hop, seen 5 ms later, computed cold after that."""
        simulated = self.pair()
        outcome = simulate(
            simulated, routed(simulated, [[0]], ONE), Workload(seconds=0.007),
            losses=[Loss(0, at_s=110e-6, rehome_s=1.0)],
        )  # fmt: skip

        assert outcome.token_ms is not None
        assert 1000 * outcome.parts_ms["cold"] == pytest.approx(1000)
        assert token_us(outcome) == pytest.approx((60 + 5050 + 1000 + 40), abs=1)
