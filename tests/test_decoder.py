"""The engine end to end on tiny float64 models: exact ids, bad input, edges, streams, and nothing left behind."""

import copy
import gc
import re
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import (
    EOS_TEXT,
    PROMPTS,
    VOCAB,
    Scripted,
    byte_tokenizer,
    counted,
    following,
    like,
    oracle,
    plain,
    tiny_llama,
)
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    MptConfig,
    MptForCausalLM,
    TextStreamer,
)

import specinfer.attention.model
import specinfer.decoder
from specinfer import BestFirst, Chain, Expansion, Memory, ModelDraft, Sampled, SpeculativeDecoder, TokenTree
from specinfer.attention import Support, TreeCache
from specinfer.calls.text_stream import TextStream
from specinfer.drafts.lookup.ngram import NGramDraft
from specinfer.engine.draft import DraftSession
from specinfer.engine.verify import ExactMatch, MultiStep
from specinfer.errors import (
    InputError,
    NumericalError,
    PairingError,
    SamplingError,
    SpecinferError,
    TokenizerMismatch,
    TreeError,
    UnsupportedModel,
)
from specinfer.results import Contribution, Step, contribution
from specinfer.tree import DenseSource

TREES = {
    "auto": "auto",
    "best-first": BestFirst(7, 4),
    "wide": BestFirst(24, 8),
    "expansion": Expansion((3, 2, 1)),
    "chain": Chain(4),
    "none": None,
}
DRAFTS = {
    "ngram": lambda near, far: ["ngram"],
    "model": lambda near, far: [near],
    "merged": lambda near, far: ["ngram", near],
    "three": lambda near, far: [near, "ngram", far],
}


@pytest.fixture(params=TREES.values(), ids=TREES.keys())
def tree(request):
    return request.param


@pytest.fixture(params=DRAFTS.values(), ids=DRAFTS.keys())
def drafts(request, near, far):
    return request.param(near, far)


