"""The log-likelihood of given continuations under the target, for evaluation harnesses and rankings.

Continuations of one prompt are a token tree below it: the prompt is read once, and one pass scores all of them.

Knows: prompts, the target's passes, its distribution without processors.  Does not know: drafts, policies, sampling.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import fsum, isnan

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specinfer.attention import Support, TreeModel, TreeSession, check_model, lay_out_chains, running
from specinfer.common.tensors import on_device
from specinfer.common.values import plain
from specinfer.engine.sequence import likeliest, log_distributions, of_tokens
from specinfer.engine.store import PrefixStore, Text
from specinfer.errors import CHECK_WEIGHTS, InputError, NumericalError
from specinfer.prompts import Prompts, check_ids, tokenized
from specinfer.tree import TokenTree

SCORED = 256  # tokens of all rows whose logits one pass returns at most: this bounds its memory


@dataclass(frozen=True)
class Score:
    """How likely a continuation is.

    Attributes:
        token_ids: of the continuation.
        log_probabilities: natural logarithms, of each token given the prompt and the tokens before it.
        greedy: for each token, whether it is the target's most likely one.
        top_logprobs: for each token, the likeliest ones in its position with their log-probabilities, if asked for.
    """

    token_ids: list[int]
    log_probabilities: list[float]
    greedy: list[bool]
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)

    @property
    def total(self) -> float:
        """The natural logarithm of the probability of the whole continuation."""
        return fsum(self.log_probabilities)

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding would write the continuation."""
        return all(self.greedy)

    def to_dict(self) -> dict[str, object]:
        """Return a JSON-ready dict."""
        return {"total": self.total, "is_greedy": self.is_greedy, **vars(self)}


def continuations(
    prompts: Prompts, given: object, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int
) -> list[list[int]]:
    """Return the token ids of continuations, one for each prompt.

    Raises:
        InputError: there is not one for each, or one cannot be read.
    """
    if prompts.single:
        given = [given]
    elif isinstance(given, str) or not isinstance(given, Iterable):
        raise InputError("several prompts need a list of continuations: give one for each prompt")
    every = list(given)
    if len(every) != len(prompts.rows):
        raise InputError(f"{len(prompts.rows)} prompts and {len(every)} continuations: give one for each prompt")
    wanted = [_ids(continuation, tokenizer, row) for row, continuation in enumerate(every)]
    check_ids(wanted, vocab_size)
    return wanted


def _ids(continuation: object, tokenizer: PreTrainedTokenizerBase | None, row: int) -> list[int]:
    """Return the token ids of a continuation."""
    continuation = plain(continuation)
    if isinstance(continuation, str):
        continuation = tokenized(continuation, tokenizer, add_special_tokens=False)
    if not isinstance(continuation, Sequence) or isinstance(continuation, bytes):
        raise InputError(f"row {row}: a continuation must be text or token ids, not {type(continuation).__name__}")
    if not continuation:
        raise InputError(f"row {row}: the continuation is empty, so there is nothing to score: give at least one token")
    return list(continuation)


class _Question:
    """A prompt and those of its continuations that are scored together: several, or one of any length."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt, self.size = prompt, 1  # tokens that are scored at most
        self.wanted: dict[int, list[int]] = {}  # by number

    def add(self, number: int, tokens: list[int]) -> None:
        """Take another continuation."""
        self.wanted[number] = tokens
        self.size += len(tokens) - 1

    @property
    def chain(self) -> list[int]:
        """The tokens that choose those of a single continuation: the prompt's last one, then its own."""
        (tokens,) = self.wanted.values()
        return [self.prompt[-1], *tokens[:-1]]

    @cached_property
    def tree(self) -> TokenTree:
        """Of several, the same: the prompt's last token, and below it what continuations begin with."""
        beginnings = [tuple(tokens[:end]) for tokens in self.wanted.values() for end in range(1, len(tokens))]
        return TokenTree.from_paths(self.prompt[-1], dict.fromkeys(beginnings, 0.0), 0)

    def chosen_by(self, tokens: Sequence[int]) -> list[int]:
        """Return the nodes of the tree that choose the tokens of a continuation."""
        return [*accumulate(tokens[:-1], self.tree.child, initial=0)]  # type: ignore[arg-type]  # all are nodes


