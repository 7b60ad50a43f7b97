"""Log lines: to journald with their fields, to a terminal in colour, elsewhere one line each.

Owns the only set-up of structlog, the mapping to journald's fields and the redaction of secrets.
Must not know which events exist. Nothing global is configured: `configure` returns a factory of
loggers, and `__main__` passes loggers on.

Journald's native protocol: https://systemd.io/JOURNAL_NATIVE_PROTOCOL/.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, Protocol, TextIO, cast

import structlog
from structlog.typing import FilteringBoundLogger, Processor, WrappedLogger

from shared.core.errors import EXIT_FAILED, ConfigError, MeshError

JOURNAL_SOCKET: Final = Path("/run/systemd/journal/socket")
REDACTED: Final = "[redacted]"

_PRIORITIES: Final[Mapping[str, int]] = {  # syslog(3)
    "critical": 2,
    "error": 3,
    "warning": 4,
    "info": 6,
    "debug": 7,
}
_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
_FIELDS_MAX: Final = 32  # 32 values of 4 KiB and a long message fit into one datagram (208 KiB)
_VALUE_BYTES_MAX: Final = 4096
_LONG_VALUE_BYTES_MAX: Final = 32 * 1024
_TEXT_CHARS_MAX: Final = 16 * 1024
_DEPTH_MAX: Final = 6

_SECRET_NAMES: Final = (
    "rkeys?", "lkeys?", "key", "secrets?", "secret_keys?", "private_keys?", "passwords?",
    "api_keys?", "authorization",
)  # fmt: skip
_SECRET_NAME: Final = re.compile("|".join(_SECRET_NAMES), re.IGNORECASE)
_SECRET_IN_TEXT: Final = re.compile(
    r"(?P<name>(?<![A-Za-z0-9_-])(?:" + "|".join(_SECRET_NAMES).replace("_", "[_-]") + r")"
    r"['\"]?\s*[=:]\s*)"
    r"(?:\[[^\]]*\]|\([^)]*\)|\"[^\"]*\"|'[^']*'|bearer\s+\S+|[^\s,;)}\]]+)",
    re.IGNORECASE,
)

EventDict = MutableMapping[str, Any]


class LoggerFactory(Protocol):
    """Makes loggers that all write to one place."""

    def __call__(self, **bound: object) -> FilteringBoundLogger:
        """A logger whose every line carries `bound`, e.g. `node="spark3"`."""


class LogForm(Enum):
    """Where lines go and how they look; the value of K3_LOG that asks for it."""

    JOURNAL = "journal"
    CONSOLE = "console"
    JSON = "json"
    LOGFMT = "logfmt"


def configure(
    stream: TextIO | None,
    environ: Mapping[str, str],
    *,
    identifier: str,
    journal_socket: Path = JOURNAL_SOCKET,
) -> LoggerFactory:
    """Set up logging of a process and return its factory of loggers. Called from `__main__` only.

    K3_LOG names a LogForm; without it lines go to journald when systemd connected `stream` to it,
    to a console when `stream` is a terminal, else out as logfmt. K3_LOG_LEVEL: debug, info
    (default), warning, error, critical. `identifier` becomes SYSLOG_IDENTIFIER. A `stream` of None
    is one that the shell closed. Raises ConfigError for other values.
    """
    if stream is None:
        stream = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    form = chosen_form(environ, _identity_of(stream), is_terminal=stream.isatty())
    level = environ.get("K3_LOG_LEVEL", "info").lower()
    if level not in _LEVELS:
        raise ConfigError(f"K3_LOG_LEVEL is {level!r}: use one of {', '.join(_LEVELS)}")
    sink: WrappedLogger
    if form is LogForm.JOURNAL:
        sink = _JournalSink(identifier, journal_socket, stream)
    else:
        sink = _StreamSink(stream)
    root = structlog.wrap_logger(
        sink,
        processors=_processors(form, colours=stream.isatty()),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        context_class=dict,
    )

    def make(**bound: object) -> FilteringBoundLogger:
        return cast("FilteringBoundLogger", root.bind(**bound))

    return make


def chosen_form(
    environ: Mapping[str, str], stream_identity: str | None, *, is_terminal: bool
) -> LogForm:
    """Which form the environment asks for. `stream_identity` is "device:inode" of the stream."""
    asked = environ.get("K3_LOG", "")
    if asked:
        try:
            return LogForm(asked)
        except ValueError:
            known = ", ".join(form.value for form in LogForm)
            raise ConfigError(f"K3_LOG is {asked!r}: use one of {known}") from None
    if stream_identity is not None and environ.get("JOURNAL_STREAM") == stream_identity:
        return LogForm.JOURNAL
    return LogForm.CONSOLE if is_terminal else LogForm.LOGFMT


def log_failure(group: BaseExceptionGroup[Exception], log: FilteringBoundLogger, event: str) -> int:
    """Log what ended a daemon as one `event`; the exit status.

    One line for an expected end, a traceback only for a bug.
    """
    leaves = list(_leaves(group))
    for leaf in leaves:
        if isinstance(leaf, MeshError):
            log.error(event, code=leaf.code, error=str(leaf))
            return leaf.exit_status
    log.critical(event, code=MeshError.code, error=str(leaves[0]), exc_info=group)
    return EXIT_FAILED


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def redact(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """structlog processor: replace the value of every secret field, at any depth and in text."""
    return {name: _clean(name, value, 0) for name, value in event.items()}


def logfmt(fields: Mapping[str, object]) -> str:
    """`name=value` pairs on one line; values that need it are quoted as JSON strings."""
    return " ".join(f"{_word(str(name))}={_word(_text(value))}" for name, value in fields.items())


def journal_datagram(fields: Sequence[tuple[str, str]]) -> bytes:
    """Encode fields for journald. Values with a newline take the binary form, so none can forge
    another field; names must be valid already. Long values are cut, with a mark."""
    parts = []
    for name, text in fields:
        limit = _LONG_VALUE_BYTES_MAX if name == "MESSAGE" else _VALUE_BYTES_MAX
        value = _cut(text.encode("utf-8", "backslashreplace"), limit)
        head = name.encode("ascii")
        if b"\n" in value:
            parts.append(head + b"\n" + len(value).to_bytes(8, "little") + value + b"\n")
        else:
            parts.append(head + b"=" + value + b"\n")
    return b"".join(parts)


def journal_fields(identifier: str, event: Mapping[str, object]) -> list[tuple[str, str]]:
    """Fields of one log event: MESSAGE, PRIORITY, SYSLOG_IDENTIFIER, K3_EVENT and K3_<NAME>s.

    `event` is a structlog event dict with "event" and "level". Names are reduced to what journald
    accepts; beyond 32 bound values the rest is only in MESSAGE.
    """
    rest = {name: value for name, value in event.items() if name not in ("event", "level")}
    level = str(event.get("level", "info"))
    fields = [
        ("MESSAGE", _message(event)),
        ("PRIORITY", str(_PRIORITIES.get(level, 6))),
        ("SYSLOG_IDENTIFIER", identifier),
        ("K3_EVENT", _text(event.get("event", ""))),
    ]
    for name, value in list(rest.items())[:_FIELDS_MAX]:
        suffix = re.sub(r"[^A-Z0-9_]", "_", str(name).upper())[:60]
        fields.append((f"K3_{suffix}", _text(value)))
    return fields


@dataclass(frozen=True, slots=True)
class _StreamSink:
    """Prints lines. A full disk or a reader that went away costs the line, never the daemon."""

    stream: TextIO

    def emit(self, line: str) -> None:
        """Write one line."""
        with contextlib.suppress(OSError):
            print(line, file=self.stream, flush=True)

    debug = info = warning = warn = error = critical = fatal = exception = msg = emit


@dataclass(frozen=True, slots=True)
class _JournalSink:
    """Sends events to journald; when that fails, prints them with a priority prefix instead."""

    identifier: str
    path: Path
    fallback: TextIO

    def emit(self, /, **event: object) -> None:
        """Write one event. Never blocks on journald and never raises for it."""
        datagram = journal_datagram(journal_fields(self.identifier, event))
        try:
            # A fresh unconnected socket: it survives a restart of journald.
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as link:
                link.sendto(datagram, os.fspath(self.path))
        except OSError:
            priority = _PRIORITIES.get(str(event.get("level", "info")), 6)
            lines = (f"<{priority}>{line}" for line in _message(event).splitlines())
            _StreamSink(self.fallback).emit("\n".join(lines))

    debug = info = warning = warn = error = critical = fatal = exception = msg = emit


def _processors(form: LogForm, *, colours: bool) -> list[Processor]:
    common: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.format_exc_info,
        redact,
    ]
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True, key="time")
    match form:
        case LogForm.JOURNAL:
            return common  # the sink takes the event as keywords; journald stamps it
        case LogForm.CONSOLE:
            console = structlog.dev.ConsoleRenderer(
                colors=colours,
                timestamp_key="time",
                exception_formatter=structlog.dev.plain_traceback,
            )
            return [*common, stamp, console]
        case LogForm.JSON:
            return [*common, stamp, structlog.processors.JSONRenderer(default=str)]
        case LogForm.LOGFMT:
            return [*common, stamp, _render_logfmt]


def _render_logfmt(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    first = {name: event[name] for name in ("time", "level", "event") if name in event}
    return logfmt(first | dict(event))


def _message(event: Mapping[str, object]) -> str:
    """What a person reads in `journalctl`: event, fields, then a traceback if there is one."""
    hidden = ("event", "level", "exception")
    rest = {name: value for name, value in event.items() if name not in hidden}
    head = " ".join(filter(None, (_text(event.get("event", "")), logfmt(rest))))
    return f"{head}\n{event['exception']}" if "exception" in event else head


def _clean(name: str, value: object, depth: int) -> object:
    if _SECRET_NAME.fullmatch(name.replace("-", "_")):
        return REDACTED
    if value is None or isinstance(value, bool | int | float):
        return value
    if depth < _DEPTH_MAX:
        if isinstance(value, Mapping):
            return {str(key): _clean(str(key), item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [_clean("", item, depth + 1) for item in value]
    return _SECRET_IN_TEXT.sub(rf"\g<name>{REDACTED}", _shortened(_text(value)))


def _text(value: object) -> str:
    return value if isinstance(value, str) else str(value)


def _shortened(text: str) -> str:
    """Both ends of an endless text: a traceback says most at its end. Also bounds the search."""
    if len(text) <= _TEXT_CHARS_MAX:
        return text
    half = _TEXT_CHARS_MAX // 2
    return f"{text[:half]}... ({len(text) - 2 * half} characters cut) ...{text[-half:]}"


def _word(text: str) -> str:
    plain = text.isprintable() and not re.search(r"[\s\"=\\]", text)
    return text if plain and text else json.dumps(text)


def _cut(value: bytes, limit: int) -> bytes:
    if len(value) <= limit:
        return value
    return value[:limit] + b"... (%d bytes cut)" % (len(value) - limit)


def _identity_of(stream: TextIO) -> str | None:
    """ "device:inode" as in JOURNAL_STREAM, None for a stream without a file."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):  # io.UnsupportedOperation is both
        return None
    return f"{status.st_dev}:{status.st_ino}"
