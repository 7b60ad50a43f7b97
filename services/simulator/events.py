"""The discrete-event model of lanes that walk the layers. Pure: a heap, integers and a seed.

Theory. An event is a lane that may go on: it starts a step, dispatches a layer, or has a layer's
rows. The Station is one thread and takes lanes in the order in which they became ready. A dispatch
joins the queue of its place at once: the Station posts in order of time and places serve in order
of arrival, so a place needs no events of its own, only the moment from which it is free. Time is
integer nanoseconds, because a row's time on the link is a fraction of a microsecond.

    part of a layer          Station         meanwhile
    before, posts            busy
    shared experts, HBM      busy            dispatches travel, places compute
    wait for the slowest     other lanes     rows travel back
    collect, after           busy
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from services.simulator.costing import Costing, Visit
from services.simulator.model import Loss, SimPod, SimStation, Workload
from services.simulator.routed import Routed
from services.simulator.tally import Outcome, Parts, Tally

WARM_UP: Final = 0.2  # of the tokens: lanes need a while to spread over the layers
_START, _DISPATCH, _ARRIVED, _COLLECT = range(4)
_NEVER: Final = 1 << 62

_Sent: TypeAlias = tuple[int, int, int, int, int]  # arrival, place, nanoseconds, experts, rows


def simulate(
    pod: SimPod, routed: Routed, work: Workload, *, losses: Iterable[Loss] = (), seed: int = 0
) -> Outcome:
    """Play `work` on `pod`; equal arguments give equal results."""
    tally = Simulation(pod, routed, work, losses=losses, seed=seed).run()
    return tally.outcome(pod, streams=work.streams, layers=routed.layers)


@dataclass(slots=True)
class _Stream:
    """One sequence: where it is in the trace and in its request. answer_left < 0: without end."""

    position: int
    prompt_left: int = 0
    answer_left: int = 0
    arrived_ns: int = 0
    emitted_ns: int = -1


@dataclass(slots=True)
class _Lane:
    """Streams that walk together, and how far their step is."""

    streams: list[_Stream]
    batch: list[tuple[_Stream, int]] = field(default_factory=list)  # a stream and its tokens
    tokens: int = 0
    routed: Routed | None = None  # by which `visits` were found
    growth: float = 1.0  # of the Station's work, for so many tokens
    layer: int = 0
    visits: list[list[Visit]] = field(default_factory=list)
    parts: Parts = field(default_factory=Parts)
    began_ns: int = 0
    free_ns: int = 0  # when the Station had nothing left to do for the layer but wait
    replies: int = 0
    reply_bytes: int = 0
    first_reply_ns: int = 0
    cold: int = 0  # experts that were on their way when their place was lost


class _Nanos:
    """The Station's figures in nanoseconds."""

    def __init__(self, station: SimStation) -> None:
        self.before = round(station.serial_us * station.before_share * 1000)
        self.after = round(station.serial_us * 1000) - self.before
        self.shared = round(station.shared_us * 1000)
        self.post = round(station.post_us * 1000)
        self.collect = round(station.collect_us * 1000)
        self.rest = round(station.rest_us * 1000)
        self.cold = round(station.cold_us * 1000)
        self.detect = round(station.detect_us * 1000)
        self.per_byte = 1e9 / station.link_bytes_per_s


