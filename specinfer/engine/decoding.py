"""A batch under way: the requests that are decoded together, from the opening of sessions to what drafts learn.

Knows: sessions, when they are opened and dropped, what a step is told and what is recorded of it.
Does not know: how a step is decoded, which requests wait, threads.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from textwrap import shorten

from specinfer.attention import TreeModel, resumed, running
from specinfer.engine.contrastive import search, sized
from specinfer.engine.draft import Draft
from specinfer.engine.loop import Emitted, decode
from specinfer.engine.requests import Batch, Request
from specinfer.engine.sequence import Row
from specinfer.engine.sessions import Openings, Reading, Sessions
from specinfer.engine.shared_prefix import SharedPrefix
from specinfer.results import Step
from specinfer.tree import Policy

Steps = list[tuple[Request, Step]]  # what each request emitted


class Decoding:
    """Some requests under way, and others that join them: the `loop.Schedule` of their rows.

    Args:
        requests: the first ones, all of one decoder.
        newcomers: takes how many are under way, and returns those that join them.
        policy: how trees grow.
        shared: what prompts share.
        as_called: restores autocast as it was for the caller.

    Attributes:
        requests: in the order of the sessions' rows; among them those that were aborted since the last step.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        newcomers: Callable[[int], list[Request]],
        policy: Policy,
        shared: SharedPrefix,
        as_called: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.decoder, self._newcomers, self._shared, self._as_called = requests[0].decoder, newcomers, shared, as_called
        self.requests: list[Request] = []
        self._searches = bool(requests[0].row.contrast.alpha)
        self._batch = Batch(sized(policy, [request.row for request in requests]))
        self._learning = [draft for draft in self.decoder.drafts if draft.learns]
        self._texts: list[list[int]] = []  # of rows that ended, for drafts that learn
        self._sessions: Sessions | None = None
        self._steps: Generator[Steps] | None = None
        self._run_plain: list[TreeModel] = []
        self._join(requests)

    @property
    def active(self) -> list[Request]:
        """The requests that are not done."""
        return [request for request in self.requests if not request.done]

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
        newcomers = [] if self._searches else self._newcomers(len(self.requests))
        if newcomers and self._sessions:
            self._join(newcomers)
            self._sessions.join([request.row for request in newcomers])
        return [request.row for request in self.requests]

    def finish(self, emitted: Emitted) -> Steps:
        """Record a step, and tell an adaptive policy how it went."""
        spent, found = self._read_clocks(), []
        if self._batch.policy.adapts:
            self._observe(emitted, spent)
        for request, (row, step) in zip(self.requests, emitted, strict=True):
            if request.done:  # it was aborted, and leaves with this step
                continue
            request.steps.append(replace(step, seconds=spent.seconds))
            found.append((request, request.steps[-1]))
            if row.finished:
                self.end(request)
        self.requests = self.active
        return found

    def _observe(self, emitted: Emitted, spent: Reading) -> None:
        """Tell the policy how a step went: the same in all processes that share the target."""
        *proposing, decoding = self.decoder.target.ranks.largest(
            [*(seconds for _, seconds in spent.drafting), spent.seconds.decoding]
        )
        self._batch.policy.observe(
            trees=[step.tree for _, step in emitted],
            paths=[step.path for _, step in emitted],
            tokens=[step.tokens for _, step in emitted],
            proposing=proposing,
            seconds=decoding if spent.passes else None,  # of a pass that read no prompts
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
        steps, self._steps, self._sessions, self.requests = self._steps, None, None, []
        if steps:
            steps.close()

    def learn(self) -> None:
        """Let drafts that learn between calls learn from all that has ended."""
        if self._learning:
            _learn(self._learning, self._texts, self._batch)

    def _open(self) -> Generator[Steps]:
        """Open the sessions; return the steps."""
        decoder, batch, rows = self.decoder, self._batch, [request.row for request in self.requests]
        models = decoder.networks
        with self._as_called():
            policy = decoder.supported(batch.policy, batch.notes)  # hooks may have come since the last batch
        with self._as_called(), running(*models):  # only while passes run: between steps the models are as they were
            sessions = self._sessions = Sessions(Openings(decoder, policy, self._shared), rows)
            batch.policy, runs = sessions.policy, {models[0]: sessions.target.run}
            batch.notes.append(decoder.passes)
            self._run_plain = [each for each in models if runs.get(each, each.ways.best()).runs_modules]
        self._read_clocks()
        if not self._searches:
            return decode(self, sessions, decoder.verifier)
        batch.notes.append(_search_note(sessions, models[0]))
        return search(self, sessions, rows)

    def _join(self, requests: Sequence[Request]) -> None:
        """Take requests in; their time begins."""
        for request in requests:
            request.join(self._batch)
        self.requests += requests
        self._batch.rows = max(self._batch.rows, len(self.requests))

    def _read_clocks(self) -> Reading:
        """Return what was spent since the last reading."""
        assert self._sessions is not None, "sessions are open while a step is under way"
        return self._batch.clocks.read(self._sessions.target, self._sessions.drafts)


def _search_note(sessions: Sessions, target: TreeModel) -> str:
    """Return how contrastive search goes, in words."""
    reason = " (the target's passes are plain: compiled ones return no last hidden states)"
    return f"{sessions.policy}{'' if sessions.target.run is target.ways.best() else reason}"


def _learn(drafts: Sequence[Draft], texts: list[list[int]], batch: Batch) -> None:
    """Let drafts learn from the texts of a batch."""
    batch.clocks.resume()
    for draft in drafts:
        try:
            draft.learn(texts, batch.clocks.now.seconds.total)
        except Exception as error:  # the text is whole, and is not lost
            batch.notes.append(f"draft {draft.name} could not learn from this call: {shorten(str(error), 200)}")
    batch.clocks.learnt()
