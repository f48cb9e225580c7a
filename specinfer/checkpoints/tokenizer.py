"""A tokenizer, from the metadata of a file.

Knows: byte-level BPE with the ways to split text that are named below, and SentencePiece's BPE.
Does not know: models, weights.

transformers also converts tokenizers, but its conversion changed between releases, and splits text like GPT-2's
where it does not know the way that a file names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from specinfer.checkpoints.keys import ROLES, Keys

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # types of tokens
SPACE = "▁"  # what stands for a space in SentencePiece


class Way(NamedTuple):
    """How text is split before byte pairs are merged, as `tokenizer.ggml.pre` names it."""

    split: str = ""  # what parts match; else like GPT-2
    digits: bool = False  # each digit is split off before
    composed: bool = False  # characters are composed (NFC)
    whole: bool = False  # parts that are tokens are not merged
    begins: bool = False  # text begins with a token, unless the file says otherwise


_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|"
_LLAMA3 = Way(_WORDS + r"\p{N}{1,3}" + _REST, whole=True, begins=True)
WAYS = {
    "gpt-2": Way(),
    "smollm": Way(digits=True),
    "qwen2": Way(_WORDS + r"\p{N}" + _REST, composed=True),
    "deepseek-r1-qwen": Way(_WORDS + r"\p{N}" + _REST),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "tekken": Way(_CASES + r"\p{N}" + _REST.replace(r"[\r\n]*", r"[\r\n/]*"), whole=True, begins=True),
}


def tokenizer_of(keys: Keys, length: int) -> PreTrainedTokenizerBase:
    """Return a tokenizer.

    Args:
        keys: the metadata of a file.
        length: the longest text that the model takes, in tokens.

    Raises:
        ModelError: an unknown kind of tokenizer or way to split text, or tables that contradict each other.
    """
    from transformers import PreTrainedTokenizerFast

    tokens = keys.all("tokenizer.ggml.tokens", str)
    kinds = keys.all("tokenizer.ggml.token_type", int, [NORMAL] * len(tokens))
    if len(kinds) != len(tokens):
        raise keys.refusal(f"it has {len(tokens)} tokens and {len(kinds)} token types")
    # what fills the table up to the size of the embeddings is no token
    table = {
        token: number
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if not (kind == UNUSED and token == f"[PAD{number}]")
    }
    for option in ("remove_extra_whitespaces", "add_sep_token"):
        if keys.get(f"tokenizer.ggml.{option}", bool, False):
            raise keys.refusal(f"tokenizer.ggml.{option} is true, which is not known", "load the original model")
    begins = False
    if (model := keys.get("tokenizer.ggml.model", str)) == "gpt2":
        backend, begins = _byte_level(keys, table)
    elif model == "llama":
        backend, begins = _pieces(keys, table, tokens, kinds), True
    else:
        raise keys.refusal(f"its tokenizer is {model!r:.40}", "gpt2 and llama work: load the original model")
    named = list(zip(tokens, kinds, strict=True))
    special = [token for token, kind in named if kind in (CONTROL, UNKNOWN)]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False) for token, kind in named if kind == USER_DEFINED])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{role: _token(keys, key, tokens) for role, key in ROLES.items()},
        add_bos_token=keys.get("tokenizer.ggml.add_bos_token", bool, begins),
        add_eos_token=keys.get("tokenizer.ggml.add_eos_token", bool, False),
        chat_template=keys.get("tokenizer.chat_template", str) if "tokenizer.chat_template" in keys else None,
        model_max_length=length,
        clean_up_tokenization_spaces=False,
    )


def _token(keys: Keys, key: str, tokens: Sequence[str]) -> str | None:
    """Return the token whose id a key has, if there is one."""
    if key not in keys:
        return None
    if not 0 <= (number := keys.get(key, int)) < len(tokens):
        raise keys.refusal(f"{key} is {number}, and there are {len(tokens)} tokens")
    return tokens[number]


def _byte_level(keys: Keys, table: dict[str, int]) -> tuple[Tokenizer, bool]:
    """Return BPE on bytes, and whether text begins with a token."""
    name = keys.get("tokenizer.ggml.pre", str, "nothing")
    if name not in WAYS:
        advice = f"these are known: {', '.join(WAYS)}; load the original model otherwise"
        raise keys.refusal(f"its text is split in the way of {name!r:.40}", advice)
    for unused in ("scores", "add_space_prefix"):  # are SentencePiece's
        keys.forget(f"tokenizer.ggml.{unused}")
    way = WAYS[name]
    backend = _merging(keys, table, _pairs(keys), ignore_merges=way.whole)
    if way.composed:
        backend.normalizer = normalizers.NFC()
    digits = [pre_tokenizers.Digits(individual_digits=True)] if way.digits else []
    words = [pre_tokenizers.Split(Regex(way.split), "isolated")] if way.split else []
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not way.split)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*digits, *words, letters])
    backend.decoder = decoders.ByteLevel()
    return backend, way.begins


def _pairs(keys: Keys) -> list[tuple[str, str]]:
    """Return the pairs of tokens that a file merges, in order."""
    merges = [merge.split(" ") for merge in keys.all("tokenizer.ggml.merges", str)]
    if wrong := next((merge for merge in merges if len(merge) != 2), None):
        raise keys.refusal(f"{' '.join(wrong)!r:.60} among its merges is not a pair")
    return [(left, right) for left, right in merges]


def _merging(keys: Keys, table: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    """Return a tokenizer that merges pairs, and has no way yet to split and to join text."""
    try:
        return Tokenizer(BPE(table, merges, **options))
    except Exception as error:  # of no class of its own
        raise keys.refusal(f"its tokens and merges contradict each other ({error})") from error


def _pieces(keys: Keys, table: dict[str, int], tokens: Sequence[str], kinds: Sequence[int]) -> Tokenizer:
    """Return SentencePiece's BPE: spaces are letters, and bytes stand for letters that are no tokens."""
    keys.forget("tokenizer.ggml.pre")
    if "tokenizer.ggml.merges" in keys:
        keys.forget("tokenizer.ggml.scores")
        merges = _pairs(keys)
    else:
        merges = _merges(table, dict(zip(tokens, keys.all("tokenizer.ggml.scores", float), strict=False)))
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    backend = _merging(keys, table, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    prefix = keys.get("tokenizer.ggml.add_space_prefix", bool, True)
    first, strip = ([normalizers.Prepend(SPACE)], [decoders.Strip(" ", 1, 0)]) if prefix else ([], [])
    backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", SPACE)])
    spaces = decoders.Replace(SPACE, " ")
    backend.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _merges(table: dict[str, int], scores: dict[str, float]) -> list[tuple[str, str]]:
    """Return the pairs that make tokens, in the order in which SentencePiece merges them: the best token first."""
    found = [
        (-scores.get(token, 0.0), table[token[:cut]], table[token[cut:]], token[:cut], token[cut:])
        for token in table
        for cut in range(1, len(token))
        if token[:cut] in table and token[cut:] in table
    ]
    return [(left, right) for *_, left, right in sorted(found)]
