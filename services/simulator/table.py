"""Outcomes for people. Pure: values in, rich objects out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from rich.table import Table

from services.simulator.model import Workload
from services.simulator.phases import Phase
from services.simulator.sweep import Axis, Lever, Point, saturated_at
from services.simulator.tally import Outcome, Quantiles

_WORDS: Final = {
    "serial": "Station, serial part",
    "message": "Station, posts and collects",
    "local": "Station, while rows travel",
    "cold": "cold store",
    "queue": "wait for the Station's thread",
    "link": "rows on the Station's link",
    "rest": "rest of the token",
}


def headline(outcome: Outcome, work: Workload) -> Sequence[str]:
    """Rates and token times, in a line or two."""
    lines = [
        f"{outcome.tokens_per_s:.2f} tok/s in all, {outcome.tokens_per_s_stream:.2f} per stream "
        f"({work.streams} streams in {work.lanes} lanes, {outcome.seconds:.1f} s simulated); "
        f"limit: {outcome.limit}"
    ]
    if outcome.token_ms is not None:
        lines.append(f"token time {_quantiles(outcome.token_ms)}")
    if outcome.first_token_ms is not None:
        lines.append(f"first token after {_quantiles(outcome.first_token_ms)}")
    return lines


def parts_table(outcome: Outcome) -> Table:
    """Milliseconds of a token by part; the parts add up to the token."""
    table = _table("ms per token", ("ms", "share"))
    total = sum(outcome.parts_ms.values())
    for name, ms in outcome.parts_ms.items():
        if ms:
            word = _WORDS.get(name) or f"wait, slowest is a place of {name.removeprefix('wait ')}"
            table.add_row(word, f"{ms:.2f}", f"{ms / total:.1%}")
    table.add_row("token", f"{total:.2f}", "")
    return table


def utilisation_table(outcome: Outcome) -> Table:
    """How busy everything is, and how long tokens wait for each place."""
    table = _table("busy", ("share", "ms waited per token"))
    table.add_row("Station", f"{outcome.station:.1%}", "")
    table.add_row("link out", f"{outcome.link_out:.2%}", "")
    table.add_row("link in", f"{outcome.link_in:.2%}", "")
    for name, share in _shortened(outcome.places):
        waited = outcome.waits_ms.get(name)
        table.add_row(name, f"{share:.1%}", "" if waited is None else f"{waited:.2f}")
    return table


def sweep_table(axis: Axis, points: Sequence[Point]) -> Table:
    """One line per count."""
    table = _table(
        axis.name, ("tok/s", "per stream", "p99 ms", "Station", "busiest place", "limit")
    )
    for point in points:
        outcome = point.outcome
        busiest = max(outcome.places, key=outcome.places.__getitem__)
        table.add_row(
            str(point.count),
            f"{outcome.tokens_per_s:.2f}",
            f"{outcome.tokens_per_s_stream:.3f}",
            "-" if outcome.token_ms is None else f"{outcome.token_ms.p99:.1f}",
            f"{outcome.station:.0%}",
            f"{busiest} {outcome.places[busiest]:.0%}",
            point.limit,
        )
    return table


def sweep_words(axis: Axis, points: Sequence[Point]) -> str:
    """Where it saturates, in one line."""
    knee = saturated_at(list(points))
    if knee is None:
        return f"{axis.name}: no limit met up to {points[-1].count}"
    text = f"{axis.name}: more than {knee.count} gain less than 1 %"
    limits = {point.limit for point in points if point.count >= knee.count}
    text += f"; limit: {', '.join(sorted(limits))}"
    left = [count for count in axis.counts if count > points[-1].count]
    return text + (f"; not simulated: {', '.join(map(str, left))}" if left else "")


def levers_table(levers: Sequence[Lever]) -> Table:
    """What 10 % of each figure gives."""
    table = _table("10 % better", ("figure now", "unit", "tok/s", "ms per token"))
    for lever in levers:
        table.add_row(
            lever.figure,
            f"{lever.value:,.1f}",
            lever.unit,
            f"{lever.tokens_per_s:+.3f}",
            f"{-lever.ms_per_token:+.3f}",
        )
    return table


def phases_table(phases: Sequence[Phase]) -> Table:
    """Rates before, during and after losses."""
    table = _table("from s", ("to s", "tok/s", "what"))
    for phase in phases:
        rate = f"{phase.tokens_per_s:.2f}"
        table.add_row(f"{phase.from_s:.1f}", f"{phase.to_s:.1f}", rate, phase.what)
    return table


def _table(first: str, columns: Iterable[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _quantiles(times: Quantiles) -> str:
    return f"p50 {times.p50:.1f} ms, p99 {times.p99:.1f} ms, mean {times.mean:.1f} ms"


def _shortened(places: dict[str, float], most: int = 24) -> Sequence[tuple[str, float]]:
    """All places, or the busiest of them when there are very many."""
    if len(places) <= most:
        return list(places.items())
    return sorted(places.items(), key=lambda item: -item[1])[:most]
