"""What the model writes, as channels: reasoning, answer text and tool calls.

Owns the reading of Kimi-K3's output format from token ids. Must not know HTTP, stop strings or how
tokens are made. Control tokens are recognised by id, never by spelling, so text that merely looks
like markup stays text and markup never reaches a text.

The reader is tolerant, because real models are sloppy: a missing `<|sep|>`, a jump from thinking
straight to tools, a missing `<|open|>response`, an answer that ends in `<|close|>response`
while the think channel is still open, a cut in the middle of a tag. It never raises.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeAlias

import msgspec

from station.tokenizer.vocabulary import Tokenizer


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More text of the think channel."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDone:
    """One complete tool call; `arguments` is a JSON object as text, or what the model wrote."""

    name: str
    arguments: str


ReplyEvent: TypeAlias = ReasoningDelta | ContentDelta | ToolCallDone


class _Channel(Enum):
    """Where plain text goes."""

    THINK = auto()
    BETWEEN = auto()  # thinking is closed, the answer is not yet open
    RESPONSE = auto()
    TOOLS = auto()
    AFTER = auto()  # the answer is closed; text here belongs to nothing


class _Mode(Enum):
    """What plain bytes are part of."""

    TEXT = auto()
    OPENING = auto()
    CLOSING = auto()


_BARE_TAGS = (b"think", b"response", b"tools")  # these open without attributes
_ATTRIBUTED_TAGS = (b"call", b"argument", b"json", b"message")
_TAG_BYTES_MAX = 4096
_UNKNOWN_TAG_BYTES_MAX = 64  # longer than that it is not a tag but text after a stray marker
_ATTRIBUTE = re.compile(r' ([^\s="]+)="([^"]*)"')


@dataclass(slots=True)
class _Call:
    """A tool call that is still being written. Mutable: the parser fills it."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    verbatim: str | None = None


@dataclass(slots=True)
class _Body:
    """The body of an argument (or of a json element when `key` is None). Mutable while open."""

    key: str | None
    kind: str
    data: bytearray = field(default_factory=bytearray)


