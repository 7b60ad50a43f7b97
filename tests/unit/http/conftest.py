"""Fixtures of the endpoint tests: a vocabulary of bytes and a way to start an endpoint."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from station.tokenizer.vocabulary import Tokenizer
from tests.unit.http.endpoint import Start, starter


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A vocabulary of single bytes."""
    directory: Path = tmp_path_factory.mktemp("bytes")
    lines = [base64.b64encode(bytes([value])) + b" %d" % value for value in range(256)]
    (directory / "tiktoken.model").write_bytes(b"\n".join(lines))
    return Tokenizer.load(directory)


@pytest.fixture
def start(byte_tokenizer: Tokenizer) -> Start:
    """`async with start(*script) as endpoint`."""
    return starter(byte_tokenizer)
