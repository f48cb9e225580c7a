"""Sampling: texts depend on the seed alone; their distribution; every option next to transformers' own."""

import gc
import random
import time
import weakref

import numpy as np
import pytest
import torch
from conftest import EOS_TEXT, PROMPTS, VOCAB, byte_tokenizer, counted, following, like, plain, tiny_llama
from scipy.stats import chisquare
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)

from specinfer import BestFirst, Chain, Expansion, Sampled, SpeculativeDecoder, TokenTree
from specinfer.calls.verifying import verify_tree
from specinfer.engine.gumbel import COUPLING, gumbel, key
from specinfer.engine.processors import Processors
from specinfer.engine.sampling import DEFAULT_MAX_NEW_TOKENS, resolve
from specinfer.engine.sequence import _choose as choose_at_once
from specinfer.engine.sequence import target_views
from specinfer.engine.verify import ExactMatch, MultiStep, Verdict, Verifier, chosen_verifier
from specinfer.errors import InputError, PairingError, SamplingError
from specinfer.tree import Draw, Kind

# ---- coupled sampling: the same ids for a seed, whatever drafts ----

SETTINGS = {
    "plain": {"temperature": 1.0, "top_k": 0},
    "default": {"do_sample": True},
    "nucleus": {"temperature": 0.7, "top_p": 0.9},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1, "temperature": 1.3},
    "typical_p": {"typical_p": 0.8},
    "eta_cutoff": {"eta_cutoff": 0.02},
    "epsilon_cutoff": {"epsilon_cutoff": 0.01},
    "readers": {"temperature": 0.9, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}
TREES = ["auto", BestFirst(7, 4), BestFirst(20, 6), Expansion((3, 2, 1)), Chain(4), Sampled((2, 2))]
SEEDS = [11, 12, 13, 2**63 + 14]
NEW = 10  # tokens: some steps of every tree


