"""transformers' processors that exclude tokens, without a look at the whole vocabulary in each call on a CPU.

transformers compares every id of the vocabulary with the excluded ones, at every node, also where nothing is excluded:
0.4 ms for 49,152 tokens (one core of an AMD EPYC).

Knows: ids, scores, what the processors hold.  Does not know: rows, trees: a node's path is its ids.
"""

from math import inf

from torch import Tensor
from transformers import generation


class MinLength(generation.MinLengthLogitsProcessor):
    """Excludes the end of a text that is too short, its prompt included."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores (B, V) after ids (B, T)."""
        if scores.device.type != "cpu":
            return super().__call__(input_ids, scores)
        return without(self.eos_token_id, scores) if input_ids.shape[1] < self.min_length else scores


class MinNewTokens(generation.MinNewTokensLengthLogitsProcessor):
    """Excludes the end of a text that has too few new tokens."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores (B, V) after ids (B, T)."""
        if scores.device.type != "cpu":
            return super().__call__(input_ids, scores)
        new_tokens = input_ids.shape[1] - self.prompt_length_to_skip
        return without(self.eos_token_id, scores) if new_tokens < self.min_new_tokens else scores


class SuppressTokens(generation.SuppressTokensLogitsProcessor):
    """Excludes tokens everywhere."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores (B, V) after ids (B, T)."""
        if scores.device.type != "cpu":
            return super().__call__(input_ids, scores)
        return without(self.suppress_tokens, scores)


def without(ids: Tensor, scores: Tensor) -> Tensor:
    """Return scores (B, V) that exclude ids; those that the vocabulary lacks change nothing."""
    return scores.index_fill(1, ids[(ids >= 0) & (ids < scores.shape[1])].long(), -inf)  # no ids are no integers
