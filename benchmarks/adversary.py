"""What `auto` loses to drafts that are made to be rejected, by the clock: tokens a second beside plain decoding's.

    python benchmarks/adversary.py --prompts prompts/chat.jsonl prompts/roleplay.jsonl [--count 8]
        [--max-new-tokens 512] [--level 0.003] [--target DIR]

Each adversary is sure of its tokens.  "never right" always proposes wrong ones; "until trusted" knows the plain text,
is right until it was asked eight times, then wrong in the next eight, and so on; "1 of 3" is right every third time.  A
level takes as many seconds as ``--level`` says.  No text ends before it has all tokens (``min_new_tokens``).  Methods
take turns, prompt by prompt; texts have equal ids.  The rate is of all prompts after the first one, from whose text
costs are learnt.  "median" and "worst" are of single prompts, which a busy minute of the machine falsifies less, and
more.
"""

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch
from common import load_target, parser, print_rows, read_prompts
from torch import Tensor

from specinfer import SpeculativeDecoder
from specinfer.engine.draft import Committed, Draft, DraftContext, DraftSession, Scored, States
from specinfer.tree import DenseSource, Frontier

SURE = 0.96  # the probability of a token that an adversary proposes

ADVERSARIES: dict[str, Callable[[int], bool]] = {  # whether it is right, by how often it was asked
    "never right": lambda asked: False,
    "until trusted": lambda asked: asked // 8 % 2 == 0,
    "1 of 3": lambda asked: asked % 3 == 0,
}


class Adversary(Draft):
    """A draft that knows the text, and seldom says so.

    Args:
        name: of `ADVERSARIES`.
        level: seconds of a level.
    """

    def __init__(self, name: str, level: float) -> None:
        self.name, self.level, self.text, self.asked = name, level, list[int](), 0

    def open(self, context: DraftContext) -> "AdversarySession":
        """Start drafting for one row."""
        return AdversarySession(self, context)


class AdversarySession(DraftSession):
    """An adversary at work."""

    def __init__(self, draft: Adversary, context: DraftContext) -> None:
        self.draft, self.context, self.length = draft, context, 0  # new tokens so far

    def source(self, roots: Sequence[int]) -> DenseSource:
        """Return what it says."""
        right, self.draft.asked = ADVERSARIES[self.draft.name](self.draft.asked), self.draft.asked + 1

        def log_probs(frontier: Frontier) -> Tensor:
            sleep(self.draft.level)
            size, rest = self.context.vocab_size, self.draft.text[self.length + frontier.depth :]
            token = rest[0] if right and rest else (rest[0] + 1) % size if rest else 0
            found = torch.full((*frontier.tokens.shape, size), (1 - SURE) / size)
            found[..., token] = SURE
            return found.log()

        return DenseSource(log_probs, len(roots), draft=self.context.draft)

    def commit(self, tokens: Committed, states: States = (), scored: Sequence[Scored] = ()) -> None:
        """Count tokens."""
        self.length += sum(len(new or ()) for new in tokens)


def timed(decoder: SpeculativeDecoder, prompt: str, **options: Any) -> tuple[list[int], float]:
    """Return the ids of an answer, and its seconds."""
    started = perf_counter()
    result = decoder.generate(prompt, temperature=0, **options)
    return list(result.token_ids), perf_counter() - started


def main() -> None:
    """Measure, and print a line for each adversary."""
    p = parser(__doc__)
    p.set_defaults(count=8, max_new_tokens=512)
    p.add_argument("--level", type=float, default=0.003, help="seconds of a level")
    args = p.parse_args()
    model, tokenizer = load_target(args.target, "auto")
    plain = SpeculativeDecoder(model, tokenizer, [], None)
    decoders = {name: SpeculativeDecoder(model, tokenizer, [Adversary(name, args.level)]) for name in ADVERSARIES}
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in decoders}  # by prompt; plain decoding's beside
    asked, tokens = dict.fromkeys(decoders, 0), 0
    options = {"max_new_tokens": args.max_new_tokens, "min_new_tokens": args.max_new_tokens}
    for number, prompt in enumerate(read_prompts(args.prompts, args.count)):
        text, _ = timed(plain, prompt, **options)
        tokens += len(text) * (number > 0)
        for name, decoder in decoders.items():
            (draft,) = (draft for draft in decoder.drafts if isinstance(draft, Adversary))
            draft.text, draft.asked = text, 0
            pair = [timed(each, prompt, **options) for each in ((decoder, plain) if number % 2 else (plain, decoder))]
            (ids, seconds), (_, usual) = pair if number % 2 else pair[::-1]
            if ids != text:
                raise SystemExit(f"{name}: other ids than plain decoding's")
            if number:
                spent[name].append((seconds, usual))
                asked[name] += draft.asked
    for name, pairs in spent.items():
        seconds, usual = map(sum, zip(*pairs, strict=True))
        each = [own / plain - 1 for own, plain in pairs]
        row = {"adversary": name, "tokens": tokens, "asked": asked[name], "slower by": seconds / usual - 1}
        print_rows([{**row, "median": median(each), "worst": max(each)}])


if __name__ == "__main__":
    main()