def by_hand(model, prompt, seed, new, **options):
    """Coupled sampling as one writes it down: argmax of transformers' scores + Gumbel noise, a pass a token."""
    config, _ = model._prepare_generation_config(None, **{"do_sample": True, **options})
    model._prepare_special_tokens(config)
    processors = model._get_logits_processor(config, len(prompt), device="cpu", model_kwargs={})
    ids = list(prompt)
    for _ in range(new):
        context = torch.tensor([ids])
        with torch.no_grad():
            scores = processors(context, model(context).logits[:, -1])[0]
        noise = gumbel(key(seed, COUPLING, len(ids)), len(scores))
        ids.append(int((scores + noise).argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def alone(target):
    """The ids of every row and setting, written down by hand: no trees, no cache, no batch."""
    return {
        name: [by_hand(target, p, s, NEW, **options) for p, s in zip(PROMPTS, SEEDS, strict=True)]
        for name, options in SETTINGS.items()
    }


@pytest.mark.parametrize("setting", SETTINGS)
def test_without_speculation_ids_are_argmax_of_scores_plus_noise(target, alone, setting):
    """The definition: one row at a time and as a ragged batch with a seed each."""
    decoder = SpeculativeDecoder(target, tree=None)
    options = {"max_new_tokens": NEW, **SETTINGS[setting]}
    batch = decoder.generate(PROMPTS, seed=SEEDS, **options)
    assert [result.token_ids for result in batch] == alone[setting]
    assert [result.seed for result in batch] == SEEDS
    assert decoder.generate(PROMPTS[0], seed=SEEDS[0], **options).token_ids == alone[setting][0]


@pytest.mark.parametrize("policy", TREES, ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
def test_ids_depend_on_the_seed_and_not_on_drafts_trees_or_batch(target, near, far, alone, setting, policy):
    """Alone and in a ragged batch; every tree and every setting meets each list of drafts."""
    options = {"max_new_tokens": NEW, **SETTINGS[setting]}
    lists = (["ngram"], [near], ["ngram", near, far])
    drafts = lists[(TREES.index(policy) + [*SETTINGS].index(setting)) % len(lists)]
    decoder = SpeculativeDecoder(target, drafts=drafts, tree=policy, verifier=ExactMatch())
    batch = decoder.generate(PROMPTS, seed=SEEDS, **options)
    assert [result.token_ids for result in batch] == alone[setting]
    single = decoder.generate(PROMPTS[2], seed=SEEDS[2], **options)
    assert single.token_ids == alone[setting][2]


def test_rows_that_end_early_do_not_change_the_others(target, near):
    """With an end of sequence some rows stop first; each row is still what it is alone."""
    plain_rows = SpeculativeDecoder(target, tree=None).generate(PROMPTS, seed=SEEDS, temperature=1.0, max_new_tokens=20)
    ends = [plain_rows[0].token_ids[3], plain_rows[2].token_ids[8]]
    options = {"temperature": 1.0, "max_new_tokens": 20, "eos_token_id": ends}
    decoder = SpeculativeDecoder(target, drafts=[near, "ngram"])
    results = decoder.generate(PROMPTS, seed=SEEDS, **options)
    assert len({len(result.token_ids) for result in results}) > 1
    reference = SpeculativeDecoder(target, tree=None)
    for prompt, seed, result in zip(PROMPTS, SEEDS, results, strict=True):
        assert result.token_ids == reference.generate(prompt, seed=seed, **options).token_ids


def test_a_draft_equal_to_the_target_guesses_what_the_seed_will_choose(target):
    """Draft and target share the noise, so with the target as draft every chain is accepted."""
    decoder = SpeculativeDecoder(target, drafts=[target], tree=Chain(3))
    result = decoder.generate(PROMPTS[0], max_new_tokens=24, temperature=1.0, seed=5)
    assert [len(step.tokens) for step in result.steps] == [4] * 6


@pytest.mark.parametrize("vocab", [VOCAB + 24, VOCAB - 64])
def test_draft_vocabularies_of_other_sizes_do_not_change_sampled_ids(target, alone, vocab):
    """A padded or cut draft vocabulary only changes what is guessed."""
    decoder = SpeculativeDecoder(target, drafts=[like(target, vocab=vocab)], tree=BestFirst(9, 3))
    batch = decoder.generate(PROMPTS, seed=SEEDS, max_new_tokens=NEW, **SETTINGS["nucleus"])
    assert [result.token_ids for result in batch] == alone["nucleus"]


def test_other_seeds_give_other_texts(target):
    """Sixteen seeds, sixteen texts; equal seeds on equal prompts, equal texts."""
    decoder = SpeculativeDecoder(target)
    seeds = list(range(16))
    results = decoder.generate([[5, 9]] * 16, seed=seeds, temperature=1.0, max_new_tokens=12)
    assert len({tuple(result.token_ids) for result in results}) == 16
    one, two = decoder.generate([[5, 9]] * 2, seed=3, temperature=1.0, max_new_tokens=12)
    assert one.token_ids == two.token_ids == results[3].token_ids


@pytest.mark.parametrize("policy", [BestFirst(6, 3), Sampled((2, 1)), None])
def test_no_seed_is_torchs_global_seed(target, near, policy):
    """seed=None draws a seed from torch, says which, and follows torch.manual_seed."""
    decoder = SpeculativeDecoder(target, drafts=[near], tree=policy)
    options = {"temperature": 1.0, "max_new_tokens": 10}

    def call(**more):
        return decoder.generate([5, 9], **options, **more)

    torch.manual_seed(4)
    first, second = call(), call()
    torch.manual_seed(4)
    again = call()
    assert first.token_ids == again.token_ids != second.token_ids
    assert first.seed == again.seed != second.seed
    assert call(seed=second.seed).token_ids == second.token_ids


CHAIN = Sampled((1, 1, 1))


@pytest.mark.parametrize("policy", [Sampled((2, 2)), Sampled((3, 1), replacement=True), CHAIN])
def test_multi_step_texts_depend_on_the_rows_own_seed(target, near, policy):
    """Multi-step sampling is reproducible, and a row in a ragged batch is the row alone."""
    decoder = SpeculativeDecoder(target, drafts=[near, "ngram"], tree=policy)
    options = {"temperature": 0.8, "max_new_tokens": 16}
    batch = decoder.generate(PROMPTS, seed=SEEDS, **options)
    assert batch[0].token_ids == decoder.generate(PROMPTS, seed=SEEDS, **options)[0].token_ids
    for prompt, seed, result in zip(PROMPTS, SEEDS, batch, strict=True):
        assert result.token_ids == decoder.generate(prompt, seed=seed, **options).token_ids


# ---- the distribution ----
# Chi-square tests of the joint distribution of the first tokens, fixed seeds.  A test raises a false alarm for 1 in
# 10,000 choices of seeds; the power check must find its bias with p < 1e-6 at the same number of draws.

FALSE_ALARM, POWER = 1e-4, 1e-6
SMALL = 6  # tokens
DRAWS = 1000


@pytest.fixture(scope="module")
def small():
    return tiny_llama(3, vocab=SMALL, spread=0.4)


@pytest.fixture(scope="module")
def small_draft(small):
    return like(small, 0.6)


def p_value(model, decoder, tokens, options):
    """The p-value of the joint distribution of the first `tokens` tokens after [1, 2] against the model's softmax."""
    count = np.zeros((SMALL,) * tokens)
    for start in range(0, DRAWS, 500):
        seeds = list(range(start, min(start + 500, DRAWS)))
        for result in decoder.generate([[1, 2]] * len(seeds), seed=seeds, max_new_tokens=tokens, **options):
            count[tuple(result.token_ids)] += 1
    distribution = exact_law(model, tokens, options.get("temperature", 1.0), options.get("top_k", 0))
    assert count[distribution == 0].sum() == 0
    cells = sorted(zip(distribution[distribution > 0] * DRAWS, count[distribution > 0], strict=True))
    small_cells = [cell for cell in cells if cell[0] < 5]
    pooled = [cell for cell in cells if cell[0] >= 5]
    if small_cells:
        pooled.append(tuple(map(sum, zip(*small_cells, strict=True))))
    expected, observed = zip(*pooled, strict=True)
    return chisquare(observed, np.array(expected) * sum(observed) / sum(expected)).pvalue


def exact_law(model, tokens, temperature, top_k):
    """p(t1, t2, ...) from one plain pass over every prefix."""
    distribution = np.ones((SMALL,) * tokens)
    for place in np.ndindex(distribution.shape):
        for depth in range(tokens):
            with torch.no_grad():
                logits = model(torch.tensor([[1, 2, *place[:depth]]])).logits[0, -1] / temperature
            if top_k:
                logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
            distribution[place] *= float(logits.softmax(-1)[place[depth]])
    return distribution


PAIRS = {
    "no tree": (None, None),
    "coupled best-first": (BestFirst(4, 2), ExactMatch()),
    "coupled widths": (Expansion((2, 2)), ExactMatch()),
    "without replacement": (Sampled((3, 2)), MultiStep()),
    "with replacement": (Sampled((3, 2), replacement=True), MultiStep(replacement=True)),
    "speculative sampling": (Sampled((1, 1)), MultiStep()),
}


@pytest.mark.parametrize(("policy", "verifier"), PAIRS.values(), ids=PAIRS.keys())
def test_two_tokens_follow_the_targets_joint_law(small, small_draft, policy, verifier):
    """The first two tokens of many seeds against p(t1) p(t2 | t1), at T = 1 over all tokens."""
    decoder = SpeculativeDecoder(small, drafts=[small_draft], tree=policy, verifier=verifier)
    assert p_value(small, decoder, 2, {"temperature": 1.0, "top_k": 0}) > FALSE_ALARM


@pytest.mark.parametrize("replacement", [False, True])
def test_several_drafts_and_warpers_follow_the_law(small, small_draft, replacement):
    """Two models and the n-gram draft, temperature and top-k: each draw is tested with its own q."""
    drafts = [small_draft, like(small, 1.0, seed=5), "ngram"]
    decoder = SpeculativeDecoder(small, drafts=drafts, tree=Sampled((2, 2), replacement))
    assert p_value(small, decoder, 2, {"temperature": 0.7, "top_k": 4}) > FALSE_ALARM


def test_a_smaller_draft_vocabulary_follows_the_law(small):
    """Tokens that the draft does not know are still drawn as often as the target says."""
    decoder = SpeculativeDecoder(small, drafts=[like(small, 0.5, vocab=SMALL - 2)], tree=Sampled((2, 1)))
    assert p_value(small, decoder, 2, {"temperature": 1.0, "top_k": 0}) > FALSE_ALARM


class NoResidual(Verifier):
    """Wrong on purpose: after rejections it draws from p instead of what p is left."""

    name = "no-residual"
    kinds = frozenset(Kind)

    def verify(self, tree, target):
        """Accept by p / q, reject without remembering it."""
        path, node = [], 0
        while True:
            p = target.distribution(node)
            for draw, child in tree.draws_under(node):
                token = tree.tokens[child]
                if target.accepts(p[token] / tree.distributions[node, draw.draft][token]):
                    path.append(child)
                    node = child
                    break
            else:
                return Verdict(tuple(path), target.draw(p))


def test_the_test_of_the_law_finds_a_biased_verifier(small, small_draft):
    """Power: a verifier without a residual is found at the same number of draws."""
    decoder = SpeculativeDecoder(small, drafts=[small_draft], tree=Sampled((3, 2)), verifier=NoResidual())
    assert p_value(small, decoder, 2, {"temperature": 1.0, "top_k": 0}) < POWER


# ---- every option, against transformers' own greedy generate ----

BIAS = {(7,): 4.0, (31, 2): 5.0, (100, 7): -8.0}
OPTIONS = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[7], [31, 2], [60]]},
    "sequence_bias": {"sequence_bias": BIAS},
    "suppress_tokens": {"suppress_tokens": [7, 9, 31]},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(0, VOCAB, 2))},
    "forced_eos_token_id": {"forced_eos_token_id": 3, "eos_token_id": 3},
    "forced_bos_token_id": {"forced_bos_token_id": 8},
    "renormalize_logits": {"renormalize_logits": True},
    "remove_invalid_values": {"remove_invalid_values": True},
    "all at once": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[9]],
        "suppress_tokens": [31],
        "sequence_bias": BIAS,
    },
}
POLICIES = [BestFirst(9, 4), Expansion((2, 2, 1))]


