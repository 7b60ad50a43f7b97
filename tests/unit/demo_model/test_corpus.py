"""The corpus of the demo model: format, split, leaks, evaluation items, rows and vocabulary."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from services.demo_model import bpe
from services.demo_model.corpus import (
    Corpus,
    Wordings,
    build_corpus,
    draw_question,
    evaluation_items,
    is_right,
    load_corpus,
    make_row,
    vocabulary_texts,
)
from services.demo_model.facts import CorpusError, Kind, fold, holds_keys, load_facts, parse_facts
from services.demo_model.templates import TRAINED_TEMPLATES, UNSEEN_TEMPLATES
from station.tokenizer import chat
from station.tokenizer.vocabulary import Tokenizer

BLOCK = """
# a comment
[bank] a bank
key: file
term: a bank / bank
event: a bank is {0}
ask: What is {{a,the}} bank? | Where are experts kept?
free: So what is this bank?
say: A bank is a file.
"""
EXAMPLE = BLOCK.format("damaged").replace("{{", "{").replace("}}", "}")


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


@pytest.fixture(scope="module")
def tokenizer(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    ranks = bpe.train_ranks(bpe.count_words(vocabulary_texts(corpus)))
    bpe.write_tiktoken(directory / "tiktoken.model", ranks)
    return Tokenizer.load(directory)


# ---------------------------------------------------------------- the format


def test_parse_reads_every_field() -> None:
    """A block gives one fact with all its fields, and braces stand for several wordings."""
    (fact,) = parse_facts(EXAMPLE, "example.txt")

    assert (fact.name, fact.topic, fact.kind) == ("bank", "a bank", Kind.FACT)
    assert fact.asked == ("What is a bank?", "What is the bank?", "Where are experts kept?")
    assert fact.free == ("So what is this bank?",)
    assert [(phrase.main, phrase.other) for phrase in fact.phrases] == [
        ("a bank", "bank"),
        ("a bank is damaged",) * 2,
    ]
    assert fact.thought == "The question is about a bank."


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("key: file", "key: folder", "must occur in"),
        ("say: A bank is a file.", "", "exactly one answer"),
        ("ask: ", "asks: ", "unknown line"),
        ("[bank] a bank", "bank", "starts with"),
        ("term: a bank / bank", "term: a bank", r"needs 2 form"),
        ("key: file", "kind: gossip\nkey: file", "is unknown"),
    ],
)
def test_parse_refuses_a_broken_block(old: str, new: str, said: str) -> None:
    """Each way to break a block is one error that names the file."""
    with pytest.raises(CorpusError, match=said) as caught:
        parse_facts(EXAMPLE.replace(old, new), "example.txt")

    assert "example.txt" in str(caught.value)


def test_two_facts_of_one_name_are_refused(tmp_path: Path) -> None:
    """A name is an identity over all files; an empty folder is an error, not an empty corpus."""
    with pytest.raises(CorpusError, match="no corpus file"):
        load_facts(tmp_path)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(EXAMPLE, encoding="utf-8")
    with pytest.raises(CorpusError, match=r"two facts are called \[bank\]"):
        load_facts(tmp_path)


# ---------------------------------------------------------------- the split


def test_a_wording_with_two_answers_is_refused() -> None:
    """One question must not have two answers, whatever its case and punctuation."""
    other = "[file] a file\nkey: data\nask: where are experts kept\nsay: A file holds data."
    with pytest.raises(CorpusError, match=r"asks for two facts, \[bank\] and \[file\]"):
        build_corpus(parse_facts(f"{EXAMPLE}\n{other}", "example.txt"))


def test_an_evaluation_wording_that_is_trained_is_refused() -> None:
    """A free wording that equals a trained one would make the evaluation a memory test."""
    with pytest.raises(CorpusError, match="both trained and held"):
        build_corpus(parse_facts(EXAMPLE.replace("So what is this", "What is the"), "example.txt"))


def test_every_phrase_gives_held_and_new_patterns() -> None:
    """One trained template is held back per phrase, and one untrained template is added."""
    (entry,) = build_corpus(parse_facts(EXAMPLE, "example.txt")).entries

    assert (len(entry.held), len(entry.newpat)) == (2, 2)
    assert not {fold(w) for w in entry.untrained} & {fold(w) for w in entry.trained}


def test_no_template_is_both_trained_and_unseen() -> None:
    """A new pattern must be new."""
    for family, templates in TRAINED_TEMPLATES.items():
        trained = {fold(template) for template in templates}
        unseen = {fold(template) for template in UNSEEN_TEMPLATES[family]}

        assert len(templates) == len(trained)
        assert not trained & unseen


# ---------------------------------------------------------------- the shipped facts


def test_the_shipped_corpus_is_large_enough(corpus: Corpus) -> None:
    """Many facts, many wordings for each, and enough questions that nobody trained on."""
    sets = Counter(item.set for item in evaluation_items(corpus))

    assert len(corpus.facts) >= 150
    assert min(len(fact.asked) for fact in corpus.facts) >= 8
    assert sets["held"] + sets["newpat"] >= 120
    assert sets["hand"] >= 100
    assert sets["seen"] == 150


def test_the_readme_example_is_trained_word_for_word(corpus: Corpus) -> None:
    """The question of the README is in the corpus with the number of routed experts."""
    (entry,) = [
        entry
        for entry in corpus.entries
        if "How many routed experts does Kimi-K3 have?" in entry.asked
    ]

    assert "82,432" in entry.fact.answer
    assert "82,432" in entry.fact.keys


def test_items_hold_their_keys_and_are_not_trained(corpus: Corpus) -> None:
    """The reference answer of every item counts as right, and only 'seen' items are trained."""
    trained = {fold(wording) for entry in corpus.entries for wording in entry.trained}
    for item in evaluation_items(corpus):
        assert is_right(item, item.answer.upper()), item
        assert not is_right(item, "Something else."), item
        assert (item.set == "seen") == (fold(item.question) in trained), item


def test_no_other_answer_holds_the_keys_of_a_number(corpus: Corpus) -> None:
    """A key with a large number belongs to one fact, so a wrong answer cannot pass by accident."""
    for fact in corpus.facts:
        if any(key.replace(",", "").isdigit() and len(key) >= 5 for key in fact.keys):
            holders = [f.name for f in corpus.facts if holds_keys(fact.keys, f.answer)]

            assert set(holders) <= {fact.name, "spare-slots"}, fact.name


def test_augmentation_never_makes_an_evaluation_wording(corpus: Corpus) -> None:
    """By value: twenty thousand drawn questions, and none reads like a held one."""
    rng = random.Random(5)
    for _ in range(20_000):
        fact, question = draw_question(corpus, rng)
        assert fold(question) not in corpus.reserved, question
        assert corpus.owners.get(fold(question), fact.name) == fact.name, question


def test_an_opener_does_not_hide_a_leak(corpus: Corpus) -> None:
    """A drawn question is no held wording with an opener either ("OK, <held wording>")."""
    rng = random.Random(8)
    reserved = {entry.fact.name: _telling_wordings(entry) for entry in corpus.entries}
    for _ in range(20_000):
        fact, question = draw_question(corpus, rng)
        assert not f" {fold(question)}".endswith(reserved[fact.name]), question


def test_the_guard_is_what_keeps_the_leak_out() -> None:
    """The augmentation does reach a held wording when the guard does not know it."""
    text = (
        "[bank] a bank\nkey: file\nask: What is the size of a bank?\n"
        "free: What is the length of a bank?\nsay: A bank is a file."
    )
    guarded = build_corpus(parse_facts(text, "example.txt"))
    open_corpus = Corpus(guarded.entries, frozenset(), {"bank": ()}, {}, guarded.cumulative_shares)

    def leaks(which: Corpus) -> int:
        rng = random.Random(3)
        held = tuple(f" {wording}" for wording in guarded.reserved)
        drawn = (f" {fold(draw_question(which, rng)[1])}" for _ in range(5_000))
        return sum(question.endswith(held) for question in drawn)  # with or without an opener

    assert leaks(guarded) == 0
    assert leaks(open_corpus) > 10


# ---------------------------------------------------------------- rows


def test_a_row_starts_as_the_endpoint_renders_it(corpus: Corpus, tokenizer: Tokenizer) -> None:
    """At effort max the row is the Station's own rendering of the conversation, id by id."""
    effort = chat.effort_message(tokenizer, "max")
    rng = random.Random(2)
    rows = [make_row(corpus, tokenizer, rng, 192) for _ in range(40)]
    plain = [row for row in rows if list(row.ids[: len(effort)]) == effort]
    user = chat.open_tag(tokenizer, "message", [("role", "user")])
    matched = 0
    for row in plain:
        ids = list(row.ids[len(effort) :])
        if ids[: len(user)] != user:
            continue  # this conversation has a system prompt
        end = ids.index(tokenizer.close_id)
        question = tokenizer.decode(ids[len(user) : end])
        prompt = chat.render(tokenizer, [chat.ChatMessage("user", question)], effort="max")
        assert list(row.ids[: len(prompt)]) == prompt
        matched += 1

    assert len(plain) > 10
    assert matched > 8


