"""A run as a stream of text.

Knows: a run under way, the tokenizer.  Does not know: how a step is decoded.
"""

from collections.abc import Generator

from specinfer.engine.detokenize import Pieces
from specinfer.engine.generation import Run
from specinfer.errors import InputError
from specinfer.results import Result


class TextStream:
    """Text as it is decoded: an iterator of pieces that can be closed at any time.

    Each piece ends at a whole character.  Together they are ``result.text``.
    """

    def __init__(self, run: Run) -> None:
        if not run.single:
            raise InputError("stream takes one prompt: use generate for a batch")
        if run.decoder.tokenizer is None:
            raise InputError("stream yields text and needs a tokenizer: construct the decoder with one")
        self._run = run
        self._pieces = self._decode()

    def __iter__(self) -> "TextStream":
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Stop decoding; what was decoded so far stays in `result`."""
        self._pieces.close()
        self._run.close()

    @property
    def result(self) -> Result:
        """The result so far; complete once the stream has ended."""
        return self._run.results()[0]

    def _decode(self) -> Generator[str]:
        """Yield text that later tokens cannot change, and at the end the rest."""
        row = self._run.rows[0]
        pieces = Pieces(self._run.decoder.tokenizer, row.prompt_length)
        done = 0  # characters yielded
        for _ in self._run:
            if text := pieces.more(row.ids):
                yield text
                done += len(text)
        if len(text := self.result.text) > done:
            yield text[done:]
