"""The gated delta rule of Kimi Delta Attention: token by token, and in chunks to the same result.

Pure functions in float32. Per head, with S [K, V] (key dimension first), decay a = exp(log_decay):
    S <- a S;  S <- S + k (beta (v - k^T S))^T;  o = q^T S
Inputs are past convolution, L2 norm and gates. Heads never mix.
"""

from __future__ import annotations

from typing import Final

import torch

# Inside a chunk, decays are taken relative to the chunk's middle: 8 tokens either way at a log
# decay of -5 or more is exp(+-40), and products of two stay finite in float32. Longer chunks would
# not.
CHUNK: Final = 16


def delta_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    memory: torch.Tensor,
) -> torch.Tensor:
    """One token. q, k, v, decay [heads, D] (decay already exponentiated), beta [heads].

    Updates `memory` [heads, D, D] in place; returns o [heads, D].
    """
    memory.mul_(decay.unsqueeze(-1))
    known = torch.bmm(k.unsqueeze(1), memory)
    change = (v.unsqueeze(1) - known).mul_(beta[:, None, None])
    memory.addcmul_(k.unsqueeze(-1), change)
    return torch.bmm(q.unsqueeze(1), memory).squeeze(1)


def delta_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    memory: torch.Tensor,
) -> torch.Tensor:
    """Any number of tokens. q, k, v, log_decay (in [-5, 0]) are [T, heads, D], beta is [T, heads].

    Within a chunk the deltas solve (I + A) delta = beta (v - decayed k^T S), A strictly lower
    triangular, so one triangular solve replaces CHUNK steps; chunks follow each other.
    Updates `memory` [heads, D, D] in place; returns o [T, heads, D].
    """
    tokens = q.shape[0]
    q, k, v, log_decay, beta = (_chunked(x) for x in (q, k, v, log_decay, beta.unsqueeze(-1)))
    total = log_decay.cumsum(-2)
    relative = total - total[..., CHUNK // 2 - 1 : CHUNK // 2, :]
    grown = torch.exp(relative)
    shrunk = (k * torch.exp(-relative)).transpose(-1, -2)
    among_keys = torch.tril((k * grown) @ shrunk, -1) * beta
    reads = torch.tril((q * grown) @ shrunk)
    from_start = torch.exp(total)
    right = torch.cat([k * from_start, v], -1) * beta
    solved = torch.linalg.solve_triangular(
        among_keys + torch.eye(CHUNK), right, upper=False, unitriangular=True
    )
    known_of, wanted = solved.split([k.shape[-1], v.shape[-1]], dim=-1)
    q_start = q * from_start
    k_end = (k * torch.exp(total[..., -1:, :] - total)).transpose(-1, -2)
    to_end = from_start[..., -1, :].unsqueeze(-1)
    outputs = []
    for chunk in range(q.shape[1]):
        change = wanted[:, chunk] - known_of[:, chunk] @ memory
        outputs.append(q_start[:, chunk] @ memory + reads[:, chunk] @ change)
        memory.mul_(to_end[:, chunk]).baddbmm_(k_end[:, chunk], change)
    return torch.cat(outputs, dim=1)[:, :tokens].transpose(0, 1)


def _chunked(x: torch.Tensor) -> torch.Tensor:
    """[T, heads, D] -> [heads, chunks, CHUNK, D]; padding of zeros neither decays nor writes."""
    tokens, heads, size = x.shape
    padding = -tokens % CHUNK
    if padding:
        x = torch.cat([x, x.new_zeros(padding, heads, size)])
    return x.view(-1, CHUNK, heads, size).permute(2, 0, 1, 3).contiguous()
