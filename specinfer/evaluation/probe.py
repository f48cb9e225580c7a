"""Probes: drafts that are asked one question after every token of a text, and propose nothing.

Knows: the draft interface.  Does not know: what is asked (`traces.probes`, `comparison.methods`), what becomes of it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from specinfer.drafts.base import Draft, DraftContext, DraftSession
from specinfer.tree import Chain, Growth, Kind, Policy, Source, TokenTree


class Question(ABC):
    """What a draft is asked; to its session, a policy that grows bare roots."""

    kind = Kind.RANKED
    max_nodes = max_depth = 0

    def __init__(self, rows: int) -> None:
        self.rows, self.place = list(range(rows)), 0  # rows under way, and how many tokens were committed to them
        self.wanted = 0  # places where proposals were wanted; a draft that knows nothing there does not ask

    @abstractmethod
    def ask(self, source: Source, max_depth: int | None) -> None:
        """Ask the rows' draft where they are, no deeper than ``max_depth``."""

    def advance(self, tokens: Sequence[Sequence[int] | None]) -> None:
        """Go to the next place; rows given None are at their end."""
        self.rows = [row for row, new in zip(self.rows, tokens, strict=True) if new is not None]
        self.place += 1

    def grow(self, source: Source, max_depth: int | None = None) -> Growth:
        """Ask, and grow nothing."""
        self.ask(source, max_depth)
        return Chain(0).grow(source)

    def fit(self, trees: Sequence[TokenTree]) -> Sequence[TokenTree]:
        """Return the trees as they are."""
        return trees


class Probe:
    """A draft with a question in the place of the policy."""

    def __init__(self, draft: Draft, question: Question) -> None:
        self.draft, self.question = draft, question

    def __getattr__(self, name: str) -> Any:  # name, aux_layers, model: the draft's own
        return getattr(self.draft, name)

    @property
    def attach(self) -> Any:
        """What attaches the draft, if it can be, and puts it to the question."""
        attach = self.draft.attach  # type: ignore[attr-defined]  # without one, a probe has none
        return lambda *target: Probe(attach(*target) or self.draft, self.question)

    def open(self, context: DraftContext) -> "ProbeSession":
        """Open the draft's own session."""
        return ProbeSession(self.draft.open(context), self.question)


class ProbeSession:
    """The draft's session, at work."""

    def __init__(self, session: DraftSession, question: Question) -> None:
        self.session, self.question = session, question

    def __getattr__(self, name: str) -> Any:  # the clocks: the session's own
        return getattr(self.session, name)

    def propose(self, _: Policy, max_depth: int) -> Sequence[TokenTree]:
        """Ask; return bare roots."""
        self.question.wanted += 1
        return self.session.propose(self.question, max_depth)

    def commit(self, tokens: Sequence[Sequence[int] | None], states: Sequence[Tensor | None] = ()) -> None:
        """Let the draft and the question take note."""
        self.session.commit(tokens, states)
        self.question.advance(tokens)
