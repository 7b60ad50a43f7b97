"""Banks built once, and a world around a copy of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.unit.bank_service.world import World, build_bank


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the banks spark0 and grace."""
    folder = tmp_path_factory.mktemp("built")
    for name in ("spark0", "grace"):
        build_bank(folder, name)
    return folder


@pytest.fixture
def world(tmp_path: Path, built: Path) -> World:
    """Two folders of banks: the first has both, the second is empty."""
    first, second = tmp_path / "banks", tmp_path / "more"
    shutil.copytree(built, first)
    second.mkdir()
    return World(tmp_path, (first, second))
