"""The whole text model, in stages: a pass stops at every MoE layer until its rows are there.

Owns the order of operations between layers (Attention Residuals) and nothing else. A pass is
`begin`, then for each layer `attend` and, when that hands out work, `finish`; `logits` ends it.
Experts never run here. One pass at a time per sequence; methods may be called from any one thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.nn.functional import embedding, linear

from shared.core.errors import LocalProtocolError, MeshError
from station.model.attn_res import AttentionResidual
from station.model.checkpoint import Checkpoint
from station.model.config import K3Config
from station.model.kda import KdaAttention
from station.model.mla import MlaAttention
from station.model.mlp import GatedMlp
from station.model.moe import LatentMoe, combine
from station.model.norms import RmsNorm
from station.model.state import SequenceGroup, SequenceState, spans
from station.model.tensor_table import PREFIX, layer_prefix
from station.model.weights import ModuleWeights

ExpertFunction: TypeAlias = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, z [T, latent], ids [T, K]) -> unweighted rows [T, K, latent]."""


class NotFinite(MeshError):
    """The model computed NaN or infinity; the request must end, its state must not be reused."""

    code = "logits_not_finite"


@dataclass(frozen=True, slots=True)
class MoeWork:
    """What a MoE layer needs from elsewhere: rows of experts `ids` [T, K] applied to `z`.

    x [T, H] and z [T, latent] are in the model's dtype, ids int64, weights [T, K] float32.
    """

    layer: int
    x: torch.Tensor
    z: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class Residual:
    """Where a pass stands: block vectors and running sum of its T tokens. Made by `begin` only."""

    def __init__(
        self, hidden: torch.Tensor, depth: int, state: SequenceState | SequenceGroup
    ) -> None:
        """`hidden` [T, H] embeddings; `depth` is the most block vectors a pass collects."""
        self._stack = hidden.new_empty(depth + 1, *hidden.shape)
        self._stack[0] = hidden
        self._blocks = 0
        self._sum_is_empty = False
        self.state = state
        self.parts = list(spans(state, hidden.shape[0]))

    @property
    def stack(self) -> torch.Tensor:
        """Block vectors and the running sum, [blocks + 1, T, H]."""
        return self._stack[: self._blocks + 1]

    @property
    def last_rows(self) -> list[int]:
        """The row of each sequence's last token."""
        return [part.stop - 1 for part in self.parts]

    @property
    def has_blocks(self) -> bool:
        """Whether there is anything but the running sum to mix."""
        return self._blocks > 0

    @property
    def running(self) -> torch.Tensor:
        """The running sum of the current block, [T, H]."""
        return self._stack[self._blocks]

    def close_block(self) -> None:
        """Turn the running sum into a block vector; the next one starts from nothing."""
        self._blocks += 1
        self._sum_is_empty = True

    def add(self, output: torch.Tensor) -> None:
        """Add a sublayer's output [T, H] to the running sum."""
        if self._sum_is_empty:
            self._stack[self._blocks] = output
            self._sum_is_empty = False
        else:
            self._stack[self._blocks].add_(output)


class _Layer:
    """One decoder layer: two residual mixers, two norms, attention, and a dense MLP or a MoE."""

    def __init__(self, checkpoint: Checkpoint, layer: int, dtype: torch.dtype) -> None:
        config = checkpoint.config
        weights = ModuleWeights(checkpoint, layer_prefix(layer), dtype)
        eps = config.rms_norm_eps
        self.opens_block = layer % config.attn_res_block_size == 0
        self.attention_residual = AttentionResidual(weights, "self_attention_res", eps)
        self.ffn_residual = AttentionResidual(weights, "mlp_res", eps)
        self.attention_norm = RmsNorm(weights.vector("input_layernorm"), eps)
        self.ffn_norm = RmsNorm(weights.vector("post_attention_layernorm"), eps)
        self.attention = (
            MlaAttention(weights, config, layer)
            if layer in config.mla_layers
            else KdaAttention(weights, config, layer)
        )
        self.ffn = (
            LatentMoe(weights, config)
            if config.is_moe(layer)
            else GatedMlp(weights.below("mlp."), config)
        )


