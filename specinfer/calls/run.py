"""One call of the decoder under way: its requests in a scheduler of its own.

Knows: the requests of a call, streamers of transformers.  Does not know: how they are decoded.
"""

from collections.abc import Iterator, Sequence

import torch

from specinfer.engine.requests import Request
from specinfer.engine.scheduler import Scheduler
from specinfer.engine.sequence import Row
from specinfer.engine.store import PrefixStore
from specinfer.errors import InputError, NoTokenLeft, SpecinferError
from specinfer.results import Result, Step
from specinfer.tree import Policy


class Run:
    """One call of the decoder under way: iterate for steps, then read `results`.

    The first step opens the sessions.  They are dropped when iteration ends, fails or is closed, and then the models
    are as they were before.

    Args:
        requests: of one decoder, at least one.
        single: whether the caller gave one prompt, not a batch.
        max_rows: requests decoded at a time; the others wait, and join as some end.  None: all at once.
        policy: how trees grow; the decoder's policy if None.
        store: of prefixes that were read, for calls after this one: see `Scheduler`.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        single: bool = False,
        max_rows: int | None = None,
        policy: Policy | None = None,
        store: PrefixStore | None = None,
    ) -> None:
        self.requests, self.single = requests, single
        self._scheduler = Scheduler(requests[0].decoder, max_rows, policy, store)
        for request in requests:
            self._scheduler.add(request)
        self._steps = self._run()

    @property
    def rows(self) -> list[Row]:
        """The rows that are decoded."""
        return [request.row for request in self.requests]

    def __iter__(self) -> Iterator[list[tuple[Row, Step]]]:
        return self._steps

    def close(self) -> None:
        """Stop decoding and release the caches."""
        self._scheduler.close()

    def finish(self, streamer: object = None, has_prompt: bool = False) -> None:
        """Decode to the end and feed a ``transformers`` streamer, if given: the prompt, then tokens, then the end.

        Args:
            streamer: for one row.
            has_prompt: whether the streamer has the prompt already.

        Raises:
            InputError: the streamer is not one, or there is more than one prompt for it.
            NoTokenLeft: a row had to end; the others are whole, in ``partial``.
        """
        if streamer is not None:
            if not (hasattr(streamer, "put") and hasattr(streamer, "end")):
                raise InputError(f"streamer={streamer!r:.60} has no put and end: give a transformers streamer")
            if len(self.rows) > 1:
                raise InputError("a streamer takes one prompt: pass the prompts one by one, or drop the streamer")
            if not has_prompt:
                streamer.put(torch.tensor([self.rows[0].ids], device="cpu"))
        try:
            for emitted in self:
                if streamer is not None:
                    streamer.put(torch.tensor(emitted[0][1].tokens, device="cpu"))
            for row in self.rows:
                if row.error:
                    raise row.error
        except SpecinferError as error:
            error.partial = tuple(self.results())
            raise
        finally:
            if streamer is not None:
                streamer.end()

    def results(self) -> list[Result]:
        """Return one result per row, as far as it is decoded."""
        return [request.batch_result for request in self.requests]

    def _run(self) -> Iterator[list[tuple[Row, Step]]]:
        while not self._scheduler.idle:
            emitted = self._scheduler.step()
            for row in (request.row for request, _ in emitted):
                if row.error and not isinstance(row.error, NoTokenLeft):  # that one waits until the others are whole
                    self.close()
                    raise row.error
            if emitted:
                yield [(request.row, step) for request, step in emitted]
