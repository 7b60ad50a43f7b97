"""Synthetic routing with named parameters: what a workload looks like to a planner.

Theory. A model has, per layer, a popularity law over its experts (Zipf with an offset and a cold
tail, on experts in random order) and clusters of experts that tokens tend to use together. Traffic
is made of requests; a request has topics, each of which favours some clusters, and switches between
them; every token has a few active clusters per layer. Expert weights multiply, and a token draws
its experts without replacement in proportion (see popularity.py). Everything follows from the seed:
the model's structure from the seed alone, the draws also from `traffic`, so that a plan can be made
on one traffic of a model and tried on another.

FITTED meets the original plan's table of policies; see its own comment for what that means.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from services.routing import popularity
from services.routing.popularity import Weights
from services.routing.trace import SYNTHETIC, Counts, Ids, Trace
from shared.core.errors import TraceError
from shared.core.shape import K3, ModelShape

Progress: TypeAlias = Callable[[int, int], None]  # (layers done, layers in all)

_BLOCK_TOKENS: Final = 512  # x 896 experts x 8 bytes stays in a core's cache
_FIT_TOPICS: Final = 32
_EXPERTS_MAX: Final = 2**16 - 1  # ids are 16 bits wide
_ID_BITS: Final = np.uint64(16)
_ID_MASK: Final = np.uint64(2**16 - 1)
_STRUCTURE, _SHIFT, _TRAFFIC = range(3)  # independent streams of one seed


def _range(low: float, high: float, description: str) -> Meta:
    return Meta(ge=low, le=high, description=description)


class SynthParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a synthetic trace is made of; each field says what it means.

    Weights are relative; boosts, penalties and deviations are natural logarithms of weights. The
    defaults are FITTED.
    """

    zipf_exponent: Annotated[
        float, _range(0.0, 8.0, "popularity law: a weight is (rank + offset) ^ -exponent")
    ] = 0.93
    zipf_offset: Annotated[float, _range(0.5, 1e6, "popularity law: how flat the top is")] = 14.0
    zipf_spread: Annotated[
        float, _range(0.0, 1.0, "a layer's exponent is drawn from exponent * (1 +- spread)")
    ] = 0.24
    cold_fraction: Annotated[
        float, _range(0.0, 1.0, "cold tail: share of a layer's experts that is rarer than the law")
    ] = 0.35
    cold_spread: Annotated[
        float, _range(0.0, 1.0, "a layer's cold share is drawn from fraction * (1 +- spread)")
    ] = 0.15
    cold_penalty: Annotated[
        float, _range(0.0, 20.0, "weights of the cold tail are divided by e ^ penalty")
    ] = 3.3
    clusters: Annotated[
        int, _range(1, 4096, "co-activation: groups of equal size that a layer's experts form")
    ] = 32
    clusters_active: Annotated[int, _range(0, 64, "clusters that a token favours in a layer")] = 2
    cluster_boost: Annotated[
        float, _range(0.0, 20.0, "weights of an active cluster are multiplied by e ^ boost")
    ] = 2.45
    topics: Annotated[int, _range(1, 4096, "topics of the whole workload")] = 4
    topics_per_request: Annotated[int, _range(1, 4096, "topics that one request is about")] = 2
    topic_tokens: Annotated[
        float, _range(1.0, 1e9, "mean tokens before a request turns to another of its topics")
    ] = 120.0
    topic_strength: Annotated[
        float, _range(0.0, 20.0, "deviation, over clusters, of what a topic favours")
    ] = 0.49
    length_spread: Annotated[float, _range(0.0, 4.0, "deviation of log(tokens of a request)")] = 0.5
    shift_kept: Annotated[
        float,
        _range(0.0, 1.0, "workload shift: share of a layer's top experts that stay at the top"),
    ] = 1.0
    shift_top: Annotated[
        float, _range(1e-4, 0.5, "share of a layer's experts that is its top, for shift_kept")
    ] = 9_558 / 82_432
    traffic: Annotated[
        int, _range(0, 2**31 - 1, "which traffic of the same model: other requests and draws")
    ] = 0


# Fitted, not measured: seven parameters (zipf_*, cold_fraction, cold_penalty, cluster_boost and
# topic_strength) were tuned (Nelder-Mead on 31 of the 92 layers, seed 0) until the four policies of
# the original plan cost what its table says, with the costs of the shipped pod. So the agreement of
# those four figures is by construction. That it holds for seeds that were not tuned on is not, and
# neither is anything else a planner finds on these traces. Expert path in ms, 4,705 tokens in 40
# requests, planned on the same trace:
#
#             contiguous  global  layer-balanced  cost-ranked  Spark touched (cost-ranked)
#   plan          38.6     31.1        30.4           27.7        73 %
#   seed 0        38.4     31.0        30.3           27.4        75 %
#   seed 1        38.4     31.1        30.5           27.5        76 %
#   seed 2        38.4     31.2        30.6           27.6        76 %
#   seed 3        38.3     31.0        30.5           27.4        75 %
#   seed 4        38.3     30.7        30.1           27.1        73 %
FITTED: Final = SynthParams()


