"""The supervisor with real processes: restarts, endings, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from services.pod.children import Child
from services.pod.supervision import RestartPolicy
from services.pod.supervisor import (
    ChildRefused,
    PodFailed,
    PodNotReady,
    Supervisor,
    SupervisorOptions,
)
from shared.core.errors import EXIT_CONFIG, ConfigError

SERVE = "trap 'exit 0' TERM; echo up; while :; do sleep 0.05; done"
STUBBORN = "trap '' TERM; echo up; while :; do sleep 0.05; done"


FAST = RestartPolicy(delay_us=10_000)


@dataclass
class Pod:
    """A supervisor over shell scripts, and what it said."""

    logs: Path
    scripts: dict[str, str]
    policy: RestartPolicy = FAST
    ready_s: float = 10.0
    lines: list[str] = field(default_factory=list)
    echoed: list[tuple[str, str]] = field(default_factory=list)
    announced: int = 0
    ready: bool = True

    def __post_init__(self) -> None:
        """Build the supervisor."""
        self.supervisor = Supervisor(
            children=[
                Child(name, ("/bin/sh", "-c", script), name == "station")
                for name, script in self.scripts.items()
            ],
            options=SupervisorOptions(
                policy=self.policy,
                environ=os.environ,
                logs=self.logs,
                echo=lambda name, line: self.echoed.append((name, line)),
                ready_s=self.ready_s,
            ),
            say=self.lines.append,
            now_us=lambda: time.monotonic_ns() // 1000,
        )

    async def probe(self) -> tuple[bool, str]:
        """Ready once every process has said that it is up."""
        up = {name for name, line in self.echoed if line == "up"}
        return self.ready and up == set(self.scripts), "waiting for spark7"

    def announce(self) -> None:
        """The pod is ready."""
        self.announced += 1

    async def run_until(self, condition: Callable[[], bool]) -> None:
        """Run; stop once `condition` holds."""
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            run = group.create_task(self.supervisor.run(self.probe, self.announce))
            while not condition() and not run.done():  # noqa: ASYNC110 - processes tell no event
                await asyncio.sleep(0.01)
            self.supervisor.stop()

    async def run_to_its_end(self) -> None:
        """Run until the supervisor ends by itself."""
        async with asyncio.timeout(20):
            await self.supervisor.run(self.probe, self.announce)

    def starts(self, name: str) -> int:
        """How often a process came up."""
        return self.echoed.count((name, "up"))

    def assert_nothing_left(self) -> None:
        """Every process that was ever started is gone and reaped."""
        assert set(self.supervisor.pids) == set(self.scripts)
        for pid in self.supervisor.pids.values():
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


@pytest.mark.asyncio
async def test_starts_announces_once_and_stops_everything(tmp_path: Path) -> None:
    """A clean run: ready is announced once, all processes end, their output is in the logs."""
    pod = Pod(tmp_path, {"station": SERVE, "spark0": SERVE})

    await pod.run_until(lambda: pod.announced > 0)

    assert pod.announced == 1
    pod.assert_nothing_left()
    assert (tmp_path / "spark0.log").read_text() == "up\n"


@pytest.mark.asyncio
@pytest.mark.parametrize("victim", ["station", "spark0"])
async def test_a_killed_process_comes_back_alone(tmp_path: Path, victim: str) -> None:
    """Case L10: the others keep their process ids."""
    pod = Pod(tmp_path, {"station": SERVE, "spark0": SERVE, "rtx": SERVE})
    before: dict[str, int] = {}

    def came_back() -> bool:
        if pod.announced and not before:
            before.update(pod.supervisor.pids)
            os.kill(before[victim], signal.SIGKILL)
        return pod.starts(victim) == 2

    await pod.run_until(came_back)

    assert f"{victim}: killed by SIGKILL; again in 0.01 s" in pod.lines
    changed = {name for name in before if before[name] != pod.supervisor.pids[name]}
    assert changed == {victim}
    pod.assert_nothing_left()


@pytest.mark.asyncio
async def test_a_refused_setting_ends_the_pod_with_the_childs_words(tmp_path: Path) -> None:
    """Exit 78: never retried, nothing left running, the child's own error is what is reported."""
    line = 'level=error event=node_failed code=bank_invalid error="b.k3bank: truncated: copy it"'
    pod = Pod(tmp_path, {"station": SERVE, "spark0": f"echo noise; echo '{line}'; exit 78"})

    with pytest.raises(ChildRefused, match=r"spark0: bank_invalid: b\.k3bank: truncated") as caught:
        await pod.run_to_its_end()

    assert caught.value.exit_status == EXIT_CONFIG
    assert pod.announced == 0
    pod.assert_nothing_left()


@pytest.mark.asyncio
async def test_a_process_that_keeps_failing_ends_a_pod_that_was_never_ready(tmp_path: Path) -> None:
    """Bounded restarts; the error names the process, its last words and its log."""
    policy = RestartPolicy(delay_us=1000, failures_max=2)
    pod = Pod(tmp_path, {"station": SERVE, "rtx": "echo up; echo no memory; exit 3"}, policy)
    pod.ready = False

    with pytest.raises(
        PodFailed, match=r"rtx ended \(exit status 3; 3 failures.*no memory.*rtx.log"
    ):
        await pod.run_to_its_end()

    assert pod.starts("rtx") == 3
    pod.assert_nothing_left()


