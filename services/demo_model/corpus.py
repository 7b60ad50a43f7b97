"""The corpus of the demonstration model: wordings, the split, evaluation items and training rows.

Owns which wordings are trained and which are held back, the proof that none leaks, and how a
conversation becomes token ids with loss weights. The facts are text (`corpus/*.txt`, format in
`facts.py`), the words around a phrase are in `templates.py`, and the chat format is the Station's
(`station.tokenizer.chat`). Must not know the network, the optimiser or torch.

Four sets of questions:

* seen: trained word for word (an `ask:` wording, or a phrase in a trained template);
* held: a phrase in a template that is trained with other phrases, held back for this phrase;
* newpat: a phrase in a template that is never trained;
* hand: a free re-wording written by hand (`free:`), never trained.
"""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from services.demo_model.augment import dress, reword
from services.demo_model.facts import (
    CorpusError,
    Fact,
    Phrase,
    fold,
    holds_keys,
    load_facts,
)
from services.demo_model.templates import TRAINED_TEMPLATES, UNSEEN_TEMPLATES
from station.tokenizer import chat

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Mapping, Sequence

    from station.tokenizer.vocabulary import Tokenizer

SetName = Literal["seen", "held", "newpat", "hand"]

CORPUS_DIRECTORY = Path(__file__).parent / "corpus"

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are the assistant of the pod.",
    "Answer in one or two sentences.",
    "You answer questions about the pod.",
    "Be short and exact.",
)

# How a conversation is opened: (share, thinking, effort). The endpoint's default is effort max.
_MODES: tuple[tuple[float, bool, str | None], ...] = (
    (0.52, True, "max"),
    (0.08, True, "high"),
    (0.10, True, "low"),
    (0.15, True, None),
    (0.15, False, None),
)
_SYSTEM_SHARE = 0.12
_ASKED_SHARE = 0.55  # of the questions; the others are phrases in templates
_THOUGHT_SHARE = 0.8  # of the turns at effort high or max; a client drops the others' thoughts
_VARY_ATTEMPTS = 4
_QUESTION_WEIGHT = 0.1
_THOUGHT_EFFORTS = frozenset({"high", "max"})


