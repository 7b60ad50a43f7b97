"""`k3 bank stage` and `k3 bank record`: pulling a bank, or one record, to this machine.

Owns arguments, printing and the event loop. Must not know how bytes are pulled or checked.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import click
import msgspec
import numpy as np
import numpy.typing as npt
import uvloop

from services.banks.progress import shown_bytes
from shared.core.bank_header import Digest
from shared.core.errors import BankError, ConfigError
from shared.core.placement import ExpertKey
from shared.core.record import RecordOrder
from shared.core.shape import ExpertShape
from shared.io.bank_file import BankFile
from shared.io.files import replace_file
from shared.io.partial_file import refuse_existing
from spark_daemon import config as configs
from spark_daemon.config import Kind, NodeConfig
from spark_daemon.staging.client import Service, open_client
from spark_daemon.staging.record import pull_record
from spark_daemon.staging.stage import service_of, stage, wanted_bank

R = TypeVar("R")

_FILE: Final = click.Path(path_type=Path)
_RATE: Final = re.compile(r"(\d{1,15})([kKMG]?)")
_RATE_MIN: Final = 100_000  # slower, ten seconds and more would pass without a byte
_UNITS: Final = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9}
_U16_MAX: Final = 2**16 - 1


class ByteRate(click.ParamType[int]):
    """Bytes per second: `200M` is 200,000,000."""

    name = "rate"

    def convert(
        self, value: str | int, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """The number of bytes; a usage error for anything but digits and k, M or G."""
        match = _RATE.fullmatch(str(value))
        if match is None:
            self.fail(f"{value!r} is not a rate: write bytes per second, like 200M.", param, ctx)
        rate = int(match[1]) * _UNITS[match[2]]
        if rate < _RATE_MIN:
            self.fail(f"{value!r} is too slow to be meant: at least 100k, like 200M.", param, ctx)
        return rate


def _service_options(command: Callable[..., object]) -> Callable[..., object]:
    """Where the bank service is and who asks."""
    for option in (
        click.option("--config", "config_path", type=_FILE, help="The node's settings file."),
        click.option(
            "--kind",
            type=click.Choice(get_args(Kind)),
            default="spark",
            show_default=True,
            help="Kind of the node.",
        ),
        click.option("--node-key", help="The node's secret key file. [its settings]"),
        click.option("--station-key", help="The Station's public key file. [its settings]"),
        click.option(
            "--service", "address", help="The bank service, tcp://HOST:PORT. [its settings]"
        ),
    ):
        command = option(command)
    return command


@click.command(name="stage")
@click.argument("name")
@_service_options
@click.option("--out-dir", type=_FILE, help="Folder to write to. [its settings]")
@click.option("--replace", is_flag=True, help="Replace an existing bank at the end.")
@click.option(
    "--rate", type=ByteRate(), default=None, help="At most so many bytes/s: 200M. [no limit]"
)
@click.option("--json", "as_json", is_flag=True, help="Print the receipt as one JSON object.")
def stage_command(
    *,
    name: str,
    address: str | None,
    station_key: str | None,
    node_key: str | None,
    kind: Kind,
    config_path: Path | None,
    out_dir: Path | None,
    replace: bool,
    rate: int | None,
    as_json: bool,
) -> None:
    """Pull the bank of node NAME from the Station's bank service to this machine.

    Every record is verified before it is written, and the bank appears whole or not at all. What
    was interrupted is continued by the same command; receipts/ beside the bank tells every attempt.

    Example: k3 bank stage spark0 --service tcp://10.0.0.1:8382 --rate 200M

    Exit status: 0 staged, 1 failed, 2 wrong usage, 75 service not reachable, 78 refused.
    """
    given = {"bank_service": address, "station_key": station_key, "node_key": node_key}
    config = configs.load(kind, name, path=config_path, overrides=given)
    bank = Path(config.bank)
    path = bank if out_dir is None else out_dir / bank.name
    wanted = wanted_bank(path, node=config.name, tier=config.tier)
    service = _service_of(config)
    with shown_bytes(f"stage {path.stem}") as display:
        try:
            receipt = _run(
                stage(
                    service,
                    wanted,
                    path,
                    replace=replace,
                    rate_bytes_per_s=rate or 0,
                    progress=display.progress,
                    notice=display.notice,
                )
            )
        except KeyboardInterrupt:
            display.notice("interrupted: finished records are kept for the next attempt")
            raise
    if as_json:
        click.echo(msgspec.json.encode(receipt))
        return
    click.echo(
        f"{path}: {receipt.records} records ({receipt.records_pulled} pulled, "
        f"{receipt.records_kept} kept) in {receipt.seconds:.1f} s, "
        f"{receipt.bytes_per_s / 1e6:.1f} MB/s, digest {receipt.digest}"
    )


@click.command(name="record")
@click.argument("layer", type=click.IntRange(0, _U16_MAX))
@click.argument("expert", type=click.IntRange(0, _U16_MAX))
@click.option("--model-digest", help="Digest of the model.")
@click.option("--bank", type=_FILE, help="Instead: a bank here, whose model and order to take.")
@click.option("--node", help="Node whose settings to use.")
@_service_options
@click.option("--order", type=click.Choice(get_args(RecordOrder)), help="[row-major]")
@click.option("--out", type=_FILE, required=True, help="File to write the record to.")
@click.option("--replace", is_flag=True, help="Replace an existing file.")
def record_command(
    *,
    layer: int,
    expert: int,
    model_digest: str | None,
    bank: Path | None,
    node: str | None,
    address: str | None,
    station_key: str | None,
    node_key: str | None,
    kind: Kind,
    config_path: Path | None,
    order: RecordOrder | None,
    out: Path,
    replace: bool,
) -> None:
    """Pull the record of one expert from the Station's bank service into a file.

    Example: k3 bank record 12 345 --bank /var/lib/k3/banks/spark0.k3bank --node spark0 --out r.bin

    Exit status: 0 pulled, 1 failed, 2 wrong usage, 75 service not reachable, 78 refused.
    """
    if (model_digest is None) == (bank is None):
        raise click.UsageError("give either --model-digest or --bank")
    if model_digest is not None:
        _check_digest(model_digest)
    refuse_existing(out, replace=replace)
    shape: ExpertShape | None = None
    if bank is not None:
        with BankFile.open(bank) as opened:
            model_digest, shape = opened.header.model_digest, opened.header.shape
            order = order or opened.header.layout
    assert model_digest is not None, "one of the two was given"
    if node is not None:
        given = {"bank_service": address, "station_key": station_key, "node_key": node_key}
        service = _service_of(configs.load(kind, node, path=config_path, overrides=given))
    elif address and station_key and node_key:
        service = service_of(address, node_key=Path(node_key), station_key=Path(station_key))
    else:
        raise click.UsageError("give --node, or all of --service, --station-key and --node-key")
    key = (layer, expert)
    record = _run(_pull(service, model_digest, key, order=order or "row-major", shape=shape))
    try:
        replace_file(out, record.tobytes())
    except OSError as error:
        raise BankError(
            f"{out}: cannot write the record: {error.strerror}: check its folder and free space"
        ) from error
    click.echo(f"{out}: layer {layer}, expert {expert}, {len(record)} bytes")


async def _pull(
    service: Service,
    model_digest: str,
    key: ExpertKey,
    *,
    order: RecordOrder,
    shape: ExpertShape | None,
) -> npt.NDArray[np.uint8]:
    async with open_client(service, notice=lambda line: click.echo(line, err=True)) as client:
        return await pull_record(client, model_digest, *key, order, shape=shape)


def _check_digest(model_digest: str) -> None:
    """The service drops a question with one that cannot be, and nobody would answer."""
    try:
        msgspec.convert(model_digest, Digest)
    except msgspec.ValidationError as error:
        raise click.UsageError(f"--model-digest: {error}") from error


def _service_of(config: NodeConfig) -> Service:
    if not config.bank_service:
        raise ConfigError(
            f"node {config.name} has no bank_service in its settings: give --service tcp://HOST:PORT"
        )
    return service_of(
        config.bank_service, node_key=Path(config.node_key), station_key=Path(config.station_key)
    )


def _run(main: Coroutine[Any, Any, R]) -> R:
    """On an event loop of its own; Ctrl-C cancels it, which is a KeyboardInterrupt here."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
