"""Drafts with another tokenizer: what they read, what they propose, and that the text is the target's."""

import copy
import random
from functools import cache

import pytest
import torch
from conftest import byte_tokenizer, counted, ends, plain, tiny_llama, word_pieces
from test_draft import context
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import specinfer
from specinfer import BestFirst, Chain, Expansion, ModelDraft, Sampled, SpeculativeDecoder
from specinfer.common.token_bytes import token_texts
from specinfer.drafts.two_tokenizers import KEPT, RowText, Translation
from specinfer.engine.verify import MultiStep
from specinfer.errors import InputError, TokenizerMismatch
from specinfer.evaluation.compare.methods import build_methods
from specinfer.evaluation.traces import record

CORPUS = [
    "the cat sat on the mat and that was that",
    "def add(a, b):\n    return a + b\n",
    "naïve 日本 🌳 text  text",
] * 3
SPECIAL = {"eos_token": "<eos>", "pad_token": "<pad>"}
TEXTS = ["the cat sat", "a  b\n\n   return that", "naïve 日本🌳!", " the mat<eos>the", ""]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@cache
def merged():
    """Byte-level BPE with merges, whose words begin with their space."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


@cache
def pieces(fallback=True, scheme="always", end="<eos>"):
    """SentencePiece's BPE as transformers writes it: a space before every text, bytes for what it does not know."""
    letters = sorted({c for text in CORPUS[:2] for c in text if c not in " \n"})
    words = ["th", "the", "▁the", "▁t", "at", "▁c", "▁cat", "▁▁"]
    vocabulary = ["<unk>", "<s>", end, "<pad>", *(BYTES if fallback else []), "▁", *letters, *words]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "t"), ("a", "t"), ("▁", "c"), ("▁c", "at"), ("▁", "▁")]
    numbers = {piece: i for i, piece in enumerate(vocabulary)}
    backend = Tokenizer(models.BPE(numbers, merges, unk_token="<unk>", byte_fallback=fallback))
    backend.normalizer = normalizers.Replace(" ", "▁")
    if scheme == "normalizer":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), backend.normalizer])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", end, "<pad>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=end, pad_token="<pad>")


KINDS = {"merged": merged, "pieces": pieces}


def translation(target, draft):
    return Translation(target, draft, "other", len(target), len(draft))


def bytes_of(tokenizer, ids):
    """The ids' bytes, special tokens by name."""
    texts = token_texts(tokenizer)
    return b"".join(text if isinstance(text, bytes) else text.encode() for text in map(texts.get, ids))


@cache
def english():
    """A target that writes ASCII."""
    model, texts = tiny_llama(3), token_texts(byte_tokenizer())
    with torch.no_grad():
        model.lm_head.weight[[i for i in range(264) if not texts.get(i, b"\xff").isascii() or i > 255]] = 0
    return model


@cache
def model_for(kind):
    """A draft with its tokenizer: random weights."""
    tokenizer = KINDS[kind]()
    return tiny_llama(5, len(tokenizer) + 3), tokenizer


def draft_for(kind):
    model, tokenizer = model_for(kind)
    return ModelDraft(model, tokenizer, kind)


def renumbered(model):
    """The same model with its ids in reverse order, and a byte-level tokenizer that says so."""
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for table in (draft.model.embed_tokens.weight, draft.lm_head.weight):
            table[:256] = table[:256].flip(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: 255 - i for i, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(False, use_regex=False), decoders.ByteLevel()
    return ModelDraft(draft, PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL), "renumbered")


# ---- texts ----


@pytest.mark.parametrize("make", [byte_tokenizer, merged, pieces, lambda: pieces(scheme="normalizer")])
@pytest.mark.parametrize("text", TEXTS)
def test_tokens_stand_for_the_bytes_of_their_text(make, text):
    """A SentencePiece tokenizer puts spaces before texts."""
    tokenizer = make()
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = bytes_of(tokenizer, ids).decode()
    if make not in (byte_tokenizer, merged):
        found, text = found.replace(" ", ""), text.replace(" ", "")
    assert found == text


