"""Hop curves: points, lines between them, luck, and what is no curve."""

from __future__ import annotations

import numpy as np
import pytest

from services.simulator.curve import CostCurve
from shared.core.errors import ConfigError


def test_a_straight_curve_is_fixed_plus_slope() -> None:
    """The published Spark: 269 us for one expert, 438 for three, 184.5 for the dispatch itself."""
    curve = CostCurve.linear(184.5, 84.5)

    assert curve.at(np.array([1.0, 3.0, 2.5])).tolist() == [269.0, 438.0, 395.75]
    assert curve.fixed_us == 184.5


def test_a_measured_curve_goes_through_its_points_and_on() -> None:
    """Between two points a line, beyond the last the last line; points that fall are averaged."""
    curve = CostCurve.measured({1: 100.0, 3: 140.0, 4: 130.0, 6: 180.0})

    assert curve.at(np.array([1.0, 2.0, 3.0, 4.0, 5.0, 8.0])).tolist() == [
        100.0, 117.5, 135.0, 135.0, 157.5, 225.0
    ]  # fmt: skip
    assert curve.fixed_us == 82.5
    assert CostCurve.measured({2: 50.0}).at(np.array([1.0, 9.0])).tolist() == [50.0, 50.0]


def test_one_unlucky_dispatch_does_not_raise_the_curve() -> None:
    """10 ms once, for one expert, before 100 us nine hundred times for two."""
    curve = CostCurve.measured({1: 10_000.0, 2: 100.0, 3: 150.0}, weights={1: 1, 2: 899, 3: 100})

    assert curve.at(np.array([1.0, 2.0, 3.0])).tolist() == [111.0, 111.0, 150.0]


def test_luck_keeps_the_mean_and_has_the_spread() -> None:
    """p99 over p50 is what was asked for, and the mean stays the curve's."""
    curve = CostCurve.linear(100.0, 0.0, spread=3.0)
    drawn = curve.sampled(np.ones(200_000), np.random.default_rng(1))
    p50, p99 = np.percentile(drawn, (50, 99))

    assert p99 / p50 == pytest.approx(3.0, rel=0.03)
    assert drawn.mean() == pytest.approx(100.0, rel=0.01)


def test_fixed_part_and_slope_scale_apart() -> None:
    """What decides is asked for each part of a curve."""
    curve = CostCurve.linear(100.0, 10.0)

    assert curve.scaled(fixed=0.5).at(np.array([2.0])).tolist() == [70.0]
    assert curve.scaled(slope=0.5).at(np.array([2.0])).tolist() == [110.0]


@pytest.mark.parametrize(
    ("experts", "us", "spread"),
    [((), (), 1.0), ((2.0, 1.0), (1.0, 2.0), 1.0), ((1.0,), (1.0, 2.0), 1.0),
     ((1.0,), (-1.0,), 1.0), ((1.0,), (float("nan"),), 1.0), ((1.0,), (1.0,), 0.5)],
)  # fmt: skip
def test_what_is_no_curve_is_refused(
    experts: tuple[float, ...], us: tuple[float, ...], spread: float
) -> None:
    """Points must rise, times be numbers from 0, the spread at least 1."""
    with pytest.raises(ConfigError, match="hop curve"):
        CostCurve(experts, us, spread)
