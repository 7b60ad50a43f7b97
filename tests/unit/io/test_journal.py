"""Logging: journald's native protocol over a real socket, other forms on real streams."""

from __future__ import annotations

import io
import json
import os
import pty
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import msgspec
import pytest

from shared.core.errors import ConfigError
from shared.core.wire import RegionDescriptor
from shared.io.journal import LogForm, chosen_form, configure, journal_datagram, logfmt

Read = Callable[[], dict[str, str]]
SECRET = 7_316_204_998_107


@pytest.fixture
def journald(tmp_path: Path) -> Iterator[tuple[Path, Read]]:
    """A datagram socket in journald's place, and a reader that parses one entry by the protocol."""
    path = tmp_path / "journal"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        link.bind(str(path))
        link.settimeout(2)
        yield path, lambda: parse_entry(link.recv(1 << 20))


def parse_entry(data: bytes) -> dict[str, str]:
    """Independent reader of https://systemd.io/JOURNAL_NATIVE_PROTOCOL/."""
    fields: dict[str, str] = {}
    while data:
        line, _, data = data.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            length = int.from_bytes(data[:8], "little")
            value, data = data[8 : 8 + length], data[8 + length :]

            assert data[:1] == b"\n"

            data = data[1:]
        assert name.decode() not in fields
        fields[name.decode()] = value.decode()
    return fields


def journal_logger(path: Path, fallback: TextIO | None = None, **environ: str):
    """A logger factory that is told to write to the journal at `path`."""
    return configure(
        fallback or io.StringIO(),
        {"K3_LOG": "journal", **environ},
        identifier="k3-spark",
        journal_socket=path,
    )


def test_an_event_arrives_with_its_fields(journald: tuple[Path, Read]) -> None:
    """Bound and given values become K3_ fields; MESSAGE reads well; level becomes PRIORITY."""
    path, read = journald
    log = journal_logger(path)(node="spark3")
    log.warning("layer_deadline_exceeded", layer=7, request="r-1", experts=[3, 5])

    assert read() == {
        "MESSAGE": 'layer_deadline_exceeded node=spark3 layer=7 request=r-1 experts="[3, 5]"',
        "PRIORITY": "4",
        "SYSLOG_IDENTIFIER": "k3-spark",
        "K3_EVENT": "layer_deadline_exceeded",
        "K3_NODE": "spark3",
        "K3_LAYER": "7",
        "K3_REQUEST": "r-1",
        "K3_EXPERTS": "[3, 5]",
    }


@pytest.mark.parametrize(
    ("level", "priority"),
    [("critical", "2"), ("error", "3"), ("warning", "4"), ("info", "6"), ("debug", "7")],
)
def test_levels_map_to_syslog_priorities(
    journald: tuple[Path, Read], level: str, priority: str
) -> None:
    """journalctl -p works."""
    path, read = journald
    log = journal_logger(path, K3_LOG_LEVEL="debug")()
    getattr(log, level)("node_ready")

    assert read()["PRIORITY"] == priority


def test_a_value_cannot_forge_a_field(journald: tuple[Path, Read]) -> None:
    """Line breaks travel in the binary form; hostile names are reduced to A-Z, 0-9 and _."""
    path, read = journald
    log = journal_logger(path)()
    log.info("hello", text="a\nPRIORITY=0\n_UID=0", **{"bad name=\n1": "x", "é" * 99: "y"})
    entry = read()

    assert entry["K3_TEXT"] == "a\nPRIORITY=0\n_UID=0"
    assert entry["PRIORITY"] == "6"
    assert entry["K3_BAD_NAME__1"] == "x"
    assert entry["K3_" + "_" * 60] == "y"
    assert "_UID" not in entry


def test_an_exception_is_whole_and_readable(journald: tuple[Path, Read]) -> None:
    """The traceback is part of MESSAGE and a field of its own."""
    path, read = journald
    try:
        int("bad bank")
    except ValueError:
        journal_logger(path)().exception("bank_refused")
    entry = read()

    assert entry["MESSAGE"].startswith("bank_refused\nTraceback")
    assert entry["MESSAGE"].endswith("'bad bank'")
    assert "ValueError: invalid literal" in entry["K3_EXCEPTION"]
    assert entry["PRIORITY"] == "3"


def test_endless_values_are_cut_and_still_arrive(journald: tuple[Path, Read]) -> None:
    """Whatever is logged fits into one datagram; what was cut is said."""
    path, read = journald
    fallback = io.StringIO()
    values = {f"value_{index}": "x" * 100_000 for index in range(100)}
    journal_logger(path, fallback)().info("huge", **values)
    entry = read()

    assert entry["K3_VALUE_0"].startswith("x" * 4096 + "... (")
    assert entry["K3_VALUE_0"].endswith(" bytes cut)")
    assert len([name for name in entry if name.startswith("K3_VALUE")]) == 32
    assert fallback.getvalue() == ""


