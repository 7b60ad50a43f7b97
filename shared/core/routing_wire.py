"""The routing stream: what a Station tells a recorder about the experts its tokens chose.

Owns the messages and their framing (length, then msgpack). Pure; must not know who listens, or what
a trace file looks like. Numbers only: no text of a request ever travels here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from shared.core.errors import RemoteProtocolError
from shared.core.shape import ModelShape

VERSION: Final = 1
CONTENT_TYPE: Final = "application/x-k3-routing"
FRAME_BYTES_MAX: Final = 16 * 1024 * 1024
PASS_TOKENS_MAX: Final = 64  # longer passes travel in pieces; bounds a frame
_LENGTH_BYTES: Final = 4

U63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Opened(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="opened"):
    """First message: whose routing this is."""

    version: Literal[1]
    model_digest: Annotated[str, Meta(min_length=1, max_length=128)]
    shape: ModelShape


class Pass(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="pass"):
    """Tokens that have been through all layers, one after the other in one request.

    `request` is the Station's name of the request, `position` that of the first token in it, `ids`
    little-endian uint16 [tokens, moe layers, top_k].
    """

    request: Annotated[str, Meta(min_length=1, max_length=128)]
    position: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    tokens: Annotated[int, Meta(ge=1, le=PASS_TOKENS_MAX)]
    ids: bytes


class Totals(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="totals"):
    """Tokens so far that this listener was sent, that it was too slow for, and that ended on their
    way through the layers. Comes at least every second, so silence means a dead Station.
    """

    sent: U63
    dropped: U63
    incomplete: U63


Message: TypeAlias = Opened | Pass | Totals

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Message)


def frame(message: Message) -> bytes:
    """One message as it travels."""
    body = _ENCODER.encode(message)
    assert len(body) <= FRAME_BYTES_MAX, f"a frame of {len(body)} bytes"
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


class FrameReader:
    """Messages out of pieces of a stream, wherever it was cut. Mutable: keeps the rest."""

    def __init__(self) -> None:
        """Nothing read yet."""
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that `data` completes; RemoteProtocolError when it is no routing stream."""
        self._rest += data
        while len(self._rest) >= _LENGTH_BYTES:
            length = int.from_bytes(self._rest[:_LENGTH_BYTES], "little")
            if length > FRAME_BYTES_MAX:
                raise RemoteProtocolError(
                    f"a routing frame of {length} bytes: this is no routing stream; "
                    "is the address that of a pod?"
                )
            end = _LENGTH_BYTES + length
            if len(self._rest) < end:
                return
            body = bytes(self._rest[_LENGTH_BYTES:end])
            del self._rest[:end]
            try:
                yield _DECODER.decode(body)
            except msgspec.DecodeError as error:
                raise RemoteProtocolError(
                    f"a routing frame is not understood ({error}): use the k3 of the pod's version"
                ) from error


def pass_ids(message: Pass, shape: ModelShape) -> npt.NDArray[np.uint16]:
    """The ids of a pass, uint16 [tokens, moe layers, top_k]; RemoteProtocolError unless they fit
    `shape`.
    """
    size = (message.tokens, len(shape.moe_layers), shape.top_k)
    ids = np.frombuffer(message.ids, "<u2") if len(message.ids) % 2 == 0 else np.empty(0, "<u2")
    if ids.size != size[0] * size[1] * size[2] or int(ids.max(initial=0)) >= shape.experts:
        raise RemoteProtocolError(
            f"a routing pass of {message.tokens} tokens has {len(message.ids)} bytes of ids, which "
            f"are no choice of {shape.top_k} of {shape.experts} experts in {size[1]} layers"
        )
    return ids.reshape(size).astype(np.uint16, copy=False)
