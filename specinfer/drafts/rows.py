"""What every draft session keeps for each of its rows: how long it is, and its random numbers.

Knows: committed lengths, seeds, the noise shared with the target.  Does not know: how a draft finds its candidates.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specinfer.drafts.base import DraftContext
from specinfer.engine.gumbel import DRAFT, key
from specinfer.tree import draw_candidates


class DraftRows:
    """The rows of a draft session that are still active."""

    per_row: tuple[str, ...] = ("lengths", "seeds", "couplings")  # attributes that are lists with an entry per row

    def __init__(self, context: DraftContext) -> None:
        self.context, self.draft = context, context.draft
        self.lengths = [len(prompt) for prompt in context.prompts]  # committed tokens
        self.seeds, self.couplings = list(context.seeds), list(context.couplings)

    @property
    def batch(self) -> int:
        """Rows still active."""
        return len(self.lengths)

    def advance(self, tokens: Sequence[Sequence[int] | None]) -> None:
        """Count the tokens that each row committed, and forget the rows that were retired (None)."""
        self.lengths = [length + len(new or ()) for length, new in zip(self.lengths, tokens, strict=True)]
        for name in self.per_row:  # couplings may be empty
            kept = [value for value, new in zip(getattr(self, name), tokens, strict=False) if new is not None]
            setattr(self, name, kept)

    def noise(self, depth: int, device: torch.device) -> Tensor:
        """Return the target's own Gumbel noise (B, V) of what follows nodes at this depth."""
        rows, vocab_size = zip(self.couplings, self.lengths, strict=True), self.context.vocab_size
        return torch.stack([coupling.at(length + depth, vocab_size, device) for coupling, length in rows])

    def drawn(self, log_probs: Tensor, k: int, replacement: bool, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw k tokens at each node (B, W, V) of one level; a row's draws depend on its seed and length only."""
        rows = zip(self.seeds, self.lengths, strict=True)
        keys = [key(seed, DRAFT, self.draft, length, depth) for seed, length in rows]
        return draw_rows(log_probs, k, replacement, keys)


def draw_rows(log_probs: Tensor, k: int, replacement: bool, keys: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Draw for each row of (B, W, V) with the random numbers of its key: see `tree.draw_candidates`."""
    generators = [torch.Generator(log_probs.device).manual_seed(row_key) for row_key in keys]
    rows = [draw_candidates(row, k, replacement, chance) for row, chance in zip(log_probs, generators, strict=True)]
    tokens, values, distributions = (torch.stack(column) for column in zip(*rows, strict=True))
    return tokens, values, distributions
