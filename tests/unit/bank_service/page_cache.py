"""How much of a file the page cache holds."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np


def resident_share(path: Path) -> float:
    """Which part of a file is in the page cache (mincore(2))."""
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as view:
        address = np.frombuffer(view, np.uint8).ctypes.data
        pages = np.zeros(-(-len(view) // mmap.PAGESIZE), np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        status = libc.mincore(
            ctypes.c_void_p(address), ctypes.c_size_t(len(view)), ctypes.c_void_p(pages.ctypes.data)
        )
        assert status == 0, os.strerror(ctypes.get_errno())
        return float((pages & 1).mean())


def cached_share_dropped(path: Path) -> float:
    """What stays in the page cache when it is asked to drop all: all of it on a tmpfs."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return resident_share(path)
