"""Sizes of a K3-architecture model that both ends of the pod must agree on."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

Size = Annotated[int, msgspec.Meta(ge=1, le=2**20)]


class ExpertShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One expert: w1 and w3 are [width, latent], w2 is [latent, width]."""

    latent: Size
    width: Size

    def __post_init__(self) -> None:
        """NVFP4 scales cover 16 inputs, so both dimensions are multiples of 16."""
        if self.latent % 16 or self.width % 16:
            raise ValueError(f"latent {self.latent} and width {self.width} must be multiples of 16")


class ModelShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The routed part of a model: which layers have experts, how many, how many per token."""

    layers: Size
    first_moe_layer: Annotated[int, msgspec.Meta(ge=0)]
    experts: Annotated[int, msgspec.Meta(ge=1, le=2**16 - 1)]
    top_k: Annotated[int, msgspec.Meta(ge=1, le=64)]
    expert: ExpertShape

    @property
    def moe_layers(self) -> range:
        """0-based indices of the layers that have routed experts."""
        return range(self.first_moe_layer, self.layers)

    @property
    def routed_experts(self) -> int:
        """Routed experts of the whole model."""
        return len(self.moe_layers) * self.experts


K3: Final = ModelShape(
    layers=93, first_moe_layer=1, experts=896, top_k=16, expert=ExpertShape(latent=3584, width=3072)
)
