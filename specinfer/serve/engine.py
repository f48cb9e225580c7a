"""The engine of a server: one thread takes the scheduler's steps, and coroutines wait for their results.

What a step brought is in the steps of each request.  Readers take from there what is new to them, so a slow one holds
nobody up, and nothing is copied for it: after each step the event loop is told once that there is news.

Knows: threads, the event loop, how many texts may wait.  Does not know: HTTP, prompts, texts.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from math import inf, isinf
from queue import SimpleQueue
from threading import Thread
from time import perf_counter
from typing import TypeVar

from specinfer.engine.requests import Request
from specinfer.engine.scheduler import Scheduler, Steps
from specinfer.errors import one_line
from specinfer.results import Step
from specinfer.serve.metrics import Metrics
from specinfer.serve.protocol import ApiError, overdue, overloaded

log = logging.getLogger(__name__)
T = TypeVar("T")
ENDS = ("eos", "stop", "length")  # of texts; other requests were aborted or failed


class Generation:
    """The requests of one answer: wait for news of them, and close it when nobody waits any more.

    Args:
        engine: that decodes them.
        whole: seconds from now that all of it may take.
        queued: seconds from now until one of its texts is to be begun.

    Attributes:
        requests: once the engine has them.
        submitted: when it got them, a time of `perf_counter`.
        newest: when the newest step of each request was, likewise.
    """

    def __init__(self, engine: "Engine", whole: float = inf, queued: float = inf) -> None:
        self.engine, self.whole, self.queued, self.began = engine, whole, queued, perf_counter()
        self.requests: Sequence[Request] = ()
        self.submitted, self.newest = self.began, dict[Request, float]()
        self.changed = asyncio.Event()

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return all(request.done for request in self.requests)

    async def news(self, seconds: float = inf) -> bool:
        """Wait for a step; return whether there was one within some seconds.

        Raises:
            ApiError: it takes longer than it may.
        """
        left = self._left()
        try:
            async with within(min(seconds, left)):
                await self.changed.wait()
        except TimeoutError:
            self._left()
            return False
        self.changed.clear()
        return True

    def _left(self) -> float:
        """Return for how many more seconds it may take; raise `ApiError` if there are none."""
        taken = perf_counter() - self.began
        if taken >= self.whole:
            raise overdue(self.whole)
        waits = not any(request.batch or request.done for request in self.requests)
        if waits and taken >= self.queued:
            self.engine.metrics.rejections.labels("queue_timeout").inc()
            raise overloaded(f"no text was begun within {self.queued:g} s: try again later")
        return min(self.whole, self.queued if waits else inf) - taken

    def close(self) -> None:
        """Take back requests that are not done: they leave with the next step."""
        self.engine.abort([request for request in self.requests if not request.done])


class Engine:
    """One thread that owns a scheduler.

    A step that fails ends the requests under way, and the thread goes on with those that wait.

    Args:
        scheduler: of the decoder.
        max_queue: texts that may wait, beside those under way.

    Attributes:
        alive: whether the thread takes requests.
    """

    def __init__(self, scheduler: Scheduler, max_queue: int) -> None:
        self.scheduler, self.capacity = scheduler, (scheduler.max_rows or 0) + max_queue
        self.metrics = Metrics(lambda: len(self.scheduler.active), self._count_waiting)
        self.alive = False
        self._open: dict[Request, Generation] = {}  # of both threads: each use of it is one call
        self._reserved = 0
        self._jobs = SimpleQueue[Callable[[], object]]()  # what the thread does before its next step
        self._closing = False

    def start(self) -> None:
        """Begin, in a coroutine: its event loop is the one that is told of steps."""
        self._loop, self.alive = asyncio.get_running_loop(), True
        self._thread = Thread(target=self._run, name="specinfer engine", daemon=True)
        self._thread.start()

    @contextmanager
    def reserved(self, texts: int) -> Iterator[None]:
        """Hold room for some texts while they are prepared.

        Raises:
            ApiError: too many wait, or the thread has ended.
        """
        if not self.alive:
            self.metrics.rejections.labels("closed").inc()
            raise closed()
        if texts > self.capacity:
            raise ApiError(400, f"{texts} texts are more than {self.capacity}, which is all that fits: ask for fewer")
        if len(self._open) + self._reserved + texts > self.capacity:
            self.metrics.rejections.labels("queue_full").inc()
            raise overloaded(f"{self.capacity} texts are under way or wait, and no more are taken: try again later")
        self._reserved += texts
        try:
            yield
        finally:
            self._reserved -= texts

    def submit(self, requests: Sequence[Request], generation: Generation) -> None:
        """Take the requests of a generation, as far as they are not done.

        Raises:
            ApiError: the thread has ended.
        """
        generation.requests, generation.submitted = requests, perf_counter()
        if generation.done:
            generation.changed.set()
        for request in requests:
            if not request.done:
                self._open[request] = generation
                self.scheduler.add(request)
        self._put(lambda: None)  # wakes the thread

    def abort(self, requests: Sequence[Request]) -> None:
        """Take requests back: they leave with the next step."""
        for request in requests:
            self.scheduler.abort(request)
            if self._open.pop(request, None):
                self.metrics.successes.labels("abort").inc()

    async def call(self, function: Callable[[], T]) -> T:
        """Call a function in the thread, between two steps: nothing else may run the models.

        Raises:
            ApiError: the thread has ended.
        """
        future: Future[T] = Future()
        self._put(lambda: self._answer(function, future))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the thread after the step under way, and all requests as they are."""
        self._closing = True
        self._jobs.put(lambda: None)
        self._thread.join()

    def _put(self, job: Callable[[], object]) -> None:
        """Give the thread a job; it does those that it was given before it ended.

        Raises:
            ApiError: the thread has ended.
        """
        self._jobs.put(job)
        if not self.alive:
            raise closed()

    def _count_waiting(self) -> float:
        return max(0, len(self._open) - len(self.scheduler.active))

    # ---- in the thread ----

    def _run(self) -> None:
        try:
            while not self._closing:
                if self.scheduler.idle or not self._jobs.empty():
                    self._jobs.get()()
                else:
                    self._tell(self._stepped())
        finally:
            self.alive = False
            while not self._jobs.empty():
                self._jobs.get()()
            self.scheduler.close()
            self._tell([])

    def _answer(self, function: Callable[[], T], future: "Future[T]") -> None:
        """Call a function for somebody who waits for it, unless the thread ends."""
        if future.set_running_or_notify_cancel():
            try:
                if not self.alive:
                    raise closed()
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

    def _stepped(self) -> Steps:
        """Take a step; of one that fails, the requests have the error."""
        try:
            return self.scheduler.step()
        except Exception:
            log.exception("a step failed, and ended the requests under way")
            return []

    def _tell(self, emitted: Steps) -> None:
        """Count a step, and tell those who wait for it."""
        now, changed = perf_counter(), set[Generation]()
        for request, step in emitted:
            if generation := self._open.get(request):
                self._count(request, step, generation, now)
                changed.add(generation)
        for request in [*self._open]:
            if request.done and (generation := self._open.pop(request, None)):  # unless it is taken back meanwhile
                if request.error:
                    log.error("a text ended with an error: %s", one_line(request.error))
                self.metrics.successes.labels(request.finish_reason if request.finish_reason in ENDS else "error").inc()
                self.metrics.whole.observe(now - generation.submitted)
                changed.add(generation)
        if changed:
            self._loop.call_soon_threadsafe(_wake, changed)

    def _count(self, request: Request, step: Step, generation: Generation, now: float) -> None:
        """Count a step of a request."""
        self.metrics.step(step)
        if not step.tokens:
            return
        newest, waited = generation.newest.get(request), now - generation.submitted
        if newest is None:
            self.metrics.prompt_tokens.inc(request.row.prompt_length)
            self.metrics.asked_prefixes.inc(request.row.prompt_length)
            self.metrics.found_prefixes.inc(request.cached_tokens)
            self.metrics.first_token.observe(waited)
            self.metrics.queued.observe(max(0.0, waited - request.spent.seconds.total))
        else:
            self.metrics.between_tokens.observe((now - newest) / len(step.tokens))
        generation.newest[request] = now


def within(seconds: float) -> asyncio.Timeout:
    """Return `asyncio.timeout`, also for infinity."""
    return asyncio.timeout(None if isinf(seconds) else seconds)


def closed() -> ApiError:
    """Return the error of a server that takes no more requests."""
    return overloaded("the server is shutting down, or its engine failed")


def _wake(generations: set[Generation]) -> None:
    for generation in generations:
        generation.changed.set()