class K3Text:
    """The text model with its weights in memory, routed experts excepted."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        """Use `K3Text.load`."""
        self.config: K3Config = checkpoint.config
        self.dtype = dtype
        weights = ModuleWeights(checkpoint, PREFIX, dtype)
        inner = weights.below("model.")
        self._embeddings = inner.matrix("embed_tokens")
        self._layers = [
            _Layer(checkpoint, layer, dtype) for layer in range(self.config.num_hidden_layers)
        ]
        eps = self.config.rms_norm_eps
        self._output_residual = AttentionResidual(inner, "output_attn_res", eps)
        self._norm = RmsNorm(inner.vector("norm"), eps)
        self._head = weights.matrix("lm_head")

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> K3Text:
        """Read everything but the routed experts. `dtype` (float32 or bfloat16) is that of weights
        and activations; router, recurrence, residual mixing and softmax are float32 in any case."""
        if dtype not in (torch.float32, torch.bfloat16):
            raise LocalProtocolError(f"model dtype {dtype}: use torch.float32 or torch.bfloat16")
        with torch.inference_mode():
            return cls(checkpoint, dtype)

    @torch.inference_mode()
    def new_state(self) -> SequenceState:
        """The state of a sequence of no tokens."""
        return SequenceState(self.config, self.dtype)

    @torch.inference_mode()
    def begin(self, ids: torch.Tensor, state: SequenceState | SequenceGroup) -> Residual:
        """Start a pass over token ids int64 [T]: the next T tokens of `state`, or of each member of
        a group, concatenated. The same `state` goes into every `attend` of this pass."""
        vocab = self.config.vocab_size
        if ids.dim() != 1 or int(ids.min()) < 0 or int(ids.max()) >= vocab:
            raise LocalProtocolError(f"token ids must be [T] within 0..{vocab - 1}")
        residual = Residual(embedding(ids, self._embeddings), self.config.residual_blocks, state)
        for part in residual.parts:
            part.sequence.advance(part.stop - part.start)
        return residual

    @torch.inference_mode()
    def attend(
        self, layer: int, residual: Residual, state: SequenceState | SequenceGroup
    ) -> MoeWork | None:
        """Run `layer` up to its experts; None when the layer is dense and therefore done."""
        if state is not residual.state:
            raise LocalProtocolError(f"layer {layer}: this pass began with another state")
        own = self._layers[layer]
        mixed = own.attention_residual(residual.stack) if residual.has_blocks else residual.running
        if own.opens_block:
            residual.close_block()
        residual.add(own.attention(own.attention_norm(mixed), residual.parts))
        x = own.ffn_norm(own.ffn_residual(residual.stack))
        if isinstance(own.ffn, GatedMlp):
            residual.add(own.ffn(x))
            return None
        ids, weights = own.ffn.route(x)
        return MoeWork(layer, x, own.ffn.latent(x), ids, weights)

    @torch.inference_mode()
    def shared(self, work: MoeWork) -> torch.Tensor:
        """The shared experts' output [T, H]; independent of the routed rows, so it can overlap."""
        return self._moe(work.layer).shared(work.x)

    @torch.inference_mode()
    def finish(
        self,
        layer: int,
        residual: Residual,
        work: MoeWork,
        routed: torch.Tensor,
        shared: torch.Tensor,
    ) -> None:
        """Complete a MoE layer with the routed sum [T, latent] float32 and the shared output."""
        if work.layer != layer or routed.shape != work.z.shape:
            raise LocalProtocolError(
                f"layer {layer}: routed sum {tuple(routed.shape)} does not answer work of layer "
                f"{work.layer} for {tuple(work.z.shape)}"
            )
        residual.add(self._moe(layer).finish(routed).add_(shared))

    @torch.inference_mode()
    def logits(self, residual: Residual, last_only: bool = True) -> torch.Tensor:
        """Logits float32: [V] of the last token (for a group: [sequences, V]), or all [T, V].

        NotFinite when any value is NaN or infinite.
        """
        stack = residual.stack
        last_rows = residual.last_rows
        if last_only and len(last_rows) < stack.shape[1]:
            stack = stack[:, last_rows]
        logits = linear(self._norm(self._output_residual(stack)), self._head).float()
        # one number tells: a NaN or an infinity anywhere survives the sum
        if not math.isfinite(float(logits.sum())):
            raise NotFinite(
                f"logits of the step that ends at token {residual.parts[-1].sequence.length} are "
                "not finite; the request ends, because every later token would be wrong as well"
            )
        return logits[0] if last_only and len(last_rows) == 1 else logits

    def forward(
        self,
        ids: torch.Tensor,
        state: SequenceState | SequenceGroup,
        experts: ExpertFunction,
        last_only: bool = True,
    ) -> torch.Tensor:
        """A whole pass in one process; arguments and result as `begin` and `logits`."""
        residual = self.begin(ids, state)
        for layer in range(self.config.num_hidden_layers):
            work = self.attend(layer, residual, state)
            if work is not None:
                routed = combine(experts(layer, work.z, work.ids), work.weights)
                self.finish(layer, residual, work, routed, self.shared(work))
        return self.logits(residual, last_only)

    def _moe(self, layer: int) -> LatentMoe:
        ffn = self._layers[layer].ffn
        if isinstance(ffn, GatedMlp):
            raise LocalProtocolError(f"layer {layer} has no experts")
        return ffn
