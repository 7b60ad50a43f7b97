"""One lease as the node holds it: its rings, and the ring server on its thread.

Owns the order of opening and closing. Must not know messages or when a lease begins and ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor as ThreadPool
from dataclasses import dataclass
from typing import Final

from shared.core.errors import MeshError, RemoteProtocolError
from shared.core.wire import LeaseOffer
from shared.io.fabric import Fabric, FabricError
from spark_daemon.executor import Executor
from spark_daemon.ring_server import LeaseRings, RingServer, ServeCounters

RING_BYTES_MAX: Final = 2**30  # of either ring; 64 slots of 64 tokens at K3 size need a third
CLOSE_US: Final = 30_000_000  # the longest dispatch that is still waited for


def check_offer(offer: LeaseOffer, *, latent: int, bank_rows: int) -> None:
    """RemoteProtocolError when an offer does not fit this node's bank or a sane size."""
    ring = offer.ring
    if ring.latent != latent:
        raise RemoteProtocolError(f"offered rings of latent {ring.latent}, the bank has {latent}")
    if offer.canary_bank_row >= bank_rows:
        raise RemoteProtocolError(
            f"offered a canary of bank row {offer.canary_bank_row}, the bank has {bank_rows}"
        )
    if offer.reply_ring.length != ring.reply_ring_bytes:
        raise RemoteProtocolError(
            f"offered a reply ring of {offer.reply_ring.length} bytes, its shape needs "
            f"{ring.reply_ring_bytes}"
        )
    if max(ring.request_ring_bytes, ring.reply_ring_bytes) > RING_BYTES_MAX:
        raise RemoteProtocolError(f"offered rings of more than {RING_BYTES_MAX} bytes")


def open_rings(offer: LeaseOffer, fabric: Fabric) -> LeaseRings:
    """Register the request ring and reach the reply ring; FabricError leaves nothing open."""
    requests = fabric.register(offer.ring.request_ring_bytes)
    try:
        replies = fabric.connect(offer.reply_ring)
    except FabricError:
        requests.close()
        raise
    return LeaseRings(offer.epoch, offer.ring, requests, replies)


@dataclass(slots=True)
class HeldLease:
    """Rings and their server. Mutable: serving starts after opening."""

    rings: LeaseRings
    server: RingServer
    running: asyncio.Future[None] | None = None

    @classmethod
    def of(
        cls,
        rings: LeaseRings,
        *,
        fabric: Fabric,
        executor: Executor,
        counters: ServeCounters,
        clock_ns: Callable[[], int],
    ) -> HeldLease:
        """A lease that does not serve yet."""
        server = RingServer(
            rings, fabric=fabric, executor=executor, counters=counters, clock_ns=clock_ns
        )
        return cls(rings, server)

    def serve(self, pool: ThreadPool) -> asyncio.Future[None]:
        """Start the ring server on the pool's thread; the future ends when it does."""
        self.running = asyncio.get_running_loop().run_in_executor(pool, self.server.run)
        return self.running

    async def close(self) -> None:
        """Finish the dispatch in hand, then close the request ring, then give the reply ring back.

        MeshError when the dispatch does not end in CLOSE_US: the thread is stuck in the kernel.
        """
        self.server.stop()
        if self.running is not None:
            _, stuck = await asyncio.wait({self.running}, timeout=CLOSE_US / 1e6)
            if stuck:
                raise MeshError(
                    f"lease {self.rings.epoch}: the ring thread did not end its dispatch in "
                    f"{CLOSE_US} us: the kernel is stuck; the process must be restarted"
                )
        self.rings.requests.close()
        self.rings.replies.close()
