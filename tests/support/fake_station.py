"""A Station for node tests: the real link, fabric and ring code, driven by the test itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import structlog

from services.banks.builder import build
from shared.core import wire
from shared.core.placement import Placement, balanced
from shared.core.record import RecordLayout
from shared.core.ring_layout import (
    Header,
    Pairs,
    RingShape,
    Rows,
    build_dispatch,
    parse_reply,
)
from shared.core.shape import ExpertShape, ModelShape
from shared.io import keys, ring
from shared.io.fabric import TIMED_OUT, RemoteRegion, Watch
from shared.io.fabric_shm import ShmFabric, ShmRegion
from shared.io.link import Peer, StationLink, listen
from shared.kernels.codecs import nvfp4_encode, nvfp4_scale_2
from shared.kernels.expert import ExpertKernel
from shared.kernels.select import select_kernel

MODEL = ModelShape(3, 1, 8, 2, ExpertShape(latent=32, width=48))
RING = RingShape(slots=4, max_tokens=8, max_rows=32, latent=MODEL.expert.latent)
PATIENCE_S = 10.0
M = TypeVar("M")


class TinyExperts:
    """A checkpoint of random NVFP4 experts."""

    digest = "tiny-model"
    layout = RecordLayout(MODEL.expert)

    def expert_record(self, layer: int, expert: int) -> bytes:
        """The record of one expert; a function of (layer, expert)."""
        rng = np.random.default_rng((layer, expert))
        shape = MODEL.expert
        parts, scales = [], []
        for outputs, inputs in (
            (shape.width, shape.latent),
            (shape.width, shape.latent),
            (shape.latent, shape.width),
        ):
            weight = rng.normal(0, 0.4, (outputs, inputs)).astype(np.float32)
            scale_2 = nvfp4_scale_2(weight)
            packed, scale = nvfp4_encode(weight, scale_2)
            parts += [packed.tobytes(), scale.tobytes()]
            scales.append(np.float32(scale_2).tobytes())
        return b"".join([*parts, *scales, np.ones(3, np.float32).tobytes()])

    def read_expert_record(self, layer: int, expert: int, buffer: memoryview) -> None:
        """The same into a buffer."""
        buffer[:] = self.expert_record(layer, expert)

    def stored_hash(self, layer: int, expert: int) -> None:
        """Records are stored as they are."""

    def position(self, layer: int, expert: int) -> tuple[str, int]:
        """All at one place: any order is as good as another."""
        return "", 0

    def release(self, experts: Sequence[tuple[int, int]]) -> None:
        """Nothing is cached."""


def tiny_placement(model_digest: str = TinyExperts.digest) -> Placement:
    """Two nodes that share the tiny model."""
    return balanced(model_digest, MODEL, [("spark0", "spark", 1.0), ("grace", "grace", 1.0)])


def own_arena(node: str) -> tuple[np.ndarray[Any, Any], tuple[tuple[int, int], ...]]:
    """The records of a node made without any bank code: (arena, keys in row order)."""
    rows = tiny_placement().node(node).rows
    stride = RecordLayout(MODEL.expert).stride_bytes
    arena = np.zeros((len(rows), stride), np.uint8)
    for row, (layer, expert) in enumerate(rows):
        record = TinyExperts().expert_record(layer, expert)
        arena[row, : len(record)] = np.frombuffer(record, np.uint8)
    return arena, rows


def kernel() -> ExpertKernel:
    """The kernel nodes choose by themselves."""
    return select_kernel(MODEL.expert)


@dataclass
class Home:
    """Files of one pod in a temporary folder."""

    root: Path
    node: str = "spark0"

    @classmethod
    def make(cls, root: Path, node: str = "spark0") -> Home:
        """Keys of both ends and the node's bank."""
        keys.create(root / "station", "station")
        keys.create(root / "nodes", node)
        build(TinyExperts(), tiny_placement(), node, root / f"{node}.k3bank")
        return cls(root, node)

    @property
    def bank(self) -> Path:
        return self.root / f"{self.node}.k3bank"

    def station_keys(self) -> keys.KeyPair:
        return keys.load_secret(self.root / "station" / "station.key_secret")

    def allow_list(self) -> dict[str, str]:
        return dict(keys.load_allow_list(self.root / "nodes"))

    def command(self, address: str, *extra: str, module: str = "spark_daemon") -> list[str]:
        return [
            sys.executable, "-m", module, self.node,
            "--bank", str(self.bank),
            "--station", address,
            "--station-key", str(self.root / "station" / "station.key"),
            "--node-key", str(self.root / "nodes" / f"{self.node}.key_secret"),
            "--no-pin",
            *extra,
        ]  # fmt: skip


