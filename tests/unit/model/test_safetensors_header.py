"""The header's checks against an independent oracle, and within their limits."""

from __future__ import annotations

import contextlib
import json
import math
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from shared.core.errors import CheckpointError
from station.model.safetensors_file import SafetensorsFile
from station.model.safetensors_header import (
    DTYPE_BYTES,
    HEADER_BYTES_MAX,
    HeaderText,
    parse_header,
)

PATH = Path("x.safetensors")


def _text(rows: dict[str, Any], payload: int) -> HeaderText:
    return _header(json.dumps(rows, separators=(",", ":")).encode(), payload)


def _header(text: bytes, payload: int) -> HeaderText:
    return HeaderText(PATH, text, 8 + len(text) + payload)


def _row(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


SOUND: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a.weight_scale_2": _row("F32", [], 0, 4),
    "b": _row("BF16", [3, 2], 4, 16),
    "empty": _row("U8", [0, 4], 16, 16),
    "c.weight": _row("F8_E4M3", [5], 16, 21),
    "d": _row("U8", [2, 2], 21, 25),
}


def _oracle(text: bytes, payload: int) -> dict[str, tuple[str, tuple[int, ...], int, int]] | None:
    """The table by the letter of the format, with the standard library alone; None is unsound."""
    try:
        rows = json.loads(text.decode(errors="replace"))
        table: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        for name, row in rows.items():
            if name == "__metadata__":
                continue
            start, stop = row["data_offsets"]
            numbers = (*row["shape"], start, stop)
            if not all(type(n) is int and n >= 0 for n in numbers) or start > stop:
                return None
            if stop - start != math.prod(row["shape"]) * DTYPE_BYTES[row["dtype"]]:
                return None
            table[name] = (row["dtype"], tuple(row["shape"]), start, stop)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    end = 0
    for _, _, start, stop in sorted(table.values(), key=lambda entry: entry[2:]):
        if start != end:
            return None
        end = stop
    return table if end == payload else None


