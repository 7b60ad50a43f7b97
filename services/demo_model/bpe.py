"""Training of the demonstration model's byte-pair vocabulary, and its tiktoken file.

Owns the merge loop and the file's format. The split pattern is the Station's (the same words must
be seen in training and in use). Deterministic: no random choice, ties go to the smaller bytes.
Must not know what the texts say.
"""

from __future__ import annotations

import base64
from collections import Counter, defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

import regex  # type: ignore[import-untyped]  # ships without annotations

from station.tokenizer.vocabulary import SPLIT_PATTERN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

RANK_COUNT = 1792  # + 256 special tokens = a vocabulary of 2,048

_Pair = tuple[bytes, bytes]


def count_words(texts: Iterable[tuple[str, int]]) -> Counter[str]:
    """Split each text as the tokenizer does and add up its words, each with the text's count."""
    pattern = regex.compile(SPLIT_PATTERN, flags=regex.V1)
    counts: Counter[str] = Counter()
    for text, count in texts:
        for match in pattern.finditer(text):
            counts[match.group()] += count
    return counts


def train_ranks(word_counts: Mapping[str, int], rank_count: int = RANK_COUNT) -> list[bytes]:
    """Return `rank_count` byte strings in rank order: the 256 bytes, then the merges.

    Each step merges the pair of neighbours with the highest count (Sennrich et al. 2016, on bytes).
    Returns fewer ranks when nothing is left to merge.
    """
    words = _Words(word_counts)
    ranks = [bytes([value]) for value in range(256)]
    known = set(ranks)
    while len(ranks) < rank_count and words.pair_counts:
        pair = min(words.pair_counts, key=lambda p: (-words.pair_counts[p], p))
        words.merge(pair)
        # Two different pairs can join to the same bytes; a rank must be unique.
        if pair[0] + pair[1] not in known:
            known.add(pair[0] + pair[1])
            ranks.append(pair[0] + pair[1])
    return ranks


def write_tiktoken(path: Path, ranks: Sequence[bytes]) -> None:
    """Write a tiktoken vocabulary: one line of base64 bytes and rank for each entry."""
    lines = (f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(ranks))
    path.write_text("".join(lines), encoding="ascii")


class _Words:
    """The words as lists of pieces, with the counts of all neighbour pairs kept up to date."""

    def __init__(self, word_counts: Mapping[str, int]) -> None:
        self.pair_counts: Counter[_Pair] = Counter()
        self._pieces: list[list[bytes]] = []
        self._counts: list[int] = []
        self._places: defaultdict[_Pair, set[int]] = defaultdict(set)
        for word, count in sorted(word_counts.items()):
            self._pieces.append([bytes([value]) for value in word.encode("utf-8")])
            self._counts.append(count)
            self._count(len(self._pieces) - 1, 1)

    def merge(self, pair: _Pair) -> None:
        """Join `pair` in every word that holds it."""
        for place in sorted(self._places[pair]):
            self._count(place, -1)
            self._pieces[place] = _join(self._pieces[place], pair)
            self._count(place, 1)

    def _count(self, place: int, sign: int) -> None:
        for pair in pairwise(self._pieces[place]):
            self.pair_counts[pair] += sign * self._counts[place]
            if sign > 0:
                self._places[pair].add(place)
            elif self.pair_counts[pair] == 0:
                del self.pair_counts[pair]
            if sign < 0:
                self._places[pair].discard(place)


def _join(pieces: Sequence[bytes], pair: _Pair) -> list[bytes]:
    joined: list[bytes] = []
    place = 0
    while place < len(pieces):
        if tuple(pieces[place : place + 2]) == pair:
            joined.append(pair[0] + pair[1])
            place += 2
        else:
            joined.append(pieces[place])
            place += 1
    return joined
