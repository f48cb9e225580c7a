"""Grammars compiled and followed by llguidance.

Knows: llguidance, what of it can be trusted.  Does not know: rows, trees, options of a call.

    mask       is what counts: consuming also takes tokens that the mask leaves out; but of special tokens, which stand
               for no text, the mask allows some that consuming refuses
    tokens     are tried, in a list: one that is refused alone ends a matcher for good, and so does one outside of V
    the end    is never consumed: after the last token that does nothing, yet rolling it back takes a token back
    limits     a grammar, or a step, that costs too much is an error.  It ends the matcher and its copies, which share a
               lexer: another text, or the same one beside a branch that a draft proposed, goes on with a new one
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import lru_cache, partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from specinfer.common.values import installed
from specinfer.errors import InputError, SamplingError, one_line
from specinfer.grammar.asked import Grammar
from specinfer.grammar.matcher import Mask

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerFast

LIBRARY = "llguidance"
T = TypeVar("T")
KEPT = 256  # compiled grammars
WHITESPACE = r"[\x20\n]{1,20}"  # between tokens of JSON: where it has no end, models write it to the end
LIMITS = {
    "initial_lexer_fuel": 1_000_000,  # 20 ms, about
    "step_lexer_fuel": 200_000,  # 14 ms
    "step_max_items": 50_000,  # 3 ms
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}


class Guidance:
    """Compiles grammars for a tokenizer, and keeps the last `KEPT` of them.

    Args:
        tokenizer: of ``transformers``, a fast one.
        vocab_size: of the target's logits, V.

    Raises:
        InputError: llguidance is not installed, or cannot read the tokenizer.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", vocab_size: int) -> None:
        self._library = installed(LIBRARY, "response_format, grammar, regex and choices need llguidance")
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or tokenizer.eos_token_id is None:
            lacks = "an end of sequence" if backend else "token texts that llguidance reads"
            raise InputError(f"a grammar needs {lacks}, and the tokenizer has none: give a fast one that does")
        from llguidance.hf import from_tokenizer

        try:
            self._tokenizer = from_tokenizer(tokenizer, vocab_size)
        except Exception as error:
            raise InputError(f"llguidance cannot read this tokenizer: {one_line(error)}") from error
        added = sorted(tokenizer.added_tokens_decoder.items(), key=lambda item: -len(item[1].content))
        self._special = {token.content: n for n, token in added if self._tokenizer.is_special_token(n)}
        self.compiled = lru_cache(KEPT)(self._compiled)

    def literal(self, text: str) -> str:
        """Return a text as grammars name it, where tokens that llguidance does not take as text stand by their ids."""
        pieces = re.split(f"({'|'.join(map(re.escape, self._special)) or '(?!)'})", text)
        named = {token: f"<[{number}]>" for token, number in self._special.items()}
        return " ".join(named.get(piece) or json.dumps(piece, ensure_ascii=False) for piece in pieces if piece)

    def _compiled(self, grammar: Grammar) -> "GuidanceMatcher":
        """Return a matcher at the beginning of a grammar: take a copy.

        Raises:
            SamplingError: the grammar has a mistake, or costs too much.
        """
        matchers, limits = self._library.LLMatcher, self._library.LLParserLimits(**LIMITS)
        try:
            if grammar.kind == "json_schema":
                chosen = json.loads(grammar.text).get("x-guidance")
                compact = isinstance(chosen, dict) and chosen.get("whitespace_flexible") is False
                defaults = {} if compact else {"whitespace_pattern": WHITESPACE}
                text = matchers.grammar_from_json_schema(grammar.text, defaults, {"lenient": grammar.lenient})
            else:
                read = matchers.grammar_from_regex if grammar.kind == "regex" else matchers.grammar_from_lark
                text = read(grammar.text)
        except ValueError as error:
            raise SamplingError(f"{grammar.kind}: {one_line(error)}") from error
        make = partial(matchers, self._tokenizer, text, log_level=0, limits=limits)
        made = GuidanceMatcher(make, self._tokenizer, self._special)
        if made._matcher.is_error():
            raise SamplingError(f"this {grammar.kind} cannot be followed: {_reason(made._matcher)}")
        return made


