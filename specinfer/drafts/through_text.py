"""A small language model with another tokenizer, whose text becomes the target's tokens.

Knows: the draft's trees over its own tokens, their bytes, how the target's tokenizer cuts text.
Does not know: the target, verification, chat templates.

The draft grows a tree of its own tokens.  The text of every node is cut into the target's tokens, which are a path of
the target's tree.  Text that goes on may be cut in another way: "t", "h", but "the".  Then both ways are paths.

    draft's tree     P(node), the draft's probability of the node's path
    rest of a node   P(node) less P of its children: the text ends here, or goes on in a way that was not drafted
    target's tree    P(node) is the sum of the rests of the draft's nodes whose text, once cut, leads through it

So equal texts add up, and a token that more text probably changes counts little.  This is string-level exact match
(SLEM: Timor et al., ICML 2025, arXiv 2502.05202, section 3), with trees.

A text has no distribution over the target's tokens.  Policies that ask for one (sampled trees, recordings, contrastive
search) get the tokens that both tables know (`translated`).
"""

import codecs
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import log
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from specinfer.attention import TreeModel
from specinfer.drafts.language_model import ModelDraft
from specinfer.drafts.rows import log_chances
from specinfer.drafts.translated import TranslatedDraft, TranslatedSession, bare_encoder
from specinfer.engine.draft import DraftContext
from specinfer.tree import Forest, Kind, Policy, TokenTree

TAIL = 8  # committed tokens at a row's end that text is cut together with; a character has 4 at most
LEAST = 1e-9  # the rest of a node at least, so that logarithms are finite

ByPath = dict[tuple[int, ...], float]  # by path of the target's tokens below the root


@dataclass(frozen=True)
class Segmenter:
    """Cuts text that follows committed tokens.

    Attributes:
        encoder: the target's tokenizer, which adds nothing to a text.
        texts: of the target's tokens: bytes, or the name of a special token.
    """

    encoder: Tokenizer
    texts: Mapping[int, bytes | str]

    def tail(self, tokens: Sequence[int]) -> list[int]:
        """Return the last tokens, as many as begin with a character and are all text."""
        tail: list[int] = []
        for token in tokens[-TAIL:]:
            text = self.texts.get(token)
            tail = [*tail, token] if isinstance(text, bytes) else []
        while tail and self._text(tail)[:1] >= b"\x80" and self._text(tail)[:1] < b"\xc0":  # within a character
            del tail[0]
        return tail

    def cut(self, tail: Sequence[int], text: bytes) -> list[int]:
        """Return the tokens of a text without its last character if that is not complete.

        They are those that follow the tail in the text of both.  If it would be cut in another way together, the text
        is cut alone.
        """
        for before in (list(tail), []):
            ids = self._encoded(self._text(before) + text)
            if ids[: len(before)] == before:
                return list(takewhile(lambda token: isinstance(self.texts.get(token), bytes), ids[len(before) :]))
        return []

    def _text(self, tokens: Sequence[int]) -> bytes:
        return b"".join(text for token in tokens if isinstance(text := self.texts[token], bytes))

    def _encoded(self, text: bytes) -> list[int]:
        """Return the tokens of the complete characters; none if it is not UTF-8."""
        try:
            complete = codecs.getincrementaldecoder("utf-8")().decode(text)
        except UnicodeDecodeError:
            return []
        ids: list[int] = self.encoder.encode(complete, add_special_tokens=False).ids
        return ids


class ThroughTextDraft(TranslatedDraft):
    """A language model with other tokens than the target's, which proposes text, bound to a decoder.

    Args:
        draft: the model and its tokenizer.
        target: the target's model.
        tokenizer: the target's.

    Raises:
        TokenizerMismatch: no text that both know, or a table that cannot be read as text.
    """

    def __init__(self, draft: ModelDraft, target: TreeModel, tokenizer: Any) -> None:
        super().__init__(draft, target, tokenizer)
        self.segmenter = Segmenter(bare_encoder(tokenizer), self.translation.texts)
        shared = f"where tokens are asked for one by one, it proposes the {len(self.translation.shared)} that both know"
        self.notes = [f"draft {self.name}: another tokenizer; its text is cut into the target's tokens; {shared}"]

    def open(self, context: DraftContext) -> "ThroughTextSession":
        """Start drafting for a batch of rows, with a cache of its own."""
        return ThroughTextSession(self, context)


