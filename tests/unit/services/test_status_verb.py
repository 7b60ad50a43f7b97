"""`k3 status` against the Station's real endpoint."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from services import cli
from services.pod.endpoint import PodRefused
from services.status.table import parse
from tests.unit.http.endpoint import Endpoint, Start

Capture = pytest.CaptureFixture[str]


def node(name: str, **changes: object) -> dict[str, Any]:
    """A node of a status."""
    fields = {
        "name": name,
        "tier": "spark",
        "state": "serving",
        "epoch": 1_048_577,
        "experts": 72,
        "rows": 1001,
        "dispatches": 10,
        "duplicates": 1,
        "stale_rows": 2,
        "corrupt_rows": 3,
        "copy_rows": 7,
        "cold_rows": 4,
        "last_loss": "",
        "hop_us": {"p50": 812, "p99": 5731},
    }
    return {**fields, **changes}


STATUS: dict[str, Any] = {
    "model": "k3-demo",
    "ready": True,
    "state": "ready",
    "on_miss": "exact",
    "requests": {"total": 5, "open": 1, "failed": 0, "cancelled": 0, "refused": 2},
    "tokens": 40,
    "decode": {"steps": 0},
    "nodes": [
        node("hbm", tier="hbm", state="local", epoch=0, hop_us={"p50": None, "p99": None}),
        node("spark0"),
        node("spark1", state="lost", last_loss="its connection closed [red]"),
    ],
    "something_new": [1, 2, 3],
}


async def k3(endpoint: Endpoint, status: object, *arguments: str) -> int:
    """`k3 status ARGUMENTS` of a pod with this status."""
    endpoint.backend.status = lambda: status  # type: ignore[assignment,method-assign]
    return await asyncio.to_thread(cli.run, ["status", "--url", endpoint.url, *arguments])


@pytest.mark.asyncio
async def test_json_is_the_pods_object_unchanged(start: Start, capsys: Capture) -> None:
    """Programs see everything the pod says, also what this k3 does not know."""
    async with start() as endpoint:
        assert await k3(endpoint, STATUS, "--json") == 0
    assert json.loads(capsys.readouterr().out) == STATUS


@pytest.mark.asyncio
async def test_people_see_every_node_with_its_counters(start: Start, capsys: Capture) -> None:
    """Name, tier, state, epoch, experts, rows, copy, cold, dup, stale, corrupt, hop p50 and p99."""
    async with start() as endpoint:
        assert await k3(endpoint, STATUS) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert lines[0] == "k3-demo: ready, on a miss: exact"
    assert rows["spark0"] == [
        "spark0", "spark", "serving", "1048577", "72",
        "1001", "7", "4", "1", "2", "3", "812", "5731",
    ]  # fmt: skip
    assert rows["hbm"][-2:] == ["-", "-"]
    assert lines[-1] == "spark1 was lost: its connection closed [red]"


@pytest.mark.asyncio
async def test_people_see_how_far_a_load_is(start: Start, capsys: Capture) -> None:
    """Percent and GiB of a bank on its way; one whose size is not known yet has only its word."""
    gib = 2**30
    nodes = [
        node("spark0", state="loading",
             loading={"done_bytes": int(42.5 * gib), "total_bytes": int(98.7 * gib)}),
        node("spark1", state="staging", loading={"done_bytes": 0, "total_bytes": 0}),
        node("spark2", loading=None),
    ]  # fmt: skip
    async with start() as endpoint:
        assert await k3(endpoint, {**STATUS, "nodes": nodes}) == 0
    lines = capsys.readouterr().out.splitlines()

    assert any("loading 43 % (42.5 of 98.7 GiB)" in line for line in lines)
    (staging,) = (line.split() for line in lines if line.startswith("spark1"))
    assert staging[:4] == ["spark1", "spark", "staging", "1048577"]


@pytest.mark.asyncio
@pytest.mark.parametrize("arguments", [(), ("--json",)])
async def test_a_pod_that_is_not_ready_is_status_1(
    start: Start, capsys: Capture, arguments: tuple[str, ...]
) -> None:
    """Scripts can wait for it."""
    waiting = {**STATUS, "ready": False, "state": "waiting for spark1"}
    async with start() as endpoint:
        assert await k3(endpoint, waiting, *arguments) == 1
    assert "waiting for spark1" in capsys.readouterr().out


def test_a_status_of_another_version_is_named() -> None:
    """The missing field and the remedy."""
    older = {key: value for key, value in STATUS.items() if key != "nodes"}
    with pytest.raises(PodRefused, match=r"required field `nodes`.*pod's version"):
        parse(older, url="http://h")
