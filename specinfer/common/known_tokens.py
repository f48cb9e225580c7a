"""The tokens that one result shows, as files and pickles hold them in place of the tokenizer.

Knows: ids, how a tokenizer writes each, and texts of several.  Does not know: results, other tokens.
"""

from collections.abc import Iterable, Mapping, Sequence

from specinfer.common.token_text import Tokenizer


class KnownTokens:
    """Shows the tokens that it was made with, as their tokenizer would.

    Args:
        tokens: by id, how it is written in the tokenizer's table (None if it is not there), and its text alone.
        runs: token ids, and their text together.
    """

    def __init__(
        self, tokens: Mapping[int, tuple[str | None, str]], runs: Sequence[tuple[Sequence[int], str]] = ()
    ) -> None:
        self.tokens = {int(token): (piece, text) for token, (piece, text) in tokens.items()}
        self.runs = {tuple(ids): text for ids, text in runs}

    @classmethod
    def of(cls, tokenizer: Tokenizer, ids: Iterable[int], runs: Iterable[list[int]] = ()) -> "KnownTokens":
        """Ask a tokenizer for some ids, and for texts of several."""
        found = {token: (tokenizer.convert_ids_to_tokens(token), tokenizer.decode([token])) for token in sorted({*ids})}
        return cls(found, [(run, tokenizer.decode(run)) for run in runs])

    def to_dict(self) -> dict[str, object]:
        """Return a JSON-ready dict, whose values `KnownTokens` takes."""
        return {"tokens": self.tokens, "runs": [[list(ids), text] for ids, text in self.runs.items()]}

    def convert_ids_to_tokens(self, token: int) -> str | None:
        """Return how a token is written, or None if it is not known."""
        return self.tokens.get(int(token), (None, ""))[0]

    def decode(self, ids: Sequence[int], **_: object) -> str:
        """Return the text of tokens: as asked for together, else one by one."""
        ids = list(map(int, ids))
        return self.runs.get(tuple(ids)) or "".join(self.tokens.get(token, (None, ""))[1] for token in ids)
