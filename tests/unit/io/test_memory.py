"""Memory for arenas: pages, locks, and the limits that stand in the way (cases B4, B7)."""

from __future__ import annotations

import ctypes
import errno
import mmap
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shared.io import memory
from shared.io.memory import limit_error

MIB = 2**20
IPC_LOCK = 14  # linux/capability.h


def field_kib(name: str) -> int:
    """A field of this process's status."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0])


def confine(limit_bytes: int) -> None:
    """In a child: RLIMIT_MEMLOCK for a process that may not exceed it."""
    # root may lock without limit: take the capability out of what exec grants
    ctypes.CDLL(None).prctl(24, IPC_LOCK, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit_bytes, limit_bytes))


def address_of(mapping: mmap.mmap) -> int:
    """Where a mapping lies."""
    return np.frombuffer(mapping, np.uint8).ctypes.data


def test_locked_memory_counts_as_locked() -> None:
    """The real call on real memory, where the limit allows it."""
    size = MIB
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and limit < 2 * size:
        pytest.skip(f"RLIMIT_MEMLOCK is {limit} bytes here")
    block = np.ones(size, np.uint8)
    before = field_kib("VmLck")
    memory.lock(block.ctypes.data, size, needed_bytes=size)
    try:
        assert field_kib("VmLck") >= before + size // 1024
    finally:
        libc = ctypes.CDLL(None)
        libc.munlock(ctypes.c_void_p(block.ctypes.data), ctypes.c_size_t(size))


@pytest.mark.parametrize(
    "call", ["memory.refuse_low_limit(SIZE)", "memory.lock(address, SIZE, needed_bytes=SIZE)"]
)
def test_a_low_limit_is_named_with_its_remedy(call: str) -> None:
    """Case B7: LimitMEMLOCK=8M names the limit, its value and the unit's line to change, before
    anything is locked as well as when the kernel refuses."""
    limit = 8 * MIB
    code = (
        "import numpy as np; from shared.io import memory\n"
        f"SIZE = {16 * MIB}\n"
        "block = np.ones(SIZE, np.uint8); address = block.ctypes.data\n"
        f"try: {call}\n"
        "except Exception as error: print(type(error).__name__, error)"
    )

    done = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: confine(limit),
        capture_output=True, text=True, timeout=20, check=True,
    )  # fmt: skip

    assert done.stdout.startswith("ConfigError")
    for part in ("RLIMIT_MEMLOCK", f"{limit} bytes", "LimitMEMLOCK=infinity", f"{16 * MIB}"):
        assert part in done.stdout


def test_a_limit_that_suffices_is_not_refused() -> None:
    """Neither the last byte nor a process that may exceed the limit."""
    code = (
        "from shared.io import memory\n"
        f"memory.refuse_low_limit({8 * MIB})\n"
        f"try: memory.refuse_low_limit({8 * MIB + 1})\n"
        "except Exception: print('refused')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: confine(8 * MIB),
        capture_output=True, text=True, timeout=20, check=True,
    )  # fmt: skip
    assert done.stdout == "refused\n"


def test_other_reasons_are_not_blamed_on_the_limit() -> None:
    """Only the errors that a limit causes talk about one."""
    assert "LimitMEMLOCK" not in str(limit_error(errno.EINVAL, needed_bytes=1, limit_bytes=1))
    unlimited = limit_error(errno.ENOMEM, needed_bytes=1, limit_bytes=resource.RLIM_INFINITY)
    assert "unlimited" in str(unlimited)


def test_memory_is_resident_only_where_it_was_asked_for() -> None:
    """An allocation costs nothing; populating a part makes that part resident, from any byte on."""
    mapping, pages = memory.allocate(64 * MIB)
    if pages == "hugetlb":
        pytest.skip("huge pages are set aside here: they count as no process's own")
    start = address_of(mapping)
    before = field_kib("VmRSS")
    assert before < field_kib("VmSize") - 64 * 1024

    memory.populate(start + 16 * MIB + 100, 8 * MIB)

    grown = field_kib("VmRSS") - before
    assert 8 * 1024 <= grown <= 16 * 1024


def test_pages_are_what_the_machine_gives() -> None:
    """Set-aside pages where there are enough, else merged ones where the kernel merges; small
    memory needs neither."""
    info = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    has_pool = int(info.get("HugePages_Free", "0")) >= 4 and "2048 kB" in info["Hugepagesize"]
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    merges = enabled.exists() and "[never]" not in enabled.read_text()

    mapping, pages = memory.allocate(7 * MIB)

    assert pages == ("hugetlb" if has_pool else "transparent" if merges else "small")
    assert len(mapping) == (8 * MIB if has_pool else 7 * MIB)
    assert memory.allocate(4096)[1] == "small"
    mapping.close()


def test_meminfo_is_read_in_bytes(tmp_path: Path) -> None:
    """kB are 1024 bytes; what is not there, or no number, is unknown."""
    path = tmp_path / "meminfo"
    path.write_text(
        "MemTotal:       24684092 kB\nMemAvailable:   1 kB\nOdd: x kB\nHugePages_Free: 3\n"
    )

    assert memory.meminfo_bytes("MemTotal", path) == 24684092 * 1024
    assert memory.meminfo_bytes("MemAvailable", path) == 1024
    assert memory.meminfo_bytes("Odd", path) is None
    assert memory.meminfo_bytes("HugePages_Free", path) is None
    assert memory.meminfo_bytes("Absent", path) is None
    assert memory.meminfo_bytes("MemTotal", tmp_path / "absent") is None
    assert (memory.available_bytes() or 0) > 0
