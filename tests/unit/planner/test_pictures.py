"""Pictures: valid files with the cells, bars and labels there should be, bytes that repeat."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET

import msgspec
import numpy as np
import pytest
from matplotlib import image

from services.planner import pictures
from services.planner.assignment import Assignment
from services.planner.cost import PlaceCosts
from services.planner.ledger import FeedLine
from services.planner.pictures import Picture
from services.planner.planning import compare
from services.planner.pod import Pod, PublishedPolicy
from services.planner.report import PathFigures, PolicyFigures, SearchFigures
from services.planner.score import score
from services.routing.trace import Trace
from tests.unit.planner.small import node, pod_of, routing, usual_pod

SVG = "{http://www.w3.org/2000/svg}"
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
LAYERS, EXPERTS = 4, 24


@pytest.fixture(scope="module")
def planned() -> tuple[Pod, Trace, Assignment]:
    """A cost-ranked plan of a small pod."""
    pod, ledger, shape = usual_pod(LAYERS, EXPERTS)
    trace = routing(shape)
    results = compare(
        ["cost-ranked"], pod, ledger, trace, held_out=None, optimise=None, clock_s=lambda: 0.0
    )
    return pod, trace, results[0].assignment


def texts(picture: Picture) -> list[str]:
    """All text of the drawing."""
    found = ET.fromstring(picture.svg).iter(f"{SVG}text")
    return ["".join(element.itertext()) for element in found]


def group(picture: Picture, name: str) -> ET.Element:
    """The one element with this id."""
    found = [e for e in ET.fromstring(picture.svg).iter() if e.get("id") == name]
    assert len(found) == 1, (name, len(found))
    return found[0]


def drawn_map(planned: tuple[Pod, Trace, Assignment], policy: str = "cost-ranked") -> Picture:
    """The placement map of the plan."""
    pod, trace, assignment = planned
    return pictures.placement_map(assignment, trace.histogram(), pod, first_layer=1, policy=policy)


def drawn_load(planned: tuple[Pod, Trace, Assignment]) -> Picture:
    """The load of the plan."""
    pod, trace, assignment = planned
    costs = PlaceCosts.of(pod.nodes)
    scored = score(trace, assignment, costs, sparks=np.zeros(len(pod.nodes), np.bool_))
    return pictures.load_bars(scored, costs, pod, policy="cost-ranked")


@pytest.fixture(scope="module")
def load_picture(planned: tuple[Pod, Trace, Assignment]) -> Picture:
    """The load, drawn once: drawing takes longer than looking."""
    return drawn_load(planned)


def test_placement_map_has_a_cell_per_layer_and_tier(
    planned: tuple[Pod, Trace, Assignment],
) -> None:
    """Two heat maps of layers by tiers, labelled, in both formats."""
    picture = drawn_map(planned)

    for name in ("cells-experts", "cells-selections"):
        cells = group(picture, name).iter(f"{SVG}path")
        assert len(list(cells)) == LAYERS * 4
    said = texts(picture)
    assert [said.count(tier) for tier in ("hbm", "grace", "rtx", "spark")] == [2, 2, 2, 2]
    assert "model layer" in said
    assert picture.png.startswith(PNG_MAGIC)
    pixels = image.imread(io.BytesIO(picture.png))
    assert min(pixels.shape[:2]) > 200
    assert pixels.std() > 0.05, "an empty page"


def test_load_has_bars_for_every_place(load_picture: Picture) -> None:
    """Selections, fixed part and part per expert of each place, with units on the axes."""
    picture = load_picture

    for what in ("selections", "fixed", "slope"):
        for index in range(5):
            assert group(picture, f"{what}-{index}").find(f"{SVG}path") is not None
    said = texts(picture)
    assert "share of all selections (%)" in said
    assert "busy time (us per token, all layers)" in said
    assert {"hbm", "grace", "rtx", "spark0", "spark1"} <= set(said)


def test_what_is_not_measured_has_a_mark() -> None:
    """An assumed cost shows at its place's name, a measured one does not."""
    assert pictures.marked_name(node("n", "hbm", 1)) == "n"
    measured = node("n", "hbm", 1)
    cost = msgspec.structs.replace(measured.cost, per_expert_basis="fitted")
    assert pictures.marked_name(msgspec.structs.replace(measured, cost=cost)) == "n *"


