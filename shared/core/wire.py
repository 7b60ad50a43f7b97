"""Control-plane messages: one tagged union per direction; nothing else crosses a socket.

Never on the per-layer path. Bounds are part of the types, so a decoded message is a checked
message; any bad frame raises RemoteProtocolError and nothing else.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec

from shared.core.errors import LocalProtocolError, RemoteProtocolError
from shared.core.loading import Phase
from shared.core.names import NodeName
from shared.core.placement import Tier
from shared.core.ring_layout import RingShape
from shared.core.shape import ExpertShape

T = TypeVar("T")

FRAME_BYTES_MAX: Final = 64 * 1024
PROTOCOL_VERSION: Final = 1

U32: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
U63: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # msgspec bounds stop at int64
Digest: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=512)]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every control message: who speaks, and in which incarnation of its process."""

    sender: NodeName
    incarnation: U63


class RegionDescriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a peer needs in order to write into a region. `key` is a capability: never log it."""

    provider: Annotated[str, msgspec.Meta(max_length=16)]
    locator: Annotated[str, msgspec.Meta(max_length=128)]
    wake_locator: Annotated[str, msgspec.Meta(max_length=128)]
    length: U63
    key: U63

    def __repr__(self) -> str:
        """Without the key, so that no log or exception can carry it."""
        return f"RegionDescriptor({self.provider} {self.locator} {self.length} bytes)"


class BankFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which bank a node holds; the Station compares it with its own model and placement."""

    name: NodeName
    model_digest: Digest
    placement_digest: Digest
    shape: ExpertShape
    rows: U32


class NodeCounters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Progress of a node since it started; only ever grows."""

    dispatches: U63
    rows: U63
    refused_rows: U63
    corrupt_dispatches: U63


class Loading(Message, frozen=True, tag="loading"):
    """A node brings its bank into memory, or to its disk first, and will ask for a lease later."""

    phase: Phase
    done_bytes: U63
    total_bytes: U63

    def __post_init__(self) -> None:
        """A part is not larger than the whole."""
        if self.done_bytes > self.total_bytes:
            raise ValueError(f"{self.done_bytes} of {self.total_bytes} bytes are loaded")


class Hello(Message, frozen=True, tag="hello"):
    """A node asks for a lease."""

    protocol: U32
    tier: Tier
    pid: U32
    bank: BankFacts
    kernel_id: U32
    kernel_name: Text


class LeaseAccepted(Message, frozen=True, tag="lease_accepted"):
    """The node registered its request ring and computed the canary."""

    epoch: U63
    request_ring: RegionDescriptor
    canary_row: bytes


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Progress under a lease."""

    epoch: U63
    busy: bool
    counters: NodeCounters


class Goodbye(Message, frozen=True, tag="goodbye"):
    """The node stops on purpose; its lease ends now."""

    epoch: U63
    reason: Text


class LeaseOffer(Message, frozen=True, tag="lease_offer"):
    """The Station's side of a lease: reply ring, geometry, and a canary to prove the kernel."""

    epoch: U63
    ring: RingShape
    reply_ring: RegionDescriptor
    canary_bank_row: U32
    canary_seed: U32
    heartbeat_us: U63
    ttl_us: U63


class LeaseGranted(Message, frozen=True, tag="lease_granted"):
    """The canary was right: the node serves under this epoch."""

    epoch: U63


class HeartbeatSeen(Message, frozen=True, tag="heartbeat_seen"):
    """The Station is alive and the lease is still good."""

    epoch: U63


class LeaseRevoked(Message, frozen=True, tag="lease_revoked"):
    """The lease is over; the node starts again with a Hello."""

    epoch: U63
    reason: Text


class HelloRefused(Message, frozen=True, tag="hello_refused"):
    """No lease. After a permanent refusal the node exits with the configuration status."""

    code: Text
    text: Text
    permanent: bool


ToStation: TypeAlias = Loading | Hello | LeaseAccepted | Heartbeat | Goodbye
ToNode: TypeAlias = LeaseOffer | LeaseGranted | HeartbeatSeen | LeaseRevoked | HelloRefused

_encoder: Final = msgspec.msgpack.Encoder()
_to_station: Final = msgspec.msgpack.Decoder(ToStation)
_to_node: Final = msgspec.msgpack.Decoder(ToNode)


def encode(message: Message) -> bytes:
    """One frame; LocalProtocolError when it would exceed FRAME_BYTES_MAX."""
    return encode_frame(message, FRAME_BYTES_MAX)


def decode_to_station(frame: bytes) -> ToStation:
    """A node's message; RemoteProtocolError for anything else."""
    return decode_frame(frame, _to_station, FRAME_BYTES_MAX)


def decode_to_node(frame: bytes) -> ToNode:
    """The Station's message; RemoteProtocolError for anything else."""
    return decode_frame(frame, _to_node, FRAME_BYTES_MAX)


def encode_frame(message: msgspec.Struct, bytes_max: int) -> bytes:
    """One frame; LocalProtocolError when it would exceed `bytes_max`."""
    frame = _encoder.encode(message)
    if len(frame) > bytes_max:
        raise LocalProtocolError(
            f"{type(message).__name__} of {len(frame)} bytes exceeds {bytes_max}"
        )
    return frame


def decode_frame(frame: bytes, decoder: msgspec.msgpack.Decoder[T], bytes_max: int) -> T:
    """The message in a frame; RemoteProtocolError for one that is too large or not of its union."""
    if len(frame) > bytes_max:
        raise RemoteProtocolError(f"frame of {len(frame)} bytes exceeds {bytes_max}")
    try:
        return decoder.decode(frame)
    except msgspec.DecodeError as error:  # ValidationError is a subclass
        raise RemoteProtocolError(f"undecodable control frame: {error}") from error
