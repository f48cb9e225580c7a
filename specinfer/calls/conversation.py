"""A conversation: each turn begins with what the target has read in the turn before, prompt and answer.

Knows: token ids, the target's sessions.  Does not know: messages, chat templates, how a turn is decoded.

A turn is a `Run` with one row.  Its prompt is the whole history, which may differ from what was read: a chat template
may rewrite earlier turns, and text may be cut into other tokens.  What both begin with is copied, the rest is read.
Drafts read whole prompts, and models that keep states read them again, too.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specinfer.attention import TreeModel, TreeSession
from specinfer.calls.run import Run
from specinfer.engine.requests import Request
from specinfer.engine.shared_prefix import SharedPrefix, common


class Conversation(SharedPrefix):
    """What the target has read, handed from turn to turn.

    Attributes:
        known: how many tokens of the newest turn's prompt were not read again.
    """

    known = 0

    def begin(self, request: Request) -> Run:
        """Return the run of a turn, which begins with what the last turn has read."""
        return Run([request], single=True, shared=self)

    def end(self, run: Run) -> None:
        """Keep what a run has read, which has ended or was closed, for the turn after it.

        If it failed before its prompt was read, the turn before it is kept.
        """
        if isinstance(self.session, Turn) and not self.ids:
            self.states = torch.cat(self.session.states) if self.session.states else None
            read = [self.session.cache.lengths[0], *([] if self.states is None else [len(self.states)])]
            self.ids = run.rows[0].ids[: min(read)]  # they differ if Ctrl-C came in between

    def open(self, model: TreeModel, *sizes: Any) -> TreeSession:
        """Open a turn's session: as `TreeModel.session`, and its row outlives the run."""
        session = model.session(*sizes)
        return Turn(model, session.cache, session.aux_layers, session.run)

    def prefill(
        self, session: TreeSession, prompts: Sequence[Sequence[int]], hold: bool = False
    ) -> list[Tensor | None]:
        """Read a turn's prompt, as `SharedPrefix.prefill` does."""
        self.known = 0
        states = super().prefill(session, prompts, hold)
        self.session, self.ids, self.states = session, (), None  # nothing of it is known before the turn ends
        return states

    def _find(self, session: TreeSession, prompts: Sequence[Sequence[int]]) -> int:
        self.known = len(common([self.ids, *prompts]))
        return self.known


class Turn(TreeSession):
    """A session of one row.  When its text ends the row stays, without the last step, and so do all hidden states."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.states: list[Tensor] = []  # of what is committed, in order

    def commit(self, paths: Sequence[Sequence[int] | None]) -> list[Tensor | None]:
        """As `TreeSession.commit`, but a row that ends is kept as it was before the step."""
        found = super().commit([() if path is None else path for path in paths])
        self.states += [states for states in found if states is not None]
        return found

    def begin_with(self, other: TreeSession, length: int) -> None:
        """As `TreeSession.begin_with`, hidden states included."""
        super().begin_with(other, length)
        if isinstance(other, Turn) and other.states:
            self.states = [torch.cat(other.states)[:length]]
