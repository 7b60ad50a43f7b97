"""Taking one module's weights from a checkpoint: by short name, fused, in the model's dtype.

Owns where rounding happens at load: a weight is dequantised in float32 and rounded once. Fusing
matrices that read the same input saves a call, and a pass over the input, per fused matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from station.model.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class ModuleWeights:
    """The tensors below one name prefix (which ends in a dot)."""

    checkpoint: Checkpoint
    prefix: str
    dtype: torch.dtype

    def below(self, prefix: str) -> ModuleWeights:
        """The tensors of a submodule, e.g. `below("self_attn.")`."""
        return ModuleWeights(self.checkpoint, self.prefix + prefix, self.dtype)

    def matrix(self, *names: str) -> torch.Tensor:
        """One [sum of outputs, inputs] matrix in the model's dtype: the named ones, stacked."""
        parts = [
            self.checkpoint.weight(f"{self.prefix}{name}.weight", self.dtype) for name in names
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def vector(self, name: str) -> torch.Tensor:
        """`name.weight` in the model's dtype."""
        return self.checkpoint.weight(f"{self.prefix}{name}.weight", self.dtype)

    def exact(self, name: str) -> torch.Tensor:
        """The tensor of this very name in float32, whatever the model's dtype."""
        return self.checkpoint.weight(f"{self.prefix}{name}", torch.float32)
