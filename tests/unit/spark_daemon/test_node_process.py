"""A real node process against a Station made of the real link, fabric and ring code."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.core import wire
from shared.core.ring_layout import (
    HEADER_BYTES,
    Header,
    RingShape,
    RowStatus,
    bell_offset,
    build_dispatch,
)
from shared.io import keys
from shared.kernels import canary
from shared.kernels.codecs import bf16_bits
from tests.support.fake_station import (
    MODEL,
    RING,
    FakeStation,
    Home,
    Lease,
    NodeProcess,
    kernel,
    own_arena,
    station,
    tiny_placement,
)

Start = Callable[..., NodeProcess]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.make(tmp_path)


@pytest.fixture
def start(tmp_path: Path, home: Home) -> Iterator[Start]:
    started: list[NodeProcess] = []

    def begin(address: str, *extra: str, of: Home = home, **environ: str) -> NodeProcess:
        path = tmp_path / f"node{len(started)}.log"
        started.append(NodeProcess.start(of.command(address, *extra), path, **environ))
        return started[-1]

    yield begin
    for node in started:
        node.kill()


def work(seed: int, layer: int, *, tokens: int = 3) -> tuple[Any, Any]:
    """Every expert of a layer that spark0 holds for every token, and the activations."""
    rng = np.random.default_rng(seed)
    experts = [expert for at, expert in tiny_placement().node("spark0").rows if at == layer]
    pairs = np.array([(t, e) for t in range(tokens) for e in experts], np.uint16)
    rng.shuffle(pairs)
    activations = bf16_bits(rng.normal(0, 1, (tokens, MODEL.expert.latent)).astype(np.float32))
    return pairs, activations


def expected(layer: int, pairs: Any, activations: Any) -> Any:
    """The rows by the kernel itself, from records that no bank code has touched."""
    arena, rows = own_arena("spark0")
    row_of = {key: row for row, key in enumerate(rows)}
    bank_rows = np.array([row_of[layer, int(e)] for e in pairs[:, 1]], np.int32)
    out = np.zeros((len(pairs), MODEL.expert.latent), np.uint16)
    kernel().rows(arena, bank_rows, pairs[:, 0].astype(np.int32), activations, out)
    return out


async def check_serving(fake: FakeStation, lease: Lease, generation: int = 1) -> None:
    """A dispatch comes back with the right bits."""
    pairs, activations = work(generation, layer=1)
    lease.dispatch(0, generation, 1, pairs, activations, ticket=generation)
    header, got_pairs, status, rows = await fake.answer(lease, 0, generation)
    assert header.ticket == generation
    assert np.array_equal(got_pairs, pairs)
    assert not status.any()
    assert np.array_equal(rows, expected(1, pairs, activations))


@pytest.mark.asyncio
async def test_rows_are_bitwise_those_of_the_kernel(home: Home, start: Start) -> None:
    """Lease, canary, dispatches over all slots and layers; reply headers say who and how long."""
    async with station(home) as fake:
        node = start(fake.link.address)
        hello = await fake.expect(wire.Hello)
        assert (hello.sender, hello.tier, hello.pid) == ("spark0", "spark", node.process.pid)
        assert hello.bank.placement_digest == tiny_placement().digest
        assert hello.kernel_id == kernel().kernel_id
        lease = fake.offer(epoch=1)
        await fake.grant(lease)

        arena, _ = own_arena("spark0")
        row = canary.canary_row(kernel(), arena, 0, 5)
        assert lease.canary_row == row.tobytes()
        sent: list[tuple[Any, Any]] = []
        for generation, slot in product((1, 2), range(RING.slots)):
            layer, ticket = 1 + slot % 2, len(sent)
            pairs, activations = work(ticket, layer)
            lease.dispatch(slot, generation, layer, pairs, activations, ticket=ticket)
            sent.append((pairs, activations))
            header, got_pairs, status, rows = await fake.answer(lease, slot, generation)
            assert (header.layer, header.ticket, header.epoch) == (layer, ticket, 1)
            assert header.kernel_id == kernel().kernel_id
            assert np.array_equal(got_pairs, pairs)
            assert not status.any()
            assert np.array_equal(rows, expected(layer, pairs, activations))

        beat = await fake.beat(lambda counters: counters.dispatches == len(sent))
        assert beat.counters.rows == sum(len(pairs) for pairs, _ in sent)
        assert not beat.busy
        serving = next(event for event in node.events() if event["event"] == "node_serving")
        assert serving["epoch"] == 1
        assert serving["rows"] == 8
        assert serving["kernel"] == kernel().name


@pytest.mark.asyncio
async def test_unknown_experts_and_broken_rows_get_a_status(home: Home, start: Start) -> None:
    """Case N1: foreign layer, foreign expert, id 65535 and NaN input give zero rows with a reason,
    and never spoil the other rows of the dispatch."""
    async with station(home) as fake:
        start(fake.link.address)
        lease = await fake.lease(epoch=1)
        pairs, activations = work(1, layer=1, tokens=2)
        foreign = next(e for at, e in tiny_placement().node("grace").rows if at == 1)
        pairs[1, 1] = foreign
        pairs[3, 1] = 65_535
        activations = activations.copy()
        activations[1] = 0x7FC0  # NaN

        lease.dispatch(2, 1, 1, pairs, activations)
        _, _, status, rows = await fake.answer(lease, 2, 1)

        unknown = np.isin(np.arange(len(pairs)), (1, 3))
        broken = ~unknown & (pairs[:, 0] == 1)
        good = ~unknown & ~broken
        assert (status[unknown] == RowStatus.UNKNOWN_EXPERT.value).all()
        assert (status[broken] == RowStatus.NOT_FINITE.value).all()
        assert (status[good] == RowStatus.OK.value).all()
        assert not rows[unknown | broken].any()
        assert np.array_equal(rows[good], expected(1, pairs[good], activations))

        lease.dispatch(2, 2, 9, pairs, activations)
        _, _, status, rows = await fake.answer(lease, 2, 2)
        assert (status == RowStatus.UNKNOWN_EXPERT.value).all()
        assert not rows.any()
        refused = unknown.sum() + broken.sum() + len(pairs)
        await fake.beat(lambda counters: counters.refused_rows == refused)


@pytest.mark.asyncio
async def test_bad_dispatches_are_counted_and_not_answered(home: Home, start: Start) -> None:
    """Stale epoch, stale generation, damage and impossible counts: no answer, one count each, and
    the node goes on serving (cases L2, N16)."""
    async with station(home) as fake:
        start(fake.link.address)
        lease = await fake.lease(epoch=4)
        pairs, activations = work(1, layer=1)
        payload = build_dispatch(pairs, activations)
        good = Header(1, 4, 1, 1, len(activations), len(pairs), len(payload), 0, 0, 0)
        wide = np.zeros((RING.max_rows + 1, 2), np.uint16)
        wide_payload = build_dispatch(wide, activations[:1])

        lease.send(0, good._replace(epoch=3), payload)
        lease.send(1, good._replace(tokens=1), payload)
        lease.send(
            2,
            good._replace(rows=len(wide), tokens=1, payload_bytes=len(wide_payload)),
            wide_payload,
        )
        assert lease.requests is not None
        at = lease.shape.slot_offset(3, lease.shape.request_slot_bytes)
        lease.requests.write(at, good.pack())  # without a checksum
        lease.requests.write(at + HEADER_BYTES, payload)
        lease.requests.ring(bell_offset(3), 1)
        await fake.beat(lambda counters: counters.corrupt_dispatches == 4)
        await check_serving(fake, lease, generation=2)
        lease.requests.ring(bell_offset(0), 3)  # generation 2 still lies there

        beat = await fake.beat(lambda counters: counters.corrupt_dispatches == 5)
        assert beat.counters.dispatches == 1
        for slot in (1, 2, 3):
            assert not lease.replies.memory[slot * 8 : slot * 8 + 8].any(), f"slot {slot} answered"


@pytest.mark.asyncio
async def test_sigterm_ends_the_lease_and_exits_0(home: Home, start: Start) -> None:
    """Goodbye, status 0, within two seconds."""
    async with station(home) as fake:
        node = start(fake.link.address)
        lease = await fake.lease(epoch=1)
        await check_serving(fake, lease)
        began = time.monotonic()
        node.terminate()
        goodbye = await fake.expect(wire.Goodbye)
        assert goodbye.epoch == 1
        assert await node.wait() == 0
        assert time.monotonic() - began < 2
        assert node.names()[-1] == "node_stopped"


@pytest.mark.asyncio
async def test_sigterm_after_the_station_died_exits_0(home: Home, start: Start) -> None:
    """Case L4: the stop order does not matter."""
    async with station(home) as fake:
        node = start(fake.link.address)
        await fake.lease(epoch=1)
    began = time.monotonic()
    node.terminate()
    assert await node.wait() == 0
    assert time.monotonic() - began < 2


@pytest.mark.asyncio
async def test_a_new_station_gets_the_node_without_a_second_read(home: Home, start: Start) -> None:
    """Case L18: after the Station restarts the node joins again; its bank was read once, even when
    the file is gone by then. Old rings are dead to it."""
    async with station(home) as fake:
        node = start(fake.link.address)
        old = await fake.lease(epoch=7)
        await check_serving(fake, old)
        address = fake.link.address
    home.bank.unlink()
    async with station(home, address=address, incarnation=2) as fake:
        lease = await fake.lease(epoch=1)
        await check_serving(fake, lease)
        assert node.names().count("bank_loaded") == 1
        assert node.names().count("node_serving") == 2
        assert node.process.poll() is None


@pytest.mark.asyncio
async def test_a_revoked_lease_is_closed_and_asked_for_again(home: Home, start: Start) -> None:
    """Cases L7, L10: a fenced node closes its request ring, then greets again; an offer that is not
    above the last epoch of that Station is ignored (fence)."""
    async with station(home) as fake:
        start(fake.link.address)
        first = await fake.lease(epoch=5)
        fake.say(wire.LeaseRevoked(epoch=4, reason="old news", **fake.signed()))
        await check_serving(fake, first)
        fake.say(wire.LeaseRevoked(epoch=5, reason="fenced", **fake.signed()))
        await fake.expect(wire.Hello)
        assert first.request_descriptor is not None
        with pytest.raises(Exception, match=r"sealed region|key does not fit|cannot open"):
            fake.fabric.connect(first.request_descriptor)
        fake.offer(epoch=5)
        await fake.expect(wire.Hello)  # still without a lease
        second = fake.offer(epoch=6)
        await fake.grant(second)
        await check_serving(fake, second)
        pairs, activations = work(3, layer=1)
        first.dispatch(1, 1, 1, pairs, activations)
        await check_serving(fake, second, generation=2)
        assert not first.replies.memory[8:16].any()


@pytest.mark.asyncio
async def test_a_silent_station_loses_the_node(home: Home, start: Start) -> None:
    """Without heartbeat answers for ttl the node drops the lease and greets again."""
    async with station(home) as fake:
        node = start(fake.link.address)
        await fake.lease(epoch=1, ttl_us=300_000)
        fake.answers_heartbeats = False
        await fake.expect(wire.Hello)
        ended = next(event for event in node.events() if event["event"] == "lease_ended")
        assert "heartbeat" in ended["reason"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "changes",
    [
        {"canary_bank_row": 8},
        {"ring_shape": RingShape(slots=4, max_tokens=8, max_rows=32, latent=64)},
        {"reply_bytes": 4096},
    ],
    ids=["canary row", "latent", "reply ring"],
)
async def test_an_offer_that_does_not_fit_is_not_taken(
    home: Home, start: Start, changes: dict[str, Any]
) -> None:
    """A wrong offer is answered with another Hello, and the next right one is served."""
    async with station(home) as fake:
        node = start(fake.link.address)
        await fake.expect(wire.Hello)
        ring_shape = changes.get("ring_shape", RING)
        reply_bytes = changes.get("reply_bytes", ring_shape.reply_ring_bytes)
        fake.say(
            wire.LeaseOffer(
                epoch=1, ring=ring_shape, reply_ring=fake.fabric.register(reply_bytes).descriptor,
                canary_bank_row=changes.get("canary_bank_row", 0), canary_seed=1,
                heartbeat_us=50_000, ttl_us=2_000_000, **fake.signed(),
            )
        )  # fmt: skip
        lease = await fake.lease(epoch=2)
        await check_serving(fake, lease)
        assert "lease_ended" in node.names()


@pytest.mark.asyncio
async def test_flapping_leases_converge_and_leak_nothing(home: Home, start: Start) -> None:
    """Case L7: after lease on lease is fenced the node serves again, with the memory and the
    descriptors of one lease and without a second read of its bank."""
    async with station(home) as fake:
        node = start(fake.link.address)
        lease = await fake.lease(epoch=1)
        await check_serving(fake, lease)
        before = resources(node.process.pid)
        for epoch in range(2, 12):
            fake.say(wire.LeaseRevoked(epoch=epoch - 1, reason="flap", **fake.signed()))
            lease = await fake.lease(epoch=epoch)
        await check_serving(fake, lease)

        assert resources(node.process.pid) == before
        assert node.names().count("bank_loaded") == 1
        assert node.names().count("node_serving") == 11


def resources(pid: int) -> tuple[int, int]:
    """(open descriptors, mapped fabric regions) of a process."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return len(list(Path(f"/proc/{pid}/fd").iterdir())), maps.count("k3-region")


