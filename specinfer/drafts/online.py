"""Heads that learn while they serve: from what the target said where it was used, between calls.

Knows: a head's weights, in use and in training; how much time learning may take; when better weights take over.
Does not know: how examples are made and bounded (`examples`), how trees grow, text.

Online Speculative Decoding (arXiv 2310.07177): a draft serves one stream of prompts, and can be fitted to it.  A copy
learns.  After a few optimiser steps it is compared with the weights in use on examples that neither learns from.  If it
is better, it takes their place as a whole; if not, it goes back to them.  Text under way keeps the weights that it
began with.  Whatever the head says, the text is the target's.
"""

import os
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from random import Random
from threading import Lock
from time import perf_counter
from typing import Self

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specinfer.attention import TreeModel
from specinfer.common.files import expanded, storing
from specinfer.common.ranks import ALONE, Ranks
from specinfer.common.values import plain
from specinfer.drafts.examples import LONGEST, UNROLL, Example, ExampleBuffer, Recorder, example_loss
from specinfer.drafts.head import HeadDraft, read_config
from specinfer.drafts.head_network import HeadNetwork
from specinfer.drafts.language_model import HeadDraftSession
from specinfer.drafts.published.network import attached_model
from specinfer.engine.draft import Committed, Draft, DraftContext, Scored, States
from specinfer.errors import InputError, ModelError

SHARE = 0.05  # of the calls' seconds that learning takes at most
BATCH = 2  # examples of an optimiser step
ROUND = 4  # optimiser steps between two comparisons
COMPARED = 4  # held-out examples of a comparison, the newest
LEARNING_RATE = 5e-4
SPEED = 5e10  # multiplications a second: what the first step's time is guessed from, before one was measured
RECENT = 4  # optimiser steps, or comparisons, whose longest time is expected of the next one


class OnlineHead(HeadDraft):
    """A head that learns from its own use; the head that it is made from stays as it is.

    Args:
        draft: the head to begin with.
        share: of the calls' seconds that learning takes at most.

    Attributes:
        swaps: how often better weights took over.
    """

    buffer: "ExampleBuffer"  # these are of an attached draft
    budget: "Budget"
    student: "Student"
    learning: Lock  # held by the thread that learns
    may_wait = False  # it learns from logits

    def __init__(self, draft: HeadDraft, share: float = SHARE) -> None:
        super().__init__(draft.head, draft.fingerprint, draft.name, draft.inverse_temperature)
        self.share, self.swaps = share, 0

    def attach(self, target: TreeModel, tokenizer: PreTrainedTokenizerBase | None = None) -> Self:
        """Return this draft with the target's matrices borrowed, and nothing learnt yet.

        Raises:
            TokenizerMismatch, ModelError: as `HeadDraft.attach`.
        """
        attached = super().attach(target, tokenizer)
        attached.buffer, attached.budget, attached.swaps = ExampleBuffer(), Budget(self.share, target.ranks), 0
        attached.student, attached.learning = Student(self.head, target.model), Lock()
        return attached

    def open(self, context: DraftContext) -> HeadDraftSession:
        """Start drafting for a batch of rows, and keep what there is to learn."""
        return OnlineHeadSession(attached_model(self), self, context)

    @property
    def owner(self) -> object:
        """The student: what earlier weights have read is close enough to begin with."""
        return self.student

    def learn(self, texts: Sequence[Sequence[int]], seconds: float) -> None:
        """Learn for as long as the share of all calls' seconds allows; in one thread at a time.

        Args:
            texts: not used; sessions have kept the examples.
            seconds: of the call.
        """
        self.budget.earn(seconds)
        if self.learning.acquire(blocking=False):
            try:
                with torch.inference_mode(False), torch.enable_grad():
                    self._learn()
            finally:
                self.learning.release()

    def _learn(self) -> None:
        """Make optimiser steps, and a comparison after every few of them, while the next one fits."""
        examples, held_out = self.buffer.examples(False), self.buffer.examples(True)[-COMPARED:]
        earned = self.budget.earned  # calls that end meanwhile in other threads do not make this one longer
        while examples and held_out:
            if self.student.steps < ROUND:
                batch = self.student.choose(examples)
                if not self.budget.fits("step", earned, self.student.guess(batch)):
                    return
                with self.budget.spending("step"):
                    self.student.step(batch)
            else:
                if not self.budget.fits("comparison", earned, self.budget.longest("step", 0.0)):
                    return
                with self.budget.spending("comparison"):
                    self._compare(held_out)

    @torch.no_grad()
    def _compare(self, held_out: Sequence[Example]) -> None:
        """Use the student's weights if they are better on held-out examples; else send it back to those in use."""
        assert self.model is not None
        fresh = self.student.weights_in(self.model.model)
        losses = [float(example_loss(network, held_out)) for network in (self.model.model, fresh)]
        before, after = self.budget.ranks.largest(losses)
        if not after < before:
            self.student.restart()
            return
        model = TreeModel(fresh)
        model.ways = self.model.ways.serving(fresh)  # packs the weights now: it is a part of learning
        self.head, self.model, self.swaps = fresh, model, self.swaps + 1
        self.student.keep()


