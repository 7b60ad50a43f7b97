"""One training process of the demo model, and the memory it shares with its twin.

Owns the step: rows from the corpus, forward, backward, the exchange of gradients through shared
memory, and the update of this process's half of the parameters. It must not know the command line
or the checkpoint format.

The parameters lie in flat buffers that both processes map: float32 masters, and the bf16 copies
that are multiplied. Matrices come first (they decay and are multiplied in bf16), then everything
that stays in float32. A step has three meeting points: gradients written, norm known, parameters
updated.
"""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from services.demo_model import native
from services.demo_model.corpus import Corpus, Item, make_row
from services.demo_model.network import Network, NetworkConfig
from services.demo_model.recipe import PROCESSES, Recipe, bias_change, learning_rate, mean_load
from station.tokenizer import chat
from station.tokenizer.vocabulary import Tokenizer

MEETING_S = 900
"""Longest wait for the twin, in seconds: the first step compiles the network."""
_HEAD_STEP = 64
"""Positions with a loss are rounded up to this many: few distinct shapes keep the prepared matrix
kernels reusable.
"""


@dataclass(frozen=True, slots=True)
class Span:
    """Where one parameter lies in the flat buffers."""

    name: str
    start: int
    shape: tuple[int, ...]
    matrix: bool

    @property
    def place(self) -> slice:
        """Its elements."""
        return slice(self.start, self.start + math.prod(self.shape))


def spans(network: Network) -> list[Span]:
    """The layout of the flat buffers: matrices (the bf16 parameters) first."""
    named = list(network.named_parameters())
    ordered = [(n, p, True) for n, p in named if p.dtype == torch.bfloat16]
    ordered += [(n, p, False) for n, p in named if p.dtype != torch.bfloat16]
    found, start = [], 0
    for name, parameter, matrix in ordered:
        found.append(Span(name, start, tuple(parameter.shape), matrix))
        start += parameter.numel()
    return found


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Everything the processes exchange; all tensors live in shared memory."""

    master: Tensor
    working: Tensor
    gradients: Tensor
    """[processes, parameters] bf16."""
    loads: Tensor
    """[processes, layers, E] tokens per expert of the step."""
    biases: Tensor
    """[layers, E] correction biases; written by process 0."""
    scalars: Tensor
    """[processes, 2] float64: sum of squares of the gradient, loss."""
    scores: Tensor
    """[processes, 2] float64: right and asked questions."""
    meeting: Barrier


def share(network: Network, meeting: Barrier) -> SharedMemory:
    """Shared memory that holds the parameters of a freshly initialised network."""
    layout, parameters = spans(network), dict(network.named_parameters())
    master = torch.cat([parameters[s.name].detach().float().reshape(-1) for s in layout])
    layers, experts = len(network.mixtures()), network.config.num_experts
    return SharedMemory(
        master=_shared(master),
        working=_shared(master.bfloat16()),
        gradients=_shared(torch.zeros(PROCESSES, master.numel(), dtype=torch.bfloat16)),
        loads=_shared(torch.zeros(PROCESSES, layers, experts, dtype=torch.int64)),
        biases=_shared(torch.zeros(layers, experts)),
        scalars=_shared(torch.zeros(PROCESSES, 2, dtype=torch.float64)),
        scores=_shared(torch.zeros(PROCESSES, 2, dtype=torch.float64)),
        meeting=meeting,
    )


def _shared(tensor: Tensor) -> Tensor:
    """The tensor, moved into shared memory."""
    move: Callable[[], Tensor] = tensor.share_memory_
    return move()


def attach(network: Network, memory: SharedMemory) -> None:
    """Make the network's parameters and biases views of the shared memory."""
    parameters = dict(network.named_parameters())
    for span in spans(network):
        source = memory.working if span.matrix else memory.master
        parameters[span.name].data = source[span.place].view(span.shape)
    for index, mixture in enumerate(network.mixtures()):
        mixture.gate.e_score_correction_bias = memory.biases[index]


def masters(network: Network, memory: SharedMemory) -> dict[str, Tensor]:
    """Float32 parameters by name, and the correction biases under the names of their buffers."""
    found = {s.name: memory.master[s.place].view(s.shape) for s in spans(network)}
    buffers = [name for name, _ in network.named_buffers()]
    return found | dict(zip(buffers, memory.biases, strict=True))