def score(
    target: TreeModel, prompts: Sequence[list[int]], wanted: Sequence[list[int]], max_rows: int, top: int
) -> list[Score]:
    """Score a continuation of each prompt.

    Args:
        target: the model.
        prompts: token ids.
        wanted: of the continuations.
        max_rows: prompts that are read at a time, of similar length.
        top: how many of the likeliest tokens are kept beside each one.

    Raises:
        NumericalError: the target's logits are not numbers.
    """
    scores = [Score(continuation, [], []) for continuation in wanted]
    branching = check_model(target.model).support is not Support.CHAIN_ONLY
    blocks = [*_blocks(_questions(prompts, wanted, branching), max_rows)]
    store = PrefixStore(wanted=lambda: bool(blocks))
    with running(target):
        while blocks:
            questions = blocks.pop(0)
            longest = max(len(question.prompt) + question.size for question in questions)
            texts = [Text(question.prompt) for question in questions]
            session = store.open(target, texts, longest + max(1, SCORED // len(questions)))
            store.begin(session)
            session.prefill([text.prompt[n:] for text, n in zip(texts, session.cache.lengths, strict=True)])
            (_score_trees if len(questions[0].wanted) > 1 else _score_chains)(session, questions, scores, top)
            store.release(session)
    return scores


def _questions(prompts: Sequence[list[int]], wanted: Sequence[list[int]], branching: bool) -> list[_Question]:
    """Return the continuations of equal prompts together, as far as one pass can return the logits of them."""
    questions: list[_Question] = []
    newest: dict[tuple[int, ...], _Question] = {}
    for number, (prompt, tokens) in enumerate(zip(prompts, wanted, strict=True)):
        question = newest.get(tuple(prompt))
        if question is None or not branching or question.size + len(tokens) - 1 > SCORED:
            newest[tuple(prompt)] = question = _Question(prompt)
            questions.append(question)
        question.add(number, tokens)
    return questions


def _blocks(questions: Sequence[_Question], max_rows: int) -> Iterator[list[_Question]]:
    """Yield questions that share their passes, the longest first: each with one continuation, or each with several."""
    for several in (False, True):
        left = [question for question in questions if (len(question.wanted) > 1) == several]
        left.sort(key=lambda question: len(question.prompt) + question.size)
        while left:
            block = left[-max_rows:]
            if several:  # one pass scores whole trees, padded to the largest
                sizes = accumulate((question.size for question in reversed(block)), max)
                block = block[-max(1, sum(rows * size <= SCORED for rows, size in enumerate(sizes, 1))) :]
            yield block
            del left[-len(block) :]


def _score_trees(session: TreeSession, questions: Sequence[_Question], scores: Sequence[Score], top: int) -> None:
    """Score the continuations of each prompt in one pass."""
    logits = session.score([question.tree for question in questions])
    for question, nodes in zip(questions, logits, strict=True):
        for number, tokens in question.wanted.items():
            _extend(scores[number], nodes[question.chosen_by(tokens)], 0, number, top)


def _score_chains(session: TreeSession, questions: Sequence[_Question], scores: Sequence[Score], top: int) -> None:
    """Score one continuation of each prompt, in as many passes as it takes."""
    chunk, numbers = max(1, SCORED // len(questions)), [next(iter(question.wanted)) for question in questions]
    for start in range(0, max(question.size for question in questions), chunk):
        chunks = [question.chain[start : start + chunk] for question in questions]
        logits = session.append(lay_out_chains(chunks, session.model.device))
        for number, row, tokens in zip(numbers, logits, chunks, strict=True):
            _extend(scores[number], row[: len(tokens)], start, number, top)
        session.commit([range(len(tokens)) for tokens in chunks])


def _extend(score: Score, logits: Tensor, start: int, row: int, top: int) -> None:
    """Score the tokens from index ``start`` on, from the logits (T, V) that choose them."""
    tokens = score.token_ids[start : start + len(logits)]
    found = log_distributions(logits)
    score.log_probabilities.extend(of_tokens(found, tokens))
    score.top_logprobs.extend(likeliest(found, top) if top else ())
    score.greedy.extend((logits.argmax(-1) == on_device(tokens, logits.device)).tolist())
    if any(map(isnan, score.log_probabilities)):
        where = f"row {row}, within {start + len(logits)} tokens after the prompt"
        raise NumericalError(f"{where}: the target's logits are not numbers. {CHECK_WEIGHTS}")
