"""Admission: which public keys may talk to a Station (ZAP, ZeroMQ RFC 27).

Owns the answer to each of libzmq's authentication questions and the count of refusals. Must not
know what an admitted peer says later. CURVE alone proves only the Station to a node; a stranger
with a fresh key pair is kept out here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import zmq.asyncio
import zmq.utils.z85
from structlog.typing import FilteringBoundLogger

from shared.core.errors import LocalProtocolError

ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
_VERSION: Final = b"1.0"
_REFUSED_KEYS_MAX: Final = 256  # keys remembered so that each is logged once; the rest are counted


@dataclass(frozen=True, slots=True)
class ZapRequest:
    """One question of libzmq: may the holder of `public_key` (Z85) at `address` come in?"""

    request_id: bytes
    address: str
    public_key: str


@dataclass(frozen=True, slots=True)
class ZapReply:
    """The answer; `user_id` (the node's name) then travels with every frame of that connection."""

    status: str
    text: str
    user_id: str


def parse(frames: Sequence[bytes]) -> ZapRequest:
    """Read the frames of a CURVE request: version, id, domain, address, identity, mechanism, key.

    They come from libzmq inside this process, so anything else is a bug here: LocalProtocolError.
    """
    if len(frames) != 7 or frames[0] != _VERSION or frames[5] != b"CURVE" or len(frames[6]) != 32:
        shown = [frame[:16] for frame in frames[:6]]
        raise LocalProtocolError(f"ZAP request is not a CURVE request of version 1.0: {shown}")
    public_key = zmq.utils.z85.encode(frames[6]).decode("ascii")
    return ZapRequest(frames[1], frames[3].decode("ascii", "replace"), public_key)


def decide(request: ZapRequest, allow_list: Mapping[str, str]) -> ZapReply:
    """Admit a listed key under its node name, refuse every other one for good (status 400)."""
    node = allow_list.get(request.public_key)
    if node is None:
        return ZapReply("400", "key is not on the allow-list", "")
    return ZapReply("200", "OK", node)


def frames_of(request_id: bytes, reply: ZapReply) -> list[bytes]:
    """Frames of a reply: version, id, status, text, user id, metadata (none)."""
    texts = (reply.status, reply.text, reply.user_id)
    return [_VERSION, request_id, *(text.encode("utf-8") for text in texts), b""]


class Doorkeeper:
    """Answers requests from the allow-list, counts refusals and logs each refused key once."""

    def __init__(self, allow_list: Mapping[str, str], log: FilteringBoundLogger) -> None:
        """`allow_list`: public key (Z85) -> node name, as `keys.load_allow_list` reads it."""
        self.refusals = 0
        self._allow_list = allow_list
        self._log = log
        self._refused: set[str] = set()

    def answer(self, frames: Sequence[bytes]) -> list[bytes]:
        """Reply frames for one request."""
        request = parse(frames)
        reply = decide(request, self._allow_list)
        if not reply.user_id:
            self._note_refusal(request)
        return frames_of(request.request_id, reply)

    def _note_refusal(self, request: ZapRequest) -> None:
        self.refusals += 1
        known = request.public_key in self._refused
        if known or len(self._refused) >= _REFUSED_KEYS_MAX:
            return
        self._refused.add(request.public_key)
        self._log.warning(
            "key_refused",
            public_key=request.public_key,
            address=request.address,
            remedy="put the node's .key file into the Station's allow-list folder and restart it",
        )


async def serve(socket: zmq.asyncio.Socket, doorkeeper: Doorkeeper) -> None:
    """Answer on a bound REP socket until cancelled.

    Any error leaves this coroutine: run it in the daemon's task group, so that a Station that can
    no longer tell friend from stranger stops.
    """
    while True:
        await socket.send_multipart(doorkeeper.answer(await socket.recv_multipart()))