class Optimiser:
    """AdamW over this process's half of the matrices and of the rest; the moments are private to
    it.
    """

    def __init__(
        self,
        recipe: Recipe,
        memory: SharedMemory,
        layout: Sequence[Span],
        *,
        rank: int,
        library: ctypes.CDLL,
    ) -> None:
        matrices = sum(math.prod(span.shape) for span in layout if span.matrix)
        self._recipe, self._memory, self._library = recipe, memory, library
        self._parts = [
            (_half(0, matrices, rank), recipe.weight_decay),
            (_half(matrices, memory.master.numel(), rank), 0.0),
        ]
        lengths = [part.stop - part.start for part, _ in self._parts]
        self._gradients = [torch.zeros(length) for length in lengths]
        self._means = [torch.zeros(length) for length in lengths]
        self._squares = [torch.zeros(length) for length in lengths]

    def collect(self) -> float:
        """Average the gradients of all processes over this half; returns their sum of squares."""
        total = 0.0
        for (part, _), gradient in zip(self._parts, self._gradients, strict=True):
            sources = [native.pointer(row[part]) for row in self._memory.gradients]
            total += self._library.gradient_mean(
                *native.sizes(len(gradient)), native.pointer(gradient), *sources
            )
        return total

    def update(self, step: int, norm: float) -> None:
        """Move the masters of this half and refresh their bf16 copies; `step` counts from 0."""
        recipe, memory = self._recipe, self._memory
        for index, (part, decay) in enumerate(self._parts):
            scalars = native.AdamStep(
                clip=min(1.0, recipe.gradient_norm_max / (norm + 1e-6)),
                rate=learning_rate(recipe, step),
                momentum=recipe.momentum,
                memory=recipe.memory,
                eps=recipe.eps,
                decay=decay,
                momentum_correction=1 / (1 - recipe.momentum ** (step + 1)),
                memory_correction=1 / (1 - recipe.memory ** (step + 1)),
            )
            own = (self._gradients[index], memory.master[part], self._means[index])
            buffers = (*own, self._squares[index], memory.working[part])
            count = native.sizes(part.stop - part.start)
            self._library.adamw(*count, scalars, *(native.pointer(buffer) for buffer in buffers))


def _half(start: int, stop: int, rank: int) -> slice:
    """This process's share of [start, stop), cut on a multiple of 64 elements."""
    cuts = [start + (stop - start) * k // PROCESSES // 64 * 64 for k in range(PROCESSES)] + [stop]
    return slice(cuts[rank], cuts[rank + 1])


@dataclass(frozen=True, slots=True)
class Progress:
    """State of the run after a step, for people and for the log."""

    step: int
    tokens: int
    loss: float
    rate: float
    gradient_norm: float
    load_min: float
    load_max: float


Report = Callable[[Progress], None]
ReportScores = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True, slots=True)
class Lessons:
    """What there is to learn and to ask."""

    corpus: Corpus
    tokenizer: Tokenizer
    questions: Sequence[Item]


