"""`k3 up` as real processes over a tiny checkpoint: refusals, endings, and the bench on top."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from services import cli
from services.bench.running_pod import running_pod
from services.pod.files import exclusive
from services.pod.supervisor import PodFailed
from tests.support.pod import Pod, running
from tests.support.tiny_checkpoint import write_tiny_checkpoint

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a vocabulary of bytes."""
    folder = write_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), seed=1, experts=16, vocab=512, context=2048
    )
    ranks = (base64.b64encode(bytes([value])) + b" %d" % value for value in range(256))
    (folder / "tiktoken.model").write_bytes(b"\n".join(ranks))
    return folder


def refused(state: Path, *options: str) -> str:
    """stderr of a `k3 up` that must end with status 78, in one line of error."""
    answer = subprocess.run(
        [sys.executable, "-m", "services.cli", "up", "--state-dir", str(state), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert answer.returncode == 78, answer.stderr
    assert answer.stdout == ""
    assert "Traceback" not in answer.stderr
    errors = [line for line in answer.stderr.splitlines() if line.startswith("k3: error[")]
    assert len(errors) == 1, answer.stderr
    assert answer.stderr.splitlines()[-1] == errors[0]
    return errors[0]


def left_behind(state: Path) -> set[str]:
    """What a refused start left in its state folder, but for the lock."""
    return {path.name for path in state.rglob("*")} - {"lock"}


def test_a_taken_port_is_refused_before_anything_is_made(tmp_path: Path, checkpoint: Path) -> None:
    """One line naming the address and the remedy; no state folder, no process."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        error = refused(tmp_path / "state", "--port", port, "--checkpoint", str(checkpoint))

    assert error.startswith("k3: error[address_in_use]")
    assert f"127.0.0.1:{port} is in use" in error
    assert not (tmp_path / "state").exists()


def test_two_pods_cannot_share_a_state_folder(tmp_path: Path, checkpoint: Path) -> None:
    """The second is told who has it."""
    with exclusive(tmp_path):
        error = refused(tmp_path, "--port", "0", "--checkpoint", str(checkpoint))

    assert f"in use by process {os.getpid()}" in error
    assert left_behind(tmp_path) == set()


def test_a_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    """With the path and the option."""
    missing = tmp_path / "nothing"

    error = refused(tmp_path / "state", "--port", "0", "--checkpoint", str(missing))

    assert error.startswith("k3: error[checkpoint_invalid]")
    assert str(missing) in error
    assert left_behind(tmp_path / "state") == set()


def test_a_path_that_no_settings_file_can_hold_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    """File names are bytes, settings are UTF-8."""
    state = tmp_path / os.fsdecode(b"st\xff")

    error = refused(state, "--port", "0", "--checkpoint", str(checkpoint))

    assert "is not UTF-8" in error
    assert left_behind(state) == set()


@pytest.mark.parametrize("damage", ["truncated", "foreign"])
def test_a_damaged_or_foreign_checkpoint_is_refused(
    tmp_path: Path, checkpoint: Path, damage: str
) -> None:
    """Nothing is built from it and nothing is started."""
    copy = tmp_path / "model"
    shutil.copytree(checkpoint, copy)
    if damage == "truncated":
        shard = sorted(copy.glob("*.safetensors"))[2]
        os.truncate(shard, shard.stat().st_size // 2)
        culprit = shard.name
    else:
        (copy / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
        culprit = "config.json"

    error = refused(tmp_path / "state", "--port", "0", "--checkpoint", str(copy))

    assert error.startswith("k3: error[checkpoint_invalid]")
    assert culprit in error
    assert left_behind(tmp_path / "state") == set()


def test_a_child_that_refuses_ends_the_pod_with_its_error(tmp_path: Path, checkpoint: Path) -> None:
    """Only the Station needs the vocabulary: its exit 78 stops the nodes and is the pod's own."""
    copy = tmp_path / "model"
    shutil.copytree(checkpoint, copy)
    (copy / "tiktoken.model").unlink()
    state = tmp_path / "state"

    error = refused(state, "--port", "0", "--checkpoint", str(copy), "--sparks", "1")

    assert "station" in error
    assert "tiktoken.model" in error
    assert processes_of(state) == set()


def processes_of(state: Path) -> set[int]:
    """Every process whose command line names the state folder."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(state).encode() in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
        except OSError:
            continue
    return found


def wait_until_gone(state: Path, seconds: float) -> None:
    """Poll until no process of the pod is left."""
    deadline = time.monotonic() + seconds
    while processes_of(state):
        assert time.monotonic() < deadline, processes_of(state)
        time.sleep(0.02)


def test_the_children_of_a_killed_pod_end(tmp_path: Path, checkpoint: Path) -> None:
    """SIGKILL of `k3 up` itself leaves no daemon behind."""
    with running(tmp_path, "--sparks", "1", checkpoint=checkpoint) as pod:
        children = pod.children()
        assert len(children) == 5

        pod.process.kill()

        wait_until_gone(tmp_path, 10)


def test_a_pod_stops_cleanly_and_starts_again_with_what_it_has(
    tmp_path: Path, checkpoint: Path
) -> None:
    """Status 0 within 5 s, nothing running, nothing half written; keys and banks serve again."""
    tokens: list[list[int]] = []
    banks: list[dict[str, int]] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        with running(tmp_path, "--sparks", "1", checkpoint=checkpoint) as pod:
            assert set(pod.children()) == {"station", "grace", "rtx", "spark0", "banks"}
            tokens.append(pod.tokens("Hi", max_tokens=6))
            banks.append({p.name: p.stat().st_ino for p in tmp_path.glob("banks/*")})
            started = time.monotonic()

            pod.process.send_signal(number)
            status = pod.process.wait(10)

            assert status == 0
            assert time.monotonic() - started < 5
        assert processes_of(tmp_path) == set()
        assert not list(tmp_path.rglob("*.partial"))
    assert tokens[0] == tokens[1]
    assert banks[0] == banks[1]
    assert set(banks[0]) == {"grace.k3bank", "rtx.k3bank", "spark0.k3bank"}


def test_a_dead_station_comes_back_and_the_nodes_rejoin(tmp_path: Path, checkpoint: Path) -> None:
    """Case L18: the nodes keep their processes, and with them their banks; epochs move up."""

    def is_back(pod: Pod) -> bool:
        try:
            return pod.client.get("/readyz").is_success
        except httpx.TransportError:
            return False

    with running(tmp_path, "--sparks", "1", checkpoint=checkpoint) as pod:
        before, epochs = pod.children(), [node["epoch"] for node in pod.status()["nodes"]]
        tokens = pod.tokens("Hi", max_tokens=6)

        os.kill(before["station"], signal.SIGKILL)
        deadline = time.monotonic() + 30
        while pod.children().get("station") in (None, before["station"]) or not is_back(pod):
            assert time.monotonic() < deadline
            time.sleep(0.05)

        after = pod.children()
        assert {name for name in before if before[name] != after[name]} == {"station"}
        assert pod.tokens("Hi", max_tokens=6) == tokens
        renewed = [node["epoch"] for node in pod.status()["nodes"]]
        assert [new > old for new, old in zip(renewed, epochs, strict=True)] == [
            False, True, True, True,
        ]  # fmt: skip


def test_the_bench_measures_a_pod_of_its_own(tmp_path: Path, checkpoint: Path) -> None:
    """`k3 bench pod --json`: figures of a real pod, none of them zero, nothing left running."""
    answer = subprocess.run(
        [
            *(sys.executable, "-m", "services.cli", "bench", "pod", "--json", "--check"),
            *("--sparks", "1", "--runs", "2", "--tokens", "16", "--checkpoint", str(checkpoint)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )

    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    figures = {figure["name"]: figure["value"] for figure in report["figures"]}
    assert report["bench"] == "pod"
    assert report["machine"]["cores"] >= 1
    assert report["skipped"] == {}
    assert {"pod.tokens_per_s", "pod.layer.serial_us", "pod.layer.wait_us"} <= set(figures)
    assert all(value > 0 for value in figures.values()), figures
    assert processes_of(tmp_path) == set()
    assert list(tmp_path.iterdir()) == []


def test_a_bench_whose_pod_does_not_start_says_so(tmp_path: Path) -> None:
    """The pod's own error is on stderr; the bench names its status."""
    options = ["--checkpoint", str(tmp_path / "nothing")]
    with pytest.raises(PodFailed, match="ended with status 78"), running_pod(tmp_path, options):
        pytest.fail("entered")


def test_pod_init_lays_out_a_host_and_says_what_is_next(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`k3 pod init --root DIR`: every unit it names has its settings, key and bank."""
    command = ["pod", "init", "--root", str(tmp_path), "--checkpoint", str(checkpoint)]

    assert cli.run([*command, "--sparks", "1"]) == 0

    last = capsys.readouterr().out.splitlines()[-1]
    units = ["k3-station", "k3-grace", "k3-rtx", "k3-spark@spark0"]
    assert [unit for unit in units if f" {unit}.service" not in last] == []
    etc, banks = tmp_path / "etc/k3", tmp_path / "var/lib/k3/banks"
    for tier, name in (("grace", "grace"), ("rtx", "rtx"), ("spark", "spark0")):
        assert (etc / tier / f"{name}.toml").is_file()
        assert (etc / "keys" / f"{name}.key_secret").is_file()
        assert (banks / f"{name}.k3bank").is_file()
