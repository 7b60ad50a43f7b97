"""Rates before, while and after places are lost. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from services.simulator.model import Loss, SimPod


class Phase(msgspec.Struct, frozen=True):
    """A stretch of simulated time between two changes of the pod."""

    from_s: float
    to_s: float
    tokens: int
    tokens_per_s: float
    what: str


def phases(
    pod: SimPod, losses: Sequence[Loss], emitted_s: Sequence[float], end_s: float
) -> tuple[Phase, ...]:
    """Tokens per second between losses and new homes; `emitted_s` rises."""
    happened = {0.0: ["all places"]}
    lost_s = {loss.place: loss.at_s for loss in losses}
    for loss in sorted(losses, key=lambda loss: loss.at_s):
        name, home_s = pod.places[loss.place].name, loss.at_s + loss.rehome_s
        happened.setdefault(loss.at_s, []).append(f"{name} lost, its experts cold")
        if any(lost_s.get(heir, end_s) > home_s for heir in pod.heirs(loss.place)):
            happened.setdefault(home_s, []).append(f"{name}'s experts have new homes")
    changes = sorted((at, "; ".join(what)) for at, what in happened.items() if at < end_s)
    ends = [at for at, _ in changes[1:]] + [end_s]
    found = []
    for (start, what), end in zip(changes, ends, strict=True):
        tokens = sum(1 for at in emitted_s if start <= at < end)
        if end > start:
            found.append(Phase(start, end, tokens, tokens / (end - start), what))
    return tuple(found)
