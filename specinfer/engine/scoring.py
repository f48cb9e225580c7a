"""The log-likelihood of a given continuation under the target, for evaluation harnesses and rankings.

Knows: prompts, the target's passes, its distribution without processors.  Does not know: drafts, trees, sampling.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum, isnan
from typing import Any

import torch
from torch import Tensor

from specinfer.attention import TreeModel, lay_out_chains, on_device, running
from specinfer.common.values import plain
from specinfer.errors import CHECK_WEIGHTS, InputError, NumericalError
from specinfer.prompts import Prompts, check_ids, tokenized

SCORED = 256  # tokens of all rows whose logits one pass returns at most: this bounds its memory


@dataclass(frozen=True)
class Score:
    """How likely a continuation is.

    Attributes:
        token_ids: of the continuation.
        log_probabilities: natural logarithms, of each token given the prompt and the tokens before it.
        greedy: for each token, whether it is the target's most likely one.
    """

    token_ids: list[int]
    log_probabilities: list[float]
    greedy: list[bool]

    @property
    def total(self) -> float:
        """The natural logarithm of the probability of the whole continuation."""
        return fsum(self.log_probabilities)

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding would write the continuation."""
        return all(self.greedy)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {"total": self.total, "is_greedy": self.is_greedy, **vars(self)}


def continuations(prompts: Prompts, given: Any, tokenizer: Any, vocab_size: int) -> list[list[int]]:
    """Return the token ids of continuations, one for each prompt.

    Raises:
        InputError: there is not one for each, or one cannot be read.
    """
    if not prompts.single and (isinstance(given, str) or not isinstance(given, Iterable)):
        raise InputError("several prompts need a list of continuations: give one for each prompt")
    every = [given] if prompts.single else list(given)
    if len(every) != len(prompts.rows):
        raise InputError(f"{len(prompts.rows)} prompts and {len(every)} continuations: give one for each prompt")
    wanted = [_ids(continuation, tokenizer, row) for row, continuation in enumerate(every)]
    check_ids(wanted, vocab_size)
    return wanted


def _ids(continuation: Any, tokenizer: Any, row: int) -> list[int]:
    """Return the token ids of a continuation."""
    continuation = plain(continuation)
    if isinstance(continuation, str):
        continuation = tokenized(continuation, tokenizer, add_special_tokens=False)
    if not isinstance(continuation, Sequence) or isinstance(continuation, bytes):
        raise InputError(f"row {row}: a continuation must be text or token ids, not {type(continuation).__name__}")
    if not continuation:
        raise InputError(f"row {row}: the continuation is empty, so there is nothing to score: give at least one token")
    return list(continuation)


def score(target: TreeModel, prompts: Sequence[list[int]], wanted: Sequence[list[int]]) -> list[Score]:
    """Score a continuation of each prompt; all rows share their passes.

    Raises:
        NumericalError: the target's logits are not numbers.
    """
    scores = [Score(continuation, [], []) for continuation in wanted]
    fed = [[prompt[-1], *tokens[:-1]] for prompt, tokens in zip(prompts, wanted, strict=True)]  # each chooses the next
    longest = max(len(prompt) + len(tokens) for prompt, tokens in zip(prompts, wanted, strict=True))
    chunk = max(1, SCORED // len(prompts))
    with running(target):
        session = target.session(len(prompts), longest + chunk)
        session.prefill([prompt[:-1] for prompt in prompts])
        for start in range(0, max(map(len, fed)), chunk):
            chunks = [tokens[start : start + chunk] for tokens in fed]
            logits = session.append(lay_out_chains(chunks, target.device))
            for row, tokens in enumerate(chunks):
                _extend(scores[row], logits[row, : len(tokens)], start, row)
            session.commit([range(len(tokens)) for tokens in chunks])
    return scores


def _extend(score: Score, logits: Tensor, start: int, row: int) -> None:
    """Score the tokens from index ``start`` on, from the logits (T, V) that choose them."""
    tokens = score.token_ids[start : start + len(logits)]
    score.log_probabilities.extend(log_probabilities(logits, tokens))
    score.greedy.extend((logits.argmax(-1) == on_device(tokens, logits.device)).tolist())
    if any(map(isnan, score.log_probabilities)):
        where = f"row {row}, within {start + len(logits)} tokens after the prompt"
        raise NumericalError(f"{where}: the target's logits are not numbers. {CHECK_WEIGHTS}")


def log_probabilities(logits: Tensor, tokens: Sequence[int]) -> list[float]:
    """Return the natural logarithms of the probabilities of T tokens, under the logits (T, V) that choose them."""
    found = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return found.gather(1, on_device(tokens, logits.device)[:, None])[:, 0].tolist()
