"""What every provider of the fabric must do; a new provider joins by one line in fabric_peer.py."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shared.core.errors import LocalProtocolError
from shared.core.ring_layout import HEADER_BYTES, Header, RingShape, Verdict, bell_offset
from shared.core.wire import RegionDescriptor
from shared.io import ring
from shared.io.fabric import (
    INTERRUPTED,
    TIMED_OUT,
    AccessRefused,
    Fabric,
    Region,
    RemoteRegion,
    Watch,
)
from tests.contract.fabric_peer import EPOCH, PROVIDERS, frame

SHAPE = RingShape(slots=4, max_tokens=2, max_rows=8, latent=32)
SLOT_BYTES = SHAPE.request_slot_bytes
ROOT = Path(__file__).resolve().parents[2]
LONG_US = 10_000_000


@pytest.fixture(params=sorted(PROVIDERS))
def provider(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def fabric(provider: str) -> Iterator[Fabric]:
    made = PROVIDERS[provider]()
    yield made
    made.close()


@pytest.fixture
def region(fabric: Fabric) -> Region:
    return fabric.register(SHAPE.request_ring_bytes)


@pytest.fixture
def remote(fabric: Fabric, region: Region) -> RemoteRegion:
    return fabric.connect(region.descriptor)


@contextlib.contextmanager
def peer(provider: str, mode: str, **order: Any) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.contract.fabric_peer", provider, mode],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(msgspec.to_builtins(order)))
    process.stdin.close()
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def send(remote: RemoteRegion, slot: int, generation: int, *, epoch: int = EPOCH) -> Any:
    header, payload = frame(100, generation, epoch=epoch)
    ring.send(remote, SHAPE, slot, SLOT_BYTES, header, payload)
    return payload


def receive(region: Region, slot: int, generation: int, *, epoch: int = EPOCH) -> Any:
    return ring.receive(region, SHAPE, slot, SLOT_BYTES, epoch=epoch, generation=generation)


# Memory and capabilities


def test_registered_memory_is_zeroed_and_described(fabric: Fabric, region: Region) -> None:
    """A region is as long as asked, empty, and says by which provider it is reached."""
    assert len(region.memory) == SHAPE.request_ring_bytes == region.descriptor.length
    assert not region.memory.any()
    assert region.descriptor.provider == fabric.name


def test_a_write_lands_where_it_was_aimed(region: Region, remote: RemoteRegion) -> None:
    """Arrays and bytes; nothing around them changes."""
    remote.write(4096, np.arange(10, dtype=np.uint8))
    remote.write(4200, b"abc")

    assert region.memory[4096:4106].tolist() == list(range(10))
    assert region.memory[4200:4203].tobytes() == b"abc"
    assert int(region.memory.astype(int).sum()) == sum(range(10)) + sum(b"abc")


def test_two_regions_are_two_memories(fabric: Fabric) -> None:
    """One small region per peer: a capability reaches its own region only."""
    first, second = fabric.register(4096), fabric.register(4096)
    fabric.connect(first.descriptor).write(0, b"\1")

    assert first.memory[0] == 1
    assert not second.memory.any()


@pytest.mark.parametrize(
    "change",
    [
        {"key": 1},
        {"key": 0},
        {"length": 4096},
        {"length": 2**62},
        {"provider": "carrier-pigeon"},
        {"locator": "/etc/passwd"},
        {"locator": "/proc/1/fd/../../../etc/passwd"},
        {"locator": ""},
    ],
    ids=str,
)
def test_a_descriptor_that_does_not_fit_is_refused(
    fabric: Fabric, region: Region, change: dict[str, Any]
) -> None:
    """Wrong key, length, provider or place: AccessRefused, and no key in the message."""
    wrong = msgspec.structs.replace(region.descriptor, **change)

    with pytest.raises(AccessRefused) as caught:
        fabric.connect(wrong)
    assert str(region.descriptor.key) not in str(caught.value)


def test_no_key_in_any_repr(region: Region, remote: RemoteRegion, fabric: Fabric) -> None:
    """A key is a capability; nothing that may be logged carries it."""
    key = str(region.descriptor.key)
    for thing in (region, remote, fabric, region.descriptor, Watch(region, 0, 1)):
        assert key not in repr(thing)
        assert key not in str(thing)


@pytest.mark.parametrize(
    ("offset", "size"),
    [(-1, 1), (SHAPE.request_ring_bytes, 1), (SHAPE.request_ring_bytes - 3, 4), (2**62, 8)],
)
def test_writes_outside_the_region_are_refused(
    region: Region, remote: RemoteRegion, offset: int, size: int
) -> None:
    """Neither bytes nor bells land outside; nothing is written in part."""
    with pytest.raises(AccessRefused):
        remote.write(offset, bytes([255]) * size)
    if offset % 8 == 0:
        with pytest.raises(AccessRefused):
            remote.ring(offset, 1)
    assert not region.memory.any()


def test_bells_are_aligned(remote: RemoteRegion) -> None:
    """An unaligned 8-byte store would not be atomic."""
    with pytest.raises(LocalProtocolError, match="aligned"):
        remote.ring(4, 1)


def test_a_closed_region_is_refused_and_unreadable(fabric: Fabric, region: Region) -> None:
    """Fencing deregisters: the descriptor is worthless afterwards; closing twice is fine."""
    region.close()
    region.close()

    with pytest.raises(AccessRefused):
        fabric.connect(region.descriptor)
    with pytest.raises(LocalProtocolError, match="closed"):
        _ = region.memory


def test_a_late_write_is_never_seen_by_the_next_region(
    fabric: Fabric, region: Region, remote: RemoteRegion
) -> None:
    """Case L2: what an old peer still writes after the fence reaches nothing that is read again."""
    region.close()
    following = [fabric.register(SHAPE.request_ring_bytes) for _ in range(8)]
    with contextlib.suppress(AccessRefused):
        send(remote, 0, 1)

    assert not any(each.memory.any() for each in following)


def test_a_closed_capability_writes_nothing(region: Region, remote: RemoteRegion) -> None:
    """The writer's side of giving back."""
    remote.close()
    remote.close()

    with pytest.raises(AccessRefused):
        remote.write(0, b"\1")
    with pytest.raises(AccessRefused):
        remote.ring(0, 1)
    assert not region.memory.any()


