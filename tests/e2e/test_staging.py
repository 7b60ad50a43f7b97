"""Staging with the real bank service: processes that pull, are killed, and serve what they got."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.banks.builder import build
from shared.core import wire
from shared.core.placement import Placement, balanced
from shared.core.record import RecordLayout
from shared.core.record_order import reorder
from shared.core.shape import ExpertShape, ModelShape
from shared.io import keys
from shared.io.bank_file import BankFile
from shared.io.record_journal import count_finished
from shared.kernels.canary import canary_row
from tests.support.expert_records import expert_record
from tests.support.fake_station import Home, NodeProcess, kernel, own_arena, station

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
NODES = ("spark0", "spark1", "spark2")
MODEL = ModelShape(
    layers=2, first_moe_layer=1, experts=18, top_k=2, expert=ExpertShape(latent=1024, width=512)
)
PATIENCE_S = 60.0


class Experts:
    """An ExpertSource: one random record with the expert's number in its first bytes."""

    digest = "model-a"
    layout = RecordLayout(MODEL.expert)

    def __init__(self) -> None:
        self._record = expert_record(MODEL.expert, 1)

    def read_expert_record(self, layer: int, expert: int, buffer: memoryview) -> None:
        buffer[:] = self._record
        buffer[:2] = bytes((layer, expert))

    def stored_hash(self, layer: int, expert: int) -> None:
        """Records are stored as they are."""

    def position(self, layer: int, expert: int) -> tuple[str, int]:
        return "", 0

    def release(self, experts: object) -> None:
        """Nothing is cached."""


def placement() -> Placement:
    """Three Sparks with six experts each."""
    return balanced(Experts.digest, MODEL, [(node, "spark", 1.0) for node in NODES])


