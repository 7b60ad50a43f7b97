"""Memory for arenas: how much is free, huge pages, and keeping it from being swapped.

Owns /proc/meminfo, madvise(2), mlock(2) and the words about RLIMIT_MEMLOCK. Must not know what the
memory holds.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, TypeAlias

from shared.core.errors import ConfigError
from shared.io import cgroup

Pages: TypeAlias = Literal["hugetlb", "transparent", "small"]

MEMINFO: Final = Path("/proc/meminfo")
_TRANSPARENT: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_STATUS: Final = Path("/proc/self/status")
_MAP_HUGETLB: Final = 0x40000  # linux/mman.h; neither constant is in the standard library
_MADV_POPULATE_WRITE: Final = 23
_CAP_IPC_LOCK: Final = 14  # linux/capability.h
_HUGE_PAGE_BYTES: Final = 2 * 2**20
_LIMIT_ERRORS: Final = (errno.ENOMEM, errno.EPERM, errno.EAGAIN)


def meminfo_bytes(field: str, path: Path = MEMINFO) -> int | None:
    """One size of /proc/meminfo, e.g. `MemAvailable`, in bytes; None where there is none."""
    number, _, unit = _fields(path).get(field, "").partition(" ")
    return int(number) * 1024 if number.isdecimal() and unit == "kB" else None


def available_bytes() -> int | None:
    """Memory this process can take without swapping, and without exceeding a limit of its unit or
    container; None where the kernel does not say."""
    return _least(meminfo_bytes("MemAvailable"), cgroup.left_bytes())


def total_bytes() -> int | None:
    """Memory of the machine, or of the unit or container that has less."""
    return _least(meminfo_bytes("MemTotal"), cgroup.limit_bytes())


def allocate(size: int) -> tuple[mmap.mmap, Pages]:
    """Private anonymous memory of at least `size` bytes, and the pages it is made of.

    `hugetlb` when the machine has set aside enough of them, `transparent` when the kernel was asked
    to merge pages as far as it can, else `small`. Page aligned, nothing of it resident. OSError
    when there is no room for it.
    """
    huge_bytes = meminfo_bytes("Hugepagesize") or _HUGE_PAGE_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if size >= huge_bytes:
        with contextlib.suppress(OSError, OverflowError):  # not enough of them free
            rounded = -(-size // huge_bytes) * huge_bytes  # munmap(2) wants whole pages too
            return mmap.mmap(-1, rounded, flags=flags | _MAP_HUGETLB), "hugetlb"
    memory = mmap.mmap(-1, size, flags=flags)
    if size >= _HUGE_PAGE_BYTES and _merges_pages():
        with contextlib.suppress(OSError):  # a kernel without them: slower, equally right
            memory.madvise(mmap.MADV_HUGEPAGE)
            return memory, "transparent"
    return memory, "small"


def populate(address: int, size: int) -> None:
    """Make the pages of [address, address + size) resident; OSError when there are none.

    A kernel older than 5.14 cannot do that ahead of time, and does it at the first access.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    number = _call("madvise", start, address + size - start, _MADV_POPULATE_WRITE)
    if number not in (0, errno.EINVAL):
        raise OSError(number, os.strerror(number))


def lock(address: int, size: int, *, needed_bytes: int) -> None:
    """Lock [address, address + size), a part of `needed_bytes`, so that it is never swapped out.

    Raises ConfigError naming the limit, its value and the unit's line to change.
    """
    number = _call("mlock", address, size)
    if number != 0:
        raise limit_error(number, needed_bytes=needed_bytes, limit_bytes=_memlock_bytes())


def refuse_low_limit(needed_bytes: int) -> None:
    """ConfigError when RLIMIT_MEMLOCK forbids this process to lock `needed_bytes` more."""
    limit_bytes = _memlock_bytes()
    if limit_bytes == resource.RLIM_INFINITY:
        return
    status = _fields(_STATUS)
    if int(status.get("CapEff", "0"), 16) >> _CAP_IPC_LOCK & 1:
        return
    locked_bytes = meminfo_bytes("VmLck", _STATUS) or 0
    if locked_bytes + needed_bytes > limit_bytes:
        raise limit_error(errno.ENOMEM, needed_bytes=needed_bytes, limit_bytes=limit_bytes)


def limit_error(number: int, *, needed_bytes: int, limit_bytes: int) -> ConfigError:
    """What to say when the kernel refuses to lock memory with errno `number`."""
    reason = os.strerror(number)
    if number not in _LIMIT_ERRORS:
        return ConfigError(f"cannot lock {needed_bytes} bytes of bank memory: {reason}")
    limit = "unlimited" if limit_bytes == resource.RLIM_INFINITY else f"{limit_bytes} bytes"
    return ConfigError(
        f"cannot lock {needed_bytes} bytes of bank memory: {reason}; RLIMIT_MEMLOCK is {limit}: "
        "set LimitMEMLOCK=infinity in the unit (`ulimit -l` in a shell), or run with --no-pin"
    )


def _least(*sizes: int | None) -> int | None:
    return min((size for size in sizes if size is not None), default=None)


def _memlock_bytes() -> int:
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def _merges_pages() -> bool:
    try:
        return "[never]" not in _TRANSPARENT.read_text()
    except OSError:
        return False


def _fields(path: Path) -> Mapping[str, str]:
    """The `Name: value` lines of a file of /proc; empty when it cannot be read."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    split = (line.partition(":") for line in lines)
    return {name: value.strip() for name, _, value in split}


def _call(name: str, address: int, size: int, *rest: int) -> int:
    """A system call on a range of memory, without the interpreter lock: 0 or its errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed = getattr(libc, name)(ctypes.c_void_p(address), ctypes.c_size_t(size), *rest)
    return ctypes.get_errno() if failed else 0
