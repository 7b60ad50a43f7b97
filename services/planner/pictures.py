"""Pictures of a plan: where experts live, who is busy, what policies cost. matplotlib, no screen.

Owns what is drawn and how: units on every axis, marks for what is assumed, colours that differ in
lightness too, equal bytes for equal input. matplotlib is imported when a picture is drawn. Must
not know files, or how a plan is made.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from services.planner.assignment import NOWHERE, Assignment
from services.planner.cost import PlaceCosts
from services.planner.pod import Pod, PodNode
from services.planner.report import PathFigures, PolicyFigures
from services.planner.score import Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]

# Okabe and Ito's colours: told apart with any common kind of colour blindness
_BLUE, _ORANGE, _GREEN, _BLACK = "#0072B2", "#E69F00", "#009E73", "#000000"
_PNG_DPI: Final = 120
_MARKS: Final = "costs: * not measured (arithmetic, fitted or assumed)"


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture in both formats; `name` is its file's, `alt` says in words what it shows."""

    name: str
    alt: str
    png: bytes
    svg: bytes


def placement_map(
    assignment: Assignment,
    histogram: npt.NDArray[np.integer],
    pod: Pod,
    *,
    first_layer: int,
    policy: str,
) -> Picture:
    """Layer by tier: share of each layer's experts that live there, and of its selections.

    histogram int64 [layers, experts]. A copy counts as an expert of its tier, not as a selection:
    which of the two computes is decided token by token.
    """
    experts, selections = tier_shares(assignment, histogram, pod)
    copies = assignment.copies
    top = float(np.ceil(10 * max(experts.max(), selections.max())) / 10)
    with _figure("placement", width=7.5, height=max(3.0, 1.6 + 0.075 * len(experts))) as figure:
        axes = figure.subplots(1, 2, sharey=True)
        _heat(axes[0], experts, pod.tiers, first_layer, top, "share of the layer's experts")
        mesh = _heat(axes[1], selections, pod.tiers, first_layer, top, "share of its selections")
        axes[0].set_ylabel("model layer")
        figure.colorbar(
            mesh, ax=list(axes), label="share of the layer (1 is all of it)", shrink=0.8
        )
        told = f", with {copies:,} copies" if copies else ""
        figure.suptitle(f"Where the experts of each layer live: {policy}{told}")
        return _picture(
            figure,
            "placement",
            f"Heat map of {len(experts)} layers by {len(pod.tiers)} tiers for policy {policy}: "
            + _ranges(pod.tiers, experts),
        )


def load_bars(score: Score, costs: PlaceCosts, pod: Pod, *, policy: str) -> Picture:
    """Per place: share of all selections, and busy us per token (fixed part and per expert)."""
    fixed_us, slope_us = busy_us(score, costs)
    labels = [marked_name(node) for node in pod.nodes]
    with _figure("load", width=7.5, height=1.6 + 0.28 * len(labels)) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        rows = np.arange(len(labels))
        shares = left.barh(rows, 100 * score.load, color=_BLUE)
        left.set_xlabel("share of all selections (%)")
        fixed = right.barh(rows, fixed_us, color=_ORANGE, label="fixed per dispatch")
        slope = right.barh(rows, slope_us, left=fixed_us, color=_BLUE, label="per expert")
        for what, bars in (("selections", shares), ("fixed", fixed), ("slope", slope)):
            for index, bar in enumerate(bars):
                bar.set_gid(f"{what}-{index}")
        right.set_xlabel("busy time (us per token, all layers)")
        right.legend(frameon=False)
        left.set_yticks(rows, labels)
        left.invert_yaxis()
        figure.suptitle(f"Load of each place: {policy}")
        figure.supxlabel(_MARKS, fontsize=7)
        told = ", ".join(
            f"{node.name} {100 * share:.1f} %"
            for node, share in zip(pod.nodes, score.load.tolist(), strict=True)
        )
        return _picture(figure, "load", f"Share of selections per place under {policy}: {told}")


def trade_off(
    policies: Sequence[PolicyFigures], *, synthetic: bool, bound_ms: float | None = None
) -> Picture:
    """Expert path of each policy: in-sample, held-out and published, with intervals; the bound."""
    names = [policy.policy for policy in policies]
    with _figure("policies", width=7.5, height=1.8 + 0.42 * len(names)) as figure:
        axes = figure.subplots()
        rows = np.arange(len(names))
        inside = [policy.in_sample for policy in policies]
        _points(axes, rows - 0.15, inside, _BLUE, "o", "in-sample (95 % over requests)")
        outside = [(row, p.held_out) for row, p in zip(rows, policies, strict=True) if p.held_out]
        if outside:
            at = np.array([row for row, _ in outside]) + 0.15
            _points(
                axes, at, [p for _, p in outside], _ORANGE, "s", "held-out (95 % over requests)"
            )
        known = [(row, p.published) for row, p in zip(rows, policies, strict=True) if p.published]
        if known:
            axes.plot(
                [published.expert_path_ms for _, published in known],
                [row for row, _ in known],
                linestyle="none",
                marker="x",
                color=_BLACK,
                label="published",
            )
        if bound_ms is not None:
            axes.axvline(
                bound_ms, color=_GREEN, linestyle=":", label="bound without copies (loose)"
            )
        axes.set_yticks(rows, [_policy_label(policy) for policy in policies])
        axes.invert_yaxis()
        axes.set_xlabel("expert path (ms per token, predicted from costs)")
        axes.grid(axis="x", linewidth=0.4)
        axes.legend(frameon=False, loc="best")
        figure.suptitle(
            f"What policies cost, on {'synthetic' if synthetic else 'recorded'} routing"
        )
        values = ", ".join(
            f"{policy.policy} {policy.in_sample.expert_path_ms:.2f} ms" for policy in policies
        )
        return _picture(figure, "policies", f"Expert path of a token by policy: {values}")


