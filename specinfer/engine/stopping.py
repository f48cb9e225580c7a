"""When a text ends: end-of-sequence tokens, stop strings, criteria, time, the number of tokens.

Knows: one row's token ids and the call's settings.  Does not know: trees, models.
"""

from collections.abc import Callable, Sequence
from math import inf
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from transformers import MaxTimeCriteria, StopStringCriteria

from specinfer.common.ranks import ALONE, Ranks
from specinfer.common.values import plain
from specinfer.engine.sampling import GenerationSettings, with_custom
from specinfer.errors import SamplingError


class Stopping:
    """Decides, token by token, whether a row's text has ended, and why.

    Args:
        settings: of the call.
        budget: new tokens at most.
        device: of the ids that criteria are given.
        tokenizer: needed for ``stop_strings`` only.

    Raises:
        SamplingError: ``stop_strings`` without a tokenizer.
    """

    def __init__(self, settings: GenerationSettings, budget: int, device: Any = None, tokenizer: Any = None) -> None:
        self.eos, self.budget, self.stop_strings, self.device = settings.eos, budget, settings.stop_strings, device
        if self.stop_strings and tokenizer is None:
            raise SamplingError("stop_strings needs a tokenizer: construct the decoder with one")
        built = [StopStringCriteria(tokenizer, self.stop_strings)] if self.stop_strings else []
        self.criteria = with_custom(built, settings.criteria)
        has_clock = any(type(criterion) is MaxTimeCriteria for criterion in settings.criteria)
        self.seconds = None if has_clock else settings.config.max_time
        self.deadline = inf
        self.differs = bool(settings.criteria) or self.seconds is not None  # between processes, perhaps
        self.ranks = ALONE

    def begin(self, ranks: Ranks = ALONE) -> None:
        """Start the clock of ``max_time``.

        Args:
            ranks: the processes that decode this text; if one of them would stop, all do.
        """
        self.ranks = ranks
        self.deadline = inf if self.seconds is None else monotonic() + self.seconds

    def reason(self, ids: Sequence[int], new_tokens: int) -> str | None:
        """Return "eos", "stop" or "length" if the text ends with the last id, else None."""
        if ids[-1] in self.eos:
            return "eos"
        stops = monotonic() > self.deadline
        if self.criteria:
            tensor = torch.tensor([list(ids)], device=self.device)
            stops = any(_answer(criterion, tensor) for criterion in self.criteria) or stops
        if self.differs:
            stops = any(self.ranks.largest([stops]))
        if stops:
            return "stop"
        return "length" if new_tokens >= self.budget else None


def _answer(criterion: Callable[..., Any], ids: Tensor) -> bool:
    """Return a stopping criterion's answer; raise `SamplingError` if it is neither yes nor no."""
    answer = plain(criterion(ids, None))
    values = answer if isinstance(answer, list) else [answer]
    if not all(isinstance(value, bool | int) for value in values):
        raise SamplingError(f"the stopping criterion {criterion!r:.60} returns {answer!r:.60}, neither True nor False")
    return any(values)
