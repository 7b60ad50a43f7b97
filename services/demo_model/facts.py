"""Facts of the demonstration model: the record, the format of `corpus/*.txt`, and its parser.

Owns what a fact is and every check that one file or one fact can fail. Must not know how wordings
are split, changed or turned into tokens (`corpus.py`, `augment.py`).

The block format. Blocks are separated by empty lines; a line that starts with `#` is a comment:

    [name] the topic, as it is named in the thought "The question is about <topic>."
    kind: small talk                      (optional: small talk | off topic | unknown)
    key: 82,432 | 92 layers               (every key must occur in the answer)
    term: a Spark / Spark                 (with article / bare; "What is a Spark?", "Define Spark.")
    quantity: the size of an expert       ("What is the size of an expert?", "Tell me ...")
    action: start a bank | serve a bank   ("How do I start a bank?", "Which command ...")
    event: a Spark dies | a node is lost  ("What happens when a Spark dies?", "Suppose ...")
    reason: do nodes ... / nodes do ...   ("Why do nodes ...?", "Tell me why nodes do ...")
    ask: one wording? | another wording?  (trained word for word, changed only by augmentation)
    free: a wording | another one         (hand-written, never trained: evaluation only)
    say: the one answer, one or two short sentences.

`{a,b,c}` inside a wording stands for three wordings. Every key word but `say` may be repeated.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from shared.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_CHOICES = re.compile(r"\{([^{}]*)\}")
_HEAD = re.compile(r"\[([a-z0-9-]+)\] (\S.*)")
_NOT_WORD = re.compile(r"[^\w]+")


class CorpusError(ConfigError):
    """A corpus file breaks the block format, or two facts contradict each other."""

    code = "corpus_invalid"


class Kind(Enum):
    """What a fact is, because each kind gets its own thought and its own wording changes."""

    FACT = "fact"
    SMALL_TALK = "small talk"
    OFF_TOPIC = "off topic"
    UNKNOWN = "unknown"


class Family(Enum):
    """Which set of templates a phrase goes into; the value is the key word of the block format."""

    TERM = "term"
    QUANTITY = "quantity"
    ACTION = "action"
    EVENT = "event"
    REASON = "reason"


@dataclass(frozen=True, slots=True)
class Phrase:
    """One slot filler: `main` fills `{0}` of a template and `other` fills `{1}`.

    `other` equals `main` in the families that have only one form.
    """

    family: Family
    main: str
    other: str


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing the model knows: exactly one answer, and all the ways in which it may be asked."""

    name: str
    topic: str
    kind: Kind
    keys: tuple[str, ...]
    answer: str
    phrases: tuple[Phrase, ...]
    asked: tuple[str, ...]
    free: tuple[str, ...]

    @property
    def thought(self) -> str:
        """The text of the think channel at effort high and max."""
        match self.kind:
            case Kind.SMALL_TALK:
                return "This is small talk."
            case Kind.OFF_TOPIC:
                return "This is not about the pod."
            case Kind.UNKNOWN:
                return "I have no fact about this."
            case Kind.FACT:
                return f"The question is about {self.topic}."


def fold(wording: str) -> str:
    """Return `wording` without case, punctuation and extra space: what makes two wordings equal."""
    return _NOT_WORD.sub(" ", wording.casefold()).strip()


def holds_keys(keys: Sequence[str], answer: str) -> bool:
    """Return whether every key occurs in `answer`, whatever the case."""
    return all(key.casefold() in answer.casefold() for key in keys)


def parse_facts(text: str, source: str) -> tuple[Fact, ...]:
    """Parse one corpus file; `source` is only named in errors. Raises CorpusError."""
    blocks = (
        [line for line in block.splitlines() if line.strip() and not line.startswith("#")]
        for block in re.split(r"\n\s*\n", text)
    )
    return tuple(_parse_block(lines, source) for lines in blocks if lines)


def load_facts(directory: Path) -> tuple[Fact, ...]:
    """Read every `*.txt` of `directory` in the order of its name. Raises CorpusError."""
    paths = sorted(directory.glob("*.txt"))
    if not paths:
        raise CorpusError(f"{directory}: no corpus file (*.txt); give the folder of the facts")
    facts = tuple(
        fact for path in paths for fact in parse_facts(path.read_text("utf-8"), path.name)
    )
    seen: set[str] = set()
    for fact in facts:
        if fact.name in seen:
            raise CorpusError(f"{directory}: two facts are called [{fact.name}]; rename one")
        seen.add(fact.name)
    return facts


def _parse_block(lines: list[str], source: str) -> Fact:
    head = _HEAD.fullmatch(lines[0].strip())
    if head is None:
        raise CorpusError(f"{source}: a block starts with '[name] topic', not with {lines[0]!r}")
    where = f"{source} [{head[1]}]"
    fields: dict[str, list[str]] = {}
    for line in lines[1:]:
        word, colon, value = line.partition(": ")
        if not colon or word not in _KEY_WORDS:
            raise CorpusError(f"{where}: unknown line {line!r}; use one of {sorted(_KEY_WORDS)}")
        fields.setdefault(word, []).append(value.strip())
    fact = Fact(
        name=head[1],
        topic=head[2],
        kind=_kind(fields, where),
        keys=_items(fields, "key"),
        answer=" ".join(fields.get("say", [])),
        phrases=tuple(_phrases(fields, where)),
        asked=tuple(w for item in _items(fields, "ask") for w in _choices(item)),
        free=tuple(w for item in _items(fields, "free") for w in _choices(item)),
    )
    _check(fact, fields, where)
    return fact


def _kind(fields: dict[str, list[str]], where: str) -> Kind:
    value = fields.get("kind", [Kind.FACT.value])[0]
    try:
        return Kind(value)
    except ValueError:
        known = ", ".join(kind.value for kind in Kind)
        raise CorpusError(f"{where}: kind {value!r} is unknown; use one of {known}") from None


def _items(fields: dict[str, list[str]], word: str) -> tuple[str, ...]:
    return tuple(
        item.strip() for value in fields.get(word, []) for item in value.split("|") if item.strip()
    )


def _phrases(fields: dict[str, list[str]], where: str) -> list[Phrase]:
    phrases = []
    for family in Family:
        for item in _items(fields, family.value):
            forms = [form.strip() for form in item.split(" / ")]
            wanted = 2 if family in _TWO_FORMS else 1
            if len(forms) != wanted:
                raise CorpusError(f"{where}: {family.value} {item!r} needs {wanted} form(s)")
            phrases.append(Phrase(family, forms[0], forms[-1]))
    return phrases


def _choices(wording: str) -> list[str]:
    """Expand `{a,b}` into one wording per combination."""
    parts = _CHOICES.split(wording)
    options = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*options)]


def _check(fact: Fact, fields: dict[str, list[str]], where: str) -> None:
    if len(fields.get("say", [])) != 1:
        raise CorpusError(f"{where}: needs exactly one answer ('say:')")
    if not fact.keys or not holds_keys(fact.keys, fact.answer):
        raise CorpusError(f"{where}: every key {fact.keys} must occur in {fact.answer!r}")
    if not fact.asked:
        raise CorpusError(f"{where}: needs at least one trained wording ('ask:')")


_TWO_FORMS = frozenset({Family.TERM, Family.REASON})
_KEY_WORDS = frozenset({"kind", "key", "ask", "free", "say"} | {family.value for family in Family})
