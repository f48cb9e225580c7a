"""Text piece by piece: joined pieces are the text, for every kind of tokenizer, and cost what is new."""

import random

import pytest
from conftest import VOCAB, byte_tokenizer, following, tiny_llama
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specinfer import SpeculativeDecoder
from specinfer.engine.detokenize import Pieces

SPECIAL = {"eos_token": "<eos>", "pad_token": "<pad>"}
WORDS = [
    "a",
    "b",
    "it",
    "well",
    "good",
    "日",
    "本",
    "é",
    ".",
    ",",
    "?",
    "!",
    "'",
    "s",
    "n't",
    "'s",
    "'re",
    "''",
    " ",
    "  ",
    "abcdef",  # transformers' StopStringCriteria works only where this is known
]
BYTES = [f"<0x{byte:02X}>" for byte in (0x41, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x8C, 0xB3, 0x0A)]


def made(model, decoder, pre_tokenizer=None, **options):
    backend = Tokenizer(model)
    if decoder is not None:
        backend.decoder = decoder
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.add_special_tokens([AddedToken("<tool>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL, **options)


def numbered(tokens):
    return {token: number for number, token in enumerate(dict.fromkeys(["<unk>", *tokens]))}


def metaspace(**options):
    vocabulary = numbered([*("▁" + word.strip() for word in WORDS), *WORDS, "▁▁", "▁▁▁"])
    model = models.WordLevel(vocabulary, unk_token="<unk>")
    return made(model, decoders.Metaspace(), pre_tokenizers.Metaspace(), **options)


def llama():
    """What sentencepiece models with byte fallback become."""
    vocabulary = numbered([*BYTES, *("▁" + word.strip() for word in WORDS), *WORDS, "▁▁"])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model = models.WordLevel(vocabulary, unk_token="<unk>")
    return made(model, decoders.Sequence(steps), pre_tokenizers.Metaspace())


def word_piece(**options):
    vocabulary = numbered([*(word.strip() for word in WORDS if word.strip()), *("##" + word for word in WORDS[:10])])
    decoder = decoders.WordPiece(cleanup=options.pop("cleanup", True))
    return made(models.WordPiece(vocabulary, unk_token="<unk>"), decoder, pre_tokenizers.Whitespace(), **options)


def unigram():
    """What unigram models with byte fallback become: bytes are joined first, and the spaces follow."""
    vocabulary = numbered([*BYTES, *("▁" + word.strip() for word in WORDS), *WORDS, "▁▁", "\n"])
    model = models.Unigram([(token, -1.0) for token in vocabulary], 0)
    steps = [decoders.ByteFallback(), decoders.Metaspace()]
    return made(model, decoders.Sequence(steps), pre_tokenizers.Metaspace())


def words():
    """Whole words only, and no decoder: a space stands between any two."""
    vocabulary = numbered(word.strip() for word in WORDS if word.strip())
    return made(models.WordLevel(vocabulary, unk_token="<unk>"), None, pre_tokenizers.Whitespace())


def suffixed():
    """A space belongs to the end of a word, but for the last one."""
    vocabulary = numbered([*(word.strip() + "</w>" for word in WORDS), *WORDS])
    model = models.WordLevel(vocabulary, unk_token="<unk>")
    return made(model, decoders.BPEDecoder(), pre_tokenizers.WhitespaceSplit())


def cleaned():
    return word_piece(cleanup=False, clean_up_tokenization_spaces=True)


KINDS = {
    "bytes": byte_tokenizer,
    "bytes that say they clean up": lambda: byte_tokenizer(clean_up_tokenization_spaces=True),
    "metaspace": metaspace,
    "metaspace, cleaned up": lambda: metaspace(clean_up_tokenization_spaces=True),
    "llama": llama,
    "word pieces": word_piece,
    "word pieces, cleaned up": cleaned,
    "suffixes": suffixed,
    "unigram": unigram,
    "words": words,
}


@pytest.fixture(params=KINDS)
def tokenizer(request):
    return KINDS[request.param]()


def pieces_of(tokenizer, ids, sizes):
    """Pieces of a text whose steps emit so many tokens each, and the rest."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    pieces, found, end = Pieces(tokenizer, 2), [], 0
    while end < len(ids):
        end = min(end + next(sizes), len(ids))
        found.append(pieces.more([1, 1, *ids[:end]]))
    done = "".join(found)
    assert text.startswith(done)
    return found, text[len(done) :]


def test_pieces_are_final(tokenizer):
    """What was returned is the beginning of the text, whatever comes later: random ids, in steps of random sizes.

    Some ids are beyond the tokenizer's table: targets whose embedding matrix is padded can choose these.
    """
    for seed in range(150):
        chance = random.Random(seed)
        few = chance.sample(range(len(tokenizer) + 4), min(len(tokenizer), chance.choice([3, 6, 40])))
        ids = chance.choices(few, k=chance.randint(1, 40))
        pieces_of(tokenizer, ids, iter(lambda own=chance: own.choice([1, 1, 2, 5]), None))


def test_pieces_do_not_wait(tokenizer):
    """At the end little is left: a character that is not whole, or words that a clean-up could join."""
    texts = ["well it good", "good good well"]
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        found, rest = pieces_of(tokenizer, ids, iter(lambda: 1, None))
        assert rest == ""
        assert sum(map(bool, found)) >= 2


def test_words_come_at_once_where_nothing_is_cleaned_up():
    for tokenizer in (byte_tokenizer(), byte_tokenizer(clean_up_tokenization_spaces=True), metaspace()):
        ids = tokenizer("a b it 's", add_special_tokens=False)["input_ids"]
        found, _ = pieces_of(tokenizer, ids, iter(lambda: 1, None))
        assert all(found)


def test_a_clean_up_reaches_back():
    """A space is held back until it is known that nothing follows that takes it away."""
    tokenizer = cleaned()
    ids = tokenizer("well good , it 's good ! well", add_special_tokens=False)["input_ids"]
    found, rest = pieces_of(tokenizer, ids, iter(lambda: 1, None))
    assert "".join([*found, rest]) == tokenizer.decode(ids) == "well good, it's good! well"
    assert found[0] == "well"


@pytest.mark.parametrize("silent", ["<tool>", None], ids=["special", "beyond the table"])
def test_tokens_without_text_and_bytes_between_others(silent):
    """Tokens that are left out neither hide a space nor split a run of bytes."""
    tokenizer = llama()
    tokens = ["▁a", silent, "▁b", "<0x41>", silent, "<0xE2>", "▁it", "<0xE2>", silent, "<0x82>", "<0xAC>", "▁well"]
    ids = [len(tokenizer) if token is None else tokenizer.convert_tokens_to_ids(token) for token in tokens]
    found, rest = pieces_of(tokenizer, ids, iter(lambda: 1, None))
    assert "".join(found) == "a b\ufffd\ufffd it€ well"
    assert rest == ""


def test_tokens_without_text_cost_nothing(monkeypatch):
    """A target may say padding for ever: then nothing is decoded."""
    tokenizer, decoded = llama(), []
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **_: decoded.append(ids))
    pieces, ids = Pieces(tokenizer), [len(tokenizer) + 1, tokenizer.eos_token_id] * 50
    assert [pieces.more(ids[:end]) for end in range(1, len(ids) + 1)] == [""] * 100
    assert decoded == []


@pytest.mark.parametrize("kind", KINDS)
def test_work_grows_with_the_text_and_not_with_its_square(kind, monkeypatch):
    """Ids decoded, per id of the text."""
    tokenizer, decoded = KINDS[kind](), []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: decoded.append(len(ids)) or decode(ids, **options))
    ids = random.Random(0).choices(range(len(tokenizer)), k=600)
    pieces = Pieces(tokenizer)
    for end in range(1, len(ids) + 1):
        pieces.more(ids[:end])
    assert sum(decoded) < 12 * len(ids)


def stream_of(tokenizer, ids):
    """A stream of these ids, a token a step."""
    decoder = SpeculativeDecoder(tiny_llama(vocab=max(VOCAB, len(tokenizer) + 1)), tokenizer, (), None)
    force = following(ids, 1)
    return decoder.stream([1], max_new_tokens=len(ids), temperature=0, logits_processor=[force])


def test_a_stream_whose_text_is_cleaned_up_joins_to_the_text():
    tokenizer = cleaned()
    stream = stream_of(tokenizer, tokenizer("well good , it 's ! a b", add_special_tokens=False)["input_ids"])
    assert "".join(stream) == stream.result.text == "well good, it's! a b"


def test_a_stream_whose_bytes_turn_out_to_be_none_joins_to_the_text():
    tokenizer = llama()
    ids = tokenizer.convert_tokens_to_ids(["▁a", "<0x41>", "<tool>", "<0xE2>", "▁b"])
    ids[2] = len(tokenizer)  # has no text
    stream = stream_of(tokenizer, ids)
    assert "".join(stream) == stream.result.text == "a\ufffd\ufffd b"


def test_a_stream_does_not_decode_its_whole_text_at_every_step(monkeypatch):
    tokenizer, decoded = byte_tokenizer(), []
    decode = tokenizer.decode
    stream = stream_of(tokenizer, tokenizer("0123456789" * 12)["input_ids"])
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: decoded.append(len(ids)) or decode(ids, **options))
    assert "".join(stream) == "0123456789" * 12
    assert sum(decoded) < 10 * 120
