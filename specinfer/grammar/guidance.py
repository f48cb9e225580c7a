"""Grammars compiled and followed by llguidance.

Knows: llguidance, what of it can be trusted.  Does not know: rows, trees, options of a call.

    mask       is what counts: consuming also takes tokens that the mask leaves out
    tokens     are tried, in a list: one that is refused alone ends a matcher for good, and so does one outside of V
    the end    is never consumed: after the last token that does nothing, yet rolling it back takes a token back
    limits     a grammar, or a step, that costs too much is an error
"""

import json
from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from typing import Any

import numpy as np

from specinfer.common.values import installed
from specinfer.errors import InputError, SamplingError, one_line
from specinfer.grammar.asked import Grammar
from specinfer.grammar.matcher import Mask

LIBRARY = "llguidance"
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

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._library = installed(LIBRARY, "response_format, grammar, regex and choices need llguidance")
        backend = copy(getattr(tokenizer, "backend_tokenizer", None))
        if backend is None or tokenizer.eos_token_id is None:
            lacks = "an end of sequence" if backend else "token texts that llguidance reads"
            raise InputError(f"a grammar needs {lacks}, and the tokenizer has none: give a fast one that does")
        backend.no_padding()
        backend.no_truncation()
        try:
            self._tokenizer = self._library.LLTokenizer(
                backend.to_str(), n_vocab=vocab_size, eos_token=tokenizer.eos_token_id
            )
        except Exception as error:
            raise InputError(f"llguidance cannot read this tokenizer: {one_line(error)}") from error
        self.compiled = lru_cache(KEPT)(self._compiled)

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
        matcher = GuidanceMatcher(matchers(self._tokenizer, text, log_level=0, limits=limits), self._tokenizer)
        matcher.check(f"this {grammar.kind} cannot be followed: ")
        return matcher


class GuidanceMatcher:
    """A `Matcher` on one of llguidance's.

    Args:
        matcher: of llguidance.
        tokenizer: its tokenizer.
        tokens: that were consumed.
    """

    library = LIBRARY

    def __init__(self, matcher: Any, tokenizer: Any, tokens: Sequence[int] = ()) -> None:
        self._matcher, self._tokenizer, self._tokens = matcher, tokenizer, list(tokens)

    def follow(self, tokens: Sequence[int]) -> bool:
        """Go to where these tokens lead from the beginning; return False if one of them is refused."""
        known, wanted = self._tokens, list(tokens)
        shared = len(known)
        if wanted[:shared] != known:
            pairs = enumerate(zip(known, wanted, strict=False))
            shared = next((i for i, (a, b) in pairs if a != b), len(wanted))
            self._matcher.rollback(len(known) - shared)
            del known[shared:]
        taken = self._matcher.try_consume_tokens(wanted[shared:])
        self._tokens += wanted[shared : shared + taken]
        self.check()
        return len(self._tokens) == len(wanted)

    def mask(self) -> Mask:
        """Return which tokens may come next, bool (V,)."""
        size = self._tokenizer.vocab_size
        bits = np.zeros((size + 31) // 32, np.uint32)
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self.check()
        mask = np.unpackbits(bits.view(np.uint8), bitorder="little", count=size).view(np.bool_)
        mask[self._tokenizer.eos_tokens] = False
        return mask

    def forced(self) -> list[int]:
        """Return the tokens that must come next, as many as are known."""
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return tokens

    def accepting(self) -> bool:
        """Return whether the text may end here."""
        return bool(self._matcher.is_accepting())

    def copy(self) -> "GuidanceMatcher":
        """Return a matcher in the same state."""
        return GuidanceMatcher(self._matcher.deep_copy(), self._tokenizer, self._tokens)

    def check(self, beginning: str = "the grammar cannot be followed further: ") -> None:
        """Raise `SamplingError` with llguidance's reason if it has none but that."""
        if self._matcher.is_error():
            raise SamplingError(f"{beginning}{one_line(ValueError(self._matcher.get_error()))}")
