"""Ask the demo model what it was taught: `python -m services.demo_model.evaluate`.

Owns the command, the scores and the table. The questions and what makes an answer right come from
corpus.py, the ways of asking from answers.py. Three shares are told apart: questions trained word
for word, wordings that were held back from training (`held`: a trained pattern with another phrase;
`newpat`: a pattern never trained), and free re-wordings by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from services.demo_model.answers import Answerer, EndpointAnswerer, LocalAnswerer
from services.demo_model.corpus import Item, evaluation_items, is_right, load_corpus
from shared.core.errors import EXIT_FAILED, MeshError

CHECKPOINT = Path(__file__).parent / "checkpoint"
HELD_SHARE_MIN = 0.90
_GROUPS = {
    "trained wording": ("seen",),
    "wording not trained": ("held", "newpat"),
    "free re-wording": ("hand",),
}
_CHECKED = "wording not trained"


@dataclass(frozen=True, slots=True)
class Miss:
    """A question that was answered wrongly."""

    set: str
    id: str
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Score:
    """How many questions of a group were asked, and how many answers held the expected fact."""

    group: str
    asked: int
    right: int

    @property
    def share(self) -> float:
        """Right answers per question asked; 0 when none was asked."""
        return self.right / self.asked if self.asked else 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """Result of one evaluation."""

    scores: tuple[Score, ...]
    misses: tuple[Miss, ...]

    @property
    def ok(self) -> bool:
        """Whether enough of the wordings that were not trained are answered."""
        checked = next(score for score in self.scores if score.group == _CHECKED)
        return checked.share >= HELD_SHARE_MIN


def score(items: Sequence[Item], answers: Iterable[str]) -> Report:
    """Compare answers with the expected facts, one for each item."""
    right: dict[str, int] = {}
    asked: dict[str, int] = {}
    misses = []
    for item, answer in zip(items, answers, strict=True):
        asked[item.set] = asked.get(item.set, 0) + 1
        if is_right(item, answer):
            right[item.set] = right.get(item.set, 0) + 1
        else:
            misses.append(Miss(item.set, item.id, item.question, answer))
    scores = tuple(
        Score(group, sum(asked.get(s, 0) for s in sets), sum(right.get(s, 0) for s in sets))
        for group, sets in _GROUPS.items()
    )
    return Report(scores, tuple(misses))


def select(items: Sequence[Item], limit: int | None) -> list[Item]:
    """At most `limit` questions of each set, in the order of the corpus."""
    kept: dict[str, int] = {}
    selected = []
    for item in items:
        if limit is None or kept.get(item.set, 0) < limit:
            kept[item.set] = kept.get(item.set, 0) + 1
            selected.append(item)
    return selected


def show(report: Report, console: Console) -> None:
    """Print the table, then every wrong answer."""
    table = Table("questions", "asked", "right", "share", title="demo model, greedy answers")
    for line in report.scores:
        table.add_row(line.group, str(line.asked), str(line.right), f"{line.share:.1%}")
    console.print(table)
    for miss in report.misses:
        console.print(f"{miss.set} {miss.id}: {miss.question}\n    {miss.answer}", markup=False)


def as_json(report: Report) -> bytes:
    """The report as one JSON object."""
    scores = {
        line.group: {"asked": line.asked, "right": line.right, "share": line.share}
        for line in report.scores
    }
    content = {
        "ok": report.ok,
        "share_min": HELD_SHARE_MIN,
        "scores": scores,
        "misses": report.misses,
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=2)


@click.command()
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    default=CHECKPOINT,
    show_default=True,
    help="Checkpoint folder, asked in this process.",
)
@click.option("--url", help="Ask a pod instead, e.g. http://127.0.0.1:8380/v1.")
@click.option("--limit", type=click.IntRange(min=1), help="Questions per set; default: all.")
@click.option(
    "--json", "wants_json", is_flag=True, help="Print one JSON object instead of a table."
)
@click.option(
    "--check",
    is_flag=True,
    help=f"Exit with status {EXIT_FAILED} below {HELD_SHARE_MIN:.0%} of the wordings not trained.",
)
def main(
    checkpoint: Path, url: str | None, limit: int | None, wants_json: bool, check: bool
) -> None:
    """Ask the demo model about the pod and count the right answers."""
    torch.set_num_threads(1)  # the matrices are too small to share, least of all beside a pod
    try:
        answerer: Answerer = EndpointAnswerer(url) if url else LocalAnswerer(checkpoint)
        items = select(evaluation_items(load_corpus()), limit)
        answers = track(
            answerer.answers([item.question for item in items]),
            "asking",
            total=len(items),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        report = score(items, answers)
    except MeshError as error:
        click.echo(f"{error.code}: {error}", err=True)
        sys.exit(error.exit_status)
    if wants_json:
        click.echo(as_json(report))
    else:
        show(report, Console())
    if check and not report.ok:
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
