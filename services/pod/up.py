"""`k3 up`: checks, prepares, starts and announces the embedded pod.

Composition only: files by prepare.py, processes by supervisor.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import click
import httpx

from services.pod.children import children_of, environment
from services.pod.files import exclusive
from services.pod.layout import MODEL_NAME, PodLayout, PodPaths
from services.pod.ports import LOOPBACK, reserve
from services.pod.supervision import RestartPolicy
from services.pod.supervisor import Probe, Supervisor, SupervisorOptions
from shared.core.errors import CheckpointError, ConfigError
from shared.io.process import tie_to_parent

_PROBE_TIMEOUT_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What the operator chose."""

    checkpoint: Path
    state_dir: Path
    sparks: int
    port: int
    placement: str
    on_miss: Literal["exact", "fail"]
    dtype: Literal["float32", "bfloat16"]
    spin_us: int
    restart: RestartPolicy
    verbose: bool
    program: str  # how the operator called `k3`, for the lines to copy


def run_pod(options: UpOptions) -> None:
    """Run the embedded pod until it is told to stop (SIGINT, SIGTERM, SIGHUP)."""
    tie_to_parent(os.environ)
    # until the supervisor listens, a SIGTERM unwinds like Ctrl-C: no half-written file stays
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        port = reserve(stack, options.port, option="--port")
        control_port = reserve(stack, 0, option="--port")
        banks_port = reserve(stack, 0, option="--port")
        stack.enter_context(exclusive(options.state_dir))
        layout = _prepare(options, port, control_port, banks_port)
        asyncio.run(_supervise(options, layout, port))


def _prepare(options: UpOptions, port: int, control_port: int, banks_port: int) -> PodLayout:
    checkpoint = options.checkpoint.resolve()
    for path in (checkpoint, options.state_dir.resolve()):
        if any("\ud800" <= letter <= "\udfff" for letter in str(path)):
            raise ConfigError(
                f"path {os.fsencode(path)!r} is not UTF-8 and fits no settings file: rename it"
            )
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"no checkpoint at {checkpoint}: give the folder that holds config.json with "
            "--checkpoint"
        )
    # torch is behind this import: seconds that a refused port must not cost
    from services.pod.checkpoint import prepare_from
    from services.pod.prepare import PodPlan

    plan = PodPlan(
        checkpoint=checkpoint,
        sparks=options.sparks,
        http_port=port,
        control_port=control_port,
        banks_port=banks_port,
        model_name=MODEL_NAME,
        policy=options.placement,
        on_miss=options.on_miss,
        dtype=options.dtype,
        spin_us=options.spin_us,
        pin=False,  # a laptop's limit of locked memory is small, and its swap is nobody's p99
    )
    return prepare_from(PodPaths.embedded(options.state_dir.resolve()), plan, say=_say)


async def _supervise(options: UpOptions, layout: PodLayout, port: int) -> None:
    supervisor = Supervisor(
        children=children_of(layout),
        options=SupervisorOptions(
            policy=options.restart,
            environ=environment(os.environ, parent_pid=os.getpid()),
            logs=layout.paths.logs,
            echo=_echo if options.verbose else None,
        ),
        say=_say,
        now_us=lambda: time.monotonic_ns() // 1000,
    )
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, supervisor.stop)
    url = f"http://{LOOPBACK}:{port}"
    _say(f"starting the Station and {len(layout.nodes)} nodes; logs in {layout.paths.logs}")
    async with httpx.AsyncClient(base_url=url, timeout=_PROBE_TIMEOUT_S, trust_env=False) as client:
        await supervisor.run(_ready_probe(client), _announcer(url, layout, options.program))
    _say("stopped")


def stop_signals() -> tuple[signal.Signals, ...]:
    """What ends a pod: Ctrl-C, `kill`, and a terminal that closes - except under `nohup`."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return (signal.SIGINT, signal.SIGTERM)
    return (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _ready_probe(client: httpx.AsyncClient) -> Probe:
    async def probe() -> tuple[bool, str]:
        try:
            response = await client.get("/readyz")
        except httpx.TransportError:
            return False, "the Station does not answer yet"
        return response.is_success, response.text.strip()[:500]

    return probe


def _announcer(url: str, layout: PodLayout, k3: str) -> Callable[[], None]:
    def announce() -> None:
        with suppress(OSError):
            click.echo(f"ready: {url}/v1 (model {MODEL_NAME}, {len(layout.nodes)} nodes)")
        _say(f"talk to it with `{k3} chat --url {url}`, look at it with `{k3} status --url {url}`")
        _say("Ctrl-C stops the pod")

    return announce


def _say(line: str) -> None:
    with suppress(OSError):  # a reader that went away costs the words, not the pod
        click.echo(f"k3: {line}", err=True)


def _echo(name: str, line: str) -> None:
    with suppress(OSError):
        click.echo(f"{name:>8} | {line}", err=True)