@pytest.fixture(scope="module")
def greedy(target):
    """transformers' own greedy ids of every prompt, worked out once for all trees and drafts."""
    return [plain(target, prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def ends(target, greedy):
    """Two ids of end of sequence that end the rows of the batch at different steps, or not at all."""
    first = next(token for token in greedy[0][4:9] if token not in greedy[0][:4])
    second = next(token for token in greedy[2][9:] if token not in greedy[2][:9])
    return [first, second]


@pytest.fixture(scope="module")
def ended(target, ends):
    """The greedy ids of every prompt with these ends."""
    texts = [plain(target, prompt, eos_token_id=ends) for prompt in PROMPTS]
    assert len(set(map(len, texts))) > 1  # ragged ends, or the test shows less than it says
    return texts


# ---- greedy ids ----


def test_greedy_ids_are_those_of_generate(target, greedy, tree, drafts):
    """Every tree with every combination of drafts gives transformers' own greedy ids, one prompt at a time."""
    decoder = SpeculativeDecoder(target, drafts=drafts, tree=tree)
    for prompt, wanted in zip(PROMPTS, greedy, strict=True):
        assert decoder.generate(prompt, max_new_tokens=24).token_ids == wanted


def test_greedy_ids_of_a_ragged_batch_are_those_of_each_row_alone(target, ends, ended, tree, drafts):
    """Rows of different lengths that end at different steps do not disturb each other."""
    decoder = SpeculativeDecoder(target, drafts=drafts, tree=tree)
    results = decoder.generate(PROMPTS, max_new_tokens=24, eos_token_id=ends)
    for prompt, result, wanted in zip(PROMPTS, results, ended, strict=True):
        assert result.token_ids == wanted
        assert result.prompt_ids == prompt
        assert result.finish_reason == ("eos" if result.token_ids[-1] in ends else "length")


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_a_draft_equal_to_the_target_is_always_accepted(target, depth):
    """Draft == target: every step but the last commits depth + 1 tokens."""
    decoder = SpeculativeDecoder(target, drafts=[copy.deepcopy(target)], tree=Chain(depth))
    for result in decoder.generate(PROMPTS, max_new_tokens=25):
        gains = [len(step.tokens) for step in result.steps]
        assert gains[:-1] == [depth + 1] * (24 // (depth + 1))
        assert set(result.stats.acceptance_by_depth) == {1.0}


def test_the_best_path_of_a_tree_is_accepted_when_draft_equals_target(target):
    """Draft == target: the likeliest child of every node is the target's choice, so the walk ends at a leaf."""
    decoder = SpeculativeDecoder(target, drafts=[copy.deepcopy(target)], tree=Expansion((2, 2, 1)))
    result = decoder.generate(PROMPTS[0], max_new_tokens=24)
    assert all(len(step.tokens) == 4 for step in result.steps)


def test_a_draft_that_is_always_wrong_costs_speed_only(target):
    """No draft token is ever accepted, and the ids are still exact."""
    decoder = SpeculativeDecoder(target, drafts=[oracle(target, wrong=True)], tree=Chain(4))
    result = decoder.generate(PROMPTS[2], max_new_tokens=12)
    assert result.token_ids == plain(target, PROMPTS[2], 12)
    assert all(step.path == () for step in result.steps)
    assert result.stats.tokens_per_target_pass == 1.0


@pytest.mark.parametrize("vocab", [VOCAB + 24, VOCAB - 24, VOCAB - 128])
@pytest.mark.parametrize("policy", [BestFirst(9, 3), Expansion((4, 2)), Chain(3)])
def test_draft_vocabularies_of_other_sizes_are_exact(target, vocab, policy):
    """A draft may know fewer tokens than the target, or have more rows of padding."""
    decoder = SpeculativeDecoder(target, drafts=[like(target, vocab=vocab), "ngram"], tree=policy)
    for prompt, result in zip(PROMPTS, decoder.generate(PROMPTS, max_new_tokens=16), strict=True):
        assert result.token_ids == plain(target, prompt, 16)


def test_a_draft_with_a_shorter_context_is_exact(target):
    """Beyond its own context a draft guesses badly, and nothing worse."""
    short = tiny_llama(0, max_position_embeddings=16)
    decoder = SpeculativeDecoder(target, drafts=[short], tree=BestFirst(6, 4))
    assert decoder.generate(PROMPTS[2], max_new_tokens=30).token_ids == plain(target, PROMPTS[2], 30)


@pytest.mark.parametrize("new", [2, 4, 8, 16])
def test_trees_whose_early_levels_are_displaced_fit_the_cache(target, new):
    """Best-first may feed more nodes than the tree keeps: near the end of the text they still find room."""
    sharp = copy.deepcopy(target)
    with torch.no_grad():
        sharp.lm_head.weight.mul_(4.0)
    decoder = SpeculativeDecoder(target, drafts=[sharp], tree=BestFirst(32, 8))
    assert decoder.generate([40], max_new_tokens=new).token_ids == plain(target, [40], new)


def test_a_decoder_may_be_used_again_and_again(target, near):
    """Calls leave nothing behind that the next call could see."""
    decoder = SpeculativeDecoder(target, drafts=[near, "ngram"])
    for prompt in (*PROMPTS, *reversed(PROMPTS)):
        assert decoder.generate(prompt, max_new_tokens=10).token_ids == plain(target, prompt, 10)


def test_one_model_may_be_target_and_draft(target):
    """Target and draft sessions on one model object do not share a cache."""
    result = SpeculativeDecoder(target, drafts=[target], tree=Chain(3)).generate(PROMPTS[0], max_new_tokens=12)
    assert result.token_ids == plain(target, PROMPTS[0], 12)


def chain_only(monkeypatch, model):
    """Let `check_model` say that this model scores chains only."""
    checked = specinfer.decoder.check_model
    monkeypatch.setattr(
        specinfer.decoder,
        "check_model",
        lambda m: checked(m)._replace(support=Support.CHAIN_ONLY, reason="so") if m is model else checked(m),
    )


def test_a_model_that_only_scores_chains_decodes_with_a_chain(target, monkeypatch):
    """The policy falls back to a chain of its depth, which the results say; the ids are exact."""
    chain_only(monkeypatch, target)
    decoder = SpeculativeDecoder(target, tree=BestFirst(8, 3))
    result = decoder.generate(PROMPTS[2], max_new_tokens=16)
    assert result.token_ids == plain(target, PROMPTS[2], 16)
    assert decoder.policy == Chain(3)
    assert [draft.name for draft in decoder.drafts] == ["recycling"]
    usual = SpeculativeDecoder(target, memory=Memory())
    assert (usual.policy, [draft.name for draft in usual.drafts]) == (Chain(8), ["suffix"])
    assert "LlamaForCausalLM can score chains only (so)" in result.stats.notes[0]
    assert all(len(step.tree.paths()) <= 1 for step in result.steps)
    assert SpeculativeDecoder(target, drafts=["ngram", target], tree=None).policy.max_nodes == 0


@pytest.mark.parametrize("policy", [BestFirst(8, 3), Chain(3), Expansion((1, 1))])
def test_two_drafts_on_a_model_that_only_scores_chains_are_refused(target, near, monkeypatch, policy):
    """Two merged chains branch, so they are refused whatever the policy is called."""
    chain_only(monkeypatch, target)
    with pytest.raises(UnsupportedModel, match="chains only"):
        SpeculativeDecoder(target, drafts=["ngram", near], tree=policy)


def test_sampled_trees_on_a_model_that_only_scores_chains_are_refused(target, monkeypatch):
    """A sampled tree is not silently replaced by a ranked chain."""
    chain_only(monkeypatch, target)
    with pytest.raises(UnsupportedModel, match="chains only"):
        SpeculativeDecoder(target, tree=Sampled((2, 2)))


# ---- what drafts share, and what each contributes ----


def test_merged_trees_share_one_budget(target, near, far):
    """Three drafts: no more nodes are scored than one draft may propose, and the likeliest of all are."""
    decoder = SpeculativeDecoder(target, drafts=[near, far, "ngram"], tree=BestFirst(6, 4))
    for prompt, result in zip(PROMPTS, decoder.generate(PROMPTS, max_new_tokens=16), strict=True):
        assert result.token_ids == plain(target, prompt, 16)
        assert max(step.tree.num_drafted for step in result.steps) == 6


def test_contributions_are_counted_by_hand():
    """Trees of a chain: by draft 0, by both, by draft 1; accepted whole, in part, and cut."""
    tree = TokenTree.from_nodes(9, [1, 2, 3], [0, 1, 2], [-0.1, -0.2, -0.3], [[(0, 0)], [(0, 0), (1, 0)], [(1, 0)]])
    steps = [
        Step(tree, (1, 2, 3), (1, 2, 3, 7), ((),) * 4),
        Step(tree, (1, 2), (1, 2, 7), ((),) * 3),
        Step(tree, (1, 2, 3), (1,), ((),)),
        Step(tree, (), (7,), ((),)),
    ]
    assert contribution(steps, 0, "a", 5, 0.5) == Contribution("a", tokens=5, only=3 + 2 + 1, passes=5, seconds=0.5)
    assert contribution(steps, 1, "b", 6, 0.6) == Contribution("b", tokens=3, only=1, passes=6, seconds=0.6)


def test_contributions_of_an_oracle(target, near):
    """Its every token is its own; passes are the batch's."""
    decoder = SpeculativeDecoder(target, drafts=[near, oracle(target), oracle(target, wrong=True)], tree=Chain(3))
    for result in decoder.generate(PROMPTS, max_new_tokens=17):
        near_one, best, wrong = result.stats.drafts
        accepted = sum(len(step.tokens) - (step.bonus is not None) for step in result.steps)
        assert best.tokens == accepted == near_one.tokens + best.only
        assert (near_one.only, wrong.tokens, wrong.only) == (0, 0, 0)
        assert near_one.passes == result.stats.draft_passes > 0 == best.passes
        assert near_one.seconds > 0


def test_choices_and_reasons_stand_in_the_stats(target, near):
    """Counted from the steps, whatever the policy; the adaptive one says why."""
    for tree in ("auto", BestFirst(4, 2), None):
        result = SpeculativeDecoder(target, drafts=[near], tree=tree).generate(PROMPTS[0], max_new_tokens=24)
        choices, trees = result.stats.tree_sizes, [step.tree for step in result.steps]
        assert choices.nodes_per_step * len(trees) == pytest.approx(sum(tree.num_drafted for tree in trees))
        assert choices.plain_steps == sum(tree.num_drafted == 0 for tree in trees)
        assert result.stats.to_dict()["tree_sizes"]["plain_steps"] == choices.plain_steps
        off, count = choices.plain_steps, len(trees)
        state = f"off in {off}" if 2 * off > count else f"on in {count - off}"
        words = f"auto: speculation {state} of {count} steps"
        assert any(note.startswith(words) for note in result.stats.notes) == (tree == "auto")


def test_what_auto_learns_stays_with_the_decoder(target, near):
    """A second call goes on from the costs and rates of the first."""
    decoder = SpeculativeDecoder(target, drafts=[near])
    decoder.generate(PROMPTS[0], max_new_tokens=40)
    learnt = decoder.policy.learnt
    earned = {rows: average.value for rows, average in learnt.costs.earned.items()}
    decoder.generate(PROMPTS[2], max_new_tokens=40)
    assert decoder.policy.learnt is learnt
    assert earned
    assert {rows: average.value for rows, average in learnt.costs.earned.items()} != earned


def test_auto_with_a_rule_for_sampled_trees_is_refused(target):
    """Its trees are ranked."""
    with pytest.raises(PairingError, match="MultiStep"):
        SpeculativeDecoder(target, verifier=MultiStep())


# ---- the confidence gate ----


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 4}], ids=str)
@pytest.mark.parametrize("tree", ["auto", BestFirst(6, 3), Sampled((2, 1))])
def test_a_gate_changes_passes_and_not_the_law(target, near, tree, options):
    """Half open: rows of a batch are gated one by one, and ids are those without a gate."""
    decoder = SpeculativeDecoder(target, drafts=[near, "ngram"], tree=tree, confidence_gate=0.5, verifier=ExactMatch())
    wanted = SpeculativeDecoder(target, tree=None).generate(PROMPTS, max_new_tokens=20, **options)
    results = decoder.generate(PROMPTS, max_new_tokens=20, **options)
    assert [result.token_ids for result in results] == [result.token_ids for result in wanted]


