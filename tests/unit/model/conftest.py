"""Tiny checkpoints shared by the model's tests; written once, never changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from station.model.checkpoint import Checkpoint
from station.model.experts import TorchExperts
from station.model.network import K3Text
from tests.support.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="session")
def nvfp4_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("nvfp4"), seed=1, experts=12)


@pytest.fixture(scope="session")
def mxfp4_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("mxfp4"), seed=2, layout="mxfp4")


@pytest.fixture(scope="session")
def checkpoint(nvfp4_directory: Path) -> Iterator[Checkpoint]:
    with Checkpoint.open(nvfp4_directory) as opened:
        yield opened


@pytest.fixture(scope="session")
def network(checkpoint: Checkpoint) -> K3Text:
    return K3Text.load(checkpoint, torch.float32)


@pytest.fixture(scope="session")
def experts(checkpoint: Checkpoint) -> TorchExperts:
    return TorchExperts(checkpoint)