@pytest.mark.asyncio
async def test_the_service_manager_hears_ready_once_and_pings(
    home: Home, start: Start, tmp_path: Path
) -> None:
    """READY comes with the first grant and only then; while the node joins its start is extended,
    for a load that is over at once it is not; an idle node feeds its watchdog."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.setblocking(False)
        async with station(home) as fake:
            start(
                fake.link.address,
                NOTIFY_SOCKET=str(tmp_path / "notify"),
                WATCHDOG_USEC="90000",
            )
            await fake.expect(wire.Hello)
            joining = heard(manager)
            lease = fake.offer(epoch=1)
            await fake.grant(lease)
            await check_serving(fake, lease)
            fake.say(wire.LeaseRevoked(epoch=1, reason="flap", **fake.signed()))
            await fake.lease(epoch=2)
            serving = ""
            async with asyncio.timeout(5):
                while serving.count("WATCHDOG=1") < 5 or serving.count("serving 8 experts") < 2:
                    serving += heard(manager)
                    await asyncio.sleep(0.01)

    assert "READY=1" not in joining
    assert joining.splitlines() == [
        "STATUS=loading bank spark0: 0.0 of 0.0 MiB",
        "EXTEND_TIMEOUT_USEC=30000000",
        "STATUS=joining the Station",
    ]
    assert serving.count("READY=1") == 1


def heard(manager: socket.socket) -> str:
    """Everything that was notified so far."""
    lines = []
    with contextlib.suppress(BlockingIOError):
        while True:
            lines.append(manager.recv(4096).decode())
    return "\n".join(lines)


def test_an_orphan_ends(home: Home, tmp_path: Path) -> None:
    """Case Z9: a node does not outlive the process that K3_PARENT_PID ties it to."""
    command = home.command("tcp://127.0.0.1:1")
    log = tmp_path / "orphan.log"
    parent = (
        "import json, os, subprocess, sys, time, pathlib\n"
        "log = pathlib.Path(sys.argv[2])\n"
        "env = {**os.environ, 'K3_PARENT_PID': str(os.getpid())}\n"
        "child = subprocess.Popen(json.loads(sys.argv[1]), stderr=log.open('w'), env=env)\n"
        "while 'bank_loaded' not in log.read_text(): time.sleep(0.01)\n"
        "print(child.pid)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", parent, json.dumps(command), str(log)],
        capture_output=True, text=True, timeout=20, check=True,
    )  # fmt: skip
    pid = int(done.stdout)

    end = time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < end, "the orphan still runs"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.asyncio
async def test_a_refused_key_is_a_configuration_error(home: Home, start: Start) -> None:
    """A key that is not on the allow-list: exit 78 and one line that says what to do."""
    async with station(home, admit=False) as fake:
        node = start(fake.link.address)
        assert await node.wait() == 78
    failed = node.events()[-1]
    assert (failed["event"], failed["code"]) == ("node_failed", "key_refused")
    assert "allow-list" in failed["error"]
    assert "Traceback" not in node.log_path.read_text()


@pytest.mark.asyncio
@pytest.mark.parametrize("permanent", [True, False])
async def test_a_foreign_placement_is_refused_for_good(
    home: Home, start: Start, permanent: bool
) -> None:
    """HelloRefused: permanent ends the node with 78 and the Station's code, else it tries again."""
    async with station(home) as fake:
        node = start(fake.link.address)
        await fake.expect(wire.Hello)
        fake.say(
            wire.HelloRefused(
                code="digest_mismatch",
                text="bank was built for placement abc: build the bank again",
                permanent=permanent,
                **fake.signed(),
            )
        )
        if not permanent:
            await fake.lease(epoch=1)
            return
        assert await node.wait() == 78
    failed = node.events()[-1]
    assert failed["code"] == "digest_mismatch"
    assert "build the bank again" in failed["error"]


