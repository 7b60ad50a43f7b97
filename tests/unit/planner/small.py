"""Small pods, models and routing for the planner's tests; none of it is a stand-in for our code."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.planner.ledger import Ledger, take_ledger
from services.planner.pod import HopCost, NodePower, Pod, PodNode, TokenCost
from services.routing.trace import SYNTHETIC, Trace
from shared.core.placement import Tier
from shared.core.record import RecordLayout
from shared.core.shape import ExpertShape, ModelShape

EXPERT = ExpertShape(latent=16, width=16)
RECORD_BYTES = RecordLayout(EXPERT).record_bytes
COSTS: dict[Tier, tuple[float, float]] = {
    "hbm": (0.0, 8.0), "grace": (0.0, 53.0), "rtx": (93.0, 12.0), "spark": (184.5, 84.5),
}  # fmt: skip


def shape_of(layers: int, experts: int, top_k: int = 2) -> ModelShape:
    """A model whose first layer is dense, so that layer indices and layers differ."""
    return ModelShape(
        layers=layers + 1, first_moe_layer=1, experts=experts, top_k=top_k, expert=EXPERT
    )


def node(
    name: str,
    tier: Tier,
    slots: int,
    *,
    layer_max: int | None = None,
    times: float = 1.0,
    power: NodePower | None = None,
) -> PodNode:
    """A node with room for `slots` experts, and a few bytes that hold none."""
    fixed, slope = COSTS[tier]
    return PodNode(
        name=name,
        tier=tier,
        memory_bytes=slots * RECORD_BYTES + RECORD_BYTES - 1,
        layer_experts_max=layer_max,
        cost=HopCost(
            fixed_us=fixed * times,
            fixed_basis="measured",
            per_expert_us=slope * times,
            per_expert_basis="measured",
        ),
        power=power,
    )


def pod_of(*nodes: PodNode) -> Pod:
    """A pod with nothing but nodes."""
    token = TokenCost(serial_us=400, serial_basis="assumed", rest_ms=1.8, rest_basis="assumed")
    return Pod(name="small", nodes=nodes, token=token)


def usual_pod(layers: int = 4, experts: int = 24) -> tuple[Pod, Ledger, ModelShape]:
    """HBM, Grace, RTX and two Sparks that hold at most a quarter of each layer each."""
    shape = shape_of(layers, experts)
    total = shape.routed_experts
    pod = pod_of(
        node("hbm", "hbm", total // 8),
        node("grace", "grace", total // 4),
        node("rtx", "rtx", total // 8),
        node("spark0", "spark", total, layer_max=experts // 3),
        node("spark1", "spark", total, layer_max=experts // 3),
    )
    return pod, take_ledger(pod, shape), shape


def routing(shape: ModelShape, *, tokens: int = 40, requests: int = 5, seed: int = 0) -> Trace:
    """Routing with hot and cold experts, other ones in every layer."""
    rng = np.random.default_rng(seed)
    layers = len(shape.moe_layers)
    ids = np.empty((tokens, layers, shape.top_k), np.uint16)
    for layer in range(layers):
        weights = rng.permutation(1.0 / np.arange(1, shape.experts + 1))
        for token in range(tokens):
            ids[token, layer] = rng.choice(
                shape.experts, shape.top_k, replace=False, p=weights / weights.sum()
            )
    request = np.sort(rng.integers(0, requests, tokens)).astype(np.int32)
    return Trace(SYNTHETIC, 1, shape.experts, request, np.arange(tokens, dtype=np.int32), ids)


def histogram_of(shape: ModelShape, seed: int) -> npt.NDArray[np.int64]:
    """Calls of each expert with many ties, some layers busier than others."""
    rng = np.random.default_rng(seed)
    size = (len(shape.moe_layers), shape.experts)
    return rng.integers(0, 6, size) * rng.integers(1, 4, (size[0], 1))
