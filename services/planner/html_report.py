"""A plan's report as one HTML file: tables and drawings in it, nothing fetched, no script.

Owns what is on the page; the template beside it owns the markup and escapes every value. Pure.
Must not know files, or how figures came about.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Final

from services.planner.ledger import GIB, FeedLine
from services.planner.pictures import Picture
from services.planner.report import LedgerFigures, PathFigures, PlanReport, PolicyFigures

if TYPE_CHECKING:
    from markupsafe import Markup

_TEMPLATE: Final = "report.html"
# what an SVG file has around its root element, and what is not needed within a page
_PROLOG: Final = re.compile(r"\A.*?(?=<svg)", re.DOTALL)
_METADATA: Final = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_NAMESPACE: Final = re.compile(r'\sxmlns(?::\w+)?="[^"]*"')
_ID: Final = re.compile(r'(\sid="|href="#|url\(#)')


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, a table under it and sentences; `texts` are the columns that are words."""

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()
    texts: tuple[int, ...] = (0,)
    folded: bool = False


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A picture as it goes into the page."""

    alt: str
    svg: Markup


def render(
    report: PlanReport, pictures: Sequence[Picture], *, further: Sequence[Section] = ()
) -> str:
    """The whole page; `further` sections come after those of the report."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("services.planner"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(_TEMPLATE).render(
        title=f"Placement plan of pod {report.pod}",
        lead=list(_lead(report)),
        sections=[*sections(report), *further],
        # markup of our own drawing, in which names are escaped already
        pictures=[_Drawn(p.alt, Markup(inline_svg(p))) for p in pictures],  # noqa: S704
    )


def sections(report: PlanReport) -> Iterator[Section]:
    """Ledger, power, policies, proof, search and slowest places, as far as the report has them."""
    yield _ledger(report.ledger)
    if report.ledger.feeds:
        yield _feeds(report.ledger.feeds)
    if not report.policies:
        return
    yield _policies(report.policies)
    yield _held_out(report)
    if report.bound is not None or report.slot_values:
        yield _limits(report)
    yield Section("What is by construction, and what is not", notes=report.notes)
    yield from _loads(report.policies)
    yield from (_search(policy) for policy in report.policies if policy.search is not None)
    yield from (_slowest(policy) for policy in report.policies)


def inline_svg(picture: Picture) -> str:
    """The drawing as an element of a page: no prolog, no name space, ids of its own."""
    text = _METADATA.sub("", _PROLOG.sub("", picture.svg.decode("utf-8"), count=1))
    head, rest = text.split(">", 1)
    head = _NAMESPACE.sub("", head)
    return _ID.sub(rf"\g<1>{picture.name}-", f"{head}>{rest}")


def _lead(report: PlanReport) -> Iterator[str]:
    ledger = report.ledger
    yield (
        f"{ledger.experts:,} experts of {ledger.expert_bytes:,} bytes in {ledger.slots_total:,} "
        f"slots, {ledger.slots_spare:,} spare."
    )
    trace = report.trace
    if trace is not None:
        kind = "Synthetic" if trace.synthetic else "Recorded"
        yield (
            f"{kind} routing: {trace.source}, {trace.tokens:,} tokens of {trace.requests:,} "
            f"requests, digest {trace.digest[:16]}."
        )
        yield from trace.notices
    if report.policies:
        best = min(report.policies, key=lambda policy: _judged(policy).expert_path_ms)
        on = "held-out requests" if best.held_out is not None else "the routing it was planned on"
        yield (
            f"Least expert path: {best.policy}, {_judged(best).expert_path_ms:.2f} ms per token on "
            f"{on}, predicted from the costs of the pod."
        )


def _judged(policy: PolicyFigures) -> PathFigures:
    return policy.in_sample if policy.held_out is None else policy.held_out


def _ledger(ledger: LedgerFigures) -> Section:
    rows = []
    for _, group in groupby(ledger.nodes, key=lambda line: replace(line, name="")):
        lines = list(group)
        first = lines[0]
        sizes = (first.memory_bytes, first.reserved_bytes, first.budget_bytes)
        rows.append(
            (
                first.name if len(lines) == 1 else f"{first.name} to {lines[-1].name}",
                first.tier,
                str(len(lines)),
                *(f"{size / GIB:,.2f}" for size in sizes),
                f"{first.budget_slots:,}",
                str(first.layer_max),
                f"{first.slots:,}",
            )
        )
    notes = [f"Does not follow: {line}" for line in ledger.published_differences]
    notes += [] if ledger.padding is None else [ledger.padding]
    notes += [f"Not measured: {line}" for line in ledger.not_measured]
    total = f"{ledger.slots_total:,} slots, {ledger.total_gib:,.1f} GiB; spare "
    notes.insert(0, f"{total}{ledger.slots_spare:,} slots, {ledger.spare_gib:,.1f} GiB")
    columns = ("node", "tier", "nodes", "memory GiB", "reserved GiB", "budget GiB")
    return Section(
        "Pod and byte ledger",
        (*columns, "experts that fit", "per layer at most", "slots each"),
        tuple(rows),
        tuple(notes),
        texts=(0, 1),
    )


