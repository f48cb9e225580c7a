"""A request as a stream of text.

Knows: a request's steps, the tokenizer, that others wait in the same thread.  Does not know: how a step is decoded.
"""

from asyncio import CancelledError, wrap_future
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor

from specinfer.engine.detokenize import Pieces
from specinfer.engine.requests import Request
from specinfer.engine.scheduler import Scheduler
from specinfer.results import Result


class TextStream:
    """Text as it is decoded: an iterator of pieces that can be closed at any time.

    Each piece ends at a whole character.  Together they are ``result.text``.  In a coroutine, ``async for`` takes the
    pieces: steps then run in a thread of the stream, and the event loop goes on.  If the task is cancelled, the step
    under way ends, and then the stream is closed.

    Args:
        request: that was added to the scheduler.
        scheduler: takes steps when the stream is iterated over.
        alone: whether the scheduler has no other requests.
    """

    def __init__(self, request: Request, scheduler: Scheduler, alone: bool) -> None:
        self._request, self._scheduler, self._alone = request, scheduler, alone
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
        return self._request.batch_result if self._alone else self._request.result

    def _close(self) -> None:
        self._pieces.close()
        if self._alone:
            self._scheduler.close()
        else:
            self._scheduler.abort(self._request)
            self._scheduler.rest()

    def _decode(self) -> Generator[str]:
        """Yield text that later tokens cannot change, and at the end the rest."""
        row = self._request.row
        ids, done = row.ids[: row.prompt_length], 0  # characters yielded
        pieces = Pieces(self._request.decoder.tokenizer, row.prompt_length)
        for step in self._scheduler.stream(self._request):
            ids += step.tokens
            if text := pieces.more(ids):
                yield text
                done += len(text)
        if len(text := self.result.text) > done:
            yield text[done:]
