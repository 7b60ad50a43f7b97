"""The model thread: runs lanes, and waits for rows without the interpreter lock.

Theory. One thread owns the model, the places and every ring. Lanes are generators; while one waits
for rows another uses the model; when all wait, the thread sleeps in the fabric's native wait until
a lane's bells have all rung, the earliest deadline, or an interrupt. The event loop is on no
layer's path: it sends commands in (start, cancel, attach, detach, stop) and gets tokens out.
However the thread ends, every lane it was ever given hears of it, those sent too late included.
Decisions are the lanes' and the expert path's; this file only schedules.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final, TypeAlias, assert_never

import torch

from shared.core.errors import MeshError, RequestRefused
from shared.io.fabric import Fabric
from station.channel import NodeChannel
from station.lane import Lane
from station.places import Places

IDLE_WAIT_US: Final = 1_000_000
RETRY_AFTER_S: Final = 5  # what a client is told that meets a Station about to restart


@dataclass(frozen=True, slots=True)
class Start:
    """Run a lane; `done` is called once with None or the error that ended it."""

    lane: Lane
    done: Callable[[MeshError | None], None]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody listens to this request any more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Attach:
    """Dispatch to this lease from now on."""

    channel: NodeChannel


@dataclass(frozen=True, slots=True)
class Detach:
    """Fence a lease; its layers in flight are settled by the policy."""

    place: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread; running lanes end with an error."""


Command: TypeAlias = Start | Cancel | Attach | Detach | Stop


@dataclass(slots=True, eq=False)
class _Running:
    lane: Lane
    done: Callable[[MeshError | None], None]


class Engine:
    """Owner of the model thread."""

    def __init__(
        self,
        *,
        fabric: Fabric,
        places: Places,
        now_us: Callable[[], int],
        on_bug: Callable[[str, BaseException], None],
        torch_threads: int,
    ) -> None:
        """`on_bug` hears of errors that no rule explains; they end one request, not the pod."""
        self._fabric = fabric
        self._places = places
        self._now_us = now_us
        self._on_bug = on_bug
        self._torch_threads = torch_threads
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._running: deque[_Running] = deque()
        self._ending = threading.Lock()  # between the last command taken and the end
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="k3-model", daemon=True)
        self.progress = 0  # resumes of lanes; moves whenever work moves
        self.active = 0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def send(self, command: Command) -> None:
        """Queue a command and wake the thread; callable from any thread.

        The queue is as long as the callers' own bounds: admission limits requests, leases limit
        attachments. After the thread's end a command is answered here and now.
        """
        with self._ending:
            if not self._ended:
                self._commands.put(command)
                self._fabric.interrupt()
                return
        _refuse(command)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; False when it did not in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            torch.set_num_threads(self._torch_threads)
            with torch.inference_mode():
                while self._obey():
                    due = self._due()
                    if due is None:
                        self._wait()
                    else:
                        self._resume(due)
        except Exception as error:  # noqa: BLE001 - supervision point: the thread ends, and says so
            self._on_bug("", error)
        finally:
            self._close()

    def _close(self) -> None:
        with self._ending:
            self._ended = True
        for running in list(self._running):
            self._end(running, _stopping())
        while not self._commands.empty():
            _refuse(self._commands.get_nowait())
        self._places.close()

    def _obey(self) -> bool:
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return True
            match command:
                case Start(lane=lane, done=done):
                    self._running.append(_Running(lane, done))
                case Cancel(request_id=request_id):
                    for running in list(self._running):
                        if running.lane.request.request_id == request_id:
                            self._end(running, None)
                case Attach(channel=channel):
                    self._places.attach(channel)
                case Detach(place=place, epoch=epoch):
                    current = self._places.channel(place)
                    if current is not None and current.epoch == epoch:
                        self._places.detach(place)
                case Stop():
                    return False
                case _:
                    assert_never(command)
            self.active = len(self._running)

    def _due(self) -> _Running | None:
        """The next lane that can go on, in turn."""
        now_us = self._now_us()
        for _ in range(len(self._running)):
            running = self._running[0]
            self._running.rotate(-1)
            if self._can_go_on(running.lane, now_us):
                return running
        return None

    def _can_go_on(self, lane: Lane, now_us: int) -> bool:
        waiting = lane.waiting
        if waiting is None or now_us >= waiting.deadline_us:
            return True
        lost = any(not self._places.is_open(ticket.channel) for ticket in waiting.tickets)
        return lost or all(ticket.channel.has_rung(ticket) for ticket in waiting.tickets)

    def _wait(self) -> None:
        waits = [running.lane.waiting for running in self._running if running.lane.waiting]
        timeout_us = IDLE_WAIT_US
        if waits:
            timeout_us = max(0, min(wait.deadline_us for wait in waits) - self._now_us())
        groups = [[ticket.watch for ticket in wait.tickets] for wait in waits]
        self._fabric.wait_complete(groups, timeout_us=timeout_us)

    def _resume(self, running: _Running) -> None:
        self.progress += 1
        lane = running.lane
        try:
            lane.waiting = next(lane.walk)
        except StopIteration:
            self._end(running, None)
        except MeshError as error:
            self._end(running, error)
        except Exception as error:  # noqa: BLE001 - supervision point: one request ends, the pod lives
            self._on_bug(lane.request.request_id, error)
            self._end(running, MeshError(f"{lane.request.request_id}: internal error, see the log"))

    def _end(self, running: _Running, error: MeshError | None) -> None:
        self._running.remove(running)
        self.active = len(self._running)
        try:
            running.lane.walk.close()
        except Exception as bug:  # noqa: BLE001 - supervision point: as in _resume
            self._on_bug(running.lane.request.request_id, bug)
        running.done(error)


def _stopping() -> RequestRefused:
    return RequestRefused("the Station is stopping", retry_after_s=RETRY_AFTER_S)


def _refuse(command: Command) -> None:
    """Answer a command that the thread will not see any more."""
    match command:
        case Start(done=done):
            done(_stopping())
        case Attach(channel=channel):
            channel.close()
        case Cancel() | Detach() | Stop():
            pass
        case _:
            assert_never(command)