def test_a_gate_opens_after_tokens_that_the_target_was_sure_of(target, near):
    """Its own probabilities, computed by hand, say which steps may draft; the first one always may."""
    gate, prompt = 0.6, PROMPTS[2]
    decoder = SpeculativeDecoder(target, drafts=[near], tree=Chain(2), confidence_gate=gate)
    ids, opened = list(prompt), set()
    for i, step in enumerate(decoder.generate(prompt, max_new_tokens=24).steps[:-1]):
        with torch.no_grad():
            distribution = target(torch.tensor([ids[:-1]])).logits[0, -1].softmax(-1)
        confident = i == 0 or float(distribution[ids[-1]]) >= gate
        assert (step.tree.num_drafted > 0) == confident
        opened.add(confident)
        ids += step.tokens
    assert opened == {True, False}


@pytest.mark.parametrize(("gate", "passes"), [(0.0, 23), (1.0, 2), (None, 23)])
def test_a_closed_gate_runs_no_draft(target, far, gate, passes):
    """A draft that is never right: two passes for every step that drafts, but where one token is left or fewer."""
    decoder = SpeculativeDecoder(target, drafts=[far], tree=Chain(2), confidence_gate=gate)
    result = decoder.generate([40], max_new_tokens=13)
    assert len(result.steps) == 13
    assert result.stats.draft_passes == passes


@pytest.mark.parametrize("gate", [-0.1, 1.1, float("nan"), True, "half"])
def test_gates_that_are_no_probability_are_refused(target, gate):
    """Before anything runs."""
    with pytest.raises(InputError, match="confidence_gate"):
        SpeculativeDecoder(target, confidence_gate=gate)


@pytest.mark.parametrize("tree", ["best", 5, "", BestFirst])
def test_what_is_no_tree_is_refused(target, tree):
    """With the names of what is."""
    with pytest.raises(InputError, match='"auto", BestFirst'):
        SpeculativeDecoder(target, tree=tree)


# ---- bad input: its own error, and no model has run ----

BAD_PROMPTS = {
    "empty text": ("", "empty"),
    "blank text": (" \n", "empty"),
    "no ids": ([], "empty"),
    "no rows": ([[]], "row 0.*empty"),
    "empty row": ([[1, 2], []], "row 1.*empty"),
    "empty text row": (["a", ""], "row 1.*empty"),
    "id too large": ([5, VOCAB], f"row 0, position 1.*{VOCAB}"),
    "negative id": ([[5], [3, -1]], "row 1, position 1.*-1"),
    "bool id": ([5, True], "True"),
    "bool first": ([True, 5], "True"),
    "fraction": ([5, 0.5], "0.5"),
    "too long": ([1] * 250, "context of 256"),
    "context exceeded by one": ([1] * 247, "at most 9"),
    "row too long": ([[1], [1] * 250], "row 1"),
    "not a prompt": ([0.5, 1], "float"),
    "none": (None, "prompt"),
    "number": (5, "prompt"),
    "half a surrogate pair": ("\ud800", "tokenizer refuses"),
    "one message without its list": ({"role": "user", "content": "hi"}, "message"),
}


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS.values(), ids=BAD_PROMPTS.keys())
def test_bad_prompts_are_refused_before_a_model_runs(target, near, tokenizer, prompt, message):
    """Each bad prompt is an InputError that says what is wrong."""
    decoder = SpeculativeDecoder(target, tokenizer, drafts=[near])
    with counted(target, near) as passes, pytest.raises(InputError, match=message):
        decoder.generate(prompt, max_new_tokens=10)
    assert not passes


BAD_OPTIONS = {
    "top_p zero": {"top_p": 0.0},
    "top_p over one": {"top_p": 1.5},
    "top_p nan": {"top_p": float("nan")},
    "top_p text": {"top_p": "0.9"},
    "negative temperature": {"temperature": -0.5},
    "infinite temperature": {"temperature": float("inf")},
    "nan temperature": {"temperature": float("nan")},
    "zero temperature sampling": {"temperature": 0.0, "do_sample": True},
    "top_k negative": {"top_k": -1},
    "top_k fraction": {"top_k": 2.5},
    "top_k bool": {"top_k": True},
    "min_p": {"min_p": 1.5},
    "typical_p": {"typical_p": -0.1},
    "epsilon_cutoff": {"epsilon_cutoff": 2.0},
    "eta_cutoff": {"eta_cutoff": -1.0},
    "temperature tiny": {"temperature": 1e-40},
    "repetition_penalty tiny": {"repetition_penalty": 1e-40},
    "bias huge": {"sequence_bias": {(5,): 1e39}},
    "repetition_penalty zero": {"repetition_penalty": 0.0},
    "repetition_penalty negative": {"repetition_penalty": -1.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": -1},
    "max_new_tokens zero": {"max_new_tokens": 0},
    "max_new_tokens negative": {"max_new_tokens": -3},
    "max_new_tokens fraction": {"max_new_tokens": 1.5},
    "min_new_tokens": {"min_new_tokens": -1},
    "min over max": {"min_new_tokens": 9, "max_new_tokens": 4},
    "min over length": {"min_new_tokens": 9, "max_length": 10},
    "min length over max": {"min_length": 7, "max_new_tokens": 4},
    "min length over length": {"min_length": 11, "max_length": 10},
    "min length over the usual": {"min_length": 131},
    "stop_strings empty": {"stop_strings": [""]},
    "temprature": {"temprature": 0.5},
    "beam": {"beam": 2},
}


@pytest.mark.parametrize("options", BAD_OPTIONS.values(), ids=BAD_OPTIONS.keys())
def test_bad_options_are_refused_by_name_before_a_model_runs(target, options):
    """Each impossible or unknown option is a SamplingError that names it."""
    decoder = SpeculativeDecoder(target, byte_tokenizer())
    name = next(iter(options))
    with counted(target) as passes, pytest.raises(SamplingError, match=name):
        decoder.generate([1, 2], **options)
    assert not passes


@pytest.mark.parametrize("tree", [None, BestFirst(4, 2), Sampled((2, 1))], ids=str)
def test_only_sampling_without_a_seed_draws_from_torchs_generator(target, tree):
    decoder = SpeculativeDecoder(target, drafts=[target] if tree else [], tree=tree)
    for options, draws in (({}, False), ({"temperature": 1.0, "seed": 1}, False), ({"temperature": 1.0}, True)):
        before = torch.get_rng_state()
        decoder.generate([[1, 2], [3]], max_new_tokens=3, **options)
        assert torch.equal(before, torch.get_rng_state()) != draws


@pytest.mark.parametrize("seed", [[1], [1, 2, 3], [1, True], True, 1.5, "12", [1, 2.0]])
def test_bad_seeds_are_refused_before_a_model_runs(target, seed):
    """A seed is a whole number, or one per row."""
    decoder = SpeculativeDecoder(target)
    with counted(target) as passes, pytest.raises(InputError, match="seed"):
        decoder.generate([[1], [2]], seed=seed, temperature=1.0)
    assert not passes


def test_stop_strings_need_a_tokenizer(target):
    """Without a tokenizer nobody can tell where a string ends."""
    decoder = SpeculativeDecoder(target)
    with counted(target) as passes, pytest.raises(SamplingError, match="stop_strings needs a tokenizer"):
        decoder.generate([1], stop_strings="x")
    assert not passes


def test_max_length_must_leave_room(target):
    """A length that the prompt already has is an error, not an empty text."""
    with pytest.raises(InputError, match="max_length=3 leaves no room"):
        SpeculativeDecoder(target).generate([1, 2, 3], max_length=3)


@pytest.mark.parametrize("raw", [False, True])
def test_text_needs_a_tokenizer(target, raw):
    """Text in is refused for want of a tokenizer, not called empty."""
    with pytest.raises(InputError, match="tokenizer"):
        SpeculativeDecoder(target).generate("hello", raw=raw)


def test_messages_need_a_chat_template(target, tokenizer):
    """Chat messages without a template to lay them out are an input error."""
    decoder = SpeculativeDecoder(target, tokenizer)
    with counted(target) as passes, pytest.raises(InputError, match="chat template"):
        decoder.generate([{"role": "user", "content": "hi"}], max_new_tokens=2)
    assert not passes


def test_streams_and_streamers_take_one_prompt(target, tokenizer):
    """A batch has no single text to stream."""
    decoder = SpeculativeDecoder(target, tokenizer)
    with counted(target) as passes:
        with pytest.raises(InputError, match="one prompt"):
            decoder.stream([[1], [2]], max_new_tokens=4)
        with pytest.raises(InputError, match="one prompt"):
            decoder.generate([[1], [2]], max_new_tokens=4, streamer=TextStreamer(tokenizer))
        with pytest.raises(InputError, match="tokenizer"):
            SpeculativeDecoder(target).stream([1], max_new_tokens=4)
    assert not passes


def test_a_draft_with_another_tokenizer_is_refused_if_asked_for_before_a_model_runs(monkeypatch):
    """The tables are compared, not their sizes."""
    target, draft = tiny_llama(0), tiny_llama(1)
    swapped = byte_tokenizer()
    swapped.add_tokens(["new"])
    drafts = [ModelDraft(draft, swapped, tokens="same")]
    with counted(target, draft) as passes:
        monkeypatch.setattr("specinfer.attention.check._checked", {})  # as if never checked
        with pytest.raises(TokenizerMismatch, match="new"):
            SpeculativeDecoder(target, byte_tokenizer(), drafts=drafts)
    assert not passes


@pytest.mark.parametrize(
    ("policy", "verifier"),
    [
        (BestFirst(4, 2), MultiStep()),
        (Expansion((2,)), MultiStep(replacement=True)),
        (Sampled((2,)), MultiStep(replacement=True)),
        (Sampled((2,), replacement=True), MultiStep()),
    ],
)
def test_a_verifier_that_would_bias_the_text_is_refused_before_a_model_runs(policy, verifier, monkeypatch):
    """Wrong pairs of tree and verifier are errors at construction."""
    target = tiny_llama(0)
    with counted(target) as passes:
        monkeypatch.setattr("specinfer.attention.check._checked", {})  # as if never checked
        with pytest.raises(PairingError, match="MultiStep"):
            SpeculativeDecoder(target, tree=policy, verifier=verifier)
        for wrong in ({"memory": 3}, {"memory": "/no/such/memory"}, {"online": "yes"}):
            with pytest.raises(InputError):
                SpeculativeDecoder(target, **wrong)
    assert not passes


@pytest.mark.parametrize("place", ["target", "draft"])
def test_models_that_cannot_score_even_chains_are_refused_by_name(target, place):
    """As target and as draft; flash attention before anything runs."""
    mamba = MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4))
    flash = tiny_llama(0)
    flash.config._attn_implementation = "flash_attention_2"
    for model, message in ((mamba, "MambaForCausalLM.*by one token only"), (flash, "flash_attention_2")):
        models = [model] if place == "target" else [target, model]
        with counted(model) as passes, pytest.raises(UnsupportedModel, match=message):
            SpeculativeDecoder(models[0], drafts=models[1:])
        assert model is mamba or not passes


