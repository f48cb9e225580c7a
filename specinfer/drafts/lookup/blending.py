"""What may come next: what followed contexts of all lengths, blended.

Knows: occurrences in texts, passages that a text runs along.  Does not know: rows, trees, models.

What followed longer contexts is blended with what followed shorter ones by PPM's escape (Cleary and Witten 1984; method
C, Moffat 1990): a context that was seen n times with d different successors gives successor v probability
``count(v) / (n + d)`` and leaves ``d / (n + d)`` to the context that is one token shorter.  Nothing takes what the
shortest context leaves, so probabilities sum to less than one.  Contexts of several lengths often have the same
occurrences; then they take their turns in one sum.

Passages come before the short contexts: what follows the last token in them, or else the tokens that resume them.
"""

from collections.abc import Sequence

from specinfer.drafts.lookup.passages import Passages
from specinfer.drafts.lookup.text_index import TextIndex

NEGLIGIBLE = 1e-6  # probability that is left, below which no shorter context is asked
SHORT = 2  # tokens of a context that passages come before


def successors(
    context: tuple[int, ...], indices: Sequence[TextIndex], power: float = 1.0, passages: Passages | None = None
) -> dict[int, float]:
    """Return successor -> probability by PPM-C, over all occurrences in some indices.

    Args:
        context: the last tokens, `max_context` at most.
        indices: at least one; the lengths of the first are those of the others, or the first few of them.
        power: of every escape; below 1, less is given to long contexts.
        passages: that the text runs along.
    """
    distribution: dict[int, float] = {}
    left, lengths = 1.0, indices[0].lengths
    for level in reversed(range(len(lengths))):
        if passages and passages.texts and lengths[level] == SHORT:
            left = _add(distribution, passages.successors(context[-1]), left)
        found = [(n, index.ids[at]) for index in indices for n, at in index.occurrences(context, level)]
        if not found:
            continue
        found.sort(key=lambda occurrence: -occurrence[0])
        counts: dict[int, int] = {}
        for (length, token), (shorter, _) in zip(found, [*found[1:], (lengths[level] - 1, 0)], strict=True):
            counts[token] = counts.get(token, 0) + 1
            if shorter < length:
                left = _blend(distribution, counts, power * (length - shorter), left)
        if left < NEGLIGIBLE:
            break
    return distribution


def _blend(distribution: dict[int, float], counts: dict[int, int], contexts: float, left: float) -> float:
    """Add what followed so many contexts of the same occurrences; return the probability that is left."""
    total = sum(counts.values())
    share = 1 - (len(counts) / (total + len(counts))) ** contexts
    return _add(distribution, {token: share * count / total for token, count in counts.items()}, left)


def _add(distribution: dict[int, float], more: dict[int, float], left: float) -> float:
    """Add a distribution's part of the probability that is left; return what is left then."""
    for token, probability in more.items():
        distribution[token] = distribution.get(token, 0.0) + left * probability
    return left * (1 - sum(more.values()))
