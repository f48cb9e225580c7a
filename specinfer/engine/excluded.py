"""transformers' processors that exclude tokens, without a look at the whole vocabulary in each call on a CPU.

transformers compares every id of the vocabulary with the excluded ones, at every node, also where nothing is excluded.

Knows: ids, scores, what the processors hold.  Does not know: rows, trees: a node's path is its ids.
"""

from math import inf

from torch import Tensor
from transformers import generation


class Excluding(generation.LogitsProcessor):
    """Excludes ids by the length of a text; stands before the class of transformers that does so on other devices."""

    def excluded(self, length: int) -> Tensor | None:
        """Return the ids that are excluded after so many; those that the vocabulary lacks change nothing."""
        raise NotImplementedError

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores (B, V) after ids (B, T)."""
        if scores.device.type != "cpu":
            return super().__call__(input_ids, scores)
        if (ids := self.excluded(input_ids.shape[1])) is None:
            return scores
        return scores.index_fill(1, ids[(ids >= 0) & (ids < scores.shape[1])].long(), -inf)  # no ids are no integers


class MinLength(Excluding, generation.MinLengthLogitsProcessor):
    """Excludes the end of a text that is too short, its prompt included."""

    def excluded(self, length: int) -> Tensor | None:
        """Return the ids that would end it."""
        return self.eos_token_id if length < self.min_length else None


class MinNewTokens(Excluding, generation.MinNewTokensLengthLogitsProcessor):
    """Excludes the end of a text that has too few new tokens."""

    def excluded(self, length: int) -> Tensor | None:
        """Return the ids that would end it."""
        return self.eos_token_id if length - self.prompt_length_to_skip < self.min_new_tokens else None


class SuppressTokens(Excluding, generation.SuppressTokensLogitsProcessor):
    """Excludes tokens everywhere."""

    def excluded(self, length: int) -> Tensor | None:
        """Return these tokens."""
        return self.suppress_tokens
