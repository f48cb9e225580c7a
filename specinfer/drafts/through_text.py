"""A small language model with another tokenizer than the target's as a draft: its text becomes the target's tokens.

Knows: the draft's trees over its own tokens, each row's text as the draft's tokens, which of them are cached.
Does not know: the target, verification, how text is cut (`two_tokenizers`).

The draft grows a tree of its own tokens.  The text of every node is cut into the target's tokens, which are a path of
the target's tree.  Longer text may be cut differently: "t", "h", but "the".  Then both ways are paths.

    draft's tree     P(node), the draft's probability of the node's path
    rest of a node   P(node) less P of its children: the text ends here, or goes on in a way that was not drafted
    target's tree    P(node) is the sum of the rests of the draft's nodes whose text, once cut, leads through it

So equal texts add up, and a token that more text would probably change counts little.  This is string-level exact
match (SLEM: Timor et al., ICML 2025, arXiv 2502.05202, section 3), with trees.

A text has no distribution over the target's tokens.  Policies that ask for one (sampled trees, recordings, contrastive
search) get the draft's, renormalised over the tokens whose text both tables know (token-level intersection, TLI, of the
same paper).  Sampled trees hold that distribution, so multi-step sampling stays exact.

What is committed is read as text: the draft gets the tokens that its own tokenizer cuts the text into.  Where new text
changes the last of them, they are dropped from the cache and fed again.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from math import log
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specinfer.attention import TreeModel
from specinfer.common.tensors import on_device
from specinfer.drafts.language_model import ModelDraft, ModelDraftSession, fed_paths
from specinfer.drafts.rows import log_chances
from specinfer.drafts.two_tokenizers import RowText, Translation
from specinfer.engine.draft import Committed, DraftContext, Scored, States
from specinfer.engine.prefixes import Cached
from specinfer.errors import TokenizerMismatch, UnsupportedModel
from specinfer.tree import Forest, Frontier, Kind, Policy, TokenTree

LEAST = 1e-9  # the rest of a node at least, so that logarithms are finite

ByPath = dict[tuple[int, ...], float]  # by path of the target's tokens below the root


class ThroughTextDraft(ModelDraft):
    """A language model with other tokens than the target's, which proposes text, bound to a decoder.

    Args:
        draft: the model and its tokenizer.
        target: the target's model.
        tokenizer: the target's.

    Raises:
        TokenizerMismatch: no text that both know, or a table that cannot be read as text.
        UnsupportedModel: a model that keeps states, from which no committed token can be taken back.
    """

    def __init__(self, draft: ModelDraft, target: TreeModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.name = TreeModel(draft.model.model), draft.name
        if self.model.stateful:
            problem = f"draft {self.name} has another tokenizer, so it must take back tokens, which it cannot"
            raise UnsupportedModel(f"{problem} ({self.model.stateful}): choose a draft with the target's tokenizer")
        self.tokenizer, self.tokens, self.target_tokenizer = draft.tokenizer, draft.tokens, tokenizer
        sizes = target.vocab_size, self.model.vocab_size
        self.translation = Translation(tokenizer, self.tokenizer, self.name, *sizes)
        shared = f"where tokens are asked for one by one, it proposes the {len(self.translation.shared)} that both know"
        self.notes = [f"draft {self.name}: another tokenizer; its text is cut into the target's tokens; {shared}"]

    def attach(self, target: TreeModel, tokenizer: PreTrainedTokenizerBase | None) -> "ThroughTextDraft":
        """Return a draft bound to another decoder.

        Raises:
            TokenizerMismatch: as the constructor, or the target's tokenizer is None.
        """
        if tokenizer is None:
            problem = f"draft {self.name} has another tokenizer than its target, whose tokenizer is missing"
            raise TokenizerMismatch(f"{problem}: give the decoder the target's tokenizer")
        if tokenizer is not self.target_tokenizer:
            return ThroughTextDraft(self, target, tokenizer)
        draft = copy(self)
        draft.model = TreeModel(self.model.model)
        return draft

    def open(self, context: DraftContext) -> "ThroughTextSession":
        """Start drafting for a batch of rows, with a cache of its own."""
        return ThroughTextSession(self, context)


class ThroughTextSession(ModelDraftSession):
    """A draft that proposes text at work: it is a source over its own tokens, and its trees hold the target's.

    Where the target's tokens are asked for one by one, it is a source over ``shared_ids``, which both tables know.

    Coupled sampling: the noise belongs to the target's tokens, so the draft grows its tree by probability alone, and
    the noise ranks the target's tree.
    """

    per_row = (*ModelDraftSession.per_row, "texts", "cached")
    repeats = False

    def __init__(self, draft: ThroughTextDraft, context: DraftContext) -> None:
        self.translation = draft.translation
        self.texts = [RowText(self.translation, prompt) for prompt in context.prompts]
        texts = [text.ids for text in self.texts]
        super().__init__(draft.model, replace(context, max_capacity=sys.maxsize), texts)  # which may be many tokens
        self.vocab_size = draft.model.vocab_size
        begun = zip(texts, self.session.cache.lengths, strict=True)
        self.cached = [ids[:length] for ids, length in begun]  # tokens in the draft's cache
        shared = self.translation.shared
        self.special = {draft: target for target, draft in shared.items()}
        pairs = sorted((ours, theirs) for theirs, ours in shared.items())
        self.columns, self.shared_ids = on_device(pairs, self.device).T.contiguous()
        self.fed_ids = torch.zeros(context.vocab_size, dtype=torch.long, device=self.device)  # of the target's ids
        self.fed_ids[self.shared_ids] = self.columns

    def propose(self, policy: Policy, roots: Sequence[int], max_depth: int) -> Forest:
        """Grow a tree of the draft's tokens per row, and return their texts as trees of the target's tokens."""
        asks_for_tokens = policy.prescribes or policy.kind is not Kind.RANKED
        self.token_ids = self.shared_ids if asks_for_tokens else None
        grown = super().propose(policy, roots, max_depth)
        if asks_for_tokens:
            return grown
        trees = [self._tree(row, tree, policy.branches) for row, tree in enumerate(grown)]
        return Forest.of(trees).best(policy.max_nodes)

    def commit(self, tokens: Committed, states: States = (), scored: Sequence[Scored] = ()) -> None:
        """Read what each row committed as text; keep what was fed of it, forget what is now cut differently."""
        before = list(self.cached)
        news = [None if new is None else self._read(row, new) for row, new in enumerate(tokens)]
        dropped = [len(was) - len(cached) for was, cached in zip(before, self.cached, strict=True)]
        # a path is fed below the whole cache
        paths = fed_paths(self.fed, [[] if new and less else new for new, less in zip(news, dropped, strict=True)])
        self.session.commit(paths)
        self.session.cache.forget([less for less, new in zip(dropped, news, strict=True) if new is not None])
        for row, (new, path) in enumerate(zip(news, paths, strict=True)):
            kept = len(path or ())
            self.cached[row], self.uncached[row] = self.cached[row] + (new or [])[:kept], (new or [])[kept:]
        self.advance(tokens)
        self.fed = []

    def read(self, row: int, ids: Sequence[int]) -> Cached | None:
        """Return what the cache holds of a row, as tokens of the draft."""
        return super().read(row, [*self.cached[row]])

    def _read(self, row: int, new: Sequence[int]) -> list[int]:
        """Append tokens to a row's text; return its tokens that are not cached, and uncount cached ones that are not.

        The last token is never left in the cache: the draft's distribution after it is asked for.
        """
        self.texts[row].extend(new)
        cached, ids = self.cached[row], self.texts[row].ids
        same = min(len(cached), len(ids) - 1)
        if cached[:same] != ids[:same]:
            same = next(i for i, (was, now) in enumerate(zip(cached, ids, strict=False)) if was != now)
        self.cached[row] = cached[:same]
        return ids[same:]

    def _draft_lengths(self) -> list[int]:
        return [len(cached) + len(uncached) for cached, uncached in zip(self.cached, self.uncached, strict=True)]

    def logits_after(self, frontier: Frontier) -> Tensor:
        """Return logits (B, W, V') after each frontier node: of the draft's tokens, or of the shared ones."""
        if self.token_ids is None:  # nodes hold the draft's tokens
            return super().logits_after(frontier)
        fed = frontier._replace(tokens=self.fed_ids[frontier.tokens.clamp(min=0)])  # -1 at the root
        return super().logits_after(fed)[..., self.columns]

    def note_cached(self, left: int) -> None:
        """Take note of which tokens the cache holds now."""
        rows = zip(self.cached, self.uncached, strict=True)
        self.cached = [cached + new[: len(new) - left] for cached, new in rows]
        super().note_cached(left)

    def _words(self) -> int:
        """Return all: only the target's ids are known of the text."""
        return self.vocab_size

    def noise_of(self, *asked: Any) -> Tensor | None:
        """Return no noise for text: it is not known which of the target's tokens a token of the draft becomes."""
        return None if self.token_ids is None else super().noise_of(*asked)

    def _tree(self, row: int, grown: TokenTree, branches: bool) -> TokenTree:
        """Return a row's tree of the target's tokens, or only its likeliest path where trees must not branch."""
        shares: ByPath = defaultdict(float)
        reached = np.exp(grown.scores)
        rest = reached.copy()
        np.subtract.at(rest, grown.parents[1:], reached[1:])
        for path, share in zip(self._cut(row, grown), rest.clip(LEAST).tolist(), strict=True):
            for end in range(1, len(path) + 1):
                shares[tuple(path[:end])] += share
        scores = self._scores(row, shares)
        root = int(grown.tokens[0])
        return TokenTree.from_paths(root, scores if branches else _likeliest(scores), self.draft)

    def _cut(self, row: int, grown: TokenTree) -> Iterator[list[int]]:
        """Yield, per node, its text as the target's tokens; nothing for text that the target does not know."""
        known, tail = self.translation.draft_texts, self.translation.tail(self.recent[row])
        texts: list[bytes | None] = []  # None at and below special tokens
        for token, parent in zip(grown.tokens.tolist(), grown.parents.tolist(), strict=True):
            before, said = (b"", b"") if parent < 0 else (texts[parent], known.get(token))
            texts.append(before + said if isinstance(before, bytes) and isinstance(said, bytes) else None)
            if (text := texts[-1]) is not None:
                yield self.translation.cut(tail, text) if text else []
            elif before is not None and token in self.special:
                yield [*self.translation.cut(tail, before), self.special[token]]
            else:
                yield []

    def _scores(self, row: int, shares: ByPath) -> ByPath:
        """Return log-probabilities of paths: of the draft's text, or of being chosen under the target's noise."""
        if not self.couplings:
            return {path: min(log(share), 0.0) for path, share in shares.items()}
        coupling, first, vocab_size = self.couplings[row], self.lengths[row] - 1, self.context.vocab_size
        paths = sorted(shares, key=len)
        q = [min(shares[path] / shares.get(path[:-1], 1.0), 1.0) for path in paths]
        noise = [float(coupling.at(first + len(path), vocab_size, self.device)[path[-1]]) for path in paths]
        both = torch.tensor([q, noise], dtype=torch.float32, device="cpu")
        scores: ByPath = {(): 0.0}
        for path, chance in zip(paths, log_chances(*both).tolist(), strict=True):
            scores[path] = scores[path[:-1]] + chance
        del scores[()]
        return scores


def _likeliest(scores: ByPath) -> ByPath:
    """Return one path and its beginnings: the likeliest child of each node."""
    chain: ByPath = {}
    path: tuple[int, ...] = ()
    while children := [longer for longer in scores if longer[:-1] == path]:
        path = max(children, key=lambda child: scores[child])
        chain[path] = scores[path]
    return chain
