"""Token recycling: the target's earlier predictions after a token propose its successors (arXiv 2408.08696).

Knows: the target's logits at the nodes of every step, rejected ones included.  Does not know: models, verification.

Every pass scores many nodes, and most are rejected.  Their logits are not thrown away: the likeliest tokens at a node
go into a table, under the node's token and under the pair of that and the token before it.  A tree is grown from the
table, level by level, without any pass.  The paper keeps ids alone and fills a tree of fixed shape; here the
probabilities are kept as well, so that any policy can grow the tree.
"""

from collections import OrderedDict
from collections.abc import Sequence
from math import inf

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specinfer.attention import TreeModel
from specinfer.common.lock import Lock
from specinfer.drafts.ranking import largest
from specinfer.drafts.rows import DraftRows
from specinfer.engine.draft import Committed, Draft, DraftContext, Scored, States
from specinfer.tree import Frontier, Source, TokenTree

KEPT = 8  # tokens of an entry
ENTRIES = 1 << 16  # of a table: 16 MB at most
NEW = 0.5  # weight of the target's present distribution against its earlier ones
PAIR, ALONE = 0.8, 0.6  # weights of what follows a pair, the rest is the single token's; and of that without a pair

Key = tuple[int, int]  # the last two tokens; (-1, b) is for b after any token


class RecyclingTable:
    """The target's likeliest tokens after pairs of tokens and after single ones, with their probabilities.

    When it is full, the oldest entries are overwritten.  Several threads may use it.

    Args:
        entries: how many it holds.
    """

    def __init__(self, entries: int = ENTRIES) -> None:
        self.lock = Lock()
        self.slots: OrderedDict[Key, int] = OrderedDict()  # from 1 on: slot 0 stays empty and answers for unknown keys
        self.tokens = np.zeros((entries + 1, KEPT), np.int64)
        self.probs = np.zeros((entries + 1, KEPT), np.float32)

    def learn(self, pairs: Sequence[Key], tokens: np.ndarray, probs: np.ndarray) -> None:
        """Take note of the successors of pairs of tokens (a, b); of equal keys the last one counts.

        Args:
            pairs: N of them.
            tokens, probs: (N, K), K at most KEPT; and their probabilities.
        """
        new = {key: index for index, pair in enumerate(pairs) for key in (pair, (-1, pair[1]))}
        rows = list(new.values())
        tokens, probs = (np.pad(part[rows], ((0, 0), (0, KEPT - part.shape[1]))) for part in (tokens, probs))
        with self.lock:
            old = np.array([self.slots.get(key, 0) for key in new])
            weights = np.where(old > 0, NEW, 1.0)[:, None]
            mixed = _mixed(tokens, weights * probs, self.tokens[old], (1 - weights) * self.probs[old])
            slots = [self._slot(key) for key in new]
            self.tokens[slots], self.probs[slots] = (part[:, :KEPT] for part in mixed)

    def successors(self, pairs: Sequence[Key]) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens after N pairs and their probabilities, (N, 2 KEPT), descending; 0 where there are none."""
        with self.lock:
            after_pair = np.array([self.slots.get(pair, 0) for pair in pairs])
            after_token = np.array([self.slots.get((-1, token), 0) for _, token in pairs])
            weights = np.where(after_pair > 0, 1 - PAIR, ALONE)[:, None]
            both = [(self.tokens[slots], self.probs[slots]) for slots in (after_pair, after_token)]
        return _mixed(both[0][0], PAIR * both[0][1], both[1][0], weights * both[1][1])

    def _slot(self, key: Key) -> int:
        """Return the slot of a key; if all are taken, a new one takes that of the oldest."""
        if key not in self.slots:
            is_full = len(self.slots) == len(self.tokens) - 1
            self.slots[key] = self.slots.popitem(last=False)[1] if is_full else len(self.slots) + 1
        return self.slots[key]


def _mixed(
    tokens: np.ndarray, probs: np.ndarray, others: np.ndarray, other_probs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum of two sparse distributions in each of N rows, (N, K) each; (N, 2 K), descending, then by token.

    Tokens of probability 0 stand for nothing.
    """
    same = (tokens[:, :, None] == others[:, None]) & (probs > 0)[:, :, None]
    probs = probs + (same * other_probs[:, None]).sum(2)
    tokens = np.concatenate((tokens, others), 1)
    probs = np.concatenate((probs, np.where(same.any(1), 0.0, other_probs)), 1)
    order = np.lexsort((tokens, -probs))
    return np.take_along_axis(tokens, order, 1), np.take_along_axis(probs, order, 1)