class GuidanceMatcher:
    """A `Matcher` on one of llguidance's.

    Args:
        make: makes one of llguidance's, at the grammar's beginning.
        tokenizer: its tokenizer.
        special: tokens that stand for no text, by how they are spelt.
    """

    library = LIBRARY

    def __init__(self, make: "Callable[[], LLMatcher]", tokenizer: "LLTokenizer", special: Mapping[str, int]) -> None:
        self._make, self._tokenizer, self._special = make, tokenizer, special
        self._begin()

    def follow(self, tokens: Sequence[int]) -> bool:
        """Go to where these tokens lead from the beginning; return False if one of them is refused."""
        wanted = list(tokens)
        return self._answer(lambda: self._follow(wanted))

    def mask(self) -> Mask:
        """Return which tokens may come next, bool (V,)."""
        mask = self._answer(self._mask)
        mask[self._tokenizer.eos_tokens] = False
        return mask

    def forced(self) -> list[int]:
        """Return the tokens that must come next, as many as are known."""
        return self._answer(lambda: self._matcher.compute_ff_tokens())

    def accepting(self) -> bool:
        """Return whether the text may end here."""
        return self._answer(lambda: self._matcher.is_accepting())

    def copy(self) -> "GuidanceMatcher":
        """Return a matcher in the same state."""
        made = copy(self)
        made._matcher, made._tokens = self._matcher.deep_copy(), [*self._tokens]
        return made

    def _follow(self, wanted: list[int]) -> bool:
        """Go to where tokens lead, back from where they differ; return False if one of them is refused."""
        known = self._tokens
        shared = len(known)
        if wanted[:shared] != known:
            pairs = enumerate(zip(known, wanted, strict=False))
            shared = next((i for i, (a, b) in pairs if a != b), len(wanted))
            self._matcher.rollback(len(known) - shared)
            del known[shared:]
        taken = self._matcher.try_consume_tokens(wanted[shared:])
        known += wanted[shared : shared + taken]
        if len(known) < len(wanted):
            self._mask()  # a lexer that has ended refuses everything, and says so when it is asked for a mask
        return len(known) == len(wanted)

    def _mask(self) -> Mask:
        size = self._tokenizer.vocab_size
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, bitorder="little", count=size).view(np.bool_)
        # where a grammar's text spells a special token, the mask allows that token, which is then refused
        spelt = [(text, n) for text, n in self._special.items() if mask[n] and not self._matcher.validate_tokens([n])]
        for _, token in spelt:
            mask[token] = False
        if spelt and not mask.any() and not self._matcher.is_accepting():
            text, token = spelt[0]
            how = f"leave it out, or name the token in a grammar: <[{token}]>"
            raise SamplingError(f"its text spells {text}, which is a special token here and no text: {how}")
        return mask

    def _answer(self, ask: Callable[[], T]) -> T:
        """Return llguidance's answer; where it has met its limits, once more, with a lexer of this text alone.

        Raises:
            SamplingError: this text meets the limits by itself; the reason is llguidance's.
        """
        answer = ask()
        if not self._matcher.is_error():
            return answer
        tokens = self._tokens
        self._begin()
        self._follow(tokens)
        answer = ask()
        if self._matcher.is_error():
            reason = _reason(self._matcher)
            self._begin()
            raise SamplingError(f"the grammar cannot be followed further: {reason}")
        return answer

    def _begin(self) -> None:
        """Go to the beginning, with a matcher that shares nothing."""
        self._matcher = self._make()
        self._tokens: list[int] = []  # that it has consumed


def _reason(matcher: "LLMatcher") -> str:
    """Return why a matcher of llguidance has ended."""
    return one_line(ValueError(matcher.get_error()))