def test_the_end_of_an_endless_traceback_is_kept() -> None:
    """The last line of a long exception says what happened; the middle may go."""
    stream = io.StringIO()
    error = ValueError("first" + "x" * 100_000 + "last")
    configure(stream, {"K3_LOG": "json"}, identifier="k3")().error("failed", exc_info=error)
    text = json.loads(stream.getvalue())["exception"]

    assert text.startswith("ValueError: first")
    assert text.endswith("last")
    assert "characters cut" in text
    assert len(text) < 20_000


def test_text_that_is_not_unicode_is_logged_anyway(journald: tuple[Path, Read]) -> None:
    """Lone surrogates (file names, argv) cannot make logging fail."""
    path, read = journald
    journal_logger(path)().info("odd", name="bank\udcff")

    assert read()["K3_NAME"] == "bank\\udcff"


def test_without_journald_lines_go_to_the_stream_with_a_priority(tmp_path: Path) -> None:
    """A dead journald loses nothing: each line carries its <N> prefix."""
    fallback = io.StringIO()
    log = journal_logger(tmp_path / "nobody", fallback)(node="spark3")
    log.error("bank_refused", exc_info=ValueError("two\nlines"))

    lines = fallback.getvalue().splitlines()

    assert lines[0] == "<3>bank_refused node=spark3"
    assert lines[1:] == ["<3>ValueError: two", "<3>lines"]


def test_a_stalled_journald_does_not_block(tmp_path: Path) -> None:
    """When journald stops reading, logging goes on to the stream at once."""
    path, fallback = tmp_path / "journal", io.StringIO()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        link.bind(str(path))
        log = journal_logger(path, fallback)()
        for index in range(2000):
            log.info("tick", index=index)

    assert "<6>tick index=1999" in fallback.getvalue()


class Descriptor(msgspec.Struct):
    """A record whose repr shows its rkey, as a careless one would."""

    address: int
    rkey: int


@pytest.mark.parametrize("form", [form.value for form in LogForm])
@pytest.mark.parametrize(
    "value",
    [
        {"rkey": SECRET},
        {"rkeys": [SECRET, SECRET]},
        {"key": SECRET},
        {"secret": str(SECRET)},
        {"Secret-Key": str(SECRET)},
        {"Authorization": f"Bearer {SECRET}"},
        {"ring": {"address": 4096, "rkey": SECRET}},
        {"rings": [{"deep": ({"lkey": SECRET},)}]},
        {"ring": Descriptor(4096, SECRET)},
        {"rings": [Descriptor(4096, SECRET)]},
        {"ring": RegionDescriptor("shm", "/k3", "/k3-wake", 4096, SECRET)},
        {"text": f"headers: {{'authorization': 'Bearer {SECRET}'}}"},
        {"text": f'secret-key = "{SECRET}"'},
        {"exc_info": ValueError(f"cannot map Descriptor(address=1, rkey={SECRET})")},
        {"exc_info": ValueError(f"rkeys=[{SECRET}, {SECRET}] are stale")},
    ],
    ids=repr,
)
def test_no_secret_reaches_a_log(
    journald: tuple[Path, Read], form: str, value: dict[str, object]
) -> None:
    """Checked by value: the secret's digits appear in no form, at no depth, in no exception."""
    path, read = journald
    stream = io.StringIO()
    factory = configure(stream, {"K3_LOG": form}, identifier="k3", journal_socket=path)
    factory().error("ring_registered", **value)
    written = repr(read()) if form == "journal" else stream.getvalue()

    assert "ring_registered" in written
    assert str(SECRET) not in written
    assert "redacted" in written or "RegionDescriptor" in written


def test_public_facts_are_not_redacted(journald: tuple[Path, Read]) -> None:
    """Token counts and public keys stay readable."""
    path, read = journald
    journal_logger(path)().info("key_refused", public_key="abc", tokens=5, monkey=1)
    entry = read()

    assert (entry["K3_PUBLIC_KEY"], entry["K3_TOKENS"], entry["K3_MONKEY"]) == ("abc", "5", "1")


def test_the_stream_that_systemd_connected_means_journal(tmp_path: Path) -> None:
    """JOURNAL_STREAM must name this very stream: an inherited variable with a redirected stderr
    does not count."""
    with (tmp_path / "log").open("w") as stream:
        status = os.fstat(stream.fileno())
        identity = f"{status.st_dev}:{status.st_ino}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
            link.bind(str(tmp_path / "journal"))
            link.settimeout(2)
            for variable in (identity, "1:2"):
                configure(
                    stream,
                    {"JOURNAL_STREAM": variable},
                    identifier="k3",
                    journal_socket=tmp_path / "journal",
                )().info(f"via_{variable == identity}")

            assert parse_entry(link.recv(4096))["K3_EVENT"] == "via_True"

    assert "event=via_False" in (tmp_path / "log").read_text()


