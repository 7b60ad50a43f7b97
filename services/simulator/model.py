"""The figures a simulation is fed with: Station, places, workload, losses. Values only.

Must not know events, files or the planner. Every figure is settable; docs/operator.md says which
are measured and which assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.simulator.curve import CostCurve
from shared.core.errors import ConfigError
from shared.core.placement import Tier


@dataclass(frozen=True, slots=True)
class SimPlace:
    """One place where experts live.

    `hbm` is computed by the Station itself while rows travel; `rtx` and `grace` have a queue of
    their own on the Station's host; `spark` has one behind the Station's link. `wire_us` is the
    part of `curve` during which the place can already serve the next dispatch.
    """

    name: str
    tier: Tier
    curve: CostCurve
    wire_us: float = 0.0

    @property
    def is_station(self) -> bool:
        """Whether the Station's own thread computes it."""
        return self.tier == "hbm"

    @property
    def is_remote(self) -> bool:
        """Whether its messages cross the Station's link."""
        return self.tier == "spark"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimStation:
    """What a layer costs the Station's one model thread, and its link.

    `serial_us` is a layer of one token without experts and without what overlaps; `before_share` of
    it lies before the dispatches, the rest after the rows. `shared_us` overlaps with the rows'
    journey. `post_us` and `collect_us` are paid per place talked to. `rest_us` is paid per token
    (embedding, logits, sampling). Each further token of a batch costs `token_share` of the first at
    the Station, and `expert_token_share` of an expert's reading at a place. `cold_us` is one
    expert of a lost place, computed from the checkpoint; `detect_us` passes until rows that will
    never come are given up. `cores` are the host's, when Station and places share one.
    """

    serial_us: float
    before_share: float = 0.6
    shared_us: float = 0.0
    post_us: float = 0.0
    collect_us: float = 0.0
    rest_us: float = 0.0
    token_share: float = 0.1
    expert_token_share: float = 0.1
    cold_us: float = 1347.0
    detect_us: float = 250_000.0
    link_bytes_per_s: float = 49e9
    activation_bytes: int = 7168
    cores: int | None = None

    def __post_init__(self) -> None:
        """ConfigError for a figure that no Station has."""
        times = (self.serial_us, self.shared_us, self.post_us, self.collect_us, self.rest_us)
        shares = (self.before_share, self.token_share, self.expert_token_share)
        if min(*times, self.cold_us, self.detect_us) < 0:
            raise ConfigError(f"simulated Station: times must be from 0 us: {times}")
        if not all(0 <= share <= 1 for share in shares):
            raise ConfigError(f"simulated Station: shares must be from 0 to 1: {shares}")
        if self.link_bytes_per_s <= 0 or self.activation_bytes < 1:
            raise ConfigError("simulated Station: the link needs bytes per second above 0")
        if self.cores is not None and self.cores < 1:
            raise ConfigError(f"simulated Station: {self.cores} cores: give at least 1, or none")


@dataclass(frozen=True, slots=True)
class SimPod:
    """A Station and its places, in the order of the place indices of a routing."""

    station: SimStation
    places: tuple[SimPlace, ...]

    def heirs(self, lost: int) -> list[int]:
        """The other places of a lost place's tier."""
        tier = self.places[lost].tier
        return [i for i, place in enumerate(self.places) if place.tier == tier and i != lost]

    def index(self, name: str) -> int:
        """Place index by name; ConfigError when there is none."""
        for index, place in enumerate(self.places):
            if place.name == name:
                return index
        known = ", ".join(place.name for place in self.places)
        raise ConfigError(f"no place is called {name!r}: this pod has {known}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Who talks to the pod. `streams` sequences share `lanes`; a lane's sequences walk together.

    Each stream answers request after request: `prompt_tokens` read in chunks of at most
    `prefill_tokens` per lane and step, then `answer_tokens` (None: without end). With
    `arrivals_per_s` requests come at random times and wait for a free stream; without, a stream
    has its next request at once. It ends after `tokens` tokens per stream, or `seconds`.
    """

    streams: int = 1
    lanes: int = 1
    tokens: int = 100
    seconds: float | None = None
    prompt_tokens: int = 0
    answer_tokens: int | None = None
    prefill_tokens: int = 64
    arrivals_per_s: float = 0.0

    def __post_init__(self) -> None:
        """ConfigError for a workload that never starts or never ends."""
        if not 1 <= self.lanes <= self.streams:
            raise ConfigError(
                f"{self.streams} streams in {self.lanes} lanes: each lane needs a stream"
            )
        if self.tokens < 2 or self.prefill_tokens < 1 or self.prompt_tokens < 0:
            raise ConfigError("at least 2 tokens per stream, 1 per prefill chunk, 0 in the prompt")
        if self.answer_tokens is not None and self.answer_tokens < 1:
            raise ConfigError("an answer has at least 1 token")
        if self.seconds is not None and not self.seconds > 0:
            raise ConfigError(f"{self.seconds} simulated seconds: give more than 0")
        if self.arrivals_per_s < 0:
            raise ConfigError("arrivals per second must be from 0 (0: always a next request)")


@dataclass(frozen=True, slots=True)
class Loss:
    """A place that is gone from `at_s` on.

    Its experts are computed from the cold store until `rehome_s` later, then by the places of its
    tier that are left; when there are none they stay cold. An expert with a copy elsewhere is
    served by the copy from the next layer on; rows in flight are computed cold.
    """

    place: int
    at_s: float
    rehome_s: float