class Simulation:
    """One run; `run` plays it to its end."""

    def __init__(
        self, pod: SimPod, routed: Routed, work: Workload, *, losses: Iterable[Loss], seed: int
    ) -> None:
        """The routing has the places of the pod, in its order; a place is lost at most once."""
        assert routed.assignment.places == len(pod.places), "a routing over another pod's places"
        self._pod = pod
        self._routed = routed
        self._work = work
        self._rng = np.random.default_rng(seed)
        self._costing = Costing(pod, self._rng)
        self._nanos = _Nanos(pod.station)
        self._tally = Tally(len(pod.places))
        self._events: list[tuple[int, int, int, _Lane]] = []
        self._order = 0
        self._emitted = 0
        self._request_ns = 0
        self._station_ns = 0
        self._out_ns = 0
        self._in_ns = 0
        self._free_ns = [0] * len(pod.places)
        self._lost_ns = [_NEVER] * len(pod.places)
        self._losses = deque(sorted(losses, key=lambda loss: loss.at_s))
        self._heirs = deque(sorted(self._losses, key=lambda loss: loss.at_s + loss.rehome_s))
        for loss in self._losses:
            self._lost_ns[loss.place] = round(loss.at_s * 1e9)
        self._is_station = [place.is_station for place in pod.places]
        self._is_remote = [place.is_remote for place in pod.places]
        self._wire_ns = [round(place.wire_us * 1000) for place in pod.places]
        self._row_bytes = pod.station.activation_bytes
        self._row_ns = self._row_bytes * self._nanos.per_byte
        self._cores = [0] * (pod.station.cores or 0)

    def run(self) -> Tally:
        """Play until the streams have their tokens, or the time is over."""
        work = self._work
        starts = self._rng.integers(0, self._routed.tokens, work.streams).tolist()
        streams = [_Stream(start) for start in starts]
        for lane in range(work.lanes):
            self._push(0, _START, _Lane(streams[lane :: work.lanes]))
        if work.seconds is not None:
            self._play(round(work.seconds * 1e9), _NEVER)
            self._tally.ended_ns = round(work.seconds * 1e9)
            return self._tally
        # whole rounds: lanes that walk in step would else have half a token ready at the restart
        warm = max(1, round(work.tokens * WARM_UP))
        wanted = work.tokens * work.streams
        self._play(_NEVER, warm * work.streams)
        self._tally.restart(self._station_ns)
        self._play(_NEVER, wanted)
        self._tally.ended_ns = self._station_ns
        return self._tally

    def _play(self, end_ns: int, wanted: int) -> None:
        events = self._events
        while self._emitted < wanted and events[0][0] <= end_ns:
            now, _, kind, lane = heapq.heappop(events)
            if kind == _DISPATCH:
                self._dispatch(lane, now)
            elif kind == _COLLECT:
                self._collect(lane, now)
            elif kind == _ARRIVED:
                self._cross_link(lane, now)
            else:
                self._start(lane, now)

    def _push(self, at_ns: int, kind: int, lane: _Lane) -> None:
        self._order += 1  # lanes that are ready at the same time go in turn
        heapq.heappush(self._events, (at_ns, self._order, kind, lane))

    def _start(self, lane: _Lane, now: int) -> None:
        """Gather a step's tokens; a lane whose streams all wait for requests sleeps."""
        self._reroute(now)
        budget = self._work.prefill_tokens
        lane.batch = []
        for stream in lane.streams:
            if not stream.answer_left and not stream.prompt_left:
                self._ask(stream, now)
            if stream.arrived_ns > now:
                continue
            count = min(stream.prompt_left, budget) if stream.prompt_left else 1
            budget -= count if stream.prompt_left else 0
            if count:
                lane.batch.append((stream, count))
        if not lane.batch:
            self._push(min(stream.arrived_ns for stream in lane.streams), _START, lane)
            return
        self._route(lane)
        lane.growth = 1 + (lane.tokens - 1) * self._pod.station.token_share
        lane.layer = 0
        lane.began_ns = now
        lane.parts = Parts()
        self._dispatch(lane, now)

    def _route(self, lane: _Lane) -> None:
        """Which places the step's tokens ask, as things are now."""
        spans = [np.arange(stream.position, stream.position + n) for stream, n in lane.batch]
        tokens = np.concatenate(spans) % self._routed.tokens
        lane.visits = self._costing.layers(self._routed.visits(tokens), self._routed.layers)
        lane.tokens = len(tokens)
        lane.routed = self._routed

    def _ask(self, stream: _Stream, now: int) -> None:
        """The stream's next request: at once, or when the next one happens to arrive."""
        stream.prompt_left = self._work.prompt_tokens
        stream.answer_left = self._work.answer_tokens or -1
        stream.arrived_ns = now
        stream.emitted_ns = -1
        if self._work.arrivals_per_s:
            self._request_ns += round(self._rng.exponential(1e9 / self._work.arrivals_per_s))
            stream.arrived_ns = self._request_ns

    def _reroute(self, now: int) -> None:
        """Losses and new homes take effect at the next layer of a lane."""
        while self._losses and round(self._losses[0].at_s * 1e9) <= now:
            self._routed = self._routed.without(self._losses.popleft().place)
        while self._heirs and round((self._heirs[0].at_s + self._heirs[0].rehome_s) * 1e9) <= now:
            lost = self._heirs.popleft().place
            heirs = [heir for heir in self._pod.heirs(lost) if self._lost_ns[heir] > now]
            still_lost = [place for place, at in enumerate(self._lost_ns) if at <= now]
            if heirs:
                self._routed = self._routed.rehomed(
                    lost, np.array(heirs, np.int64), still_lost=still_lost
                )

    def _dispatch(self, lane: _Lane, ready: int) -> None:
        """The Station's first half of a layer."""
        nanos, tally, lost_ns = self._nanos, self._tally, self._lost_ns
        begin = max(ready, self._station_ns)
        if self._losses or self._heirs:
            self._reroute(begin)
        if lane.routed is not self._routed:
            self._route(lane)
        before = round(nanos.before * lane.growth)
        local = round(nanos.shared * lane.growth)
        posted = begin + before
        cold = 0
        sent: list[_Sent] = []
        for place, cost_ns, experts, rows in lane.visits[lane.layer]:
            tally.experts += experts
            tally.rows += rows
            if self._is_station[place]:
                local += cost_ns
                tally.busy_ns[place] += cost_ns
            elif posted >= lost_ns[place]:
                cold += experts
            else:
                posted += nanos.post
                arrival = posted
                if self._is_remote[place]:
                    # each token's activation crosses once per place
                    tokens = rows if rows < lane.tokens else lane.tokens
                    span = int(tokens * self._row_ns)
                    arrival = (self._out_ns if self._out_ns > posted else posted) + span
                    self._out_ns = arrival
                    tally.out_ns += span
                sent.append((arrival, place, cost_ns, experts, rows))
        lane.free_ns = self._station_ns = posted + local + cold * nanos.cold
        tally.station_ns += self._station_ns - begin
        tally.cold_experts += cold
        parts = lane.parts
        parts.queue_ns += begin - ready
        parts.serial_ns += before
        parts.message_ns += posted - begin - before
        parts.local_ns += local
        parts.cold_ns += cold * nanos.cold
        self._serve(lane, sent)

    def _serve(self, lane: _Lane, sent: Sequence[_Sent]) -> None:
        """Queue the dispatches at their places, and remember the slowest answer."""
        free_ns, tally = self._free_ns, self._tally
        done, slowest, first = lane.free_ns, -1, _NEVER
        reply_bytes = 0
        lane.cold = 0
        for arrival, place, cost_ns, experts, rows in sent:
            busy = max(0, cost_ns - self._wire_ns[place])
            start = free_ns[place] if free_ns[place] > arrival else arrival
            if self._cores:
                start = self._take_core(start, busy, lane.free_ns)
            free_ns[place] = start + busy
            tally.busy_ns[place] += busy
            tally.dispatches += 1
            back = start + cost_ns
            if back > self._lost_ns[place]:  # lost with our rows in hand
                back = max(arrival, self._lost_ns[place] + self._nanos.detect)
                lane.cold += experts
            elif self._is_remote[place]:
                reply_bytes += rows * self._row_bytes
                first = back if back < first else first
                back += int(rows * self._row_ns)
            if back > done:
                done, slowest = back, place
        if slowest >= 0:
            lane.parts.waits[slowest] = lane.parts.waits.get(slowest, 0) + done - lane.free_ns
        lane.replies = len(sent)
        lane.reply_bytes, lane.first_reply_ns = reply_bytes, first
        self._push(done, _ARRIVED if reply_bytes else _COLLECT, lane)

    def _take_core(self, start: int, busy: int, station_done: int) -> int:
        """When a place on the Station's own host gets a core; the last one is the Station's."""
        cores = self._cores
        cores[-1] = max(cores[-1], station_done)
        index = min(range(len(cores)), key=cores.__getitem__)
        begin = max(start, cores[index])
        cores[index] = begin + busy
        return begin

    def _cross_link(self, lane: _Lane, now: int) -> None:
        """The last reply would be here now if it had the link for itself: when all of them are.

        The link carries the replies of all lanes, one after the other, from the first one on.
        """
        span = round(lane.reply_bytes * self._nanos.per_byte)
        self._tally.in_ns += span
        self._in_ns = max(self._in_ns, lane.first_reply_ns) + span
        ready = max(now, self._in_ns)
        lane.parts.link_ns += ready - now
        self._push(ready, _COLLECT, lane)

    def _collect(self, lane: _Lane, ready: int) -> None:
        """The Station's second half of a layer, and of the last layer the end of the step."""
        nanos, parts = self._nanos, lane.parts
        begin = max(ready, self._station_ns)
        after = round(nanos.after * lane.growth)
        now = begin + lane.replies * nanos.collect + lane.cold * nanos.cold + after
        lane.layer += 1
        self._tally.cold_experts += lane.cold
        parts.queue_ns += begin - ready
        parts.message_ns += lane.replies * nanos.collect
        parts.cold_ns += lane.cold * nanos.cold
        parts.serial_ns += after
        if lane.layer < len(lane.visits):
            self._push(now, _DISPATCH, lane)
        else:
            rest = round(nanos.rest * lane.growth)
            now += rest
            parts.rest_ns += rest
            self._finish(lane, now)
            self._push(now, _START, lane)
        self._station_ns = now
        self._tally.station_ns += now - begin

    def _finish(self, lane: _Lane, now: int) -> None:
        """The step's tokens: decoded ones, and the first of every prompt that is now read."""
        tally = self._tally
        decoded = 0
        for stream, count in lane.batch:
            stream.position += count
            if stream.prompt_left:
                stream.prompt_left -= count
                tally.prompt_tokens += count
                if stream.prompt_left:
                    continue
                tally.first_token_ns.append(now - stream.arrived_ns)
            else:
                decoded += 1
                since = lane.began_ns if stream.emitted_ns < 0 else stream.emitted_ns
                tally.token_ns.append(now - since)
            stream.answer_left -= 1 if stream.answer_left > 0 else 0
            stream.emitted_ns = now
            tally.emitted_ns.append(now)
            self._emitted += 1
        tally.add_step(lane.parts, decoded)
