"""Importing an oracle package: absent means skip at a desk, and failure in CI."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

import pytest


def oracle_module(name: str) -> Any:
    """The module `name`, imported with its own deprecation warnings muted."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError as error:
        if os.environ.get("CI"):
            pytest.fail(f"oracle package missing in CI: {error}; install the extra `oracle`")
        pytest.skip(f"oracle package missing: {error}; install the extra `oracle`")
