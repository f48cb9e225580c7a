"""The n-gram draft: prompt lookup over the row's own text, as a tree.  It has no weights and runs no passes.

Knows: the longest n-gram.  Does not know: any model, how occurrences are counted (`suffix`, `text_index`).
"""

from specinfer.common.values import checked_count
from specinfer.drafts.lookup.suffix import LookupDraft


class NGramDraft(LookupDraft):
    """Prompt lookup as a tree: successors of earlier occurrences of the last 1, 2, ... ``max_ngram`` tokens.

    Args:
        max_ngram: longest context looked up, in tokens; at least 1.

    Raises:
        InputError: ``max_ngram`` is below 1.
    """

    name = "ngram"

    def __init__(self, max_ngram: int = 4) -> None:
        self.max_ngram = self.max_context = checked_count("max_ngram", max_ngram, 1, "looks nothing up")
        self.lengths = range(1, self.max_ngram + 1)

    def identity(self) -> dict[str, object]:
        """Return the longest context."""
        return {"max_ngram": self.max_ngram}
