"""Keeps the processes of an embedded pod running, and ends all of them.

The shell around supervision.py: starts, waits, signals, collects output. Decides nothing about
restarts. Must not know what the processes do, except that the Station answers /readyz.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Final, assert_never

from services.pod.children import Child
from services.pod.last_words import last_words
from services.pod.supervision import (
    History,
    LeaveDown,
    Restart,
    RestartPolicy,
    StopPod,
    decide,
    ending,
)
from shared.core.errors import EXIT_CONFIG, EXIT_FAILED, ConfigError, MeshError

READY_S: Final = 180.0  # a cold start on a busy two-core host takes about 20 s
PROBE_S: Final = 0.1
STOP_S: Final = 4.0  # running requests can end in this time
KILL_S: Final = 0.5
_TAIL_BYTES: Final = 4096

Probe = Callable[[], Awaitable[tuple[bool, str]]]


class PodFailed(MeshError):
    """A process of the pod ended and the pod cannot go on without it."""

    code = "pod_failed"


class ChildRefused(ConfigError):
    """A process of the pod refused its settings or files."""

    code = "config_invalid"


class PodNotReady(MeshError):
    """The pod did not become ready in time."""

    code = "pod_not_ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorOptions:
    """How to run the pod."""

    policy: RestartPolicy
    environ: Mapping[str, str]
    logs: Path
    echo: Callable[[str, str], None] | None  # (name, one line of its output)
    ready_s: float = READY_S


@dataclass(slots=True)
class _Output:
    """What a child printed: all of it to its log file, the end of it for the error message."""

    file: FileIO | None  # None: the log cannot be written
    echo: Callable[[str], None] | None
    tail: bytes = b""
    unfinished: bytes = b""

    def add(self, chunk: bytes) -> None:
        """Keep a piece of output; `echo` gets whole lines."""
        if self.file is not None:
            with contextlib.suppress(OSError):  # a full disk costs the log, not the pod
                self.file.write(chunk)
        self.tail = (self.tail + chunk)[-_TAIL_BYTES:]
        *lines, rest = (self.unfinished + chunk).split(b"\n")
        self.unfinished = rest[-_TAIL_BYTES:]
        if self.echo is not None:
            for line in lines:
                self.echo(line.decode("utf-8", "replace"))


@dataclass(slots=True)
class Supervisor:
    """One run of a pod. Mutable, event loop only."""

    children: Sequence[Child]
    options: SupervisorOptions
    say: Callable[[str], None]
    now_us: Callable[[], int]
    pids: dict[str, int] = field(default_factory=dict)
    _running: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    _keepers: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _was_ready: bool = False
    _failure: MeshError | None = None

    def stop(self) -> None:
        """End the pod; asked a second time, end it at once."""
        if self._stopping.is_set():
            self._signal(signal.SIGKILL)
        self._stopping.set()

    async def run(self, probe: Probe, announce: Callable[[], None]) -> None:
        """Run until `stop`; `announce` is called once, when `probe` first says ready.

        Raises PodFailed, ChildRefused or PodNotReady after everything has been ended. No process of
        the pod is left when this returns or raises.
        """
        self._turn_logs()
        async with asyncio.TaskGroup() as group:
            for child in self.children:
                self._keepers[child.name] = group.create_task(self._keep(child), name=child.name)
            group.create_task(self._await_ready(probe, announce), name="ready")
            await self._stopping.wait()
            await self._end_all()
        if self._failure is not None:
            raise self._failure

    async def _keep(self, child: Child) -> None:
        history = History()
        while not self._stopping.is_set():
            status, words = await self._run_once(child)
            if self._stopping.is_set():
                return
            if status != 0:
                history = history.failed(self.now_us(), self.options.policy)
            decision = decide(
                self.options.policy,
                history,
                exit_status=status,
                is_station=child.is_station,
                was_ready=self._was_ready,
            )
            match decision:
                case Restart(delay_us=delay_us):
                    self.say(f"{child.name}: {ending(status)}; again in {delay_us / 1e6:g} s")
                    await self._pause(delay_us / 1e6)
                case LeaveDown(reason=reason):
                    if status > 0:
                        reason += f"; {words}"
                    self.say(
                        f"{child.name}: {reason}; left down, its experts come from the Station"
                    )
                    return
                case StopPod(reason=reason, exit_status=exit_status):
                    self._fail(child, reason, exit_status, words)
                    return
                case _:
                    assert_never(decision)

    async def _run_once(self, child: Child) -> tuple[int, str]:
        """Start, collect output, wait: (exit status, what it said last)."""
        try:
            process = await self._start(child)
        except OSError as error:  # the host is out of memory or processes: like a failed start
            return EXIT_FAILED, f"cannot start {child.argv[0]}: {error.strerror}"
        self._running[child.name] = process
        self.pids[child.name] = process.pid
        if self._stopping.is_set():
            process.terminate()
        try:
            with self._log_file(child) as file:
                echo = self.options.echo
                output = _Output(file, None if echo is None else partial(echo, child.name))
                await self._collect(process, output)
            return await process.wait(), last_words(output.tail)
        finally:
            del self._running[child.name]
            if process.returncode is None:  # this task was cancelled
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    async def _start(self, child: Child) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *child.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(self.options.environ),
            # the terminal's Ctrl-C is for the supervisor, which ends the pod in order
            process_group=0,
        )

    def _turn_logs(self) -> None:
        """Keep the last run's logs, and no older ones."""
        logs = self.options.logs
        try:
            logs.mkdir(parents=True, exist_ok=True)
            for child in self.children:
                log = logs / f"{child.name}.log"
                if log.exists():
                    log.replace(log.with_suffix(".previous.log"))
        except OSError as error:
            raise ConfigError(
                f"cannot keep logs in {logs}: {error.strerror}; make it a writable folder"
            ) from error

    def _log_file(self, child: Child) -> AbstractContextManager[FileIO | None]:
        """The child's log; None, said once per start, when a running pod lost its folder."""
        logs = self.options.logs
        try:
            logs.mkdir(parents=True, exist_ok=True)
            # no buffer: what a full disk refused must not come back as an error of `close`
            return (logs / f"{child.name}.log").open("ab", buffering=0)
        except OSError as error:
            self.say(f"{child.name}: runs without a log: {logs}: {error.strerror}")
            return contextlib.nullcontext()

    async def _collect(self, process: asyncio.subprocess.Process, output: _Output) -> None:
        stream = process.stdout
        assert stream is not None, "started with a pipe"
        while chunk := await stream.read(65_536):
            output.add(chunk)

    async def _await_ready(self, probe: Probe, announce: Callable[[], None]) -> None:
        limit_us = self.now_us() + round(self.options.ready_s * 1e6)
        while not self._stopping.is_set():
            ready, reason = await probe()
            if self._stopping.is_set():
                return
            if ready:
                self._was_ready = True
                announce()
                return
            if self.now_us() > limit_us:
                self._failure = PodNotReady(
                    f"the pod is not ready after {self.options.ready_s:g} s: {reason}; "
                    f"see the logs in {self.options.logs}"
                )
                self._stopping.set()
                return
            await self._pause(PROBE_S)

    def _fail(self, child: Child, reason: str, exit_status: int, words: str) -> None:
        log = self.options.logs / f"{child.name}.log"
        if exit_status == EXIT_CONFIG:
            self._failure = ChildRefused(f"{child.name}: {words}")
        elif exit_status != 0:
            self._failure = PodFailed(f"{child.name} ended ({reason}): {words}; its log is {log}")
        self._stopping.set()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _end_all(self) -> None:
        """All at once: each process ends in any order of the others; then by force."""
        for number, limit_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, KILL_S)):
            self._signal(number)
            await asyncio.wait(self._keepers.values(), timeout=limit_s)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