def test_shares_and_busy_time_by_value() -> None:
    """Two layers of four experts, one copy; three tokens."""
    pod = pod_of(node("hbm", "hbm", 8), node("spark0", "spark", 8), node("spark1", "spark", 8))
    home = np.array([[0, 0, 1, 2], [0, 1, 1, 2]])
    copy = np.array([[1, -1, -1, -1], [-1, -1, -1, -1]])
    assignment = Assignment.without_copies(home, [8, 8, 8]).with_copies(copy)

    experts, selections = pictures.tier_shares(
        assignment, np.array([[3, 1, 0, 0], [0, 1, 2, 1]]), pod
    )

    assert experts.tolist() == [[0.5, 0.75], [0.25, 0.75]]
    assert selections.tolist() == [[1.0, 0.0], [0.0, 1.0]]

    ids = np.array([[[0, 2], [1, 2]]] * 3, np.uint16)
    trace = Trace("synthetic", 1, 4, np.zeros(3, np.int32), np.arange(3, dtype=np.int32), ids)
    costs = PlaceCosts(np.array([0.0, 100.0, 100.0]), np.array([8.0, 80.0, 80.0]))
    plain = Assignment.without_copies(home, [8, 8, 8])
    fixed, slope = pictures.busy_us(score(trace, plain, costs, sparks=np.zeros(3, bool)), costs)

    assert fixed.tolist() == [0.0, 200.0, 0.0]
    assert slope.tolist() == [8.0, 240.0, 0.0]


def path(ms: float) -> PathFigures:
    """Figures of which only the mean matters here."""
    return PathFigures(10, 2, ms, None, 15.0, 0.7, {}, {}, ())


def policy(name: str, ms: float, *, published: float | None = None) -> PolicyFigures:
    """A line of the comparison."""
    feeds: tuple[FeedLine, ...] = ()
    known = (
        None
        if published is None
        else PublishedPolicy(name=name, expert_path_ms=published, tokens_per_s=15.0)
    )
    return PolicyFigures(
        name, 0.1, {}, 0, feeds, path(ms), held_out=path(ms + 1), published=known,
        agreement="fitted" if known else "",
        search=SearchFigures(3.0, (ms + 2, ms + 1, ms), None, 0),
    )  # fmt: skip


def test_trade_off_names_policies_and_what_is_by_construction() -> None:
    """Every policy, in-sample beside held-out and published, the routing's kind in the title."""
    lines = [policy("cost-ranked", 27.5, published=27.7), policy("measured", 26.1)]

    picture = pictures.trade_off(lines, synthetic=True, bound_ms=17.0)

    said = texts(picture)
    for word in (
        "cost-ranked",
        "(fitted)",
        "measured",
        "published",
        "bound without copies (loose)",
    ):
        assert word in said
    assert "What policies cost, on synthetic routing" in said
    assert "expert path (ms per token, predicted from costs)" in said
    assert "cost-ranked 27.50 ms, measured 26.10 ms" in picture.alt


def test_search_curve_is_drawn_when_there_was_a_search() -> None:
    """The objective after each second, or nothing."""
    searched = policy("measured", 26.0)

    picture = pictures.search_curve(searched, 27.5)

    assert picture is not None
    assert "time spent (s)" in texts(picture)
    assert "28.00 ms after 1 s, 26.00 ms after 3 s" in picture.alt
    idle = PolicyFigures("global", 0.1, {}, 0, (), path(31.0))
    assert pictures.search_curve(idle, None) is None


def test_equal_input_gives_equal_bytes(
    planned: tuple[Pod, Trace, Assignment], load_picture: Picture
) -> None:
    """No date, no program name, no random id: a report can be compared with the last one."""
    assert drawn_load(planned) == load_picture
    assert b"<dc:date>" not in load_picture.svg


def test_hostile_names_are_text(planned: tuple[Pod, Trace, Assignment]) -> None:
    """Formula signs, tags and quotes in a name are drawn as they are."""
    hostile = r"$\frac{1}{0$ <script>alert('x')</script> & \"q\""

    picture = drawn_map(planned, policy=hostile)

    assert any(hostile in text for text in texts(picture))
    assert b"<script" not in picture.svg
