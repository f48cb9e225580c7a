"""Penalties on what a text has used already, as OpenAI defines them; transformers has none.

Knows: ids, scores, where the text begins.  Does not know: rows, trees: a node's path is its ids.
"""

import torch
from torch import Tensor
from transformers import LogitsProcessor


class PresencePenalty(LogitsProcessor):
    """Subtracts a number from the scores of every token that the text holds.

    Args:
        penalty: the number; a negative one is a reward.
        start: index of the first id that belongs to the text.
    """

    def __init__(self, penalty: float, start: int) -> None:
        self.penalty, self.start = penalty, start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores (B, V) after ids (B, T)."""
        used = input_ids[:, self.start :]
        return scores.scatter(1, used, scores.gather(1, used) - self.penalty)


class FrequencyPenalty(PresencePenalty):
    """The same, as many times as the text holds the token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores (B, V) after ids (B, T)."""
        used = input_ids[:, self.start :]
        return scores.scatter_add(1, used, torch.full_like(used, -self.penalty, dtype=scores.dtype))
