"""One call of the decoder under way: its sessions, its clocks, its results.

Knows: sessions, rows, seconds, how token ids become text.  Does not know: how a step is decoded.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from textwrap import shorten
from time import perf_counter
from typing import Any, Protocol

import torch

from specinfer.attention import TreeModel, TreeSession, autocast_as_now, resumed, running
from specinfer.common.tensors import concat, padded_width
from specinfer.common.versions import versions
from specinfer.engine.contrastive import CandidateTrees, search, sized
from specinfer.engine.draft import Draft, DraftContext, Scored
from specinfer.engine.drafting import Drafting
from specinfer.engine.gumbel import SILENT
from specinfer.engine.loop import decode
from specinfer.engine.sequence import Row
from specinfer.engine.shared_prefix import SharedPrefix
from specinfer.engine.verify import ExactMatch, Verifier
from specinfer.errors import InputError, SpecinferError
from specinfer.results import Result, Seconds, Stats, Step, TreeSizes, acceptance_by_depth, contribution, paid
from specinfer.tree import Policy

FIRST_TOKENS = 2048  # new tokens that caches hold at first; beyond it they double
MAX_ROWS = 16  # decoded at a time, if there are more
FIRST_LEVELS = 8  # levels of a tree that drafts' caches hold at first


class Decoder(Protocol):
    """What a generation needs of the decoder: models, rules, and what was decided about them."""

    target: TreeModel
    drafts: list[Draft]
    policy: Policy
    verifier: Verifier
    tokenizer: Any
    notes: list[str]
    aux_layers: list[int]
    graphs: bool

    @property
    def networks(self) -> list[TreeModel]:
        """Everything that runs passes."""

    @property
    def passes(self) -> str:
        """How passes run, in words."""

    def supported(self, policy: Policy, notes: list[str]) -> Policy:
        """Return the policy, or another one that the models can work on."""


States = Sequence[torch.Tensor | None]  # per row, the target's auxiliary hidden states (n, K, H)


class Joined(Drafting):
    """A draft at work, which rows whose prompts a pass reads beside the trees of others join after that pass."""

    open: Callable[[Sequence[Row], States], "Joined"]  # a session of other rows, from states before their roots
    late: Sequence[Row] = ()  # those rows, the last ones of the batch ...
    read: States = ()  # ... and states at the tokens that were read before

    def commit(
        self,
        tokens: Sequence[Sequence[int] | None],
        states: Sequence[torch.Tensor | None] = (),
        scored: Sequence[Scored] = (),
    ) -> None:
        """Commit as the session does, and let late rows join it."""
        known, late, read = len(tokens) - len(self.late), self.late, self.read
        super().commit(tokens[:known], states[:known], scored[:known])
        self.late = self.read = ()
        found = zip(late, read, states[known:], strict=True)
        joining = [(row, before, new) for row, before, new in found if not row.finished]
        if joining:
            rows, *parts = zip(*joining, strict=True)
            self.join(self.open(rows, [concat(states) for states in zip(*parts, strict=True)]))


class Run:
    """One call of the decoder under way: iterate for steps, then read `results`.

    The first step opens the sessions.  They are dropped when iteration ends, fails or is closed, and then the models
    are as they were before.

    Args:
        decoder: whose models and rules decode.
        rows: the sequences.  An iterator is asked for the next one when there is room for it.
        single: whether the caller gave one prompt, not a batch.
        max_rows: sequences decoded at a time; the others wait, and join as some end.  None: all at once.
    """

    def __init__(self, decoder: Decoder, rows: Iterable[Row], single: bool, max_rows: int | None = None) -> None:
        self.decoder, self.single, self.max_rows = decoder, single, max_rows
        self.keep_stop_string = True  # in the results' texts
        self.rows = list(rows) if isinstance(rows, Sequence) else []  # of an iterator: those that were not taken
        self.waiting = iter(self.rows if isinstance(rows, Sequence) else rows)
        self.policy = sized(decoder.policy, self.rows)
        if isinstance(self.policy, CandidateTrees):
            self.max_rows = None  # no row joins its search
        self.notes: list[str] = []  # in addition to the decoder's
        self.seconds = Seconds()
        self.drafting = [(0, 0.0)] * len(decoder.drafts)  # passes of each draft, and seconds in its proposals
        self.passes = 0  # of the target, those that read prompts excluded
        self.steps: dict[int, list[Step]] = {row.index: [] for row in self.rows}
        self.before: dict[int, tuple[Seconds, list[tuple[int, float]]]] = {}  # clocks when a row joined
        self.learning = [draft for draft in decoder.drafts if draft.learns]
        self.texts: list[list[int]] = []  # of rows that were taken, for drafts that learn
        self.shared = SharedPrefix()
        self.as_called = autocast_as_now(decoder.target.device)
        self._iterator = self._run()

    def __iter__(self) -> Iterator[list[tuple[Row, Step]]]:
        return self._iterator

    def close(self) -> None:
        """Stop decoding and release the caches."""
        self._iterator.close()

    def finish(self, streamer: Any = None) -> None:
        """Decode to the end and feed a ``transformers`` streamer, if given: the prompt, then tokens, then the end.

        Raises:
            InputError: the streamer is not one, or there is more than one prompt for it.
        """
        if streamer is not None:
            if not (hasattr(streamer, "put") and hasattr(streamer, "end")):
                raise InputError(f"streamer={streamer!r:.60} has no put and end: give a transformers streamer")
            if len(self.rows) > 1:
                raise InputError("a streamer takes one prompt: pass the prompts one by one, or drop the streamer")
            streamer.put(torch.tensor([self.rows[0].ids], device="cpu"))
        try:
            for emitted in self:
                if streamer is not None:
                    streamer.put(torch.tensor(emitted[0][1].tokens, device="cpu"))
        except SpecinferError as error:
            error.partial = tuple(self.results())
            raise
        finally:
            if streamer is not None:
                streamer.end()

    def results(self) -> list[Result]:
        """Return one result per row, of what was decoded so far."""
        return [self._result(row) for row in self.rows]

    def take(self, row: Row) -> Result:
        """Return the result of a row that ended, and forget the row."""
        result = self._result(row)
        self.rows.remove(row)
        del self.steps[row.index], self.before[row.index]
        if self.learning:
            self.texts.append(list(row.ids))
        return result

    def _run(self) -> Generator[list[tuple[Row, Step]]]:
        started = perf_counter()
        models = self.decoder.networks
        with self.as_called():
            self.policy = self.decoder.supported(self.policy, self.notes)  # hooks may have come since the last call
        with self.as_called(), running(*models):  # only while passes run: between steps the models are as they were
            rows = self._admitted(0)
            if not rows:
                return
            target, drafts, states = self.open_sessions(rows)
            self.policy = self.policy.begin(len(drafts), self._coupled(rows), len(rows), target.run.packs)
            self.notes.append(self.decoder.passes)
            runs = {models[0]: target.run}
            run_plain = [model for model in models if runs.get(model, model.ways.best()).runs_modules]
        self._read_clocks(started, target, drafts)
        if isinstance(self.policy, CandidateTrees):
            reason = " (the target's passes are plain: compiled ones return no last hidden states)"
            reason = "" if target.run is models[0].ways.best() else reason
            self.notes.append(f"{self.policy}{reason}")
            steps = search(target, drafts, self.policy, rows, states)
        else:
            newcomers = partial(self._newcomers, target, drafts)
            steps = decode(target, drafts, self.policy, self.decoder.verifier, rows, newcomers)
        while True:
            with self.as_called(), resumed(*run_plain):  # compiled passes are the same in train mode
                emitted = next(steps, None)
            if emitted is None:
                return self._learn()
            spent = self._read_clocks(started, target, drafts, [step for _, step in emitted])
            emitted = [(row, replace(step, seconds=spent)) for row, step in emitted]
            for row, step in emitted:
                self.steps[row.index].append(step)
            paused = perf_counter()
            yield emitted
            started += perf_counter() - paused  # the caller's time is not counted

    def _read_clocks(
        self, started: float, target: TreeSession, drafts: Sequence[Joined], steps: Sequence[Step] = ()
    ) -> Seconds:
        """Return the seconds since the last reading, and tell an adaptive policy how the steps went."""
        before, proposed, passes = self.seconds, [seconds for _, seconds in self.drafting], self.passes
        self.seconds = Seconds(
            total=perf_counter() - started,
            prefill=target.prefill_seconds + sum(draft.prefill_seconds for draft in drafts),
            target=target.seconds,
            draft=sum(draft.seconds for draft in drafts),
        )
        self.drafting, self.passes = [(draft.passes, draft.proposing) for draft in drafts], target.passes
        spent = self.seconds - before
        if steps:
            proposing = [draft.proposing - earlier for draft, earlier in zip(drafts, proposed, strict=True)]
            *proposing, decoding = self.decoder.target.ranks.largest([*proposing, spent.decoding])
            self.policy.observe(
                trees=[step.tree for step in steps],
                paths=[step.path for step in steps],
                tokens=[step.tokens for step in steps],
                proposing=proposing,
                seconds=decoding if target.passes > passes else None,  # of a pass that read no prompts
            )
        return spent

    def _learn(self) -> None:
        """Let drafts that learn between calls learn from this one."""
        started, texts = perf_counter(), [*self.texts, *(list(row.ids) for row in self.rows)]
        for draft in self.learning:
            try:
                draft.learn(texts, self.seconds.total)
            except Exception as error:  # the text is whole, and is not lost
                self.notes.append(f"draft {draft.name} could not learn from this call: {shorten(str(error), 200)}")
        if self.learning:
            spent = perf_counter() - started
            self.seconds = replace(self.seconds, total=self.seconds.total + spent, learning=spent)

    def _admitted(self, active: int) -> list[Row]:
        """Return rows that have waited and for which there is room beside the active ones; their time begins."""
        rows = list(islice(self.waiting, None if self.max_rows is None else self.max_rows - active))
        for row in rows:
            row.stopping.begin(self.decoder.target.ranks)
            self.before[row.index] = self.seconds, self.drafting
            if row.index not in self.steps:
                self.rows.append(row)
                self.steps[row.index] = []
        return rows

    def _newcomers(self, target: TreeSession, drafts: Sequence[Joined], active: int) -> list[Row]:
        """Return rows that join the sessions, with what was read of their prompts; all that takes is prefill time."""
        started, read = perf_counter(), target.prefill_seconds + sum(draft.prefill_seconds for draft in drafts)
        rows = self._admitted(active)
        if rows:
            others, states = self._open_target(rows, joining=True)
            for draft in drafts:
                if any(others.unread) and others.aux_layers:  # not all states are known yet
                    draft.late, draft.read = rows, states
                else:
                    draft.join(draft.open(rows, states))
            target.join(others)
            read -= target.prefill_seconds + sum(draft.prefill_seconds for draft in drafts)
            target.prefill_seconds += perf_counter() - started + read
        return rows

    def _coupled(self, rows: Sequence[Row]) -> bool:
        """Whether drafts rank by the rows' noise."""
        return isinstance(self.decoder.verifier, ExactMatch) and any(row.sampling for row in rows)

    def open_sessions(self, rows: Sequence[Row]) -> tuple[TreeSession, list[Joined], States]:
        """Read the tokens of rows so far into a session of the target and one of each draft; ready for a step.

        Args:
            rows: the sequences.

        Returns:
            the sessions, and per row the target's auxiliary hidden states at the tokens before the root.
        """
        target, states = self._open_target(rows)
        return target, [self._open_draft(number, rows, states) for number in range(len(self.decoder.drafts))], states

    def _open_target(self, rows: Sequence[Row], joining: bool = False) -> tuple[TreeSession, States]:
        """Read the tokens of rows so far into a session of the target.

        The pass of the next step reads the ends of prompts, beside the trees, if nothing needs their states before, and
        that costs less: where every pass fetches weights, or, beside other rows, where it computes no padding.

        Args:
            rows: the sequences.
            joining: whether they join others for the next step.

        Returns:
            the session, and per row the target's auxiliary hidden states at the tokens that were read.
        """
        model, aux_layers = self.decoder.target, self._aux_layers()
        longest, end = max(len(row.ids) for row in rows), self._end(rows)
        drafts = len(self.decoder.drafts)
        usual, most = (count * max(1, drafts) for count, _ in self._tree_sizes())
        # trees of many rows are small, and passes read wide caches more slowly; graphs are lost when a cache grows
        usual = usual if self.decoder.graphs else usual // len(rows)
        first = longest if joining else min(end, longest + FIRST_TOKENS) + padded_width(1 + usual)
        nodes = padded_width(1 + most)
        target = self.shared.open(model, len(rows), first, end + nodes, aux_layers, self.decoder.graphs)
        fetches = model.dispatched and not aux_layers and not model.stateful
        waits = joining and target.run.packs and (not drafts or self.policy.idle)
        return target, self.shared.prefill(target, [list(row.ids[:-1]) for row in rows], hold=fetches or waits)

    def _open_draft(self, number: int, rows: Sequence[Row], states: States) -> Joined:
        """Open a session of a draft for rows.

        Args:
            number: which.
            rows: the sequences.
            states: per row, the target's auxiliary hidden states at the tokens before the root.
        """
        decoder, end = self.decoder, self._end(rows)
        longest = max(len(row.ids) for row in rows)
        (usual, levels), (most, most_levels) = self._tree_sizes()
        sampled = [row for row in rows if row.sampling]
        context = DraftContext(
            prompts=[list(row.ids) for row in rows],
            capacity=min(end, longest + FIRST_TOKENS) + padded_width(1 + usual * min(levels, FIRST_LEVELS)),
            # a row may miss tokens that another has, and all get as many slots; best-first drops some nodes later
            max_capacity=2 * end + padded_width(1 + most * most_levels),
            vocab_size=decoder.target.vocab_size,
            draft=number,
            processors=(sampled or rows)[0].processors.without_prefix_readers(),
            seeds=[row.seed for row in rows],
            couplings=[row.coupling if row.sampling else SILENT for row in rows] if self._coupled(rows) else (),
            aux_layers=self._aux_layers(),
            states=states,
            graphs=decoder.graphs,
            notes=[row.notes for row in rows],
        )
        drafting = Joined(decoder.drafts[number].open(context), context, decoder.drafts[number].name)
        drafting.open = partial(self._open_draft, number)
        return drafting

    def _tree_sizes(self) -> list[tuple[int, int]]:
        """Return nodes and levels of a draft's tree, as caches have room for them: at first, and at most."""
        return [(nodes, max(1, levels)) for nodes, levels in self.policy.room()]

    def _aux_layers(self) -> list[int]:
        """Return the target's layers whose hidden states are needed."""
        return sorted({*self.decoder.aux_layers, *self.policy.hidden_layers(self.decoder.target.layers)})

    def _end(self, rows: Sequence[Row]) -> int:
        """Return how many tokens a row has at most."""
        return max(len(row.ids) for row in rows) + max(row.remaining for row in rows)

    def _result(self, row: Row) -> Result:
        decoder, steps = self.decoder, list(self.steps[row.index])
        new = row.ids[row.prompt_length :][: sum(len(step.tokens) for step in steps)]  # an interrupted step has none
        tree_sizes = TreeSizes.of(steps)
        seconds, drafting = self.before.get(row.index, (Seconds(), [(0, 0.0)] * len(decoder.drafts)))
        spent = [
            (passes - earlier, proposing - before)
            for (passes, proposing), (earlier, before) in zip(self.drafting, drafting, strict=True)
        ]
        notes = [*decoder.notes, *self.notes, *row.notes]
        if (reasons := self.policy.reasons([draft.name for draft in decoder.drafts], len(self.rows))) is not None:
            notes.append("; ".join(filter(None, [f"auto: {paid(steps)}", str(tree_sizes), reasons])))
        stats = Stats(
            new_tokens=len(new),
            target_passes=len(steps),
            draft_passes=sum(passes for passes, _ in spent),
            acceptance_by_depth=acceptance_by_depth(steps),
            seconds=self.seconds - seconds,
            notes=tuple(notes),
            tree_sizes=tree_sizes,
            drafts=tuple(
                contribution(steps, number, draft.name, *clocks)
                for number, (draft, clocks) in enumerate(zip(decoder.drafts, spent, strict=True))
            ),
        )
        return Result(
            text=self._text(row, new) if decoder.tokenizer else "",
            token_ids=new,
            prompt_ids=row.ids[: row.prompt_length],
            finish_reason=row.finished or "unfinished",
            seed=row.seed if row.sampling else None,
            stats=stats,
            steps=steps,
            made_by=self._made_by(row),
            tokenizer=decoder.tokenizer,
        )

    def _made_by(self, row: Row) -> dict[str, Any]:
        """Return what made a row's text, in words and numbers."""
        decoder = self.decoder
        name = str(getattr(decoder.target.model.config, "_name_or_path", "")) or decoder.target.name
        return {
            "target": Path(name).name if Path(name).is_dir() else name,
            "drafts": [draft.name for draft in decoder.drafts],
            "tree": str(self.policy),
            "verifier": str(decoder.verifier),
            "sampling": row.options,
            "dtype": str(decoder.target.dtype).removeprefix("torch."),
            "device": decoder.target.device.type,
            "versions": versions(),
        }

    def _text(self, row: Row, new: Sequence[int]) -> str:
        """Return the text of a row's new tokens, maybe without the stop string, which may have begun in the prompt."""
        if not self.keep_stop_string and row.stopping.strings:
            ids = row.ids[: row.prompt_length + len(new)]
            return row.stopping.strings.text_before(ids, row.prompt_length)
        text: str = self.decoder.tokenizer.decode(new, skip_special_tokens=True)
        return text
