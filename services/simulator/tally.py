"""What a simulation counts, and what it says at the end. Pure.

Owns the sums and their units. Must not know how events come about.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from services.simulator.model import SimPod

SATURATED: Final = 0.9  # of its time: a resource that busy is the limit
LATENCY: Final = "latency"  # the limit where every resource has time to spare
_NS_PER_MS: Final = 1e6
_NS_PER_S: Final = 1e9


@dataclass(slots=True)
class Parts:
    """Where the nanoseconds of one step of one lane went; they add up to its length.

    `serial` is the Station's own work, `message` its posting and collecting, `local` what overlaps
    with the journey (shared experts, HBM), `cold` experts of lost places, `queue` waiting for the
    Station's thread, `rest` once per token, `link` rows waiting for other rows on the Station's
    link, `waits` by the place that was the slowest.
    """

    serial_ns: int = 0
    message_ns: int = 0
    local_ns: int = 0
    cold_ns: int = 0
    queue_ns: int = 0
    link_ns: int = 0
    rest_ns: int = 0
    waits: dict[int, int] = field(default_factory=dict)

    @property
    def total_ns(self) -> int:
        """Sum of all parts."""
        own = self.serial_ns + self.message_ns + self.local_ns + self.cold_ns
        return own + self.queue_ns + self.link_ns + self.rest_ns + sum(self.waits.values())


class Tally:
    """Sums since the start or the last `restart`."""

    def __init__(self, places: int) -> None:
        """All zero."""
        self._places = places
        self.restart(0)

    def restart(self, now_ns: int) -> None:
        """Forget what was counted: the warm-up is over."""
        self.began_ns = self.ended_ns = now_ns
        self.station_ns = 0
        self.out_ns = 0
        self.in_ns = 0
        self.experts = 0
        self.rows = 0
        self.cold_experts = 0
        self.prompt_tokens = 0
        self.busy_ns = [0] * self._places
        self.dispatches = 0
        self.emitted_ns: list[int] = []
        self.token_ns: list[int] = []
        self.first_token_ns: list[int] = []
        self._parts = Parts()
        self._weight = 0

    def add_step(self, parts: Parts, streams: int) -> None:
        """One step's parts, as often as it made a decode token."""
        if not streams:
            return
        total = self._parts
        total.serial_ns += parts.serial_ns * streams
        total.message_ns += parts.message_ns * streams
        total.local_ns += parts.local_ns * streams
        total.cold_ns += parts.cold_ns * streams
        total.queue_ns += parts.queue_ns * streams
        total.link_ns += parts.link_ns * streams
        total.rest_ns += parts.rest_ns * streams
        for place, waited_ns in parts.waits.items():
            total.waits[place] = total.waits.get(place, 0) + waited_ns * streams
        self._weight += streams

    def outcome(self, pod: SimPod, *, streams: int, layers: int) -> Outcome:
        """The sums as rates, shares and milliseconds, of a model with so many layers."""
        span_ns = max(1, self.ended_ns - self.began_ns)
        seconds = span_ns / _NS_PER_S
        per_token = 1 / (_NS_PER_MS * max(1, self._weight))
        rate = len(self.emitted_ns) / seconds
        parts = self._parts
        waits = {pod.places[place].name: ns * per_token for place, ns in parts.waits.items()}
        names = ("serial", "message", "local", "cold", "queue", "link", "rest")
        named = {name: getattr(parts, f"{name}_ns") * per_token for name in names}
        tiers: dict[str, float] = {}
        for place, ns in parts.waits.items():
            tier = pod.places[place].tier
            tiers[f"wait {tier}"] = tiers.get(f"wait {tier}", 0.0) + ns * per_token
        return Outcome(
            seconds=seconds,
            tokens=len(self.emitted_ns),
            prompt_tokens=self.prompt_tokens,
            tokens_per_s=rate,
            tokens_per_s_stream=rate / streams,
            token_ms=_quantiles(self.token_ns),
            first_token_ms=_quantiles(self.first_token_ns),
            layer_us=(parts.total_ns - parts.rest_ns) * per_token * 1000 / layers,
            parts_ms=named | dict(sorted(tiers.items())),
            waits_ms=dict(sorted(waits.items(), key=lambda item: -item[1])),
            station=self.station_ns / span_ns,
            link_out=self.out_ns / span_ns,
            link_in=self.in_ns / span_ns,
            places={
                place.name: busy / span_ns
                for place, busy in zip(pod.places, self.busy_ns, strict=True)
            },
            dispatches=self.dispatches,
            experts=self.experts,
            rows=self.rows,
            cold_experts=self.cold_experts,
        )


class Quantiles(msgspec.Struct, frozen=True):
    """Of a time, milliseconds."""

    p50: float
    p99: float
    mean: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one simulation found.

    `parts_ms` and `waits_ms` (the latter by the slowest place) are milliseconds per decode token;
    `station`, `link_out`, `link_in` and `places` are shares of the time in which they were busy.
    """

    seconds: float
    tokens: int
    prompt_tokens: int
    tokens_per_s: float
    tokens_per_s_stream: float
    token_ms: Quantiles | None
    first_token_ms: Quantiles | None
    layer_us: float
    parts_ms: dict[str, float]
    waits_ms: dict[str, float]
    station: float
    link_out: float
    link_in: float
    places: dict[str, float]
    dispatches: int
    experts: int
    rows: int
    cold_experts: int

    @property
    def expert_path_ms(self) -> float:
        """What a token waits for rows, and what the Station does meanwhile."""
        waits = sum(value for name, value in self.parts_ms.items() if name.startswith("wait"))
        return waits + self.parts_ms["local"]

    @property
    def limit(self) -> str:
        """The busiest resource, or `latency` when every resource has time to spare."""
        shares = {"Station": self.station, "link out": self.link_out, "link in": self.link_in}
        shares |= {name: share for name, share in self.places.items() if name not in shares}
        name = max(shares, key=shares.__getitem__)
        return name if shares[name] >= SATURATED else LATENCY


def _quantiles(times_ns: list[int]) -> Quantiles | None:
    if not times_ns:
        return None
    ms = np.array(times_ns) / _NS_PER_MS
    p50, p99 = np.percentile(ms, (50, 99)).tolist()
    return Quantiles(p50, p99, float(ms.mean()))