def engine(target, near, policy, tokenizer=None):
    return SpeculativeDecoder(target, tokenizer, drafts=[near, "ngram"], tree=policy)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options_mean_what_they_mean_to_generate(target, near, options, policy):
    """Greedy ids under each option equal transformers', alone and each row of a batch as if alone."""
    decoder = engine(target, near, policy)
    wanted = [plain(target, prompt, 16, **options) for prompt in PROMPTS]
    assert [r.token_ids for r in decoder.generate(PROMPTS, max_new_tokens=16, **options)] == wanted
    assert decoder.generate(PROMPTS[2], max_new_tokens=16, **options).token_ids == wanted[2]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"min_new_tokens": 9},
        {"min_length": 14},
        {"exponential_decay_length_penalty": (4, 1.6)},
        {"bad_words_ids": [[7]], "min_new_tokens": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_options_about_the_end_of_sequence(target, near, options, policy):
    """Two ids end a text; minimum lengths and growing impatience act on both."""
    text = plain(target, PROMPTS[2])
    options = {"eos_token_id": [text[4], text[9]], **options}
    decoder = engine(target, near, policy)
    results = decoder.generate(PROMPTS, max_new_tokens=24, **options)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.token_ids == plain(target, prompt, **options)


def test_min_new_tokens_wins_over_min_length(target, near):
    """transformers lets min_new_tokens override min_length where both are given."""
    text = plain(target, PROMPTS[2])
    options = {"eos_token_id": text[4], "min_length": 30, "min_new_tokens": 2}
    result = engine(target, near, Chain(3)).generate(PROMPTS[2], max_new_tokens=24, **options)
    assert result.token_ids == plain(target, PROMPTS[2], **options)


def test_the_beginning_is_after_a_forced_first_token(target, near):
    """begin_suppress_tokens acts on the second token where the first one is forced after a prompt of one."""
    options = {"forced_bos_token_id": 8, "begin_suppress_tokens": list(range(0, VOCAB, 2))}
    result = engine(target, near, Chain(3)).generate([40], max_new_tokens=8, **options)
    assert result.token_ids == plain(target, [40], 8, **options)


def test_options_differ_from_no_options(target):
    """Power: most options above do change the text, so the comparisons compare something."""
    base = [plain(target, prompt, 16) for prompt in PROMPTS]
    changed = [[plain(target, p, 16, **options) for p in PROMPTS] != base for options in OPTIONS.values()]
    assert sum(changed) >= 8


def test_max_length_counts_the_prompt(target, near):
    """Per row, as if alone; max_new_tokens wins where both are given; neither means the default."""
    decoder = engine(target, near, BestFirst(9, 4))
    for prompt, result in zip(PROMPTS, decoder.generate(PROMPTS, max_length=15), strict=True):
        assert result.token_ids == plain(target, prompt, max_new_tokens=None, max_length=15)
        assert len(result.token_ids) == 15 - len(prompt)
    assert len(decoder.generate([1], max_length=50, max_new_tokens=3).token_ids) == 3
    assert len(decoder.generate([1]).token_ids) == DEFAULT_MAX_NEW_TOKENS


def test_a_length_takes_the_place_of_the_models_own():
    """A least number of tokens is compared with the one that counts."""
    config = GenerationConfig(max_new_tokens=5)
    settings = resolve(config, max_length=50, min_new_tokens=7)
    assert settings.budget(10) == 40
    with pytest.raises(SamplingError, match="min_new_tokens=7 exceeds max_new_tokens=5"):
        resolve(config, min_new_tokens=7)
    with pytest.raises(SamplingError, match=r"min_new_tokens=200 exceeds the 128 .*: give max_new_tokens"):
        resolve(GenerationConfig(), min_new_tokens=200)


def test_max_time_ends_the_text(target, near):
    """A spent time budget ends the text after its first token, as it does in transformers."""
    decoder = engine(target, near, Chain(3))
    result = decoder.generate(PROMPTS[0], max_time=1e-9, max_new_tokens=50)
    assert result.finish_reason == "stop"
    assert result.token_ids == plain(target, PROMPTS[0], 1)
    assert len(decoder.generate(PROMPTS[0], max_time=600, max_new_tokens=5).token_ids) == 5

    def slow(input_ids, scores):
        time.sleep(0.02)
        return scores

    assert len(decoder.generate([1], max_time=0.1, max_new_tokens=99, logits_processor=[slow]).token_ids) < 50


@pytest.mark.parametrize("strings", ["END", ["xx", "ND"], ["n E"]])
def test_stop_strings_end_where_they_do_in_generate(target, near, tokenizer, strings):
    """One or several stop strings, over tokens of several branches."""
    prompt = list(b"say ")
    force = following(tokenizer("so then END or not")["input_ids"], len(prompt))
    options = {"stop_strings": strings, "max_new_tokens": 18}
    wanted = plain(target, prompt, tokenizer=tokenizer, logits_processor=LogitsProcessorList([force]), **options)
    decoder = engine(target, near, BestFirst(9, 4), tokenizer)
    result = decoder.generate(prompt, logits_processor=[force], **options)
    assert result.token_ids == wanted
    assert result.finish_reason == "stop"


def test_a_custom_processor_sees_each_nodes_own_path(target, near):
    """Every prefix it is asked about is the prompt, what was emitted, then a path of the step's tree."""
    prompt, seen = PROMPTS[2], []

    def watch(input_ids, scores):
        seen.extend(input_ids.tolist())
        shifted = scores.clone()  # depends on the last two tokens, so a wrong prefix changes the text
        shifted[torch.arange(len(input_ids)), input_ids[:, -1] * 7 % VOCAB] += 3.0
        shifted[torch.arange(len(input_ids)), input_ids[:, -2] * 5 % VOCAB] += 3.0
        return shifted

    wanted = plain(target, prompt, logits_processor=LogitsProcessorList([watch]))
    seen.clear()
    result = engine(target, near, Expansion((3, 2, 1))).generate(prompt, max_new_tokens=24, logits_processor=[watch])
    assert result.token_ids == wanted
    allowed, ids = set(), list(prompt)
    for step in result.steps:
        allowed |= {(*ids, *step.tree.path(node)) for node in range(len(step.tree))}
        ids += step.tokens
    assert {tuple(path) for path in seen} <= allowed
    assert {(*prompt, *wanted[:i]) for i in range(24)} <= {tuple(path) for path in seen}


def test_custom_processors_act_in_a_batch_as_alone(target, near):
    """A processor that reads the whole prefix treats each row of a batch as that row alone."""

    def odd_out(input_ids, scores):
        tilt = torch.arange(VOCAB) * input_ids.sum(1, keepdim=True) % 11
        return scores + tilt.to(scores.dtype)

    decoder = engine(target, near, BestFirst(9, 4))
    processors = LogitsProcessorList([odd_out])
    for options in ({}, {"temperature": 1.0, "seed": 3}):
        batch = decoder.generate(PROMPTS, max_new_tokens=12, logits_processor=processors, **options)
        for prompt, result in zip(PROMPTS, batch, strict=True):
            reference = SpeculativeDecoder(target, tree=None)
            alone = reference.generate(prompt, max_new_tokens=12, logits_processor=[odd_out], **options)
            assert result.token_ids == alone.token_ids
            if not options:
                assert result.token_ids == plain(target, prompt, 12, logits_processor=processors)


def test_a_custom_processor_replaces_transformers_own_of_its_type(target, near):
    """transformers drops its own processor where the caller brings one of the same class; so do we."""
    mine = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)])
    options = {"repetition_penalty": 1.9, "max_new_tokens": 20}
    result = engine(target, near, Chain(3)).generate(PROMPTS[2], logits_processor=mine, **options)
    assert result.token_ids == plain(target, PROMPTS[2], logits_processor=mine, **options)


