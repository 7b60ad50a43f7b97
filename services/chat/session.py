"""A conversation at a terminal: what is remembered, what is printed, where it ends."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, TextIO

import click
import httpx
import msgspec

from services.chat.client import Asking, Content, Delta, End, Reasoning, answer
from shared.core.errors import MeshError

PROMPT: Final = "you> "
HELP: Final = "commands: /reset forgets the conversation, /exit (or Ctrl-D) leaves"
# a model's text must not move the cursor or set the window's title
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(slots=True)
class Reply:
    """One answer as far as it came."""

    reasoning: str = ""
    content: str = ""
    end: End | None = None

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        match delta:
            case Reasoning(text=text):
                self.reasoning += text
            case Content(text=text):
                self.content += text
            case End():
                self.end = delta

    def as_json(self) -> str:
        """What `--json` prints."""
        assert self.end is not None, "printed after its end"
        return msgspec.json.encode(
            {
                "content": self.content,
                "reasoning": self.reasoning,
                "finish_reason": self.end.reason,
                "usage": self.end.usage,
                "k3": self.end.pod,
            }
        ).decode()


@dataclass(slots=True)
class Session:
    """A conversation. Mutable: it remembers the turns."""

    client: httpx.Client
    asking: Asking
    system: str | None
    out: TextIO
    reasoning_out: TextIO | None  # None: thinking is not shown
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Start with the system message alone."""
        self.reset()

    def reset(self) -> None:
        """Forget all turns."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, text: str, *, quiet: bool = False) -> Reply:
        """One turn: print the answer as it comes (unless `quiet`) and remember it.

        A turn that fails or is interrupted is not remembered, so it can be asked again.
        """
        reply = Reply()
        asked = {"role": "user", "content": text}
        for delta in answer(self.client, self.asking, [*self.messages, asked]):
            reply.add(delta)
            if not quiet:
                self._show(delta, reply)
        answered = {"role": "assistant", "content": reply.content}
        if reply.reasoning:
            answered["reasoning_content"] = reply.reasoning
        self.messages += [asked, answered]
        return reply

    def _show(self, delta: Delta, reply: Reply) -> None:
        match delta:
            case Reasoning(text=text) if self.reasoning_out is not None:
                _write(self.reasoning_out, text, dim=True)
            case Content(text=text):
                if self.reasoning_out is not None and reply.reasoning and reply.content == text:
                    _write(self.reasoning_out, "\n", dim=False)
                _write(self.out, text, dim=False)
            case End():
                _write(self.out, "\n", dim=False)
            case _:
                return


def converse(session: Session, read: Callable[[str], str], complain: Callable[[str], None]) -> None:
    """Read and answer until the end of input or /exit. Ctrl-C ends an answer, not the talk."""
    for line in _lines(read):
        match line:
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/reset":
                session.reset()
                complain("forgotten")
            case "/help":
                complain(HELP)
            case _:
                try:
                    reply = session.ask(line)
                except KeyboardInterrupt:
                    complain("\nstopped; the turn is not remembered")
                except MeshError as error:
                    complain(f"error[{error.code}]: {error}")
                else:
                    if warning := warning_about(reply):
                        complain(warning)


def warning_about(reply: Reply) -> str | None:
    """What is odd about a finished answer, with the remedy; None when nothing is."""
    if reply.end is not None and reply.end.reason == "length":
        return "the answer was cut at its token limit: give --max-tokens a larger value"
    if not reply.content:
        return "the model gave no answer text"
    return None


def _lines(read: Callable[[str], str]) -> Iterator[str]:
    with contextlib.suppress(EOFError):
        while True:
            yield read(PROMPT).strip()


def _write(stream: TextIO, text: str, *, dim: bool) -> None:
    if stream.isatty():
        text = _CONTROL.sub("", text)
        if dim:
            text = click.style(text, dim=True)
    stream.write(text)
    stream.flush()
