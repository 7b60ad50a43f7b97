"""Listening and serving: the only place that knows uvicorn.

The socket is bound before anything slow happens, so a taken port is the first thing an operator
hears of. Signals belong to `__main__`; this module stops when it is told to, within a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from shared.core.errors import AddressInUse, ConfigError

_HEADER_BYTES_MAX = 32 * 1024
_BACKLOG = 128
_KEEP_ALIVE_S = 5
_CLEANUP_S = 2.0  # for handlers that were cancelled at the end of the grace time


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one.

    AddressInUse when another process holds the port, ConfigError when the address cannot be bound.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(
            f"http address {host!r}: {error.strerror}; use an address of this machine"
        ) from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)  # two sockets may bind the same free port; only one may listen
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"{host}:{port} is in use by another process; stop it or choose another port"
            ) from error
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; use another address or port"
        ) from error
    return listener


async def serve(
    app: ASGIApp, listener: socket.socket, *, stop: asyncio.Event, grace_s: int = 5
) -> None:
    """Serve `app` on `listener` until `stop` is set (or this task is cancelled), then end.

    No new connection is accepted from then on; running requests get `grace_s` seconds to finish
    and are cancelled after that. The listener is closed in every case.
    """
    server = _Server(
        uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=grace_s,
            h11_max_incomplete_event_size=_HEADER_BYTES_MAX,
        )
    )
    try:
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(server.serve(sockets=[listener]), name="http")
            try:
                await stop.wait()
            finally:
                server.should_exit = True
                await asyncio.wait({serving}, timeout=grace_s + _CLEANUP_S)
                await _settle(server)
    finally:
        listener.close()


async def _settle(server: uvicorn.Server) -> None:
    """Let the handlers that uvicorn cancelled run their cleanup."""
    if tasks := set(server.server_state.tasks):
        await asyncio.wait(tasks, timeout=_CLEANUP_S)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: SIGINT and SIGTERM are the daemon's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's handlers alone."""
        yield
