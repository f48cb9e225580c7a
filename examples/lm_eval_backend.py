"""specinfer under EleutherAI's evaluation harness: `lm_eval.simple_evaluate(model=SpecinferLM(decoder), tasks=[...])`.

    pip install lm_eval && python examples/lm_eval_backend.py

Requests to generate go through `generate_many`, so rows join as others end, with speculation and the same texts.
Log-likelihoods go through `score`: choices of one question are a token tree, which one pass scores.  Every answer goes
to the harness's cache at once, so an evaluation with `use_cache` resumes after a kill.

What the model reads and where a text ends are as in `HFLM`, the Hugging Face model of lm_eval 0.4.13 (its
`api/model.py`, `models/huggingface.py`, `models/utils.py`), so numbers are those of `HFLM`.  Options of a request that
the decoder does not know, or that have no effect, are errors with their names.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any
from warnings import warn

from jinja2 import TemplateError
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from specinfer import SpeculativeDecoder

ROWS = 16  # prompts at a time
ASKED = 1024  # requests for log-likelihoods that are sorted by length, and scored before the next ones are encoded
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # names of one option

Pair = tuple[list[int], list[int]]  # token ids of a context and of its continuation


class SpecinferLM(LM):
    """A decoder as a model of the harness."""

    def __init__(self, decoder: SpeculativeDecoder, max_new_tokens: int = 256) -> None:
        super().__init__()
        self.decoder, self.max_new_tokens = decoder, max_new_tokens
        self.tokenizer = decoder.tokenizer
        config = decoder.target.model.config.get_text_config(decoder=True)
        said = getattr(config, "max_position_embeddings", None) or self.tokenizer.model_max_length  # or 1e30
        size = said if said < 1e30 else 2048
        self.context = min(size, decoder.target.position_limit() or size)
        first = self.tokenizer.bos_token_id
        self.prefix = [self.tokenizer.eos_token_id if first is None else first]
        self.opening = self.tokenizer.decode(self.prefix)

    @property
    def tokenizer_name(self) -> str:
        """The name under which the harness keeps requests that a chat template made."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the template, of several the one with this name: the harness notes it among its results."""
        template = self.tokenizer.chat_template if chat_template else None
        name = chat_template if isinstance(chat_template, str) else "default"
        return template[name] if isinstance(template, dict) else template

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of messages; without those of the system, if the template refuses them."""
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        try:
            return self.tokenizer.apply_chat_template(chat_history, tokenize=False, **options)
        except TemplateError:
            others = [message for message in chat_history if message["role"] != "system"]
            return self.tokenizer.apply_chat_template(others, tokenize=False, **options)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text of each request, up to its first stop string."""
        texts: dict[int, str] = {}
        asked = (self._asked(*request.args) for request in requests)
        for number, result, error in self.decoder.generate_many(asked, max_rows=ROWS):
            if error is not None:
                raise error
            text = result.text
            for stop in filter(None, self._stops(requests[number].args[1])):
                text = text.split(stop)[0]
            texts[number] = text
            self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return [texts[number] for number in range(len(requests))]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood, and whether it is what greedy decoding writes."""
        answers, left = [], iter(requests)
        while some := list(islice(left, ASKED)):
            pairs = [self._split(*request.args) for request in some]
            for request, answer in zip(some, self._scores(pairs), strict=True):
                answers.append(answer)
                self.cache_hook.add_partial("loglikelihood", request.args, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts, in windows as long as the context."""
        totals = []
        for request in requests:
            windows = [*self._windows(self._ids(request.args[0]))]
            totals.append(sum(total for total, _ in self._scores(windows)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def _asked(self, prompt: str, given: dict[str, Any]) -> dict[str, Any]:
        """Return one of many prompts with its options; a long one loses its beginning."""
        options = {name: value for name, value in given.items() if name != "until"}
        limits = {name: value for name in LIMITS if (value := options.pop(name, None)) is not None}
        if len(limits) > 1:
            warn(f"{limits} are names of one option: the first counts", stacklevel=2)
        new = int(next(iter(limits.values()), self.max_new_tokens))
        if options.get("max_length") is None:  # which counts the prompt
            options["max_new_tokens"] = new
        options["temperature"] = options.get("temperature") or 0
        if options.get("do_sample") is None:
            options["do_sample"] = options["temperature"] > 0
        ids = self._ids(prompt)[-max(1, self.context - new) :]
        ends = self._ends(len(ids), self._stops(given))
        own = {"prompt": ids, "attention_mask": [1] * len(ids), "stopping_criteria": ends}  # nothing is padding
        return dict(**own, **options)  # an error where the harness gives one of the former

    def _stops(self, options: dict[str, Any]) -> list[str]:
        """Return the strings that end a text, of which one is the end of sequence."""
        until, eos = options.get("until") or [], self.tokenizer.eos_token
        return [*([until] if isinstance(until, str) else until), *([eos] if eos else [])]

    def _ends(self, start: int, stops: list[str]) -> Callable[[Any, Any], bool]:
        """Return a stopping criterion: a stop string is in the newest tokens.  One that began in the prompt is none."""
        longest = 2 + max((len(self._ids(stop, bare=True)) for stop in stops), default=0)

        def ends(ids: Any, scores: Any) -> bool:
            text = self.tokenizer.decode(ids[0, start:][-longest:])
            return any(stop in text for stop in stops)

        return ends

    def _split(self, context: str, continuation: str) -> Pair:
        """Return the ids of a context and its continuation, encoded as one text; spaces belong to the latter."""
        if context:
            before = self._ids(context.rstrip())
            after = self._ids(context + continuation)[len(before) :]
        else:
            before, after = [], self._ids(continuation, bare=True)
            if after[:1] == self.prefix:
                before, after = after[:1], after[1:]
        return (before or self.prefix)[-max(1, self.context + 1 - len(after)) :], after

    def _windows(self, ids: list[int]) -> Iterator[Pair]:
        """Yield a text part by part, each below as much of what came before it as fits."""
        for start in range(0, len(ids), self.context):
            part = ids[start : start + self.context]
            yield (ids[start + len(part) - self.context - 1 : start] if start else self.prefix), part

    def _ids(self, text: str, bare: bool = False) -> list[int]:
        """Return the ids of a text with those that its tokenizer adds, unless it begins with the first of them."""
        adds = not bare and not text.startswith(self.opening)
        return list(self.tokenizer(text, add_special_tokens=adds)["input_ids"])

    def _scores(self, pairs: list[Pair]) -> list[tuple[float, bool]]:
        """Score continuations.  One without tokens, because the context's last one holds it, is certain."""
        asked = [pair for pair in pairs if pair[1]]
        contexts = {"input_ids": [before for before, _ in asked], "attention_mask": [[1] * len(b) for b, _ in asked]}
        found = self.decoder.score(contexts, [after for _, after in asked], max_rows=ROWS) if asked else []
        scores = iter([(score.total, score.is_greedy) for score in found])
        return [next(scores) if after else (0.0, True) for _, after in pairs]


if __name__ == "__main__":
    model = SpecinferLM(SpeculativeDecoder.from_pretrained())

    def requests(kind: str, *args: tuple[Any, ...]) -> list[Instance]:
        """Return what the harness would ask."""
        return [Instance(kind, {}, arguments, index) for index, arguments in enumerate(args)]

    options = {"until": ["\n"], "max_gen_toks": 24}
    print(model.generate_until(requests("generate_until", ("The capital of France is", options))))
    pairs = [("The capital of France is", " Paris"), ("The capital of France is", " a"), ("", "Once upon a time")]
    print(model.loglikelihood(requests("loglikelihood", *pairs)))
    print(model.loglikelihood_rolling(requests("loglikelihood_rolling", ("Once upon a time there was a tree.",))))
