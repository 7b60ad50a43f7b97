"""Parses the headers of one checkpoint, those that repeat only once.

In the release a layer is a shard, and the headers of two layers of one kind differ in nothing but
the layer's number: of 96 headers about ten are different. A repetition is proved byte for byte, so
it is exactly as sound as the header that was parsed. Must not know files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from services.census.ledger import ShardLedger, shard_ledger
from services.census.names import digest, names_text
from station.model.safetensors_header import HeaderText, parse_header
from station.model.tensor_table import PREFIX

_KNOWN_MAX: Final = 32
_LAYERS: Final = f"{PREFIX}model.layers."
_OWN_LAYER: Final = re.compile(b'"' + re.escape(_LAYERS).encode() + rb"(0|[1-9]\d{0,4})\.")


@dataclass(frozen=True, slots=True)
class Parsed:
    """One shard's accounts and the digest of its tensors' names."""

    ledger: ShardLedger
    names_digest: str


class _Pattern:
    """A text in which a layer's number can be exchanged for another with as many digits."""

    def __init__(self, text: bytes | bytearray, token: bytes, number: bytes) -> None:
        """`token` is what the number follows wherever it counts, up to the dot behind it."""
        whole = token + number + b"."
        between = np.fromiter(map(len, text.split(whole)), np.int64)[:-1]
        starts = np.cumsum(between + len(whole)) - len(whole) + len(token)
        self.occurrences = len(starts)
        self._places = starts[:, None] + np.arange(len(number))
        self._text = bytearray(text)
        self._bytes = np.frombuffer(self._text, np.uint8)

    def for_layer(self, number: bytes) -> bytearray:
        """The text for another layer; valid until the next call."""
        self._bytes[self._places] = np.frombuffer(number, np.uint8)
        return self._text


@dataclass(frozen=True, slots=True)
class _Known:
    """A parsed header whose every tensor belongs to one layer."""

    header: _Pattern
    names: _Pattern
    ledger: ShardLedger

    def repeated(self, text: bytes | bytearray, number: bytes) -> Parsed | None:
        """The accounts of `text`, if it is this header for layer `number`."""
        if self.header.for_layer(number) != text:
            return None
        (part,) = self.ledger.layers.values()
        ledger = replace(self.ledger, layers={int(number): part})
        return Parsed(ledger, digest(self.names.for_layer(number)))


class HeaderParser:
    """Parses headers and remembers those that may come again."""

    def __init__(self) -> None:
        """A parser that knows nothing yet."""
        self._known: dict[tuple[int, int, int], _Known] = {}

    def parse(self, header: HeaderText) -> Parsed:
        """Accounts of one shard; CheckpointError as `parse_header`."""
        own = _OWN_LAYER.search(header.text)
        if own is None:
            return _parse(header)[0]
        key = (len(header.text), header.payload_bytes, len(own[1]))
        known = self._known.get(key)
        parsed = known.repeated(header.text, own[1]) if known is not None else None
        if parsed is not None:
            return parsed
        parsed, names = _parse(header)
        if len(self._known) < _KNOWN_MAX or key in self._known:
            known = _remembered(header, own[1], names, parsed.ledger)
            if known is not None:
                self._known[key] = known
        return parsed


def _parse(header: HeaderText) -> tuple[Parsed, list[str]]:
    table = parse_header(header)
    return Parsed(shard_ledger(table), digest(names_text(table.names))), table.names


def _remembered(
    header: HeaderText, number: bytes, names: list[str], ledger: ShardLedger
) -> _Known | None:
    """None when another layer's shard could not be told from this one by its number alone."""
    prefix = f"{_LAYERS}{number.decode()}."
    # A backslash could spell the layer's number in a way that the pattern does not see.
    if b"\\" in header.text or not all(name.startswith(prefix) for name in names):
        return None
    header_pattern = _Pattern(header.text, f'"{_LAYERS}'.encode(), number)
    names_pattern = _Pattern(names_text(names), _LAYERS.encode(), number)
    if not len(names) == header_pattern.occurrences == names_pattern.occurrences:
        return None
    return _Known(header_pattern, names_pattern, ledger) if len(ledger.layers) == 1 else None