@pytest.mark.parametrize("make", [merged, pieces, lambda: pieces(scheme="normalizer"), lambda: pieces(scheme="first")])
@pytest.mark.parametrize("text", TEXTS)
def test_a_targets_tokens_become_the_tokens_that_the_draft_cuts_its_text_into(make, text):
    target, draft = byte_tokenizer(), make()
    row = RowText(translation(target, draft), target.encode(text))
    first = [1] if make is not merged else []
    assert bytes_of(draft, row.ids[len(first) :]).decode() == text or not text
    assert row.ids[: len(first)] == first
    if make is merged and text:
        assert row.ids == draft.encode(text)


def test_chat_marks_are_ids_and_others_are_text():
    target, draft = byte_tokenizer(), merged()
    for tokenizer, marks in ((target, ["<|user|>", "<|tool|>"]), (draft := copy.deepcopy(draft), ["<|user|>"])):
        tokenizer.add_special_tokens({"additional_special_tokens": marks})
    known = translation(target, draft)
    ids = RowText(known, target.encode("<|user|>the<|tool|>")).ids
    assert ids == [draft.convert_tokens_to_ids("<|user|>"), *draft.encode("the<|tool|>")]


def test_ends_of_text_are_shared_by_their_part():
    """Two names of the end of a text; what begins a text, and is not known, says nothing."""
    target, draft = pieces(), merged()
    known = translation(pieces(end="</s>"), draft)
    assert known.shared[pieces(end="</s>").eos_token_id] == draft.eos_token_id
    assert RowText(translation(target, draft), [1]).ids == [0]
    assert RowText(translation(target, draft), [1, target.eos_token_id]).ids == [draft.eos_token_id]


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_is_read_byte_by_byte_and_whole_when_it_is_complete(kind):
    target, draft = byte_tokenizer(), KINDS[kind]()
    row = RowText(translation(target, draft), target.encode("a"))
    whole = target.encode("日")
    for end, byte in enumerate(whole, 1):
        row.extend([byte])
        assert bytes_of(draft, row.ids).endswith("日".encode()[:end])
    assert row.ids == RowText(row.translation, target.encode("a日")).ids


@pytest.mark.parametrize("text", ["the cat sat on the mat " * 40, "日本" * 300, "text\n" * 100])
def test_long_texts_lose_nothing_and_only_their_end_is_cut_again(text):
    target, draft = byte_tokenizer(), merged()
    row = RowText(translation(target, draft), [])
    for token in target.encode(text):
        row.extend([token])
        assert len(row.open) <= 4 * KEPT + 1
    assert bytes_of(draft, row.ids) == text.encode()


# ---- where the target's tokens are asked for one by one ----


class OneByOne:
    """A growth policy that asks for distributions over the target's tokens."""

    prescribes = True

    def __init__(self, policy):
        self.policy = policy

    def __getattr__(self, name):
        return getattr(self.policy, name)


