"""The control plane over real sockets: nodes join, leave, lie and misbehave; the Station stays."""

from __future__ import annotations

import gc
import os
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.core import wire
from shared.core.errors import CheckpointError
from shared.io.fabric_shm import ShmFabric
from shared.io.link_base import send_now
from station.expert_path import NodeReport
from station.membership import MISSES_TO_LOSE
from tests.support.fake_station import TinyExperts
from tests.unit.station.scripted_node import RING, ScriptedNode, Station, placement, station

pytestmark = pytest.mark.asyncio
SPARK0 = 1  # its place


async def serves(pod: Station, node: ScriptedNode) -> int:
    """The proof that a Station is well: a node joins. Returns the epoch."""
    epoch = await node.join()
    await pod.until("attached", lambda: pod.nodes.places.channel(SPARK0) is not None)
    return epoch


async def test_a_node_joins_beats_and_leaves(tmp_path: Path) -> None:
    """Hello, offer, canary, grant, attach; a goodbye detaches."""
    async with station(tmp_path) as pod:
        node = await pod.node()
        epoch = await serves(pod, node)
        node.beat(epoch)
        assert (await node.expect(wire.HeartbeatSeen)).epoch == epoch
        assert pod.nodes.counters["spark0"].rows == 4
        assert pod.nodes.missing() == ["spark1"]

        node.link.send(wire.Goodbye(**node.signed(), epoch=epoch, reason="done"))

        assert (await node.expect(wire.LeaseRevoked)).epoch == epoch
        await pod.until("detached", lambda: pod.nodes.places.channel(SPARK0) is None)
        stats = pod.nodes.places.stats[SPARK0]
        assert (stats.losses, stats.last_loss) == (1, "goodbye: done")


async def test_a_loading_node_is_known_until_its_link_closes(tmp_path: Path) -> None:
    """Progress arrives over a link of its own; the join that follows is a join like any other."""
    async with station(tmp_path) as pod:
        loads = pod.nodes.membership.loads
        async with pod.passing_node() as reporter:
            reporter.load(3, 8)
            await pod.until("known", lambda: "spark0" in loads)
            assert (loads["spark0"].done_bytes, loads["spark0"].total_bytes) == (3, 8)
            assert pod.nodes.missing() == ["spark0", "spark1"]
            loads["spark0"] = replace(loads["spark0"], came_us=2**62)  # not forgotten by silence
        await pod.until("forgotten", lambda: not loads)
        node = await pod.node()
        await serves(pod, node)


async def test_a_second_process_that_loads_takes_no_answers(tmp_path: Path) -> None:
    """The node that serves hears of its lease, whatever another process of its name says."""
    async with station(tmp_path) as pod:
        node, second = await pod.node(), await pod.node()
        epoch = await serves(pod, node)
        before = pod.nodes.link.counters.received
        second.load(3, 8)
        await pod.until("heard", lambda: pod.nodes.link.counters.received > before)
        node.beat(epoch)

        assert (await node.expect(wire.HeartbeatSeen)).epoch == epoch
        assert pod.nodes.membership.loads == {}


async def test_complete_once_is_remembered(tmp_path: Path) -> None:
    """Readiness does not depend on whether a probe came while the pod was whole."""
    async with station(tmp_path) as pod:
        first, second = await pod.node("spark0"), await pod.node("spark1")
        await first.join()
        assert not pod.nodes.was_complete
        epoch = await second.join()
        second.link.send(wire.Goodbye(**second.signed(), epoch=epoch, reason=""))
        await second.expect(wire.LeaseRevoked)

        assert pod.nodes.missing() == ["spark1"]
        assert pod.nodes.was_complete


@pytest.mark.parametrize("row", [b"", b"\0", b"\0" * 63, b"\0" * 64, b"\xff" * 64, b"\0" * 4096])
async def test_any_bytes_may_come_as_a_canary(tmp_path: Path, row: bytes) -> None:
    """An odd, empty, wrong or huge canary row ends that lease and nothing else."""
    async with station(tmp_path) as pod:
        node = await pod.node()
        node.hello()
        node.accept(await node.expect(wire.LeaseOffer), canary_row=row)

        assert "canary" in (await node.expect(wire.LeaseRevoked)).reason
        await node.expect(wire.HelloRefused)
        stats = pod.nodes.places.stats[SPARK0]
        assert "wrong canary row" in stats.last_loss, "the status says why it does not serve"
        assert stats.losses == 0, "it never served"
        await serves(pod, node)


