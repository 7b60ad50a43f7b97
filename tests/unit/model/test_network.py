"""The network: stages, chunking, groups, determinism, reuse and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.core.errors import LocalProtocolError
from station.model.checkpoint import Checkpoint
from station.model.experts import TorchExperts
from station.model.moe import combine
from station.model.network import K3Text, MoeWork, NotFinite
from station.model.state import SequenceGroup

IDS = torch.randint(0, 300, (41,), generator=torch.Generator().manual_seed(9))


def _decode(network: K3Text, experts: TorchExperts, ids: torch.Tensor) -> torch.Tensor:
    state = network.new_state()
    return torch.stack([network.forward(token[None], state, experts) for token in ids])


def test_stages_are_the_forward_pass(network: K3Text, experts: TorchExperts) -> None:
    """begin, attend, shared, finish and logits, driven by hand, give the very same bits."""
    state = network.new_state()
    residual = network.begin(IDS, state)
    moe_layers = []
    for layer in range(5):
        work = network.attend(layer, residual, state)
        if work is None:
            continue
        moe_layers.append(layer)
        assert work.layer == layer
        assert (work.x.shape, work.z.shape) == ((41, 64), (41, 128))
        assert (work.ids.shape, work.weights.shape) == ((41, 2), (41, 2))
        routed = combine(experts(layer, work.z, work.ids), work.weights)
        network.finish(layer, residual, work, routed, network.shared(work))
    assert moe_layers == [1, 2, 3, 4]
    by_hand = network.logits(residual, last_only=False)
    assert torch.equal(by_hand, network.forward(IDS, network.new_state(), experts, False))
    assert by_hand.shape == (41, 300)


@pytest.mark.parametrize("chunks", [[41], [1] * 41, [16, 16, 9], [5, 1, 1, 34]])
def test_how_a_prompt_is_cut_does_not_matter(
    network: K3Text, experts: TorchExperts, chunks: list[int]
) -> None:
    """Every cut gives the logits of every other, within rounding."""
    state = network.new_state()
    parts = [network.forward(part, state, experts, False) for part in IDS.split(chunks)]
    assert state.length == 41
    expected = network.forward(IDS, network.new_state(), experts, False)
    torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-4, atol=2e-4)


def test_same_work_gives_the_same_bits(network: K3Text, experts: TorchExperts) -> None:
    """Two runs over the same ids with the same cut are equal, not merely close."""
    assert torch.equal(_decode(network, experts, IDS), _decode(network, experts, IDS))


def test_reset_state_is_a_new_state(network: K3Text, experts: TorchExperts) -> None:
    """Nothing of one conversation reaches the next one in the same slot."""
    state = network.new_state()
    for _ in range(2):
        network.forward(IDS, state, experts)
        network.forward(IDS[:1], state, experts)
        state.reset()
    again = network.forward(IDS, state, experts)
    assert torch.equal(again, network.forward(IDS, network.new_state(), experts))


def test_group_computes_what_its_members_would_alone(
    network: K3Text, experts: TorchExperts
) -> None:
    """A prefill and two decodes in one pass keep apart, and each advances its own state."""
    prompts = [IDS[:7], IDS[7:20], IDS[20:]]
    together = [network.new_state() for _ in prompts]
    alone = [network.new_state() for _ in prompts]
    for states in (together, alone):
        for state, prompt in zip(states[:2], prompts, strict=False):
            network.forward(prompt, state, experts)
    ids = torch.cat([IDS[:1], IDS[1:2], prompts[2]])
    group = SequenceGroup(tuple(together), (1, 1, len(prompts[2])))
    logits = network.forward(ids, group, experts)
    expected = [
        network.forward(part, state, experts)
        for part, state in zip((IDS[:1], IDS[1:2], prompts[2]), alone, strict=True)
    ]
    torch.testing.assert_close(logits, torch.stack(expected), rtol=1e-4, atol=2e-4)
    assert [state.length for state in together] == [8, 14, 21]
    group = SequenceGroup(tuple(together), (1, 1, 1))
    logits = network.forward(IDS[:3], group, experts)
    expected = [network.forward(IDS[i : i + 1], state, experts) for i, state in enumerate(alone)]
    torch.testing.assert_close(logits, torch.stack(expected), rtol=1e-4, atol=2e-4)


def test_bfloat16_follows_float32(checkpoint: Checkpoint, network: K3Text) -> None:
    """Rounding to BF16 moves a logit a little; a token whose near-tied expert flips, more."""
    experts = TorchExperts(checkpoint)
    narrow = K3Text.load(checkpoint, torch.bfloat16)
    expected = network.forward(IDS, network.new_state(), experts, False)
    logits = narrow.forward(IDS, narrow.new_state(), experts, False)
    assert logits.dtype == torch.float32
    similarity = torch.nn.functional.cosine_similarity(logits, expected, dim=-1)
    assert similarity.median() > 0.99
    assert not torch.equal(logits, expected)


def test_mxfp4_checkpoint_runs(mxfp4_directory: Path) -> None:
    """The original release's layout is served as well."""
    with Checkpoint.open(mxfp4_directory) as checkpoint:
        network = K3Text.load(checkpoint, torch.float32)
        logits = network.forward(IDS, network.new_state(), TorchExperts(checkpoint))
    assert logits.shape == (300,)
    assert logits.std() > 0.3


def _to_layer_1(network: K3Text) -> tuple[object, MoeWork]:
    state = network.new_state()
    residual = network.begin(IDS, state)
    assert network.attend(0, residual, state) is None
    work = network.attend(1, residual, state)
    assert work is not None
    return residual, work


def test_rows_that_are_not_finite_end_the_request(network: K3Text, experts: TorchExperts) -> None:
    """One NaN from anywhere reaches the logits and is refused there, naming the step."""

    def poisoned(layer: int, z: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows = experts(layer, z, ids)
        if layer == 3:
            rows[-1, 0, 0] = float("nan")
        return rows

    with pytest.raises(NotFinite, match="ends at token 41"):
        network.forward(IDS, network.new_state(), poisoned)


def test_answers_must_fit_the_question(network: K3Text) -> None:
    """A routed sum of another layer, or for another number of tokens, is refused."""
    residual, work = _to_layer_1(network)
    shared = network.shared(work)
    with pytest.raises(LocalProtocolError, match="does not answer"):
        network.finish(2, residual, work, torch.zeros(41, 128), shared)
    with pytest.raises(LocalProtocolError, match="does not answer"):
        network.finish(1, residual, work, torch.zeros(40, 128), shared)


def test_pass_keeps_to_the_state_it_began_with(network: K3Text) -> None:
    """Mixing two sequences up is an error, not a wrong token."""
    residual = network.begin(IDS, network.new_state())
    with pytest.raises(LocalProtocolError, match="another state"):
        network.attend(0, residual, network.new_state())


@pytest.mark.parametrize("ids", [[-1], [300], [[1]]])
def test_token_ids_outside_the_vocabulary_are_refused(network: K3Text, ids: list[int]) -> None:
    """An embedding row that does not exist is never read."""
    with pytest.raises(LocalProtocolError, match=r"0\.\.299"):
        network.begin(torch.tensor(ids), network.new_state())


def test_only_two_dtypes_exist(checkpoint: Checkpoint) -> None:
    """float16 would overflow in the delta rule's inputs; it is refused before loading."""
    with pytest.raises(LocalProtocolError, match="float16"):
        K3Text.load(checkpoint, torch.float16)