def check_trees(session, draft, texts, trees):
    """Every node's score is a sum of log-probabilities of fresh passes over the text, among shared tokens."""
    known = draft.translation
    columns = sorted(known.shared.values())
    for text, tree in zip(texts, trees, strict=True):
        for node in range(1, len(tree)):
            parent = int(tree.parents[node])
            ids = [*text, *(known.shared[token] for token in tree.path(parent))]
            with torch.no_grad():
                logits = draft.model.model(torch.tensor([ids])).logits[0, -1, columns].log_softmax(-1)
            wanted = logits[columns.index(known.shared[int(tree.tokens[node])])]
            assert float(tree.scores[node] - tree.scores[parent]) == pytest.approx(float(wanted), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", [BestFirst(6, 3), Expansion((2, 1))], ids=str)
def test_distributions_are_those_of_a_fresh_pass_over_the_text_after_many_commits(kind, policy):
    """Ragged rows, accepted paths and other tokens that change how the text is cut, a row retired."""
    rng, target = random.Random(2), byte_tokenizer()
    decoder = SpeculativeDecoder(english(), target, draft_for(kind), Chain(2))
    draft = decoder.drafts[0]
    rows = [target.encode(text) for text in ("the c", "a", "return th")]
    session = draft.open(context(rows))
    cut_again = 0
    for step in range(10):
        trees = session.propose(OneByOne(policy), ends(rows), policy.max_depth)
        assert [int(tree.tokens[0]) for tree in trees] == [row[-1] for row in rows]
        check_trees(session, draft, [RowText(draft.translation, row).ids for row in rows], trees)
        committed = []
        for tree in trees:
            path = tree.path(rng.randrange(len(tree))) if step % 2 else []
            end = 2 * step + rng.choice([1, 2])
            committed.append([*path, *target.encode("that cat 日 sat on the mat"[2 * step : end])])
        if step == 5:
            committed[1] = None
        cached = [list(row) for row, new in zip(session.cached, committed, strict=True) if new is not None]
        session.commit(committed)
        rows = [row + new for row, new in zip(rows, committed, strict=True) if new is not None]
        cut_again += sum(was != now[: len(was)] for was, now in zip(cached, session.cached, strict=True))
        assert session.session.cache.lengths == [len(row) for row in session.cached]
        session.session.cache.check_integrity()
    assert cut_again


def test_all_is_accepted_from_a_draft_that_is_the_target_with_other_ids():
    target, policy = english(), Sampled((1, 1, 1))
    decoder = SpeculativeDecoder(target, byte_tokenizer(), renumbered(target), policy)
    assert "proposes the 258 that both know" in decoder.notes[0]
    result = decoder.generate("the cat", max_new_tokens=20, do_sample=True, seed=1, top_k=20)
    assert result.stats.target_passes == 5


@pytest.mark.parametrize("replacement", [True, False])
def test_sampled_trees_hold_the_distribution_over_shared_tokens(replacement):
    """The temperature is the target's, and nothing is left for tokens that the draft does not know."""
    policy, target = Sampled((2, 2), replacement), byte_tokenizer()
    decoder = SpeculativeDecoder(english(), target, draft_for("pieces"), policy, verifier=MultiStep(replacement))
    draft = decoder.drafts[0]
    shared = draft.translation.shared
    assert len(shared) < 264
    prompt = target.encode("the cat")
    (tree,) = draft.open(context([prompt], do_sample=True, temperature=0.7, top_k=0)).propose(policy, prompt[-1:], 2)
    columns = list(shared.values())
    for (node, _), q in tree.distributions.items():
        ids = [*RowText(draft.translation, prompt).ids, *(shared[token] for token in tree.path(node))]
        with torch.no_grad():
            logits = draft.model.model(torch.tensor([ids])).logits[0, -1, columns] / 0.7
        assert q[list(shared)] == pytest.approx(logits.softmax(-1).numpy(), abs=1e-6)
        assert q.sum() == pytest.approx(1)
    assert len(decoder.generate(prompt, max_new_tokens=12, do_sample=True, seed=5).token_ids) == 12


def test_a_text_longer_than_the_drafts_context_goes_on_without_it():
    """The draft's tokens count, of which there are more than the target's."""
    target, tokenizer = tiny_llama(4, len(merged())), merged()
    draft = ModelDraft(tiny_llama(6, 264, max_position_embeddings=40), byte_tokenizer(), "short")
    prompt = tokenizer.encode("the cat sat on the mat and that")
    result = SpeculativeDecoder(target, tokenizer, draft, BestFirst(4, 2)).generate(prompt, max_new_tokens=30)
    assert result.token_ids == plain(target, prompt, 30)
    assert result.stats.draft_passes
    assert len(result.steps[-1].tree) == 1


def test_a_recording_is_of_the_tokens_that_both_know():
    """It asks node by node: what a fresh pass over the text ranks first among them."""
    decoder = SpeculativeDecoder(english(), byte_tokenizer(), draft_for("merged"), BestFirst(4, 2))
    (text,) = record(decoder, ["the cat"], max_new_tokens=6).texts
    draft = decoder.drafts[0]
    known = draft.translation
    shared = sorted(known.shared)
    for position in range(5):
        ids = RowText(known, [*text.prompt_ids, *text.token_ids[:position]]).ids
        with torch.no_grad():
            logits = draft.model.model(torch.tensor([ids])).logits[0, -1, [known.shared[token] for token in shared]]
        best = logits.log_softmax(-1).topk(4)
        drafted = text.drafted[0]
        assert drafted.tokens[position, 0, :4].tolist() == [shared[index] for index in best.indices.tolist()]
        assert drafted.log_probs[position, 0, :4] == pytest.approx(best.values.numpy(), abs=1e-5)


def test_transformers_universal_assistance_takes_the_same_pair():
    model, tokenizer = model_for("merged")
    decoder = SpeculativeDecoder(english(), byte_tokenizer(), ModelDraft(model, tokenizer, "other"), Chain(2))
    methods, skipped = build_methods(["assisted"], decoder, 4, 2)
    assert not skipped
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    prompt = byte_tokenizer().encode("the cat")
    (found,) = methods["assisted"]([prompt], [0], options)
    assert found["ids"] == plain(english(), prompt, 5)


def test_custom_generate_takes_both_tokenizers():
    """transformers hands on neither of its own arguments for them."""
    target, prompt = english(), byte_tokenizer().encode("the cat")
    given = {"draft_model": draft_for("merged"), "target_tokenizer": byte_tokenizer(), "tree": Chain(2)}
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    output = target.generate(torch.tensor([prompt]), custom_generate=specinfer.custom_generate, **given, **options)
    assert output.sequences[0, len(prompt) :].tolist() == plain(target, prompt, 8)
    assert "that both know" in output.results[0].stats.notes[0]


# ---- attaching, and refusals ----


def test_a_draft_serves_several_decoders():
    """A bound copy goes on to another decoder; the caller's draft stays as it was."""
    draft = draft_for("merged")
    first = SpeculativeDecoder(english(), byte_tokenizer(), draft, Chain(2))
    again = SpeculativeDecoder(english(), first.tokenizer, first.drafts, Chain(2))
    assert again.drafts[0].translation is first.drafts[0].translation
    assert again.drafts[0].model is not first.drafts[0].model
    other = SpeculativeDecoder(tiny_llama(4, len(pieces())), pieces(), first.drafts, Chain(2))
    assert other.drafts[0].translation.texts[1] == "<s>"
    assert not hasattr(draft, "translation")
    with pytest.raises(TokenizerMismatch, match="give the decoder the target's tokenizer"):
        SpeculativeDecoder(english(), None, first.drafts, Chain(2))


def refused(tokenizer, model=None, **options):
    """The error of a draft with this tokenizer, of which no model runs a pass."""
    model = model or tiny_llama(5, max(len(tokenizer), 8))
    with counted(model) as passes, pytest.raises((InputError, TokenizerMismatch)) as caught:
        SpeculativeDecoder(english(), byte_tokenizer(), ModelDraft(model, tokenizer, "other", **options), Chain(2))
    assert not passes
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_other_tokens_are_refused_if_asked_for():
    message = refused(merged(), tokens="same")
    assert "id 256 is" in message
    assert 'tokens="text"' in message
    assert "choose text or same" in refused(merged(), tokens="both")


def test_tables_that_share_no_text_are_refused():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=copy.deepcopy(pieces(False).backend_tokenizer))
    backend = Tokenizer(models.BPE({"日": 0, "本": 1}, []))
    backend.decoder = tokenizer.backend_tokenizer.decoder
    nothing = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)  # special tokens alone are no text
    assert "shares no token's text with the target" in refused(nothing)


def test_tables_that_cannot_be_read_are_refused():
    assert "is neither byte-level nor SentencePiece's" in refused(word_pieces())

    class Slow:
        def get_vocab(self):
            return {"a": 0}

        def __len__(self):
            return 1

    assert "Slow" in refused(Slow())