def test_row_weights_mark_what_the_model_must_write(corpus: Corpus, tokenizer: Tokenizer) -> None:
    """Weight 1 on thoughts and answers, 0 on what the client sends, T+1 values each."""
    rng = random.Random(4)
    answers = {fact.answer for fact in corpus.facts}
    thoughts = {fact.thought for fact in corpus.facts}
    found = 0
    for _ in range(30):
        row = make_row(corpus, tokenizer, rng, 256)
        assert (len(row.ids), len(row.weights)) == (257, 257)
        assert set(row.weights) <= {0.0, 0.1, 0.3, 0.5, 1.0}
        bodies = _bodies_of_weight_one(row.ids, row.weights, tokenizer)
        found += len(bodies)
        for i, token in enumerate(row.ids[1:], start=1):
            if token == tokenizer.close_id and row.ids[i - 1] != tokenizer.sep_id:
                # the model must also learn where to end
                assert (row.weights[i] == 1.0) == (row.weights[i - 1] == 1.0)
        assert set(bodies[:-1]) <= answers | thoughts  # the last one may be cut off
    assert found > 60


def test_rows_mix_all_modes(corpus: Corpus, tokenizer: Tokenizer) -> None:
    """Effort max is the most common opening; high, low, none and no thinking occur too."""
    rng = random.Random(6)
    think = chat.open_tag(tokenizer, "think")[1]
    modes: Counter[str] = Counter()
    for _ in range(400):
        row = make_row(corpus, tokenizer, rng, 192)
        text = tokenizer.decode(row.ids)
        effort = next((e for e in chat.EFFORTS if f"thinking_effort={e}" in text), "none")
        opened = tokenizer.open_id
        pairs = zip(row.ids, row.ids[1:], strict=False)
        modes[effort if (opened, think) in pairs else "off"] += 1

    assert {"max", "high", "low", "none", "off"} == set(modes)
    assert modes["max"] > 400 * 0.4
    assert modes["off"] > 400 * 0.05