class ThroughTextSession(TranslatedSession):
    """A draft that proposes text at work: it is a source over its own tokens, and its trees hold the target's.

    Coupled sampling: the noise belongs to the target's tokens, so the draft grows its tree by probability alone, and
    the noise ranks the target's tree.
    """

    per_row = (*TranslatedSession.per_row, "ends")

    def __init__(self, draft: ThroughTextDraft, context: DraftContext) -> None:
        super().__init__(draft.model, context, draft.translation)
        self.translation, self.segmenter = draft.translation, draft.segmenter
        self.special = {draft: target for target, draft in draft.translation.shared.items()}
        self.ends = [list(prompt[-TAIL:]) for prompt in context.prompts]  # the target's tokens

    def propose(self, policy: Policy, roots: Sequence[int], max_depth: int) -> Forest:
        """Grow a tree of the draft's tokens per row, and return their texts as trees of the target's tokens."""
        asks_for_tokens = policy.prescribes or policy.kind is not Kind.RANKED
        self.token_ids = self.shared_ids if asks_for_tokens else None
        grown = super().propose(policy, roots, max_depth)
        if asks_for_tokens:
            return grown
        trees = [self._tree(row, tree, policy.branches) for row, tree in enumerate(grown)]
        return Forest.of(trees).best(policy.max_nodes)

    def noise_of(self, *asked: Any) -> Tensor | None:
        """Return no noise for text: it is not known which of the target's tokens a token of the draft becomes."""
        return None if self.token_ids is None else super().noise_of(*asked)

    def scored(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        """Return scores (B, W, C); of text after the processors, if rows are sampled."""
        if self.token_ids is not None or not self.couplings:
            return super().scored(logits, noise)
        return self.context.processors.scores(logits.flatten(0, 1), ()).view(*logits.shape)

    def _read(self, row: int, new: Sequence[int]) -> list[int]:
        self.ends[row] = [*self.ends[row], *new][-TAIL:]
        return super()._read(row, new)

    def _tree(self, row: int, grown: TokenTree, branches: bool) -> TokenTree:
        """Return a row's tree of the target's tokens; its likeliest path only where trees must not branch."""
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
        known, tail = self.translation.draft_texts, self.segmenter.tail(self.ends[row])
        texts: list[bytes | None] = []  # None at and below special tokens
        for token, parent in zip(grown.tokens.tolist(), grown.parents.tolist(), strict=True):
            before, said = (b"", b"") if parent < 0 else (texts[parent], known.get(token))
            texts.append(before + said if isinstance(before, bytes) and isinstance(said, bytes) else None)
            if (text := texts[-1]) is not None:
                yield self.segmenter.cut(tail, text) if text else []
            elif before is not None and token in self.special:
                yield [*self.segmenter.cut(tail, before), self.special[token]]
            else:
                yield []

    def _scores(self, row: int, shares: ByPath) -> ByPath:
        """Return log-probabilities of paths: of the draft's text, or of being chosen under the target's noise."""
        if not self.couplings:
            return {path: min(log(share), 0.0) for path, share in shares.items()}
        coupling, first, vocab_size = self.couplings[row], self.lengths[row] - 1, self.context.vocab_size
        paths = sorted(shares, key=len)
        q = torch.tensor(
            [min(shares[path] / shares.get(path[:-1], 1.0), 1.0) for path in paths], dtype=torch.float32, device="cpu"
        )
        noise = [float(coupling.at(first + len(path), vocab_size, self.device)[path[-1]]) for path in paths]
        scores: ByPath = {(): 0.0}
        for path, chance in zip(
            paths, log_chances(q, torch.tensor(noise, dtype=torch.float32, device="cpu")).tolist(), strict=True
        ):
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