@dataclass
class NodeProcess:
    """A real node process; its log is read as JSON lines."""

    process: subprocess.Popen[bytes]
    log_path: Path

    @classmethod
    def start(cls, command: list[str], log_path: Path, **environ: str) -> NodeProcess:
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                command,
                stderr=log,
                stdout=log,
                env={**os.environ, "K3_LOG": "json", "OMP_NUM_THREADS": "1", **environ},
            )
        return cls(process, log_path)

    def events(self) -> list[dict[str, Any]]:
        """Log lines so far."""
        lines = self.log_path.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def names(self) -> list[str]:
        return [event["event"] for event in self.events()]

    async def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Exit status."""
        return await asyncio.to_thread(self.process.wait, timeout_s)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@dataclass
class Lease:
    """The Station's side of one lease."""

    epoch: int
    replies: ShmRegion
    shape: RingShape
    requests: RemoteRegion | None = None
    request_descriptor: wire.RegionDescriptor | None = None
    canary_row: bytes = b""

    def dispatch(
        self,
        slot: int,
        generation: int,
        layer: int,
        pairs: Pairs,
        activations: Rows,
        ticket: int = 1,
    ) -> None:
        """Post a dispatch."""
        payload = build_dispatch(pairs, activations)
        header = Header(
            layer, self.epoch, generation, ticket, len(activations), len(pairs), len(payload),
            1_000_000, 0, 0,
        )  # fmt: skip
        self.send(slot, header, payload)

    def send(self, slot: int, header: Header, payload: np.ndarray[Any, Any]) -> None:
        """Post any frame."""
        assert self.requests is not None
        ring.send(self.requests, self.shape, slot, self.shape.request_slot_bytes, header, payload)

    def read(self, slot: int, generation: int) -> ring.Frame | ring.Verdict:
        """What lies in a reply slot."""
        return ring.receive(
            self.replies,
            self.shape,
            slot,
            self.shape.reply_slot_bytes,
            epoch=self.epoch,
            generation=generation,
        )


@dataclass
class FakeStation:
    """Answers heartbeats by itself; everything else is the test's business."""

    link: StationLink[wire.ToStation, wire.ToNode]
    fabric: ShmFabric
    incarnation: int
    answers_heartbeats: bool = True
    peer: Peer | None = None
    inbox: asyncio.Queue[wire.ToStation] = field(default_factory=lambda: asyncio.Queue(256))
    beats: asyncio.Queue[wire.Heartbeat] = field(default_factory=lambda: asyncio.Queue(256))

    async def run(self) -> None:
        while True:
            self.peer, message = await self.link.receive()
            if not isinstance(message, wire.Heartbeat):
                self.inbox.put_nowait(message)
                continue
            if self.beats.full():
                self.beats.get_nowait()
            self.beats.put_nowait(message)
            if self.answers_heartbeats:
                self.say(wire.HeartbeatSeen(epoch=message.epoch, **self.signed()))

    def signed(self) -> dict[str, Any]:
        return {"sender": "station", "incarnation": self.incarnation}

    def say(self, message: wire.ToNode) -> None:
        assert self.peer is not None
        self.link.send(self.peer, message)

    async def expect(self, kind: type[M]) -> M:
        """The next message of a kind; others before it are dropped."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = await self.inbox.get()
                if isinstance(message, kind):
                    return message

    def offer(self, epoch: int, *, ring_shape: RingShape = RING, **changes: Any) -> Lease:
        """Send an offer; the lease still has to be accepted."""
        region = self.fabric.register(ring_shape.reply_ring_bytes)
        fields: dict[str, Any] = {
            "epoch": epoch,
            "ring": ring_shape,
            "reply_ring": region.descriptor,
            "canary_bank_row": 0,
            "canary_seed": 5,
            "heartbeat_us": 50_000,
            "ttl_us": 2_000_000,
        }
        self.say(wire.LeaseOffer(**(fields | changes), **self.signed()))
        return Lease(epoch, region, ring_shape)

    async def lease(self, epoch: int, **changes: Any) -> Lease:
        """Hello, offer, canary, grant."""
        await self.expect(wire.Hello)
        lease = self.offer(epoch, **changes)
        await self.grant(lease)
        return lease

    async def grant(self, lease: Lease) -> None:
        accepted = await self.expect(wire.LeaseAccepted)
        assert accepted.epoch == lease.epoch
        lease.canary_row = accepted.canary_row
        lease.request_descriptor = accepted.request_ring
        lease.requests = self.fabric.connect(accepted.request_ring)
        self.say(wire.LeaseGranted(epoch=lease.epoch, **self.signed()))

    async def answer(
        self, lease: Lease, slot: int, generation: int
    ) -> tuple[Header, Pairs, np.ndarray[Any, Any], Rows]:
        """The verified reply to a dispatch."""
        watch = Watch(lease.replies, slot, generation)
        group = await asyncio.to_thread(
            self.fabric.wait_complete, [[watch]], timeout_us=int(PATIENCE_S * 1e6)
        )
        assert group != TIMED_OUT, "no reply in time"
        frame = lease.read(slot, generation)
        assert isinstance(frame, ring.Frame), frame
        parsed = parse_reply(frame.header, frame.payload, lease.shape.latent)
        assert parsed is not None
        return frame.header, *parsed

    async def beat(self, shows: Callable[[wire.NodeCounters], bool]) -> wire.Heartbeat:
        """The next heartbeat whose counters show something."""
        async with asyncio.timeout(PATIENCE_S):
            while not shows((beat := await self.beats.get()).counters):
                pass
        return beat


@asynccontextmanager
async def station(
    home: Home, *, address: str = "tcp://127.0.0.1:0", incarnation: int = 1, admit: bool = True
) -> AsyncIterator[FakeStation]:
    """A listening Station; leaving the block is its sudden end."""
    fabric = ShmFabric(spin_us=0)
    async with (
        asyncio.TaskGroup() as tasks,
        listen(
            address,
            keys=home.station_keys(),
            allow_list=home.allow_list() if admit else {},
            decode=wire.decode_to_station,
            encode=wire.encode,
            tasks=tasks,
            log=structlog.get_logger(),
        ) as link,
    ):
        fake = FakeStation(link, fabric, incarnation)
        receiving = tasks.create_task(fake.run())
        try:
            yield fake
        finally:
            receiving.cancel()
            fabric.close()