def sized(params: SynthParams, shape: ModelShape) -> SynthParams:
    """The parameters for a model with fewer experts than Kimi-K3: clusters of the same size."""
    clusters = max(1, params.clusters * min(shape.experts, K3.experts) // K3.experts)
    active = min(params.clusters_active, clusters)
    return msgspec.structs.replace(params, clusters=clusters, clusters_active=active)


def describe(params: SynthParams) -> Sequence[tuple[str, float, str]]:
    """Name, value and meaning of every parameter, in order."""
    schema = msgspec.json.schema(SynthParams)["$defs"][SynthParams.__name__]["properties"]
    return [
        (name, getattr(params, name), schema[name]["description"])
        for name in params.__struct_fields__
    ]


@dataclass(frozen=True, slots=True)
class _Traffic:
    """What the tokens are about, the same in all layers."""

    request: npt.NDArray[np.int32]
    step: npt.NDArray[np.int32]
    topic: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's structure: weights [experts], cluster of each expert, topic x expert factors."""

    weights: Weights
    cluster: npt.NDArray[np.int64]
    topic_factor: npt.NDArray[np.float32]


def synthesize(
    params: SynthParams,
    *,
    requests: int,
    tokens: int,
    shape: ModelShape,
    seed: int,
    fit: Counts | None = None,
    progress: Progress | None = None,
) -> Trace:
    """A trace of `tokens` tokens in `requests` requests; equal arguments give equal traces.

    `fit` int64 [layers, experts]: popularity is taken from this histogram instead of the law, so
    that the trace's own histogram resembles it; structure still comes from the parameters.
    Memory beyond the trace is one block of tokens per core. TraceError when sizes do not fit.
    """
    layers = len(shape.moe_layers)
    _check_sizes(params, requests=requests, tokens=tokens, shape=shape, fit=fit)
    traffic = _traffic(params, requests, tokens, _rng(seed, _TRAFFIC, params.traffic))
    ids = np.empty((tokens, layers, shape.top_k), np.uint16)

    def draw(layer: int) -> None:
        rng = _rng(seed, _TRAFFIC, params.traffic, layer)
        structure = _structure(params, shape.experts, seed, layer)
        if fit is not None:
            weights = _fitted(params, structure, fit[layer], traffic, shape.top_k)
            structure = _Layer(weights, structure.cluster, structure.topic_factor)
        structure = _shift(params, structure, _rng(seed, _SHIFT, layer))
        _draw_layer(params, structure, traffic, ids[:, layer], rng)

    pool = ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="synth")
    try:
        # layers have streams of their own, so the order of threads changes nothing
        for done, _ in enumerate(pool.map(draw, range(layers)), start=1):
            if progress is not None:
                progress(done, layers)
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C waits for the layers begun, not for all
    return Trace(
        model_digest=SYNTHETIC,
        first_layer=shape.first_moe_layer,
        experts=shape.experts,
        request=traffic.request,
        step=traffic.step,
        ids=ids,
    )


def _rng(*key: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(key))


def _check_sizes(
    params: SynthParams, *, requests: int, tokens: int, shape: ModelShape, fit: Counts | None
) -> None:
    if not 1 <= requests <= tokens:
        raise TraceError(f"{requests} requests of {tokens} tokens: each needs a token or more")
    if shape.experts > _EXPERTS_MAX:
        raise TraceError(
            f"{shape.experts} experts in a layer: a trace holds {_EXPERTS_MAX} at most"
        )
    if shape.top_k > shape.experts:
        raise TraceError(f"a token cannot choose {shape.top_k} of {shape.experts} experts")
    if max(params.clusters, params.clusters_active) > shape.experts:
        raise TraceError(f"{params.clusters} clusters of {shape.experts} experts: lower clusters")
    if params.clusters_active > params.clusters:
        raise TraceError(
            f"{params.clusters_active} active of {params.clusters} clusters: lower clusters_active"
        )
    if params.topics_per_request > params.topics:
        raise TraceError(
            f"{params.topics_per_request} topics per request of {params.topics}: "
            "lower topics_per_request"
        )
    if fit is None:
        return
    expected = (len(shape.moe_layers), shape.experts)
    if fit.shape != expected:
        raise TraceError(f"the histogram is {fit.shape}, the model {expected} (layers, experts)")
    totals = fit.sum(axis=1)
    wrong = (fit.min(axis=1) < 0) | (totals <= 0) | (fit.max(axis=1) * shape.top_k > totals)
    if wrong.any():
        raise TraceError(
            f"the histogram of layer {shape.first_moe_layer + int(np.argmax(wrong))} is no count "
            f"of {shape.top_k} distinct experts per token: give one of `k3 trace histogram`"
        )


