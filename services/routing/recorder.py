"""Records what a running Station routes: the stream of `/k3/routing` into rotating files.

Owns the numbering of requests, the end of a recording and its summary. Must not know argument
parsing or printing. What the Station's queue could not hold is in the summary and in the files.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, assert_never

import httpx
import msgspec
import numpy as np

from services.pod.endpoint import PodRefused, check_answer, transport_errors
from services.routing.format import LossTotals, Records, TraceMeta
from services.routing.rotation import RotatingWriter, Rotation
from shared.core.errors import RemoteProtocolError
from shared.core.routing_wire import (
    CONTENT_TYPE,
    FrameReader,
    Message,
    Opened,
    Pass,
    Totals,
    pass_ids,
)
from shared.core.shape import ModelShape

IDLE_S: Final = 10.0  # the Station speaks every second
REQUESTS_MAX: Final = 4096  # request names remembered; a Station runs 64 at once

End: TypeAlias = Literal["seconds", "tokens", "interrupted", "station stopped"]


class Recording(msgspec.Struct, frozen=True):
    """What a recording came to; `k3 trace record --json` prints it."""

    model_digest: str
    tokens: int
    requests: int
    seconds: float
    ended: End
    files: tuple[str, ...]
    files_dropped: int
    tokens_dropped: int
    tokens_incomplete: int


@dataclass(frozen=True, slots=True)
class Limits:
    """When a recording ends by itself; None: never."""

    seconds: float | None = None
    tokens: int | None = None


def record(
    client: httpx.Client,
    rotation: Rotation,
    limits: Limits,
    *,
    recording: str,
    created_s: int,
    clock_s: Callable[[], float],
    progress: Callable[[int, LossTotals], None],
) -> Recording:
    """Record until a limit, Ctrl-C or the end of the Station; what came is always in the files.

    `recording` is 16 hex digits that no other recording has. `progress` hears of the beginning,
    then about every second: tokens so far, and what was lost. PodUnreachable, PodRefused,
    RemoteProtocolError or TraceError end it early, with all files closed.
    """
    plain = {"accept-encoding": "identity"}  # frames, not what a proxy makes of them
    with (
        transport_errors(str(client.base_url)),
        client.stream("GET", "/k3/routing", headers=plain) as response,
    ):
        check_answer(response)
        if response.headers.get("content-type") != CONTENT_TYPE:
            raise PodRefused(f"{client.base_url} does not answer like a Station: is it a pod?")
        messages = _messages(response)
        opened = next(messages, None)
        if not isinstance(opened, Opened):
            raise RemoteProtocolError("the routing stream does not begin with its head")
        writer = RotatingWriter(rotation, _meta(opened, recording, created_s))
        with closing(writer):
            session = _Session(writer, opened, limits, clock_s)
            progress(0, LossTotals())
            ended = session.run(messages, progress)
    return session.summary(ended)


class _Session:
    """A recording while it runs."""

    def __init__(
        self,
        writer: RotatingWriter,
        opened: Opened,
        limits: Limits,
        clock_s: Callable[[], float],
    ) -> None:
        self._writer = writer
        self._opened = opened
        self._limits = limits
        self._clock_s = clock_s
        self._began_s = clock_s()
        self._numbers = RequestNumbers()
        self._losses = LossTotals()
        self._tokens = 0

    def run(self, messages: Iterator[Message], progress: Callable[[int, LossTotals], None]) -> End:
        """Write what comes, until the end."""
        limits = self._limits
        try:
            for message in messages:
                match message:
                    case Pass():
                        self._keep(message)
                    case Totals():
                        self._losses = LossTotals(message.dropped, message.incomplete)
                        self._writer.note(self._losses)
                        self._writer.flush()
                        progress(self._tokens, self._losses)
                    case Opened():
                        raise RemoteProtocolError("the routing stream has two heads")
                    case _:
                        assert_never(message)
                if limits.tokens is not None and self._tokens >= limits.tokens:
                    return "tokens"
                if limits.seconds is not None and self._elapsed_s() >= limits.seconds:
                    return "seconds"
        except KeyboardInterrupt:
            return "interrupted"
        return "station stopped"

    def summary(self, ended: End) -> Recording:
        """What it came to; after the writer was closed."""
        return Recording(
            model_digest=self._opened.model_digest,
            tokens=self._tokens,
            requests=self._numbers.count,
            seconds=round(self._elapsed_s(), 3),
            ended=ended,
            files=tuple(str(path) for path in self._writer.paths if path.exists()),
            files_dropped=self._writer.files_dropped,
            tokens_dropped=self._losses.dropped,
            tokens_incomplete=self._losses.incomplete,
        )

    def _elapsed_s(self) -> float:
        return self._clock_s() - self._began_s

    def _keep(self, message: Pass) -> None:
        records = _records(message, self._opened.shape, self._numbers.of(message.request))
        if self._limits.tokens is not None:
            records = records[: self._limits.tokens - self._tokens]
        self._tokens += len(records)
        self._writer.add(records)


class RequestNumbers:
    """Numbers for the Station's request names, in order of appearance; a bounded memory."""

    def __init__(self, remembered_max: int = REQUESTS_MAX) -> None:
        """No name is known yet."""
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._remembered_max = remembered_max
        self.count = 0

    def of(self, name: str) -> int:
        """The name's number; a new one when it was not heard of lately."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = self.count
            self.count += 1
            if len(self._numbers) > self._remembered_max:
                self._numbers.popitem(last=False)
        self._numbers.move_to_end(name)
        return number


def _messages(response: httpx.Response) -> Iterator[Message]:
    reader = FrameReader()
    for data in response.iter_raw():
        yield from reader.feed(data)


def _meta(opened: Opened, recording: str, created_s: int) -> TraceMeta:
    return TraceMeta(
        model_digest=opened.model_digest,
        first_layer=opened.shape.first_moe_layer,
        layers=len(opened.shape.moe_layers),
        experts=opened.shape.experts,
        top_k=opened.shape.top_k,
        source="recorded",
        created_s=created_s,
        recording=recording,
    )


def _records(message: Pass, shape: ModelShape, number: int) -> Records:
    ids = pass_ids(message, shape)
    fields = [("request", "<i4"), ("step", "<i4"), ("ids", "<u2", ids.shape[1:])]
    records = np.empty(message.tokens, fields)
    records["request"] = number
    records["step"] = message.position + np.arange(message.tokens)
    records["ids"] = ids
    return records
