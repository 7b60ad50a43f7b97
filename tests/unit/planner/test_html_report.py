"""The report's page: parses, fetches nothing, escapes names; the folder of `--report`."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from services import cli
from services.planner.html_report import Section, render
from services.planner.interval import Interval
from services.planner.ledger import take_ledger
from services.planner.pictures import Picture
from services.planner.planning import Planned, compare
from services.planner.pod import Pod
from services.planner.report import (
    BoundFigures,
    GainFigures,
    PlanReport,
    SlotFigures,
    TraceFigures,
    ledger_figures,
)
from services.planner.report_folder import draw, write_folder
from services.routing.trace import Trace, split_requests
from shared.core.errors import ConfigError
from tests.unit.planner.small import pod_of, routing, usual_pod

HOSTILE = "<script>alert('x')</script>\"&amp;"
VOID = {"meta", "br", "hr", "img", "link", "input"}
SVG = (
    b'<?xml version="1.0"?>\n<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN"\n'
    b'  "http://www.w3.org/Graphics/SVG/1.1/DTD/svg11.dtd">\n'
    b'<svg xmlns:xlink="http://www.w3.org/1999/xlink" width="5pt" '
    b'xmlns="http://www.w3.org/2000/svg">\n'
    b'<metadata><rdf:RDF xmlns:dc="http://purl.org/dc/elements/1.1/"/></metadata>\n'
    b'<defs><path id="m1"/></defs><use xlink:href="#m1"/><g clip-path="url(#m1)"/></svg>\n'
)


class Page(HTMLParser):
    """Tags that must be balanced, ids, text and every attribute that could fetch something."""

    def __init__(self, html: str) -> None:
        """Parse the whole page."""
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """One more open element."""
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """What it says of itself."""
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name.split(":")[-1] in ("href", "src", "action", "data"):
                self.links.append(value or "")
            assert not name.startswith("on"), (tag, name)

    def handle_endtag(self, tag: str) -> None:
        """The innermost open element ends."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Text between tags."""
        self.text += data


@pytest.fixture(scope="module")
def planned() -> tuple[Pod, Trace, Trace, list[Planned], PlanReport]:
    """A small pod's comparison, in the words of the report."""
    pod, ledger, shape = usual_pod()
    planned_on, held_out = split_requests(routing(shape, tokens=60, requests=8), 0.7, 1)
    results = compare(
        ["contiguous", "cost-ranked"],
        pod,
        ledger,
        planned_on,
        held_out=held_out,
        optimise=None,
        clock_s=lambda: 0.0,
    )
    facts = TraceFigures("by hand", planned_on.digest, "synthetic", True, 60, 8, (HOSTILE,))
    report = PlanReport(
        pod=HOSTILE,
        ledger=ledger_figures(pod, ledger),
        trace=facts,
        policies=tuple(result.figures for result in results),
        held_out_gain=GainFigures("measured", "cost-ranked", 0.048, Interval(0.041, 0.055)),
        bound=BoundFigures(17.25, 0.49, ("spark0", "spark1")),
        slot_values=(SlotFigures("hbm", ("hbm",), 0.000123),),
        notes=("agreement is by construction",),
    )
    return pod, planned_on, held_out, results, report


def test_page_parses_and_fetches_nothing(
    planned: tuple[Pod, Trace, Trace, list[Planned], PlanReport],
) -> None:
    """No address, no script, no handler; references stay within the page and find their target."""
    report = planned[-1]
    drawings = [Picture(name, f"alt of {name}", b"", SVG) for name in ("one", "two")]

    html = render(report, drawings, further=[Section("More", ("a",), (("b",),))])

    assert not re.search(r"https?://|//[a-z]", html)
    page = Page(html)
    assert "script" not in page.tags
    assert page.tags.count("svg") == 2
    assert sorted(page.ids) == ["one-m1", "two-m1"]
    assert sorted(page.links) == ["#one-m1", "#two-m1"]
    assert html.count("url(#one-m1)") == 1


