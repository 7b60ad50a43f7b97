"""Why a process ended, in its own words: the error of its last log line. Pure."""

from __future__ import annotations

import json
import re
from typing import Final

# a daemon's closing line as logfmt: ... code=bank_invalid error="what, where, the remedy"
_CLOSING: Final = re.compile(
    r"\bcode=(?P<code>[a-z_]+)\b.*?\berror=(?P<text>\"(?:[^\"\\]|\\.)*\"|\S+)"
)


def last_words(output: bytes) -> str:
    """The error of the last line that has one, else the last line that is not empty."""
    lines = output.decode("utf-8", "replace").strip().splitlines()
    for line in reversed(lines):
        if found := _CLOSING.search(line):
            return f"{found['code']}: {_unquoted(found['text'])}"
    return lines[-1].strip() if lines else "it printed nothing"


def _unquoted(text: str) -> str:
    try:
        return str(json.loads(text)) if text.startswith('"') else text
    except ValueError:
        return text