@pytest.mark.asyncio
async def test_a_ready_pod_goes_on_without_a_node(tmp_path: Path) -> None:
    """`--restart never`: the loss is said once, the pod goes on."""
    pod = Pod(tmp_path, {"station": SERVE, "spark0": SERVE}, RestartPolicy(enabled=False))
    killed: list[int] = []

    def left_down() -> bool:
        if pod.announced and not killed:
            killed.append(pod.supervisor.pids["spark0"])
            os.kill(killed[0], signal.SIGKILL)
        return any("left down" in line for line in pod.lines)

    await pod.run_until(left_down)

    assert pod.starts("station") == 1
    assert pod.starts("spark0") == 1
    pod.assert_nothing_left()


@pytest.mark.asyncio
async def test_readiness_is_bounded_and_names_the_culprit(tmp_path: Path) -> None:
    """A pod that never gets ready ends with the Station's own reason."""
    pod = Pod(tmp_path, {"station": SERVE}, ready_s=0.3)
    pod.ready = False

    with pytest.raises(PodNotReady, match=r"not ready after 0.3 s: waiting for spark7"):
        await pod.run_to_its_end()

    pod.assert_nothing_left()


@pytest.mark.asyncio
async def test_a_second_stop_ends_a_stubborn_process_at_once(tmp_path: Path) -> None:
    """Ctrl-C twice does not wait for the grace time."""
    pod = Pod(tmp_path, {"station": STUBBORN, "spark0": SERVE})
    started = time.monotonic()

    await pod.run_until(lambda: pod.announced > 0 and pod.supervisor.stop() is None)

    assert time.monotonic() - started < 3
    pod.assert_nothing_left()


@pytest.mark.asyncio
async def test_stopping_while_a_process_waits_for_its_restart(tmp_path: Path) -> None:
    """A backoff of an hour does not delay the end."""
    policy = RestartPolicy(delay_us=3_600_000_000, delay_us_max=3_600_000_000)
    pod = Pod(tmp_path, {"station": SERVE, "spark0": "echo up; exit 1"}, policy)

    await pod.run_until(lambda: any("again in 3600 s" in line for line in pod.lines))

    pod.assert_nothing_left()


@pytest.mark.asyncio
async def test_the_last_runs_logs_are_kept(tmp_path: Path) -> None:
    """A new run starts new logs and keeps exactly one older set."""
    for turn in ("first", "second", "third"):
        pod = Pod(tmp_path, {"station": f"echo {turn}; {SERVE}"})
        await pod.run_until(lambda pod=pod: pod.announced > 0)

    assert (tmp_path / "station.log").read_text() == "third\nup\n"
    assert (tmp_path / "station.previous.log").read_text() == "second\nup\n"
    assert len(os.listdir(tmp_path)) == 2


@pytest.mark.asyncio
async def test_a_lost_log_folder_does_not_stop_a_pod(tmp_path: Path) -> None:
    """Deleted, it is made again; where it cannot be made, the process runs without a log."""
    logs = tmp_path / "state" / "logs"
    pod = Pod(logs, {"station": SERVE, "spark0": SERVE})
    starts: list[int] = []

    def came_back_twice() -> bool:
        if pod.announced and len(starts) < 2 and pod.supervisor.pids["spark0"] not in starts:
            starts.append(pod.supervisor.pids["spark0"])
            shutil.rmtree(tmp_path / "state")
            if len(starts) == 2:
                (tmp_path / "state").touch()
            os.kill(starts[-1], signal.SIGKILL)
        return len(starts) == 2 and any("runs without a log" in line for line in pod.lines)

    await pod.run_until(came_back_twice)

    pod.assert_nothing_left()


@pytest.mark.asyncio
async def test_a_log_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    """Before anything is started."""
    (tmp_path / "logs").touch()
    pod = Pod(tmp_path / "logs", {"station": SERVE})

    with pytest.raises(ConfigError, match=r"cannot keep logs in .*: File exists"):
        await pod.run_to_its_end()

    assert not pod.supervisor.pids


@pytest.mark.asyncio
async def test_a_full_disk_costs_the_log_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither writing nor closing the log ends the pod: /dev/full refuses every byte."""
    (tmp_path / "spark0.log").symlink_to("/dev/full")
    monkeypatch.setattr(Supervisor, "_turn_logs", lambda _: None)
    pod = Pod(tmp_path, {"station": SERVE, "spark0": SERVE})

    await pod.run_until(lambda: pod.announced > 0)

    pod.assert_nothing_left()


@pytest.mark.asyncio
async def test_a_process_that_cannot_be_started_counts_as_failed(tmp_path: Path) -> None:
    """One error that names the program, instead of a broken supervisor."""
    pod = Pod(tmp_path, {"station": SERVE}, RestartPolicy(enabled=False))
    pod.supervisor.children = [Child("station", ("/nowhere/python",), is_station=True)]

    with pytest.raises(PodFailed, match="cannot start /nowhere/python: No such file"):
        await pod.run_to_its_end()
