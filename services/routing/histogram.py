"""A routing histogram as a file: how often each expert was chosen, and of which trace.

Owns the JSON and its checks. Must not know who draws pictures or fits models with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

from services.routing.trace import Counts, Trace
from shared.core.errors import TraceError
from shared.core.shape import ExpertShape, ModelShape
from shared.io.files import read_file

_FILE_BYTES_MAX: Final = 64 * 2**20  # that of K3 takes less than a megabyte

Count = Annotated[int, Meta(ge=0, le=2**53)]


class Histogram(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`counts[l][e]`: tokens that chose expert e in model layer first_layer + l."""

    version: Literal[1] = 1
    model_digest: Annotated[str, Meta(min_length=1, max_length=128)]
    trace_digest: Annotated[str, Meta(max_length=128)]
    first_layer: Annotated[int, Meta(ge=0, lt=2**16)]
    top_k: Annotated[int, Meta(ge=1, le=64)]
    tokens: Annotated[int, Meta(ge=1, le=2**53)]
    counts: tuple[tuple[Count, ...], ...]

    @classmethod
    def of(cls, trace: Trace) -> Histogram:
        """The histogram of a trace."""
        return cls(
            model_digest=trace.model_digest,
            trace_digest=trace.digest,
            first_layer=trace.first_layer,
            top_k=trace.top_k,
            tokens=trace.tokens,
            counts=tuple(map(tuple, trace.histogram().tolist())),
        )

    def array(self) -> Counts:
        """Counts as int64 [layers, experts]."""
        return np.array(self.counts, np.int64)

    def shape(self) -> ModelShape:
        """The routed part of the model it is of; the size of an expert is not in a histogram."""
        return ModelShape(
            layers=self.first_layer + len(self.counts),
            first_moe_layer=self.first_layer,
            experts=len(self.counts[0]),
            top_k=self.top_k,
            expert=ExpertShape(latent=16, width=16),
        )


def read(path: Path) -> Histogram:
    """The histogram in a file; TraceError names the file and the defect."""
    try:
        histogram = msgspec.json.decode(read_file(path, bytes_max=_FILE_BYTES_MAX), type=Histogram)
    except OSError as error:
        raise TraceError(
            f"{path}: cannot read the histogram: {error.strerror}; make one with "
            "`k3 trace histogram FILE --out`"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(
            f"{path}: not a histogram: {error}; make one with `k3 trace histogram FILE --out`"
        ) from error
    widths = {len(row) for row in histogram.counts}
    if len(widths) != 1 or 0 in widths:
        raise TraceError(f"{path}: layers have different numbers of experts; make it again")
    return histogram


def lines(histogram: Histogram) -> Sequence[str]:
    """The shape of a histogram in a few lines: where the selections are."""
    counts = histogram.array()
    hottest = np.cumsum(np.sort(counts, axis=None)[::-1])
    by_layer = np.sort(counts, axis=1)[:, ::-1]
    tenth = max(1, counts.shape[1] // 10)
    share = by_layer[:, :tenth].sum(axis=1) / by_layer.sum(axis=1)
    first = histogram.first_layer

    def top(percent: int) -> str:
        reached = hottest[max(0, counts.size * percent // 100 - 1)] / hottest[-1]
        return f"hottest {percent:2d} % of the experts: {reached:.1%} of the selections"

    return (
        f"{hottest[-1]:,} selections by {histogram.tokens:,} tokens, {counts.shape[0]} layers x "
        f"{counts.shape[1]} experts",
        *map(top, (1, 10, 25, 50)),
        f"hottest tenth by layer: {share.min():.1%} (layer {first + int(share.argmin())}) to "
        f"{share.max():.1%} (layer {first + int(share.argmax())})",
        f"never chosen: {(counts == 0).sum():,} experts",
    )
