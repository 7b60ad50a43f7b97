"""The data plane's seam: memory that a peer writes, and writing into a peer's memory.

Words as in verbs. A Region is registered memory (an MR): its descriptor travels in the lease, and
closing it deregisters it, after which no write through that descriptor is ever seen. A RemoteRegion
is the capability to write into a peer's region. All providers pass one contract suite
(tests/contract/test_fabric.py); only a provider knows how bytes move and how a sleeper is woken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from shared.core.errors import MeshError
from shared.core.wire import RegionDescriptor

Memory = npt.NDArray[np.uint8]

TIMED_OUT: Final = -1
INTERRUPTED: Final = -2


class FabricError(MeshError):
    """A region that cannot be registered, reached or written; names provider and peer."""

    code = "fabric_error"


class AccessRefused(FabricError):
    """The descriptor does not fit the region: wrong key, closed region, or outside its bounds."""

    code = "fabric_access_refused"


class Watch(NamedTuple):
    """A bell in a local region and the value waited for."""

    region: Region
    slot: int
    generation: int


class Region(Protocol):
    """Local memory that one peer may write."""

    @property
    def descriptor(self) -> RegionDescriptor:
        """What the peer needs to write here."""

    @property
    def memory(self) -> Memory:
        """The bytes, uint8 [length]; they change under the reader's feet."""

    def close(self) -> None:
        """Deregister: nothing written later is seen. Safe to call twice."""


class RemoteRegion(Protocol):
    """A peer's region as its writer sees it."""

    def write(self, offset: int, data: Memory | bytes) -> None:
        """Put bytes at `offset`; AccessRefused outside the region."""

    def ring(self, offset: int, value: int) -> None:
        """Put an 8-byte bell at `offset` after all earlier writes, then wake the owner."""

    def close(self) -> None:
        """Give the capability back. Safe to call twice."""


class Fabric(Protocol):
    """One process's end of a provider."""

    name: str

    def register(self, length: int) -> Region:
        """Zeroed local memory of `length` bytes for one peer to write."""

    def connect(self, descriptor: RegionDescriptor) -> RemoteRegion:
        """The capability behind a descriptor; AccessRefused when it is not (or no longer) good."""

    def wait_complete(self, groups: Sequence[Sequence[Watch]], *, timeout_us: int) -> int:
        """Index of the first group whose bells all show their generation, TIMED_OUT, INTERRUPTED.

        Holds no interpreter lock while it waits; spins first when the provider was told to.
        """

    def wait_changed(self, region: Region, seen: npt.NDArray[np.uint64], timeout_us: int) -> int:
        """Index of the first slot whose bell differs from `seen`, TIMED_OUT or INTERRUPTED."""

    def interrupt(self) -> None:
        """Make the current or next wait return INTERRUPTED; callable from any thread."""

    def close(self) -> None:
        """Deregister everything that is still registered."""
