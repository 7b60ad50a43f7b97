"""`k3 bench`: the shared report, the arithmetic of a decode step, and timing over the endpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from services import cli
from services.bench import pod_bench
from services.bench.decode import layer_figures
from services.bench.machine import machine_facts
from services.bench.pod import measure
from services.bench.report import Figure, Report, at_least, at_most
from station.backend import Finished, GenerationRequest, Token, TokenEvent
from tests.unit.http.endpoint import Endpoint, Start

Capture = pytest.CaptureFixture[str]
REPORT = Report(
    "pod",
    {"cpu": "x", "cores": 2},
    (
        Figure("pod.tokens_per_s", 29.874, "tokens/s"),
        at_least("a", 2.0, "x", 3.0),
        at_most("b", 2.0, "us", 3.0),
    ),
    {"c": "no compiler"},
)


def decode(steps: int, **parts: float) -> dict[str, Any]:
    """The decode section of a status: means over `steps` tokens of 8 layers."""
    return {"steps": steps, "layers_per_token": 8.0, **parts} if steps else {"steps": 0}


def node(name: str, dispatches: int, compute: float | None, queue: float | None) -> dict[str, Any]:
    """A node of a status as the bench reads it."""
    means = {"compute_us_mean": compute, "queue_us_mean": queue}
    hop = {"p50": compute and 10 * compute, "p99": None}
    return {"name": name, "dispatches": dispatches, "hop_us": hop, **means}


def test_a_report_is_one_object_of_the_agreed_shape() -> None:
    """architecture.md section 11: bench, machine, figures with target and ok, skipped."""
    assert json.loads(REPORT.to_json()) == {
        "bench": "pod",
        "machine": {"cpu": "x", "cores": 2},
        "figures": [
            {
                "name": "pod.tokens_per_s",
                "value": 29.874,
                "unit": "tokens/s",
                "target": None,
                "ok": None,
            },
            {"name": "a", "value": 2.0, "unit": "x", "target": 3.0, "ok": False},
            {"name": "b", "value": 2.0, "unit": "us", "target": 3.0, "ok": True},
        ],
        "skipped": {"c": "no compiler"},
    }
    assert [figure.name for figure in REPORT.missed] == ["a"]


def test_a_report_as_a_table_shows_everything() -> None:
    """Every figure, its target, and why something is missing."""
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(REPORT.table())
        text = console.export_text()
    for part in ("pod.tokens_per_s", "29.87", "tokens/s", "skipped: no compiler", "c"):
        assert part in text


def test_layer_figures_are_differences_of_sums() -> None:
    """10 steps at 100 us before and 30 steps at 200 us after: the 20 between took 250 us each."""
    before = {"decode": decode(10, serial_us=100, wait_us=50), "nodes": [node("a", 4, 10.0, 1.0)]}
    after = {
        "decode": decode(30, serial_us=200, wait_us=50),
        "nodes": [node("a", 8, 20.0, 2.0), node("b", 4, 60.0, 5.0), node("hbm", 0, None, None)],
    }

    values = {figure.name: figure.value for figure in layer_figures(before, after)}

    assert values["layer.serial_us"] == pytest.approx(250)
    assert values["layer.wait_us"] == pytest.approx(50)
    # a: 8 x 20 - 4 x 10 over 4 dispatches, b: 4 x 60
    assert values["node.compute_us"] == pytest.approx((120 + 240) / 8)
    assert values["node.queue_us"] == pytest.approx((12 + 20) / 8)
    assert values["node.hop_us_p50"] == 600  # of the slowest, b


def test_a_fresh_pod_has_no_earlier_sums() -> None:
    """The section of a pod that has not decoded holds only its zero steps."""
    before = {"decode": decode(0), "nodes": [node("a", 0, None, None)]}
    after = {"decode": decode(5, serial_us=70), "nodes": [node("a", 0, None, None)]}

    figures = {figure.name: figure.value for figure in layer_figures(before, after)}

    assert figures["layer.serial_us"] == 70
    assert not {"node.compute_us", "node.hop_us_p50"} & set(figures)
    assert layer_figures(after, after) == ()


def play(endpoint: Endpoint, *, tokens_max: int, token_s: float, prefill_s: float) -> None:
    """Let the endpoint's backend generate at a fixed speed and count its steps."""
    steps = 0

    async def generate(request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        nonlocal steps
        await asyncio.sleep(prefill_s)
        count = min(request.max_tokens, tokens_max)
        for index in range(count):
            if index:
                await asyncio.sleep(token_s)
                steps += 1
            yield Token(ord("x"))
        yield Finished("length", cold_rows=0)

    def status() -> dict[str, object]:
        return {"decode": decode(steps, serial_us=123.0), "nodes": []}

    endpoint.backend.generate = generate  # type: ignore[method-assign]
    endpoint.backend.status = status  # type: ignore[method-assign]


@pytest.mark.asyncio
async def test_decode_speed_leaves_prefill_out(start: Start) -> None:
    """5 ms per token after 400 ms of prefill: clearly above what prefill would allow."""
    async with start() as endpoint:
        play(endpoint, tokens_max=99, token_s=0.005, prefill_s=0.4)

        figures, skipped = await asyncio.to_thread(measure, endpoint.url, None, tokens=17, runs=2)

    values = {figure.name: figure.value for figure in figures}
    assert skipped == {}
    # 17 tokens in 480 ms would be 35 per second; 200 without prefill, give or take a busy host
    assert 50 < values["tokens_per_s"] < 400
    assert values["tokens_per_s_min"] <= values["tokens_per_s"] <= values["tokens_per_s_max"]
    assert values["first_token_ms"] >= 400
    assert values["layer.serial_us"] == 123


@pytest.mark.asyncio
async def test_answers_that_are_too_short_are_no_figure(start: Start) -> None:
    """Absent with a reason, never a zero."""
    async with start() as endpoint:
        play(endpoint, tokens_max=3, token_s=0, prefill_s=0)

        figures, skipped = await asyncio.to_thread(measure, endpoint.url, None, tokens=64, runs=2)

    assert "tokens_per_s" not in {figure.name for figure in figures}
    assert "ended within 8 tokens" in skipped["tokens_per_s"]


@pytest.mark.asyncio
async def test_a_running_pod_is_measured_by_its_address(start: Start, capsys: Capture) -> None:
    """`--url`: names start with pod., a table for people."""
    async with start() as endpoint:
        play(endpoint, tokens_max=99, token_s=0, prefill_s=0.01)
        command = ["bench", "pod", "--url", endpoint.url, "--runs", "1", "--tokens", "16"]

        assert await asyncio.to_thread(cli.run, command) == 0
    out = capsys.readouterr().out
    assert "pod.tokens_per_s " in out
    assert "cores" in out


@pytest.mark.parametrize(("check", "status"), [((), 0), (("--check",), 1)])
def test_check_fails_on_a_missed_target(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, check: tuple[str, ...], status: int
) -> None:
    """Only with --check does a missed target change the exit status."""
    monkeypatch.setattr(pod_bench.PodBench, "run", lambda _self: REPORT)

    assert cli.run(["bench", "pod", "--json", *check]) == status
    assert json.loads(capsys.readouterr().out)["bench"] == "pod"


@pytest.mark.parametrize("counts", ["", "x", "1,,2", "17", "-1", "1;2"])
def test_wrong_counts_are_refused(counts: str, capsys: Capture) -> None:
    """Before any pod is started."""
    assert cli.run(["bench", "pod", f"--sparks={counts}"]) == 2
    assert "--sparks" in capsys.readouterr().err


def test_machine_facts_name_what_a_figure_depends_on(tmp_path: Path) -> None:
    """Read from /proc; a machine that hides it is described by what is known."""
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Fast CPU\nmodel name : other\n")
    (tmp_path / "meminfo").write_text("MemTotal:       2097152 kB\n")

    facts = machine_facts(tmp_path)
    hidden = machine_facts(tmp_path / "nothing")

    assert (facts["cpu"], facts["memory_gib"]) == ("Fast CPU", 2.0)
    assert set(facts) == {"cpu", "cores", "memory_gib", "kernel", "python", "torch", "load"}
    assert hidden["memory_gib"] == 0
    assert hidden["cpu"]
