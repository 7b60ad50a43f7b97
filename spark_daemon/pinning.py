"""Keeps a node's arena in memory, or says which limit stands in the way.

Owns mlock(2) and the words about RLIMIT_MEMLOCK. Must not know what the memory holds.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from typing import Final

import numpy as np
import numpy.typing as npt

from shared.core.errors import ConfigError

_LIMIT_ERRORS: Final = (errno.ENOMEM, errno.EPERM, errno.EAGAIN)


def pin(memory: npt.NDArray[np.uint8]) -> None:
    """Lock uint8 memory so that no dispatch ever waits for swap.

    Raises ConfigError naming the limit, its value and the unit's line to change.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(memory.ctypes.data)
    if libc.mlock(address, ctypes.c_size_t(memory.nbytes)) != 0:
        limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        raise limit_error(ctypes.get_errno(), needed_bytes=memory.nbytes, limit_bytes=limit_bytes)


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
