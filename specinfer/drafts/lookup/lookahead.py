"""Lookahead decoding: the target's own guesses about later tokens, in its own passes (arXiv 2402.02057).

Knows: one window of guesses and one pool of n-grams per row; what the target said at the window's nodes.
Does not know: models, attention, verification.

Jacobi decoding guesses the next W tokens, lets one pass score all guesses, and takes what the target would have put in
their stead as the next guesses.  The window holds the last N - 1 of these iterates (section 3.1):

    row j, column i    the guess about position i + j below the root, made j iterates after row 0
    row 0              starts with the root; its columns are one text
    path of a column   row 0 up to the column, then the column's other rows: N - 1 tokens that each chose the next one

So a window is a token tree, and the target scores it in its own pass: every column's path is what the paper's mask lets
the column see.  What the target chooses after each path is the next row.  Then each column holds an n-gram of N tokens
that the target wrote itself, and these fill a pool: token -> the G newest continuations of N - 1 tokens.  The pool's
continuations of the root are drafted beside the window (section 3.2), and exact match accepts nodes of either.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from math import log

import torch
from torch import Tensor

from specinfer.common.tensors import on_device
from specinfer.common.values import checked_count
from specinfer.drafts.ranking import largest
from specinfer.drafts.rows import DraftRows
from specinfer.engine.draft import Committed, Draft, DraftContext, Scored, States
from specinfer.engine.gumbel import DRAFT, key, uniform
from specinfer.errors import PolicyError
from specinfer.tree import BestFirst, Forest, Policy, TokenTree


class LookaheadDraft(Draft):
    """Lookahead decoding (arXiv 2402.02057) inside the target's tree passes; no weights, no passes of its own.

    The target scores the whole window in every step, to learn from it, so every tree has ``nodes`` nodes: that pays
    where a pass over many tokens costs no more than one over a few.  The window has path score 0 and is never cut.
    ``tree="auto"`` would weigh nodes by acceptance and cut it; with this draft it means ``BestFirst`` with enough nodes
    for the window and 31 for other drafts.

    Args:
        window: W, columns.
        ngram: N, tokens of an n-gram; N - 1 rows.
        guesses: G, continuations of a token that are kept, and drafted.

    Raises:
        InputError: a size that is not a whole number, or too small.
    """

    name = "lookahead"
    is_whole = True
    by_text = False

    def __init__(self, window: int = 7, ngram: int = 5, guesses: int = 7) -> None:
        self.window = checked_count("window", window, 1)
        self.ngram = checked_count("ngram", ngram, 2)
        self.guesses = checked_count("guesses", guesses, 1)

    @property
    def nodes(self) -> int:
        """The most nodes of a tree: the window's without the root, and the guesses'."""
        return (self.window + self.guesses) * (self.ngram - 1) - 1

    @property
    def depth(self) -> int:
        """The depth of the window's last column, or of a guess."""
        return max(self.window + self.ngram - 3, self.ngram - 1)

    def suited(self, policy: Policy) -> Policy:
        """Return the policy to decode with: one that never cuts the window.

        Raises:
            PolicyError: this policy would.
        """
        if policy.adapts:
            return BestFirst(self.nodes + policy.max_nodes, max(self.depth, policy.max_depth), 0.05)
        if not policy.takes_whole or policy.max_nodes < self.nodes or policy.max_depth < self.depth:
            sizes = f"{self.window} columns, {self.ngram}-grams and {self.guesses} guesses"
            raise PolicyError(
                f"tree={policy} would cut the window of lookahead ({sizes}), which is scored whole: give "
                f'tree="auto", or BestFirst with at least {self.nodes} nodes and depth {self.depth}, or smaller sizes'
            )
        return policy

    def open(self, context: DraftContext) -> "LookaheadSession":
        """Start drafting for a batch of rows."""
        return LookaheadSession(context, self)


