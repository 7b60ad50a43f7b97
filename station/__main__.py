"""`k3-station`: reads the settings, runs the parts in one task group, and ends them in order."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import click
import uvloop
from structlog.typing import FilteringBoundLogger

from shared.core import wire
from shared.core.errors import ConfigError, MeshError
from shared.io import journal, keys
from shared.io.link import listen as listen_control
from shared.io.process import tie_to_parent
from shared.io.systemd import Notifier, Pulse, Watchdog, watchdog_interval_us
from station import config as configs
from station.assembly import (
    Core,
    build_chat,
    build_core,
    build_engine,
    build_nodes,
    build_pod,
)
from station.config import StationConfig
from station.coordinator import Coordinator
from station.engine import Engine, Stop
from station.http.server import listen as listen_http
from station.http.server import serve

STOP_S: Final = 3.0
GUARD_S: Final = 0.5


@click.command(help="The coordinator of a pod. Example: k3-station --config /etc/k3/station.toml")
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    default=Path("/etc/k3/station.toml"),
    show_default=True,
    help="Settings (TOML).",
)
def main(config_path: Path) -> None:
    """Console entry point."""
    log = journal.configure(sys.stderr, os.environ, identifier="k3-station")(node="station")
    try:
        config = configs.load(config_path)
        tie_to_parent(os.environ)
        uvloop.run(run(config, log))
    except* MeshError as group:
        sys.exit(_ended(_first(group), log))
    except* KeyboardInterrupt:
        sys.exit(130)


async def run(config: StationConfig, log: FilteringBoundLogger) -> None:
    """Serve until SIGTERM or SIGINT."""
    notifier = Notifier.from_environ(os.environ)
    token = http_token(config)
    # the port first: a taken one is what an operator should hear before a long load
    listener = listen_http(config.http_host, config.http_port)
    try:
        core = await asyncio.to_thread(build_core, config, log)
        await _serve(config, core, listener, token, notifier, log)
    finally:
        listener.close()


async def _serve(
    config: StationConfig,
    core: Core,
    listener: socket.socket,
    token: str | None,
    notifier: Notifier,
    log: FilteringBoundLogger,
) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def on_bug(request_id: str, error: BaseException) -> None:
        log.error("request_bug", request=request_id, exc_info=error)

    engine = build_engine(core, config, on_bug)
    encode: Callable[[wire.ToNode], bytes] = wire.encode
    async with (
        asyncio.TaskGroup() as background,
        listen_control(
            config.control_address,
            keys=keys.load_secret(Path(config.secret_key)),
            allow_list=keys.load_allow_list(Path(config.allow_list)),
            decode=wire.decode_to_station,
            encode=encode,
            tasks=background,
            log=log,
            allow_remote=config.allow_remote_control,
        ) as link,
    ):
        nodes = build_nodes(core, config, engine, link, log)
        pod = build_pod(core, config, engine, nodes, log)
        engine.start()
        guard = background.create_task(_guard(engine), name="model_thread_guard")
        tasks = [
            background.create_task(nodes.run(), name="nodes"),
            background.create_task(_watchdog(pod, engine, notifier), name="watchdog"),
        ]
        try:
            host, port = listener.getsockname()[:2]
            notifier.notify(READY="1", STATUS=f"serving on {host}:{port}")
            log.info("station_serving", host=host, port=port, control=link.address)
            await serve(build_chat(core, pod, token, stop, log), listener, stop=stop)
        finally:
            notifier.notify(STOPPING="1")
            guard.cancel()
            engine.send(Stop())
            ended = await asyncio.to_thread(engine.join, STOP_S)
            for task in tasks:
                task.cancel()
            log.info("station_stopped", model_thread_ended=ended)


async def _guard(engine: Engine) -> None:
    """End the Station when its model thread ended by itself: only a new process can serve again."""
    while engine.is_alive:  # noqa: ASYNC110 - the death of a thread sets no event
        await asyncio.sleep(GUARD_S)
    raise MeshError("the model thread ended because of a bug, see the log: restart the Station")


async def _watchdog(pod: Coordinator, engine: Engine, notifier: Notifier) -> None:
    """Feed systemd, when it watches, only while work moves or there is none."""
    interval_us = watchdog_interval_us(os.environ, os.getpid())
    if interval_us is None:
        return

    def pulse() -> Pulse:
        alive, _ = pod.liveness()
        return Pulse(engine.progress, idle=alive and engine.active == 0)

    await Watchdog(notifier, interval_us, pulse).run()


def http_token(config: StationConfig) -> str | None:
    """The bearer token; needed as soon as the endpoint leaves loopback."""
    if config.http_token_file:
        try:
            token = Path(config.http_token_file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"http_token_file: {error}; write a token into that file") from error
        if not token:
            raise ConfigError(f"http_token_file {config.http_token_file} is empty: write a token")
        return token
    if config.http_host not in ("127.0.0.1", "::1", "localhost"):
        raise ConfigError(
            f"http_host {config.http_host} is not loopback: set http_token_file, so that only "
            "holders of the token can use the pod"
        )
    return None


def _ended(error: MeshError, log: FilteringBoundLogger) -> int:
    """One line instead of a traceback; the exit status."""
    log.error("station_ended", code=error.code, error=str(error))
    return error.exit_status


def _first(group: BaseExceptionGroup[MeshError]) -> MeshError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, MeshError)
    return error


if __name__ == "__main__":
    main()
