"""What status and metrics say: it must be true, and JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.core.lease import Attested, Ended, Lease
from shared.core.wire import NodeCounters
from station import report
from station.lane import StepTimes
from station.membership import LoadReport
from tests.unit.station.small_pod import Pod, small_pod
from tests.unit.station.toy_model import request
from tests.unit.station.world import NODE

pytestmark = pytest.mark.asyncio


def node(pod: Pod, place: int = NODE) -> dict[str, Any]:
    """One node of the status."""
    status = json.loads(json.dumps(pod.coordinator.status()))
    return status["nodes"][place]


async def test_a_fresh_pod_claims_nothing() -> None:
    """Zeros where something was counted, null where nothing was measured."""
    async with small_pod() as pod:
        status = json.loads(json.dumps(pod.coordinator.status()))

        assert status["decode"] == {"steps": 0}
        assert status["requests"] == {
            "total": 0, "open": 0, "failed": 0, "cancelled": 0, "refused": 0
        }  # fmt: skip
        assert (status["ready"], status["keys_refused"]) == (False, 3)
        assert (status["control"]["malformed"], status["control"]["oversized"]) == (2, 1)
        assert node(pod, 0)["state"] == "local"
        spark = node(pod)
        assert spark["state"] == "absent"
        assert spark["hop_us"] == {"p50": None, "p99": None}
        assert spark["queue_us_mean"] is spark["compute_us_mean"] is spark["reported"] is None


async def test_a_node_is_what_its_lease_is() -> None:
    """Offered, serving, lost: the word of the lease and its epoch."""
    async with small_pod() as pod:
        lease = Lease.offer("spark0", 41, 0)
        for state, after in (
            ("offered", lease),
            ("serving", lease := lease.apply(Attested(41, 1))),
            ("lost", lease.apply(Ended(41, "unplugged"))),
        ):
            pod.nodes.membership.leases["spark0"] = after
            assert (node(pod)["state"], node(pod)["epoch"]) == (state, 41)


async def test_a_loading_node_says_how_far_it_is() -> None:
    """Instead of absent or lost; the numbers are bytes."""
    async with small_pod() as pod:
        members = pod.nodes.membership
        members.loads["spark0"] = LoadReport("staging", 3, 8, 0)
        assert (node(pod)["state"], node(pod)["epoch"]) == ("staging", 0)

        members.leases["spark0"] = Lease.offer("spark0", 41, 0).apply(Ended(41, "unplugged"))
        members.loads["spark0"] = LoadReport("loading", 5, 8, 0)
        assert (node(pod)["state"], node(pod)["epoch"]) == ("loading", 41)
        assert node(pod)["loading"] == {"done_bytes": 5, "total_bytes": 8}

        members.loads.clear()
        assert (node(pod)["state"], node(pod)["loading"]) == ("lost", None)


async def test_means_are_over_answers() -> None:
    """A dispatch that was never answered has no compute time to average."""
    async with small_pod() as pod:
        stats = pod.world.places.stats[NODE]
        stats.dispatches, stats.answers = 10, 4
        stats.queue_us, stats.compute_us = 8, 400
        pod.nodes.counters["spark0"] = NodeCounters(
            dispatches=9, rows=20, refused_rows=1, corrupt_dispatches=2
        )

        spark = node(pod)
        assert (spark["queue_us_mean"], spark["compute_us_mean"]) == (2.0, 100.0)
        assert spark["reported"] == {
            "dispatches": 9, "rows": 20, "refused_rows": 1, "corrupt_dispatches": 2
        }  # fmt: skip


async def test_cold_rows_are_the_absent_node_s() -> None:
    """What the cold store computed is shown at the node that owed it, and in the sum."""
    async with small_pod() as pod:
        async for _ in pod.coordinator.generate(request("a")):
            pass

        status = pod.coordinator.status()
        assert node(pod)["cold_rows"] == status["cold_rows"] > 0
        assert node(pod, 0)["rows"] > 0
        assert status["tokens"] == 6


async def test_decode_times_are_means() -> None:
    """Microseconds per token, and per layer by kind; waiting is not serial work."""
    times = StepTimes(steps=2, layers=4, total_us=1000, wait_us=600, post_us=100, shared_us=40)

    shown = report.decode_times(times)

    assert (shown["token_us"], shown["layers_per_token"]) == (500.0, 2.0)
    assert (shown["serial_us"], shown["wait_us"], shown["post_us"]) == (100.0, 150.0, 25.0)


async def test_metrics_have_one_sample_per_node() -> None:
    """Names are unique, values finite, labels name node and tier."""
    async with small_pod() as pod:
        pod.world.places.stats[NODE].losses = 2
        families = {metric.name: metric for metric in pod.coordinator.metrics()}

        assert len(families) == len(pod.coordinator.metrics())
        losses = families["k3_node_losses_total"].samples
        assert [(sample.labels["node"], sample.value) for sample in losses] == [
            ("hbm", 0.0),
            ("spark0", 2.0),
        ]
        assert families["k3_nodes_serving"].samples[0].value == 0.0
        assert families["k3_keys_refused_total"].samples[0].value == 3.0
        assert families["k3_frames_refused_total"].samples[0].value == 3.0