class RecyclingDraft(Draft):
    """Token recycling (arXiv 2408.08696, section 3), with the probabilities kept.  No weights, no passes.

    The target's distribution at any node goes into a table, rejected nodes included: its 8 likeliest tokens, before
    processors, mixed in equal parts with the earlier entry.  Children of a node are what followed its last two tokens,
    blended with what followed its last one.

    A decoder has a table of its own, of 16 MB at most, and keeps it: what one call teaches, the drafts of the next one
    use.  This also holds for several users of one decoder.  It changes trees and passes, never a text.
    """

    name = "recycling"
    by_text = False

    def __init__(self) -> None:
        self.table = RecyclingTable()

    def attach(self, target: TreeModel, tokenizer: PreTrainedTokenizerBase | None) -> "RecyclingDraft":
        """Return a draft with an empty table, for one decoder."""
        return RecyclingDraft()

    def open(self, context: DraftContext) -> "RecyclingSession":
        """Start drafting for a batch of rows."""
        return RecyclingSession(context, self.table)


class RecyclingSession(DraftRows):
    """Token recycling at work: a `Source` of sparse distributions on the CPU."""

    per_row = (*DraftRows.per_row, "ends")
    device = torch.device("cpu")

    def __init__(self, context: DraftContext, table: RecyclingTable) -> None:
        super().__init__(context)
        self.table = table
        self.ends = [_end((-1, -1, *prompt)) for prompt in context.prompts]  # per row, its last two tokens
        self.pairs: list[list[Key]] = []  # per row, of every frontier node so far

    def source(self, roots: Sequence[int]) -> Source:
        """Return the session itself; nothing is asked yet."""
        self.pairs = [[] for _ in self.ends]
        return self

    def commit(self, tokens: Committed, states: States = (), scored: Sequence[Scored] = ()) -> None:
        """Put the target's predictions at all nodes of all rows into the table."""
        found = [largest(view.logits[: len(view.tree)].float(), KEPT) for view in scored]
        if found:
            each = [torch.stack([ids.float(), values - total]) for ids, values, total in found]
            columns = torch.cat(each, 1).cpu().numpy()  # one wait
            pairs = [pair for view, end in zip(scored, self.ends, strict=True) for pair in _pairs(view.tree, end)]
            self.table.learn(pairs, columns[0].astype(np.int64), np.exp(columns[1]))
        self.ends = [_end((*end, *(new or ()))) for end, new in zip(self.ends, tokens, strict=True)]
        self.advance(tokens)

    def top(self, frontier: Frontier, k: int) -> tuple[Tensor, Tensor]:
        """Return each node's k likeliest successors and their log-probabilities, both (B, W, at most k)."""
        tokens, log_probs = self._successors(frontier)
        if not self.couplings:
            return tokens[..., :k], log_probs[..., :k]
        mass = log_probs.logsumexp(-1, keepdim=True)  # processors change shares, not what is known in all
        q = (self.processed(log_probs).log_softmax(-1) + mass).exp().masked_fill_(log_probs == -inf, 0)
        return self.coupled(tokens, q, k, frontier.depth)

    def draw(self, frontier: Frontier, k: int, replacement: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Draw k children per node from the table's distribution, normalised; unknown nodes have none."""
        tokens, log_probs = self._successors(frontier)
        return self.drawn(self.dense(tokens, self.processed(log_probs)), k, replacement, frontier.depth)

    def processed(self, log_probs: Tensor) -> Tensor:
        """Return log-probabilities (B, W, K) after the target's processors, up to a constant.

        After an unknown node all are -inf, which is no distribution: processors see a uniform one instead.
        """
        absent = log_probs == -inf
        seen = log_probs.masked_fill(absent.all(-1, keepdim=True), 0.0)
        return super().processed(seen).masked_fill(absent, -inf)

    def _successors(self, frontier: Frontier) -> tuple[Tensor, Tensor]:
        """Return the table's entries after every frontier node, (B, W, 2 KEPT), and remember the nodes' tokens."""
        rows = zip(self.ends, self.pairs, frontier.tokens.tolist(), frontier.parents.tolist(), strict=True)
        asked: list[Key] = []
        for end, pairs, tokens, parents in rows:
            new = [(pairs[p][1], token) for token, p in zip(tokens, parents, strict=True)] if frontier.depth else [end]
            pairs += new
            asked += new
        shape = *frontier.tokens.shape, 2 * KEPT
        ids, probs = (torch.from_numpy(column).view(shape) for column in self.table.successors(asked))
        return ids, probs.log().float()


def _end(tokens: Sequence[int]) -> Key:
    """Return the last two tokens."""
    return tokens[-2], tokens[-1]


def _pairs(tree: TokenTree, end: Key) -> list[Key]:
    """Return each node's last two tokens; the root's are the text's."""
    tokens = tree.tokens.tolist()
    above = (tokens[parent] for parent in tree.parents.tolist()[1:])
    return [end, *zip(above, tokens[1:], strict=True)]
