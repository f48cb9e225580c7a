"""The suffix draft: earlier successors of the text's longest suffixes.  It has no weights and runs no passes.

Knows: the token ids of each row, a memory of earlier texts if there is one.  Does not know: any model.

Contexts of up to 64 tokens are blended (`text_index`): the longer a match, the surer the draft, and the deeper a policy
grows.  SuffixDecoding (arXiv 2411.04975) and SAM decoding (arXiv 2411.10666) draft from the longest match alone.
The contexts of one match are not independent: each counts for half of one (the square root of its escape).  Then the
probabilities are about the rates at which tokens are accepted.  Where a value breaks a match, `Passages` find the way
back.
"""

from collections.abc import Sequence
from copy import copy
from itertools import takewhile
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specinfer.attention import TreeModel
from specinfer.common.values import checked_count
from specinfer.drafts.lookup.memory import Memory
from specinfer.drafts.lookup.text_index import LENGTHS, LEVEL, MAX_CONTEXT, Passages, TextIndex, successors
from specinfer.drafts.rows import DraftRows
from specinfer.engine.draft import Committed, Draft, DraftContext, Scored, States
from specinfer.errors import InputError
from specinfer.prompts import encode
from specinfer.tree import Frontier, Source

POWER = 0.5  # of every escape
OTHERS = 4  # other rows of a call that a row drafts from, if there is a memory


class LookupDraft(Draft):
    """A draft from texts, which knows the tokens that every text of a chat template holds.

    Attributes:
        lengths: of the n-grams that are indexed, ascending.
        max_context: longest context looked up, in tokens.
        power: of every escape.
        resuming: whether it follows passages.
        memory: of earlier texts; None: the row's own text alone.  `SpeculativeDecoder(memory=...)` sets it.
    """

    lengths: Sequence[int]
    max_context: int
    power = 1.0
    resuming = False
    memory: Memory | None = None
    may_wait = True
    special: frozenset[int] = frozenset()  # ids of special tokens
    template: Sequence[int] = ()  # with which the chat template begins every prompt

    def attach(self, target: TreeModel, tokenizer: PreTrainedTokenizerBase | None) -> Self:
        """Return a copy that knows the tokenizer's special tokens and how its chat template begins.

        The memory, if there is one, is bound to its tokens.

        Raises:
            TokenizerMismatch: the memory holds other tokens.
        """
        if self.memory:
            self.memory.bind(tokenizer, target.vocab_size)
        bound = copy(self)
        bound.special, bound.template = special_ids(tokenizer), template_prefix(tokenizer)
        return bound

    def open(self, context: DraftContext) -> "SuffixSession":
        """Start drafting for a batch of rows."""
        return SuffixSession(context, self)


class SuffixDraft(LookupDraft):
    """Look-up of the longest suffixes of the row's text in that text, and in a memory, as a tree.

    Args:
        max_context: longest context looked up, in tokens; at least 1.

    Attributes:
        memory: of earlier texts; None: the row's own text alone.  `SpeculativeDecoder(memory=...)` sets it.

    Raises:
        InputError: ``max_context`` is below 1.
    """

    name = "suffix"
    power = POWER

    def __init__(self, max_context: int = MAX_CONTEXT) -> None:
        self.max_context = checked_count("max_context", max_context, 1, "looks nothing up")
        self.lengths = [n for n in LENGTHS if n <= self.max_context]
        self.resuming = len(self.lengths) > LEVEL

    def identity(self) -> dict[str, object]:
        """Return the longest context."""
        return {"max_context": self.max_context}

    @property
    def learns(self) -> bool:
        """Whether it has a memory."""
        return self.memory is not None

    def learn(self, texts: Sequence[Sequence[int]], seconds: float) -> None:
        """Remember the texts of a call, prompts included but for the template's beginning, if there is a memory."""
        if self.memory:
            self.memory.learn([text[len(common([text, self.template])) :] for text in texts])


