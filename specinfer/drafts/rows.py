"""What draft sessions keep for each of their rows: how long it is, its random numbers, what a network has read of it.

Knows: committed lengths, seeds, the noise shared with the target, how logits become candidates or draws, caches.
Does not know: where logits come from.
"""

from abc import abstractmethod
from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specinfer.attention import TreeSession
from specinfer.common.tensors import on_device
from specinfer.drafts.ranking import largest
from specinfer.engine.draft import Clocked, Committed, DraftContext, DraftSession, Scored, States
from specinfer.engine.gumbel import DRAFT, SILENT, key
from specinfer.engine.prefixes import Cached
from specinfer.tree import Frontier, draw_candidates

CANDIDATES = 128  # tokens per node that processors and noise see in a coupled draft, if there are processors
CATCH_UP = 32  # uncached tokens that are fed together with the root; of more, all but the root are prefilled


def begun(session: TreeSession, texts: Sequence[Sequence[int]], known: Sequence[Cached | None]) -> list[list[int]]:
    """Let the rows of a new session begin with what is known of their texts; return what is left, the root at least."""
    for row, (text, cached) in enumerate(zip(texts, known, strict=False)):
        if cached and (length := cached.common(text[:-1])):
            session.cache.begin(row, cached.cache, cached.row, length)
    return [list(text[length:]) for text, length in zip(texts, session.cache.lengths, strict=True)]


