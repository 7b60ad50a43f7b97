"""`k3-banks`: builds the bank service from its settings and runs it until it is told to stop.

The only place that sets the event loop, installs signal handlers and takes a clock. Every end is
one line and an exit status.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import click
import uvloop
from structlog.typing import FilteringBoundLogger

from services.bank_service import config as configs
from services.bank_service.config import BankServiceConfig
from services.bank_service.open_banks import OpenBanks
from services.bank_service.records import Records
from services.bank_service.server import LINK, READERS, BankServer
from services.banks.source import ExpertSource
from shared.core.bank_wire import CHUNK_BYTES_MAX, FromBankService, decode_to_service, encode
from shared.core.errors import ConfigError, MeshError
from shared.core.rate import TokenBucket
from shared.io import journal, keys
from shared.io.link import listen
from shared.io.process import tie_to_parent
from shared.io.systemd import Notifier, Watchdog, watchdog_interval_us

NAME: Final = "k3-banks"
LOOK_S: Final = 5.0  # between two lines of STATUS


@click.command(
    name=NAME,
    help=(
        "Hand banks and single expert records to the nodes that ask for them, until SIGTERM. "
        "Settings: /etc/k3/banks.toml (defaults suffice); options win over the file.\n\n"
        "Example: k3-banks --folder /var/lib/k3/banks\n\n"
        "Exit status: 0 stopped, 1 failed, 2 wrong usage, 78 settings or key refused."
    ),
)
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="Settings (TOML).")
@click.option("--address", help="Where to listen. [tcp://127.0.0.1:8382]")
@click.option("--secret-key", help="The Station's secret key file (mode 0600).")
@click.option("--folder", "folders", multiple=True, help="Folder of banks; may be repeated.")
@click.pass_context
def main(
    context: click.Context,
    /,
    config_path: Path | None,
    folders: tuple[str, ...],
    **overrides: object | None,
) -> None:
    """Console entry point."""
    context.exit(run(config_path, {**overrides, "folders": folders or None}, os.environ))


def run(
    config_path: Path | None, overrides: Mapping[str, object | None], environ: Mapping[str, str]
) -> int:
    """Serve until SIGTERM or SIGINT; the exit status of the process."""
    try:
        log = journal.configure(sys.stderr, environ, identifier=NAME)(node="station")
    except ConfigError as error:
        click.echo(f"{NAME}: {error.code}: {error}", err=True)  # no log yet
        return error.exit_status
    try:
        if not __debug__:
            raise ConfigError("python -O removes this program's own checks: run without it")
        config = configs.load(config_path, overrides)
        tie_to_parent(environ)
        uvloop.run(serve(config, environ, log))
    except MeshError as error:
        group = ExceptionGroup(NAME, [error])
        return journal.log_failure(group, log, "bank_service_failed")
    except ExceptionGroup as group:
        return journal.log_failure(group, log, "bank_service_failed")
    log.info("bank_service_stopped")
    return 0


async def serve(
    config: BankServiceConfig, environ: Mapping[str, str], log: FilteringBoundLogger
) -> None:
    """Listen and answer until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    notifier = Notifier.from_environ(environ)
    wire_encode: Callable[[FromBankService], bytes] = encode
    with ExitStack() as closing:
        parts = _Parts(config, closing, log)
        async with (
            asyncio.TaskGroup() as tasks,
            listen(
                config.address,
                keys=keys.load_secret(Path(config.secret_key)),
                allow_list=keys.load_allow_list(Path(config.allow_list)),
                decode=decode_to_service,
                encode=wire_encode,
                tasks=tasks,
                log=log,
                allow_remote=config.allow_remote,
                settings=LINK,
            ) as link,
        ):
            server = BankServer(
                link,
                parts.banks,
                parts.records,
                bucket=TokenBucket(config.rate_bytes_per_s, CHUNK_BYTES_MAX),
                readers=parts.readers,
                finder=parts.finder,
                clock_us=_now_us,
                log=log,
            )
            running = [
                tasks.create_task(server.run(), name="bank_server"),
                tasks.create_task(_look(server, notifier), name="bank_status"),
            ]
            interval_us = watchdog_interval_us(environ, os.getpid())
            if interval_us is not None:
                watchdog = Watchdog(notifier, interval_us, server.pulse)
                running.append(tasks.create_task(watchdog.run(), name="watchdog"))
            log.info("bank_service_serving", address=link.address, folders=list(config.folders))
            notifier.notify(READY=1, STATUS="no node pulls")
            try:
                await stop.wait()
                notifier.notify(STOPPING=1)
            finally:
                for task in running:
                    task.cancel()
                await asyncio.wait(running)  # the link must outlive who uses it


class _Parts:
    """What holds files and threads; `closing` ends them."""

    def __init__(
        self, config: BankServiceConfig, closing: ExitStack, log: FilteringBoundLogger
    ) -> None:
        """Opens no bank yet."""
        folders = [Path(folder) for folder in config.folders]
        for folder in folders:
            if not folder.is_dir():  # it may still be mounted
                log.warning("bank_folder_missing", folder=str(folder))
        self.banks = OpenBanks(folders, log)
        closing.callback(self.banks.close)
        self.records = Records(folders, _opener(config.checkpoint), log)
        # the last to be made is the first to end: no thread may outlive the files it reads
        self.readers = closing.enter_context(ThreadPoolExecutor(READERS, "bank-read"))
        self.finder = closing.enter_context(ThreadPoolExecutor(1, "bank-find"))


def _opener(checkpoint: str) -> Callable[[], ExpertSource] | None:
    if not checkpoint:
        return None

    def open_checkpoint() -> ExpertSource:
        # torch is behind this import: only a service that needs the checkpoint pays for it
        from station.model.checkpoint import Checkpoint

        return Checkpoint.open(Path(checkpoint))

    return open_checkpoint


async def _look(server: BankServer, notifier: Notifier) -> None:
    """Tell systemd what goes on, when it changed."""
    told = ""
    while True:
        await asyncio.sleep(LOOK_S)
        status = server.look()
        if status != told:
            notifier.notify(STATUS=status)
            told = status


def _now_us() -> int:
    return time.monotonic_ns() // 1000