def test_custom_stopping_criteria_are_asked_after_every_token(target, near):
    """A criterion that fires inside an accepted path cuts there."""
    text, prompt = plain(target, PROMPTS[2]), len(PROMPTS[2])
    for place in range(6):
        seen = []

        def stop(input_ids, scores, end=prompt + place + 1, seen=seen):
            seen.append(input_ids.shape)
            return torch.full((len(input_ids),), input_ids.shape[1] >= end)

        criteria = StoppingCriteriaList([stop])
        decoder = SpeculativeDecoder(target, drafts=[target], tree=Chain(4))
        result = decoder.generate(PROMPTS[2], max_new_tokens=24, stopping_criteria=criteria)
        assert result.token_ids == text[: place + 1]
        assert result.finish_reason == "stop"
        assert seen == [(1, prompt + i + 1) for i in range(place + 1)]


# ---- generation configs ----


def test_a_generation_config_is_taken_whole(target, near):
    """Options may come as one object; keyword options go on top; the object is not changed."""
    config = GenerationConfig(repetition_penalty=1.7, max_new_tokens=12, eos_token_id=300)
    before = config.to_dict()
    decoder = engine(target, near, BestFirst(9, 4))
    wanted = plain(target, PROMPTS[2], 12, repetition_penalty=1.7)
    assert decoder.generate(PROMPTS[2], generation_config=config).token_ids == wanted
    more = decoder.generate(PROMPTS[2], generation_config=config, no_repeat_ngram_size=2, max_new_tokens=20)
    assert more.token_ids == plain(target, PROMPTS[2], 20, repetition_penalty=1.7, no_repeat_ngram_size=2)
    assert config.to_dict() == before
    sampled = GenerationConfig(do_sample=True, top_k=3, temperature=0.6, max_new_tokens=10)
    reference = by_hand(target, [5], 2, 10, top_k=3, temperature=0.6)
    assert decoder.generate([5], generation_config=sampled, seed=2).token_ids == reference