class Window:
    """One row's iterates and its pool.

    Args:
        draft: the sizes.
        prompt: token ids; guesses start as tokens of it, as in the authors' programs.
        key_: of the random numbers that choose them.
    """

    def __init__(self, draft: LookaheadDraft, prompt: Sequence[int], key_: int) -> None:
        self.draft, self.prompt, self.key, self.counter = draft, list(prompt), key_, count()
        self.pool: defaultdict[int, dict[tuple[int, ...], None]] = defaultdict(dict)  # token -> newest last
        self.rows = [self._padded([self.prompt[-1]])]

    def paths(self) -> list[list[int]]:
        """Return the tokens below the root of every column's path."""
        first, *others = self.rows
        return [first[1 : i + 1] + [row[i] for row in others] for i in range(self.draft.window)]

    def guesses(self) -> list[tuple[int, ...]]:
        """Return the pool's continuations of the root, oldest first."""
        return list(self.pool.get(self.rows[0][0], ()))

    def advance(self, chosen: Sequence[int | None], tokens: Sequence[int]) -> None:
        """Take the next iterate, and move to the new root.

        Args:
            chosen: the target's choice after every column's path; None where it was not scored.
            tokens: that the row committed, at least one.
        """
        rows = [*self.rows, [self._random() if token is None else token for token in chosen]]
        moved = len(tokens)
        if len(rows) == self.draft.ngram:
            columns = zip(chosen, *rows, strict=True)
            for token, *ngram in columns:
                if token is not None:
                    self._keep(ngram[0], tuple(ngram[1:]))
            rows, moved = rows[1:], moved - 1  # row 1 becomes row 0, whose columns stand one position earlier
        self.rows = [self._padded(row[moved:]) for row in rows]
        self.rows[0][0] = tokens[-1]

    def _keep(self, token: int, continuation: tuple[int, ...]) -> None:
        """Put a continuation into the pool, and forget the oldest beyond G."""
        kept = self.pool[token]
        kept.pop(continuation, None)
        kept[continuation] = None
        if len(kept) > self.draft.guesses:
            del kept[next(iter(kept))]

    def _padded(self, row: list[int]) -> list[int]:
        return row + [self._random() for _ in range(self.draft.window - len(row))]

    def _random(self) -> int:
        return self.prompt[int(uniform(self.key, next(self.counter)) * len(self.prompt))]


class LookaheadSession(DraftRows):
    """Lookahead at work: it grows no tree by asking for distributions, but proposes windows and guesses whole."""

    per_row = (*DraftRows.per_row, "windows")

    def __init__(self, context: DraftContext, draft: LookaheadDraft) -> None:
        super().__init__(context)
        keys = [key(seed, DRAFT, self.draft, length) for seed, length in zip(self.seeds, self.lengths, strict=True)]
        self.windows = [Window(draft, *row) for row in zip(context.prompts, keys, strict=True)]

    def propose(self, policy: Policy, roots: Sequence[int], max_depth: int) -> Forest:
        """Return each row's window and guesses; bare roots where the target cannot score trees."""
        if not policy.takes_whole:  # a chain: a model was changed after the decoder was made
            return Forest(policy.kind, roots)
        return Forest.of([self._tree(window, max_depth) for window in self.windows])

    def commit(self, tokens: Committed, states: States = (), scored: Sequence[Scored] = ()) -> None:
        """Take the target's choices at the windows' nodes as the next iterate."""
        pairs = zip(scored, self.windows, strict=True)
        ends = [[_end(view.tree, path) for path in window.paths()] for view, window in pairs]
        for window, chosen, new in zip(self.windows, self._choices(scored, ends), tokens, strict=True):
            if new is not None:
                window.advance(chosen, new)
        self.advance(tokens)

    def _tree(self, window: Window, max_depth: int) -> TokenTree:
        """Return a row's tree: the window with score 0, the guesses by how many of them share a path."""
        share: defaultdict[tuple[int, ...], float] = defaultdict(float)
        guesses = window.guesses()
        for guess in guesses:
            for end in range(1, min(len(guess), max_depth) + 1):
                share[guess[:end]] += 1 / (len(guesses) + 1)
        for path in window.paths():
            share.update((tuple(path[:end]), 1.0) for end in range(1, min(len(path), max_depth) + 1))
        scores = {path: log(worth) for path, worth in share.items()}
        return TokenTree.from_paths(window.rows[0][0], scores, self.draft)

    def _choices(self, scored: Sequence[Scored], ends: Sequence[Sequence[int | None]]) -> list[list[int | None]]:
        """Return the target's choices after some nodes of each row, with one transfer; None where there is no node."""
        found = [[node for node in nodes if node is not None] for nodes in ends]
        rows = enumerate(zip(scored, found, strict=True))
        scores = [self._scores(row, view, nodes) for row, (view, nodes) in rows if nodes]
        chosen = iter(largest(torch.cat(scores).float(), 1)[0][:, 0].tolist() if scores else ())
        return [[None if node is None else next(chosen) for node in nodes] for nodes in ends]

    def _scores(self, row: int, view: Scored, nodes: list[int]) -> Tensor:
        """Return the scores (n, V) whose maxima are the target's choices after nodes: with its noise, if there is."""
        scores = self.context.processors.scores(view.logits[on_device(nodes, view.logits.device)], ())
        if not self.couplings:
            return scores
        positions = (self.lengths[row] + view.tree.depths[nodes]).tolist()
        coupling, vocab_size = self.couplings[row], scores.shape[1]
        return scores + torch.stack([coupling.at(at, vocab_size, scores.device) for at in positions])


def _end(tree: TokenTree, path: Sequence[int]) -> int | None:
    """Return the node at the end of a path below the root; None if the tree lacks it."""
    nodes = tree.along(path)
    return nodes[-1] if len(nodes) > len(path) else None
