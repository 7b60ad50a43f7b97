"""The verb `k3 chat`."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable

import click

from services.pod.endpoint import open_client, token_option, url_option
from services.ranges import RealRange


def _utf8(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    """An argument's bytes as UTF-8, whatever the locale took them for."""
    if value is None:
        return None
    try:
        return os.fsencode(value).decode("utf-8")
    except UnicodeError:
        raise click.BadParameter("is not text in UTF-8") from None


@click.command(
    epilog='Example: k3 chat --once "How many routed experts does Kimi-K3 have?"',
)
@url_option
@token_option
@click.option(
    "--once", metavar="TEXT", callback=_utf8, help="Ask this, print only the answer, and end."
)
@click.option(
    "--system", metavar="TEXT", callback=_utf8, help="System message before the first turn."
)
@click.option(
    "--temperature",
    type=RealRange(0, 2),
    default=0.0,
    show_default=True,
    help="0 always takes the likeliest token: what a small demonstration model needs.",
)
@click.option("--max-tokens", type=click.IntRange(1), help="At most so many tokens per answer.")
@click.option(
    "--effort",
    type=click.Choice(["none", "low", "high", "max"]),
    help="How much to think before answering. [default: the pod's, max]",
)
@click.option("--seed", type=int, help="Makes sampling repeatable.")
@click.option("--show-reasoning", is_flag=True, help="Show the thinking as well, on stderr.")
@click.option("--json", "as_json", is_flag=True, help="With --once: print one JSON object.")
def chat(
    *,
    url: str,
    token: str | None,
    once: str | None,
    system: str | None,
    temperature: float,
    max_tokens: int | None,
    effort: str | None,
    seed: int | None,
    show_reasoning: bool,
    as_json: bool,
) -> int:
    """Talk to a pod.

    Without --once a conversation starts: /reset forgets it, /exit or Ctrl-D leaves, Ctrl-C ends an
    answer.
    """
    if as_json and once is None:
        raise click.UsageError("--json needs --once TEXT")
    from services.chat.client import Asking, served_model
    from services.chat.session import HELP, Session, converse, warning_about

    with open_client(url, token) as client:
        session = Session(
            client=client,
            asking=Asking(
                model=served_model(client),
                temperature=temperature,
                max_tokens=max_tokens,
                effort=effort,
                seed=seed,
            ),
            system=system,
            out=sys.stdout,
            reasoning_out=sys.stderr if show_reasoning else None,
        )
        if once is None:
            if sys.stdin.isatty():
                click.echo(f"{session.asking.model} at {url}; {HELP}", err=True)
            converse(session, _reader(), lambda text: click.echo(text, err=True))
            return 0
        reply = session.ask(once, quiet=as_json)
        if as_json:
            click.echo(reply.as_json())
        if warning := warning_about(reply):
            click.echo(f"k3: {warning}", err=True)
        return 0 if reply.content else 1


def _reader() -> Callable[[str], str]:
    """Reads one line: with a prompt and line editing at a terminal, plain from a pipe."""
    if not sys.stdin.isatty():
        return lambda _prompt: input()
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # input() edits lines once it is there
    return input
