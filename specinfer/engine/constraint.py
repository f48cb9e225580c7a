"""A grammar at work in one row: a mask on the scores after every node.

Knows: the matcher, one row's ids, ends of sequence.  Does not know: trees, drafts, which library follows grammars.
"""

from collections.abc import Sequence
from math import inf

import numpy as np
import torch
from torch import Tensor

from specinfer.engine.followers import Followers
from specinfer.errors import SamplingError
from specinfer.grammar.matcher import Mask, Matcher


class Constraint:
    """A logits processor: tokens that a grammar forbids after a path get the score -inf.

    It answers for paths in any order, and again and again: it goes from one to the next, which costs what differs.

    Args:
        matcher: at the grammar's beginning; nobody else's.
        start: ids before the text.
        eos: ids that end it, at least one.
    """

    reads_path = stateless = True

    def __init__(self, matcher: Matcher, start: int, eos: frozenset[int]) -> None:
        self.matcher, self.start, self.eos = matcher, start, eos
        self.end = max(eos)  # of several, chat models use the one that was added last
        self.seconds = 0.0  # in drafting
        self.followers = Followers(start)  # for drafting
        self.failure: SamplingError | None = None  # of the matcher

    def after(self, paths: Sequence[Sequence[int]], scores: Tensor, padding: Sequence[int] = ()) -> Tensor:
        """Return the scores (n, V) after n paths: none is left where the matcher fails, all where nobody goes."""
        forbidden = np.zeros(scores.shape, np.bool_)
        for row, path in enumerate(paths):
            try:
                allowed = self.allowed(path)
            except SamplingError as error:
                self.failure, forbidden[row] = error, True
            else:
                forbidden[row] = False if allowed is None else ~allowed
        return scores.masked_fill_(torch.from_numpy(forbidden).to(scores.device), -inf)

    def allowed(self, path: Sequence[int]) -> Mask | None:
        """Return which tokens may follow ids, the prompt's included, bool (V,); None if they begin no text or end one.

        Raises:
            SamplingError: the matcher has come to its limits.
        """
        if not self._follow(path[self.start :]):
            return None
        mask = self.matcher.mask()
        mask[[*self.eos]] = self.matcher.accepting()
        return mask

    def forced(self, path: Sequence[int]) -> list[int]:
        """Return the tokens that must follow ids, as many as are known, with an end of sequence if the text is over.

        Raises:
            SamplingError: the matcher has come to its limits.
        """
        text = path[self.start :]
        if not self._follow(text):
            return []
        forced = self.matcher.forced()
        over = self._follow([*text, *forced]) and self.matcher.accepting() and not self.matcher.mask().any()
        return [*forced, self.end] if over else forced

    @property
    def problem(self) -> str:
        """Why nothing may follow, in words."""
        others = "the call's other options (min_new_tokens, suppress_tokens, ...) forbid all that its grammar allows"
        return str(self.failure or f"{others}: change one of them")

    def _follow(self, text: Sequence[int]) -> bool:
        """Go to the end of a text's tokens; return False if it is no beginning of one, or has ended before."""
        return self.eos.isdisjoint(text) and self.matcher.follow(text)
