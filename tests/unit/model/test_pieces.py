"""Norms, activation, residual mixing, router and combine against their formulas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import rms_norm

from shared.core.errors import LocalProtocolError
from station.model.attn_res import AttentionResidual
from station.model.checkpoint import Checkpoint
from station.model.mla import MlaAttention
from station.model.mlp import Situ
from station.model.moe import LatentMoe, combine
from station.model.norms import RmsNorm
from station.model.state import LatentCache, SequenceGroup, SequenceState, Span
from station.model.tensor_table import PREFIX, layer_prefix
from station.model.weights import ModuleWeights


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_rms_norm_follows_its_formula(eps: float) -> None:
    """x / sqrt(mean(x^2) + eps) * w; at tiny x the eps decides."""
    weight = _random(64, seed=1)
    x = _random(5, 64) * torch.tensor([[1e-3], [1.0], [100.0], [0.0], [1e-2]])
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight
    torch.testing.assert_close(RmsNorm(weight, eps)(x).double(), expected, rtol=1e-6, atol=1e-7)


def test_rms_norm_rounds_before_the_weight() -> None:
    """In BF16 the normalised value is rounded first and the product again, as officially."""
    weight, x = _random(64, seed=1).bfloat16(), _random(3, 64).bfloat16()
    normal = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(RmsNorm(weight, 1e-5)(x), weight * normal.bfloat16())


def test_situ_follows_its_formula_and_stays_bounded() -> None:
    """beta tanh(g/beta) sigmoid(g) linear_beta tanh(u/linear_beta); never beyond beta*linear."""
    gate, up = _random(4, 32) * 10, _random(4, 32, seed=2) * 100
    expected = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
    result = Situ(32, 4.0, 25.0)(torch.cat([gate, up], -1))
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert result.abs().max() <= 100


def test_attention_residual_mixes_unnormalised_vectors(checkpoint: Checkpoint) -> None:
    """Scores come from normalised vectors, the mix from the vectors themselves."""
    weights = ModuleWeights(checkpoint, f"{PREFIX}model.", torch.float32)
    mixer = AttentionResidual(weights, "output_attn_res", 1e-5)
    stack = _random(3, 4, 64) * torch.tensor([1.0, 10.0, 0.1])[:, None, None]
    norm = weights.exact("output_attn_res_norm.weight")
    projection = weights.exact("output_attn_res_proj.weight")[0]
    for token in range(4):
        vectors = stack[:, token]
        normal = torch.nn.functional.rms_norm(vectors, (64,), norm, 1e-5)
        expected = torch.softmax(normal @ projection, 0) @ vectors
        torch.testing.assert_close(mixer(stack)[token], expected, rtol=1e-5, atol=1e-5)


def test_combine_is_a_float32_sum_in_order_of_k() -> None:
    """Bit for bit the loop over k; another order gives other bits."""
    rows, weights = _random(3, 8, 128).bfloat16(), _random(3, 8, seed=1)
    expected = np.zeros((3, 128), dtype=np.float32)
    for k in range(8):
        product = rows[:, k].float().numpy() * weights[:, k : k + 1].numpy()
        expected = product if k == 0 else expected + product
    result = combine(rows, weights)
    np.testing.assert_array_equal(result.numpy(), expected)
    assert not torch.equal(combine(rows.flip(1), weights.flip(1)), result)


@pytest.fixture
def moe(checkpoint: Checkpoint) -> LatentMoe:
    return LatentMoe(ModuleWeights(checkpoint, layer_prefix(2), torch.bfloat16), checkpoint.config)


def test_router_uses_bias_to_choose_and_not_to_weigh(
    checkpoint: Checkpoint, moe: LatentMoe
) -> None:
    """Chosen: top of sigmoid + bias. Weights: sigmoid alone, summing to the scaling factor."""
    x = _random(20, 64).bfloat16()
    prefix = f"{layer_prefix(2)}block_sparse_moe.gate."
    gate = checkpoint.weight(f"{prefix}weight")
    scores = torch.sigmoid(x.float() @ gate.t())
    biased = scores + checkpoint.weight(f"{prefix}e_score_correction_bias")
    ids, weights = moe.route(x)
    assert ids.dtype == torch.int64
    assert weights.dtype == torch.float32
    assert torch.equal(ids, biased.topk(2, -1).indices)
    chosen = scores.gather(-1, ids)
    torch.testing.assert_close(weights, chosen / chosen.sum(-1, keepdim=True))
    assert not torch.equal(ids, scores.topk(2, -1).indices)


def test_weights_sum_to_the_scaling_factor(checkpoint: Checkpoint) -> None:
    """The factor cannot be seen in logits (a norm follows the sum), so it is looked at here."""
    config = replace(checkpoint.config, routed_scaling_factor=2.5)
    moe = LatentMoe(ModuleWeights(checkpoint, layer_prefix(1), torch.float32), config)
    _, weights = moe.route(_random(6, 64))
    torch.testing.assert_close(weights.sum(-1), torch.full((6,), 2.5))


def test_equal_scores_go_to_the_lower_id(moe: LatentMoe) -> None:
    """Among 896 experts of which every third scores alike, the lowest ids win, in order."""
    moe._gate = torch.zeros(896, 64)
    moe._bias = (torch.arange(896) % 3 == 1).float()
    ids, weights = moe.route(torch.zeros(3, 64))
    assert ids.tolist() == [[1, 4]] * 3
    assert weights.tolist() == [[0.5, 0.5]] * 3


@pytest.mark.parametrize("size", [1.0, 3e-4], ids=["usual", "tiny input"])
def test_latent_attention_follows_its_definition(checkpoint: Checkpoint, size: float) -> None:
    """Absorbed attention equals keys and values expanded per head; at tiny inputs the latent
    norms' own eps of 1e-6 decides."""
    weights = ModuleWeights(checkpoint, layer_prefix(3), torch.float32)
    attention = MlaAttention(weights, checkpoint.config, 3)
    state = SequenceState(checkpoint.config, torch.float32)
    x = _random(9, 64) * size
    output = attention(x, [Span(0, 9, state)])
    w = {
        name: weights.exact(f"self_attn.{name}.weight").double()
        for name in (
            *("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm"),
            *("kv_b_proj", "g_proj", "o_proj"),
        )
    }
    x = x.double()
    q_a = rms_norm(x @ w["q_a_proj"].t(), (48,), w["q_a_layernorm"], 1e-6)
    q = (q_a @ w["q_b_proj"].t()).view(9, 2, 48)
    latent, shared_key = (x @ w["kv_a_proj_with_mqa"].t()).split([32, 16], -1)
    latent = rms_norm(latent, (32,), w["kv_a_layernorm"], 1e-6)
    k_nope, v = (latent @ w["kv_b_proj"].t()).view(9, 2, 64).split([32, 32], -1)
    k = torch.cat([k_nope, shared_key[:, None].expand(9, 2, 16)], -1)
    scores = torch.einsum("thd,lhd->htl", q, k) * 48**-0.5
    scores = scores.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), float("-inf"))
    read = torch.einsum("htl,lhd->thd", scores.softmax(-1), v).reshape(9, 64)
    expected = (read * torch.sigmoid(x @ w["g_proj"].t())) @ w["o_proj"].t()
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)


