"""The canary of a node: goldens of its bank before it joins and in idle time, and what follows."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.banks.builder import build
from shared.core import wire
from shared.core.bank_header import BankHeader
from shared.core.placement import balanced
from shared.core.record import RecordLayout, RecordOrder
from shared.io import keys
from shared.io.arena import load_arena
from shared.io.bank_file import BankFile
from shared.kernels.select import select_kernel
from spark_daemon import health
from spark_daemon.canary import BadBank, BadKernel, CanaryFailed, Prover
from spark_daemon.executor import BankIndex, Executor
from spark_daemon.health import Vitals, recheck_canary
from tests.support.fake_station import Home, NodeProcess, kernel, station
from tests.support.memory_rot import flip_in_memory, record_of
from tests.support.tampered_bank import tamper
from tests.unit.spark_daemon.test_node_order import SHAPE, Experts
from tests.unit.spark_daemon.test_node_process import check_serving, heard

PERIOD_S = "0.1"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.make(tmp_path)


class Wrong:
    """A kernel with one fault."""

    def __init__(self, fault: str) -> None:
        self.inner = kernel()
        self.kernel_id, self.name, self.shape = 99, "wrong", self.inner.shape
        self.fault = fault

    def rows(self, arena: Any, bank_rows: Any, tokens: Any, activations: Any, out: Any) -> None:
        self.inner.rows(arena, bank_rows, tokens, activations, out)
        match self.fault:
            case "garbage":
                out[:] = np.random.default_rng(1).integers(0x3C00, 0x3F80, out.shape)
            case "nan":
                out[0, 0] = 0x7FC0
            case "zero":
                out[:] = 0
            case "sign":
                out ^= 0x8000
            case "half":
                out -= 0x80  # one bf16 exponent lower: half the value, cosine 1
            case "last bit":
                out[0, 5] ^= 1


def loaded(bank: Path) -> tuple[BankHeader, Any]:
    """A bank in memory that a test may write to."""
    with BankFile.open(bank) as opened:
        return opened.header, load_arena(opened).records.copy()


def prover(header: BankHeader, arena: Any, fault: str | None = None) -> Prover:
    serving = kernel() if fault is None else Wrong(fault)
    reference = select_kernel(header.shape, "reference")
    return Prover(Executor(serving, arena, BankIndex(header.rows)), reference, header)


FAULTS = ["garbage", "nan", "zero", "sign", "half"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_never_serves(home: Home, fault: str) -> None:
    """Case N9: against the bank's goldens and, for a lease, against the reference. The right record
    shows that the kernel is to blame, which no restart mends."""
    header, arena = loaded(home.bank)
    golden = header.goldens[2]
    layer, expert = header.rows[golden.bank_row]
    with pytest.raises(BadKernel, match=r"the kernel computes wrongly on this machine") as failed:
        prover(header, arena, fault).prove_golden(golden)
    assert failed.value.exit_status == 78
    assert (failed.value.layer, failed.value.expert) == (layer, expert)
    assert f"layer {layer} expert {expert} (bank row {golden.bank_row})" in str(failed.value)
    assert not failed.value.difference <= 0.01
    with pytest.raises(BadKernel):
        prover(header, arena, fault).prove(1, seed=3)


def test_right_rows_are_proved_and_proved_again(home: Home) -> None:
    """Every golden of a good bank; a lease's canary of any row."""
    header, arena = loaded(home.bank)
    good = prover(header, arena)
    for proved in [*(good.prove_golden(golden) for golden in header.goldens), good.prove(1, 3)]:
        good.prove_again(proved)


@pytest.mark.parametrize("at", range(100, 1100, 50))
def test_one_flipped_bit_of_memory_is_found(home: Home, at: int) -> None:
    """Wherever it is in a golden's record, though the row may agree with the golden still: by its
    bits, or by the record's hash. A restart reads the bank again."""
    header, arena = loaded(home.bank)
    good = prover(header, arena)
    proved = good.prove_golden(header.goldens[1])
    arena[proved.bank_row, at] ^= 0x01
    with pytest.raises(
        CanaryFailed, match=r"is not the bank's any more: it is read again"
    ) as found:
        good.prove_again(proved)
    assert type(found.value) is CanaryFailed
    assert found.value.exit_status == 1
    assert (found.value.layer, found.value.expert) == header.rows[proved.bank_row]


