"""The real `k3-banks` process: readiness, bytes, watchdog, page cache, and every way to end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.pod.paths import default_checkpoint
from shared.core.bank_wire import RecordFound
from shared.io.bank_file import blake3_digest
from tests.unit.bank_service.page_cache import cached_share_dropped, resident_share
from tests.unit.bank_service.world import World

START_S = 20.0


@dataclass
class Service:
    """A running `k3-banks` and what it told its service manager."""

    process: subprocess.Popen[bytes]
    log: Path
    manager: socket.socket

    def told(self, words: str, *, within_s: float = START_S) -> str:
        """The next notification that contains `words`."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            has_ended = self.process.poll() is not None  # before the look: nothing may slip between
            self.manager.settimeout(0.1)
            try:
                text = self.manager.recv(4096).decode()
            except TimeoutError:
                if has_ended:
                    break
                continue
            if words in text:
                return text
        raise AssertionError(f"not told {words!r}: {self.log.read_text()}")

    def address(self) -> str:
        """Where it listens, from its log."""
        found = re.search(r"event=bank_service_serving .*address=(\S+)", self.log.read_text())
        assert found is not None, self.log.read_text()
        return found[1]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it and give its exit status."""
        self.process.send_signal(number)
        return self.process.wait(START_S)


@pytest.fixture
def service(world: World) -> Iterator[Service]:
    """A service of the first folder and the demonstration checkpoint; admits spark0 and spark1."""
    (world.root / "nodes").mkdir()
    for name in ("spark0", "spark1"):
        world.key(name)
        os.link(world.root / "keys" / f"{name}.key", world.root / "nodes" / f"{name}.key")
    world.key("station")
    (world.root / "banks.toml").write_text(
        'address = "tcp://127.0.0.1:0"\n'
        'secret_key = "keys/station.key_secret"\n'
        'allow_list = "nodes"\n'
        'folders = ["banks"]\n'
        f'checkpoint = "{default_checkpoint()}"\n'
    )
    log = world.root / "service.log"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, log.open("wb") as stderr:
        manager.bind(str(world.root / "notify"))
        process = subprocess.Popen(
            command("--config", str(world.root / "banks.toml")),
            env={
                **os.environ,
                "NOTIFY_SOCKET": str(world.root / "notify"),
                "WATCHDOG_USEC": "300000",
                "OMP_NUM_THREADS": "1",
            },
            stderr=stderr,
        )
        started = Service(process, log, manager)
        try:
            started.told("READY=1")
            yield started
        finally:
            process.kill()
            process.wait()


def command(*arguments: str) -> Sequence[str]:
    """The command line of the service."""
    return (sys.executable, "-m", "services.bank_service", *arguments)


def test_a_bank_leaves_the_process_and_not_the_page_cache(world: World, service: Service) -> None:
    """Byte for byte, the watchdog fed, the cache dropped behind, and a clean end."""
    path = world.folders[0] / "grace.k3bank"
    can_drop = cached_share_dropped(world.folders[0] / "spark0.k3bank") < 0.1
    with path.open("rb") as stream:
        os.fsync(stream.fileno())  # only clean pages can be dropped
    assert resident_share(path) > 0.9

    async def pull() -> bytes:
        async with asyncio.timeout(30), world.node("spark0", service.address()) as node:
            return await node.pull("grace", chunk=64 * 1024)

    data = asyncio.run(pull())

    share = resident_share(path)
    assert data == path.read_bytes()
    assert share < 0.1 or not can_drop
    service.told("WATCHDOG=1")
    assert service.stop() == 0
    service.told("STOPPING=1")
    lines = service.log.read_text().splitlines()
    assert "bank_pull_begun" in service.log.read_text()
    assert "event=bank_service_stopped" in lines[-1]


def test_a_record_comes_from_the_checkpoint(world: World, service: Service) -> None:
    """The folder has banks of another model: the checkpoint's own bytes, in either order."""
    from station.model.checkpoint import Checkpoint

    with Checkpoint.open(default_checkpoint()) as checkpoint:
        digest = checkpoint.digest
        layer = checkpoint.config.shape.first_moe_layer
        expected = checkpoint.expert_record(layer, 3)

    async def pull() -> bytes:
        async with asyncio.timeout(40), world.node("spark1", service.address()) as node:
            found = await node.find_record(layer, 3, model_digest=digest)
            assert isinstance(found, RecordFound), found
            assert found.record_hash == blake3_digest(expected).hex()
            return await node.read(found.record_hash, found.record_bytes)

    assert asyncio.run(pull()) == expected
    assert service.stop(signal.SIGINT) == 0


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--config", "none.toml"), 78, "settings file none.toml does not exist"),
        (("--secret-key", "none.key_secret"), 78, "cannot read key file none.key_secret"),
        (("--address", "tcp://10.1.2.3:1"), 78, "Set allow_remote = true"),
        (("--wrong",), 2, "No such option"),
    ],
)
def test_a_start_that_cannot_work_is_one_line(
    tmp_path: Path, arguments: tuple[str, ...], status: int, words: str
) -> None:
    """With the exit status that says whether to try again."""
    root = Path(__file__).parents[3]
    ended = subprocess.run(
        command(*arguments), cwd=tmp_path, capture_output=True, text=True, timeout=START_S,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip

    assert ended.returncode == status
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_taken_port_is_named(world: World, service: Service) -> None:
    """The second service of a host says who holds the port."""
    ended = subprocess.run(
        command("--config", str(world.root / "banks.toml"), "--address", service.address()),
        capture_output=True,
        text=True,
        timeout=START_S,
    )

    assert ended.returncode == 78
    assert "code=address_in_use" in ended.stderr
    assert "Traceback" not in ended.stderr
