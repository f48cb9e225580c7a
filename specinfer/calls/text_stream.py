"""A run as a stream of text.

Knows: a run under way, the tokenizer, that others wait in the same thread.  Does not know: how a step is decoded.
"""

from asyncio import CancelledError, wrap_future
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor

from specinfer.engine.detokenize import Pieces
from specinfer.engine.generation import Run
from specinfer.errors import InputError
from specinfer.results import Result


class TextStream:
    """Text as it is decoded: an iterator of pieces that can be closed at any time.

    Each piece ends at a whole character.  Together they are ``result.text``.  In a coroutine, ``async for`` takes the
    pieces: steps then run in a thread of the stream, and the event loop goes on.  If the task is cancelled, the step
    under way ends, and then the stream is closed.
    """

    def __init__(self, run: Run) -> None:
        if not run.single:
            raise InputError("stream takes one prompt, for one text: use generate for several")
        if run.decoder.tokenizer is None:
            raise InputError("stream yields text and needs a tokenizer: construct the decoder with one")
        self._run = run
        self._pieces = self._decode()
        self._thread: ThreadPoolExecutor | None = None
        self._step: Future[str | None] | None = None  # the newest one in the thread

    def __iter__(self) -> "TextStream":
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def __aiter__(self) -> "TextStream":
        return self

    async def __anext__(self) -> str:
        self._thread = self._thread or ThreadPoolExecutor(1, "specinfer")
        self._step = self._thread.submit(next, self._pieces, None)
        try:
            piece = await wrap_future(self._step)
        except CancelledError:
            self.close()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    def close(self) -> None:
        """Stop decoding, after the step under way in a thread; what was decoded so far stays in `result`."""
        if self._step is None:
            self._close()
        else:
            self._step.add_done_callback(lambda _: self._close())  # at once, if it is done

    async def aclose(self) -> None:
        """Stop decoding as `close` does, and wait for that."""
        if self._thread is None:
            self._close()
        else:
            await wrap_future(self._thread.submit(self._close))

    @property
    def result(self) -> Result:
        """The result so far; complete once the stream has ended."""
        return self._run.results()[0]

    def _close(self) -> None:
        self._pieces.close()
        self._run.close()

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
