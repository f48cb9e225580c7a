"""The engine of a server: one thread takes the scheduler's steps, and coroutines wait for their results.

What a step brought is in the steps of each request.  Readers take from there what is new to them, so a slow one holds
nobody up, and nothing is copied for it: after each step the event loop is told once that there is news.

Knows: threads, the event loop, how many texts may wait.  Does not know: HTTP, prompts, texts.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf, isinf
from threading import Condition, Thread
from time import perf_counter
from typing import NamedTuple, TypeVar

from specinfer.engine.requests import Request
from specinfer.engine.scheduler import Scheduler, Steps
from specinfer.errors import one_line
from specinfer.results import Step
from specinfer.serve.metrics import Metrics
from specinfer.serve.protocol import ApiError, overdue, overloaded

log = logging.getLogger(__name__)
T = TypeVar("T")
ENDS = ("eos", "stop", "length")  # of texts; other requests were aborted or failed


class Patience(NamedTuple):
    """How long an answer may take, in seconds after a time of `perf_counter`.

    Attributes:
        began: that time.
        whole: for all of it.
        queued: until one of its texts is begun.
    """

    began: float
    whole: float = inf
    queued: float = inf


class Generation:
    """The requests of one answer: wait for news of them, and close it when nobody waits any more.

    Args:
        engine: that decodes them.
        requests: that it was given.
        patience: how long they may take.
    """

    def __init__(self, engine: "Engine", requests: Sequence[Request], patience: Patience) -> None:
        self.engine, self.requests, self.patience = engine, requests, patience
        self.changed = asyncio.Event()
        if self.done:
            self.changed.set()

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
        taken = perf_counter() - self.patience.began
        if taken >= self.patience.whole:
            raise overdue(self.patience.whole)
        waits = not any(request.batch or request.done for request in self.requests)
        if waits and taken >= self.patience.queued:
            self.engine.metrics.rejections.labels("queue_timeout").inc()
            raise overloaded(f"no text was begun within {self.patience.queued:g} s: try again later")
        return min(self.patience.whole, self.patience.queued if waits else inf) - taken

    def close(self) -> None:
        """Take back requests that are not done: they leave with the next step."""
        self.engine.abort([request for request in self.requests if not request.done])


@dataclass
class Clock:
    """When a request was there, and when its newest step; whose it is."""

    generation: Generation
    began: float = field(default_factory=perf_counter)
    newest: float | None = None


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
        self._open: dict[Request, Clock] = {}
        self._reserved = 0
        self._calls = deque[tuple[Callable[[], object], Future[object]]]()
        self._news = Condition()  # guards the attributes below, and tells the thread of changes
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

    def submit(self, requests: Sequence[Request], patience: Patience) -> Generation:
        """Take requests that are not done; return the generation to wait for.

        Raises:
            ApiError: the thread has ended.
        """
        generation = Generation(self, requests, patience)
        with self._told():
            for request in requests:
                if request.done:
                    continue
                self._open[request] = Clock(generation)
                self.scheduler.add(request)
        return generation

    def abort(self, requests: Sequence[Request]) -> None:
        """Take requests back: they leave with the next step."""
        for request in requests:
            self.scheduler.abort(request)
            with self._news:
                if self._open.pop(request, None):
                    self.metrics.successes.labels("abort").inc()

    async def call(self, function: Callable[[], T]) -> T:
        """Call a function in the thread, between two steps: nothing else may run the models.

        Raises:
            ApiError: the thread has ended.
        """
        future: Future[T] = Future()
        with self._told():
            self._calls.append((function, future))  # type: ignore[arg-type]
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the thread after the step under way, and all requests as they are."""
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Tell the thread of something new, unless it has ended."""
        with self._news:
            if not self.alive:
                raise closed()
            yield
            self._news.notify()

    def _count_waiting(self) -> float:
        return max(0, len(self._open) - len(self.scheduler.active))

    # ---- in the thread ----

    def _run(self) -> None:
        try:
            while self._is_wanted():
                while self._calls:
                    self._answer(*self._calls.popleft())
                self._tell(self._stepped())
        finally:
            with self._news:
                self.alive = False
            for _, future in self._calls:
                self._answer(_refuse, future)
            self.scheduler.close()
            self._tell([])

    def _is_wanted(self) -> bool:
        """Wait until there is something to do; return False when the server closes."""
        with self._news:
            self._news.wait_for(lambda: self._closing or self._calls or not self.scheduler.idle)
            return not self._closing

    def _answer(self, function: Callable[[], object], future: "Future[object]") -> None:
        if future.set_running_or_notify_cancel():
            try:
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
        now = perf_counter()
        with self._news:
            clocks = {request: self._open[request] for request, _ in emitted if request in self._open}
            ended = {request: self._open.pop(request) for request in [*self._open] if request.done}
        for request, step in emitted:
            if request in clocks:
                self._count(request, step, clocks[request], now)
        for request, clock in ended.items():
            if request.error:
                log.error("a text ended with an error: %s", one_line(request.error))
            self.metrics.successes.labels(request.finish_reason if request.finish_reason in ENDS else "error").inc()
            self.metrics.whole.observe(now - clock.began)
        changed = {clock.generation for clock in (*clocks.values(), *ended.values())}
        if changed:
            self._loop.call_soon_threadsafe(partial(_wake, changed))

    def _count(self, request: Request, step: Step, clock: Clock, now: float) -> None:
        """Count a step of a request."""
        self.metrics.step(step)
        if not step.tokens:
            return
        if clock.newest is None:
            self.metrics.prompt_tokens.inc(request.row.prompt_length)
            self.metrics.asked_prefixes.inc(request.row.prompt_length)
            self.metrics.found_prefixes.inc(request.cached_tokens)
            self.metrics.first_token.observe(now - clock.began)
            self.metrics.queued.observe(max(0.0, now - clock.began - request.spent.seconds.total))
        else:
            self.metrics.between_tokens.observe((now - clock.newest) / len(step.tokens))
        clock.newest = now


def within(seconds: float) -> asyncio.Timeout:
    """Return `asyncio.timeout`, also for infinity."""
    return asyncio.timeout(None if isinf(seconds) else seconds)


def closed() -> ApiError:
    """Return the error of a server that takes no more requests."""
    return overloaded("the server is shutting down, or its engine failed")


def _refuse() -> None:
    raise closed()


def _wake(generations: set[Generation]) -> None:
    for generation in generations:
        generation.changed.set()
