"""The n-gram draft: prompt lookup over the row's own text, as a tree.  It has no weights and runs no passes.

Knows: the longest n-gram.  Does not know: any model, how occurrences are counted (`suffix`, `text_index`).
"""

from copy import copy
from typing import Any

from transformers import PreTrainedTokenizerBase

from specinfer.attention import TreeModel
from specinfer.common.values import checked_count
from specinfer.drafts.lookup.suffix import SuffixSession, special_ids, template_prefix
from specinfer.engine.draft import Draft, DraftContext


class NGramDraft(Draft):
    """Prompt lookup as a tree: what followed earlier occurrences of the last 1, 2, ... ``max_ngram`` tokens.

    Args:
        max_ngram: longest context looked up, in tokens; at least 1.

    Raises:
        InputError: ``max_ngram`` is below 1.
    """

    name = "ngram"

    def __init__(self, max_ngram: int = 4) -> None:
        self.max_ngram = checked_count("max_ngram", max_ngram, 1, "looks nothing up")
        self.special: frozenset[int] = frozenset()
        self.template: list[int] = []

    def attach(self, target: TreeModel, tokenizer: PreTrainedTokenizerBase) -> "NGramDraft":
        """Return a copy that knows the tokenizer's special tokens and how its chat template begins."""
        bound = copy(self)
        bound.special, bound.template = special_ids(tokenizer), template_prefix(tokenizer)
        return bound

    def identity(self) -> dict[str, Any]:
        """Return the longest context."""
        return {"max_ngram": self.max_ngram}

    def open(self, context: DraftContext) -> SuffixSession:
        """Start drafting for a batch of rows."""
        lengths = range(1, self.max_ngram + 1)
        return SuffixSession(context, lengths, self.max_ngram, special=self.special, template=self.template)