def test_latent_cache_grows_and_keeps_its_rows(checkpoint: Checkpoint) -> None:
    """Doubling copies what is there; the context length is the end."""
    cache = LatentCache(checkpoint.config, torch.float32)
    rows = _random(512, 48)
    for start in range(0, 512, 37):
        kept = cache.append(rows[start : start + 37])
        assert torch.equal(kept, rows[: start + 37])
    with pytest.raises(LocalProtocolError, match="context of 512"):
        cache.append(rows[:1])
    cache.reset()
    assert torch.equal(cache.append(rows[:2]), rows[:2])


def test_sequence_never_passes_its_context(checkpoint: Checkpoint) -> None:
    """The count is refused before anything is computed."""
    state = SequenceState(checkpoint.config, torch.float32)
    state.advance(512)
    with pytest.raises(LocalProtocolError, match=r"512 \+ 1 tokens"):
        state.advance(1)


def test_group_is_checked(checkpoint: Checkpoint) -> None:
    """One count per sequence, and no sequence twice: its memory would be advanced twice."""
    state = SequenceState(checkpoint.config, torch.float32)
    with pytest.raises(LocalProtocolError, match="twice"):
        SequenceGroup((state, state), (1, 1))
    with pytest.raises(LocalProtocolError, match="token counts"):
        SequenceGroup((state,), (1, 1))


def test_norm_comes_after_the_complete_sum(moe: LatentMoe) -> None:
    """The layer's output is up(norm(routed)): scaling the whole sum hardly changes it."""
    routed = _random(4, 128)
    torch.testing.assert_close(moe.finish(routed), moe.finish(routed * 64), rtol=0.02, atol=0.02)
