"""Messages between a node and the Station's bank service: whole banks and single records.

The node pulls: every answer is asked for, so what waits at either end is bounded by what the node
asks at a time. A bank or a record is first described (its digest or hash) and then read by byte
ranges; the service keeps no state per node, so a pull goes on after any interruption.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from shared.core.bank_header import Blake3Hex, Expert, Layer
from shared.core.names import NodeName
from shared.core.record import RecordOrder
from shared.core.shape import ExpertShape
from shared.core.wire import U32, U63, Text, decode_frame, encode_frame

CHUNK_BYTES_MAX: Final = 2**20  # of one range
WINDOW_MAX: Final = 16  # ranges that a node may have asked for and not yet got
REQUEST_BYTES_MAX: Final = 4 * 1024
ANSWER_BYTES_MAX: Final = CHUNK_BYTES_MAX + 4 * 1024
BANK_PROTOCOL: Final = 1


class BankMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every message; an answer carries the `ticket` of its question."""

    ticket: U63


class FindBank(BankMessage, frozen=True, tag="find_bank"):
    """Which bank file has this name? Answered by BankFound or BankRefused."""

    protocol: U32
    name: NodeName


class FindRecord(BankMessage, frozen=True, tag="find_record"):
    """Where is a record of this expert, in this order? Answered by RecordFound or BankRefused."""

    protocol: U32
    model_digest: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    layer: Layer
    expert: Expert
    order: RecordOrder


class ReadRange(BankMessage, frozen=True, tag="read_range"):
    """Bytes `offset` to `offset + length` of what `source` names; answered by Range or refused."""

    source: Blake3Hex  # the digest of a BankFound, or the record_hash of a RecordFound
    offset: U63
    length: Annotated[int, msgspec.Meta(ge=1, le=CHUNK_BYTES_MAX)]


class PullEnded(BankMessage, frozen=True, tag="pull_ended"):
    """The node has all of `source`, or gave up; only for the service's log. Not answered."""

    source: Blake3Hex
    complete: bool
    pulled_bytes: U63
    kept_bytes: U63
    elapsed_us: U63


class BankFound(BankMessage, frozen=True, tag="bank_found"):
    """A whole bank: `header_bytes` of header block, then `rows` records of `stride_bytes`."""

    name: NodeName
    digest: Blake3Hex
    file_bytes: U63
    header_bytes: U63


class RecordFound(BankMessage, frozen=True, tag="record_found"):
    """A single record, ready to be read; `record_hash` is the BLAKE3 of its bytes."""

    shape: ExpertShape
    record_hash: Blake3Hex
    record_bytes: U63


class Range(BankMessage, frozen=True, tag="range"):
    """The bytes that were asked for."""

    source: Blake3Hex
    offset: U63
    data: Annotated[bytes, msgspec.Meta(max_length=CHUNK_BYTES_MAX)]


class BankRefused(BankMessage, frozen=True, tag="bank_refused"):
    """No answer. After a permanent refusal asking again is useless until a person acts."""

    code: Text
    text: Text
    permanent: bool


ToBankService: TypeAlias = FindBank | FindRecord | ReadRange | PullEnded
FromBankService: TypeAlias = BankFound | RecordFound | Range | BankRefused

_to_service: Final = msgspec.msgpack.Decoder(ToBankService)
_from_service: Final = msgspec.msgpack.Decoder(FromBankService)


def encode(message: BankMessage) -> bytes:
    """One frame; LocalProtocolError when it would exceed ANSWER_BYTES_MAX."""
    return encode_frame(message, ANSWER_BYTES_MAX)


def decode_to_service(frame: bytes) -> ToBankService:
    """A node's message; RemoteProtocolError for anything else."""
    return decode_frame(frame, _to_service, REQUEST_BYTES_MAX)


def decode_from_service(frame: bytes) -> FromBankService:
    """The bank service's message; RemoteProtocolError for anything else."""
    return decode_frame(frame, _from_service, ANSWER_BYTES_MAX)
