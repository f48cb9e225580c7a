"""The scheduler: requests come and go at any time, and each step decodes all that are under way.

Requests that are decoded together are a batch (`decoding.Decoding`).  It begins with those that wait when nothing
runs, and others join it between two steps, as long as there is room.  When none is left it ends: the caches are
released, and drafts that learn between calls learn.  Rows of contrastive search are a batch that nobody joins, and so
are rows that differ in the distribution that sampled trees are drawn from.

Threads: one at a time takes a step.  `Scheduler.add` and `Scheduler.abort` wait for nobody.

Knows: which requests wait, whose turn it is.  Does not know: how a batch is decoded, where requests come from.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from threading import Condition, RLock
from typing import Any

from specinfer.attention import autocast_as_now
from specinfer.engine.decoding import Decoding, Steps
from specinfer.engine.requests import Request
from specinfer.engine.sessions import Decoder
from specinfer.engine.shared_prefix import SharedPrefix
from specinfer.errors import InputError
from specinfer.results import Step
from specinfer.tree import Kind, Policy

MAX_ROWS = 16  # decoded at a time, if there are more
ABORTED = "aborted"  # the finish reason of a request that was taken back


class Turns:
    """A lock, and news of its releases, for those who need not hold it themselves.

    Attributes:
        ended: how often it was released.
    """

    def __init__(self) -> None:
        self._lock, self._news, self.ended = RLock(), Condition(), 0

    @contextmanager
    def held(self, wait: bool = True) -> Iterator[bool]:
        """Hold the lock if it is free, or wait for it; yield whether it is held."""
        held = self._lock.acquire(wait)
        try:
            yield held
        finally:
            if held:
                self._lock.release()
                with self._news:
                    self.ended += 1
                    self._news.notify_all()

    def wait(self, ended: int) -> None:
        """Wait until it was released more often than that."""
        with self._news:
            self._news.wait_for(lambda: self.ended != ended)


class Scheduler:
    """Decodes requests that may come and go while others are under way.

    A request's token ids are those it has alone, whatever else is served.  If a step fails, it raises in the thread
    that took it, and the error is `Request.error` of all that were under way; those that wait begin with the next step.

    Args:
        decoder: whose models and rules decode.
        max_rows: requests decoded at a time; the others wait, in the order in which they came.  None: all at once.
        policy: how trees grow; the decoder's policy if None.
        shared: where what prompts share is kept from batch to batch; by default for one batch.
    """

    def __init__(
        self,
        decoder: Decoder,
        max_rows: int | None = MAX_ROWS,
        policy: Policy | None = None,
        shared: SharedPrefix | None = None,
    ) -> None:
        self.decoder, self.max_rows = decoder, max_rows
        self._policy, self._shared = policy or decoder.policy, shared
        self._as_called = autocast_as_now(decoder.target.device)  # a batch's steps compute alike
        self._waiting, self._aborted = deque[Request](), deque[Request]()
        self._batch: Decoding | None = None  # under way
        self._turns, self._stepping = Turns(), False

    @property
    def active(self) -> list[Request]:
        """The requests under way; others wait."""
        batch = self._batch
        return batch.active if batch else []

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing: no request is there, and the last batch has ended."""
        return not (self._waiting or self._batch)

    def add(self, request: Request) -> Request:
        """Take a request, from any thread; it joins the others with the next step for which there is room.

        Args:
            request: of `SpeculativeDecoder.prepare`.

        Returns:
            the same, to `abort` it or to read its result.

        Raises:
            InputError: it was added before, or another decoder prepared it.
        """
        if request.added or request.decoder is not self.decoder:
            why = "was added before" if request.added else "is another decoder's"
            raise InputError(f"{request} {why}: prepare one for each text, with the scheduler's decoder")
        request.added = True
        self._waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        """Take a request back, from any thread: it leaves before the next step; what it has emitted stays."""
        self._aborted.append(request)
        with self._turns.held(wait=False) as held:
            if held and not self._stepping:
                self._take_back()

    def step(self) -> Steps:
        """Decode one step of all requests under way and of those that can join; return who emitted what.

        Raises:
            InputError: a step is under way in this thread, which asks for another one.
            SpecinferError: what decoding raises.
        """
        with self._turns.held():
            if self._stepping:
                raise InputError("a step of this scheduler is under way, and what it calls takes another: use two")
            self._stepping = True
            try:
                return self._step()
            finally:
                self._stepping = False

    def stream(self, request: Request) -> Iterator[Step]:
        """Yield a request's steps as they come.

        Of several threads that do so, one takes a step for all, and the others wait for it.

        Args:
            request: that was added.

        Raises:
            SpecinferError: what a step raises, whoever took it.
        """
        for number in count():
            while len(request.steps) == number and not request.done:
                ended = self._turns.ended
                with self._turns.held(wait=False) as held:
                    if held and len(request.steps) == number and not request.done:
                        self.step()
                if not held:
                    self._turns.wait(ended)
            if len(request.steps) == number:
                break
            yield request.steps[number]
        if request.error:
            raise request.error
        self.rest()

    def rest(self) -> None:
        """End the batch under way if nobody is left in it and nobody waits."""
        with self._turns.held(wait=False) as held:
            if held and not self._stepping:
                self._take_back()
                if not (self.active or self._waiting):
                    self.step()

    def close(self) -> None:
        """Drop all requests and release the caches; results stay as they are."""
        with self._turns.held():
            while self._waiting:
                self._waiting.popleft().end()
            self._drop()

    # ---- for the thread whose turn it is ----

    def _step(self) -> Steps:
        """Decode one step, of the next batch if one has ended."""
        self._take_back()
        while batch := self._batch or self._begun():
            try:
                emitted = batch.step()
            except BaseException as error:
                self._drop(error)
                raise
            if emitted is not None:
                self._take_back()
                return emitted
            self._drop()
            batch.learn()
        return []

    def _take_back(self) -> None:
        """End the requests that were aborted."""
        while self._aborted:
            request = self._aborted.popleft()
            if self._batch and request in self._batch.active:
                self._batch.end(request, ABORTED)
            elif request in self._waiting:
                self._waiting.remove(request)
                request.end(ABORTED)

    def _drop(self, error: BaseException | None = None) -> None:
        """Release the caches of the batch under way, and end its requests as they are."""
        batch, self._batch = self._batch, None
        if batch:
            batch.drop(error)

    def _begun(self) -> Decoding | None:
        """Return a batch of those that wait, if somebody does."""
        if self._waiting:
            newcomers = partial(self._newcomers, self._kind(self._waiting[0]))
            shared = self._shared or SharedPrefix()
            self._batch = Decoding(newcomers(0), newcomers, self._policy, shared, self._as_called)
        return self._batch

    def _newcomers(self, kind: Any, active: int) -> list[Request]:
        """Take the first that wait, as long as they are of a kind and there is room beside active ones."""
        found: list[Request] = []
        while self._waiting and (self.max_rows is None or active + len(found) < self.max_rows):
            if self._kind(self._waiting[0]) != kind:
                break
            found.append(self._waiting.popleft())
        return found

    def _kind(self, request: Request) -> Any:
        """Return what requests that are decoded together have in common."""
        row, ranked = request.row, self._policy.kind is Kind.RANKED
        return bool(row.contrast.alpha), None if ranked else (row.sampling, row.options)
