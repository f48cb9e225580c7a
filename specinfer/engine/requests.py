"""Requests: texts that were asked for, from their settings to their results.

Knows: rows, how they are made, what was recorded of them and spent on them.
Does not know: when and beside whom they are decoded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specinfer.common.versions import versions
from specinfer.engine.callables import BatchRow
from specinfer.engine.grammar_draft import NAME
from specinfer.engine.processors import Processors
from specinfer.engine.sampling import GenerationSettings
from specinfer.engine.sequence import Row, Stopping
from specinfer.engine.sessions import Clocks, Decoder, Reading
from specinfer.results import UNFINISHED, Result, Stats, Step, TreeSizes, contribution, counts_by_depth, paid
from specinfer.tree import Policy


@dataclass
class Batch:
    """What rows that are decoded together have in common.

    Attributes:
        policy: how their trees grow.
        notes: in addition to the decoder's.
        rows: the most that were decoded at a time.
    """

    policy: Policy
    notes: list[str] = field(default_factory=list)
    clocks: Clocks = field(default_factory=Clocks)
    rows: int = 0


class Request:
    """A text that was asked for: give it to a `Scheduler`, and read its `result`.

    Attributes:
        row: what is decoded.
        steps: so far.
        done: nothing more will come: it has ended, was aborted, or failed.
        error: what ended it, if something failed in its own row, or in the step that it was in.
    """

    def __init__(self, decoder: Decoder, row: Row, keep_stop_string: bool = True) -> None:
        self.decoder, self.row, self.keep_stop_string = decoder, row, keep_stop_string
        self.steps: list[Step] = []
        self.error: BaseException | None = None
        self.added = self.done = False
        self.batch: Batch | None = None  # in which it is decoded, since `begun` until `ended`
        self.begun = Reading()
        self.ended: Reading | None = None

    def __repr__(self) -> str:
        state = f"finish_reason={self.finish_reason!r}" if self.done else "under way" if self.batch else "waiting"
        return f"Request({self.row.prompt_length} prompt tokens, {len(self.steps)} steps, {state})"

    @property
    def finish_reason(self) -> str:
        """Why it ended: see `Result`."""
        return self.row.finished or UNFINISHED

    @property
    def cached_tokens(self) -> int:
        """How many tokens of the prompt were copied from what was read earlier; 0 until its reading begins."""
        return self.row.text.cached

    @property
    def result(self) -> Result:
        """The result so far, complete once it is done; its seconds end with its last step."""
        return self._result(self.ended)

    @property
    def batch_result(self) -> Result:
        """The same, but its seconds are those of all requests that it was decoded with, to their end."""
        return self._result(None)

    @property
    def spent(self) -> Reading:
        """What was spent since it joined the rows under way, on all of them, until now."""
        return self.batch.clocks.now - self.begun if self.batch else Reading()

    def join(self, batch: Batch) -> None:
        """Begin, in a batch; the clock of ``max_time`` starts."""
        self.row.stopping.begin(self.decoder.target.ranks)
        self.batch, self.begun = batch, batch.clocks.now

    def end(self, reason: str | None = None, error: BaseException | None = None) -> None:
        """End, for a reason that the row does not know, or with an error."""
        self.row.finished, self.error = reason or self.row.finished, error or self.row.error
        self.ended, self.done = self.batch.clocks.now if self.batch else None, True

    def _result(self, until: Reading | None) -> Result:
        batch, steps = self.batch or Batch(self.decoder.policy), [*self.steps]
        spent = until - self.begun if until else self.spent
        return result_of(self.decoder, self.row, steps, batch, spent, self.keep_stop_string)


def make_requests(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    settings: Sequence[GenerationSettings],
    seeds: Sequence[int],
    *,
    sequences: int = 1,
    notes: Sequence[str] = (),
    paddings: Sequence[Sequence[int]] = (),
    logprobs: int | None = None,
    predicted: Sequence[int] = (),
    keep_stop_string: bool = True,
    first: int = 0,
    stopping: Callable[..., Stopping] = Stopping,
    salt: str = "",
) -> list[Request]:
    """Return the requests of a call, in the order of its prompts.

    Args:
        decoder: that will decode them.
        prompts, settings: of each prompt.
        seeds: of each request.
        sequences: requests of each prompt.
        notes: of each prompt, what was decided about it.
        paddings: of each prompt, what processors and criteria see before it.
        logprobs, predicted: as `Row`.
        keep_stop_string: whether texts keep the stop string that ended them.
        first: number of the first row.
        stopping: makes what ends a row.
        salt: rows with the same one may share what is read.

    Raises:
        InputError: a prompt leaves no room within ``max_length``.
        SamplingError: stop strings without a tokenizer, an option that a processor refuses, or a function whose state
            rows would share.
    """
    common: dict[str, Any] = {
        "device": decoder.target.device,
        "tokenizer": decoder.tokenizer,
        "draft_names": [*(draft.name for draft in decoder.drafts), *(NAME for each in settings[:1] if each.grammar)],
        "gate": decoder.confidence_gate,
        "logprobs": logprobs,
        "predicted": predicted,
        "stopping": stopping,
        "salt": salt,
    }
    befores = paddings or [()] * len(prompts)
    each_prompt = zip(prompts, settings, befores, notes or [""] * len(prompts), strict=True)
    repeated, made = [each for each in each_prompt for _ in range(sequences)], []
    for index, ((ids, setting, before, note), seed) in enumerate(zip(repeated, seeds, strict=True)):
        of_row, budget = setting.of_row(BatchRow(index, len(repeated))), setting.budget(len(before) + len(ids))
        processors = Processors(of_row.processors, before) if paddings else None
        row = Row(first + index, ids, of_row, budget, seed, processors=processors, note=note, **common)
        made.append(Request(decoder, row, keep_stop_string))
    return made


def result_of(
    decoder: Decoder, row: Row, steps: list[Step], batch: Batch, spent: Reading, keep_stop_string: bool
) -> Result:
    """Return the result of a row.

    Args:
        decoder: that decoded it.
        row: ended or not.
        steps: so far.
        batch: in which it was decoded.
        spent: on these steps, and on reading the prompt.
        keep_stop_string: whether the text keeps the stop string that ended it.
    """
    new = row.ids[row.prompt_length :][: sum(len(step.tokens) for step in steps)]  # an interrupted step has none
    tree_sizes, notes = TreeSizes.of(steps), [*decoder.notes, *batch.notes, *row.notes]
    if (reasons := batch.policy.reasons([draft.name for draft in decoder.drafts], batch.rows)) is not None:
        notes.append(f"auto: {paid(steps)}")
        if measured := "; ".join(filter(None, [str(tree_sizes), reasons])):
            notes.append(f"auto's figures: {measured}")
    drafting = (spent - Reading(drafting=((0, 0.0),) * len(decoder.drafts))).drafting
    if row.constraint:
        drafting = (*drafting, (0, row.constraint.seconds))
    stats = Stats(
        new_tokens=len(new),
        target_passes=len(steps),
        draft_passes=sum(passes for passes, _ in drafting),
        acceptance_by_depth=tuple(accepted / tested for accepted, tested in counts_by_depth(steps)),
        seconds=spent.seconds,
        notes=tuple(notes),
        tree_sizes=tree_sizes,
        drafts=tuple(
            contribution(steps, number, name, *clocks)
            for number, (name, clocks) in enumerate(zip(row.draft_names, drafting, strict=True))
        ),
        cached_tokens=row.text.cached,
    )
    return Result(
        text=_text(decoder.tokenizer, row, new, keep_stop_string) if decoder.tokenizer else "",
        token_ids=new,
        prompt_ids=row.ids[: row.prompt_length],
        finish_reason=row.finished or UNFINISHED,
        seed=row.seed if row.sampling else None,
        stats=stats,
        steps=steps,
        made_by=_made_by(decoder, row, batch.policy),
        tokenizer=decoder.tokenizer,
    )


def _made_by(decoder: Decoder, row: Row, policy: Policy) -> dict[str, object]:
    """Return what made a row's text, in words and numbers."""
    return {
        "target": decoder.target.checkpoint,
        "drafts": [draft.name for draft in decoder.drafts],
        "tree": str(policy),
        "verifier": str(decoder.verifier),
        "sampling": row.options,
        "dtype": str(decoder.target.dtype).removeprefix("torch."),
        "device": decoder.target.device.type,
        "versions": versions(*([row.constraint.matcher.library] if row.constraint else [])),
    }


def _text(tokenizer: Any, row: Row, new: Sequence[int], keep_stop_string: bool) -> str:
    """Return the text of a row's new tokens, with or without the stop string, which may begin in the prompt."""
    if not keep_stop_string and row.stopping.strings:
        return row.stopping.strings.text_before(row.ids[: row.prompt_length + len(new)], row.prompt_length)
    text: str = tokenizer.decode(new, skip_special_tokens=True)
    return text
