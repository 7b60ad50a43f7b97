"""A model of two layers whose tokens depend on every bit of every row, for tests of the Station."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from station.backend import GenerationRequest
from station.model.moe import combine
from station.model.network import MoeWork
from tests.unit.station.world import LAYER, SHAPE, World

VOCAB = 64


class ToyModel:
    """Has the stages of K3Text; layer 1 is its only MoE layer."""

    config = SimpleNamespace(num_hidden_layers=SHAPE.layers, context_length=64)

    def __init__(self) -> None:
        latent = SHAPE.expert.latent
        generator = torch.Generator().manual_seed(11)
        self._embedding = torch.randn(VOCAB, latent, generator=generator)
        self._gate = torch.randn(latent, SHAPE.experts, generator=generator)
        self._head = torch.randn(latent, VOCAB, generator=generator)

    def new_state(self) -> list[torch.Tensor]:
        """Running sum of everything the sequence has seen."""
        return [torch.zeros(SHAPE.expert.latent)]

    def begin(self, ids: torch.Tensor, state: list[torch.Tensor]) -> Any:
        """Embeddings plus the past."""
        return SimpleNamespace(hidden=self._embedding[ids] + state[0])

    def attend(self, layer: int, residual: Any, state: list[torch.Tensor]) -> MoeWork | None:
        """Layer 0 is dense."""
        if layer != LAYER:
            return None
        x = torch.tanh(residual.hidden)
        ids = torch.sort(x @ self._gate, dim=-1, descending=True, stable=True).indices
        residual.state = state
        weights = torch.full((len(x), SHAPE.top_k), 0.25)
        return MoeWork(layer, x, x, ids[:, : SHAPE.top_k].contiguous(), weights)

    def shared(self, work: MoeWork) -> torch.Tensor:
        """A shared expert that halves."""
        return work.x * 0.5

    def finish(
        self, layer: int, residual: Any, work: MoeWork, routed: torch.Tensor, shared: torch.Tensor
    ) -> None:
        """The routed rows change the output and all later steps."""
        assert layer == work.layer
        residual.hidden = residual.hidden + routed + shared
        residual.state[0] = torch.tanh(residual.state[0] + routed.sum(0))

    def logits(self, residual: Any, last_only: bool = True) -> torch.Tensor:
        """Of the last token."""
        return residual.hidden[-1] @ self._head

    def solo(self, world: World, request: GenerationRequest, prefill_tokens: int) -> list[int]:
        """Greedy tokens with every expert in one place: the truth."""
        state, out = self.new_state(), []
        prompt = list(request.prompt_ids)
        chunks = [prompt[i : i + prefill_tokens] for i in range(0, len(prompt), prefill_tokens)]
        while len(out) < request.max_tokens:
            for chunk in chunks:
                residual = self.begin(torch.tensor(chunk), state)
                work = self.attend(LAYER, residual, state)
                assert work is not None
                rows = self._rows(world, work)
                self.finish(LAYER, residual, work, combine(rows, work.weights), self.shared(work))
            out.append(int(self.logits(residual).argmax()))
            chunks = [[out[-1]]]
        return out

    def _rows(self, world: World, work: MoeWork) -> torch.Tensor:
        tokens, top_k = work.ids.shape
        rows = world.everything.rows(
            LAYER,
            work.ids.numpy().reshape(-1),
            np.repeat(np.arange(tokens), top_k),
            work.z.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16),
        )
        return torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16).view(tokens, top_k, -1)


def request(name: str = "r", *, max_tokens: int = 6, prompt: int = 3) -> GenerationRequest:
    """A greedy request whose prompt follows from its name."""
    rng = np.random.default_rng(sum(name.encode()))
    return GenerationRequest(
        request_id=name,
        prompt_ids=tuple(int(token) for token in rng.integers(0, VOCAB, prompt)),
        max_tokens=max_tokens,
        temperature=0.0,
        top_p=1.0,
        seed=1,
        stop_ids=frozenset(),
    )