def test_a_draft_of_another_vocabulary_needs_tokenizers(target):
    """A few more or fewer are padding; without tokenizers nothing says which of many are the same."""
    with pytest.raises(TokenizerMismatch, match=r"knows 400 tokens, the target 264.* give tokenizer="):
        SpeculativeDecoder(target, drafts=[like(target, vocab=400)])
    decoder = SpeculativeDecoder(target, drafts=[like(target, vocab=VOCAB + 128)])
    assert any("was not compared" in note for note in decoder.notes)


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({"drafts": ["n-gram"]}, "ngram"),
        ({"drafts": "sufix"}, "suffix"),
        ({"drafts": ["ngram", "recyling"]}, "recycling"),
        ({"tree": "best-first"}, "BestFirst"),
        ({"tree": "Auto"}, "auto"),
        ({"tree": "chain"}, "Chain"),
    ],
    ids=str,
)
def test_misspelt_words_are_understood_and_refused(target, options, meant):
    with pytest.raises(InputError, match=re.escape(f"did you mean {meant}?")):
        SpeculativeDecoder(target, **options)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("max_tokens", "did you mean max_new_tokens?"),
        ("max_new_token", "did you mean max_new_tokens?"),
        ("stop", "did you mean stop_strings?"),
        ("n", "did you mean num_return_sequences?"),
        ("logprob", "did you mean logprobs?"),
        ("keep_stop_strings", "did you mean keep_stop_string, of generate?"),
        ("device_map", "give it to SpeculativeDecoder.from_pretrained"),
        ("drafts", "give it to SpeculativeDecoder"),
        ("assistant_model", "did you mean drafts, of SpeculativeDecoder?"),
        ("tokenizer", "leave it out: the decoder has one"),
        ("prefix_allowed_tokens_fn", "PrefixConstrainedLogitsProcessor"),
        ("bananas", "options are those of transformers.GenerationConfig"),
    ],
)
def test_unknown_options_are_refused_with_what_was_meant(target, name, advice):
    for call in (SpeculativeDecoder(target).generate, SpeculativeDecoder(target).open):
        with pytest.raises(SamplingError, match=f"unknown option {name}: .*{re.escape(advice)}"):
            call([1], **{name: 5})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0, "do_sample": True}, "temperature=0 is greedy decoding, and do_sample=True draws"),
        (
            {"max_new_tokens": "5"},
            "max_new_tokens='5' is not possible: it must be a whole number, at least 1, and this",
        ),
        ({"max_new_tokens": 300}, "or ask for at most 254 new tokens"),
    ],
    ids=str,
)
def test_messages_say_what_to_do(target, options, message):
    with pytest.raises(SpecinferError, match=re.escape(message)):
        SpeculativeDecoder(target).generate([1, 2], **options)


def test_a_prompt_that_fills_the_context_is_to_be_shortened(target):
    with pytest.raises(InputError, match=r"context of 256 \(max_position_embeddings\): shorten the prompt$"):
        SpeculativeDecoder(target).generate([1] * 256, max_new_tokens=1)


def test_reprs_are_short(target, near, tokenizer):
    decoder = SpeculativeDecoder(target, tokenizer, [near, "ngram"], BestFirst(4, 2))
    assert repr(decoder) == (
        "SpeculativeDecoder(LlamaForCausalLM, drafts=['draft', 'ngram'], "
        "tree=BestFirst(max_nodes=4, max_depth=2, min_probability=0.0))"
    )
    result = decoder.generate("abc " * 50, max_new_tokens=40)
    for value in (result, result.stats, *result.steps):
        assert repr(value).startswith(f"{type(value).__name__}(")
        assert len(repr(value)) < 400
        assert "\n" not in repr(value)


