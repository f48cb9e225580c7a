"""The n-gram draft: prompt lookup over the row's own text, as a tree.  It has no weights and runs no passes.

Knows: the token ids of each row.  Does not know: any model.

It counts what followed earlier occurrences of the last 1, 2, ... ``max_ngram`` tokens.  Longer contexts are blended
with shorter ones by PPM's escape (Cleary and Witten 1984; method C, Moffat 1990): a context that was seen n times with
d different successors gives successor v probability ``count(v) / (n + d)`` and leaves ``d / (n + d)`` to the next
shorter context.  Nothing takes what the shortest context leaves, so probabilities sum to less than one.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from specinfer.drafts.base import DraftContext, Scored
from specinfer.drafts.rows import DraftRows
from specinfer.errors import InputError
from specinfer.tree import Forest, Frontier, Policy, TokenTree

RECENT = 32  # occurrences of one n-gram that are counted at most, the newest first


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
    """One row's ids, with an index of where each n-gram was followed by something."""

    def __init__(self, ids: Sequence[int], max_ngram: int) -> None:
        self.max_ngram = max_ngram
        self.ids: list[int] = []
        self.after: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # n-gram -> positions that follow it
        self.extend(ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Append tokens and index the n-grams that they follow."""
        for position, token in enumerate(ids, len(self.ids)):
            for n in range(1, min(self.max_ngram, position) + 1):
                self.after[tuple(self.ids[position - n :])].append(position)
            self.ids.append(token)

    def matches(self, path: Sequence[int]) -> list[list[int]]:
        """Return, longest context first, the newest positions that followed the text's end extended by ``path``."""
        context = (*self.ids[-self.max_ngram :], *path)[-self.max_ngram :]
        found = (self.after.get(context[-n:]) for n in range(len(context), 0, -1))
        return [positions[-RECENT:] for positions in found if positions]

    def successors(self, path: Sequence[int]) -> dict[int, float]:
        """Return successor -> probability by PPM-C; newer successors come first."""
        distribution: dict[int, float] = {}
        left = 1.0
        for positions in self.matches(path):
            counts = Counter(self.ids[position] for position in reversed(positions))
            total = len(positions) + len(counts)
            for token, count in counts.items():
                distribution[token] = distribution.get(token, 0.0) + left * count / total
            left *= len(counts) / total
        return distribution


class NGramDraftSession(DraftRows):
    """An n-gram draft at work: a `Source` of sparse distributions on the CPU."""

    per_row = (*DraftRows.per_row, "texts")
    passes = 0
    seconds = 0.0
    prefill_seconds = 0.0
    device = torch.device("cpu")

    def __init__(self, context: DraftContext, max_ngram: int) -> None:
        super().__init__(context)
        self.texts = [_Text(prompt, max_ngram) for prompt in context.prompts]
        self.paths: list[list[tuple[int, ...]]] = []  # per row: path of every frontier node so far, root first

    def propose(self, policy: Policy, max_depth: int) -> Sequence[TokenTree]:
        """Grow one tree per row below its last committed token."""
        roots = [text.ids[-1] for text in self.texts]
        if not any(text.matches(()) for text in self.texts):
            return Forest(policy.kind, roots)
        self.paths = [[] for _ in self.texts]
        return policy.grow(self, max_depth).trees(roots, self.draft)

    def commit(
        self,
        tokens: Sequence[Sequence[int] | None],
        states: Sequence[Tensor | None] = (),
        scored: Sequence[Scored] = (),
    ) -> None:
        """Append each row's committed tokens to its text; None retires the row."""
        for text, new in zip(self.texts, tokens, strict=True):
            text.extend(new or ())
        self.advance(tokens)

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
        noise = self.noise(frontier.depth, self.device).gather(1, tokens.flatten(1)).view_as(tokens)
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
        return self.drawn(dense, k, replacement, frontier.depth)

    def _distributions(self, frontier: Frontier) -> list[list[dict[int, float]]]:
        """Return every frontier node's successors, and remember the nodes' paths."""
        columns = (frontier.tokens.tolist(), frontier.parents.tolist(), frontier.valid.tolist())
        distributions: list[list[dict[int, float]]] = []
        for text, paths, tokens, parents, valid in zip(self.texts, self.paths, *columns, strict=True):
            pairs = zip(tokens, parents, strict=True)
            new = [() if frontier.depth == 0 else (*paths[parent], token) for token, parent in pairs]
            distributions.append([text.successors(path) if real else {} for path, real in zip(new, valid, strict=True)])
            paths.extend(new)
        return distributions