def test_closing_the_fabric_closes_its_regions(provider: str) -> None:
    """Also twice."""
    made = PROVIDERS[provider]()
    held = made.register(4096)
    made.close()
    made.close()

    with pytest.raises(LocalProtocolError):
        _ = held.memory


# Waiting


def test_a_wait_without_news_times_out(fabric: Fabric, region: Region) -> None:
    """Bounded below and above; zero only looks."""
    began = time.monotonic()
    result = fabric.wait_changed(region, np.zeros(4, np.uint64), 30_000)
    took = time.monotonic() - began

    assert result == TIMED_OUT
    assert 0.03 <= took < 5
    assert fabric.wait_changed(region, np.zeros(4, np.uint64), 0) == TIMED_OUT
    assert fabric.wait_complete([[Watch(region, 0, 1)]], timeout_us=0) == TIMED_OUT


def test_wait_changed_names_the_first_slot_that_moved(
    fabric: Fabric, region: Region, remote: RemoteRegion
) -> None:
    """Any difference from what was seen counts, also a smaller value."""
    seen = np.zeros(4, np.uint64)
    send(remote, 2, 5)
    send(remote, 3, 5)

    assert fabric.wait_changed(region, seen, LONG_US) == 2
    seen[2] = 5
    assert fabric.wait_changed(region, seen, LONG_US) == 3
    seen[3] = 6
    assert fabric.wait_changed(region, seen, LONG_US) == 3
    seen[3] = 5
    assert fabric.wait_changed(region, seen, 0) == TIMED_OUT