class Trainer:
    """One process of the run. Both processes call the same methods in the same order."""

    def __init__(
        self,
        recipe: Recipe,
        config: NetworkConfig,
        memory: SharedMemory,
        lessons: Lessons,
        *,
        rank: int,
        build: Path,
    ) -> None:
        library = native.build(build)
        self._recipe, self._memory, self._lessons, self._rank = recipe, memory, lessons, rank
        self._network = Network(config, torch.bfloat16, native.NativeOperations(library))
        attach(self._network, memory)
        self._network.compile_regions()
        self._layout = spans(self._network)
        self._parameters = dict(self._network.named_parameters())
        self._optimiser = Optimiser(recipe, memory, self._layout, rank=rank, library=library)
        self._rng = random.Random(f"{recipe.seed}/{rank}")  # noqa: S311 - rows, not secrets
        self._load: Tensor | None = None

    def run(self, report: Report, report_scores: ReportScores, *, score_every: int) -> None:
        """Train to the end of the recipe; ask the questions every `score_every` steps and at the
        end.
        """
        for step in range(self._recipe.steps):
            report(self._step(step))
            if (step + 1) % score_every == 0 or step + 1 == self._recipe.steps:
                report_scores(step + 1, self._ask())

    def _meet(self) -> None:
        self._memory.meeting.wait(MEETING_S)

    def _step(self, step: int) -> Progress:
        memory, rank = self._memory, self._rank
        memory.scalars[rank, 1] = self._gradients()
        self._meet()
        memory.scalars[rank, 0] = self._optimiser.collect()
        self._meet()
        norm, loss = (
            math.sqrt(memory.scalars[:, 0].sum().item()),
            memory.scalars[:, 1].mean().item(),
        )
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient of step {step} is not finite: lower the rate")
        self._optimiser.update(step, norm)
        self._load = mean_load(self._recipe, self._load, memory.loads.sum(0))
        if rank == 0:
            memory.biases.add_(bias_change(self._recipe, step, self._load))
        self._meet()
        return Progress(
            step=step + 1,
            tokens=(step + 1) * self._recipe.step_tokens,
            loss=loss,
            rate=learning_rate(self._recipe, step),
            gradient_norm=norm,
            load_min=self._load.min().item(),
            load_max=self._load.max().item(),
        )

    def _gradients(self) -> float:
        """Forward and backward over this process's rows; leaves the gradients in shared memory,
        returns the loss.
        """
        ids, weights = self._rows()
        positions = _positions(weights)
        logits = self._network(ids[:, :-1], positions)
        losses = functional.cross_entropy(
            logits, ids[:, 1:].reshape(-1)[positions], reduction="none"
        )
        chosen = weights[positions]
        loss = (losses * chosen).sum() / chosen.sum()
        cast(Callable[[], None], loss.backward)()
        for span in self._layout:
            parameter = self._parameters[span.name]
            target = self._memory.gradients[self._rank, span.place]
            # The residual mixtures of layer 0 see a single vector and so have no gradient.
            target.copy_(
                parameter.grad.reshape(-1)
            ) if parameter.grad is not None else target.zero_()
            parameter.grad = None
        for index, mixture in enumerate(self._network.mixtures()):
            self._memory.loads[self._rank, index] = mixture.loads
        full = chosen == 1.0
        return losses.detach()[full].mean().item()

    def _rows(self) -> tuple[Tensor, Tensor]:
        """Token ids [rows, T + 1] and the loss weights [rows * T] of predicting ids[:, 1:]."""
        recipe, lessons = self._recipe, self._lessons
        rows = [
            make_row(lessons.corpus, lessons.tokenizer, self._rng, recipe.row_tokens)
            for _ in range(recipe.rows)
        ]
        weights = torch.tensor([row.weights for row in rows])[:, 1:]
        return torch.tensor([row.ids for row in rows]), weights.reshape(-1)

    @torch.no_grad()
    def _ask(self) -> dict[str, float]:
        """Share of questions, per set, whose whole trained answer is the greedy path of the
        network.
        """
        result: dict[str, float] = {}
        for name in dict.fromkeys(question.set for question in self._lessons.questions):
            asked = [q for q in self._lessons.questions if q.set == name][self._rank :: PROCESSES]
            right = sum(self._right(batch) for batch in _batches(asked, self._recipe.rows))
            self._memory.scores[self._rank] = torch.tensor([right, len(asked)], dtype=torch.float64)
            self._meet()
            total = self._memory.scores.sum(0)
            result[name] = (total[0] / total[1]).item()
            self._meet()
        return result

    def _right(self, questions: Sequence[Item]) -> int:
        """How many of at most `rows` questions are answered word for word."""
        recipe, tokenizer = self._recipe, self._lessons.tokenizer
        # Always whole batches of whole rows: another shape would compile the network again.
        ids = torch.full((recipe.rows, recipe.row_tokens), tokenizer.end_of_msg_id)
        ranges = []
        for row, question in enumerate(questions):
            prompt, answer = _question_ids(tokenizer, self._lessons.corpus, question)
            length = min(len(prompt) + len(answer), recipe.row_tokens)
            ids[row, :length] = torch.tensor((prompt + answer)[:length])
            ranges.append((len(prompt), length))
        best = self._network(ids).argmax(-1).view(ids.shape)
        return sum(
            bool((best[row, start - 1 : stop - 1] == ids[row, start:stop]).all())
            for row, (start, stop) in enumerate(ranges)
        )


def _positions(weights: Tensor) -> Tensor:
    """Flat positions with a loss, topped up with positions of weight zero to a round count."""
    wanted = torch.nonzero(weights)[:, 0]
    spare = torch.nonzero(weights == 0)[:, 0]
    return torch.cat((wanted, spare[: -len(wanted) % _HEAD_STEP]))


def _batches(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _question_ids(tokenizer: Tokenizer, corpus: Corpus, item: Item) -> tuple[list[int], list[int]]:
    """Prompt at the endpoint's default effort, and the reply that the corpus teaches."""
    thought = next(fact.thought for fact in corpus.facts if fact.name == item.id)
    prompt = chat.render(tokenizer, [chat.ChatMessage("user", item.question)])
    turn = chat.ChatMessage("assistant", item.answer, reasoning=thought)
    body = chat.assistant_body(tokenizer, turn)
    opened = len(chat.open_tag(tokenizer, "think"))
    return prompt, body[opened:]