class Banks:
    """A real `k3-banks` that serves ROOT/banks to the nodes in ROOT/nodes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "banks"
        self.folder.mkdir()
        self.address = ""
        self.log = root / "service.log"

    @contextmanager
    def service(self, *, rate: int = 0) -> Iterator[subprocess.Popen[bytes]]:
        """The process, ready; the second one gets the first one's address."""
        settings = self.root / "banks.toml"
        settings.write_text(
            f'address = "{self.address or "tcp://127.0.0.1:0"}"\n'
            'folders = ["banks"]\nsecret_key = "station/station.key_secret"\nallow_list = "nodes"\n'
            f"rate_bytes_per_s = {rate}\n"
        )
        already = len(self.events("bank_service_serving"))
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "services.bank_service", "--config", str(settings)],
                cwd=ROOT,
                stderr=log,
                env={**os.environ, "K3_LOG": "json"},
            )
        try:
            wait_until("serving", lambda: len(self.events("bank_service_serving")) > already)
            self.address = self.events("bank_service_serving")[-1]["address"]
            yield process
        finally:
            process.kill()
            process.wait(PATIENCE_S)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Log lines of the service."""
        if not self.log.exists():
            return []
        lines = self.log.read_text().splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{")]
        return [event for event in found if event["event"] == name]


class World(Banks):
    """The same with keys and banks, and folders of nodes."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        keys.create(root / "station", "station")
        for node in NODES:
            keys.create(root / "nodes", node)
            build(Experts(), placement(), node, self.bank(node))

    def bank(self, node: str) -> Path:
        """The service's file."""
        return self.folder / f"{node}.k3bank"

    def target(self, node: str) -> Path:
        """The node's."""
        return self.root / f"on-{node}" / f"{node}.k3bank"

    def command(self, verb: str, node: str, *words: str) -> list[str]:
        """`k3 bank VERB` as `node`."""
        return [
            *(sys.executable, "-m", "services.cli", "bank", verb, *words),
            *("--service", self.address),
            *("--station-key", str(self.root / "station" / "station.key")),
            *("--node-key", str(self.root / "nodes" / f"{node}.key_secret")),
        ]

    def stage(self, node: str, *options: str) -> subprocess.Popen[str]:
        """`k3 bank stage` into the node's folder."""
        folder = self.target(node).parent
        folder.mkdir(exist_ok=True)
        return subprocess.Popen(
            self.command("stage", node, node, "--out-dir", str(folder), *options),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def wait_until(what: str, is_true: Callable[[], bool]) -> None:
    """Poll until something holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline, f"not in {PATIENCE_S} s: {what}"
        time.sleep(0.02)


def ended(process: subprocess.Popen[str]) -> str:
    """Standard output of a process that succeeded."""
    with process:
        out, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, said
    return out


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_three_nodes_at_once(world: World) -> None:
    """Each gets its own bank, byte for byte, and the service's log has the node's numbers."""
    with world.service():
        pulls = [world.stage(node, "--json") for node in NODES]
        receipts = [json.loads(ended(pull)) for pull in pulls]
        wait_until("ends are logged", lambda: len(world.events("bank_pull_ended")) == 3)

    for node, receipt in zip(NODES, receipts, strict=True):
        assert world.target(node).read_bytes() == world.bank(node).read_bytes()
        assert (receipt["outcome"], receipt["records_pulled"]) == ("complete", 6)
    logged = {event["node"]: event["bytes"] for event in world.events("bank_pull_ended")}
    pulled = {receipt["node"]: receipt["pulled_bytes"] for receipt in receipts}
    assert logged == pulled


def test_service_killed_in_the_middle(world: World) -> None:
    """SIGKILL of the service while a node pulls, and a new one at the address: the same process
    goes on, and pulls no record twice."""
    journal = world.target("spark0").with_name("spark0.k3bank.journal")
    with world.service() as first:
        pull = world.stage("spark0", "--json", "--rate", "3M")
        wait_until("some records are there", lambda: count_finished(journal) >= 1)
        first.kill()
        first.wait(PATIENCE_S)
        finished = count_finished(journal)
        assert pull.poll() is None, "it ended before the service did"
    with world.service():
        receipt = json.loads(ended(pull))
    assert 0 < finished < 6
    assert receipt["records_pulled"] == 6
    assert world.target("spark0").read_bytes() == world.bank("spark0").read_bytes()


def test_single_record_in_both_orders(world: World, tmp_path: Path) -> None:
    """The service hands out any order; both are the record that the bank holds."""
    with BankFile.open(world.bank("spark1")) as bank:
        layer, expert = bank.header.rows[2]
        held = np.empty(bank.layout.record_bytes, np.uint8)
        bank.read_into(2, held.data)
        layout = bank.layout
    with world.service():
        for order in ("row-major", "interleaved-4"):
            out = tmp_path / order
            words = (str(layer), str(expert), "--bank", str(world.bank("spark1")))
            command = world.command("record", "spark0", *words, "--order", order, "--out", str(out))
            subprocess.run(command, cwd=ROOT, check=True, timeout=PATIENCE_S, capture_output=True)
            got, want = np.frombuffer(out.read_bytes(), np.uint8), np.empty_like(held)
            reorder(held, layout, want, RecordLayout(MODEL.expert, order))
            assert np.array_equal(got, want), order
    assert (tmp_path / "row-major").read_bytes() != (tmp_path / "interleaved-4").read_bytes()


@pytest.mark.asyncio
async def test_node_without_its_bank_pulls_it_and_serves(tmp_path: Path) -> None:
    """A real node process whose bank is missing stages it, loads it and proves it to a Station."""
    home = Home.make(tmp_path)
    banks = Banks(tmp_path)
    served = banks.folder / home.bank.name
    home.bank.rename(served)
    async with station(home) as fake:
        with banks.service():
            command = home.command(fake.link.address, "--bank-service", banks.address)
            node = NodeProcess.start(command, tmp_path / "node.log")
            try:
                async with asyncio.timeout(PATIENCE_S):
                    hello = None
                    while not isinstance(hello, wire.Hello):
                        hello = await fake.inbox.get()
                lease = fake.offer(epoch=1)
                await fake.grant(lease)
            finally:
                node.terminate()
                status = await node.wait(PATIENCE_S)
    assert home.bank.read_bytes() == served.read_bytes()
    assert lease.canary_row == canary_row(kernel(), own_arena("spark0")[0], 0, 5).tobytes()
    receipt = json.loads((tmp_path / "receipts" / "spark0.0001.json").read_bytes())
    assert (receipt["outcome"], receipt["node"]) == ("complete", "spark0")
    assert status == 0


@pytest.mark.asyncio
async def test_node_stopped_while_it_pulls(tmp_path: Path) -> None:
    """The Station hears how far it is; SIGTERM ends it at once with 0, and nothing is lost."""
    world = World(tmp_path)
    home = Home(tmp_path)
    async with station(home) as fake:
        with world.service(rate=2**20):
            command = home.command(fake.link.address, "--bank-service", world.address)
            node = NodeProcess.start(command, tmp_path / "node.log")
            told = await fake.expect(wire.Loading)
            journal = home.bank.with_name("spark0.k3bank.journal")
            await asyncio.to_thread(wait_until, "a record", lambda: count_finished(journal) >= 1)
            node.terminate()
            status = await node.wait(5.0)
    assert (told.phase, told.total_bytes) == ("staging", world.bank("spark0").stat().st_size)
    assert status == 0
    assert not home.bank.exists()
    receipt = json.loads((tmp_path / "receipts" / "spark0.0001.json").read_bytes())
    assert receipt["outcome"] == "interrupted"
    assert receipt["records_pulled"] == count_finished(journal) >= 1


def test_node_whose_bank_nobody_has(tmp_path: Path) -> None:
    """One line that says so and 78: nothing gets better by starting again."""
    home = Home.make(tmp_path)
    home.bank.unlink()
    banks = Banks(tmp_path)
    with banks.service():
        command = home.command("tcp://127.0.0.1:1", "--bank-service", banks.address)
        node = NodeProcess.start(command, tmp_path / "node.log")
        assert node.process.wait(PATIENCE_S) == 78
    failed = node.events()[-1]
    assert (failed["event"], failed["code"]) == ("node_failed", "bank_invalid")
    assert "bank_unknown" in failed["error"]