def _traffic(params: SynthParams, requests: int, tokens: int, rng: np.random.Generator) -> _Traffic:
    lengths = _lengths(params.length_spread, requests, tokens, rng)
    request = np.repeat(np.arange(requests, dtype=np.int32), lengths)
    starts = np.cumsum(lengths) - lengths
    step = (np.arange(tokens) - np.repeat(starts, lengths)).astype(np.int32)
    topic = np.empty(tokens, np.int64)
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        about = rng.permutation(params.topics)[: params.topics_per_request]
        switches = rng.random(length) < 1.0 / params.topic_tokens
        switches[0] = True
        stretch = np.cumsum(switches) - 1
        topic[start : start + length] = rng.choice(about, size=int(stretch[-1]) + 1)[stretch]
    return _Traffic(request, step, topic)


def _lengths(
    spread: float, requests: int, tokens: int, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Log-normal lengths that sum to `tokens`, each at least 1."""
    shares = np.exp(spread * rng.standard_normal(requests))
    edges = np.cumsum(shares) / shares.sum() * (tokens - requests)
    lengths: npt.NDArray[np.int64] = np.diff(np.rint(edges).astype(np.int64), prepend=0) + 1
    return lengths


def _structure(params: SynthParams, experts: int, seed: int, layer: int) -> _Layer:
    rng = _rng(seed, _STRUCTURE, layer)
    exponent = params.zipf_exponent * (1.0 + params.zipf_spread * rng.uniform(-1.0, 1.0))
    cold = params.cold_fraction * (1.0 + params.cold_spread * rng.uniform(-1.0, 1.0))
    weights = np.empty(experts)
    weights[rng.permutation(experts)] = popularity.zipf(
        experts,
        exponent=exponent,
        offset=params.zipf_offset,
        cold=min(1.0, cold),
        penalty=params.cold_penalty,
    )
    cluster = rng.permutation(experts) * params.clusters // experts
    taste = rng.standard_normal((params.topics, params.clusters)) * params.topic_strength
    return _Layer(weights, cluster, np.exp(taste).astype(np.float32)[:, cluster])


def _shift(params: SynthParams, layer: _Layer, rng: np.random.Generator) -> _Layer:
    weights = popularity.shifted(
        layer.weights, kept=params.shift_kept, top=params.shift_top, rng=rng
    )
    return _Layer(weights, layer.cluster, layer.topic_factor)


def _fitted(
    params: SynthParams, layer: _Layer, counts: Counts, traffic: _Traffic, k: int
) -> Weights:
    """Weights that make this traffic's tokens choose each expert as often as `counts` say.

    The most frequent topics stand for all, which bounds memory.
    """
    topics, seen = np.unique(traffic.topic, return_counts=True)
    frequent = np.argsort(-seen, kind="stable")[:_FIT_TOPICS]
    topics, seen = topics[frequent], seen[frequent]
    active = max(1, params.clusters_active)
    # clusters are dealt from a round, so that each is active in equally many contexts
    rounds = -(-params.clusters // active)
    dealt = np.arange(rounds * active).reshape(rounds, active) % params.clusters
    is_active = np.zeros((rounds, params.clusters), np.bool_)
    if params.clusters_active:
        np.put_along_axis(is_active, dealt, True, axis=1)
    boost = np.exp(params.cluster_boost * is_active).astype(np.float32)[:, layer.cluster]
    factors = (layer.topic_factor[topics][:, None] * boost[None]).reshape(-1, len(counts))
    contexts = np.repeat(seen / seen.sum() / rounds, rounds)
    return popularity.fit(counts / counts.sum(), factors, contexts, k)


def _draw_layer(
    params: SynthParams, layer: _Layer, traffic: _Traffic, out: Ids, rng: np.random.Generator
) -> None:
    """Fill out [N, top_k], best first: the experts with the smallest exponential / weight."""
    inverse = (1.0 / np.maximum(layer.weights * layer.topic_factor, 1e-30)).astype(np.float32)
    experts = np.arange(len(layer.weights), dtype=np.uint64)
    calm = np.float32(np.exp(-params.cluster_boost))
    top_k = out.shape[1]
    for start in range(0, len(out), _BLOCK_TOKENS):
        topic = traffic.topic[start : start + _BLOCK_TOKENS]
        keys = rng.standard_exponential((len(topic), len(experts)), dtype=np.float32)
        keys *= inverse[topic]
        if params.clusters_active:
            draws = rng.random((len(topic), params.clusters), dtype=np.float32)
            last = params.clusters_active - 1
            edge = np.partition(draws, last, axis=1)[:, last : last + 1]
            keys *= np.where(draws <= edge, calm, np.float32(1.0))[:, layer.cluster]
        # a positive float's bits order like the float: sort key and id as one number
        packed = keys.view(np.uint32).astype(np.uint64) << _ID_BITS | experts
        if top_k < len(experts):
            packed.partition(top_k - 1, axis=1)
        best = np.sort(packed[:, :top_k], axis=1) & _ID_MASK
        out[start : start + len(topic)] = best.astype(np.uint16)
