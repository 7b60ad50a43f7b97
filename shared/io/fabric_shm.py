"""The fabric on one host: a memfd is the registered memory, a store is the remote write.

A peer of the same user opens the owner's memfd through /proc, so a killed process leaves nothing
behind. The first page of a memfd holds the region's key and is not part of the region. Sleeping
waiters are woken by a futex word that all regions of a process share.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from shared._native import ffi, lib
from shared.core.errors import LocalProtocolError
from shared.core.ring_layout import BELL_BYTES, PAGE_BYTES, bell_offset
from shared.core.wire import RegionDescriptor
from shared.io.fabric import INTERRUPTED, AccessRefused, FabricError, Memory, Region, Watch

PROVIDER: Final = "shm"
_KEY: Final = struct.Struct("<QQ")  # key, length
_MAGIC_OFFSET: Final = 0
_WAKE_BYTES: Final = PAGE_BYTES
_COUNTER, _WAITERS, _INTERRUPT = range(3)  # uint32 words of the wake page
_MODE_EQUAL, _MODE_CHANGED = 0, 1
_LOCATOR: Final = re.compile(r"/proc/[0-9]{1,10}/fd/[0-9]{1,10}")


class ShmRegion:
    """A sealed memfd of this process; see Region."""

    def __init__(self, length: int, wake_locator: str) -> None:
        """Allocate `length` zeroed bytes behind a key page."""
        self._fd, self._map = _create_memfd("k3-region", PAGE_BYTES + length)
        key = secrets.randbits(63)
        _KEY.pack_into(self._map, 0, key, length)
        self._memory: Memory | None = np.frombuffer(self._map, np.uint8, length, PAGE_BYTES)
        self.bells_address = int(self._memory.ctypes.data)
        self._descriptor = RegionDescriptor(
            provider=PROVIDER,
            locator=_locator(self._fd),
            wake_locator=wake_locator,
            length=length,
            key=key,
        )

    @property
    def descriptor(self) -> RegionDescriptor:
        """What the peer needs to write here."""
        return self._descriptor

    @property
    def memory(self) -> Memory:
        """The bytes; LocalProtocolError after close()."""
        if self._memory is None:
            raise LocalProtocolError(f"region {self._descriptor} was read after it was closed")
        return self._memory

    @property
    def is_closed(self) -> bool:
        """Whether close() was called."""
        return self._memory is None

    def close(self) -> None:
        """Forget the pages: a peer that still maps them writes where nobody looks."""
        if self._memory is None:
            return
        # the key is cleared first, so that a connect racing with the close is refused
        _KEY.pack_into(self._map, 0, 0, 0)
        self._memory = None
        os.close(self._fd)


class ShmRemoteRegion:
    """Another process's memfd, mapped for writing; see RemoteRegion."""

    def __init__(self, descriptor: RegionDescriptor) -> None:
        """Map the region and its owner's wake page after checking the key."""
        if descriptor.provider != PROVIDER:
            raise AccessRefused(
                f"descriptor of provider {descriptor.provider!r} given to {PROVIDER}: "
                "both ends must use the same fabric provider"
            )
        self._length = descriptor.length
        self._map = _open_peer(descriptor.locator, PAGE_BYTES + descriptor.length)
        if _KEY.unpack_from(self._map, _MAGIC_OFFSET) != (descriptor.key, descriptor.length):
            raise AccessRefused(f"{descriptor}: the key does not fit, or the region was closed")
        self._wake = _open_peer(descriptor.wake_locator, _WAKE_BYTES)
        self._memory: Memory | None = np.frombuffer(
            self._map, np.uint8, descriptor.length, PAGE_BYTES
        )
        self._address = int(self._memory.ctypes.data)
        self._wake_words = ffi.from_buffer("uint32_t[]", self._wake)

    def write(self, offset: int, data: Memory | bytes) -> None:
        """Copy `data` to `offset`."""
        view = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
        end = offset + len(view)
        self._open(offset, end)[offset:end] = view

    def ring(self, offset: int, value: int) -> None:
        """Release-store the bell, then wake the owner's sleepers."""
        self._open(offset, offset + BELL_BYTES)
        if offset % BELL_BYTES:
            raise LocalProtocolError(f"bell at offset {offset} is not 8-byte aligned")
        lib.k3_ring(ffi.cast("uint64_t *", self._address + offset), value, self._wake_words)

    def close(self) -> None:
        """Stop writing."""
        self._memory = None

    def _open(self, start: int, end: int) -> Memory:
        if self._memory is None:
            raise AccessRefused("write into a remote region that was closed here")
        if start < 0 or end > self._length:
            raise AccessRefused(
                f"write of bytes {start}..{end} is outside a region of {self._length} bytes"
            )
        return self._memory


