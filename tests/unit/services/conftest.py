"""Fixtures: the Station's real endpoint over a scripted backend, from the endpoint's own tests."""

from __future__ import annotations

from tests.unit.http.conftest import byte_tokenizer, start

__all__ = ["byte_tokenizer", "start"]