@pytest.mark.parametrize("draft", ["some-model", Path("some-folder")])
def test_names_of_drafts_need_from_pretrained(target, draft):
    """The constructor loads nothing."""
    with pytest.raises(InputError, match=f"{draft}.*from_pretrained"):
        SpeculativeDecoder(target, drafts=[draft])


@pytest.mark.parametrize("draft", [None, 42, object()])
def test_what_is_no_draft_is_refused(target, draft):
    with pytest.raises(InputError, match="is not a draft"):
        SpeculativeDecoder(target, drafts=[draft])


def test_a_finished_call_keeps_no_cache(target, near):
    """Not even until garbage is collected: on a GPU that would be memory."""
    alive = [0]

    class Counted(TreeCache):
        def __init__(self, *sizes, **more):
            super().__init__(*sizes, **more)
            alive[0] += 1
            weakref.finalize(self, lambda: alive.__setitem__(0, alive[0] - 1))

    gc.collect()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("specinfer.attention.passes.plain.TreeCache", Counted)
            SpeculativeDecoder(target, drafts=[near], tree=BestFirst(4, 2)).generate(PROMPTS, max_new_tokens=6)
    finally:
        gc.enable()
    assert alive == [0]


def broken_at(length, value=torch.nan, only=None):
    """A logits processor that spoils the logits after `length` ids (of the row that begins with `only`)."""

    def spoil(input_ids, scores):
        hit = input_ids.shape[1] == length and only in (None, int(input_ids[0, 0]))
        return torch.full_like(scores, value) if hit else scores

    return spoil


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 1}])
def test_logits_that_are_not_numbers_name_row_and_step_and_keep_what_was_decoded(target, value, options):
    """NaN, inf or all -inf end the call with an error that carries the results so far."""
    whole = SpeculativeDecoder(target, tree=None).generate(PROMPTS, max_new_tokens=12, **options)
    decoder = SpeculativeDecoder(target, tree=None)
    spoil = broken_at(len(PROMPTS[2]) + 5, value, only=PROMPTS[2][0])
    with pytest.raises(NumericalError, match="row 2, step 6") as caught:
        decoder.generate(PROMPTS, max_new_tokens=12, logits_processor=[spoil], **options)
    partial = caught.value.partial
    assert [result.finish_reason for result in partial] == ["unfinished"] * 4
    assert partial[2].token_ids == whole[2].token_ids[:5]
    for result, reference in zip(partial, whole, strict=True):
        assert result.token_ids == reference.token_ids[: len(result.token_ids)]


def test_results_kept_by_an_error_agree_with_their_steps(target):
    """What an error carries is consistent: ids are those of the recorded steps, for every row."""
    spoil = broken_at(len(PROMPTS[2]) + 5, only=PROMPTS[2][0])
    decoder = SpeculativeDecoder(target, tree=None)
    with pytest.raises(NumericalError) as caught:
        decoder.generate(PROMPTS, max_new_tokens=12, logits_processor=[spoil])
    for result in caught.value.partial:
        assert result.token_ids == [token for step in result.steps for token in step.tokens]


def test_nan_weights_are_an_error(near):
    """A real NaN in the target's weights is found at the first step."""
    broken = tiny_llama(3)
    decoder = SpeculativeDecoder(broken, drafts=[near], tree=Chain(2))
    with torch.no_grad():
        broken.lm_head.weight[7] = torch.nan
    with pytest.raises(NumericalError, match="row 0, step 1"):
        decoder.generate([1, 2], max_new_tokens=4)


@pytest.mark.parametrize("tree", [BestFirst(4, 2), "auto"], ids=str)
def test_a_draft_that_yields_nan_is_a_clear_error(target, tree):
    """NaN from a draft is an error that says it was the draft."""
    broken = like(target)
    decoder = SpeculativeDecoder(target, drafts=[broken], tree=tree)
    with torch.no_grad():
        broken.lm_head.weight[7] = torch.nan
    with pytest.raises(NumericalError, match="draft 0"):
        decoder.generate([1, 2], max_new_tokens=4)


class Answering(Scripted):
    """A draft of one's own whose distributions a function of the tokens' shape gives."""

    def open(self, context):
        """Ask the function."""
        session = super().open(context)
        session.propose = partial(DraftSession.propose, session)
        session.source = lambda roots: DenseSource(lambda level: self.future(level.tokens.shape), len(roots))
        return session


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda shape: torch.zeros(VOCAB), r"draft 0 returned torch.float32 \(264,\): give .* shape \(2, 1, V\)"),
        (lambda shape: torch.zeros(3, 1, VOCAB), r"draft 0 returned torch.float32 \(3, 1, 264\)"),
        (lambda shape: torch.zeros(*shape, 0), r"draft 0 returned torch.float32 \(2, 1, 0\)"),
        (lambda shape: torch.zeros(*shape, VOCAB, dtype=torch.int64), "draft 0 returned torch.int64"),
        (lambda shape: None, "draft 0 returned NoneType"),
        (lambda shape: torch.arange(VOCAB + 3.0).expand(*shape, -1), r"token 26[456] was drafted, .* \[0, 264\)"),
    ],
)
def test_a_draft_that_answers_with_no_distributions_is_a_clear_error(target, answer, message):
    """Nor may it propose tokens that the target has no embedding of."""
    decoder = SpeculativeDecoder(target, drafts=[Answering(answer)], tree=BestFirst(4, 2))
    with pytest.raises(SpecinferError, match=message):
        decoder.generate(PROMPTS[:2], max_new_tokens=4)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_draft_with_trees_for_other_rows_is_refused(target, rows):
    """Trees are told apart by their order alone."""
    draft = Scripted(lambda row: [1])
    open_session = draft.open

    def with_other_rows(context):
        session = open_session(context)
        session.rows = (session.rows * 2)[:rows]
        return session

    draft.open = with_other_rows
    with pytest.raises(TreeError, match=f"scripted proposed {rows} trees for 2 rows"):
        SpeculativeDecoder(target, drafts=[draft], tree=Chain(2)).generate(PROMPTS[:2], max_new_tokens=4)


@pytest.mark.parametrize("layers", [(3,), (0, -1), (0.5,)])
def test_a_draft_that_reads_no_layer_of_the_target_is_refused(target, layers):
    """Layers are counted as transformers counts them: 0 is the embedding, 2 the last of two."""
    draft = Scripted(lambda row: [1])
    draft.aux_layers = layers
    with pytest.raises(InputError, match=r"aux_layers=.*: the target's hidden states are 0 to 2"):
        SpeculativeDecoder(target, drafts=[draft])


# ---- edges ----


def ended_at(target, place, depth=4):
    """Decode with a draft that knows the future, the token at `place` being the end of sequence."""
    text = plain(target, PROMPTS[3], 12)
    end = text[place]
    assert end not in text[:place]
    decoder = SpeculativeDecoder(target, drafts=[oracle(target)], tree=Chain(depth))
    return decoder.generate(PROMPTS[3], max_new_tokens=12, eos_token_id=[end, VOCAB - 1]), text[: place + 1]