async def test_a_canary_may_be_asked_of_a_copy(tmp_path: Path) -> None:
    """The rows of a bank are a node's own experts, then the copies: both ends count them alike."""
    spark0 = placement().node("spark0")
    async with station(tmp_path) as pod:
        node = await pod.node()
        asked: set[bool] = set()
        for _ in spark0.bank_rows:  # every lease asks of the next row
            node.hello()
            offer = await node.expect(wire.LeaseOffer)
            asked.add(offer.canary_bank_row >= len(spark0.rows))
            node.accept(offer)
            epoch = (await node.expect(wire.LeaseGranted)).epoch
            node.link.send(wire.Goodbye(**node.signed(), epoch=epoch, reason="again"))
            await node.expect(wire.LeaseRevoked)
            if len(asked) == 2:
                return
        raise AssertionError(f"asked of copies: {asked}")


def descriptors() -> dict[str, dict[str, Any]]:
    """Changes to a right descriptor that make it a wrong one."""
    return {
        "a null byte": {"locator": "/proc/1\0/fd/1"},
        "no number": {"locator": "/proc/self/fd/3"},
        "another path": {"locator": "/etc/passwd"},
        "another descriptor": {"locator": f"/proc/{os.getpid()}/fd/0"},
        "a dead process": {"locator": "/proc/4194305/fd/3"},
        "a null byte in the wake page": {"wake_locator": "\0"},
        "a wrong key": {"key": 1},
        "another provider": {"provider": "verbs"},
        "a small ring": {"length": 4096},
        "an empty ring": {"length": 0},
        "an endless ring": {"length": 2**63 - 1},
    }


@pytest.mark.parametrize("name", descriptors())
async def test_any_descriptor_may_come_with_an_acceptance(tmp_path: Path, name: str) -> None:
    """A ring that is not what was asked for is refused, with a reason, and the Station lives."""
    async with station(tmp_path) as pod:
        node = await pod.node()
        node.hello()
        offer = await node.expect(wire.LeaseOffer)
        right = node.fabric.register(RING.request_ring_bytes).descriptor
        node.accept(offer, request_ring=msgspec.structs.replace(right, **descriptors()[name]))

        assert "request ring" in (await node.expect(wire.LeaseRevoked)).reason
        await serves(pod, node)


async def test_a_real_but_small_ring_is_refused(tmp_path: Path) -> None:
    """A region that exists but cannot hold a dispatch would fail every later layer."""
    async with station(tmp_path) as pod:
        node = await pod.node()
        node.hello()
        small = node.fabric.register(4096).descriptor
        node.accept(await node.expect(wire.LeaseOffer), request_ring=small)

        assert "request ring" in (await node.expect(wire.LeaseRevoked)).reason


async def test_frames_and_messages_out_of_turn_change_nothing(tmp_path: Path) -> None:
    """Acceptances, heartbeats and goodbyes of leases that never were, and another's name."""
    async with station(tmp_path) as pod:
        node = await pod.node()
        node.beat(7)
        assert (await node.expect(wire.LeaseRevoked)).epoch == 7
        node.link.send(wire.Goodbye(**node.signed(), epoch=7, reason=""))
        descriptor = node.fabric.register(RING.request_ring_bytes).descriptor
        for epoch in (0, 101, 2**63 - 1):
            node.link.send(
                wire.LeaseAccepted(
                    **node.signed(), epoch=epoch, request_ring=descriptor, canary_row=b"\0"
                )
            )
        node.hello(sender="spark1")

        await serves(pod, node)
        assert "spark1" not in pod.nodes.membership.leases


async def test_two_hellos_in_a_row_leave_one_lease(tmp_path: Path) -> None:
    """The first offer is revoked, its ring given back; accepting it late is ignored."""
    async with station(tmp_path) as pod:
        node = await pod.node()
        node.hello()
        node.hello()
        first = await node.expect(wire.LeaseOffer)
        second = await node.expect(wire.LeaseOffer)
        node.accept(first)
        node.accept(second)

        assert (await node.expect(wire.LeaseGranted)).epoch == second.epoch > first.epoch
        assert len(pod.nodes._pending) == 1


async def test_accepting_twice_is_judged_once(tmp_path: Path) -> None:
    """A second, wrong acceptance cannot swap the ring of a lease that serves, or end it."""
    async with station(tmp_path) as pod:
        node = await pod.node()
        node.hello()
        offer = await node.expect(wire.LeaseOffer)
        node.accept(offer)
        await node.expect(wire.LeaseGranted)
        ring = pod.nodes._pending["spark0"].request_ring

        node.accept(offer, canary_row=b"wrong")
        node.beat(offer.epoch)

        assert (await node.expect(wire.HeartbeatSeen)).epoch == offer.epoch
        await pod.until("read", lambda: not pod.nodes._unjudged)
        assert pod.nodes._pending["spark0"].request_ring is ring
        assert pod.state() == "serving"