def test_a_group_is_complete_when_all_its_bells_show(fabric: Fabric) -> None:
    """Groups over several regions; the first complete one wins; an empty one is complete."""
    regions = [fabric.register(SHAPE.request_ring_bytes) for _ in range(3)]
    remotes = [fabric.connect(each.descriptor) for each in regions]
    lane_a = [Watch(regions[0], 0, 1), Watch(regions[1], 0, 1)]
    lane_b = [Watch(regions[1], 1, 9), Watch(regions[2], 3, 9)]

    send(remotes[1], 0, 1)
    send(remotes[2], 3, 9)
    assert fabric.wait_complete([lane_a, lane_b], timeout_us=0) == TIMED_OUT
    send(remotes[1], 1, 9)
    assert fabric.wait_complete([lane_a, lane_b], timeout_us=LONG_US) == 1
    send(remotes[0], 0, 2)
    assert fabric.wait_complete([lane_a], timeout_us=0) == TIMED_OUT
    send(remotes[0], 0, 1)
    assert fabric.wait_complete([lane_a, lane_b], timeout_us=LONG_US) == 0
    assert fabric.wait_complete([[Watch(regions[0], 0, 7)], []], timeout_us=LONG_US) == 1


def test_the_largest_ring_can_be_watched(fabric: Fabric) -> None:
    """64 slots: the bound of RingShape is what one wait can watch."""
    shape = RingShape(slots=64, max_tokens=1, max_rows=1, latent=16)
    region = fabric.register(shape.request_ring_bytes)
    fabric.connect(region.descriptor).ring(bell_offset(63), 1)

    assert fabric.wait_changed(region, np.zeros(64, np.uint64), LONG_US) == 63


def test_a_sleeper_is_woken_by_a_bell_and_holds_no_lock(
    fabric: Fabric, region: Region, remote: RemoteRegion
) -> None:
    """While one thread waits the others run, and the bell ends the wait long before its timeout."""
    results: list[int] = []
    waiter = threading.Thread(
        target=lambda: results.append(fabric.wait_changed(region, np.zeros(4, np.uint64), LONG_US))
    )
    began = time.monotonic()
    waiter.start()
    turns = sum(1 for _ in range(100_000))  # would stand still if the waiter held the interpreter
    assert not results
    remote.ring(bell_offset(1), 1)
    waiter.join(5)

    assert turns == 100_000
    assert results == [1]
    assert time.monotonic() - began < 5


def test_an_interrupt_ends_the_wait_in_progress(fabric: Fabric, region: Region) -> None:
    """From another thread, and only one wait per interrupt."""
    results: list[int] = []
    waiter = threading.Thread(
        target=lambda: results.append(fabric.wait_changed(region, np.zeros(4, np.uint64), LONG_US))
    )
    waiter.start()
    fabric.interrupt()
    waiter.join(5)

    assert results == [INTERRUPTED]
    assert fabric.wait_changed(region, np.zeros(4, np.uint64), 1_000) == TIMED_OUT


def test_an_interrupt_is_not_lost_to_a_bell(
    fabric: Fabric, region: Region, remote: RemoteRegion
) -> None:
    """A wait that returns a bell leaves an interrupt for the next wait."""
    fabric.interrupt()
    fabric.interrupt()
    send(remote, 0, 1)

    assert fabric.wait_complete([[Watch(region, 0, 1)]], timeout_us=LONG_US) == 0
    assert fabric.wait_changed(region, np.ones(1, np.uint64), LONG_US) == INTERRUPTED
    assert fabric.wait_changed(region, np.ones(1, np.uint64), 0) == TIMED_OUT


# Frames: copy once, verify the copy, use the copy


def test_a_frame_comes_over_whole(region: Region, remote: RemoteRegion) -> None:
    """Header and payload as sent; the checksum is the sender's."""
    payload = send(remote, 1, 7)

    got = receive(region, 1, 7)

    assert isinstance(got, ring.Frame)
    assert got.payload == payload.tobytes()
    assert (got.header.generation, got.header.ticket) == (7, 7)
    assert int(ring.bells(region, SHAPE)[1]) == 7


def test_every_flipped_bit_is_refused(region: Region, remote: RemoteRegion) -> None:
    """Exhaustive over header and payload of a frame (case N16)."""
    header, payload = frame(24, 1)
    ring.send(remote, SHAPE, 0, SLOT_BYTES, header, payload)
    start = SHAPE.slot_offset(0, SLOT_BYTES)
    refused = 0
    for byte in range(start, start + HEADER_BYTES + 24):
        for bit in range(8):
            region.memory[byte] ^= 1 << bit
            refused += receive(region, 0, 1) is Verdict.CORRUPT
            region.memory[byte] ^= 1 << bit

    assert refused == 8 * (HEADER_BYTES + 24)
    assert isinstance(receive(region, 0, 1), ring.Frame)


