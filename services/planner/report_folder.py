"""`k3 plan --report DIR`: the report as JSON, pictures and a page that opens offline.

Owns which pictures are drawn of which policy, and the files' names. Must not know how a plan is
made.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from services.planner import html_report, pictures
from services.planner.cost import PlaceCosts
from services.planner.pictures import Picture
from services.planner.planning import Planned
from services.planner.pod import Pod
from services.planner.report import PlanReport
from services.planner.score import score
from services.pod.files import write_atomic
from services.routing.trace import SYNTHETIC, Trace


def write_folder(folder: Path, report: PlanReport, drawn: Sequence[Picture]) -> list[Path]:
    """Write plan.json, report.html and each picture as PNG and SVG; returns the paths.

    ConfigError when the folder cannot be written.
    """
    files = {
        "plan.json": report.to_json().encode() + b"\n",
        "report.html": html_report.render(report, drawn).encode(),
    }
    for picture in drawn:
        files[f"{picture.name}.png"] = picture.png
        files[f"{picture.name}.svg"] = picture.svg
    paths = []
    for name, data in files.items():
        write_atomic(folder / name, data)
        paths.append(folder / name)
    return paths


def draw(
    report: PlanReport,
    results: Sequence[Planned],
    pod: Pod,
    planned_on: Trace,
    held_out: Trace | None,
) -> list[Picture]:
    """Pictures of the comparison, and of its best policy (on held-out requests if there are)."""
    best = min(results, key=_path_ms)
    policy = best.figures.policy
    costs = PlaceCosts.of(pod.nodes)
    sparks = np.array([node.tier == "spark" for node in pod.nodes])
    scored = score(held_out or planned_on, best.assignment, costs, sparks=sparks)
    figures = report.policies
    bound_ms = None if report.bound is None else report.bound.expert_path_ms
    synthetic = planned_on.model_digest == SYNTHETIC
    drawn = [
        pictures.trade_off(figures, synthetic=synthetic, bound_ms=bound_ms),
        pictures.placement_map(
            best.assignment,
            planned_on.histogram(),
            pod,
            first_layer=planned_on.first_layer,
            policy=policy,
        ),
        pictures.load_bars(scored, costs, pod, policy=policy),
    ]
    ranked = [f.in_sample.expert_path_ms for f in figures if f.policy == "cost-ranked"]
    curves = (pictures.search_curve(f, ranked[0] if ranked else None) for f in figures)
    return [*drawn, *(curve for curve in curves if curve is not None)]


def _path_ms(result: Planned) -> float:
    figures = result.figures
    return (figures.held_out or figures.in_sample).expert_path_ms
