"""specinfer under EleutherAI's evaluation harness: `lm_eval.simple_evaluate(model=SpecinferLM(decoder), tasks=[...])`.

    pip install lm_eval && python examples/lm_eval_backend.py

Requests to generate go through `generate_many`, so rows join as others end, with speculation and the same texts.
Log-likelihoods go through `score`: choices of one question are a token tree, which one pass scores.  Texts are fed as
they are (raw): the harness applies chat templates itself.  What does not fit the target's context loses its beginning,
as in the harness's own models.  Every answer goes to the harness's cache at once, so an evaluation with `use_cache`
goes on after a kill.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from specinfer import SpeculativeDecoder

ROWS = 16  # prompts at a time
ASKED = 1024  # requests for log-likelihoods that are sorted by length, and scored before the next ones are encoded

Pair = tuple[list[int], list[int]]  # token ids of a context and of its continuation


class SpecinferLM(LM):
    """A decoder as a model of the harness."""

    def __init__(self, decoder: SpeculativeDecoder, max_new_tokens: int = 256) -> None:
        super().__init__()
        self.decoder, self.max_new_tokens = decoder, max_new_tokens
        self.tokenizer = decoder.tokenizer
        self.context = decoder.target.position_limit() or 2048
        first = self.tokenizer.bos_token_id
        self.prefix = [self.tokenizer.eos_token_id if first is None else first]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text of each request, up to its first stop string."""
        texts: dict[int, str] = {}
        asked = (self._asked(*request.args) for request in requests)
        for number, result, error in self.decoder.generate_many(asked, max_rows=ROWS, keep_stop_string=False):
            if error is not None:
                raise error
            texts[number] = result.text
            self.cache_hook.add_partial("generate_until", requests[number].args, result.text)
        return [texts[number] for number in range(len(requests))]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood, and whether it is what greedy decoding writes."""
        answers, left = [], iter(requests)
        while some := list(islice(left, ASKED)):
            pairs = [self._split(*request.args) for request in some]
            for request, score in zip(some, self._scores(pairs), strict=True):
                answers.append((score.total, score.is_greedy))
                self.cache_hook.add_partial("loglikelihood", request.args, answers[-1])
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts, in windows as long as the context."""
        totals = []
        for request in requests:
            windows = [*self._windows(self._ids(request.args[0]))]
            totals.append(sum(score.total for score in self._scores(windows)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def _asked(self, prompt: str, options: dict[str, Any]) -> dict[str, Any]:
        """Return one of many prompts, from what the harness asks."""
        until, temperature = options.get("until") or [], options.get("temperature") or 0.0
        new = options.get("max_gen_toks", self.max_new_tokens)
        ids = self.decoder.read(prompt, raw=True).rows[0]
        sampled = {"temperature": temperature if options.get("do_sample") else 0}
        stops = {"stop_strings": [until] if isinstance(until, str) else list(until)} if until else {}
        return {"prompt": ids[-max(1, self.context - new) :], "max_new_tokens": new, **sampled, **stops}

    def _split(self, context: str, continuation: str) -> Pair:
        """Return the ids of a context and its continuation, encoded as one text; spaces belong to the latter."""
        stripped = context.rstrip()
        whole = self._ids(context + continuation)
        before = self._ids(stripped) if stripped else []
        before, after = (before, whole[len(before) :]) if before else (self.prefix, whole)
        return before[-max(1, self.context - len(after)) :], after

    def _windows(self, ids: list[int]) -> Iterator[Pair]:
        """Yield a text part by part, each below as much of what came before it as fits."""
        size = self.context - 1
        for start in range(0, len(ids), size):
            part = ids[start : start + size]
            yield (ids[max(0, start + len(part) - size - 1) : start] if start else self.prefix), part

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _scores(self, pairs: list[Pair]) -> list[Any]:
        contexts, continuations = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        return self.decoder.score(contexts, continuations, max_rows=ROWS) if pairs else []


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