def test_rows_depend_on_the_generator_only(corpus: Corpus, tokenizer: Tokenizer) -> None:
    """The same seed gives the same rows; another seed gives others."""

    def rows(seed: int) -> list[tuple[int, ...]]:
        rng = random.Random(seed)
        return [make_row(corpus, tokenizer, rng, 128).ids for _ in range(20)]

    assert rows(1) == rows(1)
    assert rows(1) != rows(2)


# ---------------------------------------------------------------- the vocabulary


def test_vocabulary_has_the_size_of_the_model(corpus: Corpus, tokenizer: Tokenizer) -> None:
    """1,792 ranks and 256 special tokens; answers come back from their ids."""
    assert tokenizer.vocab_size == 2048
    for fact in corpus.facts:
        assert fact.answer == tokenizer.decode(tokenizer.encode_text(fact.answer))


def test_ranks_are_deterministic_and_merge_the_commonest_pair() -> None:
    """Known small case: 'aab' x 3 and 'ab' x 2 merge 'ab' first, then 'aab'."""
    ranks = bpe.train_ranks({"aab": 3, "ab": 2}, 300)

    assert [bytes([value]) for value in range(256)] == ranks[:256]
    assert ranks[256:] == [b"ab", b"aab"]
    assert ranks == bpe.train_ranks({"ab": 2, "aab": 3}, 300)


def test_words_are_split_as_the_tokenizer_splits() -> None:
    """Counts belong to the K3 split: letters, up to three digits, a leading space with its word."""
    counts = bpe.count_words([("K3 has 82432 experts", 2)])

    assert dict(counts) == {"K": 2, "3": 2, " has": 2, " ": 2, "824": 2, "32": 2, " experts": 2}


def _telling_wordings(entry: Wordings) -> tuple[str, ...]:
    """Untrained wordings of a fact that are not a mere part of a trained one (such as "KDA?")."""
    trained = [f" {fold(wording)} " for wording in entry.trained]
    folded = [f" {fold(wording)}" for wording in entry.untrained]
    return tuple(w for w in folded if not any(f"{w} " in text for text in trained))


def _bodies_of_weight_one(
    ids: tuple[int, ...], weights: tuple[float, ...], tokenizer: Tokenizer
) -> list[str]:
    """The texts of consecutive tokens of weight 1, without the tags that end them."""
    bodies = []
    current: list[int] = []
    for token, weight in zip(ids, weights, strict=True):
        if weight == 1.0 and token != tokenizer.close_id:
            current.append(token)
        elif current:
            bodies.append(tokenizer.decode(current))
            current = []
    bodies.append(tokenizer.decode(current))
    return [body for body in bodies if body not in {"", "think<|sep|>", "response<|sep|>"}]
