"""A node while its bank comes into memory: who is told, what it waits for, and what ends it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog

from services.banks.builder import build
from shared.core import wire
from shared.core.bank_wire import FromBankService, ReadRange, ToBankService
from shared.core.errors import EXIT_CONFIG, EXIT_TEMPFAIL
from shared.core.loading import MemoryFloor
from shared.core.shape import ExpertShape
from shared.io import keys
from shared.io.arena import Arena, LoadPlan, LoadProgress, load_arena
from shared.io.bank_file import BankFile
from shared.io.link import StationUnreachable
from shared.io.systemd import Notifier
from spark_daemon import config as configs
from spark_daemon.loading import LoadReporter, attend, memory_floor, on_a_thread
from tests.support.bank_host import BankHost
from tests.support.fake_station import Home, NodeProcess, TinyExperts, station, tiny_placement
from tests.support.large_bank import build_large_bank
from tests.support.slow_disk import SlowDisk

MIB = 2**20
MEDIUM = ExpertShape(latent=1024, width=608)  # 1.0 MiB a record
RECORDS = 72  # above what stays in the page cache, so that reads go past it
NOBODY = "tcp://127.0.0.1:1"


@dataclass
class Manager:
    """A service manager: sd_notify(3)'s rule for the time that a start may take."""

    link: socket.socket
    address: str
    start_s: float
    began: float = field(default_factory=time.monotonic)
    heard: list[dict[str, str]] = field(default_factory=list)
    is_ready: bool = False

    def __post_init__(self) -> None:
        self.deadline = self.began + self.start_s

    def read(self) -> None:
        """Take every datagram that came; an extension counts from now and never shortens."""
        with contextlib.suppress(BlockingIOError):
            while True:
                lines = self.link.recv(4096).decode().splitlines()
                said = dict(line.split("=", 1) for line in lines)
                self.heard.append(said)
                self.is_ready = self.is_ready or said.get("READY") == "1"
                extension_s = int(said.get("EXTEND_TIMEOUT_USEC", 0)) / 1e6
                self.deadline = max(self.deadline, time.monotonic() + extension_s)

    @property
    def is_out_of_patience(self) -> bool:
        """Whether it would kill a service that starts."""
        self.read()
        return not self.is_ready and time.monotonic() > self.deadline

    @property
    def extensions(self) -> int:
        """How often the start was extended."""
        self.read()
        return sum("EXTEND_TIMEOUT_USEC" in said for said in self.heard)

    def said(self, words: str) -> bool:
        """Whether a status with these words came."""
        self.read()
        return any(words in said.get("STATUS", "") for said in self.heard)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for something to be heard, or fail with what was."""
        end = time.monotonic() + 10
        while not holds():
            assert time.monotonic() < end, self.heard
            await asyncio.sleep(0.02)
            self.read()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    """A manager that waits 90 s for a start."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as link:
        address = str(tmp_path / "notify")
        link.bind(address)
        yield Manager(link, address, 90)


