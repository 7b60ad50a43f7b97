"""The oracle of the split: the same model, kernel and checkpoint in one process, no pod at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from shared.core.placement import balanced
from shared.kernels.select import select_kernel
from station.local_experts import LocalTier
from station.model.checkpoint import Checkpoint
from station.model.network import K3Text
from station.sampling import sample, step_rng
from station.tokenizer.chat import ChatMessage, render
from station.tokenizer.vocabulary import Tokenizer

PREFILL_TOKENS = 64  # as the embedded pod chunks its prompts


class Solo:
    """Greedy decoding with every expert in this process."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype = torch.float32) -> None:
        # as the Station: another number of threads sums in another order, and rounding to bf16
        # makes that visible
        torch.set_num_threads(1)
        opened = Checkpoint.open(checkpoint)
        shape = opened.config.shape
        self.tokenizer = Tokenizer.load(checkpoint)
        self.model = K3Text.load(opened, dtype)
        everything = balanced(opened.digest, shape, [("all", "hbm", 1.0)]).nodes[0].rows
        kernel = select_kernel(shape.expert, "auto")
        self.tier = LocalTier(kernel, shape.expert, opened, everything)

    def experts(self, layer: int, z: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Rows [T, K, latent] as a node would compute them."""
        tokens, top_k = ids.shape
        rows = self.tier.rows(
            layer,
            ids.numpy().reshape(-1),
            np.repeat(np.arange(tokens), top_k),
            z.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16),
        )
        return torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16).view(tokens, top_k, -1)

    def prompt(self, question: str) -> list[int]:
        """Prompt ids as the endpoint renders a single question."""
        return render(self.tokenizer, [ChatMessage(role="user", content=question)])

    def tokens(
        self, question: str, *, max_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> list[int]:
        """Token ids up to the end of the message; greedy at temperature 0, as the pod samples else.

        A hot sample depends on every logit, so it notices far smaller errors than an arg-max does.
        """
        prompt = self.prompt(question)
        state = self.model.new_state()
        out: list[int] = []
        with torch.inference_mode():
            for start in range(0, len(prompt), PREFILL_TOKENS):
                ids = torch.tensor(prompt[start : start + PREFILL_TOKENS])
                logits = self.model.forward(ids, state, self.experts)
            while len(out) < max_tokens:
                token = sample(logits.numpy(), temperature, 1.0, step_rng(seed, len(out)))
                if token == self.tokenizer.end_of_msg_id:
                    break
                out.append(token)
                logits = self.model.forward(torch.tensor([token]), state, self.experts)
        return out
