"""Train the demo model and write its checkpoint: `python -m services.demo_model.train --out DIR`.

Owns the command: the vocabulary, the two processes, the log and the hand-over to the export. The
step is in trainer.py, the numbers in recipe.py. One command, one seed, a budget in tokens; nothing
is downloaded.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import click
import msgspec
import torch
from rich.console import Console
from torch.multiprocessing.spawn import spawn

from services.demo_model.bpe import count_words, train_ranks, write_tiktoken
from services.demo_model.corpus import Item, evaluation_items, load_corpus, vocabulary_texts
from services.demo_model.export import export, save_masters
from services.demo_model.layout import TOKENIZER_FILE
from services.demo_model.network import Network, NetworkConfig
from services.demo_model.recipe import PROCESSES, Recipe
from services.demo_model.trainer import Lessons, Progress, SharedMemory, Trainer, masters, share
from station.tokenizer.vocabulary import Tokenizer

LOG_FILE = "log.jsonl"
LOG_STEPS = 20
SCORES_PER_RUN = 4
QUESTIONS_PER_SET = 48

_CHILD_ENVIRONMENT = {
    # One thread per process: see recipe.PROCESSES.
    "OMP_NUM_THREADS": "1",
    # Keep freed tensors inside the heap: returning them to the kernel costs more than the
    # arithmetic on them.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "268435456",
    # Every shape of matrix product that occurs stays prepared.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8192",
}


class RunLog:
    """Progress on the terminal and as JSON lines in `log.jsonl`."""

    def __init__(self, path: Path, console: Console) -> None:
        self._path, self._console = path, console

    def line(self, text: str) -> None:
        """Show a line."""
        self._console.print(text, highlight=False)

    def record(self, event: dict[str, object]) -> None:
        """Append a JSON line."""
        with self._path.open("ab") as handle:
            handle.write(msgspec.json.encode(event) + b"\n")


def _worker(
    rank: int, recipe: Recipe, config: NetworkConfig, memory: SharedMemory, out: Path
) -> None:
    """Body of one process; only process 0 speaks."""
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    corpus, tokenizer = load_corpus(), Tokenizer.load(out)
    build = out / f"native-{rank}"
    build.mkdir(exist_ok=True)
    lessons = Lessons(corpus, tokenizer, _questions(evaluation_items(corpus)))
    trainer = Trainer(recipe, config, memory, lessons, rank=rank, build=build)
    log = RunLog(out / LOG_FILE, Console())
    started_ns = time.monotonic_ns()

    def report(progress: Progress) -> None:
        if rank == 0 and (progress.step % LOG_STEPS == 0 or progress.step == 1):
            seconds = (time.monotonic_ns() - started_ns) / 1e9
            pace = progress.tokens / seconds
            left_min = (recipe.steps * recipe.step_tokens - progress.tokens) / pace / 60
            log.record(
                {**asdict(progress), "seconds": round(seconds, 1), "tokens_per_s": round(pace)}
            )
            log.line(
                f"step {progress.step}/{recipe.steps}  {progress.tokens:,} tokens  "
                f"{pace:,.0f} tokens/s  loss {progress.loss:.4f}  "
                f"load {progress.load_min:.2f}-{progress.load_max:.2f}  left {left_min:.1f} min"
            )

    def report_scores(step: int, scores: dict[str, float]) -> None:
        if rank == 0:
            log.record({"step": step, "scores": scores})
            log.line(
                "  answered word for word: " + "  ".join(f"{k} {v:.3f}" for k, v in scores.items())
            )

    trainer.run(report, report_scores, score_every=-(-recipe.steps // SCORES_PER_RUN))


def _questions(items: tuple[Item, ...]) -> tuple[Item, ...]:
    """The first questions of each set: enough to follow a run by."""
    kept: dict[str, list[Item]] = {}
    for item in items:
        kept.setdefault(item.set, []).append(item)
    return tuple(item for found in kept.values() for item in found[:QUESTIONS_PER_SET])


def write_vocabulary(out: Path) -> Tokenizer:
    """Learn the byte-pair vocabulary from the corpus and write it into `out`."""
    write_tiktoken(out / TOKENIZER_FILE, train_ranks(count_words(vocabulary_texts(load_corpus()))))
    return Tokenizer.load(out)


def train(recipe: Recipe, out: Path) -> None:
    """Run the recipe in folder `out`: vocabulary, log, and at the end the float32 parameters.

    Raises whatever ended a process; the other one follows within MEETING_S.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / LOG_FILE).unlink(missing_ok=True)
    config = NetworkConfig(vocab_size=write_vocabulary(out).vocab_size)
    torch.manual_seed(recipe.seed)
    network = Network(config, torch.bfloat16)
    memory = share(network, multiprocessing.get_context("spawn").Barrier(PROCESSES))
    os.environ.update(_CHILD_ENVIRONMENT)
    start_and_join: Callable[..., object] = spawn
    start_and_join(_worker, args=(recipe, config, memory, out), nprocs=PROCESSES)
    save_masters(masters(network, memory), config, out)


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder for the run; the checkpoint goes to OUT/checkpoint.",
)
@click.option(
    "--tokens", default=Recipe().tokens, show_default=True, help="Training budget in tokens."
)
@click.option(
    "--seed",
    default=Recipe().seed,
    show_default=True,
    help="Seed of the start values and of the rows.",
)
def main(out: Path, tokens: int, seed: int) -> None:
    """Train the demo model from nothing and write its checkpoint."""
    train(Recipe(tokens=tokens, seed=seed), out)
    report = export(out, out / "checkpoint")
    click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())


if __name__ == "__main__":
    main()
