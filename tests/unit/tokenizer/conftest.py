"""A small vocabulary of our own: all bytes, and a few merges that make token borders matter."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from station.tokenizer.vocabulary import Tokenizer

_MERGES = ['"-', '="', " r", "ol", " rol", " role", "us", "er", "user", "th", "in", "thin", "think"]


def write_vocabulary(directory: Path, merges: list[str]) -> Path:
    """Write `tiktoken.model` with all single bytes and `merges`; return the directory."""
    tokens = [bytes([value]) for value in range(256)] + [text.encode() for text in merges]
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    (directory / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    return directory


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A vocabulary with merges."""
    return Tokenizer.load(write_vocabulary(tmp_path_factory.mktemp("vocabulary"), _MERGES))


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A vocabulary of single bytes: every character of several bytes is split over tokens."""
    return Tokenizer.load(write_vocabulary(tmp_path_factory.mktemp("bytes"), []))
