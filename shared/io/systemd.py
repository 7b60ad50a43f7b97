"""Talking to the service manager: readiness, status, watchdog (sd_notify(3)).

Owns the datagrams and the rule when a watchdog is fed. Must not know what the daemon does: progress
is a number it is given. Without NOTIFY_SOCKET everything here is a no-op.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from shared.core.errors import ConfigError

_SEND_TIMEOUT_S: Final = 1.0  # the manager reads at once unless it is itself stuck
_NAME: Final = re.compile(r"[A-Z][A-Z0-9_]*")
_VALUE_CHARS_MAX: Final = 1024
_DIGITS: Final = re.compile(r"[0-9]{1,19}")
_PINGS_PER_INTERVAL: Final = 3


@dataclass(frozen=True, slots=True)
class Notifier:
    """Sends state to the service manager. `address` is None when nobody listens."""

    address: str | bytes | None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Notifier:
        """Read NOTIFY_SOCKET: an absolute path, or an abstract name starting with `@`.

        Raises ConfigError for any other value: a daemon that cannot say READY would be killed later
        for no visible reason.
        """
        address = environ.get("NOTIFY_SOCKET", "")
        if not address:
            return cls(None)
        if address[0] == "/":
            return cls(address)
        if address[0] == "@" and len(address) > 1:
            return cls(b"\0" + address[1:].encode())
        raise ConfigError(
            f"NOTIFY_SOCKET is {address!r}: it must be an absolute path or start with '@'; "
            "unset it to run without a service manager"
        )

    def notify(self, **fields: str | int) -> bool:
        """Send fields in the given order, e.g. `notify(READY=1, STATUS="serving 3 layers")`.

        Whether they were handed over; False also without a service manager. Line breaks in a value
        become spaces, so that a value can never add a field. Waits at most one second.
        """
        if self.address is None:
            return False
        datagram = notification(fields)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
                link.settimeout(_SEND_TIMEOUT_S)
                link.sendto(datagram, self.address)
        except OSError:
            return False
        return True


def notification(fields: Mapping[str, str | int]) -> bytes:
    """The datagram for `fields`; ValueError for a field name that sd_notify could not have."""
    lines = []
    for name, value in fields.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a notification field")
        text = " ".join(str(value).split())[:_VALUE_CHARS_MAX]
        lines.append(f"{name}={text}".encode("utf-8", "replace").replace(b"\0", b" "))
    return b"\n".join(lines)


def watchdog_interval_us(environ: Mapping[str, str], pid: int) -> int | None:
    """After how long without a ping the manager kills process `pid`; None when it does not watch.

    WATCHDOG_USEC must be a positive whole number (nan, inf, negative, zero and text are ignored),
    WATCHDOG_PID, when set, must be `pid`.
    """
    usec = environ.get("WATCHDOG_USEC", "")
    if not _DIGITS.fullmatch(usec) or int(usec) == 0:
        return None
    if environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    return int(usec)


def should_ping(progress_before: int, progress_now: int, *, idle: bool) -> bool:
    """Whether a daemon deserves its ping: its work moved, or it provably has none.

    A loop that pings because it runs itself would feed the manager while the work is stuck.
    """
    return idle or progress_now != progress_before


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a daemon shows of its work: a counter that only grows, and whether there is work."""

    progress: int
    idle: bool


@dataclass(frozen=True, slots=True)
class Watchdog:
    """Feeds the manager's watchdog from the daemon's own loop, so a blocked loop feeds nothing."""

    notifier: Notifier
    interval_us: int
    pulse: Callable[[], Pulse]

    async def run(self) -> None:
        """Ping three times per interval while work moves or there is none; until cancelled."""
        before = self.pulse().progress
        while True:
            await asyncio.sleep(self.interval_us / _PINGS_PER_INTERVAL / 1e6)
            now = self.pulse()
            if should_ping(before, now.progress, idle=now.idle):
                self.notifier.notify(WATCHDOG=1)
            before = now.progress
