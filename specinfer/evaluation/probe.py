"""Probes: drafts that are asked one question after every token of a text, and propose nothing.

Knows: the draft interface.
Does not know: what is asked (`traces.probes`, `compare.methods`), and what the answers are used for.
"""

from abc import abstractmethod
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from specinfer.attention import TreeModel
from specinfer.engine.draft import Clocked, Committed, Draft, DraftContext, DraftSession, Scored, States
from specinfer.engine.prefixes import Cached
from specinfer.tree import Chain, Forest, Growth, Kind, Policy, Source


class Question(Policy):
    """A question to a draft.  To the draft's session it is a policy that grows bare roots."""

    kind = Kind.RANKED
    prescribes = True
    max_nodes = max_depth = 0

    def __init__(self, rows: int) -> None:
        self.rows, self.position = list(range(rows)), 0  # rows that go on, and how many tokens each has committed
        self.wanted = 0  # steps in which proposals were wanted; a draft that knows nothing then does not ask

    @abstractmethod
    def ask(self, source: Source, max_depth: int | None) -> None:
        """Ask the draft at the rows' position, no deeper than ``max_depth``."""

    def advance(self, tokens: Committed) -> None:
        """Go to the next position; rows given None are at their end."""
        self.rows = [row for row, new in zip(self.rows, tokens, strict=True) if new is not None]
        self.position += 1

    def grow(self, source: Source, max_depth: int | None = None) -> Growth:
        """Ask the question, and grow nothing."""
        self.ask(source, max_depth)
        return Chain(0).grow(source)


class Probe(Draft):
    """A draft that is asked a question instead of growing a policy's trees."""

    def __init__(self, draft: Draft, question: Question) -> None:
        self.draft, self.question = draft, question
        self.name, self.aux_layers, self.model = draft.name, draft.aux_layers, draft.model

    def attach(self, target: TreeModel, tokenizer: PreTrainedTokenizerBase | None) -> "Probe":
        """Return a probe of the attached draft."""
        return Probe(self.draft.attach(target, tokenizer), self.question)

    def open(self, context: DraftContext) -> "ProbeSession":
        """Open the draft's own session."""
        return ProbeSession(self.draft.open(context), self.question)


class ProbeSession(Clocked):
    """The draft's own session, which is asked the question."""

    def __init__(self, session: DraftSession, question: Question) -> None:
        self.session, self.question = session, question

    def propose(self, policy: Policy, roots: Sequence[int], max_depth: int) -> Forest:
        """Ask; return bare roots."""
        self.question.wanted += 1
        return self.session.propose(self.question, roots, max_depth)

    def read(self, row: int, ids: Sequence[int]) -> Cached | None:
        """Return the draft's cache of a row."""
        return self.session.read(row, ids)

    def commit(self, tokens: Committed, states: States = (), scored: Sequence[Scored] = ()) -> None:
        """Tell the draft and the question the committed tokens."""
        self.session.commit(tokens, states, scored)
        self.question.advance(tokens)
