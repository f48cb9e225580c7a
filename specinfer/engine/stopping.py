"""When a text ends: end-of-sequence tokens, stop strings, criteria, time, the number of tokens.

Knows: one row's token ids and the call's settings.  Does not know: trees, models.
"""

from collections.abc import Sequence
from math import inf
from time import monotonic
from typing import Any

import torch
from transformers import MaxTimeCriteria, StopStringCriteria

from specinfer.common.ranks import ALONE, Ranks
from specinfer.engine.sampling import GenerationSettings, with_custom
from specinfer.engine.stop_strings import StopStrings
from specinfer.errors import SamplingError


class Stopping:
    """Decides, token by token, whether a row's text has ended, and why.

    Args:
        settings: of the call.
        budget: new tokens at most.
        device: of the ids that criteria are given.
        tokenizer: needed for ``stop_strings`` only.
        padding: ids that criteria see before the row's ids, as `Processors`.

    Raises:
        SamplingError: ``stop_strings`` without a tokenizer.
    """

    def __init__(
        self,
        settings: GenerationSettings,
        budget: int,
        device: Any = None,
        tokenizer: Any = None,
        padding: Sequence[int] = (),
    ) -> None:
        self.eos, self.budget, self.device, self.padding = settings.eos, budget, device, padding
        self.criteria = with_custom([], settings.criteria)
        if settings.stop_strings and tokenizer is None:
            raise SamplingError("stop_strings needs a tokenizer: construct the decoder with one")
        # a criterion of the caller replaces what options ask for, as in transformers
        has_strings, has_clock = (
            any(type(criterion.function) is kind for criterion in self.criteria)
            for kind in (StopStringCriteria, MaxTimeCriteria)
        )
        asked = bool(settings.stop_strings) and not has_strings
        self.strings = StopStrings(tokenizer, settings.stop_strings) if asked else None
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
        stops = monotonic() > self.deadline or (self.strings is not None and self.strings.find(ids) is not None)
        if self.criteria:
            tensor = torch.tensor([[*self.padding, *ids]], device=self.device)
            stops = any(criterion.stops(tensor) for criterion in self.criteria) or stops
        if self.differs:
            stops = any(self.ranks.largest([stops]))
        if stops:
            return "stop"
        return "length" if new_tokens >= self.budget else None
