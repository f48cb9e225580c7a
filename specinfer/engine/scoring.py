"""The log-likelihood of a given continuation under the target: what evaluation harnesses and rankings ask for.

Knows: prompts, the target's passes, its law without any processor.  Does not know: drafts, trees, sampling.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum, isnan
from typing import TYPE_CHECKING, Any

import torch

from specinfer.attention import TreeModel, lay_out_chains, running
from specinfer.common.values import plain
from specinfer.errors import InputError, NumericalError
from specinfer.prompts import Prompt, check_ids, spelt

if TYPE_CHECKING:
    from specinfer.decoder import SpeculativeDecoder

SCORED = 256  # tokens of all rows whose logits a pass hands out at most: bounds its memory


@dataclass(frozen=True)
class Score:
    """How likely a continuation is.

    Attributes:
        token_ids: of the continuation.
        log_probabilities: natural logarithms, of each token after the prompt and the tokens before it.
        greedy: for each token, whether it is the target's likeliest there.
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


def score(decoder: "SpeculativeDecoder", prompt: Prompt, continuation: Any, raw: bool) -> Score | list[Score]:
    """Score continuations: see `SpeculativeDecoder.score`."""
    prompts = decoder.read(prompt, raw)
    if not prompts.single and (isinstance(continuation, str) or not isinstance(continuation, Iterable)):
        raise InputError("several prompts need a list of continuations: give one for each prompt")
    given = [continuation] if prompts.single else list(continuation)
    if len(given) != len(prompts.rows):
        raise InputError(f"{len(prompts.rows)} prompts and {len(given)} continuations: give one for each prompt")
    wanted = [_ids(own, decoder.tokenizer, row) for row, own in enumerate(given)]
    check_ids(wanted, decoder.target.vocab_size)
    decoder.check_lengths(prompts.rows, [len(own) for own in wanted])
    decoder.supported(decoder.policy, [])
    scores = [Score(*own) for own in _scored(decoder.target, prompts.rows, wanted)]
    return scores[0] if prompts.single else scores


def _ids(continuation: Any, tokenizer: Any, row: int) -> list[int]:
    """Return the token ids of a continuation."""
    continuation = plain(continuation)
    if isinstance(continuation, str):
        continuation = spelt(continuation, tokenizer, add_special_tokens=False)
    if not isinstance(continuation, Sequence):
        raise InputError(f"row {row}: a continuation must be text or token ids, not {type(continuation).__name__}")
    if not continuation:
        raise InputError(f"row {row}: the continuation is empty, so there is nothing to score: give at least one token")
    return list(continuation)


def _scored(
    target: TreeModel, prompts: Sequence[list[int]], wanted: Sequence[list[int]]
) -> list[tuple[list[int], list[float], list[bool]]]:
    """Return ids, log-probabilities and greediness, row by row; all rows share their passes."""
    found: list[tuple[list[int], list[float], list[bool]]] = [(own, [], []) for own in wanted]
    fed = [[prompt[-1], *own[:-1]] for prompt, own in zip(prompts, wanted, strict=True)]  # each chooses the next
    longest = max(len(prompt) + len(own) for prompt, own in zip(prompts, wanted, strict=True))
    chunk = max(1, SCORED // len(prompts))
    with running(target):
        session = target.session(len(prompts), longest + chunk)
        session.prefill([prompt[:-1] for prompt in prompts])
        for start in range(0, max(map(len, fed)), chunk):
            chunks = [own[start : start + chunk] for own in fed]
            logits = session.append(lay_out_chains(chunks, target.device))
            for row, own in enumerate(chunks):
                _, log_probabilities, greedy = found[row]
                laws = logits[row, : len(own)].to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
                tokens = torch.tensor(wanted[row][start : start + chunk], dtype=torch.long, device=laws.device)
                log_probabilities += laws.gather(1, tokens[:, None])[:, 0].tolist()
                greedy += (laws.argmax(-1) == tokens).tolist()
                if any(map(isnan, log_probabilities)):
                    raise NumericalError(
                        f"row {row}: the target's logits are not numbers within {start + chunk} tokens after the "
                        "prompt. Check the weights, or load the model in float32"
                    )
            session.commit([range(len(own)) for own in chunks])
    return found
