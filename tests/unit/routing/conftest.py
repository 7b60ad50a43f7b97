"""The endpoint of tests/unit/http, for recorders."""

from __future__ import annotations

from tests.unit.http.conftest import byte_tokenizer, start

__all__ = ["byte_tokenizer", "start"]
