"""Pulling a single record: what re-homing an expert needs, and `k3 bank record`."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from services.cli import run
from shared.core.bank_wire import FindRecord, FromBankService, Range, RecordFound, ToBankService
from shared.core.errors import BankError, DigestMismatch
from shared.core.record import RecordLayout, RecordOrder
from shared.core.record_order import reorder
from shared.core.shape import ExpertShape
from shared.io.bank_file import BankFile
from spark_daemon.staging.client import Patience, SourceGone, open_client
from spark_daemon.staging.record import pull_record
from spark_daemon.staging.stage import service_of
from tests.support.bank_host import BankHost
from tests.unit.staging.conftest import MODEL, SMALL, WIDE, Experts

KEY = (2, 7)
PATIENCE = Patience(pause_us_min=10_000)


def pulled(
    host: BankHost,
    *,
    key: tuple[int, int] = KEY,
    order: RecordOrder = "row-major",
    shape: ExpertShape | None = None,
) -> np.ndarray:
    """One record over a connection of its own."""
    service = service_of(host.address, node_key=host.node_key(), station_key=host.station_key)

    async def pull() -> np.ndarray:
        async with open_client(service, patience=PATIENCE) as client:
            return await pull_record(client, MODEL, *key, order, shape=shape)

    return asyncio.run(pull())


def stored(shape: ExpertShape = SMALL) -> np.ndarray:
    """The record of KEY as the checkpoint has it."""
    record = bytearray(RecordLayout(shape).record_bytes)
    Experts(shape).read_expert_record(*KEY, memoryview(record))
    return np.frombuffer(record, np.uint8)


def test_record_in_both_orders(host: BankHost, built: Path) -> None:
    """The same expert from banks of either order is the same record, permuted."""
    shutil.copy(built / "interleaved" / "spark0.k3bank", host.folder / "i.k3bank")

    rows = pulled(host, order="row-major", shape=SMALL)
    interleaved = pulled(host, order="interleaved-4", shape=SMALL)

    assert np.array_equal(rows, stored())
    assert not np.array_equal(rows, interleaved)
    back = np.empty_like(rows)
    have, want = RecordLayout(SMALL, "interleaved-4"), RecordLayout(SMALL)
    reorder(interleaved, have, back, want)
    assert np.array_equal(back, rows)


def test_record_larger_than_a_range(host: BankHost, built: Path) -> None:
    """It is put together from ranges."""
    shutil.copy(built / "wide" / "spark0.k3bank", host.folder)
    record = pulled(host, key=(2, 1), shape=WIDE)
    with BankFile.open(host.folder / "spark0.k3bank") as bank:
        expected = bytearray(len(record))
        bank.read_into(bank.header.row_of()[2, 1], memoryview(expected))
    assert record.tobytes() == expected


def test_damaged_record_is_asked_for_again(host: BankHost) -> None:
    """Twice damaged is retried, always damaged is an error that names the expert."""
    left = 2

    async def hook(asked: ToBankService, answer: FromBankService) -> FromBankService | None:
        nonlocal left
        if isinstance(answer, Range) and left:
            left -= 1
            return msgspec.structs.replace(answer, data=b"\xee" + answer.data[1:])
        return answer

    host.hook = hook
    assert np.array_equal(pulled(host), stored())
    left = 10**6
    with pytest.raises(BankError, match=r"layer 2, expert 7 did not match its BLAKE3 3 times"):
        pulled(host)


def test_evicted_record_is_found_again(host: BankHost) -> None:
    """The service may drop it between the answers; it is asked for again, but not for ever."""
    left = 2

    async def hook(asked: ToBankService, answer: FromBankService) -> FromBankService | None:
        nonlocal left
        if isinstance(answer, RecordFound) and left:
            left -= 1
            host.forget()
        return answer

    host.hook = hook
    assert np.array_equal(pulled(host), stored())
    assert sum(isinstance(asked, FindRecord) for asked in host.asked) == 3
    left = 10**6
    with pytest.raises(SourceGone):
        pulled(host)


def test_record_of_another_model_is_refused(host: BankHost) -> None:
    """A shape that is not this node's, a size that is not the shape's, an expert nobody has."""
    with pytest.raises(DigestMismatch, match="latent 256 and width 128"):
        pulled(host, shape=WIDE)

    async def hook(asked: ToBankService, answer: FromBankService) -> FromBankService | None:
        if isinstance(answer, RecordFound):
            return msgspec.structs.replace(answer, record_bytes=2**40)
        return answer

    host.hook = hook
    with pytest.raises(BankError, match="1099511627776 bytes is promised"):
        pulled(host)
    host.hook = None
    with pytest.raises(BankError, match="record_unknown"):
        pulled(host, key=(2, 900))


def command(host: BankHost, *words: str) -> int:
    """Exit status of `k3 bank record` in this process."""
    return run(
        [
            *("bank", "record", *words),
            *("--service", host.address),
            *("--station-key", str(host.station_key)),
            *("--node-key", str(host.node_key())),
        ]
    )


def test_command_writes_the_record(
    host: BankHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the model's digest or by a bank of this machine; nothing is overwritten unasked."""
    out = tmp_path / "record.bin"
    by_digest = ("2", "7", "--model-digest", MODEL, "--out", str(out))
    assert command(host, *by_digest) == 0
    assert out.read_bytes() == stored().tobytes()
    assert command(host, *by_digest) == 78
    assert "exists already" in capsys.readouterr().err
    bank = str(host.folder / "spark0.k3bank")
    by_bank = ("1", "3", "--bank", bank, "--out", str(out), "--replace")
    assert command(host, *by_bank) == 0
    assert out.read_bytes() != stored().tobytes()
    assert command(host, "2", "7", "--out", str(out)) == 2
    assert command(host, "2", "7", "--model-digest", "x", "--bank", bank, "--out", str(out)) == 2
    assert command(host, "2", "900", "--bank", bank, "--out", str(tmp_path / "n")) == 78
    assert not (tmp_path / "n").exists()