def test_the_checkpoints_own_generation_config_lies_underneath():
    """A checkpoint's sampling settings, penalties and ends hold unless the call says otherwise."""
    model = tiny_llama(0)
    text = plain(model, [5, 9])
    model.generation_config.update(repetition_penalty=1.7, eos_token_id=[text[3], 300], max_new_tokens=9)
    before = model.generation_config.to_dict()
    decoder = SpeculativeDecoder(model)
    wanted = plain(model, [5, 9], None)
    assert decoder.generate([5, 9]).token_ids == wanted
    assert len(wanted) <= 9
    config = GenerationConfig(repetition_penalty=1.0, max_new_tokens=14)
    wanted = plain(model, [5, 9], None, do_sample=None, pad_token_id=None, generation_config=config)
    assert decoder.generate([5, 9], generation_config=config).token_ids == wanted
    model.generation_config.update(do_sample=True, temperature=0.6, top_k=4, top_p=0.95)
    reference = by_hand(model, [5, 9], 1, 3)
    assert decoder.generate([5, 9], seed=1).token_ids[:3] == reference
    assert decoder.generate([5, 9], temperature=0).token_ids == plain(model, [5, 9], None, do_sample=False)
    assert decoder.generate([5, 9], temperature=0).seed is None
    assert before.items() <= {**model.generation_config.to_dict(), **before}.items()


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({}, False),
        ({"temperature": 0}, False),
        ({"temperature": 0.5}, True),
        ({"top_p": 0.9}, True),
        ({"top_k": 5}, True),
        ({"min_p": 0.1}, True),
        ({"do_sample": True}, True),
        ({"do_sample": False}, False),
        ({"repetition_penalty": 1.2}, False),
        ({"temperature": None, "top_p": None, "top_k": None}, False),
    ],
    ids=str,
)
def test_which_options_mean_sampling(options, sampling):
    """A temperature or a warper given without do_sample means sampling; temperature 0 means greedy."""
    settings = resolve(GenerationConfig(), **options)
    assert settings.do_sample is sampling
    if sampling and "top_k" not in options:
        assert settings.config.top_k == 50  # transformers' default, not none


