"""Small parts of the pod tools: atomic files, the lock, TOML, ports, last words, default places."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.pod import toml
from services.pod.files import exclusive, write_atomic
from services.pod.last_words import last_words
from services.pod.paths import default_state_dir
from services.pod.ports import reserve
from services.pod.up import stop_signals
from shared.core.errors import AddressInUse, ConfigError

# every character that a Python string of a file name or a setting can hold, but lone surrogates
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def test_write_atomic_writes_whole_files_and_only_changes(tmp_path: Path) -> None:
    """Equal bytes are not written again: readers and backups see no change."""
    path = tmp_path / "a" / "b.toml"

    assert write_atomic(path, b"one", mode=0o600) is True
    before = path.stat()
    assert write_atomic(path, b"one", mode=0o600) is False
    after = path.stat()  # its time of access may change: it was read
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert write_atomic(path, b"two") is True

    assert path.read_bytes() == b"two"
    assert before.st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["b.toml"]


def test_write_atomic_leaves_nothing_half_written(tmp_path: Path) -> None:
    """When the rename fails the old content stays and the partial file goes."""
    target = tmp_path / "file"
    target.mkdir()
    (target / "inside").touch()

    with pytest.raises(ConfigError, match="cannot write"):
        write_atomic(target, b"data")

    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_one_process_per_state_folder(tmp_path: Path) -> None:
    """A second holder is refused with the first one's pid; the lock ends with its holder."""
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from services.pod.files import exclusive\n"
            "with exclusive(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()",
            str(tmp_path / "state"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"

        with (
            pytest.raises(ConfigError, match=rf"in use by process {holder.pid}.*--state-dir"),
            exclusive(tmp_path / "state"),
        ):
            pytest.fail("entered")
        holder.kill()

    with exclusive(tmp_path / "state"):
        assert (tmp_path / "state" / "lock").read_text() == f"{os.getpid()}\n"


def test_a_full_disk_costs_the_holders_name_not_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is the kernel's, and needs no byte of the disk."""

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)

    with (
        exclusive(tmp_path),
        pytest.raises(ConfigError, match="in use by process"),
        exclusive(tmp_path),
    ):
        pytest.fail("entered twice")


@given(
    values=st.dictionaries(
        st.from_regex(r"[a-z_]{1,12}", fullmatch=True),
        TEXT | st.integers(0) | st.booleans() | st.lists(TEXT),
    )
)
def test_toml_reads_back(values: dict[str, toml.Value]) -> None:
    """Whatever text a path or name holds, the standard library reads the same values."""
    text = toml.dumps(values, title="by k3")

    # TOML's own numbers end at 64 bits; tomllib takes any, which is all we need
    assert tomllib.loads(text) == values
    assert list(tomllib.loads(text)) == list(values)


def test_a_reserved_port_can_be_listened_on_by_others_alone(tmp_path: Path) -> None:
    """The Station listens beside the reservation; a second reservation is refused from then on."""
    with ExitStack() as stack:
        port = reserve(stack, 0, option="--port")
        for _restart in range(2):
            with socket.socket() as station:
                station.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                station.bind(("127.0.0.1", port))
                station.listen()

                with ExitStack() as other, pytest.raises(AddressInUse, match=rf":{port} .*--port"):
                    reserve(other, port, option="--port")
                socket.create_connection(("127.0.0.1", port), timeout=2).close()


def test_a_port_that_may_not_be_bound_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything but "in use" names the reason of the system."""

    def refuse(self: socket.socket, address: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with ExitStack() as stack, pytest.raises(ConfigError, match="Permission denied") as caught:
        reserve(stack, 80, option="--port")
    assert not isinstance(caught.value, AddressInUse)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (b"", "it printed nothing"),
        (b"a\nlast line  \n\n", "last line"),
        (
            b'x code=bank_invalid error="no \\"bank\\" at /x"\nnoise\n',
            'bank_invalid: no "bank" at /x',
        ),
        (b"event=e node=a code=key_refused node_error=1 error=short\n", "key_refused: short"),
        (b'code=first error="1"\ncode=second error="2"\n', "second: 2"),
        (b"\xff\xfe broken", "\ufffd\ufffd broken"),
        (b'code=cut error="never closed', 'cut: "never'),
    ],
)
def test_last_words(output: bytes, words: str) -> None:
    """The error of the closing log line, else the last line there is."""
    assert last_words(output) == words


@pytest.mark.parametrize(
    ("value", "base"), [("/x/state", "/x/state"), ("relative", None), ("", None)]
)
def test_default_state_folder(value: str, base: str | None) -> None:
    """$XDG_STATE_HOME when it is absolute, else ~/.local/state."""
    expected = Path(base) if base else Path.home() / ".local" / "state"

    assert default_state_dir({"XDG_STATE_HOME": value}) == expected / "k3" / "embedded"
    assert default_state_dir({}) == Path.home() / ".local" / "state" / "k3" / "embedded"


def test_a_user_without_a_home_is_told_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user id that no passwd file knows, and no HOME."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54_321_012)

    with pytest.raises(ConfigError, match="set HOME or give --state-dir"):
        default_state_dir({})


@pytest.mark.parametrize(("handler", "ends"), [(signal.SIG_IGN, False), (signal.SIG_DFL, True)])
def test_a_closed_terminal_ends_a_pod_unless_nohup(handler: signal.Handlers, ends: bool) -> None:
    """`nohup k3 up` asks for SIGHUP to be ignored."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        assert (signal.SIGHUP in stop_signals()) is ends
    finally:
        signal.signal(signal.SIGHUP, before)
