"""specinfer under EleutherAI's evaluation harness: `lm_eval.simple_evaluate(model=SpecinferLM(decoder), tasks=[...])`.

    pip install lm_eval && python examples/lm_eval_backend.py

Requests to generate go through `generate_many`, so rows join as others end, with speculation and the same texts.
Log-likelihoods go through `score`, some requests at a time.  Texts are fed as they are (raw): the harness applies chat
templates itself.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from specinfer import SpeculativeDecoder

ROWS = 16  # at a time


class SpecinferLM(LM):
    """A decoder as a model of the harness."""

    def __init__(self, decoder: SpeculativeDecoder, max_new_tokens: int = 256) -> None:
        super().__init__()
        self.decoder, self.max_new_tokens = decoder, max_new_tokens
        self.tokenizer = decoder.tokenizer
        end = self.tokenizer.bos_token_id
        self.prefix = [self.tokenizer.eos_token_id if end is None else end]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text of each request, up to its first stop string."""
        texts: dict[int, str] = {}
        asked = [self._asked(*request.args) for request in requests]
        for number, result, error in self.decoder.generate_many(asked, max_rows=ROWS, keep_stop_string=False, raw=True):
            if error is not None:
                raise error
            texts[number] = result.text
        return [texts[number] for number in range(len(requests))]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood, and whether it is what greedy decoding writes."""
        scores = self._scores([self._split(*request.args) for request in requests])
        return [(score.total, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts, in windows as long as the context."""
        longest, totals = self.decoder.target.max_positions or 2048, []
        for request in requests:
            windows = get_rolling_token_windows(self._ids(request.args[0]), self.prefix[0], longest - 1, 1)
            totals.append(sum(score.total for score in self._scores([*map(make_disjoint_window, windows)])))
        return totals

    def _asked(self, prompt: str, options: dict[str, Any]) -> dict[str, Any]:
        """Return one of many prompts, from what the harness asks."""
        until, temperature = options.get("until") or [], options.get("temperature") or 0.0
        new = options.get("max_gen_toks", self.max_new_tokens)
        sampled = {"temperature": temperature} if options.get("do_sample") else {"temperature": 0}
        stops = {"stop_strings": [until] if isinstance(until, str) else list(until)} if until else {}
        return {"prompt": prompt, "max_new_tokens": new, **sampled, **stops}

    def _split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the ids of a context and its continuation, encoded as one text; spaces belong to the latter."""
        stripped = context.rstrip()
        whole = self._ids(context + continuation)
        before = self._ids(stripped) if stripped else []
        return (before, whole[len(before) :]) if before else (self.prefix, whole)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _scores(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Any]:
        """Score pairs of (context, continuation), some at a time, the longest first."""
        order = sorted(range(len(pairs)), key=lambda index: -sum(map(len, pairs[index])))
        found: dict[int, Any] = {}
        for batch in _batches(order):
            scores = self.decoder.score([pairs[index][0] for index in batch], [pairs[index][1] for index in batch])
            found |= dict(zip(batch, scores, strict=True))
        return [found[index] for index in range(len(pairs))]


def _batches(order: Sequence[int]) -> Iterator[Sequence[int]]:
    yield from (order[start : start + ROWS] for start in range(0, len(order), ROWS))


if __name__ == "__main__":
    model = SpecinferLM(SpeculativeDecoder.from_pretrained())

    def requests(kind: str, *args: tuple[Any, ...]) -> list[Instance]:
        """Return what the harness would ask."""
        return [Instance(kind, {}, arguments, index) for index, arguments in enumerate(args)]

    options = {"until": ["\n"], "max_gen_toks": 24}
    print(
        model.generate_until(requests("generate_until", ("The capital of France is", options), ("1, 2, 3,", options)))
    )
    pairs = [("The capital of France is", " Paris"), ("The capital of France is", " a"), ("", "Once upon a time")]
    print(model.loglikelihood(requests("loglikelihood", *pairs)))
    print(model.loglikelihood_rolling(requests("loglikelihood_rolling", ("Once upon a time there was a tree.",))))
