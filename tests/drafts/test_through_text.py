"""Drafts that propose text: how it is cut into the target's tokens, what nodes are worth, and what the ids are."""

from math import exp, log

import pytest
import torch
from conftest import byte_tokenizer, ends, plain, tiny_llama
from test_draft import context
from test_two_tokenizers import KINDS, TEXTS, bytes_of, draft_for, english, merged, pieces, renumbered

from specinfer import Auto, BestFirst, Chain, Expansion, ModelDraft, Sampled, SpeculativeDecoder
from specinfer.drafts.two_tokenizers import TAIL, Translation
from specinfer.engine.gumbel import Coupling
from specinfer.tree import TokenTree

TARGETS = {"bytes": byte_tokenizer, "merged": merged, "pieces": pieces}


def segmenter(tokenizer):
    """How this target's tokenizer cuts text."""
    return Translation(tokenizer, tokenizer, "itself", len(tokenizer), len(tokenizer))


def pair(target, draft, tree, **options):
    """A decoder whose draft, with another tokenizer, proposes text."""
    tokenizer = TARGETS[target]()
    model = english() if target == "bytes" else tiny_llama(4, len(tokenizer) + 2)
    drafts = [name if name == "ngram" else text_draft(name) for name in draft.split("+")]
    return SpeculativeDecoder(model, tokenizer, drafts, tree, **options)


def text_draft(kind):
    if kind in KINDS:
        return draft_for(kind)
    tokenizer = byte_tokenizer()
    return ModelDraft(tiny_llama(5, len(tokenizer)), tokenizer, kind)


def session_of(decoder, prompts, **options):
    return decoder.drafts[0].open(context(prompts, decoder.target.vocab_size, **options))


# ---- text becomes tokens ----


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("text", TEXTS)
def test_a_texts_tokens_go_on_with_its_next_ones(target, text):
    """Wherever the committed tokens end, the rest is cut as the tokenizer cuts the whole."""
    tokenizer = TARGETS[target]()
    cutter = segmenter(tokenizer)
    ids = cutter.target_encoder.encode(text, add_special_tokens=False).ids
    ids = ids[: next((i for i, token in enumerate(ids) if not isinstance(cutter.texts[token], bytes)), len(ids))]
    for end in range(len(ids) + 1):
        tail = cutter.tail(ids[:end])
        assert ids[:end][len(ids[:end]) - len(tail) :] == tail
        assert cutter.cut(tail, bytes_of(tokenizer, ids[end:])) == ids[end:]


def test_text_in_the_middle_of_a_word_is_cut_alone():
    """The prompt ends with "th", which the tokenizer would have made one token with what follows."""
    tokenizer = merged()
    before = tokenizer.encode("t")
    assert tokenizer.encode("the") != before + tokenizer.encode("he")
    assert segmenter(tokenizer).cut(before, b"he") == tokenizer.encode("he")


@pytest.mark.parametrize("target", TARGETS)
def test_characters_that_are_not_complete_wait(target):
    tokenizer = TARGETS[target]()
    cutter, text = segmenter(tokenizer), "a🌳".encode()
    for end in range(2, len(text)):
        assert cutter.cut([], text[:end]) == cutter.cut([], b"a")
    assert bytes_of(tokenizer, cutter.cut([], text)) == text


def test_a_character_that_was_begun_is_completed_or_nothing_is_said():
    cutter, whole, a = segmenter(byte_tokenizer()), byte_tokenizer().encode("日"), byte_tokenizer().encode("a")
    tail = cutter.tail([*byte_tokenizer().encode("x" * TAIL), *whole[:2]])
    assert tail[-2:] == whole[:2]
    assert cutter.cut(tail, "日".encode()[2:] + b"a") == [whole[2], *a]
    assert cutter.cut(tail, b"a") == a  # not UTF-8 together: cut alone
    assert cutter.cut([], b"\x97") == []


def test_the_tail_begins_with_a_character_and_after_special_tokens():
    tokenizer, cutter = byte_tokenizer(), segmenter(byte_tokenizer())
    ids, a = tokenizer.encode("日本語"), tokenizer.encode("a")
    assert cutter.tail(ids) == ids[3:]  # of 8 tokens, two would be the end of a character
    assert cutter.tail([*ids, tokenizer.eos_token_id, *a]) == a
    assert cutter.tail([*a, 10**6]) == []  # an id beyond the table


# ---- what nodes are worth ----


def grown(probabilities, tokenizer=None):
    """A draft's tree: path probabilities by text, whose tokens are given apart by |, and by bytes otherwise."""
    tokenizer = tokenizer or byte_tokenizer()
    ids = {text: tuple(i for part in text.split("|") for i in tokenizer.encode(part)) for text in probabilities}
    return TokenTree.from_paths(0, {ids[text]: log(p) for text, p in probabilities.items()}, 0)


