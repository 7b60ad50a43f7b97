"""A Station and a node in one process, over real shared memory; the test plays the node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from shared.core.errors import CheckpointError
from shared.core.placement import Placement, balanced
from shared.core.record import RecordLayout
from shared.core.ring_layout import (
    Header,
    RingShape,
    Rows,
    build_reply,
    parse_dispatch,
    reply_bytes,
)
from shared.core.shape import ExpertShape, ModelShape
from shared.io import ring
from shared.io.fabric_shm import ShmFabric
from shared.kernels import codecs
from shared.kernels.expert import ExpertKernel
from shared.kernels.select import select_kernel
from station.channel import NodeChannel
from station.deadline import DeadlinePolicy
from station.expert_path import ExpertPath, LayerWork, NodeReport, OnMiss, Waiting
from station.faults import NoFaults
from station.ledger import WorkKey
from station.local_experts import ColdStore, LocalTier
from station.places import Places

SHAPE = ModelShape(
    layers=2, first_moe_layer=1, experts=12, top_k=4, expert=ExpertShape(latent=32, width=16)
)
RING = RingShape(slots=2, max_tokens=8, max_rows=32, latent=32)
LAYER, EPOCH = 1, 7
NODE = 1  # place of the node the test plays; place 0 is the Station's own


class Records:
    """A checkpoint of random experts."""

    def __init__(self) -> None:
        self.layout = RecordLayout(SHAPE.expert)
        rng = np.random.default_rng(5)
        self.records = [self._record(rng) for _ in range(SHAPE.experts)]
        self.fails = 0  # so many reads fail before they succeed again

    def _record(self, rng: np.random.Generator) -> bytes:
        data = np.zeros(self.layout.record_bytes, np.uint8)
        for matrix, shape in (("w1", (16, 32)), ("w3", (16, 32)), ("w2", (32, 16))):
            weight = rng.normal(size=shape).astype(np.float32)
            scale_2 = codecs.nvfp4_scale_2(weight)
            packed, scale = codecs.nvfp4_encode(weight, scale_2)
            parts = {
                f"{matrix}.weight": packed,
                f"{matrix}.weight_scale": scale,
                f"{matrix}.weight_scale_2": np.array([scale_2], np.float32),
                f"{matrix}.input_scale": np.ones(1, np.float32),
            }
            for tensor in self.layout.fields:
                if tensor.name in parts:
                    raw = np.ascontiguousarray(parts[tensor.name]).view(np.uint8).reshape(-1)
                    data[tensor.offset : tensor.offset + tensor.length] = raw
        return data.tobytes()

    def expert_record(self, layer: int, expert: int) -> bytes:
        """The record of an expert; the test's model has one MoE layer."""
        assert layer == LAYER
        if self.fails:
            self.fails -= 1
            raise CheckpointError("read failed; check the disk")
        return self.records[expert]


@dataclass
class Clock:
    """Time that moves when the test says so."""

    us: int = 1_000

    def now_us(self) -> int:
        """Current microsecond."""
        return self.us


@dataclass
class World:
    """A Station and a node that share one process and real memory."""

    records: Records = field(default_factory=Records)
    clock: Clock = field(default_factory=Clock)
    reports: list[NodeReport] = field(default_factory=list)
    placement: Placement = field(
        default_factory=lambda: balanced(
            "m", SHAPE, [("hbm", "hbm", 1.0), ("spark0", "spark", 2.0)]
        )
    )

    def __post_init__(self) -> None:
        self.kernel: ExpertKernel = select_kernel(SHAPE.expert, "auto")
        self.station, self.node = ShmFabric(spin_us=0), ShmFabric(spin_us=0)
        own = self.placement.nodes[0].bank_rows
        self.places = Places(
            self.placement,
            {0: LocalTier(self.kernel, SHAPE.expert, self.records, own)},
        )
        self.everything = LocalTier(
            self.kernel, SHAPE.expert, self.records, [(LAYER, e) for e in range(SHAPE.experts)]
        )

    def attach(self, shape: RingShape = RING, place: int = NODE) -> NodeChannel:
        """Grant a node a lease; with another shape than RING it cannot answer."""
        self.request_ring = self.node.register(shape.request_ring_bytes)
        reply_ring = self.station.register(shape.reply_ring_bytes)
        self.reply = self.node.connect(reply_ring.descriptor)
        channel = NodeChannel(
            node=self.placement.nodes[place].name,
            place=place,
            epoch=EPOCH,
            shape=shape,
            request_ring=self.station.connect(self.request_ring.descriptor),
            reply_ring=reply_ring,
            kernel_id=self.kernel.kernel_id,
            stats=self.places.stats[place],
            now_us=self.clock.now_us,
            pause=lambda: None,
        )
        self.places.attach(channel)
        return channel

    def path(self, on_miss: OnMiss = "exact") -> ExpertPath:
        """An expert path over this world."""
        return ExpertPath(
            places=self.places,
            cold_store=ColdStore(self.kernel, SHAPE.expert, self.records, capacity=3),
            on_miss=on_miss,
            deadline=DeadlinePolicy(),
            now_us=self.clock.now_us,
            report=self.reports.append,
            faults=NoFaults(),
        )

    def answer(
        self,
        slot: int,
        generation: int = 1,
        *,
        change: Callable[[Header, np.ndarray, np.ndarray, Rows], Header] | None = None,
    ) -> None:
        """Do a node's work for the dispatch in `slot`; `change` may spoil the answer in place."""
        frame = ring.receive(
            self.request_ring,
            RING,
            slot,
            RING.request_slot_bytes,
            epoch=EPOCH,
            generation=generation,
        )
        assert isinstance(frame, ring.Frame)
        parsed = parse_dispatch(frame.header, frame.payload, RING.latent)
        assert parsed is not None
        pairs, activations = parsed[0].copy(), parsed[1]
        rows = self.everything.rows(
            LAYER, pairs[:, 1].astype(np.int64), pairs[:, 0].astype(np.int64), activations
        )
        status = np.zeros(len(rows), np.uint8)
        header = frame.header._replace(
            payload_bytes=reply_bytes(len(rows), RING.latent),
            time_us=3,
            compute_us=5,
            kernel_id=self.kernel.kernel_id,
        )
        if change is not None:
            header = change(header, pairs, status, rows)
        payload = build_reply(pairs, status, rows)
        ring.send(self.reply, RING, slot, RING.reply_slot_bytes, header, payload)


def work(tokens: int = 3) -> LayerWork:
    """A layer in which every token touches both places."""
    rng = np.random.default_rng(tokens)
    ids = np.stack([rng.permutation(SHAPE.experts)[: SHAPE.top_k] for _ in range(tokens)])
    activations = codecs.bf16_bits(rng.normal(size=(tokens, 32)).astype(np.float32))
    return LayerWork(WorkKey("r", 0, LAYER), ids.astype(np.int64), activations)


def expected(world: World, layer: LayerWork) -> Rows:
    """All rows computed in one place."""
    tokens = np.repeat(np.arange(len(layer.ids)), SHAPE.top_k)
    return world.everything.rows(LAYER, layer.ids.reshape(-1), tokens, layer.activations)


def run(
    path: ExpertPath, layer: LayerWork, when_waiting: Callable[[Waiting], None]
) -> tuple[Rows, int]:
    """Drive the generator; `when_waiting` acts at each wait. Returns rows and waits."""
    walk = path.rows(layer, lambda: None)
    waits = 0
    while True:
        try:
            waiting = next(walk)
        except StopIteration as stop:
            return stop.value, waits
        waits += 1
        when_waiting(waiting)
