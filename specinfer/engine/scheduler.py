"""The scheduler: requests come and go at any time, and each step decodes all that are under way.

Requests that are decoded together are a batch (`Decoding`).  It begins with those that wait when nothing runs, and
others join between two steps while there is room: their prompts are read in chunks, one a step, so that requests under
way never wait for a long one.  When none is left the batch ends, and the caches are released.  Drafts that learn
do so then, and whenever many rows have ended.  Rows of contrastive search are a batch that nobody joins, and so are
rows that differ in the distribution that sampled trees are drawn from.

One thread at a time takes a step.  `Scheduler.add` and `Scheduler.abort` do not wait.

Knows: which requests wait, whose turn it is, when sessions are opened and dropped, what is recorded of a step.
Does not know: how a step is decoded, where requests come from.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import count
from textwrap import shorten
from threading import get_ident

from specinfer.attention import TreeModel, autocast_as_now, resumed, running
from specinfer.common.lock import Turns
from specinfer.common.threads import release_workers
from specinfer.engine.contrastive import search, sized
from specinfer.engine.loop import Emitted, decode
from specinfer.engine.requests import Batch, Request
from specinfer.engine.sequence import Row
from specinfer.engine.sessions import Decoder, Openings, Reading, Sessions
from specinfer.engine.store import PrefixStore
from specinfer.errors import InputError
from specinfer.results import Step
from specinfer.tree import Kind, Policy

MAX_ROWS = 16  # decoded at a time, if there are more
LESSON = 64  # rows that have ended, after which drafts learn
ABORTED = "aborted"  # the finish reason of a request that was taken back

Steps = list[tuple[Request, Step]]  # what each request emitted


class Decoding:
    """Some requests under way, and others that join them: the `loop.Schedule` of their rows.

    Args:
        requests: the first ones, all of one decoder.
        newcomers: takes how many are under way, and returns those that join them.
        policy: how trees grow.
        store: of what was read.
        as_called: restores autocast as it was for the caller.

    Attributes:
        requests: in the order of the sessions' rows; among them those that were aborted since the last step.
        joining: those whose prompts are not read yet.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        newcomers: Callable[[int], list[Request]],
        policy: Policy,
        store: PrefixStore,
        as_called: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.decoder, self._newcomers, self._store, self._as_called = requests[0].decoder, newcomers, store, as_called
        self.requests: list[Request] = []
        self.joining: list[Request] = []
        self._searches = bool(requests[0].row.contrast.alpha)
        self._batch = Batch(sized(policy, [request.row for request in requests]))
        self._learning = [draft for draft in self.decoder.drafts if draft.learns]
        self._texts: list[list[int]] = []  # of rows that ended, for drafts that learn
        self._sessions: Sessions | None = None
        self._steps: Generator[Steps] | None = None
        self._run_plain: list[TreeModel] = []
        self._take(requests)
        self._join(len(requests))

    @property
    def active(self) -> list[Request]:
        """The requests that are not done."""
        return [request for request in (*self.requests, *self.joining) if not request.done]

    def step(self) -> Steps | None:
        """Decode one step; return what each request emitted, None if none is left."""
        if self.requests and not self.active:
            return None  # all were aborted
        self._batch.clocks.resume()
        steps = self._steps = self._steps or self._open()
        with self._as_called(), resumed(*self._run_plain):  # compiled passes are the same in train mode
            return next(steps, None)

    def admit(self) -> Sequence[Row]:
        """Let requests join, unless these rows search; return the rows of the next step."""
        assert self._sessions is not None, "sessions are open while a step is under way"
        if not self._searches:
            self._take(self._newcomers(len(self.active)))
            self.joining = [request for request in self.joining if not request.done]
            beside = not all(request.done for request in self.requests)
            self._join(self._sessions.join([request.row for request in self.joining], beside))
        return [request.row for request in self.requests]

    def finish(self, emitted: Emitted) -> Steps:
        """Record a step, and tell an adaptive policy how it went."""
        spent, found = self._read_clocks(), []
        if self._batch.policy.adapts:
            self._observe(emitted, spent)
        for request, (row, step) in zip(self.requests, emitted, strict=True):
            if request.done:  # it was aborted, and leaves with this step
                continue
            found.append((request, replace(step, seconds=spent.seconds)))
            if step.tokens or not row.error:
                request.steps.append(found[-1][1])
            if row.finished:
                self.end(request)
        self.requests = [request for request in self.requests if not request.done]
        if len(self._texts) >= LESSON:
            self.learn()
        return found

    def _observe(self, emitted: Emitted, spent: Reading) -> None:
        """Tell the policy how a step went: the same in all processes that share the target."""
        *proposing, decoding = self.decoder.target.ranks.largest(
            [*(seconds for _, seconds in spent.drafting), spent.seconds.decoding]
        )
        usual = not spent.first  # passes that later ones will be like
        self._batch.policy.observe(
            trees=[step.tree for _, step in emitted],
            paths=[step.path for _, step in emitted],
            tokens=[step.tokens for _, step in emitted],
            proposing=proposing if usual else [0.0] * len(proposing),
            seconds=decoding if spent.passes and usual else None,
            coming=len(self.joining),
        )

    def end(self, request: Request, reason: str | None = None) -> None:
        """Note that a request has ended; its row leaves with the step under way, or the next one."""
        request.end(reason)
        if self._learning:
            self._texts.append(list(request.row.ids))

    def drop(self, error: BaseException | None = None) -> None:
        """Release the caches, and end the requests that are left as they are."""
        for request in self.active:
            request.end(error=error)
        interrupted = not isinstance(error, Exception) and self.decoder.target.ranks.size == 1  # by Ctrl-C
        if self._sessions and (error is None or interrupted):
            self._sessions.release()
        steps, self._steps, self._sessions, self.requests, self.joining = self._steps, None, None, [], []
        if steps:
            steps.close()

    def learn(self) -> None:
        """Let drafts that learn between calls learn from all that has ended since they did."""
        if not self._learning:
            return
        batch, texts, self._texts = self._batch, self._texts, []
        batch.clocks.resume()
        for draft in self._learning:
            try:
                draft.learn(texts, batch.clocks.since_learning)
            except Exception as error:  # the text is whole, and is not lost
                note = f"draft {draft.name} could not learn from this call: {shorten(str(error), 200)}"
                batch.notes += [] if note in batch.notes else [note]
        batch.clocks.learnt()

    def _open(self) -> Generator[Steps]:
        """Open the sessions; return the steps."""
        decoder, batch, rows = self.decoder, self._batch, [request.row for request in self.requests]
        models = decoder.networks
        with self._as_called():
            policy = decoder.supported(batch.policy, batch.notes)  # hooks may have come since the last batch
        with self._as_called(), running(*models):  # only while passes run: between steps the models are as they were
            sessions = self._sessions = Sessions(Openings(decoder, policy, self._store), rows)
            batch.policy, runs = sessions.policy, {models[0]: sessions.target.run}
            batch.notes.append(decoder.passes)
            if decoder.target.stateful and self._store.keeps:
                batch.notes.append(
                    f"{decoder.target.name} keeps states, which cannot be cut: it reads every prompt whole"
                )
            self._run_plain = [each for each in models if runs.get(each, each.ways.best()).runs_modules]
        self._read_clocks()
        if not self._searches:
            return decode(self, sessions, decoder.verifier)
        batch.notes.append(_search_note(sessions, models[0]))
        return search(self, sessions, rows)

    def _take(self, requests: Sequence[Request]) -> None:
        """Take requests in; their time begins."""
        for request in requests:
            request.join(self._batch)
        self.joining += requests

    def _join(self, count: int) -> None:
        """Let the first ones join."""
        self.requests += self.joining[:count]
        del self.joining[:count]
        self._batch.rows = max(self._batch.rows, len(self.requests))

    def _read_clocks(self) -> Reading:
        """Return what was spent since the last reading."""
        assert self._sessions is not None, "sessions are open while a step is under way"
        return self._batch.clocks.read(self._sessions.target, self._sessions.drafts)


