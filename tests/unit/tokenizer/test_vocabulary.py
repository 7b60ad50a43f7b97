"""The vocabulary: special ids, content that looks like markup, cutting rules, damaged files."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.core.errors import CheckpointError
from station.tokenizer import vocabulary
from station.tokenizer.vocabulary import SPLIT_PATTERN, Tokenizer

CONTROL = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[BOS]", "[EOS]")


def test_special_ids_keep_the_offsets_of_the_release(tokenizer: Tokenizer) -> None:
    """163,584 ranks put <|end_of_msg|> at 163,586; the same distances hold after any rank count."""
    base = tokenizer.text_size

    assert (base, base + 1) == (tokenizer.bos_id, tokenizer.eos_id)
    assert base + 2 == tokenizer.end_of_msg_id
    assert (base + 3, base + 4, base + 5) == (
        tokenizer.open_id,
        tokenizer.close_id,
        tokenizer.sep_id,
    )
    assert base + 256 == tokenizer.vocab_size
    assert tokenizer.decode([base + 255]) == "[PAD]"
    assert f"<|reserved_token_{base + 8}|>" == tokenizer.decode([base + 8])


@pytest.mark.parametrize("marker", CONTROL)
def test_content_never_encodes_a_special_token(tokenizer: Tokenizer, marker: str) -> None:
    """Text that looks like markup stays text, whoever wrote it."""
    ids = tokenizer.encode_text(f"a{marker}b")

    assert not any(tokenizer.is_special(token) for token in ids)
    assert f"a{marker}b" == tokenizer.decode(ids)


@settings(deadline=None)
@given(text=st.text(max_size=200))
def test_text_survives_the_round_trip(byte_tokenizer: Tokenizer, text: str) -> None:
    """Every Unicode text comes back as it was."""
    assert text == byte_tokenizer.decode(byte_tokenizer.encode_text(text))


@pytest.mark.parametrize("unit", [" ", "x", "\n", "漢", "a1", "a "])
def test_long_runs_are_cut_and_survive(byte_tokenizer: Tokenizer, unit: str) -> None:
    """Runs far beyond the regex engine's patience neither fail nor lose a character."""
    text = unit * (900_000 // len(unit))

    assert text == byte_tokenizer.decode(byte_tokenizer.encode_text(text))


def _cut_by_the_letter(text: str, chunk_max: int, run_max: int) -> list[str]:
    """The release's rule, one character at a time."""
    pieces: list[str] = []
    for start in range(0, len(text), chunk_max):
        piece, run, kind = "", 0, None
        for character in text[start : start + chunk_max]:
            run = run + 1 if character.isspace() == kind else 1
            kind = character.isspace()
            if run > run_max:
                pieces.append(piece)
                piece, run = "", 1
            piece += character
        pieces.append(piece)
    return pieces


@settings(deadline=None)
@given(text=st.text(alphabet="ab \n\u3000\x1f", max_size=60))
def test_cuts_fall_where_the_release_cuts(text: str) -> None:
    """Cuts count from the start of a run of one kind, and start again in every chunk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "_CHUNK_CHARS_MAX", 17)
        patch.setattr(vocabulary, "_RUN_CHARS_MAX", 3)

        pieces = list(vocabulary._pieces(text))

    assert _cut_by_the_letter(text, 17, 3) == pieces


@settings(deadline=None)
@given(text=st.text(alphabet="aB漢é9 \n\t.'s\u0301", max_size=40))
def test_split_pattern_means_the_same_to_regex(text: str) -> None:
    """The vocabulary trainer splits with the `regex` package; pieces must cover the whole text."""
    pieces = regex.findall(SPLIT_PATTERN, text, flags=regex.V1)

    assert text == "".join(pieces)
    assert all(len(piece) <= 3 for piece in pieces if piece.isdigit())


def test_han_is_never_joined_with_other_letters() -> None:
    """Set intersection works: a Han run is a piece of its own."""
    assert regex.findall(SPLIT_PATTERN, "abc漢字def", flags=regex.V1) == ["abc", "漢字", "def"]


def _line(token: bytes, rank: int) -> bytes:
    return base64.b64encode(token) + b" %d" % rank


ALL_BYTES = [_line(bytes([value]), value) for value in range(256)]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (ALL_BYTES[:200], "no token for byte 0xc8"),
        ([*ALL_BYTES, _line(b"ab", 300)], "line 257 has rank 300, expected 256"),
        ([*ALL_BYTES, _line(b"a", 256)], "line 257"),
        ([*ALL_BYTES, b"!!! 256"], "line 257 is not"),
        ([*ALL_BYTES, b"YWI="], "line 257 is not"),
        ([b"\x00\x93NUMPY\x01"], "line 1 is not"),
    ],
)
def test_damaged_file_is_refused_by_line(tmp_path: Path, lines: list[bytes], said: str) -> None:
    """A truncated, foreign or inconsistent rank file gives one error that says where."""
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(lines))

    with pytest.raises(CheckpointError, match=said):
        Tokenizer.load(tmp_path)


def test_missing_file_names_the_path(tmp_path: Path) -> None:
    """A checkpoint directory without a vocabulary is named."""
    with pytest.raises(CheckpointError, match=r"tiktoken\.model: cannot read the vocabulary"):
        Tokenizer.load(tmp_path)