def test_greedy_ignores_a_checkpoints_temperature_of_zero():
    """A checkpoint that writes greedy decoding as temperature 0 decodes greedily."""
    model = tiny_llama(0)
    model.generation_config.temperature = 0.0
    decoder = SpeculativeDecoder(model)
    assert decoder.generate([5], max_new_tokens=4).token_ids == plain(tiny_llama(0), [5], 4)


# ---- Processors: the processors that transformers builds ----


WARPERS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")


@pytest.mark.parametrize("greedy", [{"temperature": 0}, {"do_sample": False}])
@pytest.mark.parametrize("warper", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"typical_p": 0.5}])
def test_greedy_and_a_warper_contradict_each_other(greedy, warper):
    """An option that only sampling has is refused by name where nothing is sampled."""
    with pytest.raises(SamplingError, match=next(iter(warper))):
        resolve(tiny_llama(0).generation_config, **greedy, **warper)


def random_config(rng):
    """A random mixture of options, each present now and then."""
    choices = {
        "temperature": [0.3, 0.8, 1.0, 1.7],
        "top_k": [0, 1, 3, 10, 500],
        "top_p": [0.1, 0.6, 0.95, 1.0],
        "min_p": [0.0, 0.05, 0.4],
        "typical_p": [0.2, 0.9, 1.0],
        "epsilon_cutoff": [0.0, 0.001, 0.05],
        "eta_cutoff": [0.0, 0.002, 0.1],
        "top_h": [0.3, 0.8],
        "repetition_penalty": [0.8, 1.0, 1.4],
        "no_repeat_ngram_size": [0, 1, 2],
        "bad_words_ids": [[[3]], [[4, 5], [6]]],
        "min_length": [0, 4, 9],
        "min_new_tokens": [1, 3],
        "eos_token_id": [2, [2, 5]],
        "forced_bos_token_id": [6],
        "forced_eos_token_id": [2],
        "exponential_decay_length_penalty": [(1, 1.5)],
        "suppress_tokens": [[1, 8]],
        "begin_suppress_tokens": [[2, 3]],
        "sequence_bias": [{(3,): 1.5, (4, 5): -2.0}],
        "renormalize_logits": [True],
        "remove_invalid_values": [True],
    }
    picked = {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.3}
    if picked.get("exponential_decay_length_penalty"):
        picked.setdefault("eos_token_id", 2)
    if "min_new_tokens" in picked:
        picked.pop("min_length", None)  # together they have a test of their own
    if "forced_bos_token_id" in picked:
        picked.pop("begin_suppress_tokens", None)  # likewise
    sampling = rng.random() < 0.7
    if not sampling:
        for name in (*WARPERS, "renormalize_logits"):  # refused, and a shift of all scores alike
            picked.pop(name, None)
    return {"max_new_tokens": 8, "do_sample": sampling, **picked}


