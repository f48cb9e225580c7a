"""Requests: texts that were asked for, from their settings to their results.

Knows: rows and how they are made, what was recorded of them.  Does not know: when and beside whom they are decoded.
"""

from collections.abc import Callable, Sequence
from typing import Any

from specinfer.engine.callables import BatchRow
from specinfer.engine.clocks import Reading
from specinfer.engine.outcome import Batch, result_of
from specinfer.engine.sampling import GenerationSettings, Processors
from specinfer.engine.sequence import Row
from specinfer.engine.sessions import Decoder
from specinfer.engine.stopping import Stopping
from specinfer.results import Result, Step


class Request:
    """A text that was asked for: give it to a `Scheduler`, and read its `result`.

    Attributes:
        row: what is decoded.
        steps: so far.
        done: nothing more will come: it has ended, was aborted, or failed.
        error: what ended the step that it was in, if something did.
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
        return self.row.finished or "unfinished"

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
        self.row.finished, self.error = reason or self.row.finished, error
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
    logprobs: bool = False,
    keep_stop_string: bool = True,
    first: int = 0,
    stopping: Callable[..., Stopping] = Stopping,
) -> list[Request]:
    """Return the requests of a call, those of the first prompt first.

    Args:
        decoder: that will decode them.
        prompts, settings: of each prompt.
        seeds: of each request.
        sequences: requests of each prompt.
        notes: of each prompt, what was decided about it.
        paddings: of each prompt, what processors and criteria see before it.
        logprobs: whether steps keep the log-probabilities of their tokens.
        keep_stop_string: whether texts keep the stop string that ended them.
        first: number of the first row.
        stopping: makes what ends a row.

    Raises:
        InputError: a prompt leaves no room within ``max_length``.
        SamplingError: stop strings without a tokenizer, an option that a processor refuses, or a function whose state
            rows would share.
    """
    common: dict[str, Any] = {
        "device": decoder.target.device,
        "tokenizer": decoder.tokenizer,
        "draft_names": [draft.name for draft in decoder.drafts],
        "gate": decoder.confidence_gate,
        "logprobs": logprobs,
        "stopping": stopping,
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