def tree_of(target, draft, nodes):
    """The target's tree after a space."""
    decoder = pair(target, draft, BestFirst(8, 4))
    return session_of(decoder, [decoder.tokenizer.encode("a ")])._tree(0, nodes, True)


def by_text(tokenizer, tree):
    """Path probabilities by text."""
    return {tokenizer.decode(tree.path(node)): exp(tree.scores[node]) for node in range(1, len(tree))}


def test_a_nodes_probability_is_that_of_the_texts_that_lead_through_it():
    """The target has "the", but no "th": until the text goes on, "t" and "h" are two tokens, and then only before o."""
    nodes = grown({"t": 0.8, "th": 0.7, "the": 0.4, "theb": 0.1, "tho": 0.2, "x": 0.1})
    tree = tree_of("merged", "bytes", nodes)
    assert sorted(map(merged().convert_ids_to_tokens, tree.paths())) == [["t", "h", "o"], ["the", "b"], ["x"]]
    wanted = {"t": 0.1 + 0.1 + 0.2, "th": 0.1 + 0.2, "tho": 0.2, "the": 0.4, "theb": 0.1, "x": 0.1}
    assert by_text(merged(), tree) == pytest.approx(wanted)


def test_equal_texts_add_up():
    """The draft can say "at" in two ways, which are one path of the target."""
    tree = tree_of("bytes", "merged", grown({"a": 0.5, "a|t": 0.4, "at": 0.25}, merged()))
    assert tree.paths() == [byte_tokenizer().encode("at")]
    assert by_text(byte_tokenizer(), tree) == pytest.approx({"a": 0.1 + 0.4 + 0.25, "at": 0.4 + 0.25})


def test_the_ends_of_texts_are_the_targets_and_nothing_follows_them():
    tree = tree_of("merged", "bytes", grown({"a": 0.5, "a|<eos>": 0.4, "a|<eos>|b": 0.3}))
    assert tree.paths() == [[*merged().encode("a"), merged().eos_token_id]]
    assert exp(tree.scores[-1]) == pytest.approx(0.1)


@pytest.mark.parametrize("strange", [1, 10**6], ids=["a special token of the draft alone", "an id beyond its table"])
def test_what_the_target_does_not_know_ends_a_path(strange):
    (a,) = pieces().convert_tokens_to_ids(["a"])
    nodes = TokenTree.from_paths(0, {(a,): -1.0, (a, strange): -2.0, (a, strange, a): -3.0}, 0)
    assert tree_of("merged", "pieces", nodes).paths() == [merged().encode("a")]


def test_in_coupled_sampling_the_targets_noise_ranks_the_tree():
    """A child's log-probability is that of being chosen: -(1 - q) / q exp(-g), with the noise of its position."""
    decoder, nodes = pair("merged", "bytes", BestFirst(8, 4)), grown({"t": 0.5, "tx": 0.3, "x": 0.2})
    prompt, size = merged().encode("a "), decoder.target.vocab_size
    greedy, coupled = (session_of(decoder, [prompt], coupled=noisy)._tree(0, nodes, True) for noisy in (False, True))
    assert sorted(map(tuple, greedy.paths())) == sorted(map(tuple, coupled.paths()))
    for node in range(1, len(coupled)):
        path = coupled.path(node)
        (same,) = (other for other in range(len(greedy)) if greedy.path(other) == path)
        noise = float(Coupling(9).at(len(prompt) + len(path) - 1, size, torch.device("cpu"))[path[-1]])
        q, edge = greedy.probability(same), float(coupled.scores[node] - coupled.scores[coupled.parents[node]])
        assert edge == pytest.approx(-(1 - q) / q * exp(-noise), rel=1e-4)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("policy", [BestFirst(6, 4), Expansion((2, 2)), Chain(3)], ids=str)
def test_trees_hold_the_targets_tokens_within_the_budget(target, policy):
    decoder = pair(target, "pieces" if target == "merged" else "merged", policy)
    tokenizer = decoder.tokenizer
    rows = [tokenizer.encode(text, add_special_tokens=False) for text in ("the c", "日本", "a")]
    trees = session_of(decoder, rows).propose(policy, ends(rows), 8)
    assert [int(tree.tokens[0]) for tree in trees] == [row[-1] for row in rows]
    assert any(tree.num_drafted for tree in trees)
    for tree in trees:
        assert tree.num_drafted <= policy.max_nodes
        assert set(tree.tokens[1:].tolist()) <= decoder.drafts[0].translation.texts.keys()
        assert not isinstance(policy, Chain) or tree.depth == tree.num_drafted  # a chain does not branch


