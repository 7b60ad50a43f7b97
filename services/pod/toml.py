"""Settings as TOML text: the standard library reads it, this writes the little we need.

Owns flat tables of text, whole numbers, switches and lists of text, in the order given. Must not
know what they mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

Value = str | int | bool | Sequence[str]


def dumps(values: Mapping[str, Value], *, title: str) -> str:
    """TOML of one flat table under a comment line; keys are bare (`[A-Za-z0-9_-]+`)."""
    lines = [f"# {title}", *(f"{key} = {_text(value)}" for key, value in values.items())]
    return "\n".join([*lines, ""])


def _text(value: Value) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case str():
            # a JSON string is a TOML basic string, but TOML also wants DEL escaped
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case _:
            return f"[{', '.join(map(_text, value))}]"