class Scheduler:
    """Decodes requests that may come and go while others are under way.

    A request's token ids are those that it has alone, whatever else is served.  What fails in one row alone, such as
    a logits processor of its own, is `Request.error` of that request, and others go on.  If a step fails, it raises in
    the thread that took it, and the error is that of all that were under way; those that wait begin with the next step.

    Args:
        decoder: whose models and rules decode.
        max_rows: requests decoded at a time; the others wait, in the order in which they came.  None: all at once.
        policy: how trees grow; the decoder's policy if None.
        store: where what was read is kept from batch to batch.  By default each batch has its own, which keeps rows
            that leave while others wait.
    """

    def __init__(
        self,
        decoder: Decoder,
        max_rows: int | None = MAX_ROWS,
        policy: Policy | None = None,
        store: PrefixStore | None = None,
    ) -> None:
        self.decoder, self.max_rows, self.store = decoder, max_rows, store
        self._policy = policy or decoder.policy
        self._as_called = autocast_as_now(decoder.target.device)  # a batch's steps compute alike
        self._waiting, self._aborted = deque[Request](), deque[Request]()
        self._batch: Decoding | None = None  # under way
        self._turns, self._stepping, self._stepper = Turns(), False, get_ident()

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
            SamplingError: it asks for contrastive search, and the scheduler's trees are sampled.
        """
        if request.added or request.decoder is not self.decoder:
            why = "was added before" if request.added else "is another decoder's"
            raise InputError(f"{request} {why}: prepare one for each text, with the scheduler's decoder")
        sized(self._policy, [request.row])  # or it raises
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

        A request that is done comes for the last time, with no tokens if it has an error.

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
                stepper, self._stepper = self._stepper, get_ident()
                if not self._batch or stepper != self._stepper:  # the next step may be another thread's
                    release_workers()

    def stream(self, request: Request) -> Iterator[Step]:
        """Yield a request's steps as they come.

        Of several threads that do so, one takes a step for all, and the others wait for it.

        Args:
            request: that was added.

        Raises:
            Exception: what failed in the request's own row.
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
        self.rest()
        if request.error:
            raise request.error

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
            store = self.store or PrefixStore(wanted=lambda: bool(self._waiting))
            self._batch = Decoding(newcomers(0), newcomers, self._policy, store, self._as_called)
        return self._batch

    def _newcomers(self, kind: object, active: int) -> list[Request]:
        """Take the first that wait, as long as they are of a kind and there is room beside active ones."""
        found: list[Request] = []
        while self._waiting and (self.max_rows is None or active + len(found) < self.max_rows):
            if self._kind(self._waiting[0]) != kind:
                break
            found.append(self._waiting.popleft())
        return found

    def _kind(self, request: Request) -> object:
        """Return what requests that are decoded together have in common."""
        row, ranked = request.row, self._policy.kind is Kind.RANKED
        return bool(row.contrast.alpha), None if ranked else (row.sampling, row.options)


def _search_note(sessions: Sessions, target: TreeModel) -> str:
    """Return how contrastive search goes, in words."""
    reason = " (the target's passes are plain: compiled ones return no last hidden states)"
    return f"{sessions.policy}{'' if sessions.target.run is target.ways.best() else reason}"