def test_memory_is_blamed_before_the_kernel(home: Home) -> None:
    """At the start too, and for the lease's canary row when only the kernels' ways differ."""
    header, arena = loaded(home.bank)
    golden = header.goldens[0]
    size = RecordLayout(header.shape).record_bytes
    arena[golden.bank_row, size - 24 : size - 12].view("<f4")[:] *= 2  # all three second scales
    with pytest.raises(CanaryFailed) as found:
        prover(header, arena).prove_golden(golden)
    assert type(found.value) is CanaryFailed


def test_a_kernel_that_changes_its_mind_is_found(home: Home) -> None:
    """One last bit of one value, with the memory intact."""
    header, arena = loaded(home.bank)
    proved = prover(header, arena).prove_golden(header.goldens[0])
    with pytest.raises(BadKernel):
        prover(header, arena, "last bit").prove_again(proved)


def test_a_bank_with_right_hashes_and_other_weights_is_found(home: Home) -> None:
    """Kernel and reference agree with each other and not with the golden: the bank is to blame."""
    with BankFile.open(home.bank) as bank:
        golden = bank.header.goldens[4]
    tamper(home.bank, golden.bank_row)
    header, arena = loaded(home.bank)
    with pytest.raises(BadBank, match="the bank was changed after it was built") as found:
        prover(header, arena).prove_golden(golden)
    assert found.value.exit_status == 78


@pytest.mark.parametrize("victim", ["golden", "lease"])
def test_recheck_goes_round_all_goldens_and_the_lease(home: Home, victim: str) -> None:
    """Case N9, every N minutes: whichever of them rots is found within a round."""
    header, arena = loaded(home.bank)
    good = prover(header, arena)
    free = next(r for r in range(8) if r != header.goldens[-1].bank_row)
    vitals = Vitals(goldens=tuple(good.prove_golden(g) for g in header.goldens[-3:]))
    vitals.attested = good.prove(free, seed=3)
    vitals.server = Server()  # type: ignore[assignment] # serving
    row = free if victim == "lease" else header.goldens[-1].bank_row

    async def recheck() -> None:
        async with asyncio.timeout(5):
            await recheck_canary(vitals, good, period_us=1_000)

    arena[row, 100] ^= 0x08
    with pytest.raises(CanaryFailed, match=f"bank row {row}"):
        asyncio.run(recheck())


class Server:
    """A ring server that is busy until it was asked often enough."""

    def __init__(self, busy_for: int = 0) -> None:
        self.asked, self.busy_for = 0, busy_for

    @property
    def busy(self) -> bool:
        self.asked += 1
        return self.asked <= self.busy_for


@pytest.mark.parametrize(("busy_for", "asked"), [(3, 4), (10**9, 5)])
def test_a_proof_waits_for_an_idle_moment_but_not_for_ever(
    home: Home, monkeypatch: pytest.MonkeyPatch, busy_for: int, asked: int
) -> None:
    """While dispatches are in hand nothing is computed beside them, up to a period."""
    monkeypatch.setattr(health, "IDLE_LOOK_US", 1_000)
    header, arena = loaded(home.bank)
    good = prover(header, arena)
    vitals = Vitals(goldens=(good.prove_golden(header.goldens[0]),))
    vitals.server = server = Server(busy_for)  # type: ignore[assignment] # serving
    arena[header.goldens[0].bank_row, 100] ^= 1

    async def recheck() -> None:
        async with asyncio.timeout(5):
            await recheck_canary(vitals, good, period_us=5_000)

    with pytest.raises(CanaryFailed):
        asyncio.run(recheck())
    assert server.asked == asked


# The process


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[NodeProcess]]:
    """Node processes that are gone at the end."""
    started: list[NodeProcess] = []
    yield started
    for node in started:
        node.kill()


def start(nodes: list[NodeProcess], home: Home, address: str, *extra: str) -> NodeProcess:
    command = home.command(address, "--canary-period-s", PERIOD_S, *extra)
    nodes.append(NodeProcess.start(command, home.root / f"node{len(nodes)}.log"))
    return nodes[-1]


