"""A plan's report as text for a person. Pure: nothing is printed here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Final

from rich.table import Table

from services.planner.ledger import GIB, FeedLine, LedgerLine
from services.planner.report import (
    LedgerFigures,
    PathFigures,
    PlanReport,
    PolicyFigures,
    SearchFigures,
)

_STEP_MS: Final = 0.01  # smaller gains are not worth a word


def ledger_table(ledger: LedgerFigures) -> Table:
    """One line per node; like neighbours share one."""
    table = _table("node", "tier")
    for name in ("nodes", "memory GiB", "reserved", "budget", "fits", "per layer", "slots"):
        table.add_column(name, justify="right", no_wrap=True)
    for _, group in groupby(ledger.nodes, key=lambda line: replace(line, name="")):
        lines = list(group)
        first = lines[0]
        table.add_row(
            first.name if len(lines) == 1 else f"{first.name} to {lines[-1].name}",
            first.tier,
            str(len(lines)),
            *(f"{size / GIB:,.2f}" for size in _sizes(first)),
            f"{first.budget_slots:,}",
            f"{first.layer_max}",
            f"{first.slots:,}" if len(lines) == 1 else f"{len(lines)} x {first.slots:,}",
        )
    return table


def ledger_lines(report: PlanReport) -> Iterator[str]:
    """Sums, and what about them is not as it seems."""
    ledger = report.ledger
    yield (
        f"{ledger.slots_total:,} slots ({ledger.total_gib:,.1f} GiB) for {ledger.experts:,} "
        f"experts of {ledger.expert_bytes:,} bytes: {ledger.slots_spare:,} spare "
        f"({ledger.spare_gib:,.1f} GiB)"
    )
    for line in ledger.published_differences:
        yield f"does not follow: {line}"
    if ledger.padding is not None:
        yield f"note: {ledger.padding}"
    for feed in ledger.feeds:
        yield _feed(feed)
    if ledger.not_measured:
        yield f"not measured: {'; '.join(ledger.not_measured)}"


def trace_line(report: PlanReport) -> str:
    """What was planned on."""
    trace = report.trace
    assert trace is not None, "asked only when there are policies"
    return f"trace {trace.source}: {trace.tokens:,} tokens of {trace.requests:,} requests"


def policy_table(report: PlanReport) -> Table:
    """Times: one line per policy, the published figures beside ours."""
    table = _table("policy")
    for name in ("ms", "95 %", "held-out ms", "95 %", "published ms", "tok/s", "published"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("agreement", no_wrap=True)
    for policy in report.policies:
        table.add_row(*_times(policy))
    return table


def load_table(report: PlanReport) -> Table:
    """Where rows are computed and who decides a layer's time: one line per policy."""
    tiers = "/".join(report.policies[0].in_sample.load)
    table = _table("policy")
    columns = ("touch a Spark", f"% of rows {tiers}", "% slowest", "copies", "planned in s")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for policy in report.policies:
        table.add_row(*_loads(policy))
    return table


def policy_lines(report: PlanReport) -> Iterator[str]:
    """What to make of the table."""
    trace = report.trace
    if trace is not None:
        yield from (f"trace: {notice}" for notice in trace.notices)
    for policy in report.policies:
        if policy.search is not None:
            yield _search(policy.policy, policy.search)
    if (gain := report.held_out_gain) is not None:
        yield (
            f"{gain.policy} is {gain.gain:.1%} below {gain.base} on held-out requests "
            f"(95 %: {gain.ci95.low:.1%} to {gain.ci95.high:.1%})"
        )
    if (bound := report.bound) is not None:
        yield (
            f"no placement without copies is below {bound.expert_path_ms:.2f} ms on this trace "
            f"(clairvoyant and loose: {bound.far_touch_share:.0%} of token-layers must touch one "
            f"of {len(bound.far)} places)"
        )
    if report.slot_values:
        values = ", ".join(f"{v.tier} {1e3 * v.ms_per_token:.3f}" for v in report.slot_values)
        yield f"one more slot saves, in us per token: {values}"
    for note in report.notes:
        yield f"note: {note}"


def _search(policy: str, search: SearchFigures) -> str:
    steps: list[str] = []
    known_ms = float("inf")
    for second, value_ms in enumerate(search.objective_ms, start=1):
        if known_ms - value_ms >= _STEP_MS:
            steps.append(f"{value_ms:.2f} ms after {second} s")
            known_ms = value_ms
    gain = search.trial_gain
    if gain is None:
        trial = "exchanges of single experts were not tried"
    elif gain > 0:
        trial = f"exchanges gain {gain:.2%} on unseen requests: {search.exchanges:,} were made"
    else:
        trial = f"exchanges gain {gain:.2%} on unseen requests: none were made"
    return f"{policy}: {', '.join(steps) or 'done within a second'}; {trial}"


def _times(policy: PolicyFigures) -> Iterator[str]:
    inside, outside, published = policy.in_sample, policy.held_out, policy.published
    yield policy.policy
    yield from _path(inside)
    yield from ("", "") if outside is None else _path(outside)
    yield "" if published is None else f"{published.expert_path_ms:.1f}"
    yield f"{(outside or inside).tokens_per_s:.1f}"
    yield "" if published is None else f"{published.tokens_per_s:.1f}"
    yield policy.agreement


def _loads(policy: PolicyFigures) -> Iterator[str]:
    yield policy.policy
    yield f"{policy.in_sample.spark_touch:.0%}"
    yield "/".join(f"{100 * share:.0f}" for share in policy.in_sample.load.values())
    yield "/".join(f"{100 * share:.0f}" for share in policy.in_sample.slowest.values())
    yield f"{policy.copies:,}"
    yield f"{policy.plan_s:.2f}"


def _path(figures: PathFigures) -> tuple[str, str]:
    interval = figures.ci95_ms
    width = "" if interval is None else f"{interval.low:.2f}-{interval.high:.2f}"
    return f"{figures.expert_path_ms:.2f}", width


def _feed(feed: FeedLine) -> str:
    share = feed.worst_w / feed.continuous_w if feed.continuous_w else 0.0
    return (
        f"feed {feed.name}: {feed.busy_w:,.0f} W at duty, {feed.worst_w:,.0f} W at worst of "
        f"{feed.continuous_w:,.0f} W ({share:.0%})"
    )


def _sizes(line: LedgerLine) -> tuple[int, int, int]:
    return line.memory_bytes, line.reserved_bytes, line.budget_bytes


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, no_wrap=True)
    return table