@pytest.mark.parametrize("place", range(7))
def test_end_of_sequence_anywhere_in_a_step_ends_the_text_there(target, place):
    """EOS as the root's successor, an inner, the last accepted and the bonus token: nothing follows it."""
    text = plain(target, PROMPTS[3], 12)
    if text[place] in text[:place]:
        pytest.skip("this token came before")
    result, wanted = ended_at(target, place)
    assert result.token_ids == wanted
    assert result.finish_reason == "eos"
    assert (result.steps[-1].bonus is None) == (place % 5 != 4)  # cut before the step's fifth, its bonus


@pytest.mark.parametrize("new", [1, 2, 3])
@pytest.mark.parametrize("policy", TREES.values(), ids=TREES.keys())
def test_small_budgets_are_kept_exactly(target, near, new, policy):
    """One to three tokens, in a batch too; the tree is no deeper than what may still be emitted."""
    decoder = SpeculativeDecoder(target, drafts=[near, "ngram"], tree=policy)
    for prompt, result in zip(PROMPTS, decoder.generate(PROMPTS, max_new_tokens=new), strict=True):
        assert result.token_ids == plain(target, prompt, new)
        assert result.finish_reason == "length"
        assert all(step.tree.depth < new for step in result.steps)


def test_the_budget_is_never_exceeded(target):
    """However much is accepted, no step emits more than is left."""
    decoder = SpeculativeDecoder(target, drafts=[copy.deepcopy(target)], tree=BestFirst(12, 6))
    for new in range(1, 16):
        assert len(decoder.generate([9, 8], max_new_tokens=new).token_ids) == new


def gpt2(positions):
    torch.manual_seed(2)
    special = {"bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(
        vocab_size=50, n_positions=positions, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3, **special
    )
    return GPT2LMHeadModel(config).double().eval()


@pytest.mark.parametrize("policy", [BestFirst(12, 6), Chain(5), Expansion((2, 2, 2))])
def test_the_context_may_be_used_to_its_end(policy):
    """Learned positions: the last one is used, and the one after it is refused by name."""
    model = gpt2(24)
    decoder = SpeculativeDecoder(model, drafts=[like(model), "ngram"], tree=policy)
    for prompt in ([3, 1, 4, 1, 5], [7]):
        room = 24 - len(prompt)
        assert decoder.generate(prompt, max_new_tokens=room).token_ids == plain(model, prompt, room)
        with pytest.raises(InputError, match="context of 24"):
            decoder.generate(prompt, max_new_tokens=room + 1)


def test_a_ragged_batch_at_the_end_of_the_context():
    """A row at the last position is not disturbed by a short row's tree."""
    model = gpt2(24)
    decoder = SpeculativeDecoder(model, drafts=[like(model)], tree=BestFirst(10, 6))
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7]]
    for prompt, result in zip(prompts, decoder.generate(prompts, max_new_tokens=13), strict=True):
        assert result.token_ids == plain(model, prompt, 13)


def test_a_long_prompt_is_prefilled_in_chunks(target, near, monkeypatch):
    """Prompts longer than a chunk, next to short ones, give the same text; passes stay small."""
    monkeypatch.setattr("specinfer.attention.model.PREFILL_CHUNK", 8)
    prompts = [[(7 * i) % 50 for i in range(45)], [40], [1] * 17, [2] * 8]
    sizes = []
    hook = target.register_forward_pre_hook(
        lambda _module, _args, inputs: sizes.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    decoder = SpeculativeDecoder(target, drafts=[near, "ngram"], tree=Chain(3))
    sizes.clear()  # those of the check
    results = decoder.generate(prompts, max_new_tokens=8)
    hook.remove()
    assert max(sizes) == 8
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == plain(target, prompt, 8)


def test_a_vocabulary_of_151936():
    """The vocabulary of large models, with candidates found block by block."""
    model = tiny_llama(0, vocab=151_936, hidden_size=8, intermediate_size=8, num_hidden_layers=1, spread=0.5)
    decoder = SpeculativeDecoder(model, drafts=[like(model, 0.02)], tree=BestFirst(8, 3))
    result = decoder.generate([151_000, 5, 90_000], max_new_tokens=8)
    assert result.token_ids == plain(model, [151_000, 5, 90_000], 8)
    sampled = {"temperature": 0.8, "top_p": 0.9, "seed": 3, "max_new_tokens": 6}
    alone = SpeculativeDecoder(model, tree=None).generate([5], **sampled)
    assert decoder.generate([5], **sampled).token_ids == alone.token_ids


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 6])
def test_a_stop_string_across_accepted_tokens_cuts_inside_a_step(target, tokenizer, depth):
    """A stop string of three tokens, the text going on behind it in the same step, ends at its last token."""
    prompt = list(b"say ")
    script = tokenizer("so then END or not")["input_ids"]
    decoder = SpeculativeDecoder(
        target, tokenizer, drafts=[Scripted(lambda row: script[len(row) - 4 :])], tree=Chain(depth)
    )
    force = following(script, len(prompt))
    result = decoder.generate(prompt, max_new_tokens=18, stop_strings=["END"], logits_processor=[force])
    assert result.text == "so then END"
    assert result.finish_reason == "stop"


# ---- results ----


def test_figures_agree_with_the_steps(target, near, far):
    """Counts in the stats are those of the steps; paths are paths; every drafted token names its draft."""
    drafts = [ModelDraft(near, name="near"), NGramDraft(), ModelDraft(far, name="far")]
    decoder = SpeculativeDecoder(target, drafts=drafts, tree=BestFirst(9, 4))
    for result in decoder.generate(PROMPTS, max_new_tokens=20):
        stats = result.stats
        assert [token for step in result.steps for token in step.tokens] == result.token_ids
        assert stats.new_tokens == len(result.token_ids) == 20
        assert stats.target_passes == len(result.steps)
        assert stats.tokens_per_target_pass == 20 / len(result.steps)
        assert stats.draft_passes > 0
        seconds = stats.seconds
        assert seconds.total >= seconds.target > 0
        assert seconds.bookkeeping >= 0
        for step in result.steps:
            along = [int(step.tree.tokens[node]) for node in step.path]
            assert (*along, step.bonus)[: len(step.tokens)] == step.tokens
            assert len(step.drafted_by) == len(step.tokens)
            assert set().union(*step.drafted_by) <= {"near", "ngram", "far"}
            for node, names in zip(step.path, step.drafted_by, strict=False):
                assert set(names) == {drafts[draw.draft].name for draw in step.tree.draws[node]}
            if step.bonus is not None:
                assert step.drafted_by[-1] == ()


def test_acceptance_by_depth_by_hand(target):
    """Chains right for 2, 0, then 1 tokens, the third cut to depth 2, the last to a bare root: counted by hand."""
    prompt = PROMPTS[1]
    text = plain(target, prompt, 12)
    right = iter([2, 0, 1])

    def future(row):
        done, good = len(row) - len(prompt), next(right)
        wrong = [(token + 1) % VOCAB for token in text]
        return [*text[done : done + good], *wrong[done + good : done + 3]]

    decoder = SpeculativeDecoder(target, drafts=[Scripted(future)], tree=Chain(3))
    result = decoder.generate(prompt, max_new_tokens=7)
    assert [len(step.path) for step in result.steps] == [2, 0, 1, 0]
    assert result.token_ids == text[:7]
    assert result.stats.acceptance_by_depth == pytest.approx((2 / 3, 1 / 2, 0.0))
    names = [step.drafted_by for step in result.steps]
    assert names == [(("scripted",), ("scripted",), ()), ((),), (("scripted",), ()), ((),)]