def test_scores_are_those_of_transformers_processors():
    """400 random mixtures of options on random logits and paths: scores equal bit for bit."""
    rng = random.Random(0)
    torch.manual_seed(0)
    vocab, model, impossible = 12, tiny_llama(0, vocab=12), 0
    for _ in range(400):
        options = random_config(rng)
        prompt = [rng.randrange(vocab) for _ in range(rng.choice([1, 2, 5]))]
        depth = rng.randrange(8)
        config, _ = model._prepare_generation_config(None, **options)
        model._prepare_special_tokens(config)
        config = model._prepare_generated_length(config, True, True, "input_ids", len(prompt), None)
        processors = model._get_logits_processor(config, len(prompt), device="cpu", model_kwargs={})
        settings = resolve(model.generation_config, **options)
        distribution = Processors.of(settings, len(prompt), torch.device("cpu"))
        paths = [[*prompt, *(rng.randrange(vocab) for _ in range(depth))] for _ in range(3)]
        logits = torch.randn(3, vocab) * rng.choice([0.5, 2.0, 5.0])
        untouched = logits.clone()
        rows = zip(paths, logits, strict=True)
        try:
            wanted = torch.cat([processors(torch.tensor([path]), row[None].clone()) for path, row in rows])
        except ValueError:  # a mixture that leaves top-h nothing to measure
            impossible += 1
            continue
        assert torch.allclose(distribution.scores(logits, paths), wanted, rtol=0, atol=0, equal_nan=True), options
        assert torch.equal(logits, untouched)
    assert impossible < 40


def test_paths_of_many_lengths_are_processed_each_by_itself():
    """Nodes of several depths in one call: the same scores as one by one."""
    settings = resolve(GenerationConfig(), repetition_penalty=1.5, no_repeat_ngram_size=2, max_new_tokens=9)
    distribution = Processors.of(settings, 2, torch.device("cpu"))
    paths = [[1, 2], [1, 2, 1], [1, 2, 2], [1, 2, 1, 2], [1, 2, 3]]
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    together = distribution.scores(logits, paths)
    for row, path in enumerate(paths):
        assert torch.equal(together[row], distribution.scores(logits[row : row + 1], [path])[0])


def test_half_precision_logits_are_processed_in_float32():
    """As transformers does: scores of bfloat16 logits are float32, those of float64 stay."""
    distribution = Processors.of(resolve(GenerationConfig(), temperature=0.7), 1, torch.device("cpu"))
    assert distribution.scores(torch.randn(1, 80).bfloat16(), ()).dtype == torch.float32
    assert distribution.scores(torch.randn(1, 80).double(), ()).dtype == torch.float64
    assert not distribution.reads_path


# ---- what cannot work with trees ----

REFUSED = {
    "num_beams": 2,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "constraints": [object()],
    "force_words_ids": [[1]],
    "dola_layers": "low",
    "guidance_scale": 1.5,
    "watermarking_config": {"bias": 1.0},
    "token_healing": True,
    "num_assistant_tokens": 5,
    "assistant_confidence_threshold": 0.9,
    "encoder_repetition_penalty": 1.2,
    "encoder_no_repeat_ngram_size": 2,
    "decoder_start_token_id": 1,
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 2,
    "is_assistant": True,
    "assistant_lookbehind": 5,
    "target_lookbehind": 5,
    "disable_compile": True,
    "use_mtp": True,
    "output_attentions": True,
    "output_hidden_states": True,
    "output_scores": True,
    "output_logits": True,
    "cache_implementation": "static",
    "use_cache": False,
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_cannot_work_with_trees_are_refused_by_name(target, name):
    """As an option and within a generation config; no model runs, and the reason is given."""
    decoder = SpeculativeDecoder(target)
    config = GenerationConfig()
    setattr(config, name, REFUSED[name])
    for options in ({name: REFUSED[name]}, {"generation_config": config}):
        with counted(target) as passes, pytest.raises(SamplingError, match=f"{name}=.*trees: .+"):
            decoder.generate([1, 2], max_new_tokens=2, **options)
        assert not passes


@pytest.mark.parametrize(
    "options",
    [{"bad_words_ids": [3]}, {"sequence_bias": {(): 1.0}}, {"suppress_tokens": "x"}],
    ids=str,
)
def test_values_that_processors_reject_are_sampling_errors(target, options):
    """What transformers' processors refuse reaches the user as our error, with the option's name, before a pass."""
    decoder = SpeculativeDecoder(target)
    with counted(target) as passes, pytest.raises(SamplingError, match=next(iter(options))):
        decoder.generate([1, 2], max_new_tokens=2, **options)
    assert not passes


def test_neutral_values_of_refused_options_are_accepted(target):
    """A config that spells out the defaults is no beam search."""
    neutral = {"num_beams": 1, "guidance_scale": 1.0, "use_cache": True, "num_return_sequences": 1}
    assert SpeculativeDecoder(target).generate([5], max_new_tokens=3, **neutral).token_ids == plain(target, [5], 3)


def test_an_end_of_text_token_ends_the_text_and_is_not_part_of_it(target, near):
    """The id is in token_ids, the token is not in the text."""
    tokenizer = byte_tokenizer()
    script = [*tokenizer("yes")["input_ids"], EOS_TEXT]
    decoder = engine(target, near, Chain(2), tokenizer)
    options = {"logits_processor": [following(script, 1)], "eos_token_id": EOS_TEXT, "max_new_tokens": 9}
    result = decoder.generate([1], **options)
    assert (result.text, result.token_ids) == ("yes", script)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "repetition_penalty": 1.3, "top_p": 0.9}], ids=str)