class OnlineHeadSession(HeadDraftSession):
    """A head at work, whose rows are recorded."""

    per_row = (*HeadDraftSession.per_row, "recorders")

    def __init__(self, model: TreeModel, draft: OnlineHead, context: DraftContext) -> None:
        super().__init__(model, draft.aux_layers, context, draft.inverse_temperature)
        self.buffer = draft.buffer
        rows = zip(self.uncached, self.states, strict=True)
        self.recorders = [Recorder(tokens, states, self.draft) for tokens, states in rows]

    def commit(self, tokens: Committed, states: States = (), scored: Sequence[Scored] = ()) -> None:
        """Record what each row committed; a row that is retired leaves its example."""
        for recorder, new, chose, row in zip(self.recorders, tokens, states, scored, strict=False):
            if new is not None and chose is not None and self.token_ids is not None:
                recorder.extend(new, chose[:, self.columns], row, self.token_ids)
            if recorder.weights and (new is None or len(recorder.ids) >= LONGEST):
                self.buffer.add(recorder.example())
        super().commit(tokens, states, scored)


class Student:
    """A copy of a head in training, in float32 or finer.

    Args:
        head: whose weights it starts from; it is not changed.
        target: the model that it borrows matrices from.

    Attributes:
        steps: since the last comparison.
    """

    def __init__(self, head: HeadNetwork, target: PreTrainedModel) -> None:
        self.network = deepcopy(head).to(torch.promote_types(target.dtype, torch.float32)).bind(target)
        self.trained = {name: w for name, w in self.network.named_parameters() if not name.startswith("output.")}
        for weight in self.trained.values():
            weight.requires_grad_()
        self.random = Random(0)  # nothing is taken from random numbers that others use
        self.keep()
        self.restart()

    def choose(self, examples: Sequence[Example]) -> list[Example]:
        """Return the examples of the next step."""
        return self.random.sample(examples, min(BATCH, len(examples)))

    def guess(self, batch: Sequence[Example]) -> float:
        """Return about how many seconds a step takes, by its multiplications."""
        weights = sum(weight.numel() for weight in self.network.parameters())
        return 3 * UNROLL * weights * sum(len(example.ids) for example in batch) / SPEED

    def step(self, batch: Sequence[Example]) -> None:
        """Make one optimiser step."""
        self.optimizer.zero_grad()
        example_loss(self.network, batch).backward()
        torch.nn.utils.clip_grad_norm_(self.trained.values(), 1.0)
        self.optimizer.step()
        self.steps += 1

    def keep(self) -> None:
        """Take note of the weights: they are those in use now."""
        self.kept = {name: weight.detach().clone() for name, weight in self.trained.items()}
        self.steps = 0

    def restart(self) -> None:
        """Go back to the weights in use."""
        for name, weight in self.trained.items():
            weight.data.copy_(self.kept[name])
        self.optimizer = torch.optim.AdamW(self.trained.values(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self.steps = 0

    def weights_in(self, network: HeadNetwork) -> HeadNetwork:
        """Return a copy of a network with these weights in its type; what it borrows is shared."""
        shared = (*network.parameters(), *network.buffers())
        copied = deepcopy(network, {id(weight): weight for weight in shared})
        weights = {name: weight.detach().to(network.dtype, copy=True) for name, weight in self.trained.items()}
        copied.load_state_dict(weights, strict=False, assign=True)
        return copied.requires_grad_(False)


class Budget:
    """The time that learning may take: a share of the calls' seconds; what is not spent is kept for later.

    Args:
        share: of every call's seconds.
        ranks: the processes that learn alike; the slowest one's time counts.
    """

    def __init__(self, share: float, ranks: Ranks = ALONE) -> None:
        self.share, self.earned, self.spent, self.ranks = share, 0.0, 0.0, ranks
        self.times: defaultdict[str, deque[float]] = defaultdict(partial(deque, maxlen=RECENT))
        self._lock = Lock()

    def earn(self, seconds: float) -> None:
        """Count a call."""
        (seconds,) = self.ranks.largest([seconds])
        with self._lock:
            self.earned += self.share * seconds

    def longest(self, kind: str, guess: float) -> float:
        """Return the longest recent time of such work; a guess if there is none."""
        return max(self.times[kind], default=guess)

    def fits(self, kind: str, earned: float, guess: float) -> bool:
        """Whether such work will end within what was earned."""
        return self.spent + self.longest(kind, guess) <= earned

    @contextmanager
    def spending(self, kind: str) -> Iterator[None]:
        """Count the time of some work."""
        started = perf_counter()
        try:
            yield
        finally:
            self.times[kind] += self.ranks.largest([perf_counter() - started])
            self.spent += self.times[kind][-1]


def checked_share(online: object) -> float:
    """Return the share of the calls' seconds that learning takes at most; 0 if nothing learns.

    Args:
        online: True (0.05), a share, or False.

    Raises:
        InputError: something else.
    """
    share = plain(online)
    if isinstance(share, bool):
        return SHARE if share else 0.0
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise InputError(f"online={share!r:.40} is not a share of time: give True (0.05), a number up to 1, or False")
    return float(share)


def learners(drafts: Sequence[Draft], share: float) -> tuple[list[Draft], list[str]]:
    """Return drafts with those in the place of heads that learn, and notes on drafts that do not learn.

    Args:
        drafts: not attached yet.
        share: as `checked_share` returns it, of all heads together.

    Raises:
        InputError: no draft can learn.
    """
    if not share:
        return list(drafts), []
    heads = [draft for draft in drafts if isinstance(draft, HeadDraft)]
    others = ", ".join(draft.name for draft in drafts if draft not in heads)
    if not heads:
        problem = f"online: none of these drafts can learn ({others or 'no drafts'})"
        raise InputError(f"{problem}: give a head of `specinfer distill`, or drop online")
    each = share / len(heads)
    ready: list[Draft] = [OnlineHead(draft, each) if draft in heads else draft for draft in drafts]
    return ready, [f"online: {', '.join(head.name for head in heads)} learns{others and f', {others} does not'}"]


def save_heads(drafts: Sequence[Draft], folder: str | os.PathLike[str]) -> None:
    """Write the heads that learn as folders that `HeadDraft.load` reads: one in the folder itself, several in 1, 2, ...

    Raises:
        InputError: no draft learns, or the folder holds something else or cannot be written.
        SpecinferError: the disk is full.
    """
    heads, out = [draft for draft in drafts if isinstance(draft, OnlineHead)], expanded(folder)
    if not heads:
        raise InputError("no draft of this decoder learns, so there is nothing to save: construct it with online=True")
    folders = [out] if len(heads) == 1 else [out / str(number) for number, _ in enumerate(heads, 1)]
    for head, path in zip(heads, folders, strict=True):
        with storing(path):
            if path.exists() and any(path.iterdir()):
                _check_head(path)
        head.save(path)


def _check_head(folder: Path) -> None:
    """Raise `InputError` for a folder that holds something other than a head."""
    try:
        read_config(folder)
    except ModelError as error:
        raise InputError(f"{folder} is not empty and holds no head: choose another folder") from error
