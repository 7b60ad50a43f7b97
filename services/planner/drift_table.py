"""A drift report as text for a person. Pure: nothing is printed here."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from services.planner.drift import Gain, Mean, PathDrift, RoutingDrift, size_words
from services.planner.drift_report import DriftReport, Traffic
from services.planner.interval import Interval


def drift_lines(report: DriftReport) -> Iterator[str]:
    """Everything but the table of nodes, the verdict last."""
    yield f"placement {report.placement[:16]} on pod {report.pod}"
    yield from _routing(report.routing, report.first_layer)
    yield from _path(report.path)
    if report.gain is not None:
        yield _gain(report.gain, report.policy, report.share)
    if report.tried is not None:
        yield _moved(report.tried)
    yield from (f"note: {note}" for note in report.notes)
    yield from (f"because {reason}" for reason in report.verdict.reasons)
    if report.verdict.alert:
        yield "ALERT: the placement does not fit live routing any more"
    if report.verdict.replan:
        yield f"verdict: re-plan, {report.moves:,} moves"
    else:
        yield "verdict: keep the placement, 0 moves"


def traffic_table(traffic: Traffic) -> Table:
    """One line per node: what the new plan would move."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("node", no_wrap=True)
    for name in ("records in", "out", "dropped", "other row", "bytes in", "bytes out", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for node in traffic.nodes:
        table.add_row(
            node.name,
            f"{node.records_in:,}",
            f"{node.records_out:,}",
            f"{node.records_dropped:,}",
            f"{node.rows_changed:,}",
            size_words(node.bytes_in),
            size_words(node.bytes_out),
            f"{node.seconds:,.1f}",
        )
    return table


def _routing(routing: RoutingDrift, first_layer: int) -> Iterator[str]:
    worst = max(range(len(routing.layers)), key=routing.layers.__getitem__)
    yield (
        f"routing differs by {routing.total_variation:.1%} (total variation; independent draws of "
        f"one law would differ by {routing.by_chance:.1%}), most in layer "
        f"{first_layer + worst}: {routing.layers[worst]:.1%}"
    )
    for overlap in routing.overlaps:
        yield (
            f"of the {overlap.slots:,} hottest experts of the plan ({overlap.what}) "
            f"{overlap.kept:.1%} still are"
        )


def _path(path: PathDrift) -> Iterator[str]:
    yield (
        f"predicted expert path: {_mean(path.planned)} on the plan's routing (in brackets "
        "95 % of the means over resampled requests)"
    )
    yield (
        f"                       {_mean(path.live)} on live routing: {path.worse:+.1%}"
        f"{_percent(path.worse_ci95)}"
    )


def _gain(gain: Gain, policy: str, share: float | None) -> str:
    part = "" if share is None else f", of its exchanges the {share:.0%} that are worth most"
    return (
        f"new plan ({policy}{part}) on live requests it has not seen: {_mean(gain.replanned)}, "
        f"this placement {_mean(gain.placement)}; gain {gain.gain_ms:.3f} ms{_width(gain.ci95_ms)}"
    )


def _moved(tried: Traffic) -> str:
    staging = f"{tried.swaps:,} exchanges pass through staging space for one record"
    return (
        f"it would move {tried.records:,} records, {size_words(tried.bytes_moved)}, "
        f"{tried.seconds_longest:,.0f} s on the busiest node; "
        f"{staging if tried.swaps else 'free rows suffice, no staging space is needed'}"
    )


def _mean(mean: Mean) -> str:
    return f"{mean.ms:.2f} ms{_width(mean.ci95_ms)}"


def _width(interval: Interval | None) -> str:
    return "" if interval is None else f" ({interval.low:.2f} to {interval.high:.2f})"


def _percent(interval: Interval | None) -> str:
    return "" if interval is None else f" ({interval.low:+.1%} to {interval.high:+.1%})"
