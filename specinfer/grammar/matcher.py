"""The interface of a library of grammars to the engine: five methods.

Knows: token ids of one text.  Does not know: models, trees, ends of sequence, which library answers.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]  # (V,) by token id


class Matcher(Protocol):
    """A grammar, and where a text is in it.

    Tokens are those of the text alone.  An end of sequence is none of them: `accepting` says where one may stand.
    What is legal is what `mask` says; `follow` may take tokens that it leaves out.  Where a text costs more than its
    limits allow, a matcher raises `SamplingError` with the reason; `follow` leads it to other texts after that.  It
    meets no limits because of others, copies of it included.

    Attributes:
        library: the distribution's name: texts depend on its version.
    """

    library: str

    def follow(self, tokens: Sequence[int]) -> bool:
        """Go to where these tokens lead from the beginning; return False if the grammar refuses one of them.

        It costs what differs from the tokens that were followed last.
        """

    def mask(self) -> Mask:
        """Return which tokens may come next, in an array of the caller's."""

    def forced(self) -> list[int]:
        """Return the tokens that must come next, as many as are known."""

    def accepting(self) -> bool:
        """Return whether the text may end here."""

    def copy(self) -> "Matcher":
        """Return a matcher in the same state, for another text."""
