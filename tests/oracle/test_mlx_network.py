"""The whole network against mlx-lm's Kimi-K3, an implementation nobody here wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from station.model.checkpoint import Checkpoint
from station.model.experts import TorchExperts
from station.model.network import K3Text
from station.model.tensor_table import Kind, expected_tensors
from tests.oracle.packages import oracle_module
from tests.support.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.oracle
TOKENS = 53

SIZES: dict[str, dict[str, Any]] = {
    "default": {},
    "wide_latent": {
        "latent": 96,
        "width": 160,
        "layers": 6,
        "block": 4,
        "heads": 3,
        "kda_heads": 2,
    },
    "many_experts": {"experts": 40, "top_k": 5, "layers": 7, "hidden": 96, "shared_experts": 1},
    "odd_heads": {
        "heads": 5,
        "kda_heads": 3,
        "head_dim": 16,
        "v_head": 48,
        "block": 3,
        "layers": 7,
    },
    "dense_start": {"dense_layers": 2, "layers": 4, "mla_every": 2, "rope": 8, "scaling": 1.7},
    "mxfp4": {"layout": "mxfp4", "latent": 64, "width": 96, "layers": 5, "block": 12},
}


@dataclass(frozen=True)
class Pair:
    """Our network and what MLX makes of the same random checkpoint and prompt."""

    network: K3Text
    experts: TorchExperts
    ids: np.ndarray
    expected: np.ndarray


@pytest.fixture(scope="module", params=list(SIZES))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    mx = oracle_module("mlx.core")
    kimi = oracle_module("mlx_lm.models.kimi_k3")
    mx.set_default_device(mx.cpu)
    directory = tmp_path_factory.mktemp(request.param)
    write_tiny_checkpoint(directory, seed=len(request.param), **SIZES[request.param])
    text = json.loads((directory / "config.json").read_text())["text_config"]
    model = kimi.Model(kimi.ModelArgs.from_dict({"model_type": "kimi_k3", "text_config": text}))
    ids = np.random.default_rng(1).integers(0, text["vocab_size"], TOKENS)
    with Checkpoint.open(directory) as checkpoint:
        weights = {}
        for tensor in expected_tensors(checkpoint.config):
            # MLX cuts the padding of A_log itself, so it gets the stored tensor.
            padded = tensor.kind is Kind.PADDED
            read = checkpoint.tensor if padded else checkpoint.weight
            weights[tensor.name] = mx.array(read(tensor.name).numpy())
        model.load_weights(list(model.sanitize(weights).items()), strict=True)
        expected = np.array(model(mx.array(ids)[None])[0].astype(mx.float32))
        yield Pair(K3Text.load(checkpoint), TorchExperts(checkpoint), ids, expected)


@pytest.mark.parametrize(
    "chunks", [[TOKENS], [20, 17, 16], [1] * TOKENS, [37] + [1] * 16], ids=lambda c: f"{len(c)}"
)
def test_logits_agree_with_mlx(pair: Pair, chunks: list[int]) -> None:
    """Prefilled whole, in chunks or token by token, the logits are MLX's: 1e-4 at magnitude 2."""
    state = pair.network.new_state()
    rows = [
        pair.network.forward(torch.from_numpy(part), state, pair.experts, last_only=False)
        for part in np.split(pair.ids, np.cumsum(chunks)[:-1])
    ]
    ours = torch.cat(rows).numpy()
    largest = np.abs(pair.expected).max()
    assert largest > 1.5
    assert np.abs(ours - pair.expected).max() < 1e-4 * largest / 2
    assert (ours.argmax(-1) == pair.expected.argmax(-1)).all()
