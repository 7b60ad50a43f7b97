"""Control messages: round trips, bounds, and hostile bytes."""

from __future__ import annotations

import random

import msgspec
import pytest

from shared.core import wire
from shared.core.errors import LocalProtocolError, RemoteProtocolError
from shared.core.ring_layout import RingShape
from shared.core.shape import ExpertShape

SIGNED = {"sender": "spark0", "incarnation": 5}
DESCRIPTOR = wire.RegionDescriptor(
    provider="shm", locator="/proc/1/fd/3", wake_locator="/proc/1/fd/4", length=8192, key=987654321
)
BANK = wire.BankFacts(
    name="spark0", model_digest="m", placement_digest="p", shape=ExpertShape(32, 16), rows=9
)
TO_STATION: list[wire.ToStation] = [
    wire.Loading(phase="staging", done_bytes=3, total_bytes=2**40, **SIGNED),
    wire.Hello(
        protocol=1, tier="spark", pid=77, bank=BANK, kernel_id=131073, kernel_name="int16", **SIGNED
    ),
    wire.LeaseAccepted(epoch=3, request_ring=DESCRIPTOR, canary_row=bytes(64), **SIGNED),
    wire.Heartbeat(
        epoch=3,
        busy=True,
        counters=wire.NodeCounters(dispatches=1, rows=2, refused_rows=3, corrupt_dispatches=4),
        **SIGNED,
    ),
    wire.Goodbye(epoch=3, reason="the node stops", **SIGNED),
]
TO_NODE: list[wire.ToNode] = [
    wire.LeaseOffer(
        epoch=3,
        ring=RingShape(slots=4, max_tokens=8, max_rows=64, latent=32),
        reply_ring=DESCRIPTOR,
        canary_bank_row=2,
        canary_seed=11,
        heartbeat_us=250_000,
        ttl_us=2_000_000,
        **SIGNED,
    ),
    wire.LeaseGranted(epoch=3, **SIGNED),
    wire.HeartbeatSeen(epoch=3, **SIGNED),
    wire.LeaseRevoked(epoch=3, reason="gone", **SIGNED),
    wire.HelloRefused(code="digest_mismatch", text="build again", permanent=True, **SIGNED),
]
FRAMES = [
    *((wire.encode(message), wire.decode_to_station) for message in TO_STATION),
    *((wire.encode(message), wire.decode_to_node) for message in TO_NODE),
]


@pytest.mark.parametrize("message", TO_STATION, ids=lambda message: type(message).__name__)
def test_messages_to_the_station_round_trip(message: wire.ToStation) -> None:
    """What a node says is what the Station reads, and a node refuses to read it."""
    assert wire.decode_to_station(wire.encode(message)) == message
    with pytest.raises(RemoteProtocolError):
        wire.decode_to_node(wire.encode(message))


@pytest.mark.parametrize("message", TO_NODE, ids=lambda message: type(message).__name__)
def test_messages_to_a_node_round_trip(message: wire.ToNode) -> None:
    """The other direction."""
    assert wire.decode_to_node(wire.encode(message)) == message
    with pytest.raises(RemoteProtocolError):
        wire.decode_to_station(wire.encode(message))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sender", "../etc"),
        ("sender", "a\n"),
        ("incarnation", -1),
        ("epoch", -1),
        ("epoch", 2**63),
        ("epoch", 1.5),
        ("surprise", 1),
        ("ring", {"slots": 0, "max_tokens": 1, "max_rows": 1, "latent": 16}),
        ("ring", {"slots": 65, "max_tokens": 1, "max_rows": 1, "latent": 16}),
        ("ring", {"slots": 1, "max_tokens": 1, "max_rows": 2**16, "latent": 16}),
        ("ring", {"slots": 1, "max_tokens": 1, "max_rows": 1, "latent": 16, "more": 1}),
        ("canary_seed", 2**32),
    ],
)
def test_bounds_are_part_of_the_types(field: str, value: object) -> None:
    """A value outside its bounds never becomes a message."""
    fields = msgspec.to_builtins(TO_NODE[0]) | {field: value}

    with pytest.raises(RemoteProtocolError):
        wire.decode_to_node(msgspec.msgpack.encode(fields))


def test_a_load_is_never_more_than_all() -> None:
    """A node that claims so would be shown at 900 %."""
    fields = msgspec.to_builtins(TO_STATION[0])
    for done, total in ((1, 0), (10, 9), (2**63 - 1, 1)):
        frame = msgspec.msgpack.encode(fields | {"done_bytes": done, "total_bytes": total})
        with pytest.raises(RemoteProtocolError):
            wire.decode_to_station(frame)


def test_oversized_frames_are_refused_on_both_sides() -> None:
    """Nothing larger than FRAME_BYTES_MAX is sent or parsed."""
    huge = wire.LeaseAccepted(
        epoch=1, request_ring=DESCRIPTOR, canary_row=bytes(wire.FRAME_BYTES_MAX), **SIGNED
    )

    with pytest.raises(LocalProtocolError, match="exceeds"):
        wire.encode(huge)
    with pytest.raises(RemoteProtocolError, match="exceeds"):
        wire.decode_to_station(bytes(wire.FRAME_BYTES_MAX + 1))


def test_no_key_in_any_repr() -> None:
    """A key is a capability: no repr, so no log or exception, carries it."""
    assert str(DESCRIPTOR.key) in str(msgspec.to_builtins(DESCRIPTOR))
    for message in (DESCRIPTOR, *TO_STATION, *TO_NODE):
        assert str(DESCRIPTOR.key) not in repr(message)
        assert str(DESCRIPTOR.key) not in f"{message}"


def survives(frame: bytes) -> None:
    """Decoding gives a message that encodes and decodes to itself, or RemoteProtocolError."""
    for decode in (wire.decode_to_station, wire.decode_to_node):
        try:
            message = decode(frame)
        except RemoteProtocolError:
            continue
        assert decode(wire.encode(message)) == message


def test_50000_random_frames_do_no_harm() -> None:
    """Random bytes are refused with RemoteProtocolError and nothing else."""
    rng = random.Random(20261)
    for _ in range(50_000):
        survives(rng.randbytes(rng.randrange(0, 48)))


def test_50000_damaged_frames_do_no_harm() -> None:
    """One to three flipped bits, or a cut, in a valid frame: a message or RemoteProtocolError."""
    rng = random.Random(20262)
    for _ in range(50_000):
        frame, _ = rng.choice(FRAMES)
        damaged = bytearray(frame)
        for _ in range(rng.randrange(1, 4)):
            bit = rng.randrange(8 * len(damaged))
            damaged[bit // 8] ^= 1 << bit % 8
        survives(
            bytes(damaged[: rng.randrange(1, len(damaged) + 1)] if rng.random() < 0.2 else damaged)
        )
