"""The one place of the pod tools that opens a checkpoint, and with it torch."""

from __future__ import annotations

from collections.abc import Callable

from services.pod.layout import PodLayout, PodPaths
from services.pod.prepare import PodPlan, prepare
from station.model.checkpoint import Checkpoint


def prepare_from(paths: PodPaths, plan: PodPlan, *, say: Callable[[str], None]) -> PodLayout:
    """`prepare` from the checkpoint in `plan`; CheckpointError when it is damaged or foreign."""
    with Checkpoint.open(plan.checkpoint) as checkpoint:
        return prepare(paths, plan, source=checkpoint, shape=checkpoint.config.shape, say=say)
