"""Small traces for tests: random ids, drawn from a seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.routing.format import TraceMeta
from services.routing.trace import Trace
from shared.core.shape import ExpertShape, ModelShape

SHAPE = ModelShape(
    layers=4, first_moe_layer=1, experts=24, top_k=4, expert=ExpertShape(latent=32, width=16)
)
RECORDING = "0123456789abcdef"


def ids_of(tokens: int, *, seed: int = 0, shape: ModelShape = SHAPE) -> np.ndarray:
    """Random choices: uint16 [tokens, layers, top_k], distinct within a token and layer."""
    rng = np.random.default_rng(seed)
    keys = rng.random((tokens, len(shape.moe_layers), shape.experts))
    return np.argsort(keys, axis=-1)[..., : shape.top_k].astype(np.uint16)


def trace_of(lengths: Sequence[int], *, seed: int = 0, digest: str = "m" * 8) -> Trace:
    """Requests of these lengths."""
    return Trace(
        model_digest=digest,
        first_layer=SHAPE.first_moe_layer,
        experts=SHAPE.experts,
        request=np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        step=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        ids=ids_of(sum(lengths), seed=seed),
    )


def meta_of(trace: Trace, **changes: object) -> TraceMeta:
    """Metadata of a recorded trace."""
    fields = {
        "model_digest": trace.model_digest,
        "first_layer": trace.first_layer,
        "layers": trace.layers,
        "experts": trace.experts,
        "top_k": trace.top_k,
        "source": "recorded",
        "created_s": 1_800_000_000,
        "recording": RECORDING,
    }
    return TraceMeta(**{**fields, **changes})


def same(one: Trace, other: Trace) -> bool:
    """Whether all arrays and names are equal."""
    return one.digest == other.digest and all(
        np.array_equal(getattr(one, name), getattr(other, name))
        and getattr(one, name).dtype == getattr(other, name).dtype
        for name in ("request", "step", "ids")
    )