def search_curve(policy: PolicyFigures, cost_ranked_ms: float | None) -> Picture | None:
    """The best expert path found after each second of a search; None when nothing was noted."""
    if policy.search is None or not policy.search.objective_ms:
        return None
    values = policy.search.objective_ms
    with _figure("search", width=7.5, height=3.0) as figure:
        axes = figure.subplots()
        axes.step(np.arange(1, len(values) + 1), values, where="post", color=_BLUE, label="best")
        if cost_ranked_ms is not None:
            axes.axhline(cost_ranked_ms, color=_BLACK, linestyle="--", label="cost-ranked")
        axes.set_xlabel("time spent (s)")
        axes.set_ylabel("expert path (ms per token)")
        axes.legend(frameon=False)
        figure.suptitle(f"{policy.policy}: in-sample objective after each second")
        return _picture(
            figure,
            "search",
            f"Best in-sample expert path of {policy.policy}: {values[0]:.2f} ms after 1 s, "
            f"{values[-1]:.2f} ms after {len(values)} s",
        )


def tier_shares(
    assignment: Assignment, histogram: npt.NDArray[np.integer], pod: Pod
) -> tuple[Floats, Floats]:
    """(experts, selections): shares of each layer per tier, both float64 [layers, tiers].

    Shares of experts count copies too, so a layer's sum is 1 + copies / experts.
    """
    tier_of = np.array([pod.tiers.index(node.tier) for node in pod.nodes])
    homes = tier_of[assignment.home]
    copies = np.where(assignment.copy == NOWHERE, NOWHERE, tier_of[assignment.copy])
    experts = np.empty((len(homes), len(pod.tiers)))
    selections = np.empty_like(experts)
    totals = np.maximum(histogram.sum(axis=1), 1)
    for tier in range(len(pod.tiers)):
        held = (homes == tier).sum(axis=1) + (copies == tier).sum(axis=1)
        experts[:, tier] = held / homes.shape[1]
        selections[:, tier] = np.where(homes == tier, histogram, 0).sum(axis=1) / totals
    return experts, selections


def busy_us(score: Score, costs: PlaceCosts) -> tuple[Floats, Floats]:
    """(fixed, per expert): us of work of each place per token, both float64 [P]."""
    tokens = len(score.layer_us)
    return (
        costs.fixed_us * score.touches / tokens,
        costs.per_expert_us * score.selections / tokens,
    )


def marked_name(node: PodNode) -> str:
    """The name, with a star unless both of its costs were measured."""
    bases = (node.cost.fixed_basis, node.cost.per_expert_basis)
    return node.name if bases == ("measured", "measured") else f"{node.name} *"


def _policy_label(policy: PolicyFigures) -> str:
    return f"{policy.policy}\n({policy.agreement})" if policy.agreement else policy.policy


def _heat(
    axes: Axes, shares: Floats, tiers: Sequence[str], first_layer: int, top: float, title: str
) -> Any:  # a QuadMesh, which matplotlib types by a private module
    layers = len(shares)
    mesh = axes.pcolormesh(
        np.arange(len(tiers) + 1) - 0.5,
        np.arange(layers + 1) + first_layer - 0.5,
        shares,
        cmap="cividis",
        vmin=0.0,
        vmax=top,
        gid=f"cells-{title.split()[-1]}",
    )
    axes.set_xticks(range(len(tiers)), list(tiers))
    axes.set_ylim(first_layer + layers - 0.5, first_layer - 0.5)
    axes.set_title(title)
    return mesh


def _points(
    axes: Axes,
    rows: npt.NDArray[np.floating],
    paths: Sequence[PathFigures],
    colour: str,
    marker: str,
    label: str,
) -> None:
    means = np.array([path.expert_path_ms for path in paths])
    widths = np.zeros((2, len(paths)))
    for index, path in enumerate(paths):
        if path.ci95_ms is not None:
            widths[:, index] = (means[index] - path.ci95_ms.low, path.ci95_ms.high - means[index])
    axes.errorbar(
        means,
        rows,
        xerr=np.maximum(widths, 0.0),
        fmt=marker,
        color=colour,
        capsize=3,
        markersize=5,
        label=label,
    )


def _ranges(tiers: Sequence[str], shares: Floats) -> str:
    return ", ".join(
        f"{tier} {100 * line.min():.0f} to {100 * line.max():.0f} % of a layer's experts"
        for tier, line in zip(tiers, shares.T, strict=True)
    )


@contextmanager
def _figure(name: str, *, width: float, height: float) -> Iterator[Figure]:
    """A figure of its own, in inches: nothing global of matplotlib is read or changed for long."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(
        {
            "font.family": "sans-serif",
            "font.size": 9,
            "axes.titlesize": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "figure.dpi": 100,
            "text.parse_math": False,  # a $ in a name is a $
            "svg.fonttype": "none",  # text stays text: it can be searched and read aloud
            "svg.hashsalt": name,  # ids are hashes, salted at random unless told otherwise
        }
    ):
        yield Figure(figsize=(width, height), layout="constrained")


def _picture(figure: Figure, name: str, alt: str) -> Picture:
    """Render within `_figure`; no date and no program name, so that bytes repeat."""
    png, svg = io.BytesIO(), io.BytesIO()
    figure.savefig(png, format="png", dpi=_PNG_DPI, metadata={"Software": None})
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return Picture(name, alt, png.getvalue(), svg.getvalue())
