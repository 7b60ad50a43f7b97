"""Builds the Station from its settings; what can fail fails here, before it serves."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from starlette.applications import Starlette
from structlog.typing import FilteringBoundLogger

from shared.core.errors import ConfigError, DigestMismatch
from shared.core.placement import Placement
from shared.core.ring_layout import RingShape
from shared.core.wire import ToNode, ToStation
from shared.io.fabric_shm import ShmFabric
from shared.io.link import StationLink
from shared.io.placement_file import read_placement
from shared.kernels.expert import ExpertKernel
from shared.kernels.select import select_kernel
from station import epoch_file, faults
from station.admission import Admission
from station.config import StationConfig
from station.coordinator import Coordinator
from station.engine import Engine
from station.expert_path import ExpertPath, NodeReport
from station.http.app import build_app
from station.http.chat import ChatParts
from station.http.limits import EndpointLimits
from station.http.metrics import HttpCounters
from station.http.routing import RoutingParts
from station.local_experts import ColdStore, LocalTier
from station.membership import Membership
from station.model.checkpoint import Checkpoint
from station.model.network import K3Text
from station.nodes import Nodes
from station.places import Places
from station.routing_tap import RoutingTap
from station.tokenizer.vocabulary import Tokenizer

PAUSE_S = 100e-6


def now_us() -> int:
    """This process's monotonic clock."""
    return time.monotonic_ns() // 1000


def unix_s() -> int:
    """Seconds since 1970, for the fields of the OpenAI protocol that want them."""
    return time.time_ns() // 1_000_000_000


def pause() -> None:
    """Wait a moment for the rest of a torn frame."""
    time.sleep(PAUSE_S)


