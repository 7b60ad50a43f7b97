"""Loopback ports of an embedded pod: found or refused before anything is started."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack

from shared.core.errors import AddressInUse, ConfigError

LOOPBACK = "127.0.0.1"


def reserve(stack: ExitStack, port: int, *, option: str) -> int:
    """Bind `port` (0: any free one) until `stack` closes, and return its number.

    The socket never listens and lets others bind beside it (SO_REUSEADDR), so the Station can
    listen on the port now and after a restart, while the kernel gives it to nobody else. Raises
    AddressInUse when a process already listens there; `option` is what the operator may change.
    """
    holder = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind((LOOPBACK, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"{LOOPBACK}:{port} is in use by another process; stop it or choose another port "
                f"with {option} ({option} 0 takes a free one)"
            ) from error
        raise ConfigError(
            f"cannot use {LOOPBACK}:{port}: {error.strerror}; choose another port with {option}"
        ) from error
    return int(holder.getsockname()[1])
