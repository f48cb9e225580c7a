"""When a text ends: end-of-sequence tokens, stop strings, criteria, time, the number of tokens.

Knows: one row's token ids and the call's settings.  Does not know: trees, models.
"""

from collections.abc import Callable, Sequence
from math import inf
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from specinfer.common.values import plain
from specinfer.engine.sampling import GenerationSettings, _merged
from specinfer.errors import SamplingError


class Stopping:
    """Decides, token by token, whether a row's text has ended, and why.

    Args:
        settings: the call's settings.
        budget: most new tokens.
        device: where criteria find the ids.
        tokenizer: needed for ``stop_strings`` only.

    Raises:
        SamplingError: ``stop_strings`` without a tokenizer.
    """

    def __init__(self, settings: GenerationSettings, budget: int, device: Any = None, tokenizer: Any = None) -> None:
        from transformers import MaxTimeCriteria, StopStringCriteria

        self.eos, self.budget, self.stop_strings = settings.eos, budget, settings.stop_strings
        self.device = device
        if settings.stop_strings and tokenizer is None:
            raise SamplingError("stop_strings needs a tokenizer: construct the decoder with one")
        built = [StopStringCriteria(tokenizer, settings.stop_strings)] if settings.stop_strings else []
        self.criteria = _merged(built, settings.criteria)
        own_clock = any(type(criterion) is MaxTimeCriteria for criterion in settings.criteria)
        self.seconds = None if own_clock else settings.config.max_time
        self.deadline = inf

    def begin(self) -> None:
        """Start the clock of ``max_time``."""
        self.deadline = inf if self.seconds is None else monotonic() + self.seconds

    def reason(self, ids: Sequence[int], new_tokens: int) -> str | None:
        """Return "eos", "stop" or "length" if the text ends with the last id, else None."""
        if ids[-1] in self.eos:
            return "eos"
        if self.criteria:
            tensor = torch.tensor([list(ids)], device=self.device)
            if any(_answer(criterion, tensor) for criterion in self.criteria):
                return "stop"
        if monotonic() > self.deadline:
            return "stop"
        return "length" if new_tokens >= self.budget else None


def _answer(criterion: Callable[..., Any], ids: Tensor) -> bool:
    """Return what a stopping criterion says; raise `SamplingError` where that is neither yes nor no."""
    answer = plain(criterion(ids, None))
    values = answer if isinstance(answer, list) else [answer]
    if not all(isinstance(value, bool | int) for value in values):
        raise SamplingError(f"the stopping criterion {criterion!r:.60} returns {answer!r:.60}, neither True nor False")
    return any(values)
