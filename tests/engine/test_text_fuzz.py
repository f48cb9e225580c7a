"""Every way to get a text gives the same text: random ids, for every kind of tokenizer."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Scripted, following, tiny_llama
from test_detokenize import KINDS
from transformers import TextIteratorStreamer

from specinfer import Chain, Result, SpeculativeDecoder
from specinfer.cli.chat import authored
from specinfer.common.token_bytes import BYTE
from specinfer.common.token_text import plain_text

BEYOND = 4  # ids of the target that no tokenizer knows
BYTE_LEVEL = {"bytes", "bytes that say they clean up"}
PLAIN = BYTE_LEVEL | {"word pieces", "suffixes", "words"}  # here transformers' streamers lose no space after a line


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def tokenizer(kind: str) -> Any:
    return KINDS[kind]()


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    return tiny_llama(vocab=len(tokenizer) + BEYOND)


def random_ids(tokenizer: Any) -> Iterator[list[int]]:
    """Few ids or many, special ones among them, in any order."""
    for seed in range(6):
        chance = random.Random(seed)
        special = [*tokenizer.all_special_ids, len(tokenizer) + 1] if seed % 2 else []
        few = chance.sample(range(len(tokenizer) + BEYOND), chance.choice([3, 6, 20]))
        yield chance.choices([*few, *special], k=chance.randint(4, 18))


def opened(model: Any, tokenizer: Any, ids: list[int], **options: Any) -> tuple[SpeculativeDecoder, dict[str, Any]]:
    """A decoder whose target says these ids, two to four a step, and what to ask it."""
    draft = Scripted(lambda row: ids[len(row) - 1 :])
    decoder = SpeculativeDecoder(model, tokenizer, [draft], Chain(1 + len(ids) % 3))
    force = {"logits_processor": [following(ids, 1)], "temperature": 0}
    return decoder, {"prompt": [0], "max_new_tokens": len(ids), **force, **options}


def test_every_way_gives_the_same_text(kind, model, tokenizer, tmp_path):
    """A stream, a streamer, the chat's pieces, a result, one of many, a file."""
    for ids in random_ids(tokenizer):
        decoder, asked = opened(model, tokenizer, ids, eos_token_id=tokenizer.eos_token_id if len(ids) % 2 else None)
        stream = decoder.stream(**asked)
        pieces, result = list(stream), stream.result
        text = tokenizer.decode(result.token_ids, skip_special_tokens=True)
        assert result.token_ids == ids[: len(result.token_ids)]
        assert (len(result.token_ids) == len(ids)) or result.finish_reason == "eos"
        assert "".join(pieces) == result.text == text
        assert "".join(piece for piece, _ in authored(decoder.open(**asked), tokenizer)) == text
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        assert decoder.generate(**asked, streamer=streamer).text == text
        assert "".join(streamer) == text or kind not in PLAIN
        ((_, one, _),) = decoder.generate_many([asked])
        assert (one.text, one.token_ids) == (text, result.token_ids)
        result.save(tmp_path / "result.json")
        kept = Result.load(tmp_path / "result.json")
        assert (kept.text, kept.to_dict()) == (text, result.to_dict())
        shown = {token: plain_text(tokenizer, token) for token in ids}
        assert {token: plain_text(kept.tokenizer, token) for token in result.token_ids}.items() <= shown.items()


def test_stop_strings_cut_every_text_at_the_same_character(kind, model, tokenizer):
    """Strings from the middle of a text end it: it has them, and what is cut is from the first of them on."""
    cuts = 0
    for ids in random_ids(tokenizer):
        ids = [3, *(token for token in ids if tokenizer.decode([token], skip_special_tokens=True))]
        text = tokenizer.decode(ids).replace("\ufffd", "")
        strings = [text[len(text) // 2 :][:2] or "none"]
        decoder, asked = opened(model, tokenizer, [*ids, *ids], stop_strings=strings, eos_token_id=None)
        stream = decoder.stream(**asked)
        assert "".join(stream) == stream.result.text
        whole, short = stream.result, decoder.generate(**asked, keep_stop_string=False)
        ((_, one, _),) = decoder.generate_many([asked], keep_stop_string=False)
        assert (one.text, one.token_ids) == (short.text, short.token_ids)
        assert short.token_ids == whole.token_ids
        if whole.finish_reason == "stop" and "cleaned" not in kind:
            cuts += 1
            assert whole.text.startswith(short.text)
            assert whole.text[len(short.text) :].startswith(strings[0].lstrip() if not short.text else strings[0])
        elif whole.finish_reason == "length":
            assert short.text == whole.text
    assert cuts >= 2 or "cleaned" in kind


def test_pages_show_the_texts_of_tokens(kind, tokenizer):
    """One after another, tokens of tables of bytes or of SentencePiece are the text; others have their text alone."""
    for token in range(len(tokenizer)):
        piece, shown = tokenizer.convert_ids_to_tokens(token), plain_text(tokenizer, token)
        after = tokenizer.decode([token, token], clean_up_tokenization_spaces=False)
        after = after[len(tokenizer.decode([token], clean_up_tokenization_spaces=False)) :]
        if "\ufffd" not in after and (kind in BYTE_LEVEL or piece[0] in "▁ " or BYTE.fullmatch(piece)):
            assert shown == after
    assert plain_text(tokenizer, len(tokenizer)) == f"#{len(tokenizer)}"
