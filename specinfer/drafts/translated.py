"""A small language model with another tokenizer than the target's as a draft.

Knows: both token tables, the bytes that tokens stand for, each row's text as the draft's tokens.
Does not know: the target, verification, chat templates.

The draft proposes the tokens whose text both tables know; its distribution is renormalised over them (token-level
intersection, TLI: Timor et al., ICML 2025, arXiv 2502.05202).  Sampled trees hold that distribution, so multi-step
sampling stays exact.  What is committed is read as text: the draft gets the tokens that its own tokenizer cuts the text
into.  Where new text changes the last of them, they are dropped from the cache and fed again.
"""

import codecs
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from specinfer.attention import TreeModel
from specinfer.common.tensors import on_device
from specinfer.common.token_bytes import BYTE, token_texts
from specinfer.drafts.language_model import ModelDraft, ModelDraftSession, fed_paths
from specinfer.engine.draft import DraftContext, Scored
from specinfer.errors import TokenizerMismatch, UnsupportedModel
from specinfer.tree import Frontier

KEPT = 64  # bytes at a text's end, at least, that may still be cut into other tokens


@dataclass(frozen=True)
class Translation:
    """How a target's tokens become a draft's and back.

    Attributes:
        texts: of the target's tokens: bytes, or the name of a special token.
        draft_texts: of the draft's.
        shared: the draft's ids by the target's, of the tokens that both know.
        pieces: the draft's ids of single bytes, by byte.
        encoder: the draft's tokenizer, which adds nothing to a text.
        first: the draft's ids before every text.
        dropped: the target's ids that say nothing to the draft: what begins a text and padding.
    """

    texts: Mapping[int, bytes | str]
    draft_texts: Mapping[int, bytes | str]
    shared: Mapping[int, int]
    pieces: Mapping[int, int]
    encoder: Tokenizer
    first: Sequence[int]
    dropped: frozenset[int]

    @classmethod
    def between(cls, target: Any, draft: Any, name: str, target_size: int, draft_size: int) -> "Translation":
        """Compare two ``transformers`` tokenizers.

        Args:
            target, draft: the tokenizers.
            name: the draft's, for messages.
            target_size, draft_size: the vocabularies of the models.

        Raises:
            TokenizerMismatch: a table that cannot be read as text, or no text that both know.
        """
        texts = _read(target, "the target", target_size)
        theirs = _read(draft, f"draft {name}", draft_size)
        ids, numbers = _by_text(draft, theirs), _by_text(target, texts)
        shared = {numbers[text]: ids[text] for text in numbers.keys() & ids.keys()}
        if not any(isinstance(texts[token], bytes) for token in shared):
            problem = f"draft {name} shares no token's text with the target"
            raise TokenizerMismatch(f"{problem}, so it could propose nothing: choose another draft")
        end, draft_end = target.eos_token_id, draft.eos_token_id
        if end in texts and draft_end in theirs and end not in shared and draft_end not in shared.values():
            shared[end] = draft_end
        dropped = frozenset({target.bos_token_id, target.pad_token_id} - shared.keys() - {None})
        pieces = {text[0]: token for text, token in ids.items() if isinstance(text, bytes) and len(text) == 1}
        first = draft("")["input_ids"][:1]
        first = first if first == [draft.bos_token_id] else []
        return cls(texts, theirs, shared, pieces, bare_encoder(draft), first, dropped)

    def encode(self, text: bytes) -> list[int]:
        """Return the draft's tokens of a text; those of a last character that is not complete are single bytes."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        complete = decoder.decode(text)
        rest, _ = decoder.getstate()
        ids: list[int] = self.encoder.encode(complete, add_special_tokens=False).ids if complete else []
        return ids + [self.pieces[byte] for byte in rest if byte in self.pieces]


class _Text:
    """One row's text as the draft's tokens."""

    def __init__(self, translation: Translation, ids: Iterable[int]) -> None:
        self.translation = translation
        self.settled: list[int] = []  # the draft's ids of what more text does not change
        self.open = b""  # text after it
        self.extend(ids)
        first = list(translation.first)
        if self.settled[: len(first)] != first:
            self.settled = first + self.settled

    @property
    def ids(self) -> list[int]:
        """The draft's ids of the whole text; of a text that says nothing to the draft, one of any kind."""
        return self.settled + self.translation.encode(self.open) or [0]

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens of the target."""
        known = self.translation
        for token in tokens:
            text = known.texts.get(token, b"")  # ids beyond the table say nothing
            if isinstance(text, bytes):
                self.open += text
            elif token in known.shared:
                self._settle(len(self.open))
                self.settled.append(known.shared[token])
            elif token not in known.dropped:
                self.open += text.encode()
        if len(self.open) > 4 * KEPT:
            begun = self.open[:-KEPT]
            word = begun.rfind(b" ")  # words begin with their space
            self._settle(word if word > 0 else len(begun.decode(errors="ignore").encode()))

    def _settle(self, end: int) -> None:
        if end > 0:
            self.settled += self.translation.encode(self.open[:end])
            self.open = self.open[end:]


class TranslatedDraft(ModelDraft):
    """A language model with other tokens than the target's, bound to a decoder.

    Args:
        draft: the model and its tokenizer.
        target: the target's model.
        tokenizer: the target's.

    Raises:
        TokenizerMismatch: no text that both know, or a table that cannot be read as text.
        UnsupportedModel: a model that keeps states, from which no committed token can be taken back.
    """

    def __init__(self, draft: ModelDraft, target: TreeModel, tokenizer: Any) -> None:
        self.model, self.name = TreeModel(draft.model.model), draft.name
        if self.model.stateful:
            problem = f"draft {self.name} has another tokenizer, so it must take back tokens, which it cannot"
            raise UnsupportedModel(f"{problem} ({self.model.stateful}): choose a draft with the target's tokenizer")
        self.tokenizer, self.tokens, self.target_tokenizer = draft.tokenizer, draft.tokens, tokenizer
        sizes = target.vocab_size, self.model.vocab_size
        self.translation = Translation.between(tokenizer, self.tokenizer, self.name, *sizes)
        shared = self.translation.shared
        of_target = f"{len(shared)} of the target's {len(self.translation.texts)} tokens"
        self.notes = [f"draft {self.name}: another tokenizer; it proposes the {of_target} that both know"]

    def attach(self, target: TreeModel, tokenizer: Any) -> "TranslatedDraft":
        """Return a draft bound to another decoder.

        Raises:
            TokenizerMismatch: as the constructor, or the target's tokenizer is None.
        """
        if tokenizer is None:
            problem = f"draft {self.name} has another tokenizer than its target, whose tokenizer is missing"
            raise TokenizerMismatch(f"{problem}: give the decoder the target's tokenizer")
        if tokenizer is not self.target_tokenizer:
            return type(self)(self, target, tokenizer)
        draft = copy(self)
        draft.model = TreeModel(self.model.model)
        return draft

    def open(self, context: DraftContext) -> "TranslatedSession":
        """Start drafting for a batch of rows, with a cache of its own."""
        return TranslatedSession(self.model, context, self.translation)


class TranslatedSession(ModelDraftSession):
    """A translated draft at work: what rows commit is read as text, and fed as the draft's tokens.

    Its candidates are the target's tokens: those in ``token_ids``, which both tables know.
    """

    per_row = (*ModelDraftSession.per_row, "texts", "cached")

    def __init__(self, model: TreeModel, context: DraftContext, translation: Translation) -> None:
        super().__init__(model, replace(context, max_capacity=sys.maxsize))  # a text may be many tokens of the draft
        self.vocab_size = model.vocab_size
        self.texts = [_Text(translation, prompt) for prompt in context.prompts]
        self.cached: list[list[int]] = [[] for _ in self.texts]  # tokens in the draft's cache
        self.uncached = [text.ids for text in self.texts]
        shared = sorted((ours, theirs) for theirs, ours in translation.shared.items())
        self.columns, self.shared_ids = on_device(shared, self.device).T.contiguous()
        self.fed_ids = torch.zeros(context.vocab_size, dtype=torch.long, device=self.device)  # of the target's ids
        self.fed_ids[self.shared_ids] = self.columns
        self.token_ids = self.shared_ids

    def commit(
        self,
        tokens: Sequence[Sequence[int] | None],
        states: Sequence[Tensor | None] = (),
        scored: Sequence[Scored] = (),
    ) -> None:
        """Read what each row committed as text; keep what was fed of it, forget what is now cut in another way."""
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

    def _logits(self, frontier: Frontier) -> Tensor:
        """Return logits (B, W, V') of the shared tokens after each frontier node, whose tokens are the target's.

        Without ``token_ids``, nodes and logits are of the draft's tokens.
        """
        if self.token_ids is None:  # they are the draft's
            return super()._logits(frontier)
        fed = frontier._replace(tokens=self.fed_ids[frontier.tokens.clamp(min=0)])  # -1 at the root
        return super()._logits(fed)[..., self.columns]

    def _feed_uncached(self) -> Tensor:
        whole = [cached + uncached for cached, uncached in zip(self.cached, self.uncached, strict=True)]
        logits = super()._feed_uncached()
        self.cached = whole
        return logits

    def leave_roots(self, inputs: dict[str, list[Tensor]]) -> None:
        """Leave each row's root uncached; the rest is in the cache."""
        self.cached = [cached + new[:-1] for cached, new in zip(self.cached, self.uncached, strict=True)]
        super().leave_roots(inputs)


def _read(tokenizer: Any, whose: str, size: int) -> dict[int, bytes | str]:
    """Return what a tokenizer's tokens stand for, those that a model of this vocabulary knows."""
    texts = token_texts(tokenizer)
    if texts is None:
        problem = f"{whose}'s tokenizer ({type(tokenizer).__name__}) is neither byte-level nor SentencePiece's"
        raise TokenizerMismatch(f"{problem}, so its tokens cannot be translated: choose a draft with the target's")
    return {token: text for token, text in texts.items() if token < size}


def _by_text(tokenizer: Any, texts: Mapping[int, bytes | str]) -> dict[bytes | str, int]:
    """Return token ids by text; of equal texts the first counts, and tokens of single bytes (<0x20>) come last."""
    single = {token for piece, token in tokenizer.get_vocab().items() if BYTE.fullmatch(piece)}
    found: dict[bytes | str, int] = {}
    for token in sorted(texts, key=lambda token: (token in single, token)):
        if texts[token]:
            found.setdefault(texts[token], token)
    return found


def bare_encoder(tokenizer: Any) -> Tokenizer:
    """Return a copy of a tokenizer's backend that adds nothing before a text, cuts nothing off and pads nothing."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    unprefixed = {step: _unprefixed(parts[step]) for step in ("normalizer", "pre_tokenizer")}
    return Tokenizer.from_str(json.dumps({**parts, **unprefixed, "truncation": None, "padding": None}))


def _unprefixed(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a step of a tokenizer, as JSON, that puts no space before a text."""
    if step is None or step["type"] == "Prepend":
        return None
    nothing = {"prepend_scheme": "never", "add_prefix_space": False}
    changed = {name: nothing.get(name, value) for name, value in step.items()}
    for name in changed.keys() & {"normalizers", "pretokenizers"}:
        changed[name] = [kept for part in step[name] if (kept := _unprefixed(part))]
    return changed
