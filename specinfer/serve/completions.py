"""``/v1/completions``: texts or token ids in, their continuations out; prompts come back with ``echo``.

Knows: the protocol's older form, log-likelihoods of prompts.  Does not know: HTTP, when steps are taken.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate

from specinfer.calls.scoring import Score
from specinfer.common.token_text import plain_text
from specinfer.serve.answer import Answer, Served
from specinfer.serve.choice import Likely, News
from specinfer.serve.protocol import CompletionBody


class Completion(Answer[CompletionBody]):
    """The continuations of prompts: those of the first, then those of the second, and so on."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"
    source = "prompt"

    def __init__(self, body: CompletionBody, served: Served, client: str = "") -> None:
        super().__init__(body, served, client)
        self.offsets: dict[int, int] = {}  # characters of a choice's tokens so far

    @property
    def texts(self) -> int:
        """How many texts were asked for."""
        return len(self.body.prompts) * super().texts

    def read(self) -> Iterator[list[int]]:
        """Yield the token ids of the prompts, without a chat template."""
        for prompt in self.body.prompts:
            yield self.served.decoder.read(prompt, raw=True).only

    def scoring(self) -> list[Callable[[], Score]]:
        """Return the functions to call in the engine's thread, for `scores`: each scores a prompt."""
        wanted = self.prompts if self.body.echo and self.body.logprobs is not None else []
        return [partial(self._scored, ids) for ids in wanted]

    def _scored(self, ids: list[int]) -> Score:
        """Return how likely a prompt is after its first token."""
        if len(ids) == 1:
            return Score([], [], [])
        return self.served.decoder.score(ids[:1], ids[1:], top_logprobs=self.body.logprobs or 0)

    def first_chunks(self) -> Iterator[dict[str, object]]:
        """Yield the chunks of prompts that are echoed."""
        for index in range(len(self.choices)) if self.body.echo else ():
            text, tokens = self._prompt(index)
            yield self.chunk(index, {"text": text}, self._logprobs(index, tokens))

    def chunks_of(self, index: int, news: News) -> Iterator[dict[str, object]]:
        """Yield the chunks of a choice's news: its text, and the end."""
        logprobs = self._logprobs(index, news.tokens)
        if news.text:
            yield self.chunk(index, {"text": news.text}, logprobs)
            logprobs = None
        if news.reason:
            yield self.chunk(index, {"text": ""}, logprobs, ended=True)

    def whole_choice(self, index: int, news: News) -> dict[str, object]:
        """Return a choice in one piece."""
        text, tokens = self._prompt(index) if self.body.echo else ("", [])
        logprobs = self._logprobs(index, [*tokens, *news.tokens])
        return {"index": index, "text": text + news.text, "logprobs": logprobs, **self.ending(index)}

    def _prompt(self, index: int) -> tuple[str, list[Likely]]:
        """Return the prompt of a choice, and its tokens if it was scored."""
        number = index // (self.body.n or 1)
        given, ids = self.body.prompts[number], self.prompts[number]
        text: str = given if isinstance(given, str) else self.served.decoder.tokenizer.decode(ids)
        if not self.scores:
            return text, []
        score = self.scores[number]
        tops = score.top_logprobs or [()] * len(score.token_ids)
        return text, [Likely(ids[0], None), *map(Likely, score.token_ids, score.log_probabilities, tops)]

    def _logprobs(self, index: int, tokens: Sequence[Likely]) -> dict[str, object] | None:
        """Return log-probabilities of a choice's next tokens, in the form of completions."""
        if not tokens:
            return None
        texts = [self._text(each.token) for each in tokens]
        *offsets, self.offsets[index] = accumulate(map(len, texts), initial=self.offsets.get(index, 0))
        tops = [self._top(each) for each in tokens]
        values = [each.logprob for each in tokens]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, each: Likely) -> dict[str, float] | None:
        """Return log-probabilities by text, the token's and those of the likeliest ones; None without a token's."""
        if each.logprob is None:
            return None
        likely = {self._text(token): value for token, value in reversed(each.top)}  # of equal texts, the likelier
        return {self._text(each.token): each.logprob} | likely

    def _text(self, token: int) -> str:
        return plain_text(self.served.decoder.tokenizer, token)
