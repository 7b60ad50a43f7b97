"""A disk as slow as a test wants it: a real process whose reads of a bank take their time.

A few lines of C, put before the C library's own `preadv(2)`, delay every large read, or hold it for
as long as a file exists. The program under test is the one that users run.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

static void wait_for_the_disk(const struct iovec *parts, int count) {
    if (count < 1 || parts[0].iov_len < 1 << 20) return;
    usleep(atoi(getenv("SLOW_DISK_US")));
    while (access(getenv("SLOW_DISK_GATE"), F_OK) == 0) usleep(5000);
}

/* Which of the four a Python calls depends on how it was built. */
#define READ(NAME) \
    ssize_t NAME(int fd, const struct iovec *parts, int count, off_t at) { \
        wait_for_the_disk(parts, count); \
        return ((ssize_t (*)(int, const struct iovec *, int, off_t))dlsym(RTLD_NEXT, #NAME))( \
            fd, parts, count, at); \
    }
#define READ_FLAGS(NAME) \
    ssize_t NAME(int fd, const struct iovec *parts, int count, off_t at, int flags) { \
        wait_for_the_disk(parts, count); \
        return ((ssize_t (*)(int, const struct iovec *, int, off_t, int))dlsym( \
            RTLD_NEXT, #NAME))(fd, parts, count, at, flags); \
    }
READ(preadv)
READ(preadv64)
READ_FLAGS(preadv2)
READ_FLAGS(preadv64v2)
"""


@dataclass(frozen=True)
class SlowDisk:
    """What a process gets into its environment, and the file that stops the disk."""

    environ: dict[str, str]
    gate: Path

    @classmethod
    def make(cls, folder: Path, *, read_us: int) -> SlowDisk:
        """Every read of a MiB or more takes `read_us` longer."""
        source, library = folder / "slow_disk.c", folder / "slow_disk.so"
        source.write_text(_SOURCE)
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True
        )
        gate = folder / "gate"
        environ = {
            "LD_PRELOAD": str(library),
            "SLOW_DISK_US": str(read_us),
            "SLOW_DISK_GATE": str(gate),
        }
        return cls(environ, gate)

    def hang(self) -> None:
        """No read ends from now on."""
        self.gate.touch()

    def recover(self) -> None:
        """Reads go on."""
        self.gate.unlink()