def test_a_bell_before_its_body_is_refused_then_accepted(
    region: Region, remote: RemoteRegion
) -> None:
    """Case N16: the bell is a wake-up, never a proof. Whatever part of the body is missing, nothing
    is consumed; the whole frame is."""
    header, payload = frame(100, 4)
    sealed = header._replace(checksum=ring.checksum(header, payload))
    body = payload.tobytes()
    at = SHAPE.slot_offset(0, SLOT_BYTES)
    remote.ring(bell_offset(0), 4)
    assert receive(region, 0, 4) is Verdict.CORRUPT
    remote.write(at, sealed.pack())
    assert receive(region, 0, 4) is Verdict.CORRUPT
    for end in range(25, 100, 25):
        remote.write(at + HEADER_BYTES, body[:end])
        assert receive(region, 0, 4) is Verdict.CORRUPT
    remote.write(at + HEADER_BYTES, body)

    assert isinstance(receive(region, 0, 4), ring.Frame)


def test_a_new_frame_over_an_old_one_is_torn_until_it_is_whole(
    region: Region, remote: RemoteRegion
) -> None:
    """The slot is reused: half old and half new is neither."""
    send(remote, 0, 1)
    header, payload = frame(100, 2)
    at = SHAPE.slot_offset(0, SLOT_BYTES)
    remote.write(at + HEADER_BYTES, payload[:50])

    assert receive(region, 0, 1) is Verdict.CORRUPT
    ring.send(remote, SHAPE, 0, SLOT_BYTES, header, payload)
    assert isinstance(receive(region, 0, 2), ring.Frame)


def test_old_frames_are_stale_not_new(region: Region, remote: RemoteRegion) -> None:
    """Case L2: an older generation, or another epoch, is whole but not what was asked for."""
    send(remote, 0, 1)
    send(remote, 1, 1, epoch=EPOCH - 1)

    assert receive(region, 0, 2) is Verdict.STALE_GENERATION
    assert receive(region, 1, 1) is Verdict.STALE_EPOCH
    assert receive(region, 1, 1, epoch=EPOCH + 1) is Verdict.STALE_EPOCH


def test_duplicates_and_reordered_slots_are_the_same_frames(
    region: Region, remote: RemoteRegion
) -> None:
    """A frame written twice is one frame; slots may fill in any order."""
    for slot in (3, 0, 2, 1):
        send(remote, slot, 10 + slot)
    send(remote, 2, 12)

    for slot in range(4):
        got = receive(region, slot, 10 + slot)
        assert isinstance(got, ring.Frame)
        assert got.header.generation == 10 + slot


def test_the_copy_that_was_verified_does_not_change(region: Region, remote: RemoteRegion) -> None:
    """A late writer may overwrite the slot at any moment; the verified copy is private."""
    payload = send(remote, 0, 1)
    got = receive(region, 0, 1)
    send(remote, 0, 2)
    remote.write(SHAPE.slot_offset(0, SLOT_BYTES), b"\xff" * SLOT_BYTES)

    assert isinstance(got, ring.Frame)
    assert got.payload == payload.tobytes()
    assert got.header.checksum == ring.checksum(got.header, got.payload)


def test_a_length_beyond_the_slot_reads_nothing_outside(
    region: Region, remote: RemoteRegion
) -> None:
    """A hostile payload length is refused before it is used."""
    for length in (SLOT_BYTES - HEADER_BYTES + 1, 2**32 - 1):
        remote.write(
            SHAPE.slot_offset(3, SLOT_BYTES), Header(1, EPOCH, 1, 1, 1, 1, length, 0, 0, 0).pack()
        )
        assert receive(region, 3, 1) is Verdict.CORRUPT