async def test_a_second_process_of_a_name_takes_over(tmp_path: Path) -> None:
    """The revocation goes to the process that held the lease, not to the one that spoke last."""
    async with station(tmp_path) as pod:
        old, new = await pod.node(), await pod.node()
        first = await old.join()
        second = await new.join()

        assert (await old.expect(wire.LeaseRevoked)).epoch == first
        assert second > first
        assert pod.state() == "serving"


class SlowDisk(TinyExperts):
    """A checkpoint whose reads wait until the test lets them go."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.go = threading.Event()

    def expert_record(self, layer: int, expert: int) -> bytes:
        """As TinyExperts, later."""
        self.asked.set()
        assert self.go.wait(10)
        return super().expert_record(layer, expert)


async def test_a_slow_disk_does_not_stop_the_heartbeats(tmp_path: Path) -> None:
    """While one node's canary is computed, others are answered, or all leases would run out."""
    disk = SlowDisk()
    async with station(tmp_path, source=disk) as pod:
        disk.go.set()
        served = await pod.node("spark1")
        epoch = await served.join()
        disk.go.clear()
        disk.asked.clear()
        node = await pod.node("spark0")
        node.hello()
        node.accept(await node.expect(wire.LeaseOffer))
        await pod.until("the disk is asked", disk.asked.is_set)

        served.beat(epoch)
        assert (await served.expect(wire.HeartbeatSeen)).epoch == epoch
        disk.go.set()
        await node.expect(wire.LeaseGranted)


async def test_a_node_that_left_before_its_canary_was_judged(tmp_path: Path) -> None:
    """The verdict comes for a lease that is over: nothing is granted, nothing stays open."""
    disk = SlowDisk()
    async with station(tmp_path, source=disk) as pod:
        node = await pod.node()
        node.hello()
        offer = await node.expect(wire.LeaseOffer)
        node.accept(offer)
        await pod.until("the disk is asked", disk.asked.is_set)
        node.link.send(wire.Goodbye(**node.signed(), epoch=offer.epoch, reason="changed my mind"))
        await node.expect(wire.LeaseRevoked)
        disk.go.set()

        await serves(pod, node)
        assert pod.nodes.membership.leases["spark0"].epoch > offer.epoch


class BrokenDisk(TinyExperts):
    """A checkpoint that can be read from the second record on."""

    broken = True

    def expert_record(self, layer: int, expert: int) -> bytes:
        """An error, once."""
        if self.broken:
            self.broken = False
            raise CheckpointError("shard 7: read failed; check the disk")
        return super().expert_record(layer, expert)


async def test_a_canary_the_station_cannot_compute_ends_one_lease(tmp_path: Path) -> None:
    """The Station's own disk error is told to the node and does not end the pod."""
    async with station(tmp_path, source=BrokenDisk()) as pod:
        node = await pod.node()
        node.hello()
        node.accept(await node.expect(wire.LeaseOffer))

        assert "check the disk" in (await node.expect(wire.LeaseRevoked)).reason
        await serves(pod, node)


async def test_no_memory_for_a_reply_ring_ends_one_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running out of descriptors while a node joins leaves the others alone."""

    def no_more(*_: object) -> int:
        raise OSError(24, "Too many open files")

    async with station(tmp_path) as pod:
        node = await pod.node()
        with monkeypatch.context() as patch:
            patch.setattr("os.memfd_create", no_more)
            node.hello()
            revoked = await node.expect(wire.LeaseRevoked)
        assert "Too many open files" in revoked.reason

        await serves(pod, node)


async def test_culprits_lose_their_lease_by_name(tmp_path: Path) -> None:
    """Layer verdicts reach the membership; the channel is closed and the reason kept."""
    async with station(tmp_path) as pod:
        node = await pod.node()
        epoch = await serves(pod, node)
        for _ in range(MISSES_TO_LOSE):
            pod.nodes.report(NodeReport("spark0", epoch, missed=True))

        assert "deadlines" in (await node.expect(wire.LeaseRevoked)).reason
        await pod.until("detached", lambda: pod.nodes.places.channel(SPARK0) is None)
        assert "deadlines" in pod.nodes.places.stats[SPARK0].last_loss


def open_files() -> int:
    """Descriptors of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def mapped_rings() -> int:
    """Ring memory that this process still maps."""
    gc.collect()
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return sum("k3-region" in line for line in maps)


