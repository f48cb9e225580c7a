"""The text of one request as it becomes known: whole characters, and nothing that a stop string may take away.

Knows: tokens, texts, stop strings.  Does not know: HTTP, the protocol, when steps are taken.
"""

from collections.abc import Sequence
from typing import NamedTuple

from specinfer.engine.detokenize import Pieces
from specinfer.engine.requests import Request
from specinfer.engine.sequence import Stopping
from specinfer.errors import InputError, SamplingError
from specinfer.serve.protocol import failed, overloaded, refused

REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


class Likely(NamedTuple):
    """A token with its log-probability, and the likeliest ones in its position with theirs."""

    token: int
    logprob: float | None  # None of a prompt's first token
    top: Sequence[tuple[int, float]] = ()


class News(NamedTuple):
    """The news of a text.

    Attributes:
        text: that follows the known text.
        tokens: likewise, if log-probabilities are kept; maybe of text that is not known yet.
        reason: why it ended, in the protocol's words; None while it goes on.
    """

    text: str
    tokens: list[Likely]
    reason: str | None


class AfterPrompt(Stopping):
    """Stops at strings in the text alone: none begins in the prompt."""

    def reason(self, ids: Sequence[int], new_tokens: int) -> str | None:
        """Return why the text ends with the last id, or None."""
        if self.strings is not None:
            ids = ids[len(ids) - new_tokens :]
        return super().reason(ids, new_tokens)


class Choice:
    """A text, for a reader who asks from time to time.

    Args:
        request: whose text it is.
        stops: strings of which the text holds nothing.
        special: whether special tokens are part of it.
    """

    def __init__(self, request: Request, stops: Sequence[str] = (), special: bool = False) -> None:
        self.request, self.stops, self.special = request, stops, special
        self.tokenizer = request.decoder.tokenizer
        self.ids: list[int] = []
        self.ended = False
        self._pieces = Pieces(self.tokenizer, special=special)
        self._text, self._sent = "", 0
        self._steps = 0  # that were read
        self._tokens: list[Likely] = []

    def news(self) -> News | None:
        """Return the news, or None.

        Raises:
            ApiError: the request failed, or the server shuts down.
        """
        done = self.request.done  # before its steps are read, or the last one may be missed
        steps = self.request.steps[self._steps :]
        if self.request.row.finished and not done:
            return None  # the last step may be among them, with a stop string, and the request is done in a moment
        self._steps += len(steps)
        for step in steps:
            self.ids += step.tokens
            if step.logprobs is not None:
                tops = step.top_logprobs or [()] * len(step.tokens)
                self._tokens += map(Likely, step.tokens, step.logprobs, tops)
        if not done:
            self._text += self._pieces.more(self.ids) if steps else ""
            return self._passed_on(len(self._text) - self._held(), None)
        if self.ended:
            return None
        self.ended, reason = True, self.finish_reason
        return self._passed_on(self._whole(), reason)

    def _whole(self) -> int:
        """Take the text as it is in the end; return how many of its characters stand before a stop string."""
        self._text = self.tokenizer.decode(self.ids, skip_special_tokens=not self.special)
        stops = self.stops if self.request.finish_reason == "stop" else ()
        found = (self._text.find(stop, self._sent) for stop in stops)
        return min((begin for begin in found if begin >= 0), default=len(self._text))

    def _held(self) -> int:
        """Return how many characters at the end may begin a stop string."""
        beginnings = (stop[:length] for stop in self.stops for length in range(1, len(stop)))
        return max((len(beginning) for beginning in beginnings if self._text.endswith(beginning)), default=0)

    def _passed_on(self, end: int, reason: str | None) -> News | None:
        """Return the text up to an index as news, if it is any."""
        text = self._text[self._sent : end]
        if not (text or reason):
            return None
        self._sent += len(text)
        tokens, self._tokens = self._tokens, []
        return News(text, tokens, reason)

    @property
    def finish_reason(self) -> str:
        """Why it ended, in the protocol's words.

        Raises:
            ApiError: it failed, or the server shut down.
        """
        if error := self.request.error:
            raise refused(error) if isinstance(error, InputError | SamplingError) else failed()
        if self.request.finish_reason not in REASONS:
            raise overloaded("the server shut down before the text ended")
        return REASONS[self.request.finish_reason]

    @property
    def seed(self) -> int | None:
        """The seed that repeats a sampled text."""
        return self.request.row.seed if self.request.row.sampling else None
