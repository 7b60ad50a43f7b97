"""Hops by experts: means, deviation, and nothing where nothing was."""

from __future__ import annotations

from station.hop_table import HopTable


def test_points_are_means_by_experts() -> None:
    """Two hops of one expert and one of three; the deviation is of the node's share."""
    table = HopTable()
    assert table.points() == []
    for experts, hop_us, node_us in ((3, 400, 90), (1, 300, 40), (1, 200, 60)):
        table.observe(experts, hop_us, node_us)

    assert table.points() == [
        {"experts": 1, "dispatches": 2, "hop_us": 250.0, "node_us": 50.0, "node_us_sd": 10.0},
        {"experts": 3, "dispatches": 1, "hop_us": 400.0, "node_us": 90.0, "node_us_sd": 0.0},
    ]