@pytest.mark.asyncio
async def test_tier_daemons_are_the_same_node(tmp_path: Path) -> None:
    """`k3-grace` serves the bank of the grace tier under its default name."""
    home = Home.make(tmp_path, node="grace")
    async with station(home) as fake:
        command = home.command(fake.link.address, module="services.grace")
        command.remove("grace")
        node = NodeProcess.start(command, tmp_path / "grace.log")
        try:
            hello = await fake.expect(wire.Hello)
            assert (hello.sender, hello.tier) == ("grace", "grace")
            node.terminate()
            assert await node.wait() == 0
        finally:
            node.kill()


def run(command: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=20, check=False,
        env={"PATH": "/usr/bin:/bin", "K3_LOG": "json", **environ},
    )  # fmt: skip


def test_a_bank_of_another_node_is_refused(home: Home) -> None:
    """The bank names its node and tier; another one exits with 78 before it reads records."""
    other = Home(home.root, node="spark0")
    command = other.command("tcp://127.0.0.1:1", module="services.rtx")
    done = run(command)

    assert done.returncode == 78
    assert "built for node spark0 of tier spark" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_name_is_wrong_usage() -> None:
    """Status 2, as every command line."""
    assert run([sys.executable, "-m", "spark_daemon"]).returncode == 2