async def test_two_hundred_joins_leave_nothing_behind(tmp_path: Path) -> None:
    """Neither descriptors nor mappings grow with the number of leases."""
    async with station(tmp_path) as pod:
        node = await pod.node()
        counts = []
        for number in range(200):
            await node.join()
            if number in (10, 199):
                await pod.until("attached", lambda: pod.nodes.places.channel(SPARK0) is not None)
                node.fabric.close()
                node.rings.clear()
                node.fabric = ShmFabric(spin_us=0)
                counts.append((open_files(), mapped_rings()))

        before, after = counts
        assert after[0] - before[0] <= 4
        assert after[1] - before[1] <= 2


async def test_a_node_without_experts_is_never_missed(tmp_path: Path) -> None:
    """The placement may leave a node empty; the pod is ready without it."""
    async with station(tmp_path) as pod:
        first, *rest = placement().nodes[1:]
        empty = msgspec.structs.replace(first, rows=(), copies=())
        shrunk = msgspec.structs.replace(placement(), nodes=(placement().nodes[0], empty, *rest))
        pod.nodes.membership.placement = shrunk

        assert pod.nodes.missing() == ["spark1"]
        node = await pod.node()
        bank = wire.BankFacts(
            name="spark0",
            model_digest=TinyExperts.digest,
            placement_digest=shrunk.digest,
            shape=shrunk.shape.expert,
            rows=0,
        )
        node.hello(bank=bank)
        refusal = await node.expect(wire.HelloRefused)
        assert refusal.permanent
        assert "no experts" in refusal.text


async def test_the_status_says_why_a_node_was_refused(tmp_path: Path) -> None:
    """An operator sees the reason at the Station, not only in the node's own log."""
    async with station(tmp_path) as pod:
        node = await pod.node()
        node.hello(kernel_id=1)

        assert (await node.expect(wire.HelloRefused)).permanent
        assert "choose the same kernel" in pod.nodes.places.stats[SPARK0].last_loss


def anything(rng: random.Random, node: ScriptedNode, epochs: list[int]) -> wire.Message | bytes:
    """A message that decodes, with fields a hostile node would choose, or no message at all."""
    epoch = rng.choice([*epochs, 0, 101, 2**63 - 1])
    right = node.fabric.register(RING.request_ring_bytes).descriptor
    match rng.randrange(6):
        case 0:
            return rng.randbytes(rng.randrange(200))
        case 1:
            frame = bytearray(wire.encode(wire.Goodbye(**node.signed(), epoch=epoch, reason="x")))
            frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
            return bytes(frame)
        case 2:
            counters = wire.NodeCounters(*(rng.randrange(2**63) for _ in range(4)))
            return wire.Heartbeat(**node.signed(), epoch=epoch, busy=True, counters=counters)
        case 3:
            return wire.Goodbye(**node.signed(), epoch=epoch, reason="\0" * rng.randrange(512))
        case 4:
            changes = descriptors()[rng.choice(sorted(descriptors()))]
            return wire.LeaseAccepted(
                **node.signed(),
                epoch=epoch,
                request_ring=rng.choice([right, msgspec.structs.replace(right, **changes)]),
                canary_row=rng.randbytes(rng.randrange(70)),
            )
        case _:
            hello = node.hello_message()
            changes = rng.choice(
                [
                    {},
                    {"protocol": 0},
                    {"tier": "rtx"},
                    {"pid": 0},
                    {"kernel_id": 2**32 - 1, "kernel_name": "\x1b[2J"},
                    {"bank": msgspec.structs.replace(hello.bank, rows=rng.randrange(2**32))},
                    {"bank": msgspec.structs.replace(hello.bank, model_digest="\0")},
                ]
            )
            return msgspec.structs.replace(hello, **changes)


@pytest.mark.parametrize("seed", range(4))
async def test_nothing_a_node_sends_ends_the_station(tmp_path: Path, seed: int) -> None:
    """Three hundred hostile messages; another node serves all along, and so can this one after."""
    rng = random.Random(seed)
    async with station(tmp_path) as pod:
        honest, hostile = await pod.node("spark1"), await pod.node("spark0")
        epoch = await honest.join()
        for number in range(300):
            epochs = [pod.nodes.membership.last_epoch]
            message = anything(rng, hostile, epochs)
            if isinstance(message, bytes):
                send_now(hostile.link._socket, [message])
            else:
                hostile.link.send(message)
            if number % 50 == 0:
                honest.beat(epoch)
                assert (await honest.expect(wire.HeartbeatSeen)).epoch == epoch

        hostile.beat(last := 2**62)
        while (await hostile.expect(wire.LeaseRevoked)).epoch != last:
            pass  # what it sent is read in order: after this answer nothing of it is left

        await serves(pod, await pod.node("spark0"))
        assert pod.state("spark1") == "serving"
