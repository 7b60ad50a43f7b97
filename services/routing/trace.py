"""A routing trace: which experts every token chose in every MoE layer. Pure arrays.

Owns the value, its checks, its histogram and the split by request. Must not know files, or what a
planner does with a trace.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from shared.core.errors import TraceError
from shared.core.shape import ModelShape

SYNTHETIC: Final = "synthetic"  # model digest of a trace that stands for any model of its shape

Ids: TypeAlias = npt.NDArray[np.uint16]
Counts: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Trace:
    """Routing of N tokens. Layer index l is model layer first_layer + l.

    request int32 [N]: which request a token belongs to; requests are contiguous runs, and a number
    names one request, though numbers need not be consecutive. step int32 [N]: position of the
    token in its request. ids uint16 [N, layers, top_k]: expert ids, in the router's order.
    """

    model_digest: str
    first_layer: int
    experts: int
    request: npt.NDArray[np.int32]
    step: npt.NDArray[np.int32]
    ids: Ids

    @property
    def tokens(self) -> int:
        """N."""
        return len(self.ids)

    @property
    def layers(self) -> int:
        """MoE layers."""
        return int(self.ids.shape[1])

    @property
    def top_k(self) -> int:
        """Experts per token and layer."""
        return int(self.ids.shape[2])

    @property
    def digest(self) -> str:
        """Hex digest of the contents: equal traces have equal digests, whatever file holds them."""
        from blake3 import blake3

        head = (self.model_digest, self.first_layer, self.experts, *self.ids.shape)
        hasher = blake3(msgspec.json.encode(head))
        hasher.update(self.request.astype("<i4").tobytes())
        hasher.update(self.step.astype("<i4").tobytes())
        hasher.update(self.ids.astype("<u2").tobytes())
        return hasher.hexdigest()

    def histogram(self) -> Counts:
        """How many tokens chose each expert: int64 [layers, experts]."""
        counts = np.empty((self.layers, self.experts), np.int64)
        for layer in range(self.layers):
            counts[layer] = np.bincount(self.ids[:, layer].reshape(-1), minlength=self.experts)
        return counts

    def starts(self) -> npt.NDArray[np.int64]:
        """Index of the first token of each request, in order."""
        if not self.tokens:
            return np.empty(0, np.int64)
        return np.concatenate([[0], np.flatnonzero(np.diff(self.request)) + 1])

    def select(self, tokens: npt.NDArray[np.bool_]) -> Trace:
        """The tokens whose mask is true; requests keep their numbers."""
        return replace(
            self, request=self.request[tokens], step=self.step[tokens], ids=self.ids[tokens]
        )


def check(trace: Trace, *, source: str = "trace") -> None:
    """What every other module relies on; TraceError names `source` and the first defect."""
    defect = _defect(trace)
    if defect is not None:
        raise TraceError(f"{source}: {defect}; record or make it again")


def check_model(trace: Trace, model_digest: str, shape: ModelShape, *, source: str) -> None:
    """TraceError unless the trace is of this model; a synthetic one need only have its shape."""
    expected = (shape.first_moe_layer, len(shape.moe_layers), shape.experts, shape.top_k)
    found = (trace.first_layer, trace.layers, trace.experts, trace.top_k)
    if found != expected:
        raise TraceError(
            f"{source}: routes {_words(found)}, the model has {_words(expected)}: "
            "give a trace of this model"
        )
    if trace.model_digest not in (SYNTHETIC, model_digest):
        raise TraceError(
            f"{source}: recorded from model {trace.model_digest[:16]}, this one is "
            f"{model_digest[:16]}: record a trace of this model, or make a synthetic one with "
            "`k3 trace synth`"
        )


def split_requests(trace: Trace, fraction: float, seed: int) -> tuple[Trace, Trace]:
    """Two traces that share no request; the first has about `fraction` of the tokens.

    Requests are drawn in an order that depends on `seed` alone, and whole: neighbouring tokens of
    one request resemble each other, so a split by token would let a plan see its own test. Both
    parts get at least one request; TraceError when there is only one, or `fraction` is not
    strictly between 0 and 1.
    """
    if not 0.0 < fraction < 1.0:
        raise TraceError(f"cannot split at {fraction}: give a fraction between 0 and 1")
    starts = trace.starts()
    if len(starts) < 2:
        raise TraceError(
            f"cannot split a trace of {len(starts)} request(s): a split is by request, record more"
        )
    lengths = np.diff(starts, append=trace.tokens)
    order = np.random.default_rng(seed).permutation(len(starts))
    totals = np.cumsum(lengths[order])[:-1]  # the second part keeps at least one
    count = int(np.argmin(np.abs(totals - fraction * trace.tokens))) + 1
    is_first = np.zeros(len(starts), np.bool_)
    is_first[order[:count]] = True
    tokens = np.repeat(is_first, lengths)
    return trace.select(tokens), trace.select(~tokens)


def _defect(trace: Trace) -> str | None:
    if trace.ids.ndim != 3 or 0 in trace.ids.shape[1:]:
        return f"ids have the shape {trace.ids.shape}, not [tokens, layers, top_k]"
    if not len(trace.request) == len(trace.step) == trace.tokens:
        return (
            f"{len(trace.request)} request numbers and {len(trace.step)} steps "
            f"for {trace.tokens} tokens"
        )
    if not trace.tokens:
        return "no token in it"
    if not trace.top_k <= trace.experts:
        return f"{trace.top_k} experts per token of {trace.experts} in all"
    if int(trace.ids.max()) >= trace.experts:
        token, layer, _ = np.argwhere(trace.ids >= trace.experts)[0]
        return (
            f"token {token} chose an expert beyond the {trace.experts} of "
            f"layer {trace.first_layer + layer}"
        )
    if (at := _repeat(trace.ids)) is not None:
        return f"token {at[0]} chose one expert twice in layer {trace.first_layer + at[1]}"
    runs = trace.request[trace.starts()]
    if len(np.unique(runs)) != len(runs):
        return "the tokens of a request are not together"
    if int(trace.step.min()) < 0:
        return "a step is negative"
    same = trace.request[1:] == trace.request[:-1]
    if (trace.step[1:][same] <= trace.step[:-1][same]).any():
        return "the steps of a request do not rise"
    return None


def _repeat(ids: Ids) -> tuple[int, int] | None:
    """Token and layer of the first choice that repeats an expert; layer by layer, for memory."""
    for layer in range(ids.shape[1]):
        ordered = np.sort(ids[:, layer], axis=-1)
        wrong = (ordered[:, 1:] == ordered[:, :-1]).any(axis=-1)
        if wrong.any():
            return int(np.argmax(wrong)), layer
    return None


def _words(sizes: tuple[int, int, int, int]) -> str:
    first, layers, experts, top_k = sizes
    return f"{top_k} of {experts} experts in {layers} layers from layer {first}"
