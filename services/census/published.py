"""The published census of the two Kimi-K3 releases, and how another checkpoint differs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from services.census.report import Census
from shared.core.record import RecordLayout
from shared.core.shape import K3

_SHARDS: Final = 96
_VISION_TENSORS: Final = 168
_NVFP4_PAYLOAD_BYTES: Final = 1_609_777_087_808


@dataclass(frozen=True, slots=True)
class Release:
    """Figures of one release; None is a figure that was never published."""

    name: str
    tensors: int
    expert_tensors: int
    expert_bytes: int
    text_bytes: int
    payload_bytes: int | None


RELEASES: Final[Mapping[str, Release]] = {
    "nvfp4-mixed": Release(
        name="nvidia/Kimi-K3-NVFP4",
        tensors=992_508,
        expert_tensors=12,
        expert_bytes=RecordLayout(K3.expert).record_bytes,
        text_bytes=77_338_674_496,
        payload_bytes=_NVFP4_PAYLOAD_BYTES,
    ),
    "mxfp4": Release(
        name="moonshotai/Kimi-K3",
        tensors=497_220,
        expert_tensors=6,
        expert_bytes=17_547_264,
        text_bytes=113_509_540_864,
        payload_bytes=None,
    ),
}


def differences(census: Census) -> tuple[str, ...]:
    """Every figure that is not the published one, named; of the release that has this layout."""
    release = RELEASES.get(census.layout)
    if release is None:
        return (f"layout is {census.layout}, published are {' and '.join(RELEASES)}",)
    return tuple(
        f"{name}: {_shown(found)}, {release.name} has {_shown(published)}"
        for name, found, published in _figures(census, release)
        if found != published
    )


def _figures(census: Census, release: Release) -> Iterator[tuple[str, object, object]]:
    experts = census.experts
    yield "shards", census.shards, _SHARDS
    yield "tensors", census.tensors, release.tensors
    if release.payload_bytes is not None:
        yield "bytes of tensors", census.payload_bytes, release.payload_bytes
    yield "routed experts", experts.experts, K3.routed_experts
    yield "layers with experts", experts.layers, _layers_text()
    yield "experts per layer", _only(experts.experts_per_layer), K3.experts
    yield "bytes per expert", _only(experts.bytes_per_expert), release.expert_bytes
    yield "tensors per expert", _only(experts.tensors_per_expert), release.expert_tensors
    yield "text bytes without experts", census.text.bytes, release.text_bytes
    yield "vision tensors", census.vision.tensors, _VISION_TENSORS
    yield "tensors of neither", census.other.tensors, 0
    yield "order of experts in a shard", experts.order, "lexicographic"
    if census.scales is not None:
        scales = census.scales
        yield "experts whose w1 and w3 differ in weight_scale_2", scales.unequal_w1_w3, 0
        yield "input scales other than 1", scales.input_scales_not_one, 0
        yield "scale scalars negative or not finite", scales.negative + scales.not_finite, 0
    if census.block_scales is not None:
        blocks = census.block_scales
        yield "block scales negative or NaN", blocks.negative + blocks.nan, 0


def _layers_text() -> str:
    return f"{K3.moe_layers[0]}-{K3.moe_layers[-1]}"


def _only(counts: Mapping[int, int]) -> object:
    return next(iter(counts)) if len(counts) == 1 else f"{len(counts)} different values"


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
