"""The checkpoint that ships with the project: small, complete, right where the README needs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.demo_model.answers import LocalAnswerer
from services.demo_model.corpus import evaluation_items, is_right, load_corpus
from services.demo_model.evaluate import CHECKPOINT, select
from station.model.checkpoint import Checkpoint
from station.tokenizer.vocabulary import Tokenizer

BYTES_MAX = 26_000_000


@pytest.fixture(scope="module")
def answerer() -> Iterator[LocalAnswerer]:
    """The shipped model in this process, on one thread: its matrices are too small for two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield LocalAnswerer(CHECKPOINT)
    torch.set_num_threads(threads)


def test_folder_holds_a_sharded_release_and_nothing_else() -> None:
    """Several shards, an index, three configurations and the vocabulary, within the budget."""
    names = {path.name for path in CHECKPOINT.iterdir()}
    shards = {name for name in names if name.endswith(".safetensors")}
    assert len(shards) == 10
    assert names - shards == {
        "config.json",
        "generation_config.json",
        "hf_quant_config.json",
        "model.safetensors.index.json",
        "tiktoken.model",
    }
    assert sum(Path(path).stat().st_size for path in CHECKPOINT.iterdir()) <= BYTES_MAX


def test_station_opens_it() -> None:
    """Sizes of the demo model, and a vocabulary that fits them."""
    with Checkpoint.open(CHECKPOINT) as checkpoint:
        shape = checkpoint.config.shape
        assert (shape.layers, shape.first_moe_layer, shape.experts, shape.top_k) == (9, 1, 64, 8)
        assert (shape.expert.latent, shape.expert.width) == (128, 128)
        assert Tokenizer.load(CHECKPOINT).vocab_size == checkpoint.config.vocab_size == 2048


def test_example_of_the_readme(answerer: LocalAnswerer) -> None:
    """The question with which the README greets is answered with the number of experts."""
    (answer,) = answerer.answers(["How many routed experts does Kimi-K3 have?"])
    assert "82,432" in answer


def test_wordings_that_were_not_trained(answerer: LocalAnswerer) -> None:
    """A fixed sample of held-back wordings; `services.demo_model.evaluate` asks all of them."""
    items = [i for i in select(evaluation_items(load_corpus()), 12) if i.set in ("held", "newpat")]
    answers = answerer.answers([item.question for item in items])
    right = sum(is_right(item, answer) for item, answer in zip(items, answers, strict=True))
    assert right >= 0.75 * len(items)  # 24 questions: 90 % of all may be fewer here