@pytest.mark.asyncio
async def test_a_changed_bank_never_joins(home: Home, nodes: list[NodeProcess]) -> None:
    """Record changed, hash, checks and digest made right: the load lets it pass, its golden does
    not, before a Station hears a Hello. One event with fields, status 78."""
    with BankFile.open(home.bank) as bank:
        golden = bank.header.goldens[5]
    layer, expert = tamper(home.bank, golden.bank_row).rows[golden.bank_row]
    async with station(home) as fake:
        node = start(nodes, home, fake.link.address)
        assert await node.wait() == 78
        assert fake.inbox.empty()
    assert node.names() == ["bank_loaded", "canary_failed", "node_failed"]
    failed = node.events()[1]
    assert (failed["layer"], failed["expert"]) == (layer, expert)
    assert failed["bank_row"] == golden.bank_row
    assert float(failed["difference"]) > 0
    assert node.events()[2]["code"] == "canary_failed"
    assert "Traceback" not in node.log_path.read_text()


@pytest.mark.asyncio
async def test_rotten_memory_drains_the_node(home: Home, nodes: list[NodeProcess]) -> None:
    """One bit of a record in the memory of a node that serves: it leaves its lease with the reason,
    names layer and expert, and ends with 1; started again it serves from the file."""
    golden, (layer, expert), record = record_of(home.bank, 6)
    async with station(home) as fake:
        node = start(nodes, home, fake.link.address)
        lease = await fake.lease(epoch=1)
        await check_serving(fake, lease)
        assert flip_in_memory(node.process.pid, record) >= 1
        goodbye = await fake.expect(wire.Goodbye)
        assert await node.wait() == 1
        again = start(nodes, home, fake.link.address)
        await check_serving(fake, await fake.lease(epoch=2))
    where = f"layer {layer} expert {expert} (bank row {golden.bank_row})"
    assert goodbye.epoch == 1
    assert where in goodbye.reason
    names = node.names()
    assert names[-3:] == ["canary_failed", "lease_ended", "node_failed"]
    failed = node.events()[-3]
    assert (failed["layer"], failed["expert"]) == (layer, expert)
    assert "is not the bank's any more" in failed["error"]
    assert "canary_failed" not in again.names()


@pytest.mark.asyncio
async def test_memory_that_rots_between_leases_gets_no_other(
    home: Home, nodes: list[NodeProcess]
) -> None:
    """Both kernels read the same wrong record, so its hash is asked too: the offer is answered with
    a goodbye, not with a row that only the Station could judge."""
    golden, (layer, expert), record = record_of(home.bank, 0)
    async with station(home) as fake:
        node = start(nodes, home, fake.link.address, "--canary-period-s", "300")
        await fake.expect(wire.Hello)
        assert flip_in_memory(node.process.pid, record) >= 1
        fake.offer(epoch=3, canary_bank_row=golden.bank_row)
        goodbye = await fake.expect(wire.Goodbye)
        assert await node.wait() == 1
    assert goodbye.epoch == 3
    assert f"layer {layer} expert {expert} " in goodbye.reason
    assert "node_serving" not in node.names()


@pytest.mark.asyncio
async def test_an_idle_node_goes_on_serving_while_it_proves_itself(
    home: Home, nodes: list[NodeProcess]
) -> None:
    """Many rounds beside dispatches change no bit and end no lease."""
    async with station(home) as fake:
        node = start(nodes, home, fake.link.address)
        lease = await fake.lease(epoch=1)
        until, generation = time.monotonic() + 1.5, 0
        while time.monotonic() < until:
            generation += 1
            await check_serving(fake, lease, generation)
        assert node.process.poll() is None
        assert node.names().count("node_serving") == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("layout", ["row-major", "interleaved-4"])
async def test_either_order_is_proved_and_the_manager_hears_why(
    tmp_path: Path, nodes: list[NodeProcess], layout: RecordOrder
) -> None:
    """A bank of either record order, and no Station to say goodbye to: never READY."""
    keys.create(tmp_path / "station", "station")
    keys.create(tmp_path / "nodes", "spark0")
    home = Home(tmp_path, "spark0")
    placement = balanced(Experts.digest, SHAPE, [("spark0", "spark", 1.0)])
    header = build(Experts(), placement, "spark0", home.bank, layout=layout)
    tamper(home.bank, header.goldens[3].bank_row)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.setblocking(False)
        command = home.command("tcp://127.0.0.1:1")
        log = tmp_path / "node.log"
        nodes.append(NodeProcess.start(command, log, NOTIFY_SOCKET=str(tmp_path / "notify")))
        assert await nodes[0].wait() == 78
        told = heard(manager)
    assert nodes[0].names() == ["bank_loaded", "canary_failed", "node_failed"]
    assert "STATUS=canary failed: layer 1 expert " in told
    assert "READY=1" not in told
