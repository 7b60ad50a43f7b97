"""Choosing the next token from logits: greedy, temperature, top-p.

A pure function of (logits, settings, random generator). The generator is derived from (seed,
position), so a request's tokens do not depend on what else the pod is doing, on retries or on how
sequences are grouped. Logits that are not finite are refused before they get here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_WORD = (1 << 64) - 1
_NUCLEUS_GUESSES = (64, 2048)  # most nuclei are small; sorting 163,840 logits takes 20 ms


def step_rng(seed: int, position: int) -> np.random.Generator:
    """The generator for one token: `seed` of the request, `position` of the token in it.

    Any integer is a seed (taken modulo 2**64). Philox is counter-based: nothing carries over.
    """
    key = np.array([seed & _WORD, position & _WORD], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def sample(logits: ArrayLike, temperature: float, top_p: float, rng: np.random.Generator) -> int:
    """The chosen token id. `logits` is f32 [V] (numpy or a CPU torch tensor), finite or -inf.

    `temperature` 0 takes the largest logit, the lowest id among equals, and draws nothing.
    Otherwise one uniform number is drawn and the token is taken from the smallest set of most
    likely tokens whose probabilities sum to at least `top_p` (equal ones by lowest id).
    """
    values = np.asarray(logits, dtype=np.float64)
    if temperature == 0.0:
        return int(np.argmax(values))
    weights = np.exp((values - values.max()) / temperature)
    if top_p >= 1.0:
        return _draw(weights, rng)
    order = _nucleus(weights, top_p)
    return int(order[_draw(weights[order], rng)])


def _nucleus(weights: NDArray[np.float64], top_p: float) -> NDArray[np.intp]:
    """Ids of the smallest most likely set that holds `top_p` of the weight, most likely first."""
    wanted = top_p * weights.sum()
    for guess in (*_NUCLEUS_GUESSES, weights.size):
        count = min(guess, weights.size)
        threshold = np.partition(weights, weights.size - count)[weights.size - count]
        candidates = np.flatnonzero(weights >= threshold)
        order = candidates[np.argsort(-weights[candidates], kind="stable")]
        cumulative = np.cumsum(weights[order])
        if cumulative[-1] >= wanted:
            break
    size = int(np.searchsorted(cumulative, wanted)) + 1
    return order[:size]


def _draw(weights: NDArray[np.float64], rng: np.random.Generator) -> int:
    """An index with probability proportional to its weight."""
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
    return min(index, weights.size - 1)