class ReplyParser:
    """Feed generated token ids in order; deltas come out as soon as their text is certain.

    Concatenated deltas do not depend on how the text was cut into tokens: a character split over
    tokens is held until it is whole, bytes that are not UTF-8 become U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool = True) -> None:
        """`thinking` says which channel the prompt's generation prefix left open."""
        self._tokenizer = tokenizer
        self._channel = _Channel.THINK if thinking else _Channel.RESPONSE
        self._mode = _Mode.TEXT
        self._tag = bytearray()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._reasoning: list[str] = []
        self._answered = False
        self._tools_seen = False
        self._ended = False
        self._call: _Call | None = None
        self._body: _Body | None = None

    def feed(self, token_id: int) -> list[ReplyEvent]:
        """The events that `token_id` completes. Nothing more comes after `<|end_of_msg|>`."""
        tokens = self._tokenizer
        if self._ended:
            return []
        if token_id == tokens.end_of_msg_id:
            events = self._commit_tag() + self._end_call()
            return events + self.finish()
        if token_id in (tokens.open_id, tokens.close_id):
            events = self._commit_tag()
            self._mode = _Mode.OPENING if token_id == tokens.open_id else _Mode.CLOSING
            return events
        if token_id == tokens.sep_id:
            return self._commit_tag()
        if tokens.is_special(token_id):
            return []  # a reserved token is never part of a text
        data = tokens.decode_bytes((token_id,))
        if self._mode is _Mode.TEXT:
            return self._text(data)
        self._tag += data
        return self._commit_unseparated_tag()

    def finish(self) -> list[ReplyEvent]:
        """The generation is over: flush held bytes; drop an unfinished tag or tool call."""
        self._ended = True
        self._mode = _Mode.TEXT
        return self._flush()

    # ------------------------------------------------------------ tags

    def _commit_unseparated_tag(self) -> list[ReplyEvent]:
        """Act on a tag whose name is already followed by text, so its `<|sep|>` was left out."""
        tag, opening = bytes(self._tag), self._mode is _Mode.OPENING
        complete = _BARE_TAGS if opening else _BARE_TAGS + _ATTRIBUTED_TAGS
        for name in complete:
            if tag.startswith(name) and len(tag) > len(name):
                self._tag = bytearray(name)
                return self._commit_tag() + self._text(tag[len(name) :])
        if opening and tag.startswith(_ATTRIBUTED_TAGS):
            if len(tag) > _TAG_BYTES_MAX:
                self._reset_tag()
        elif len(tag) > _UNKNOWN_TAG_BYTES_MAX:
            self._reset_tag()
            return self._text(tag)
        return []

    def _commit_tag(self) -> list[ReplyEvent]:
        """Act on the tag in the buffer, if any. An unknown tag is dropped."""
        mode, text = self._mode, self._tag.decode("utf-8", errors="replace")
        self._reset_tag()
        match mode:
            case _Mode.TEXT:
                return []
            case _Mode.CLOSING:
                return self._close(text.strip())
            case _Mode.OPENING:
                name = text.split(maxsplit=1)[0] if text.strip() else ""
                return self._open(name, dict(_ATTRIBUTE.findall(text)))

    def _reset_tag(self) -> None:
        self._mode = _Mode.TEXT
        self._tag = bytearray()

    def _open(self, name: str, attributes: dict[str, str]) -> list[ReplyEvent]:
        match name:
            case "think":
                return self._enter(_Channel.THINK)
            case "response":
                # Clients take a tool call as the end of the text: nothing may follow it.
                return self._enter(_Channel.AFTER if self._tools_seen else _Channel.RESPONSE)
            case "tools":
                return self._enter(_Channel.TOOLS)
            case "call":
                events = self._enter(_Channel.TOOLS) + self._end_call()
                tool = _unescape(attributes.get("tool", ""))
                self._call = _Call(tool) if tool else None
                return events
            case "argument":
                key = _unescape(attributes.get("key", ""))
                self._end_body()
                self._body = _Body(key, attributes.get("type", "string"))
            case "json":
                self._end_body()
                self._body = _Body(None, "object")
        return []

    def _close(self, name: str) -> list[ReplyEvent]:
        match name:
            case "think" if self._channel is _Channel.THINK:
                return self._enter(_Channel.BETWEEN)
            case "response" if self._channel is _Channel.THINK and not self._answered:
                # The model skipped thinking and answered in the open think channel.
                events = self._flush()
                answer = "".join(self._reasoning)
                self._enter(_Channel.AFTER)
                return events + ([ContentDelta(answer)] if answer else [])
            case "response":
                return self._enter(_Channel.AFTER)
            case "argument" | "json":
                self._end_body()
            case "call":
                return self._end_call()
            case "tools" | "message":
                return self._end_call() + self._enter(_Channel.AFTER)
        return []

    # ------------------------------------------------------------ text

    def _enter(self, channel: _Channel) -> list[ReplyEvent]:
        """Switch channels; a character left incomplete in the old one is flushed."""
        events = self._flush()
        self._channel = channel
        self._tools_seen = self._tools_seen or channel is _Channel.TOOLS
        return events

    def _text(self, data: bytes) -> list[ReplyEvent]:
        if self._body is not None:
            self._body.data += data
            return []
        if self._channel is _Channel.BETWEEN and data.strip():
            self._channel = _Channel.AFTER if self._tools_seen else _Channel.RESPONSE
        if self._channel in (_Channel.THINK, _Channel.RESPONSE):
            return self._emit(self._utf8.decode(data))
        return []

    def _flush(self) -> list[ReplyEvent]:
        held = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return self._emit(held)

    def _emit(self, text: str) -> list[ReplyEvent]:
        if not text:
            return []
        if self._channel is _Channel.THINK:
            self._reasoning.append(text)
            return [ReasoningDelta(text)]
        self._answered = True
        return [ContentDelta(text)]

    # ------------------------------------------------------------ tool calls

    def _end_body(self) -> None:
        """Store the open argument in its call. A value that is not JSON of its type stays text."""
        body, self._body = self._body, None
        if body is None or self._call is None:
            return
        text = body.data.decode("utf-8", errors="replace")
        if body.key is None:
            self._call.verbatim = text
        elif body.kind == "string":
            self._call.arguments[body.key] = text
        else:
            try:
                self._call.arguments[body.key] = msgspec.json.decode(text)
            except (msgspec.DecodeError, RecursionError):
                self._call.arguments[body.key] = text

    def _end_call(self) -> list[ReplyEvent]:
        self._end_body()
        call, self._call = self._call, None
        if call is None:
            return []
        if call.verbatim is not None:
            return [ToolCallDone(call.name, call.verbatim)]
        return [ToolCallDone(call.name, msgspec.json.encode(call.arguments).decode())]


def _unescape(value: str) -> str:
    """Undo the two escapes of an attribute value: `&quot;` first, then `&amp;`."""
    return value.replace("&quot;", '"').replace("&amp;", "&")
