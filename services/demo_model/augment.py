"""Wording changes that are applied to a question only while training rows are made.

Owns the synonym table and the ways in which a hasty person writes. Pure: the random generator is
passed in. Must not know which wordings are held back for evaluation (`corpus.py` drops those).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from services.demo_model.facts import Fact, Kind

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping

# One group a line: words that may stand for each other in a question.
_SYNONYM_GROUPS = """
dies/fails/crashes/breaks/goes down
lost/gone/dead/missing
start/launch/run/boot
stop/halt/end
big/large/huge
size/length
slow/late/lagging
fast/quick
machine/computer/box/host
picks/chooses/selects
pick/choose/select
chosen/picked/selected
damaged/broken/corrupt/bad
arrives/comes/lands
returns/comes back/reappears
kept/held/stored/saved
keep/hold/store
holds/keeps/stores
wrong/incorrect/false
several/many/multiple
checked/verified/tested
check/verify/test
made/built/created
make/build/create
find/see/look up
show/display/print
need/require/want
needs/requires/takes
use/employ/apply
used/employed/applied
send/ship/transmit
sent/shipped/transmitted
number/count/amount
together/in total/in all
computes/calculates/works out
compute/calculate/work out
safe/secure
explain/describe/clarify
happens/occurs/follows
command/instruction
question/request
whole/entire/complete
difference/distinction
quickly/fast
purpose/point/goal
allowed/permitted
answer/reply/response
answers/replies/responses
weights/parameters
memory/RAM
vector/row of numbers
travel/move/go
connect/join/attach
protects/guards
laptop/notebook/PC
"""
_OPENERS = (
    "Hi, ", "Hello, ", "Please tell me, ", "Tell me, ", "One question: ", "So, ", "And ", "OK, ",
    "Also, ", "Now, ", "Quick question: ", "Please, ", "I wonder, ", "Well, ", "Sorry, ", "Hey, ",
    "Say, ", "Another question: ", "Just curious: ", "By the way, ",
)  # fmt: skip
_CLOSERS = (
    " Please.", " Thanks.", " Thank you.", " I am new here.", " Please explain.", " Be brief.",
    " I am curious.", " In short, please.",
)  # fmt: skip
_KEYWORD_OPENERS = (
    "", "", "", "What about ", "Tell me about ", "Explain ", "Something about ", "What is ",
    "Why ", "How ", "The ", "Info on ",
)  # fmt: skip
# (start of a question, what may stand there instead)
_STARTS = (
    ("What happens when ", ("What happens if ", "What if ", "What goes on when ")),
    ("What happens if ", ("What happens when ", "What if ")),
    ("How do I ", ("How can I ", "How to ", "How should I ", "How do we ")),
    ("How can I ", ("How do I ", "How could I ")),
    ("Which ", ("What ",)),
    ("What is ", ("What's ", "Tell me what is ")),
    ("How many ", ("Tell me how many ", "Just how many ")),
    ("Can I ", ("May I ", "Could I ", "Am I able to ")),
    ("Can you ", ("Could you ", "Would you ")),
    ("Does the pod ", ("Do you ", "Will the pod ", "Does your pod ")),
    ("Do you ", ("Does the pod ", "Do we ")),
    ("Why does the pod ", ("Why do you ", "Why do we ")),
    ("Why do you ", ("Why does the pod ", "Why would you ")),
    ("Where ", ("In which place ", "Tell me where ")),
)
_SMALL_WORDS = frozenset((
    "what", "is", "the", "a", "an", "of", "do", "does", "did", "to", "in", "are", "there", "i",
    "me", "please", "for", "and", "it", "that", "this", "you", "on", "at", "by", "with", "how",
    "can", "my", "be",
))  # fmt: skip
_MARKS = "?.,!:;"
_SYNONYM_SHARE = 0.30
_KEYWORD_SHARE = 0.10
_DOUBLE_SHARE = 0.05


def _synonym_map(groups: str) -> Mapping[str, tuple[str, ...]]:
    table = {}
    for line in groups.split("\n"):
        group = line.split("/")
        for word in group:
            table[word] = tuple(other for other in group if other != word)
    return MappingProxyType(table)


_SYNONYMS = _synonym_map(_SYNONYM_GROUPS.strip())


def reword(wording: str, fact: Fact, rng: random.Random) -> str:
    """Return `wording` of `fact`, often in other words; only questions about facts are reworded.

    Sometimes the result is a question made of keywords, or two wordings in a row.
    """
    if fact.kind is not Kind.FACT:
        return wording
    draw = rng.random()
    if draw < _KEYWORD_SHARE:
        return _keywords(fact, rng)
    if draw < _KEYWORD_SHARE + _DOUBLE_SHARE:
        return f"{wording} {rng.choice(fact.asked)}"
    return _swap_words(_restart(wording, rng), rng) if rng.random() < 0.6 else wording


def dress(wording: str, fact: Fact, rng: random.Random) -> str:
    """Return `wording` as a person may type it: an opener, lower case, no mark, one slip.

    Small talk gets no opener: "Quick question: hello" teaches nothing.
    """
    if fact.kind is not Kind.SMALL_TALK:
        wording = _open(wording, rng)
    return _type_hastily(wording, rng)


def _restart(wording: str, rng: random.Random) -> str:
    for start, others in _STARTS:
        if wording.startswith(start):
            return rng.choice(others) + wording[len(start) :] if rng.random() < 0.3 else wording
    return wording


def _swap_words(wording: str, rng: random.Random) -> str:
    """Swap synonyms; sometimes leave out the small words, or any one word."""
    words = wording.split(" ")
    for i, word in enumerate(words):
        core = word.strip(_MARKS)
        others = _SYNONYMS.get(core.lower())
        if others and rng.random() < _SYNONYM_SHARE:
            other = rng.choice(others)
            words[i] = word.replace(core, other.capitalize() if core[0].isupper() else other)
    draw = rng.random()
    if len(words) > 3 and draw < 0.14:
        kept = [w for w in words if not _is_small(w) or rng.random() < 0.45]
        words = kept or words
    elif len(words) > 3 and draw < 0.28:
        words.pop(rng.randrange(len(words)))
    return " ".join(words)


def _keywords(fact: Fact, rng: random.Random) -> str:
    """Make a question out of content words: it teaches that shared words point to the answer."""
    source = rng.choice(
        (fact.answer, f"{fact.topic} {fact.answer}", f"{rng.choice(fact.asked)} {fact.topic}")
    )
    words = [word.strip(_MARKS) for word in source.split() if not _is_small(word)]
    count = min(len(words), rng.randint(2, 5))
    start = rng.randrange(len(words) - count + 1)
    places = sorted(rng.sample(range(len(words)), count))
    if rng.random() < 0.5:
        places = list(range(start, start + count))
    chosen = " ".join(words[place] for place in places)
    return rng.choice(_KEYWORD_OPENERS) + chosen + rng.choice("?.") * (rng.random() < 0.6)


def _open(wording: str, rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.16:
        return rng.choice(_OPENERS) + _lower_first(wording)
    if draw < 0.20 and wording[-1] in "?.":
        return wording + rng.choice(_CLOSERS)
    return wording


def _type_hastily(wording: str, rng: random.Random) -> str:
    if rng.random() < 0.18:
        wording = wording.lower()
    if rng.random() < 0.22:
        wording = wording.rstrip("?.!") or wording
    if rng.random() < 0.04 and len(wording) > 8:
        place = rng.randrange(1, len(wording) - 1)
        swapped = wording[place + 1] + wording[place] if rng.random() < 0.4 else wording[place + 1]
        wording = wording[:place] + swapped + wording[place + 2 :]
    return wording


def _is_small(word: str) -> bool:
    return word.strip(_MARKS).lower() in _SMALL_WORDS


def _lower_first(wording: str) -> str:
    """Lower the first letter unless the first word is a name such as KDA or the word I."""
    first = wording.split(" ", 1)[0]
    is_name = first == "I" or first[1:] != first[1:].lower()
    return wording if is_name else wording[0].lower() + wording[1:]