class ShmFabric:
    """This process's end of the shm provider; see Fabric. Waits may come from one thread only."""

    name = PROVIDER

    def __init__(self, *, spin_us: int) -> None:
        """`spin_us` is how long a wait polls before it sleeps; 0 where cores are short."""
        self._spin_ns = spin_us * 1000
        self._wake_fd, self._wake_map = _create_memfd("k3-wake", _WAKE_BYTES)
        self._words = ffi.from_buffer("uint32_t[]", self._wake_map)
        self._interrupt = self._words + _INTERRUPT
        self._interrupt_seen = 0
        self._regions: list[ShmRegion] = []

    def register(self, length: int) -> ShmRegion:
        """Zeroed memory in a memfd of its own."""
        self._regions = [region for region in self._regions if not region.is_closed]
        region = ShmRegion(length, _locator(self._wake_fd))
        self._regions.append(region)
        return region

    def connect(self, descriptor: RegionDescriptor) -> ShmRemoteRegion:
        """Map a peer's region."""
        return ShmRemoteRegion(descriptor)

    def wait_complete(self, groups: Sequence[Sequence[Watch]], *, timeout_us: int) -> int:
        """See Fabric; a group without watches is complete at once."""
        bells: list[int] = []
        expected: list[int] = []
        member: list[int] = []
        for index, group in enumerate(groups):
            if not group:
                return index
            for region, slot, generation in group:
                bells.append(_bell_address(region, slot))
                expected.append(generation)
                member.append(index)
        return self._wait(bells, expected, member, len(groups), _MODE_EQUAL, timeout_us)

    def wait_changed(self, region: Region, seen: npt.NDArray[np.uint64], timeout_us: int) -> int:
        """See Fabric."""
        slots = np.arange(len(seen), dtype=np.int32)
        bells = slots.astype(np.uint64) * BELL_BYTES + _bell_address(region, 0)
        return self._wait(bells, seen, slots, len(seen), _MODE_CHANGED, timeout_us)

    def interrupt(self) -> None:
        """Bump the interrupt word and wake the sleeper."""
        lib.k3_interrupt(self._interrupt, self._words)

    def close(self) -> None:
        """Close all regions. Safe to call twice."""
        for region in self._regions:
            region.close()
        self._regions.clear()
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _wait(
        self,
        bells: npt.ArrayLike,
        expected: npt.ArrayLike,
        member: npt.ArrayLike,
        groups: int,
        mode: int,
        timeout_us: int,
    ) -> int:
        addresses = np.ascontiguousarray(bells, np.uint64)
        values = np.ascontiguousarray(expected, np.uint64)
        indices = np.ascontiguousarray(member, np.int32)
        count = len(addresses)
        result = lib.k3_wait(
            ffi.cast("uint64_t *const *", addresses.ctypes.data),
            ffi.cast("const uint64_t *", values.ctypes.data),
            ffi.cast("const int32_t *", indices.ctypes.data),
            count,
            groups,
            mode,
            self._words,
            self._interrupt,
            self._interrupt_seen,
            self._spin_ns,
            max(0, timeout_us) * 1000,
        )
        if result < INTERRUPTED:
            raise LocalProtocolError(f"wait on {count} bells in {groups} groups was not understood")
        # only a reported interrupt is used up: one that comes while a bell is returned stays
        if result == INTERRUPTED:
            self._interrupt_seen = int(self._interrupt[0])
        return int(result)


def _bell_address(region: Region, slot: int) -> int:
    assert isinstance(region, ShmRegion), "a watch belongs to the fabric that waits on it"
    return region.bells_address + bell_offset(slot)


def _create_memfd(name: str, length: int) -> tuple[int, mmap.mmap]:
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise FabricError(f"cannot make shared memory: {error.strerror}") from error
    try:
        os.ftruncate(fd, length)
        # a peer that could shrink the file would turn our next read into SIGBUS
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return fd, mmap.mmap(fd, length)
    except (OSError, OverflowError) as error:
        os.close(fd)
        raise FabricError(f"cannot register {length} bytes of shared memory: {error}") from error


def _seals(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # not a memfd: the peer closed its region and reused the descriptor
        return 0


def _locator(fd: int) -> str:
    return f"/proc/{os.getpid()}/fd/{fd}"


def _open_peer(locator: str, length: int) -> mmap.mmap:
    if not _LOCATOR.fullmatch(locator):
        raise AccessRefused(f"locator {locator!r} is not a memfd of a process on this host")
    try:
        fd = os.open(locator, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise AccessRefused(
            f"cannot open {locator}: {error.strerror}; the peer is gone or runs as another user"
        ) from error
    try:
        if not _seals(fd) & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size != length:
            raise AccessRefused(f"{locator} is no sealed region of {length} bytes (any more)")
        return mmap.mmap(fd, length)
    except OSError as error:
        raise FabricError(f"cannot map {locator}: {error.strerror}") from error
    finally:
        os.close(fd)