def test_a_damaged_bank_is_refused(home: Home) -> None:
    """A flipped byte in a record never serves."""
    data = bytearray(home.bank.read_bytes())
    data[-3000] ^= 1
    home.bank.write_bytes(data)

    done = run(home.command("tcp://127.0.0.1:1"))

    assert done.returncode == 78
    assert "bank_invalid" in done.stderr


def test_a_node_that_finds_no_station_keeps_trying(home: Home, start: Start) -> None:
    """No Station is no error: the node waits, says so once, and stops on SIGTERM with 0."""
    node = start("tcp://127.0.0.1:1")
    until = time.monotonic() + 10
    while "station_unreachable" not in node.names() and time.monotonic() < until:
        time.sleep(0.05)
    node.terminate()

    assert node.process.wait(2) == 0
    assert node.names().count("station_unreachable") == 1


def test_the_node_imports_no_torch() -> None:
    """Eight daemons must start in about a second each."""
    code = "import spark_daemon.__main__, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)


def test_the_secret_key_never_reaches_the_log(home: Home) -> None:
    """Redaction by value."""
    secret = keys.load_secret(home.root / "nodes" / "spark0.key_secret").secret
    done = run(home.command("tcp://127.0.0.1:1", "--kernel", "gpu"), K3_LOG_LEVEL="debug")

    assert secret not in done.stderr + done.stdout
