"""A single record from the bank service: what re-homing an expert needs.

Owns its verification. Must not know where the record goes.
"""

from __future__ import annotations

import asyncio
from typing import Final

import numpy as np
import numpy.typing as npt

from shared.core.bank_wire import RecordFound
from shared.core.errors import BankError, DigestMismatch
from shared.core.record import RecordLayout, RecordOrder
from shared.core.shape import ExpertShape
from shared.io.bank_file import blake3_digest
from spark_daemon.staging.client import BankClient, SourceGone

TRIES: Final = 3  # for a record that does not match its hash
GONE_MAX: Final = 5  # the service keeps few single records; another node's may push ours out


async def pull_record(
    client: BankClient,
    model_digest: str,
    layer: int,
    expert: int,
    order: RecordOrder,
    *,
    shape: ExpertShape | None = None,
) -> npt.NDArray[np.uint8]:
    """The record of one expert: uint8 [record_bytes], verified by its BLAKE3 and its size.

    Raises DigestMismatch when it is not of `shape`, BankError when nobody has it or it stays
    damaged, and what `BankClient.read` raises.
    """
    gone, tries = 0, 0
    while True:
        found = await client.find_record(model_digest, layer, expert, order)
        _check_shape(found, order, shape, where=f"layer {layer}, expert {expert}")
        record = np.empty(found.record_bytes, np.uint8)
        try:
            await client.read(found.record_hash, 0, record.data)
        except SourceGone:
            gone += 1
            if gone >= GONE_MAX:
                raise
            continue
        if (await asyncio.to_thread(blake3_digest, record.data)).hex() == found.record_hash:
            return record
        tries += 1
        if tries >= TRIES:
            raise BankError(
                f"{client.service}: the record of layer {layer}, expert {expert} did not match its "
                f"BLAKE3 {TRIES} times: restart k3-banks there; if it stays, check its memory"
            )


def _check_shape(
    found: RecordFound, order: RecordOrder, shape: ExpertShape | None, *, where: str
) -> None:
    if shape is not None and found.shape != shape:
        raise DigestMismatch(
            f"{where}: the record there has latent {found.shape.latent} and width "
            f"{found.shape.width}, this model's have {shape.latent} and {shape.width}: ask for the "
            "right model"
        )
    try:
        expected = RecordLayout(found.shape, order).record_bytes
    except ValueError as error:
        raise BankError(f"{where}: {error}") from error
    if found.record_bytes != expected:
        raise BankError(
            f"{where}: a record of {found.record_bytes} bytes is promised, its shape needs "
            f"{expected}: run the same version at both ends"
        )
