"""Routing to compare, from files: the plan's and live routing, as traces or as histograms.

Owns the checks that both are of the placement's model and that the plan's is the one the placement
names. A histogram does not say which experts a token chooses together, so with one only, both
sides are predicted on synthetic routing fitted to their histograms: like with like. Must not know
what is made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.planner.drift_report import Sides
from services.routing import file as trace_files
from services.routing import histogram as histograms
from services.routing.histogram import Histogram
from services.routing.synth import FITTED, Progress, sized, synthesize
from services.routing.trace import SYNTHETIC, Counts, Trace, check_model
from shared.core.errors import TraceError
from shared.core.placement import Placement

SYNTH_TOKENS: Final = 2000
SYNTH_REQUESTS: Final = 20
_SYNTH_SEED: Final = 1


@dataclass(frozen=True, slots=True)
class RoutingFiles:
    """One side: trace files, or a histogram file; exactly one of the two is given."""

    traces: Sequence[Path]
    histogram: Path | None


@dataclass(frozen=True, slots=True)
class _Side:
    """One side as read; `trace` is None for a histogram."""

    counts: Counts
    trace: Trace | None
    digest: str
    source: str
    notices: tuple[str, ...]


def read_sides(
    placement: Placement,
    plan: RoutingFiles,
    live: RoutingFiles,
    *,
    progress: Callable[[], Progress] | None = None,
) -> Sides:
    """Both sides, checked; TraceError names the file and what to give instead.

    `progress` is asked for a callback for each synthetic trace that has to be made.
    """
    sides = [_read(files, placement) for files in (plan, live)]
    notes = [notice for side in sides for notice in side.notices]
    notes += _check_planned_on(placement, sides[0])
    if not all(side.counts.sum(axis=1).all() for side in sides):
        raise TraceError("a layer without a single selection cannot be compared: record more")
    traces = [side.trace for side in sides]
    if traces[0] is None or traces[1] is None:
        notes.append(
            "milliseconds are of synthetic routing fitted to the histograms, because a histogram "
            "does not say which experts are chosen together: record traces for a better prediction"
        )
        shape = placement.shape
        traces = [
            synthesize(
                sized(FITTED, shape),
                requests=SYNTH_REQUESTS,
                tokens=SYNTH_TOKENS,
                shape=shape,
                seed=_SYNTH_SEED,
                fit=side.counts,
                progress=None if progress is None else progress(),
            )
            for side in sides
        ]
    assert traces[0] is not None, "made above where there was none"
    assert traces[1] is not None, "made above where there was none"
    return Sides(sides[0].counts, sides[1].counts, traces[0], traces[1], tuple(notes))


def _read(files: RoutingFiles, placement: Placement) -> _Side:
    if files.histogram is not None:
        histogram = histograms.read(files.histogram)
        source = str(files.histogram)
        _check_histogram(histogram, placement, source)
        return _Side(histogram.array(), None, histogram.trace_digest, source, ())
    loaded = trace_files.load(files.traces)
    source = ", ".join(map(str, files.traces))
    check_model(loaded.trace, placement.model_digest, placement.shape, source=source)
    notices = list(loaded.notices)
    if lost := loaded.losses.dropped + loaded.losses.incomplete:
        notices.append(f"{source}: {lost:,} tokens were lost while it was recorded")
    trace = loaded.trace
    return _Side(trace.histogram(), trace, trace.digest, source, tuple(notices))


def _check_histogram(histogram: Histogram, placement: Placement, source: str) -> None:
    """As `check_model`, for what a histogram says of its model."""
    shape = placement.shape
    found = (histogram.first_layer, *histogram.array().shape, histogram.top_k)
    expected = (shape.first_moe_layer, len(shape.moe_layers), shape.experts, shape.top_k)
    if found != expected or histogram.model_digest not in (SYNTHETIC, placement.model_digest):
        raise TraceError(
            f"{source}: a histogram of model {histogram.model_digest[:16]}, {found[1]} layers x "
            f"{found[2]} experts, top {found[3]}; the placement is of {placement.model_digest[:16]}"
            f", {expected[1]} x {expected[2]}, top {expected[3]}: give one of this model"
        )


def _check_planned_on(placement: Placement, side: _Side) -> list[str]:
    """What is to be noted; TraceError when it is other routing than the placement names."""
    if not placement.trace_digest:
        return [
            "the placement was made without routing, so the plan's routing is taken on trust: "
            f"{side.source}"
        ]
    if side.digest == placement.trace_digest:
        return []
    raise TraceError(
        f"{side.source}: routing {side.digest[:16]}, the placement was planned on "
        f"{placement.trace_digest[:16]}: give that one (after `k3 plan --holdout 0.25` it is part "
        "A of `k3 trace split --fraction 0.75`, of the same seed)"
    )