def test_a_frame_too_big_for_its_slot_is_not_sent(region: Region, remote: RemoteRegion) -> None:
    """The sender refuses what would run into the next slot, or what its header does not say."""
    header, payload = frame(SLOT_BYTES - HEADER_BYTES + 1, 1)
    with pytest.raises(LocalProtocolError, match="does not fit"):
        ring.send(remote, SHAPE, 0, SLOT_BYTES, header, payload)
    header, payload = frame(100, 1)
    with pytest.raises(LocalProtocolError, match="does not fit"):
        ring.send(remote, SHAPE, 0, SLOT_BYTES, header, payload[:-1])
    assert not region.memory.any()


# Two processes


def test_a_bell_never_overtakes_earlier_writes(provider: str, fabric: Fabric) -> None:
    """Ping-pong with a real process: whatever bell is seen, the bytes before it are there."""
    rounds = 1_000
    region = fabric.register(4096)
    with peer(provider, "echo", descriptor=region.descriptor, rounds=rounds) as process:
        assert process.stdout is not None
        remote = fabric.connect(
            msgspec.json.decode(process.stdout.readline(), type=RegionDescriptor)
        )
        for turn in range(1, rounds + 1):
            body = np.full(64, turn % 256, np.uint8)
            remote.write(64, body)
            remote.ring(bell_offset(0), turn)
            assert fabric.wait_complete([[Watch(region, 0, turn)]], timeout_us=LONG_US) == 0
            assert np.array_equal(region.memory[64:128], body)
        assert process.wait(10) == 0


def test_a_killed_writer_leaves_nothing_half_accepted(provider: str, fabric: Fabric) -> None:
    """SIGKILL with writes outstanding: every slot is one whole frame or refused, the survivor keeps
    reading, fences, and serves the next peer."""
    region = fabric.register(SHAPE.request_ring_bytes)
    with peer(provider, "flood", descriptor=region.descriptor, shape=SHAPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "flooding\n"
        for _ in range(200):
            check_slots(region)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        check_slots(region)
    region.close()
    following = fabric.register(SHAPE.request_ring_bytes)
    send(fabric.connect(following.descriptor), 0, 1)
    assert isinstance(receive(following, 0, 1), ring.Frame)


def check_slots(region: Region) -> None:
    for slot, bell in enumerate(ring.bells(region, SHAPE).tolist()):
        got = receive(region, slot, bell)
        if isinstance(got, ring.Frame):
            assert set(got.payload) == {bell % 251}


# The shm provider alone


@pytest.mark.parametrize("provider", ["shm"])
def test_a_peer_cannot_shrink_the_memory(region: Region) -> None:
    """A shrunk file would turn the owner's next read into SIGBUS; the seals forbid it."""
    fd = os.open(region.descriptor.locator, os.O_RDWR)
    try:
        for size in (0, 4096, 2**20):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)
    assert not region.memory.any()


@pytest.mark.parametrize("provider", ["shm"])
def test_a_connect_that_races_with_the_close_is_refused(fabric: Fabric) -> None:
    """A peer that opened the memory just before the close finds no key there any more."""
    region = fabric.register(4096)
    held = os.open(region.descriptor.locator, os.O_RDWR)
    late = msgspec.structs.replace(region.descriptor, locator=f"/proc/{os.getpid()}/fd/{held}")
    try:
        fabric.connect(late).close()
        region.close()
        with pytest.raises(AccessRefused, match="the key does not fit"):
            fabric.connect(late)
    finally:
        os.close(held)


@pytest.mark.parametrize("provider", ["shm"])
def test_a_descriptor_number_that_was_used_again_is_refused(fabric: Fabric, tmp_path: Path) -> None:
    """After a close the owner may open anything under the old number: it is not a region."""
    region = fabric.register(4096)
    number = int(region.descriptor.locator.rsplit("/", 1)[1])
    region.close()
    (tmp_path / "file").write_bytes(bytes(8192))
    other = os.open(tmp_path / "file", os.O_RDWR)
    try:
        if other != number:
            os.dup2(other, number)
        with pytest.raises(AccessRefused, match="no sealed region"):
            fabric.connect(region.descriptor)
    finally:
        os.close(other)
        if other != number:
            os.close(number)
