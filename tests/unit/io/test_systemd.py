"""Service manager notifications over real datagram sockets (case D3)."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.core.errors import ConfigError
from shared.io.systemd import (
    Notifier,
    Pulse,
    Watchdog,
    notification,
    should_ping,
    watchdog_interval_us,
)


@dataclass(frozen=True)
class Manager:
    """The service manager's end of NOTIFY_SOCKET."""

    link: socket.socket
    address: str

    def read(self) -> list[str]:
        """Every datagram that arrived so far."""
        got = []
        while True:
            try:
                got.append(self.link.recv(4096).decode())
            except BlockingIOError:
                return got


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    """A listening socket, on a path and in the abstract namespace."""
    if request.param == "path":
        address = name = str(tmp_path / "notify")
    else:
        address, name = f"@k3-test-{os.getpid()}", f"\0k3-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as link:
        link.bind(name)
        yield Manager(link, address)


def test_states_arrive_as_one_datagram_each(manager: Manager) -> None:
    """READY, STATUS, EXTEND_TIMEOUT_USEC and STOPPING reach the manager as written."""
    notifier = Notifier.from_environ({"NOTIFY_SOCKET": manager.address})

    assert notifier.notify(READY=1, STATUS="serving 92 layers")
    assert notifier.notify(EXTEND_TIMEOUT_USEC=30_000_000)
    assert notifier.notify(STOPPING=1)
    assert manager.read() == [
        "READY=1\nSTATUS=serving 92 layers",
        "EXTEND_TIMEOUT_USEC=30000000",
        "STOPPING=1",
    ]


def test_a_status_cannot_add_a_field(manager: Manager) -> None:
    """D3: line breaks of every kind and NULs in a value become spaces; endless text is cut."""
    notifier = Notifier.from_environ({"NOTIFY_SOCKET": manager.address})
    notifier.notify(STATUS="loading\nREADY=1\r\nMAINPID=1\0\u2028WATCHDOG=1")
    notifier.notify(STATUS="x" * 100_000)
    first, second = manager.read()

    assert first.splitlines() == ["STATUS=loading READY=1 MAINPID=1  WATCHDOG=1"]
    assert len(second) == len("STATUS=") + 1024


def test_a_field_name_is_checked() -> None:
    """A name that could break the datagram is a bug here."""
    with pytest.raises(ValueError, match="not a notification field"):
        notification({"READY=1\nX": 1})


def test_without_a_manager_nothing_happens() -> None:
    """No variable: no error and no socket; a manager that left: False, no error."""
    assert Notifier.from_environ({}).notify(READY=1) is False
    assert Notifier.from_environ({"NOTIFY_SOCKET": "/nowhere/notify"}).notify(READY=1) is False


@pytest.mark.parametrize("address", ["relative/path", "@", "vsock:2:1"])
def test_an_unusable_socket_address_is_a_config_error(address: str) -> None:
    """A daemon that could never say READY says so at once."""
    with pytest.raises(ConfigError, match="NOTIFY_SOCKET"):
        Notifier.from_environ({"NOTIFY_SOCKET": address})


@pytest.mark.parametrize("usec", ["", "0", "-5", "nan", "inf", "1e6", "3.5", " 5", "٣", "9" * 20])
def test_a_nonsense_watchdog_interval_is_ignored(usec: str) -> None:
    """D3: only a positive whole number of microseconds switches the watchdog on."""
    assert watchdog_interval_us({"WATCHDOG_USEC": usec}, 7) is None


def test_the_watchdog_is_for_one_process() -> None:
    """D3: another process's WATCHDOG_PID is ignored; ours or none counts."""
    assert watchdog_interval_us({}, 7) is None
    assert watchdog_interval_us({"WATCHDOG_USEC": "5000000"}, 7) == 5_000_000
    assert watchdog_interval_us({"WATCHDOG_USEC": "5000000", "WATCHDOG_PID": "7"}, 7) == 5_000_000
    assert watchdog_interval_us({"WATCHDOG_USEC": "5000000", "WATCHDOG_PID": "8"}, 7) is None


@pytest.mark.parametrize(
    ("before", "now", "idle", "ping"),
    [(3, 4, False, True), (3, 3, True, True), (3, 3, False, False), (3, 4, True, True)],
)
def test_only_progress_or_idleness_earns_a_ping(
    before: int, now: int, idle: bool, ping: bool
) -> None:
    """Work that does not move is not fed."""
    assert should_ping(before, now, idle=idle) is ping


class Work:
    """A daemon's work as its watchdog sees it; counts how often it was looked at."""

    def __init__(self) -> None:
        self.step, self.idle = 1, False
        self.progress = self.looks = 0

    def pulse(self) -> Pulse:
        """One look; work goes on by `step` between two looks."""
        self.looks += 1
        self.progress += self.step
        return Pulse(self.progress, self.idle)


@pytest.mark.asyncio
async def test_a_stuck_daemon_is_not_fed_and_a_working_one_is(manager: Manager) -> None:
    """D3: pings while progress moves, none while it stands still with work, none from a blocked
    loop, and pings again after it."""
    work = Work()
    notifier = Notifier.from_environ({"NOTIFY_SOCKET": manager.address})

    async def pings_in(looks: int) -> int:
        manager.read()
        goal = work.looks + looks
        async with asyncio.timeout(5):
            while work.looks < goal:  # noqa: ASYNC110 - the watchdog runs by time, not by events
                await asyncio.sleep(0.001)
        return len(manager.read())

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(Watchdog(notifier, 15_000, work.pulse).run())

        assert await pings_in(5) >= 4  # the first look only learns where work stands

        work.step = 0

        assert await pings_in(5) == 0

        work.idle = True

        assert await pings_in(5) >= 5

        time.sleep(0.045)  # noqa: ASYNC251 - three intervals of a blocked loop are what is tested

        assert manager.read() == []
        assert await pings_in(5) >= 5

        task.cancel()