def test_results_are_json_ready(target, tokenizer, near):
    """`to_dict` of a result and of its steps survives a trip through JSON."""
    import json

    result = SpeculativeDecoder(target, tokenizer, drafts=[near]).generate(list(b"abc"), max_new_tokens=6)
    record = json.loads(json.dumps(result.to_dict()))
    assert {"text", "token_ids", "logprobs", "top_logprobs", "finish_reason", "seed", "stats"} == set(record)
    wanted = {"new_tokens", "target_passes", "draft_passes", "tokens_per_target_pass", "seconds"}
    assert wanted <= set(record["stats"])
    assert record["stats"]["seconds"]["total"] > 0
    steps = [json.loads(json.dumps(step.to_dict())) for step in result.steps]
    assert [token for step in steps for token in step["tokens"]] == result.token_ids
    assert str(result) == result.text


def test_draft_passes_are_counted_and_prefill_is_not(target, near):
    """A chain of k costs one draft pass a level; a decoder without drafts costs none."""
    assert SpeculativeDecoder(target, tree=None).generate([1], max_new_tokens=4).stats.draft_passes == 0
    result = SpeculativeDecoder(target, drafts=[near], tree=Chain(3)).generate([1, 2, 3], max_new_tokens=16)
    assert result.stats.draft_passes == sum(step.tree.depth for step in result.steps)
    assert SpeculativeDecoder(target).generate([1], max_new_tokens=4).stats.draft_passes == 0


def test_no_step_runs_the_target_more_than_once(target, near):
    """One target pass a step over all rows; the first one reads the prompts."""
    decoder = SpeculativeDecoder(target, drafts=[near], tree=BestFirst(6, 3))
    with counted(target) as passes:
        results = decoder.generate(PROMPTS, max_new_tokens=16)
    assert len(passes) == max(len(result.steps) for result in results)


def test_sequences_are_what_transformers_returns(target, near):
    """Prompt and new ids, (1, T)."""
    result = SpeculativeDecoder(target, drafts=[near]).generate(PROMPTS[0], max_new_tokens=9, temperature=0)
    ids = torch.tensor([PROMPTS[0]])
    wanted = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
    assert result.sequences.dtype == torch.long
    assert torch.equal(result.sequences, wanted)


def test_accept_lengths_are_the_tokens_of_every_target_pass(target):
    """A draft that is the target has everything accepted, until the text ends."""
    result = SpeculativeDecoder(target, drafts=[target], tree=Chain(3)).generate([1, 2], max_new_tokens=10)
    assert result.accept_lengths == [4, 4, 2]
    assert sum(result.accept_lengths) / len(result.accept_lengths) == result.stats.tokens_per_target_pass


# ---- streams ----

TEXT = "Zoë 🌳🌲 naïve — 日本 👩‍👩‍👧 end"


def telling(target, tokenizer, text=TEXT, depth=3, **options):
    """A decoder and options that make the target say `text`, then the end of sequence."""
    script = [*tokenizer(text)["input_ids"], EOS_TEXT]
    draft = Scripted(lambda row: script[len(row) - 4 :])
    decoder = SpeculativeDecoder(target, tokenizer, drafts=[draft], tree=Chain(depth))
    force = following(script, 4)
    options = {"max_new_tokens": 100, "logits_processor": [force], "eos_token_id": EOS_TEXT, **options}
    return decoder, options


@pytest.mark.parametrize("depth", [0, 1, 2, 4, 7])
def test_pieces_of_a_stream_are_whole_characters_and_join_to_the_text(target, tokenizer, depth):
    """No piece ends inside a character of several tokens, wherever steps end."""
    decoder, options = telling(target, tokenizer, depth=depth)
    stream = decoder.stream(list(b"say "), **options)
    pieces = list(stream)
    assert "".join(pieces) == stream.result.text == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert all(pieces)
    assert stream.result.finish_reason == "eos"
    assert len(pieces) > 2


def test_a_stream_of_random_bytes_joins_to_the_text(target, near, tokenizer):
    """Bytes that are no characters are shown as such, once they are final."""
    decoder = SpeculativeDecoder(target, tokenizer, drafts=[near])
    for seed in range(5):
        stream = decoder.stream([1, 2], max_new_tokens=30, temperature=1.0, seed=seed)
        assert isinstance(stream, TextStream)
        assert "".join(stream) == stream.result.text


def test_a_stream_whose_text_is_tidied_joins_to_the_text(target):
    """Joined pieces are the text even where the tokenizer drops a space before punctuation that comes later."""
    tokenizer = byte_tokenizer(clean_up_tokenization_spaces=True)
    decoder, options = telling(target, tokenizer, "well , yes . no", depth=1)
    stream = decoder.stream(list(b"say "), **options)
    assert "".join(stream) == stream.result.text


def test_no_pass_runs_before_a_stream_is_iterated(target, tokenizer):
    """DraftContext a stream checks the input and runs nothing; one piece runs one step."""
    decoder = SpeculativeDecoder(target, tokenizer, tree=None)
    with counted(target) as passes:
        stream = decoder.stream(list(b"abc"), max_new_tokens=20)
        assert not passes
        stream.close()
        assert list(stream) == []
        assert not passes


def test_closing_a_stream_leaves_models_as_they_were(tokenizer):
    """Train mode, config and the next text are not changed by a stream that is closed midway."""
    target, draft = tiny_llama(0).train(), tiny_llama(1).train()
    decoder = SpeculativeDecoder(target, tokenizer, drafts=[draft])
    config = target.config.to_dict()
    stream = decoder.stream(list(b"abcabc"), max_new_tokens=30)
    next(stream)
    assert target.training, "a paused stream has given the models back"
    assert draft.training
    stream.close()
    assert target.training
    assert draft.training
    assert target.config.to_dict() == config
    assert stream.result.finish_reason == "unfinished"
    assert 0 < len(stream.result.token_ids) < 30
    prompt = list(b"abcabc")
    result = decoder.generate(prompt, max_new_tokens=12)
    target.eval()
    assert result.token_ids == plain(target, prompt, 12)


def test_an_error_in_a_custom_processor_leaves_models_as_they_were():
    """The error arrives as it was raised, and the models are restored."""
    target = tiny_llama(0).train()
    decoder = SpeculativeDecoder(target)

    def fail(input_ids, scores):
        if input_ids.shape[1] > 4:
            raise KeyError("mine")
        return scores

    with pytest.raises(KeyError, match="mine"):
        decoder.generate([1, 2], max_new_tokens=8, logits_processor=[fail])
    assert target.training
    result = decoder.generate([1, 2], max_new_tokens=8)
    assert target.training
    assert result.token_ids == plain(target.eval(), [1, 2], 8)


def test_training_flags_of_submodules_are_restored():
    """A model in which one layer was frozen in eval mode comes back like that."""
    target = tiny_llama(0).train()
    target.model.layers[0].eval()
    SpeculativeDecoder(target).generate([1], max_new_tokens=2)
    assert target.training
    assert not target.model.layers[0].training


class Recorder:
    """A transformers streamer that writes down what it is given."""

    def __init__(self):
        self.calls = []

    def put(self, value):
        """Take the prompt, or tokens."""
        self.calls.append(value.tolist())

    def end(self):
        """Take note of the end."""
        self.calls.append("end")