def _mutated(rng: random.Random, text: bytes) -> bytes:
    """One to three edits of the kinds that disks, downloads and attackers make."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text) + 1)
        kind = rng.randrange(6)
        if kind == 0:
            text = text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :]
        elif kind == 1:
            text = text[:at] + text[at + rng.randrange(1, 12) :]
        elif kind == 2:
            text = text[:at] + rng.choice(TOKENS) + text[at:]
        elif kind == 3:
            stop = rng.randrange(at, len(text) + 1)
            text = text[:at] + text[at:stop] * 2 + text[stop:]
        elif kind == 4:
            digits = [i for i, byte in enumerate(text) if 48 <= byte <= 57]
            if digits:
                at = rng.choice(digits)
                text = text[:at] + rng.choice([b"0", b"-1", b"9" * 20, b"7"]) + text[at + 1 :]
        else:
            text = text.replace(rng.choice(WORDS), rng.choice(WORDS), 1)
    return text


TOKENS = [
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"null",
    b"NaN",
    b"1e3",
    b"\\u0000",
    b"\xff",
    b" ",
]
WORDS = [b"F32", b"BF16", b"U8", b"F8_E4M3", b"I64", b"dtype", b"shape", b"data_offsets", b'"d"']


def test_twenty_thousand_damaged_headers() -> None:
    """A mutated header is a sound table, the same as an independent reader's, or one
    CheckpointError; nothing else ever comes out (reliability.md 7.7)."""
    rng = random.Random(7)
    sound = json.dumps(SOUND, separators=(",", ":")).encode()
    accepted = 0
    for _ in range(20_000):
        text = _mutated(rng, sound)
        found, complaint = _parsed(text)
        accepted += found is not None
        if found is None:
            assert "x.safetensors" in complaint
            assert complaint.endswith("fetch the file again")
        if found is not None or not _lenient(text):
            assert found == _oracle(text, 25), text
    assert 100 < accepted < 10_000


def _parsed(text: bytes) -> tuple[Any, str]:
    try:
        table = parse_header(_header(text, 25))
    except CheckpointError as error:
        return None, str(error)
    ends = (table.starts + table.lengths).tolist()
    found = {
        name: (*table.types[i], int(table.starts[i]), ends[i]) for i, name in enumerate(table.names)
    }
    return found, ""


def _lenient(text: bytes) -> bool:
    """The standard library reads NaN, lone surrogates and more, which JSON and we do not, and it
    does not look at a value that is repeated under the same key."""
    repeated: list[bool] = []

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        repeated.append(len(dict(found)) != len(found))
        return dict(found)

    with contextlib.suppress(ValueError):
        json.loads(text, object_pairs_hook=pairs)
    special = any(word in text for word in (b"NaN", b"\\u", b"1e"))
    return special or not text.isascii() or any(repeated)


def test_sound_table_comes_in_file_order() -> None:
    """Rows listed in any order are sorted by place; empty tensors keep theirs."""
    names = [name for name in SOUND if name != "__metadata__"]
    for seed in range(20):
        rows = list(SOUND.items())
        random.Random(seed).shuffle(rows)
        table = parse_header(_text(dict(rows), 25))
        assert table.names == names
        assert table.starts.tolist() == [0, 4, 16, 16, 21]
        assert table.lengths.tolist() == [4, 12, 0, 5, 4]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"b": _row("BF16", [3, 2], 3, 15)}, "tensor b lies at bytes 3..15 .* start at 4"),
        ({"b": _row("BF16", [3, 2], 5, 17)}, "tensor b lies at bytes 5..17 .* start at 4"),
        ({"a.weight_scale_2": _row("F32", [], -4, 0)}, "lies at bytes -4..0"),
        ({"b": _row("BF16", [3, -2], 4, 16)}, r"bad shape \[3, -2\]"),
        ({"b": _row("BF17", [3, 2], 4, 16)}, "tensor b has unknown dtype 'BF17'"),
        ({"b": _row("BF16", [3, 3], 4, 16)}, "tensor b holds 12 bytes, but BF16 .* needs 18"),
        ({"b": _row("BF16", [2**62, 2**62], 4, 16)}, "tensor b holds 12 bytes"),
        ({"b": _row("BF16", [10**4000] * 2, 4, 16)}, "tensor b holds 12 bytes"),
        ({"b": _row("BF16", [3, 2], 4, 2**70)}, "tensor b holds 1180591620717411303420 bytes"),
        ({"b": {"dtype": "BF16", "shape": [6]}}, "tensor b: .*data_offsets"),
        ({"b": 5}, "tensor b: "),
        ({"d": _row("U8", [2, 2], 21, 25), "e": _row("U8", [1], 25, 26)}, "header describes"),
    ],
)
def test_complaint_names_tensor_place_and_remedy(change: dict[str, Any], complaint: str) -> None:
    """Case B12: overlapping and negative offsets, wrong dtypes, sizes beyond any integer."""
    with pytest.raises(CheckpointError, match=complaint) as error:
        parse_header(_text(SOUND | change, 25))
    assert "fetch the file again" in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b"[" * 200_000,
        b'{"a":NaN}',
        b'{"a":{"dtype":"U8","shape":[' + b"1," * 100_000 + b'1],"data_offsets":[0,NaN]}}',
        b"\xff\xfe",
    ],
    ids=["nested", "open", "nan", "nan offset", "not utf-8"],
)
def test_json_that_would_break_a_parser_is_refused(text: bytes) -> None:
    """Case B12: depth, NaN, and bytes that are no text."""
    with pytest.raises(CheckpointError, match="header is damaged"):
        parse_header(_header(text, 1))


@pytest.mark.parametrize("claimed", [HEADER_BYTES_MAX + 1, 2**40, 2**63, 2**64 - 1])
def test_nothing_is_allocated_for_an_impossible_header(tmp_path: Path, claimed: int) -> None:
    """Case B12: the length is checked against file and limit before any memory is taken."""
    path = tmp_path / "huge.safetensors"
    with path.open("wb") as file:
        file.write(claimed.to_bytes(8, "little"))
        file.truncate(300_000_000)  # sparse: a file that could hold the first of them
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=f"header of {claimed} bytes"):
            SafetensorsFile.open(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def test_the_largest_hostile_header_stays_small_and_quick() -> None:
    """Case B12: a shape of millions of dimensions is refused before anything is multiplied."""
    start = b'{"a":{"dtype":"U8","shape":['
    text = start + b"9," * ((HEADER_BYTES_MAX - 100) // 2) + b'9],"data_offsets":[0,1]}}'
    header = _header(text, 1)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"tensor a has .* bad shape \[9, 9, 9"):
            parse_header(header)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 160_000_000  # a list and a tuple of 8 bytes for every 2 of text