def special_ids(tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Return the ids of a tokenizer's special tokens; none without a tokenizer."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    return frozenset(getattr(tokenizer, "all_special_ids", ())).union(token for token, how in added if how.special)


def template_prefix(tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Return the tokens with which a chat template begins every prompt of one message, whatever the message says.

    They are its own system message, if it has one, and a header.
    """
    if not getattr(tokenizer, "chat_template", None):
        return []
    try:
        return common([encode(text, tokenizer).only for text in ("0", "a")])
    except InputError:  # a template that takes no prompt of one message
        return []


def common(texts: Sequence[Sequence[int]]) -> list[int]:
    """Return the tokens that all texts begin with."""
    return [each[0] for each in takewhile(lambda each: len({*each}) == 1, zip(*texts, strict=False))]


def with_memory(drafts: Sequence[Draft], memory: Memory | None) -> list[Draft]:
    """Return the drafts, with suffix drafts replaced by copies that have the memory.

    Raises:
        InputError: no draft reads it.
    """
    if memory and not any(isinstance(draft, SuffixDraft) for draft in drafts):
        raise InputError('memory= is read by the suffix draft, and it is not among the drafts: add "suffix" to them')
    ready = [copy(draft) if isinstance(draft, SuffixDraft) else draft for draft in drafts]
    for draft in ready:
        if isinstance(draft, SuffixDraft):
            draft.memory = memory
    return ready


class SuffixSession(DraftRows):
    """A counting draft at work: a `Source` of sparse distributions on the CPU."""

    per_row = (*DraftRows.per_row, "texts", "unread", "passages")
    device = torch.device("cpu")

    def __init__(self, context: DraftContext, draft: LookupDraft) -> None:
        super().__init__(context)
        self.max_context, self.power, self.memory = draft.max_context, draft.power, draft.memory
        unsaid = [len(common([prompt, draft.template])) for prompt in context.prompts]
        predicted = context.predicted or [()] * len(unsaid)
        self.texts = [TextIndex(draft.lengths, draft.max_context, draft.special) for _ in unsaid]
        for text, ids, count in zip(self.texts, predicted, unsaid, strict=True):
            text.extend(ids)
            text.begin()
            text.unsaid = len(text.ids) + count
        self.unread = [list(prompt) for prompt in context.prompts]  # tokens that are not in the texts yet
        self.passages = [Passages() for _ in self.texts if draft.resuming]  # per row, or none
        if draft.resuming:
            self._read()
        self.paths: list[list[tuple[int, ...]]] = []  # per row: the path of every frontier node so far, root first

    def indices(self, row: int) -> list[TextIndex]:
        """Return where a row's occurrences are counted: in its text and, with a memory, there and in other rows."""
        text = self.texts[row]
        others = [other for other in self.texts if other is not text]
        return [text, *others[:OTHERS], self.memory.index] if self.memory else [text]

    def known(self, row: int) -> bool:
        """Return whether anything is known to follow a row's text."""
        recent = tuple(self.texts[row].ids[-self.max_context :])
        known = any(index.seen(recent) for index in self.indices(row))
        return known or bool(self.passages and self.passages[row].texts)

    def source(self, roots: Sequence[int]) -> Source | None:
        """Return the session itself; None if nothing is known to follow any row."""
        self._read()
        self.paths = [[] for _ in self.texts]
        return self if any(map(self.known, range(self.batch))) else None

    def commit(self, tokens: Committed, states: States = (), scored: Sequence[Scored] = ()) -> None:
        """Note each row's committed tokens, which are read when a tree is asked for; None retires the row."""
        for row, new in enumerate(tokens):
            if self.passages:
                self.passages[row].extend(new or (), self.texts[row], self.indices(row))
            else:
                self.unread[row] += new or ()
        self.advance(tokens)

    def top(self, frontier: Frontier, k: int) -> tuple[Tensor, Tensor]:
        """Return each node's k likeliest successors and their log-probabilities, both (B, W, at most k)."""
        tokens, q = self._likeliest(frontier, None if self.couplings else k)
        return self.coupled(tokens, q, k, frontier.depth) if self.couplings else (tokens, q.log())

    def draw(self, frontier: Frontier, k: int, replacement: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Draw k children per node from the normalised successor distribution; nodes without successors have none."""
        tokens, q = self._likeliest(frontier, None)
        return self.drawn(self.dense(tokens, q.log()), k, replacement, frontier.depth)

    def _likeliest(self, frontier: Frontier, count: int | None) -> tuple[Tensor, Tensor]:
        """Return each node's likeliest successors, `count` or all, and their probabilities, (B, W, K); 0 = padding."""
        ranked = [
            [sorted(distribution.items(), key=lambda item: (-item[1], item[0]))[:count] for distribution in row]
            for row in self._distributions(frontier)
        ]
        width = max((len(node) for row in ranked for node in row), default=0) or 1
        padded = [[[*node, *[(0, 0.0)] * (width - len(node))] for node in row] for row in ranked]
        table = torch.tensor(padded, dtype=torch.float64, device=self.device).view(self.batch, len(ranked[0]), width, 2)
        return table[..., 0].long(), table[..., 1].float()

    def _read(self) -> None:
        """Put unread tokens into the texts."""
        for text, new in zip(self.texts, self.unread, strict=True):
            text.extend(new)
            new.clear()

    def _distributions(self, frontier: Frontier) -> list[list[dict[int, float]]]:
        """Return every frontier node's successors, and remember the nodes' paths."""
        columns = (frontier.tokens.tolist(), frontier.parents.tolist(), frontier.valid.tolist())
        distributions: list[list[dict[int, float]]] = []
        for row, (paths, tokens, parents, valid) in enumerate(zip(self.paths, *columns, strict=True)):
            pairs = zip(tokens, parents, strict=True)
            new = [() if frontier.depth == 0 else (*paths[parent], token) for token, parent in pairs]
            recent, indices = self.texts[row].ids[-self.max_context :], self.indices(row)
            contexts = [(*recent, *path)[-self.max_context :] for path in new]
            passages = self.passages[row] if self.passages else None
            asked = zip(contexts, valid, strict=True)
            distributions.append([successors(c, indices, self.power, passages) if real else {} for c, real in asked])
            paths.extend(new)
        return distributions