@pytest.fixture(scope="module")
def medium(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Keys and a bank of 73 MiB: ten reads of at most 8 MiB."""
    root = tmp_path_factory.mktemp("medium")
    keys.create(root / "station", "station")
    keys.create(root / "nodes", "spark0")
    build_large_bank(root / "spark0.k3bank", MEDIUM, RECORDS)
    return Home(root)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Keys and a bank of a few records."""
    return Home.make(tmp_path)


@asynccontextmanager
async def running(node: NodeProcess) -> AsyncIterator[NodeProcess]:
    """A node process that is certainly gone afterwards."""
    try:
        yield node
    finally:
        node.kill()


@pytest.mark.asyncio
async def test_a_slow_load_is_told_and_extends_its_start(
    medium: Home, tmp_path: Path, manager: Manager
) -> None:
    """Case D1: a start that outlasts TimeoutStartSec survives while bytes move; manager and Station
    hear the same numbers; when the disk hangs nothing is extended, though the node still speaks;
    the link for reports is gone before the Hello, which has the same incarnation."""
    manager.start_s = 1.5
    manager.deadline = manager.began + manager.start_s
    disk = SlowDisk.make(tmp_path, read_us=700_000)
    async with station(medium) as fake:
        command = medium.command(fake.link.address)
        environ = {**disk.environ, "NOTIFY_SOCKET": manager.address}
        async with running(NodeProcess.start(command, tmp_path / "log", **environ)) as node:
            while not (first := await fake.expect(wire.Loading)).done_bytes:
                pass  # told before the first read ended
            reporter = fake.peer
            assert (first.sender, first.phase) == ("spark0", "loading")
            assert first.done_bytes < first.total_bytes
            assert first.total_bytes % (RECORDS * 4096) == 0
            await manager.until(lambda: manager.said("loading bank spark0: 0.0 of 7"))
            await manager.until(lambda: manager.extensions >= 1)

            disk.hang()
            # what was read before is still told
            await manager.until(lambda: "EXTEND_TIMEOUT_USEC" not in manager.heard[-1])
            extensions, count = manager.extensions, len(manager.heard)
            await manager.until(lambda: len(manager.heard) >= count + 2)
            assert manager.extensions == extensions
            assert time.monotonic() < manager.deadline <= time.monotonic() + 30

            disk.recover()
            hello = await fake.expect(wire.Hello)
            assert fake.peer != reporter
            assert hello.incarnation == first.incarnation
            manager.read()
            assert not manager.is_out_of_patience
            (loaded,) = [event for event in node.events() if event["event"] == "bank_loaded"]
            assert loaded["arena_bytes"] == first.total_bytes
            assert loaded["load_us"] > manager.start_s * 1e6
            assert loaded["pages"] in ("hugetlb", "transparent", "small")


@pytest.mark.asyncio
async def test_sigterm_ends_a_load_even_on_a_disk_that_hangs(
    medium: Home, tmp_path: Path, manager: Manager
) -> None:
    """Within a second, with 0; a Station that is not there changes nothing."""
    disk = SlowDisk.make(tmp_path, read_us=0)
    disk.hang()
    environ = {**disk.environ, "NOTIFY_SOCKET": manager.address}
    async with running(
        NodeProcess.start(medium.command(NOBODY), tmp_path / "log", **environ)
    ) as node:
        await manager.until(lambda: manager.said("loading bank spark0"))
        await asyncio.sleep(1.2)  # reports are being tried
        began = time.monotonic()
        node.terminate()

        assert await node.wait() == 0
        assert time.monotonic() - began < 2
        assert node.names() == ["node_stopped"]


@pytest.mark.asyncio
async def test_no_memory_is_exit_75_after_a_bounded_wait(
    home: Home, tmp_path: Path, manager: Manager
) -> None:
    """Case B4: the status says what it waits for, then why it ended; systemd may try again. The
    wait is bounded, so the start is extended for it."""
    command = home.command(
        NOBODY, "--memory-floor-bytes", str(2**60), "--memory-wait-us", "1500000"
    )
    began = time.monotonic()
    node = NodeProcess.start(command, tmp_path / "log", NOTIFY_SOCKET=manager.address)
    async with running(node):
        await manager.until(lambda: manager.said("waiting for 1073"))
        assert await node.wait() == EXIT_TEMPFAIL
    assert time.monotonic() - began > 1.5
    assert manager.extensions >= 1
    assert manager.said("memory_floor_bytes"), "the last status has the remedy"
    failed = node.events()[-1]
    assert (failed["event"], failed["code"]) == ("node_failed", "memory_floor")
    assert str(2**60) in failed["error"]
    assert node.names() == ["bank_load_waits", "node_failed"]
    assert "Traceback" not in node.log_path.read_text()


@pytest.mark.asyncio
async def test_a_missing_bank_is_pulled_first_and_told_about(tmp_path: Path) -> None:
    """`staging` until the bank is on the disk; then it is loaded, and the node joins."""
    folder = tmp_path / "served"
    folder.mkdir()
    build(TinyExperts(), tiny_placement(), "spark0", folder / "spark0.k3bank")
    host = BankHost(tmp_path, folder)  # makes the keys
    pulled = Home(tmp_path)

    async def slowly(question: ToBankService, answer: FromBankService) -> FromBankService:
        if isinstance(question, ReadRange):
            await asyncio.sleep(0.7)
        return answer

    host.hook = slowly
    host.start()
    try:
        async with station(pulled) as fake:
            command = pulled.command(fake.link.address, "--bank-service", host.address)
            async with running(NodeProcess.start(command, tmp_path / "log")) as node:
                staging = await fake.expect(wire.Loading)
                assert (staging.sender, staging.phase) == ("spark0", "staging")
                hello = await fake.expect(wire.Hello)
                assert hello.incarnation == staging.incarnation
                assert pulled.bank.exists()
                assert "bank_loaded" in node.names()
    finally:
        host.stop()


@contextlib.contextmanager
def control_group(limit_bytes: int) -> Iterator[Path]:
    """A group of this machine below this process's own, with a memory limit; or the test skips."""
    name = f"k3-test-{os.getpid()}"
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    of = {controllers: path.strip("/") for _, controllers, path in lines}
    root = Path("/sys/fs/cgroup")
    group, limit = (
        (root / "memory" / of["memory"] / name, "memory.limit_in_bytes")
        if "memory" in of
        else (root / of.get("", "") / name, "memory.max")
    )
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            (group / limit).write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"no memory limit can be set here: {error}")
        yield group
    finally:
        group.rmdir()


def test_the_limit_of_a_unit_or_container_is_a_floor_too(medium: Home) -> None:
    """Case B4: MemAvailable knows nothing of it, and a process that exceeds it is killed."""
    command = medium.command(NOBODY, "--memory-wait-us", "0")
    with control_group(90 * MIB) as group:
        done = subprocess.run(
            command,
            preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())),
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    assert done.returncode == EXIT_TEMPFAIL, done.stderr
    assert "code=memory_floor" in done.stderr
    assert f"and {90 * MIB // 20} must stay free" in done.stderr, "5 % of what it may have"


