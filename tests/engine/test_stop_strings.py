"""Stop strings: they end texts where transformers' criterion does, for every kind of tokenizer, at little cost."""

import random

import pytest
import torch
from conftest import Scripted, byte_tokenizer, following, tiny_llama
from test_detokenize import KINDS, llama, made, metaspace, numbered, suffixed, words
from tokenizers import models, pre_tokenizers
from transformers import StopStringCriteria

from specinfer import Chain, SpeculativeDecoder
from specinfer.engine.stop_strings import StopStrings


def cases(tokenizer, count):
    """Random ids, some beyond the table, and strings cut from their text."""
    for seed in range(count):
        chance = random.Random(seed)
        few = chance.sample(range(len(tokenizer) + 4), chance.choice([3, 6, 12]))
        ids = chance.choices(few, k=chance.randint(1, 16))
        text = tokenizer.decode(ids)
        starts = [chance.randrange(len(text)) for _ in range(chance.randint(1, 3)) if text]
        if starts:
            yield ids, [text[start : start + chance.randint(1, 6)] for start in starts]


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"suffixes"}))
def test_they_end_where_transformers_ends(kind):
    """After every token.  Its criterion writes a space before each piece of a word whose space is at its end."""
    tokenizer, found = KINDS[kind](), set()
    for ids, strings in cases(tokenizer, 80):
        try:
            criterion = StopStringCriteria(tokenizer, strings)
        except ValueError:  # it knows no token that the strings could end in
            continue
        ours = StopStrings(tokenizer, strings)
        wanted = [bool(criterion(torch.tensor([ids[:end]]), None)) for end in range(1, len(ids) + 1)]
        assert [ours.find(ids[:end]) is not None for end in range(1, len(ids) + 1)] == wanted
        found.update(wanted)
    assert found == {True, False}


def three_words():
    """A tokenizer that spells no other word, so that transformers' criterion cannot be made."""
    vocabulary = numbered(["a", "it", "good"])
    return made(models.WordLevel(vocabulary, unk_token="<unk>"), None, pre_tokenizers.Whitespace())


def told(tokenizer, prompt, tokens, strings, **options):
    """The result of a target that says these tokens; None is an id beyond the table."""
    ids = [len(tokenizer) if token is None else tokenizer.convert_tokens_to_ids(token) for token in tokens]
    start = tokenizer.convert_tokens_to_ids(prompt)
    draft = Scripted(lambda row: ids[len(row) - len(start) :])
    decoder = SpeculativeDecoder(tiny_llama(vocab=len(tokenizer) + 1), tokenizer, [draft], Chain(3))
    force = {"logits_processor": [following(ids, len(start))], "temperature": 0}
    return decoder.generate(start, stop_strings=strings, max_new_tokens=len(ids), **force, **options)


@pytest.mark.parametrize(
    ("kind", "prompt", "tokens", "strings", "kept", "cut"),
    [
        (words, ["a"], ["it", "good", "well"], ["good"], "it good", "it "),
        (three_words, ["a"], ["it", "good", "it"], ["good"], "it good", "it "),
        (words, ["a"], ["it", "good", "well"], ["t go"], "it good", "i"),
        (words, ["a"], ["it", "<eos>", "good", "well"], ["a it", "o"], "it", ""),
        (metaspace, ["▁well"], ["▁good", "▁it"], ["well good"], "good", ""),
        (metaspace, ["▁well"], ["▁good", "▁it"], ["d i"], "good it", "goo"),
        (suffixed, ["a</w>"], ["it", "well</w>", "good</w>"], ["itwell"], "itwell", ""),
        (byte_tokenizer, ["a"], [*"xyz", "<eos>", "b"], ["<eos>"], "xyz", "xyz"),
        (byte_tokenizer, ["a"], [*"xyz", "<eos>", "b"], ["yz<eo"], "xyz", "x"),
        (byte_tokenizer, ["a"], ["x", "<eos>", *"yzxyz"], ["xy"], "xyzxy", "xyz"),
        (byte_tokenizer, ["a"], ["x", None, *"yzxyz"], ["xy"], "xyzxy", "xyz"),
        (llama, ["▁a"], ["▁b", "<0xE2>", "<0x82>", "<0xAC>", "▁it"], ["€"], "b€", "b"),
        (llama, ["▁a"], ["▁b", "<0xE2>", "<0x41>", "▁it"], ["A"], "b\ufffd\ufffd", "b\ufffd"),
        (llama, ["▁a"], ["▁b", "<0xE2>", "<0x41>", "▁it"], ["A i"], "b\ufffd\ufffd it", "b\ufffd"),
        (lambda: KINDS["word pieces, cleaned up"](), ["a"], ["well", ",", "good"], [", g"], "well, good", "well"),
        (words, ["a"], ["it", "good"], ["x"], "it good", "it good"),
    ],
)
def test_texts_are_cut_where_the_stop_string_begins(kind, prompt, tokens, strings, kept, cut):
    """Where it really begins: perhaps in the prompt, in the middle of a token, or in a special one; ids stay."""
    whole = told(kind(), prompt, tokens, strings)
    short = told(kind(), prompt, tokens, strings, keep_stop_string=False)
    assert (whole.text, short.text) == (kept, cut)
    assert whole.token_ids == short.token_ids
    assert whole.finish_reason == ("length" if kept == cut == "it good" else "stop")


def test_a_criterion_of_the_caller_comes_first():
    """In transformers, too, it replaces what `stop_strings` asks for."""
    tokenizer = words()
    criterion = StopStringCriteria(tokenizer, ["well"])
    result = told(tokenizer, ["a"], ["it", "good", "well", "b"], ["good"], stopping_criteria=[criterion])
    assert (result.text, result.finish_reason) == ("it good well", "stop")


def test_the_work_depends_on_the_stop_string_and_not_on_prompt_or_vocabulary(monkeypatch):
    """Tokens read: at first those that a string of nine bytes can reach back to, then one a token."""
    tokenizer, read = byte_tokenizer(), []
    convert = tokenizer.convert_ids_to_tokens
    monkeypatch.setattr(tokenizer, "convert_ids_to_tokens", lambda token: read.append(token) or convert(token))
    ids = [*range(32, 127)] * 20
    strings = StopStrings(tokenizer, ["123456798", "x"])
    assert strings.find(ids) is None
    assert len(set(read)) <= 10
    read.clear()
    assert strings.find([*ids, 200]) is None
    assert len(read) <= 2