def test_page_says_everything_of_the_report(
    planned: tuple[Pod, Trace, Trace, list[Planned], PlanReport],
) -> None:
    """Ledger, policies, proof, bound, slot values, notes: by value."""
    report = planned[-1]

    text = Page(render(report, [])).text

    for policy in report.policies:
        assert policy.held_out is not None
        assert f"{policy.in_sample.expert_path_ms:.2f}" in text
        assert f"{policy.held_out.expert_path_ms:.2f}" in text
    for words in (
        "spark0 to spark1",
        "measured takes 4.8% less than cost-ranked there",
        "from 4.1% to 5.5%",
        "less than 17.25 ms",
        "0.123",
        "agreement is by construction",
        "Slowest place of each layer: cost-ranked",
    ):
        assert words in text, words


def test_hostile_names_stay_text(
    planned: tuple[Pod, Trace, Trace, list[Planned], PlanReport],
) -> None:
    """A pod, a node or a picture's words cannot become markup."""
    pod, *_, report = planned
    nodes = [msgspec.structs.replace(pod.nodes[0], name=HOSTILE), *pod.nodes[1:]]
    named = pod_of(*nodes)
    ledger = take_ledger(named, usual_pod()[2])
    report = msgspec.structs.replace(report, ledger=ledger_figures(named, ledger))

    page = Page(render(report, [Picture("one", HOSTILE, b"", SVG)]))

    assert "script" not in page.tags
    assert page.text.count(HOSTILE) >= 4  # title, heading, notice, node, caption


def test_without_policies_there_is_a_ledger(
    planned: tuple[Pod, Trace, Trace, list[Planned], PlanReport],
) -> None:
    """A report that stops after the ledger is a page as well."""
    report = planned[-1]

    text = Page(render(PlanReport(pod="small", ledger=report.ledger), [])).text

    assert "Pod and byte ledger" in text
    assert "Policies" not in text


def test_folder_holds_what_was_drawn(
    planned: tuple[Pod, Trace, Trace, list[Planned], PlanReport], tmp_path: Path
) -> None:
    """plan.json, report.html, and every picture in two formats; a wrong folder is one error."""
    pod, planned_on, held_out, results, report = planned
    drawn = draw(report, results, pod, planned_on, held_out)

    paths = write_folder(tmp_path / "report", report, drawn)

    names = ["plan.json", "report.html"]
    for name in ("policies", "placement", "load"):
        names += [f"{name}.png", f"{name}.svg"]
    assert sorted(path.name for path in paths) == sorted(names)
    assert all(path.stat().st_size for path in paths)
    kept = msgspec.json.decode((tmp_path / "report" / "plan.json").read_bytes(), type=PlanReport)
    assert kept == report
    html = (tmp_path / "report" / "report.html").read_text()
    page = Page(html)
    assert len(set(page.ids)) == len(page.ids)
    inside = {link for link in page.links if not link.startswith("data:image/png;base64,")}
    assert {link.removeprefix("#") for link in inside} <= set(page.ids)
    assert not re.search(r"https?://", html)
    assert "cost-ranked" in drawn[1].alt, "the better of the two is drawn"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        write_folder(tmp_path / "file", report, [])


def test_the_verb_writes_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`k3 plan --report DIR` with the shipped pod; with --json the output stays one object."""
    arguments = ["plan", "--pod", "k3-home-pod.toml", "--policy", "cost-ranked", "--tokens", "40"]

    status = cli.run([*arguments, "--requests", "4", "--json", "--report", str(tmp_path / "r")])

    captured = capsys.readouterr()
    assert status == 0, captured.err
    printed = msgspec.json.decode(captured.out, type=PlanReport)
    kept = msgspec.json.decode((tmp_path / "r" / "plan.json").read_bytes(), type=PlanReport)
    assert printed == kept
    assert "report.html" in captured.err
    assert b"<svg" in (tmp_path / "r" / "report.html").read_bytes()