@dataclass(frozen=True, slots=True)
class Core:
    """The parts that need no event loop."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    placement: Placement
    kernel: ExpertKernel
    model: K3Text
    fabric: ShmFabric
    places: Places
    ring: RingShape
    tap: RoutingTap


def build_core(config: StationConfig, log: FilteringBoundLogger) -> Core:
    """Open the checkpoint, check that everything belongs together, load weights and own experts."""
    checkpoint = Checkpoint.open(Path(config.checkpoint))
    tokenizer = Tokenizer.load(Path(config.checkpoint))
    placement = load_placement(Path(config.placement), checkpoint)
    shape = placement.shape.expert
    kernel = select_kernel(shape, config.kernel, threads=config.kernel_threads)
    if kernel.name == "reference":
        log.warning("kernel_is_slow", kernel=kernel.name, remedy="install a compiler: make setup")
    torch.set_num_threads(config.torch_threads)
    model = K3Text.load(checkpoint, getattr(torch, config.dtype))
    local = {
        place: LocalTier(kernel, shape, checkpoint, node.bank_rows)
        for place, node in enumerate(placement.nodes)
        if node.tier == "hbm"
    }
    log.info(
        "model_loaded",
        model_digest=checkpoint.digest[:16],
        layers=placement.shape.layers,
        local_experts=sum(len(tier) for tier in local.values()),
        kernel=kernel.name,
    )
    return Core(
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        placement=placement,
        kernel=kernel,
        model=model,
        fabric=ShmFabric(spin_us=config.spin_us),
        places=Places(placement, local),
        ring=ring_shape(config, placement),
        tap=RoutingTap(placement.shape),
    )


def load_placement(path: Path, checkpoint: Checkpoint) -> Placement:
    """The placement file, checked against the checkpoint it must belong to."""
    placement = read_placement(path)
    if placement.model_digest != checkpoint.digest or placement.shape != checkpoint.config.shape:
        raise DigestMismatch(
            f"{path} was made for model {placement.model_digest[:16]}, the checkpoint is "
            f"{checkpoint.digest[:16]}: make the placement and the banks again"
        )
    return placement


def ring_shape(config: StationConfig, placement: Placement) -> RingShape:
    """Ring geometry of every lease: a token's pairs fit one dispatch, all requests one ring.

    A ring that busy requests alone could fill would look like a node that is behind.
    """
    top_k = placement.shape.top_k
    limits = config.limits
    if config.ring.max_rows < top_k:
        raise ConfigError(
            f"ring.max_rows is {config.ring.max_rows}, a token needs {top_k}: raise it to at least "
            f"{top_k}"
        )
    chunk_tokens = min(config.ring.max_tokens, config.ring.max_rows // top_k)
    needed = limits.active * -(-limits.prefill_tokens // chunk_tokens)
    if config.ring.slots < needed:
        raise ConfigError(
            f"ring.slots is {config.ring.slots}: {limits.active} requests that each read "
            f"{limits.prefill_tokens} tokens may need {needed} slots at one node; raise ring.slots "
            "or ring.max_rows, or lower limits.active or limits.prefill_tokens"
        )
    return RingShape(
        slots=config.ring.slots,
        max_tokens=config.ring.max_tokens,
        max_rows=config.ring.max_rows,
        latent=placement.shape.expert.latent,
    )


def build_engine(
    core: Core, config: StationConfig, on_bug: Callable[[str, BaseException], None]
) -> Engine:
    """The model thread, not started."""
    return Engine(
        fabric=core.fabric,
        places=core.places,
        now_us=now_us,
        on_bug=on_bug,
        torch_threads=config.torch_threads,
    )


def build_nodes(
    core: Core,
    config: StationConfig,
    engine: Engine,
    link: StationLink[ToStation, ToNode],
    log: FilteringBoundLogger,
) -> Nodes:
    """The control shell, with epochs above those of every earlier start."""
    return Nodes(
        link=link,
        membership=Membership(
            placement=core.placement,
            kernel_id=core.kernel.kernel_id,
            last_epoch=epoch_file.next_base(Path(config.state_directory)),
        ),
        places=core.places,
        engine=engine,
        fabric=core.fabric,
        ring=core.ring,
        kernel=core.kernel,
        source=core.checkpoint,
        incarnation=secrets.randbits(63),
        now_us=now_us,
        pause=pause,
        log=log,
    )


def build_pod(
    core: Core, config: StationConfig, engine: Engine, nodes: Nodes, log: FilteringBoundLogger
) -> Coordinator:
    """The coordinator; called on the running event loop, to which layer verdicts are sent."""
    loop = asyncio.get_running_loop()

    def report(verdict: NodeReport) -> None:
        loop.call_soon_threadsafe(nodes.report, verdict)

    shape = core.placement.shape.expert
    path = ExpertPath(
        places=core.places,
        cold_store=ColdStore(core.kernel, shape, core.checkpoint, capacity=config.cold_records),
        on_miss=config.on_miss,
        deadline=config.deadline,
        now_us=now_us,
        report=report,
        faults=faults.from_environ(os.environ, nodes.pid_of),
    )
    return Coordinator(
        model=core.model,
        model_name=config.model_name,
        created_s=unix_s(),
        path=path,
        engine=engine,
        nodes=nodes,
        admission=Admission(config.limits),
        tap=core.tap,
        now_us=now_us,
        log=log,
    )


def build_chat(
    core: Core,
    pod: Coordinator,
    token: str | None,
    stop: asyncio.Event,
    log: FilteringBoundLogger,
) -> Starlette:
    """The chat endpoint's application; `stop` ends the streams that have no end of their own."""
    parts = ChatParts(
        backend=pod,
        tokenizer=core.tokenizer,
        limits=EndpointLimits(),
        counters=HttpCounters(),
        log=log,
        new_id=lambda: secrets.token_hex(12),
        wall_clock_s=unix_s,
        clock_ns=time.monotonic_ns,
    )
    routing = RoutingParts(
        tap=core.tap,
        model_digest=core.checkpoint.digest,
        shape=core.placement.shape,
        stop=stop,
        log=log,
    )
    return build_app(parts, token=token, routing=routing)