@pytest.mark.parametrize("bank_service", [NOBODY, None])
def test_a_bank_that_cannot_be_looked_for_is_said_in_one_line(
    home: Home, bank_service: str | None
) -> None:
    """Not only one that is missing: nothing is pulled to a path that cannot be."""
    command = home.command(NOBODY)
    command[command.index("--bank") + 1] = str(home.root / f"{'x' * 300}.k3bank")
    if bank_service:
        command += ["--bank-service", bank_service]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == EXIT_CONFIG
    assert done.stderr.count("\n") == 1
    assert "cannot open the bank: File name too long" in done.stderr


def test_a_low_memlock_limit_is_exit_78_before_a_byte_is_read(medium: Home) -> None:
    """Case B7 in the real process: LimitMEMLOCK=8M and a bank of 73 MiB."""
    limit = 8 * MIB
    command = [word for word in medium.command(NOBODY) if word != "--no-pin"]

    def confine() -> None:
        ctypes.CDLL(None).prctl(24, 14, 0, 0, 0)  # root exceeds limits by CAP_IPC_LOCK
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))

    done = subprocess.run(
        command, preexec_fn=confine, capture_output=True, text=True, timeout=20, check=False
    )

    assert done.returncode == EXIT_CONFIG
    for part in ("config_invalid", "RLIMIT_MEMLOCK", f"{limit} bytes", "LimitMEMLOCK=infinity"):
        assert part in done.stderr


# The reporter alone, at a pace a test can wait for


def nobody(_: asyncio.TaskGroup) -> Any:
    """No Station."""
    raise StationUnreachable("nobody listens")


def reporter_of(manager: Manager, **changes: Any) -> LoadReporter:
    """Twenty looks a second; a stalled start has 400 ms."""
    fields: dict[str, Any] = {
        "name": "spark0", "incarnation": 1, "bank": "spark0",
        "notifier": Notifier(manager.address), "connect": nobody, "log": structlog.get_logger(),
        "look_us": 50_000, "extension_us": 400_000,
    }  # fmt: skip
    return LoadReporter(**(fields | changes))


async def supervised(manager: Manager, load: asyncio.Future[Any] | asyncio.Task[Any]) -> bool:
    """Whether a load came to its end before the manager lost patience, and then killed it."""
    while not load.done():
        if manager.is_out_of_patience:
            load.cancel()
            return False
        await asyncio.sleep(0.01)
    return True


@pytest.mark.asyncio
@pytest.mark.parametrize("stalls", [False, True])
async def test_only_a_load_that_moves_is_let_live(
    home: Home, manager: Manager, stalls: bool
) -> None:
    """Case D1 by the manager's rule: a load four times as long as the start's timeout starts; one
    that stalls is killed one extension later."""
    manager.start_s = 0.3
    manager.deadline = time.monotonic() + manager.start_s
    progress, stalled = LoadProgress(), threading.Event()
    looks = 0

    def slow_machine() -> int:
        nonlocal looks
        looks += 1
        stalled.wait(20 if stalls and looks == 4 else 0.15)
        return 2**40

    with BankFile.open(home.bank) as bank:
        plan = LoadPlan(step_bytes=1, floor=MemoryFloor(1), available_bytes=slow_machine)
        work = on_a_thread(partial(load_arena, bank, plan, progress), progress)
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            load = tasks.create_task(attend(work, progress, reporter_of(manager), asyncio.Event()))
            survived = await supervised(manager, load)
            stalled.set()
        took = time.monotonic() - began

    assert survived is not stalls
    if stalls:
        assert 3 * 0.15 + 0.2 < took < 3
        assert looks in (4, 5)
    else:
        assert took > 1.1
        assert isinstance(load.result(), Arena)
        assert manager.said("0.0 of 0.0 MiB")


@pytest.mark.asyncio
async def test_a_refused_key_only_means_that_nobody_is_told(
    home: Home, manager: Manager, tmp_path: Path
) -> None:
    """A Station that refuses the key is asked once, and the load goes on."""
    asked = 0

    def refuse(_: asyncio.TaskGroup) -> Any:
        nonlocal asked
        asked += 1
        raise keys.KeyRefused("not on the allow-list")

    async def work() -> str:
        await asyncio.sleep(0.4)
        return "loaded"

    reporter = reporter_of(manager, connect=refuse)

    assert await attend(work(), LoadProgress(), reporter, asyncio.Event()) == "loaded"
    assert asked == 1


def test_the_floor_is_a_setting_with_a_default(tmp_path: Path) -> None:
    """Zero is a wish too; without one the machine decides."""

    def floor(**overrides: object) -> MemoryFloor:
        return memory_floor(configs.load("spark", "spark0", path=None, overrides=overrides))

    total = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]) * 1024
    assert floor(memory_floor_bytes=0, memory_wait_us=7) == MemoryFloor(0, 7)
    assert floor() == MemoryFloor(min(2**31, total // 20), 30_000_000)