def _feeds(feeds: Sequence[FeedLine]) -> Section:
    rows = tuple(
        (
            feed.name,
            *(f"{watts:,.0f}" for watts in (feed.idle_w, feed.busy_w, feed.worst_w)),
            f"{feed.continuous_w:,.0f}",
            f"{feed.over_w:,.0f}",
        )
        for feed in feeds
    )
    return Section(
        "Power, with experts on every node",
        ("feed", "idle W", "duty W", "worst W", "carries W", "over W"),
        rows,
    )


def _policies(policies: Sequence[PolicyFigures]) -> Section:
    rows = []
    for policy in policies:
        inside, published = policy.in_sample, policy.published
        rows.append(
            (
                policy.policy,
                f"{inside.expert_path_ms:.2f}",
                _interval(inside),
                "" if published is None else f"{published.expert_path_ms:.1f}",
                f"{inside.tokens_per_s:.1f}",
                "" if published is None else f"{published.tokens_per_s:.1f}",
                f"{inside.spark_touch:.1%}",
                f"{policy.copies:,}",
                f"{policy.plan_s:.2f}",
                policy.agreement,
            )
        )
    path = ("expert path ms", "95 % over requests", "published ms")
    speed = (
        "tokens/s",
        "published tokens/s",
        "layers that touch a Spark",
        "copies",
        "planned in s",
    )
    return Section(
        "Policies, in-sample",
        ("policy", *path, *speed, "agreement with the published"),
        tuple(rows),
        ("In-sample: scored on the routing that was planned on, which flatters every plan.",),
        texts=(0, 9),
    )


def _held_out(report: PlanReport) -> Section:
    rows = tuple(
        (
            policy.policy,
            f"{outside.expert_path_ms:.2f}",
            _interval(outside),
            f"{outside.tokens_per_s:.1f}",
            f"{outside.spark_touch:.1%}",
            f"{outside.tokens:,}",
            f"{outside.requests:,}",
        )
        for policy in report.policies
        if (outside := policy.held_out) is not None
    )
    notes = ["Requests were kept out whole: no plan has seen a token of them."]
    if (gain := report.held_out_gain) is not None:
        notes.append(
            f"{gain.policy} takes {gain.gain:.1%} less than {gain.base} there, with 95 % of the "
            f"resampled requests from {gain.ci95.low:.1%} to {gain.ci95.high:.1%}."
        )
    return Section(
        "Held-out proof",
        (
            *("policy", "expert path ms", "95 % over requests", "tokens/s"),
            *("layers that touch a Spark", "tokens", "requests"),
        ),
        rows,
        tuple(notes) if rows else ("Nothing was kept out: run again with --holdout.",),
    )


def _limits(report: PlanReport) -> Section:
    """The lower bound, and what one more slot is worth."""
    notes = []
    if (bound := report.bound) is not None:
        notes.append(
            f"No placement without copies takes less than {bound.expert_path_ms:.2f} ms on the "
            f"routing planned on: {bound.far_touch_share:.0%} of token-layers must touch one of "
            f"{', '.join(bound.far)}. The bound knows all tokens in advance and is loose."
        )
    rows = tuple(
        (value.tier, f"{len(value.nodes)}", f"{1e3 * value.ms_per_token:.3f}")
        for value in report.slot_values
    )
    return Section(
        "Lower bound, and the value of one more slot",
        ("tier", "nodes", "us per token that one more slot saves, in-sample"),
        rows,
        tuple(notes),
    )


def _loads(policies: Sequence[PolicyFigures]) -> Iterator[Section]:
    tiers = tuple(policies[0].in_sample.load)
    shares = [(policy.policy, _judged(policy)) for policy in policies]
    for title, lines in (
        ("Share of selections that each tier computes", [(n, p.load) for n, p in shares]),
        ("Share of token-layers that each tier decides", [(n, p.slowest) for n, p in shares]),
    ):
        rows = ((name, *(f"{line[tier]:.1%}" for tier in tiers)) for name, line in lines)
        yield Section(title, ("policy", *tiers), tuple(rows))


def _search(policy: PolicyFigures) -> Section:
    search = policy.search
    assert search is not None, "asked only when there was a search"
    trial = "was not tried" if search.trial_gain is None else f"gained {search.trial_gain:+.2%}"
    return Section(
        f"How {policy.policy} came about",
        ("after s", "best in-sample ms"),
        tuple((f"{s}", f"{ms:.3f}") for s, ms in enumerate(search.objective_ms, 1)),
        (
            f"Budget {search.budget_s:g} s, {search.exchanges:,} exchanges kept.",
            f"Search over single experts {trial} on requests it had not seen.",
        ),
        folded=True,
    )


def _slowest(policy: PolicyFigures) -> Section:
    return Section(
        f"Slowest place of each layer: {policy.policy}",
        ("layer", "place", "share of tokens"),
        tuple(
            (str(line.layer), line.slowest, f"{line.share:.1%}") for line in _judged(policy).layers
        ),
        texts=(0, 1),
        folded=True,
    )


def _interval(path: PathFigures) -> str:
    if path.ci95_ms is None:
        return ""
    return f"{path.ci95_ms.low:.2f} to {path.ci95_ms.high:.2f}"