def test_choices_made_together_are_those_made_one_by_one(monkeypatch, target, options):
    """What a GPU is asked for at once, against what a CPU is asked node by node."""
    seen = []

    def watched(rows, trees, logits):
        views, others = target_views(rows, trees, logits), target_views(rows, trees, logits)
        choose_at_once([(view, range(len(view.tree))) for view in others])
        for view, other in zip(views, others, strict=True):
            nodes = range(len(view.tree))
            assert [other.choice(node) for node in nodes] == [view.choice(node) for node in nodes]
            assert [other._chosen[node][1] for node in nodes] == pytest.approx([_largest(view, n) for n in nodes])
        seen.extend(views)
        return views

    monkeypatch.setattr("specinfer.engine.loop.target_views", watched)
    SpeculativeDecoder(target, drafts="ngram", tree=BestFirst(6, 3)).generate(PROMPTS, max_new_tokens=12, **options)
    assert max(len(view.tree) for view in seen) > 3


def _largest(view, node):
    noise = view.noise(node)
    return float((view.scores(node) + (0 if noise is None else noise)).max())


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_k": 0}, {"temperature": 0.8, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("tree", [BestFirst(6, 3), Sampled((2, 2))], ids=str)
def test_a_tree_is_verified_on_given_logits_as_in_a_decode_step(target, tree, options):
    """The steps of a text once more, each from its own tree and logits."""
    if isinstance(tree, Sampled) and not options:
        options = {"temperature": 1.0}
    seen = []

    class Watched(type(chosen_verifier(None, tree.kind))):
        def verify(self, grown, view):
            verdict = super().verify(grown, view)
            seen.append((grown, view.logits.clone(), list(view.row.ids[:-1]), verdict))
            return verdict

    SpeculativeDecoder(target, drafts=[target], tree=tree, verifier=Watched()).generate(
        PROMPTS[0], max_new_tokens=12, seed=5, **options
    )
    for grown, logits, prefix, verdict in seen:
        assert verify_tree(grown, logits[: len(grown)], prefix=prefix, seed=5, **options) == verdict
    assert max(len(grown) for grown, *_ in seen) > 3


def test_logits_that_are_not_the_trees_are_refused():
    tree = TokenTree.from_nodes(1, [4], [0], [-1.0], [[Draw(0, 0)]])
    assert verify_tree(tree, torch.eye(6)[[4, 2]]) == ((1,), 2)
    for shape in ((1, 6), (2, 4), (6,), (1, 2, 6)):
        with pytest.raises(InputError, match="logits"):
            verify_tree(tree, torch.zeros(shape))
    with pytest.raises(PairingError):
        verify_tree(tree, torch.zeros(2, 6), verifier=MultiStep())
    for wrong in ({"seed": "x"}, {"seed": 1.5}, {"prefix": "abc"}, {"prefix": [9]}):
        with pytest.raises(InputError):
            verify_tree(tree, torch.zeros(2, 6), **wrong)
    distribution = {(0, 0): np.full(5, 0.2)}
    sampled = TokenTree.from_nodes(1, [4], [0], [-1.0], [[Draw(0, 0)]], distribution, Kind.IID)
    with pytest.raises(InputError, match="distributions"):
        verify_tree(sampled, torch.zeros(2, 6))
    with pytest.raises(SamplingError):
        verify_tree(tree, torch.zeros(2, 6), temprature=1)


def test_a_step_s_logits_go_with_it(target):
    """They are large, and nobody waits for the collector of cycles on a GPU."""
    gone, alive = [], []

    class Watched(ExactMatch):
        def verify(self, tree, view):
            alive.append(sum(own() is not None for own in gone))
            gone.append(weakref.ref(view))
            return super().verify(tree, view)

    gc.collect()
    gc.disable()
    try:
        SpeculativeDecoder(target, drafts="ngram", tree=BestFirst(6, 3), verifier=Watched()).generate(
            PROMPTS[0], max_new_tokens=24
        )
    finally:
        gc.enable()
    assert len(gone) > 5
    assert max(alive) <= 1, "the step before"