class DraftRows(DraftSession):
    """The rows of a draft session that are still active."""

    per_row: tuple[str, ...] = ("lengths", "seeds", "couplings")  # attributes that are lists with an entry per row
    inverse_temperature = 1.0  # of the draft's distribution against the target's noise, see `ranked`
    token_ids: Tensor | None = None  # (V',) the target's ids for the draft's; None: the same

    def __init__(self, context: DraftContext) -> None:
        self.context, self.draft = context, context.draft
        self.lengths = [len(prompt) for prompt in context.prompts]  # committed tokens
        self.seeds, self.couplings = list(context.seeds), list(context.couplings)

    @property
    def batch(self) -> int:
        """Rows still active."""
        return len(self.lengths)

    def advance(self, tokens: Committed) -> None:
        """Count the tokens that each row committed, and forget the rows that were retired (None)."""
        self.lengths = [length + len(new or ()) for length, new in zip(self.lengths, tokens, strict=True)]
        if None not in tokens:
            return
        for name in self.per_row:  # couplings may be empty
            kept = [value for value, new in zip(getattr(self, name), tokens, strict=False) if new is not None]
            setattr(self, name, kept)

    def commit(self, tokens: Committed, states: States = (), scored: Sequence[Scored] = ()) -> None:
        """Take note of what each row committed; None retires the row."""
        self.advance(tokens)

    def join(self, other: "DraftRows") -> None:
        """Take in the rows of another session of the same draft, after the own ones."""
        if bool(self.couplings) != bool(other.couplings):
            for rows in (self, other):
                rows.couplings = rows.couplings or [SILENT] * rows.batch
        for name in self.per_row:
            setattr(self, name, [*getattr(self, name), *getattr(other, name)])

    def ranked(self, logits: Tensor, depths: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
        """Return each node's k likeliest choices of the target, descending, and their log-probabilities.

        Greedy: by q.  Coupled: the target will emit argmax(log p + g), so candidates are ranked by s log q + g with
        the same Gumbel noise g, and a softmax of those sums estimates which of them it will be.  The inverse
        temperature s is 1 for q = p.  But a draft that does not know p learns the mean of what p may be, which is
        flatter, and s > 1 makes up for that.

        Args:
            logits: (B, W, V').
            depths: of the W nodes, or one for all.
            k: how many.

        Returns:
            indices: (B, W, k) in the draft's vocabulary.
            log_probs: (B, W, k) float32.
        """
        size, kept = logits.shape[-1], None
        if self.couplings and self.context.processors.chain:  # some, like top-p, would sort all tokens at every node
            kept, logits, _ = largest(logits, max(k, CANDIDATES))
        scores = self.scored(logits, self.noise_of(depths, size, kept, logits.device))
        indices, values, total = largest(scores, k)
        return indices if kept is None else kept.gather(2, indices), values - total

    def scored(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        """Return float32 scores (B, W, C) that candidates are ranked by: logits, or s log q + g plus a constant.

        Logits of rows that are sampled are processed first, whether the noise is known or not.
        """
        if self.couplings and self.context.processors.chain:
            logits = self.processed(logits)
        return logits.float() if noise is None else torch.add(noise, logits, alpha=self.inverse_temperature)

    def processed(self, logits: Tensor) -> Tensor:
        """Return logits (B, W, C) after the target's processors."""
        return self.context.processors.scores(logits.flatten(0, 1), ()).view(*logits.shape)

    def noise_of(self, depths: Sequence[int], size: int, indices: Tensor | None, device: torch.device) -> Tensor | None:
        """Return the target's noise of tokens in the draft's vocabulary; None if it is not coupled.

        Args:
            depths: of W nodes, or one for all.
            size: V', of the vocabulary.
            indices: (B, W, C) whose noise; None = of all, (B, W, V').
            device: where the noise is wanted.
        """
        if not self.couplings:
            return None
        noise = self.noise_below(depths, size, device)
        return noise if indices is None else noise.expand(-1, indices.shape[1], -1).gather(2, indices)

    def noise_below(self, depths: Sequence[int], size: int, device: torch.device) -> Tensor:
        """Return the target's noise of V' tokens in the draft's vocabulary below nodes at W depths, (B, W, V')."""
        every = (
            coupling.at(length + depth, self.context.vocab_size, device)
            for coupling, length in zip(self.couplings, self.lengths, strict=True)
            for depth in depths
        )
        found = [noise[:size] if self.token_ids is None else noise.index_select(0, self.token_ids) for noise in every]
        return torch.stack(found).view(self.batch, len(depths), -1)

    def coupled(self, tokens: Tensor, q: Tensor, k: int, depth: int) -> tuple[Tensor, Tensor]:
        """Return the k likeliest of a few candidates, given the target's noise, and log-probabilities of being chosen.

        Args:
            tokens, q: (B, W, K) the target's ids and their probabilities; 0 = no candidate.
            k: how many.
            depth: of the W nodes.
        """
        noise = self.noise_below([depth], self.context.vocab_size, tokens.device)[:, 0]
        noise = noise.gather(1, tokens.flatten(1)).view_as(tokens)
        chances, order = log_chances(q, noise).sort(dim=-1, descending=True, stable=True)
        return tokens.gather(2, order)[..., :k], chances[..., :k]

    def ids(self, indices: Tensor) -> Tensor:
        """Return the target's ids of tokens in the draft's vocabulary."""
        return indices if self.token_ids is None else self.token_ids[indices]

    def dense(self, tokens: Tensor, log_probs: Tensor) -> Tensor:
        """Return log-probabilities (B, W, V), given those of a few tokens, (B, W, K); of equal ones the largest."""
        absent = log_probs.new_full((*tokens.shape[:2], self.context.vocab_size), -inf)
        return absent.scatter_reduce_(2, tokens, log_probs, "amax")

    def warped(self, logits: Tensor) -> Tensor:
        """Return draft logits (B, W, V') after the target's processors, over the target's vocabulary: (B, W, V)."""
        scores = self.processed(logits)
        if self.token_ids is None:
            return functional.pad(scores, (0, self.context.vocab_size - scores.shape[-1]), value=-inf)
        return self.dense(self.token_ids.expand_as(scores), scores)

    def drawn(self, log_probs: Tensor, k: int, replacement: bool, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw k tokens at each node (B, W, V) of one level; a row's draws depend on its seed and length only."""
        rows = zip(self.seeds, self.lengths, strict=True)
        keys = [key(seed, DRAFT, self.draft, length, depth) for seed, length in rows]
        return draw_rows(log_probs, k, replacement, keys)


class LevelRows(DraftRows):
    """Rows whose draft answers a policy level by level, from the logits after each node."""

    @abstractmethod
    def logits_after(self, frontier: Frontier) -> Tensor:
        """Return logits (B, W, V') after each frontier node."""

    def top(self, frontier: Frontier, k: int) -> tuple[Tensor, Tensor]:
        """Return each node's k likeliest choices of the target and their log-probabilities, both (B, W, k)."""
        indices, log_probs = self.ranked(self.logits_after(frontier), [frontier.depth], k)
        return self.ids(indices), log_probs

    def draw(self, frontier: Frontier, k: int, replacement: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Draw k children per node from q, the draft's after the target's warpers (`tree.draw_candidates`).

        They are drawn from all of q: a row's draws do not depend on the tokens of others.
        """
        return self.drawn(self.warped(self.logits_after(frontier)), k, replacement, frontier.depth)


class CachedRows(DraftRows, Clocked):
    """Rows that a network reads, with a cache of its own.

    Attributes:
        session: of the network, a `TreeSession`.
        uncached: per row, what its cache lacks, token by token.
    """

    per_row = (*DraftRows.per_row, "uncached")
    uncached: list[Any]

    def longest_uncached(self) -> int:
        """Return the most tokens that the cache lacks of a row."""
        return max(map(len, self.uncached), default=0)

    @abstractmethod
    def read_ahead(self) -> None:
        """Feed and commit what the cache lacks of each row, except what is fed with the next tree."""

    def catch_up(self) -> None:
        """Read ahead if the cache lacks many tokens."""
        if self.longest_uncached() > CATCH_UP:
            self.read_ahead()

    @property
    def limit(self) -> int | None:  # type: ignore[override]
        """How many tokens the network's context has; None if it has no end."""
        return self.session.model.max_positions

    def read(self, row: int, ids: Sequence[int]) -> Cached | None:
        """Return what the cache holds of a row: the first of these ids; None: nothing, or it has no slots."""
        length = self.session.cache.lengths[row]
        return Cached(ids[:length], self.session.cache, row) if length and not self.session.model.stateful else None

    def join(self, other: DraftRows) -> None:
        """Take in the rows of another session, and what its cache holds of them.

        If these rows are read, and passes are padded to the longest one, the others' prompts are read first.
        """
        assert isinstance(other, CachedRows)
        if not self.session.run.packs and self.longest_uncached() <= CATCH_UP:
            other.read_ahead()
        super().join(other)
        self.session.join(other.session)


def log_chances(q: Tensor, noise: Tensor) -> Tensor:
    """Return log-probabilities of tokens being the target's choice, given their probabilities and noise; -inf at 0.

    A token of probability q and noise g is chosen with probability ``exp(-(1 - q) / q * exp(-g))``, the chance that no
    other token's noise beats it (Gumbel-max, were q right).
    """
    return (-(1 - q) / q * (-noise).exp()).masked_fill_(q == 0, -inf)


def state_columns(aux_layers: Sequence[int], context: DraftContext, device: torch.device) -> slice | Tensor:
    """Return which columns of the target's states belong to these layers; other drafts may read others."""
    columns = [list(context.aux_layers).index(layer) for layer in aux_layers]
    return slice(None) if columns == list(range(len(context.aux_layers))) else on_device(columns, device)


def draw_rows(log_probs: Tensor, k: int, replacement: bool, keys: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Draw for each row of (B, W, V) with the random numbers of its key: see `tree.draw_candidates`."""
    generators = [torch.Generator(log_probs.device).manual_seed(row_key) for row_key in keys]
    rows = [draw_candidates(row, k, replacement, chance) for row, chance in zip(log_probs, generators, strict=True)]
    tokens, values, distributions = (torch.stack(column) for column in zip(*rows, strict=True))
    return tokens, values, distributions
