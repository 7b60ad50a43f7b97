"""The other process of the fabric contract tests: writes into a region it is given.

Usage: python -m tests.contract.fabric_peer PROVIDER MODE, with JSON on standard input.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from shared.core.ring_layout import Header, RingShape, bell_offset
from shared.core.wire import RegionDescriptor
from shared.io import ring
from shared.io.fabric import Fabric, RemoteRegion
from shared.io.fabric_shm import ShmFabric

PROVIDERS: dict[str, Callable[[], Fabric]] = {"shm": lambda: ShmFabric(spin_us=0)}
EPOCH = 3


def frame(latent_bytes: int, generation: int, *, epoch: int = EPOCH) -> tuple[Header, Any]:
    """A frame whose payload is a function of its generation."""
    payload = np.full(latent_bytes, generation % 251, np.uint8)
    return Header(1, epoch, generation, generation, 1, 1, latent_bytes, 0, 0, 0), payload


def flood(remote: RemoteRegion, shape: RingShape) -> None:
    """Write frames into all slots until killed."""
    generation = 0
    while True:
        generation += 1
        for slot in range(shape.slots):
            header, payload = frame(shape.request_slot_bytes - 64, generation)
            ring.send(remote, shape, slot, shape.request_slot_bytes, header, payload)
        if generation == 3:
            print("flooding", flush=True)


def echo(fabric: Fabric, remote: RemoteRegion, rounds: int) -> None:
    """Register a region, tell its descriptor, answer every bell with the bytes before it."""
    region = fabric.register(4096)
    print(msgspec.json.encode(region.descriptor).decode(), flush=True)
    seen = np.zeros(1, np.uint64)
    for _ in range(rounds):
        assert fabric.wait_changed(region, seen, 10_000_000) == 0
        seen[0] = region.memory[:8].view(np.uint64)[0]
        remote.write(64, region.memory[64:128].copy())
        remote.ring(bell_offset(0), int(seen[0]))


def main(provider: str, mode: str) -> None:
    """Do what the test asks."""
    order = json.load(sys.stdin)
    fabric = PROVIDERS[provider]()
    remote = fabric.connect(msgspec.convert(order["descriptor"], RegionDescriptor))
    if mode == "flood":
        flood(remote, msgspec.convert(order["shape"], RingShape))
    else:
        echo(fabric, remote, order["rounds"])


if __name__ == "__main__":
    main(*sys.argv[1:])
