"""The n-gram draft: prompt lookup over the row's own text, as a tree.  No weights, no passes.

Knows: the token ids of each row.  Does not know: any model.

What followed earlier occurrences of the last 1, 2, ... ``max_ngram`` tokens is counted, and longer contexts are blended
with shorter ones by PPM's escape (Cleary and Witten 1984; method C, Moffat 1990): a context seen n times with d
different successors gives successor v probability ``count(v) / (n + d)`` and leaves ``d / (n + d)`` to the next shorter
context.  Below the shortest nothing is left to say, so probabilities sum to less than one.
"""

from collections import defaultdict
from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from specinfer.drafts.base import DraftContext, coupling_noise, draw_rows, keep_rows, row_generators
from specinfer.errors import InputError
from specinfer.tree import Forest, Frontier, Policy, TokenTree

RECENT = 32  # most occurrences of one n-gram that are looked at, the newest first


class NGramDraft:
    """Prompt lookup as a tree.

    Args:
        max_ngram: longest context looked up, in tokens; at least 1.

    Raises:
        InputError: ``max_ngram`` is below 1.
    """

    name = "ngram"

    def __init__(self, max_ngram: int = 4) -> None:
        if max_ngram < 1:
            raise InputError(f"max_ngram={max_ngram} looks nothing up: it must be at least 1")
        self.max_ngram = max_ngram

    def open(self, context: DraftContext) -> "NGramDraftSession":
        """Start drafting for a batch of rows."""
        return NGramDraftSession(context, self.max_ngram)


class _Text:
    """One row's ids, indexed: where each n-gram was followed by something."""

    def __init__(self, ids: Sequence[int], max_ngram: int) -> None:
        self.max_ngram = max_ngram
        self.ids: list[int] = []
        self.after: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # n-gram -> places that follow it
        self.extend(ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Append tokens and index the n-grams that they follow."""
        for token in ids:
            place = len(self.ids)
            for n in range(1, min(self.max_ngram, place) + 1):
                self.after[tuple(self.ids[place - n :])].append(place)
            self.ids.append(token)

    def matches(self, path: Sequence[int]) -> list[list[int]]:
        """Return, longest context first, the newest places that followed the text's end extended by ``path``."""
        context = (*self.ids[-self.max_ngram :], *path)[-self.max_ngram :]
        found = (self.after.get(context[-n:]) for n in range(len(context), 0, -1))
        return [places[-RECENT:] for places in found if places]

    def successors(self, path: Sequence[int]) -> dict[int, float]:
        """Return successor -> probability by PPM-C; newer successors come first."""
        distribution: dict[int, float] = {}
        left = 1.0
        for places in self.matches(path):
            counts: dict[int, int] = {}
            for place in reversed(places):
                token = self.ids[place]
                counts[token] = counts.get(token, 0) + 1
            total = len(places) + len(counts)
            for token, count in counts.items():
                distribution[token] = distribution.get(token, 0.0) + left * count / total
            left *= len(counts) / total
        return distribution


class NGramDraftSession:
    """An n-gram draft at work: a `Source` of sparse distributions on the CPU."""

    passes = 0
    seconds = 0.0
    prefill_seconds = 0.0
    device = torch.device("cpu")

    def __init__(self, context: DraftContext, max_ngram: int) -> None:
        self.context = context
        self.texts = [_Text(prompt, max_ngram) for prompt in context.prompts]
        self.seeds = list(context.seeds)
        self.couplings = list(context.couplings)
        self.paths: list[list[tuple[int, ...]]] = []  # per row: path of every frontier node so far, root first

    @property
    def batch(self) -> int:
        """Rows still active."""
        return len(self.texts)

    @property
    def draft(self) -> int:
        """The draft's id in the trees."""
        return self.context.draft

    def propose(self, policy: Policy, max_depth: int) -> Sequence[TokenTree]:
        """Grow one tree per row below its last committed token."""
        roots = [text.ids[-1] for text in self.texts]
        if not any(text.matches(()) for text in self.texts):
            return Forest(policy.kind, roots)
        self.paths = [[] for _ in self.texts]
        return policy.grow(self, max_depth).trees(roots, self.context.draft)

    def commit(self, tokens: Sequence[Sequence[int] | None], states: Sequence[Tensor | None] = ()) -> None:
        """Append each row's committed tokens to its text; None retires the row."""
        survivors = [i for i, new in enumerate(tokens) if new is not None]
        for i in survivors:
            self.texts[i].extend(tokens[i] or ())
        keep_rows(survivors, self.texts, self.seeds, self.couplings)

    def top(self, frontier: Frontier, k: int) -> tuple[Tensor, Tensor]:
        """Return each node's k likeliest successors and their log-probabilities, both (B, W, at most k).

        Coupled: a token of probability q and noise g is the target's choice with probability
        ``exp(-(1 - q) / q * exp(-g))``, the chance that no other token's noise beats it (Gumbel-max, were q right).
        """
        count = None if self.couplings else k
        ranked = [
            [sorted(distribution.items(), key=lambda item: (-item[1], item[0]))[:count] for distribution in row]
            for row in self._distributions(frontier)
        ]
        width = max((len(node) for row in ranked for node in row), default=0) or 1
        padded = [[[*node, *[(0, 0.0)] * (width - len(node))] for node in row] for row in ranked]
        table = torch.tensor(padded, dtype=torch.float64).view(self.batch, len(ranked[0]), width, 2)
        tokens, q = table[..., 0].long(), table[..., 1].float()
        if not self.couplings:
            return tokens, q.log()
        every = coupling_noise(self.couplings, self._lengths(), frontier.depth, self.context.vocab_size, self.device)
        noise = every.gather(1, tokens.flatten(1)).view_as(tokens)
        chosen, order = (-(1 - q) / q * (-noise).exp()).sort(dim=-1, descending=True, stable=True)
        return tokens.gather(2, order)[..., :k], chosen[..., :k]

    def draw(self, frontier: Frontier, k: int, replacement: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Draw k children per node from the normalised successor distribution; nodes without successors have none."""
        distributions = self._distributions(frontier)
        dense = torch.full((self.batch, len(distributions[0]), self.context.vocab_size), -inf)
        for row, nodes in enumerate(distributions):
            for node, distribution in enumerate(nodes):
                if distribution:
                    dense[row, node, list(distribution)] = torch.tensor(list(distribution.values())).log()
        chance = row_generators(self.seeds, self.context.draft, self._lengths(), frontier.depth, self.device)
        return draw_rows(dense, k, replacement, chance)

    def _lengths(self) -> list[int]:
        return [len(text.ids) for text in self.texts]

    def _distributions(self, frontier: Frontier) -> list[list[dict[int, float]]]:
        """Return every frontier node's successors, and remember the nodes' paths."""
        columns = (frontier.tokens.tolist(), frontier.parents.tolist(), frontier.valid.tolist())
        distributions: list[list[dict[int, float]]] = []
        for text, paths, *row in zip(self.texts, self.paths, *columns, strict=True):
            new = [() if frontier.depth == 0 else (*paths[p], t) for t, p, _ in zip(*row, strict=True)]
            distributions.append(
                [text.successors(path) if real else {} for path, real in zip(new, row[2], strict=True)]
            )
            paths.extend(new)
        return distributions
