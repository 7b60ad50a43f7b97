"""A proposal to move experts, as a file: what a coordinator would carry out, and why.

Owns the JSON with its checksum. Holds the digests of both placements, so nobody carries out moves
of another pod or moves twice. Pure. Must not know how moves are found or carried out.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from services.planner.drift import Gain, Verdict
from services.planner.moves import MovePlan
from shared.core.errors import PlacementError

FORMAT_VERSION: Final = 1
_Digest = Annotated[str, Meta(min_length=1, max_length=128)]


class Proposal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Moves from one placement to another, and the gain they are for.

    `planned_on` is the digest of the live routing that the new placement was made from.
    """

    model_digest: _Digest
    old_placement: _Digest
    new_placement: _Digest
    planned_on: _Digest
    policy: str
    record_bytes: Annotated[int, Meta(gt=0)]
    bytes_per_s: Annotated[float, Meta(gt=0)]
    verdict: Verdict
    gain: Gain
    plan: MovePlan


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What lies on disk."""

    version: Literal[1]
    checksum: str
    proposal: Proposal


def encode(proposal: Proposal) -> bytes:
    """The file of a proposal: equal proposals have equal bytes."""
    return msgspec.json.encode(_File(FORMAT_VERSION, _checksum(proposal), proposal)) + b"\n"


def decode(data: bytes, *, source: str) -> Proposal:
    """Parse and check; any defect is one PlacementError that names `source`."""
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PlacementError(
            f"{source}: not a proposal of format {FORMAT_VERSION}: {error}; make it again with "
            "`k3 plan drift --out`"
        ) from error
    if file.checksum != _checksum(file.proposal):
        raise PlacementError(
            f"{source}: the contents do not have the checksum beside them: the file is damaged or "
            "was edited by hand; make it again with `k3 plan drift --out`"
        )
    return file.proposal


def _checksum(proposal: Proposal) -> str:
    return hashlib.blake2b(msgspec.json.encode(proposal), digest_size=16).hexdigest()
