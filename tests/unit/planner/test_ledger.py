"""The byte ledger of the original plan's pod, to the expert; shortfalls; power."""

from __future__ import annotations

import msgspec
import pytest

from services.planner.ledger import (
    check_power,
    feed_lines,
    padding_note,
    published_differences,
    take_ledger,
)
from services.planner.pod import Pod, PodNode
from services.planner.pod_file import read_pod
from services.planner.report import not_measured
from shared.core.errors import PodError
from shared.core.shape import K3
from tests.unit.planner.small import node, pod_of, shape_of


@pytest.fixture
def home() -> Pod:
    """The original plan's pod."""
    return read_pod("k3-home-pod")


def changed(pod: Pod, tier: str, **fields: object) -> Pod:
    """The pod with other fields in the nodes of one tier."""
    nodes = tuple(
        msgspec.structs.replace(item, **fields) if item.tier == tier else item for item in pod.nodes
    )
    return msgspec.structs.replace(pod, nodes=nodes)


def test_counts_are_those_of_the_original_plan(home: Pod) -> None:
    """9,558 / 24,852 / 5,177 / 8 x 5,704 of 5,779 that fit: 85,219 slots, 2,787 spare."""
    ledger = take_ledger(home, K3)

    assert ledger.slots.tolist() == [9558, 24852, 5177, *[5704] * 8]
    assert [line.budget_slots for line in ledger.lines] == [9558, 24852, 5177, *[5779] * 8]
    assert ledger.layer_max.tolist() == [896, 896, 896, *[62] * 8]
    assert (ledger.experts, ledger.expert_bytes) == (82432, 18_579_480)
    assert (ledger.slots_total, ledger.slots_spare) == (85219, 2787)
    assert f"{ledger.total_gib:.1f} {ledger.spare_gib:.1f}" == "1474.6 48.2"


def test_budgets_are_never_pooled() -> None:
    """Bytes that hold no whole expert on one machine are lost, however many machines there are."""
    shape = shape_of(2, 4)
    pod = pod_of(*(node(f"spark{index}", "spark", 2) for index in range(4)))

    assert take_ledger(pod, shape).slots.tolist() == [2, 2, 2, 2]
    assert sum(item.budget_bytes for item in pod.nodes) > 11 * take_ledger(pod, shape).expert_bytes


def test_published_sums_that_do_not_follow_are_said(home: Pod) -> None:
    """1,484.4 GiB and 51.6 GiB spare are printed, the counts give 1,474.6 and 48.2; no more."""
    said = published_differences(home, take_ledger(home, K3))

    assert len(said) == 2
    assert "1,484.4 GiB in all" in said[0]
    assert "1,474.6 GiB" in said[0]
    assert "51.6 GiB spare" in said[1]
    assert "48.2 GiB" in said[1]
    more = changed(home, "rtx", ceiling_bytes=80 * 2**30)
    assert any("rtx 5,177" in line for line in published_differences(more, take_ledger(more, K3)))


def test_padding_of_bank_records_is_said_where_it_costs_slots(home: Pod) -> None:
    """HBM, Grace and RTX budgets are exact to the byte, their banks are not."""
    note = padding_note(take_ledger(home, K3))

    assert note is not None
    assert "hbm 9,556 of 9,558" in note
    assert "spark" not in note


def test_marks_tell_measured_from_assumed(home: Pod) -> None:
    """Whoever reads a plan sees which of its figures nobody measured."""
    said = not_measured(home)

    assert "hbm: workspace 12.00 GiB (assumed)" in said
    assert "grace: 53 us per expert (arithmetic)" in said
    assert not any("184.5" in line for line in said)


@pytest.mark.parametrize(
    ("tier", "fields", "said"),
    [
        ("grace", {"ceiling_bytes": 2**38}, r"too few \(.* GiB\): raise layer_experts_max of tier"),
        (
            "spark",
            {"ceiling_bytes": 2**36, "layer_experts_max": None},
            r"spark 29,584\) for 82,432 experts, 13,261 too few \(229\.5 GiB\): give tier spark",
        ),
    ],
)
def test_a_pod_that_is_too_small_is_told_by_how_much(
    home: Pod, tier: str, fields: dict[str, object], said: str
) -> None:
    """Slots of each tier, what is missing in experts and GiB, and what would help."""
    with pytest.raises(PodError, match=said):
        take_ledger(changed(home, tier, **fields), K3)


def uncapped(home: Pod) -> Pod:
    """The same pod without the clock cap on its Sparks."""

    def lifted(item: PodNode) -> PodNode:
        if item.power is None:
            return item
        power = msgspec.structs.replace(item.power, is_capped=False)
        return msgspec.structs.replace(item, power=power)

    return msgspec.structs.replace(home, nodes=tuple(lifted(item) for item in home.nodes))


def test_a_plan_beyond_a_feed_is_refused(home: Pod) -> None:
    """Case H2: with the cap all fits; lifted, the strip is 193 W over, as was published."""
    used = take_ledger(home, K3).slots.tolist()
    station, strip = feed_lines(home, used)
    assert (station.busy_w, station.worst_w, station.over_w) == (1685, 1805, 0)
    assert (round(strip.idle_w), round(strip.busy_w), strip.over_w) == (502, 1217, 0)
    check_power(home, used)

    with pytest.raises(PodError, match=r"'rack strip' carries 1440 W.*1633 W, 193 W more.*cap"):
        check_power(uncapped(home), used)
    check_power(uncapped(home), [*used[:3], *used[3:9], 0, 0])  # two Sparks stay idle