def test_streamers_get_the_prompt_then_tokens_then_the_end(target, near):
    """The order of transformers' own generate: put(prompt, 2-D), put(tokens, 1-D) ..., end()."""
    recorder = Recorder()
    decoder = SpeculativeDecoder(target, drafts=[near])
    result = decoder.generate(PROMPTS[0], max_new_tokens=12, streamer=recorder)
    prompt, *tokens, end = recorder.calls
    assert prompt == [PROMPTS[0]]
    assert [token for piece in tokens for token in piece] == result.token_ids
    assert end == "end"


def test_a_text_streamer_prints_the_text(target, tokenizer, capsys):
    """transformers' TextStreamer works as it does with generate."""
    decoder, options = telling(target, tokenizer)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    result = decoder.generate(list(b"say "), streamer=streamer, **options)
    assert capsys.readouterr().out.rstrip("\n") == result.text == TEXT


# ---- nothing leaks ----


def live_objects():
    gc.collect()
    caches = (specinfer.attention.TreeCache, specinfer.attention.TreeSession)
    objects = gc.get_objects()
    return sum(type(o) is torch.Tensor for o in objects), sum(type(o) in caches for o in objects)


def test_nothing_piles_up_over_200_calls(target, near):
    """Tensors and caches alive are as many after 200 calls as after ten, closed streams and errors included."""
    tokenizer = byte_tokenizer()
    decoder = SpeculativeDecoder(target, tokenizer, drafts=[near, "ngram"], tree=BestFirst(4, 2))

    def call(i):
        decoder.generate([i % 200, 5], max_new_tokens=3, temperature=float(i % 2), seed=i)
        if i % 10 == 0:
            next(iter(decoder.stream([i % 200, 5], max_new_tokens=4)), None)
            with pytest.raises(NumericalError):
                decoder.generate([5], max_new_tokens=3, logits_processor=[broken_at(2)])

    for i in range(10):
        call(i)
    before = live_objects()
    for i in range(200):
        call(i)
    assert live_objects() == before


# ---- prompts ----

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def test_text_messages_ids_and_tensors_are_one_prompt_or_a_batch(target):
    """A string is a user's message where there is a chat template, and itself where it is raw."""
    tokenizer = byte_tokenizer(chat_template=TEMPLATE)
    decoder = SpeculativeDecoder(target, tokenizer, tree=None)

    def ids(prompt, **options):
        result = decoder.generate(prompt, max_new_tokens=1, **options)
        return [r.prompt_ids for r in result] if isinstance(result, list) else result.prompt_ids

    chat, messages = tokenizer("<user>hi<a>")["input_ids"], [{"role": "user", "content": "hi"}]
    assert ids("hi") == ids(messages) == chat
    assert ids("hi", raw=True) == tokenizer("hi")["input_ids"]
    assert ids(["hi", "hi"]) == ids([messages, messages]) == [chat, chat]
    assert ids([3, 4]) == ids(torch.tensor([3, 4])) == [3, 4]
    assert ids([[3, 4]]) == ids(torch.tensor([[3, 4]])) == [[3, 4]]
    assert ids([torch.tensor([3, 4]), [5]]) == [[3, 4], [5]]
    assert SpeculativeDecoder(target, byte_tokenizer()).generate("hi", max_new_tokens=1).prompt_ids == [
        *tokenizer("hi")["input_ids"]
    ]


def test_walk_is_exact_on_sampled_trees_too(target, near):
    """The walk looks at no distribution, so greedy ids are exact on trees that were drawn."""
    for policy in (Sampled((2, 2)), Sampled((2, 2), replacement=True)):
        for verifier in (ExactMatch(), None):
            decoder = SpeculativeDecoder(target, drafts=[near, "ngram"], tree=policy, verifier=verifier)
            for prompt, result in zip(PROMPTS, decoder.generate(PROMPTS, max_new_tokens=12), strict=True):
                assert result.token_ids == plain(target, prompt, 12)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}], ids=str)
def test_a_gpu_writes_what_the_cpu_writes(target, near, tree, options):
    """float64 models, models' drafts and n-grams merged, a ragged batch: the same ids on both devices."""
    texts = []
    for device in ("cpu", "cuda"):
        on_device = [copy.deepcopy(model).to(device) for model in (target, near)]
        decoder = SpeculativeDecoder(on_device[0], drafts=["ngram", on_device[1]], tree=tree)
        texts.append([result.token_ids for result in decoder.generate(PROMPTS, max_new_tokens=20, **options)])
    assert texts[0] == texts[1]


def test_streams_that_interleave_do_not_disturb_each_other(tokenizer):
    """Closing one stream does not put a model back into train mode under another one."""
    target = tiny_llama(0, attention_dropout=0.5).train()
    decoder = SpeculativeDecoder(target, tokenizer)
    prompt = list(b"abcabc")
    first, second = (decoder.stream(prompt, max_new_tokens=20) for _ in range(2))
    next(first)
    next(second)
    first.close()
    for _ in second:
        pass
    assert second.result.token_ids == plain(target.eval(), prompt, 20)


def test_a_result_taken_under_way_does_not_change(target, tokenizer):
    """Steps and tokens of an early result stay those of its moment."""
    run = SpeculativeDecoder(target, tokenizer).open(PROMPTS[0], max_new_tokens=20)
    next(iter(run))
    early = run.results()[0]
    run.finish()
    assert len(early.steps) == early.stats.target_passes == 1


@pytest.mark.parametrize("inherited", [{"cache_implementation": "hybrid"}, {"use_cache": False}])
def test_a_checkpoints_choice_of_cache_is_not_the_callers(inherited):
    """A checkpoint may name a cache of transformers' (gemma, mpt); only a caller who names one is refused."""
    model = tiny_llama(0)
    for name, value in inherited.items():
        setattr(model.generation_config, name, value)
    decoder = SpeculativeDecoder(model)
    assert decoder.generate([5, 9], max_new_tokens=4).stats.new_tokens == 4
    with pytest.raises(SamplingError, match="cache_implementation"):
        decoder.generate([5, 9], max_new_tokens=4, cache_implementation="static")


@pytest.mark.parametrize("short", [True, False])
def test_positions_by_cache_column_reach_the_end_of_the_context(short):
    """mpt counts cache columns, padding included: a ragged batch to the end, as target or as a short draft."""
    torch.manual_seed(0)
    config = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": VOCAB}
    mpt = MptForCausalLM(MptConfig(**config, max_seq_len=24 if short else 64)).double().eval()
    if short:
        decoder = SpeculativeDecoder(tiny_llama(0), drafts=[mpt], tree=Chain(4))
    else:
        decoder = SpeculativeDecoder(mpt, tree=Chain(6))
    results = decoder.generate([PROMPTS[0], PROMPTS[1][:2]], max_length=58)
    alone = SpeculativeDecoder(decoder.target.model, tree=None).generate(PROMPTS[0], max_length=58)
    assert results[0].token_ids == alone.token_ids


@pytest.mark.parametrize(
    ("arguments", "message"), [({"tree": "best-first"}, "growth policy"), ({"drafts": "x"}, "name")]
)
def test_arguments_of_a_wrong_type_say_so(target, arguments, message):
    """A tree's name or a draft's name where an object is wanted."""
    with pytest.raises(InputError, match=message):
        SpeculativeDecoder(target, **arguments)