# ---- decoding ----

OPTIONS = {"greedy": {"do_sample": False}, "coupled": {"do_sample": True, "temperature": 0.8, "seed": [3, 4, 5]}}


MODELS = [
    ("bytes merged", BestFirst(6, 4)),
    ("bytes pieces+ngram", Auto),
    ("merged bytes", Auto),
    ("merged bytes+pieces", BestFirst(6, 4)),
    ("pieces merged", Expansion((2, 1))),
    ("merged pieces", Chain(3)),
]


@pytest.mark.parametrize(("models", "tree"), MODELS, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_ids_equal_those_without_speculation(options, models, tree):
    prompts = ["the cat", "日本", "a  b\n\n   return th"]
    decoder = pair(*models.split(), tree() if tree is Auto else tree)  # what it learns is of one decoder
    without = SpeculativeDecoder(decoder.target.model, decoder.tokenizer, (), None)
    wanted = without.generate(prompts, max_new_tokens=8, **options)
    found = decoder.generate(prompts, max_new_tokens=8, **options)
    assert [row.token_ids for row in found] == [row.token_ids for row in wanted]
    assert found[0].stats.draft_passes
    one = {**options, "seed": 4} if "seed" in options else options
    assert decoder.generate(prompts[1], max_new_tokens=8, **one).token_ids == wanted[1].token_ids


@pytest.mark.parametrize("policy", [Chain(4), BestFirst(4, 4), Auto(4, 4)], ids=str)
def test_a_draft_that_is_the_target_with_other_ids_is_accepted(policy):
    target = english()
    result = SpeculativeDecoder(target, byte_tokenizer(), renumbered(target), policy).generate(
        "the cat", max_new_tokens=20
    )
    assert result.token_ids == plain(target, byte_tokenizer().encode("the cat"), 20)
    if isinstance(policy, Chain):
        assert result.stats.target_passes == 4
    assert result.stats.target_passes < 20


def test_streams_of_one_decoder_do_not_disturb_each_other():
    decoder = pair("merged", "bytes", BestFirst(4, 3))
    prompts = ["the cat", "return that"]
    wanted = [decoder.generate(prompt, max_new_tokens=10).token_ids for prompt in prompts]
    streams = [decoder.stream(prompt, max_new_tokens=10) for prompt in prompts]
    for _ in zip(*streams, strict=False):
        pass
    for stream in streams:
        list(stream)
    assert [stream.result.token_ids for stream in streams] == wanted


def test_contrastive_search_goes_on_without_it():
    """It asks about the target's tokens one by one."""
    options = {"penalty_alpha": 0.5, "top_k": 3, "max_new_tokens": 6}
    decoder = pair("merged", "bytes", BestFirst(40, 4))
    without = SpeculativeDecoder(decoder.target.model, decoder.tokenizer, (), None)
    assert decoder.generate("the cat", **options).token_ids == without.generate("the cat", **options).token_ids


def test_a_bound_draft_goes_on_to_another_decoder():
    first = pair("merged", "bytes", Chain(2))
    again = SpeculativeDecoder(first.target.model, first.tokenizer, first.drafts, Chain(2))
    assert again.drafts[0].translation is first.drafts[0].translation
    assert again.drafts[0].model is not first.drafts[0].model
    other = SpeculativeDecoder(tiny_llama(4, len(pieces())), pieces(), first.drafts, Chain(2))
    assert other.drafts[0].translation.texts[1] == "<s>"
    assert "its text is cut into the target's tokens" in other.notes[0]


def test_text_and_tokens_take_turns_over_one_cache():
    """Another policy at every step leaves the same cache as one."""
    decoder = pair("bytes", "merged", BestFirst(4, 2))
    prompts = [byte_tokenizer().encode("the cat")]
    session = session_of(decoder, prompts)
    ids = plain(english(), prompts[0], 8)
    for position, token in enumerate(ids):
        policy, text = (Sampled((1, 1)), BestFirst(4, 2))[position % 2], prompts[0] + ids[:position]
        tree = session.propose(policy, text[-1:], 2)[0]
        wanted = session_of(decoder, [text]).propose(policy, text[-1:], 2)[0]
        assert tree.tokens.tolist() == wanted.tokens.tolist()
        session.commit([[token]])


def test_the_same_tokens_need_no_text():
    decoder = SpeculativeDecoder(english(), byte_tokenizer(), text_draft("bytes"), Sampled((1, 1)))
    assert type(decoder.drafts[0]) is ModelDraft