def test_a_terminal_gets_the_pretty_form() -> None:
    """On a real pseudo-terminal lines are coloured."""
    leader, follower = pty.openpty()
    with open(follower, "w") as terminal:
        configure(terminal, {}, identifier="k3")().info("hello", node="spark3")
        terminal.flush()
        shown = os.read(leader, 4096).decode()
    os.close(leader)

    assert "\x1b[" in shown
    assert "spark3" in shown


@pytest.mark.parametrize(
    ("environ", "identity", "terminal", "form"),
    [
        ({}, None, False, LogForm.LOGFMT),
        ({}, "1:2", True, LogForm.CONSOLE),
        ({"JOURNAL_STREAM": "1:2"}, "1:2", False, LogForm.JOURNAL),
        ({"JOURNAL_STREAM": "1:3"}, "1:2", False, LogForm.LOGFMT),
        ({"JOURNAL_STREAM": "1:2", "K3_LOG": "json"}, "1:2", False, LogForm.JSON),
    ],
)
def test_the_form_is_chosen_from_the_environment(
    environ: dict[str, str], identity: str | None, terminal: bool, form: LogForm
) -> None:
    """K3_LOG wins, then systemd's stream, then a terminal, else one line each."""
    assert chosen_form(environ, identity, is_terminal=terminal) is form


def test_json_lines_are_json() -> None:
    """One object per line, with time, level and event."""
    stream = io.StringIO()
    configure(stream, {"K3_LOG": "json"}, identifier="k3")(node="spark3").info(
        "a\nb", path=Path("/x")
    )
    line = json.loads(stream.getvalue())

    assert (line["event"], line["level"], line["node"], line["path"]) == (
        "a\nb",
        "info",
        "spark3",
        "/x",
    )
    assert line["time"].endswith("Z")


def test_logfmt_keeps_one_event_on_one_line() -> None:
    """Blanks, quotes, breaks and empty values are quoted, names too."""
    assert logfmt({"a": 1, "b": "x y", "c": "", "d": "1\n2", "e f": "=", "g": 'q"'}) == (
        r'a=1 b="x y" c="" d="1\n2" "e f"="=" g="q\""'
    )


def test_debug_is_off_unless_asked_for() -> None:
    """K3_LOG_LEVEL filters before anything is rendered."""
    for environ, expected in (({}, 0), ({"K3_LOG_LEVEL": "DEBUG"}, 1)):
        stream = io.StringIO()
        configure(stream, environ, identifier="k3")().debug("detail")

        assert stream.getvalue().count("detail") == expected


@pytest.mark.parametrize("environ", [{"K3_LOG": "syslog"}, {"K3_LOG_LEVEL": "loud"}])
def test_an_unknown_setting_is_a_config_error(environ: dict[str, str]) -> None:
    """The variable, its value and the choices are named."""
    with pytest.raises(ConfigError, match=r"K3_LOG.*(syslog|loud).*use one of"):
        configure(io.StringIO(), environ, identifier="k3")


def test_loggers_do_not_share_what_is_bound() -> None:
    """Two loggers of one factory are independent, and nothing global is configured."""
    stream = io.StringIO()
    factory = configure(stream, {}, identifier="k3")
    factory(node="one").info("first")
    factory().info("second")
    first, second = stream.getvalue().splitlines()

    assert "node=one" in first
    assert "node" not in second


def test_a_short_value_is_one_line_of_the_datagram() -> None:
    """The text form is used when there is no line break."""
    assert journal_datagram([("MESSAGE", "hi"), ("K3_X", "a=b")]) == b"MESSAGE=hi\nK3_X=a=b\n"


@pytest.mark.parametrize("form", ["logfmt", "json", "journal"])
@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-"])
def test_a_log_that_cannot_be_written_is_not_the_daemons_end(form: str, redirection: str) -> None:
    """A full disk, a closed stream, and no journal: the lines are lost, the process goes on."""
    code = (
        "import sys; from pathlib import Path; from shared.io.journal import configure\n"
        f"log = configure(sys.stderr, {{'K3_LOG': {form!r}}}, identifier='k3',"
        " journal_socket=Path('/nowhere'))()\n"
        "for _ in range(500): log.error('event', text='long ' * 20)\n"
        "print('alive')"
    )
    answer = subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" -c "$1" {redirection}', sys.executable, code],
        stdout=subprocess.PIPE,
        timeout=30,
    )

    assert (answer.returncode, answer.stdout) == (0, b"alive\n")