@dataclass(frozen=True, slots=True)
class Item:
    """One evaluation question; `keys` must all occur in a right answer (see `is_right`)."""

    id: str
    set: SetName
    question: str
    keys: tuple[str, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class Wordings:
    """The questions of one fact after the split."""

    fact: Fact
    asked: tuple[str, ...]
    templated: tuple[str, ...]
    held: tuple[str, ...]
    newpat: tuple[str, ...]

    @property
    def trained(self) -> tuple[str, ...]:
        """Every wording that may open a training turn before augmentation."""
        return self.asked + self.templated

    @property
    def untrained(self) -> tuple[str, ...]:
        """Every wording that must never occur in a training row."""
        return self.held + self.newpat + self.fact.free


@dataclass(frozen=True, slots=True)
class Corpus:
    """All facts with their split wordings; built by `load_corpus`, which proves that it is sound.

    `reserved` holds the folded form of every untrained wording: what no training row may contain.
    `tails` holds, by the name of a fact, what no question about it may end with: "Tell me, <held
    wording>" is a leak too. `owners` maps the folded form of every trained wording to its fact.
    `cumulative_shares` are the running sums of the facts' sampling weights.
    """

    entries: tuple[Wordings, ...]
    reserved: frozenset[str]
    tails: Mapping[str, tuple[str, ...]]
    owners: Mapping[str, str]
    cumulative_shares: tuple[float, ...]

    @property
    def facts(self) -> tuple[Fact, ...]:
        """The facts in file order."""
        return tuple(entry.fact for entry in self.entries)


@dataclass(frozen=True, slots=True)
class Row:
    """T+1 token ids of whole conversations, and the loss weight (0..1) of predicting each."""

    ids: tuple[int, ...]
    weights: tuple[float, ...]


def load_corpus(directory: Path = CORPUS_DIRECTORY) -> Corpus:
    """Read the facts, expand and split their wordings. Raises CorpusError on a clash or a leak."""
    return build_corpus(load_facts(directory))


def build_corpus(facts: Sequence[Fact]) -> Corpus:
    """Split the wordings of `facts` and check that no wording has two answers and none leaks."""
    entries = tuple(_split(fact) for fact in facts)
    owners = _check_one_answer(entries)
    _check_no_leak(entries)
    reserved = frozenset(fold(wording) for entry in entries for wording in entry.untrained)
    tails = MappingProxyType({entry.fact.name: _tails(entry) for entry in entries})
    # The square root keeps a fact with many wordings from drowning the others.
    shares = itertools.accumulate(len(entry.trained) ** 0.5 for entry in entries)
    return Corpus(entries, reserved, tails, owners, tuple(shares))


def evaluation_items(corpus: Corpus, seen_count_max: int = 150) -> tuple[Item, ...]:
    """Return every held, newpat and hand question, and at most `seen_count_max` trained ones.

    The order is fixed and mixes the facts, so that a prefix of one set is a fair sample of it.
    """
    sets: dict[SetName, list[tuple[Fact, str]]] = {
        "seen": [(entry.fact, _pick(entry.trained, entry.fact.name)) for entry in corpus.entries],
        "held": [(entry.fact, wording) for entry in corpus.entries for wording in entry.held],
        "newpat": [(entry.fact, wording) for entry in corpus.entries for wording in entry.newpat],
        "hand": [(entry.fact, wording) for entry in corpus.entries for wording in entry.fact.free],
    }
    items = []
    for name, questions in sets.items():
        mixed = sorted(questions, key=lambda pair: _draw(pair[1]))
        for fact, wording in mixed[: seen_count_max if name == "seen" else None]:
            items.append(Item(fact.name, name, wording, fact.keys, fact.answer))
    return tuple(items)


def is_right(item: Item, answer: str) -> bool:
    """Return whether `answer` states the expected fact: every key of `item` occurs in it."""
    return holds_keys(item.keys, answer)


def draw_question(corpus: Corpus, rng: random.Random) -> tuple[Fact, str]:
    """Draw a fact and a training wording of it, augmented.

    An augmented question that reads like an untrained wording (with or without its opener), or like
    a trained wording of another fact, is dropped and drawn again; after a few attempts the wording
    stays as it is written.
    """
    entry = rng.choices(corpus.entries, cum_weights=corpus.cumulative_shares)[0]
    pool = entry.asked if rng.random() < _ASKED_SHARE or not entry.templated else entry.templated
    wording = rng.choice(pool)
    for _ in range(_VARY_ATTEMPTS):
        core = reword(wording, entry.fact, rng)
        question = dress(core, entry.fact, rng)
        if all(_may_train(corpus, entry.fact, text) for text in (core, question)):
            return entry.fact, question
    return entry.fact, wording


def make_row(corpus: Corpus, tokenizer: Tokenizer, rng: random.Random, length: int) -> Row:
    """Render random conversations in K3's chat format into `length + 1` ids and weights.

    One row is one conversation in one mode (effort max, high, low, none, or thinking off), cut at
    its end. Weight 0: what the client sends; 0.1: the question; 1: thought, answer and their ends.
    """
    thinking, effort = _draw_mode(rng)
    row = _RowBuilder(tokenizer)
    if effort is not None:
        row.add(chat.effort_message(tokenizer, effort), 0.0)
    if rng.random() < _SYSTEM_SHARE:
        row.message("system", rng.choice(SYSTEM_PROMPTS), 0.0)
    while len(row.ids) < length + 1:
        fact, question = draw_question(corpus, rng)
        row.message("user", question, _QUESTION_WEIGHT)
        thought: str | None = None
        if thinking and (effort not in _THOUGHT_EFFORTS or rng.random() < _THOUGHT_SHARE):
            thought = fact.thought if effort in _THOUGHT_EFFORTS else ""
        row.answer(fact.answer, thought, thinking=thinking)
    return Row(tuple(row.ids[: length + 1]), tuple(row.weights[: length + 1]))


def vocabulary_texts(corpus: Corpus) -> Iterable[tuple[str, int]]:
    """Yield (text, count) pairs to learn the byte-pair vocabulary from: what rows are made of."""
    for entry in corpus.entries:
        yield entry.fact.answer, 12
        yield entry.fact.thought, 6
        for wording in entry.trained:
            yield wording, 2
            yield wording.lower(), 1
    for text in SYSTEM_PROMPTS:
        yield text, 10
    for text in _TAG_TEXTS:
        yield text, 600
    yield _EFFORT_TEXT, 200


class _RowBuilder:
    """Ids and weights of the row that is being made."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.ids: list[int] = []
        self.weights: list[float] = []

    def add(self, ids: Sequence[int], weight: float) -> None:
        self.ids.extend(ids)
        self.weights.extend([weight] * len(ids))

    def message(self, role: str, text: str, weight: float) -> None:
        self._open("message", 0.0, role)
        self.add(self._tokenizer.encode_text(text), weight)
        self._close("message", 0.0)
        self.add([self._tokenizer.end_of_msg_id], 0.0)

    def answer(self, text: str, thought: str | None, *, thinking: bool) -> None:
        """Add an assistant message; `thought` None is one that the client did not send back."""
        self._open("message", 0.0, "assistant")
        if thinking:
            self._open("think", 0.0)
            self.add(self._tokenizer.encode_text(thought or ""), 1.0)
            self._close("think", 0.0 if thought is None else 1.0)
        self._open("response", 0.3 if thinking else 0.0)
        self.add(self._tokenizer.encode_text(text), 1.0)
        self._close("response", 1.0)
        self._close("message", 0.5)
        self.add([self._tokenizer.end_of_msg_id], 0.5)

    def _open(self, tag: str, weight: float, role: str | None = None) -> None:
        attributes = () if role is None else (("role", role),)
        self.add(chat.open_tag(self._tokenizer, tag, attributes), weight)

    def _close(self, tag: str, weight: float) -> None:
        self.add(chat.close_tag(self._tokenizer, tag), weight)


def _split(fact: Fact) -> Wordings:
    """Expand the phrases of `fact`; hold back one trained template and one unseen one for each."""
    taken = {fold(wording) for wording in fact.asked}
    templated: list[str] = []
    held: list[str] = []
    newpat: list[str] = []
    for phrase in fact.phrases:
        templates = TRAINED_TEMPLATES[phrase.family]
        out = templates[_draw(phrase.main) % len(templates)]
        for template in templates:
            wording = _fill(template, phrase)
            if fold(wording) not in taken:
                taken.add(fold(wording))
                (held if template == out else templated).append(wording)
        newpat.append(_fill(_pick(UNSEEN_TEMPLATES[phrase.family], phrase.main), phrase))
    return Wordings(fact, fact.asked, tuple(templated), tuple(held), tuple(newpat))


def _fill(template: str, phrase: Phrase) -> str:
    wording = template.format(phrase.main, phrase.other)
    return wording[0].upper() + wording[1:]


def _check_one_answer(entries: Iterable[Wordings]) -> Mapping[str, str]:
    """Return the owner of every trained wording; CorpusError when two facts share a wording."""
    owners: dict[str, str] = {}
    trained: dict[str, str] = {}
    for entry in entries:
        for wording in entry.trained + entry.untrained:
            name = owners.setdefault(fold(wording), entry.fact.name)
            if name != entry.fact.name:
                both = f"[{name}] and [{entry.fact.name}]"
                raise CorpusError(f"{wording!r} asks for two facts, {both}; change one wording")
        trained.update((fold(wording), entry.fact.name) for wording in entry.trained)
    return MappingProxyType(trained)


def _check_no_leak(entries: Iterable[Wordings]) -> None:
    for entry in entries:
        trained = {fold(wording) for wording in entry.trained}
        for wording in entry.untrained:
            if fold(wording) in trained:
                raise CorpusError(
                    f"[{entry.fact.name}] {wording!r} is both trained and held for evaluation"
                )


def _may_train(corpus: Corpus, fact: Fact, question: str) -> bool:
    folded = fold(question)
    is_ours = corpus.owners.get(folded, fact.name) == fact.name
    is_held = folded in corpus.reserved or f" {folded}".endswith(corpus.tails[fact.name])
    return is_ours and not is_held


def _tails(entry: Wordings) -> tuple[str, ...]:
    """Folded untrained wordings that no trained one ends with ("What is KDA?" ends with "KDA?")."""
    trained = [f" {fold(wording)}" for wording in entry.trained]
    untrained = [f" {fold(wording)}" for wording in entry.untrained]
    return tuple(tail for tail in untrained if not any(text.endswith(tail) for text in trained))


def _draw_mode(rng: random.Random) -> tuple[bool, str | None]:
    shares = [share for share, _, _ in _MODES]
    _, thinking, effort = rng.choices(_MODES, weights=shares)[0]
    return thinking, effort


def _draw(text: str) -> int:
    """Return a number fixed by `text` alone, so that editing one fact moves no other's split."""
    return zlib.crc32(text.encode("utf-8"))


def _pick(options: Sequence[str], text: str) -> str:
    return options[_draw(text) % len(options)]


# The words of the chat format itself: each should be one or two tokens.
_TAG_TEXTS = (
    "message", " role", '="', '"', "system", "user", "assistant", "think", "response", " type",
    "thinking-effort", "tools", "call", "max", "high", "low", "medium",
)  # fmt: skip
_EFFORT_TEXT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort=max`."
)
