"""The log-likelihood of continuations: against plain passes and transformers' own figures."""

import random
from contextlib import contextmanager

import pytest
import torch
from conftest import PROMPTS, byte_tokenizer, counted, like, tiny_llama
from torch.nn.functional import log_softmax
from transformers import AutoConfig, AutoModelForCausalLM

import specinfer.calls.scoring
from specinfer import SpeculativeDecoder, check_model
from specinfer.calls.scoring import Score
from specinfer.errors import InputError, NumericalError, UnsupportedModel

CONTINUATIONS = [[7, 7, 8], [1], [200, 3, 5, 9, 100, 4, 4], [0, 263]]


@pytest.fixture(scope="module")
def decoder(target):
    return SpeculativeDecoder(target, byte_tokenizer(), ["ngram", like(target)])


def by_hand(model, prompt, continuation):
    """Log-probabilities, and whether each token is the argmax, of one plain pass over everything."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *continuation]])).logits[0, len(prompt) - 1 : -1]
    distributions = log_softmax(logits, -1)
    return [float(distributions[i, t]) for i, t in enumerate(continuation)], [
        int(distributions[i].argmax()) == t for i, t in enumerate(continuation)
    ]


@pytest.mark.parametrize("scored", [256, 8, 4])
def test_scores_are_those_of_a_plain_pass(decoder, target, monkeypatch, scored):
    """One by one and as a ragged batch, in passes of any size."""
    monkeypatch.setattr(specinfer.calls.scoring, "SCORED", scored)
    batch = decoder.score(PROMPTS, CONTINUATIONS)
    for prompt, continuation, own in zip(PROMPTS, CONTINUATIONS, batch, strict=True):
        wanted, greedy = by_hand(target, prompt, continuation)
        for found in (own, decoder.score(prompt, continuation)):
            assert isinstance(found, Score)
            assert found.token_ids == continuation
            assert found.log_probabilities == pytest.approx(wanted, abs=1e-9)
            assert found.greedy == greedy
            assert found.total == pytest.approx(sum(wanted))


def test_scores_are_transformers_transition_scores(decoder, target):
    prompt = torch.tensor([PROMPTS[0]])
    options = {"max_new_tokens": 6, "do_sample": True, "top_k": 0, "output_logits": True, "pad_token_id": 0}
    torch.manual_seed(3)
    output = target.generate(prompt, return_dict_in_generate=True, **options)
    wanted = target.compute_transition_scores(output.sequences, output.logits, normalize_logits=True)[0]
    found = decoder.score(prompt[0], output.sequences[0, prompt.shape[1] :])
    assert found.log_probabilities == pytest.approx(wanted.tolist(), abs=1e-5)


def test_greedy_text_is_greedy_and_any_other_is_not(decoder):
    result = decoder.generate(PROMPTS[0], max_new_tokens=9, temperature=0)
    assert decoder.score(PROMPTS[0], result.token_ids).is_greedy
    other = [*result.token_ids[:4], (result.token_ids[4] + 1) % 256]
    assert decoder.score(PROMPTS[0], other).greedy == [True] * 4 + [False]


def test_probabilities_of_all_continuations_sum_to_one(target):
    decoder = SpeculativeDecoder(target, None, (), None)
    scores = decoder.score([PROMPTS[0]] * 264, [[token] for token in range(264)])
    assert sum(torch.tensor([own.total for own in scores]).exp()) == pytest.approx(1)
    assert sum(own.is_greedy for own in scores) == 1


def test_no_processor_of_the_model_changes_a_score(decoder, target, monkeypatch):
    wanted = decoder.score(PROMPTS[0], CONTINUATIONS[0])
    for name, value in (("temperature", 0.3), ("repetition_penalty", 3.0), ("do_sample", True), ("top_k", 2)):
        monkeypatch.setattr(target.generation_config, name, value)
    assert decoder.score(PROMPTS[0], CONTINUATIONS[0]) == wanted


def test_text_is_encoded_without_special_tokens(decoder):
    found = decoder.score("say ", "well 🌳")
    assert len(found.token_ids) == len("well 🌳".encode())
    assert found == decoder.score(decoder.tokenizer("say ")["input_ids"], decoder.tokenizer("well 🌳")["input_ids"])
    assert found.to_dict()["total"] == found.total


def test_a_long_continuation_takes_few_passes_and_drafts_none(target, near):
    decoder = SpeculativeDecoder(target, None, [near])
    with counted(target, near) as passes:
        decoder.score([list(range(40)), [5]], [[7] * 150, [8] * 10])
    assert passes == [target] * 3  # the prompts, then 128 and 22 tokens a row


@contextmanager
def fed(model):
    """The rows and the tokens of every pass, and for how many of these a row gets logits."""
    passes = []

    def note(module, _, given, output):
        ids = given["input_ids"]
        passes.append((*ids.shape, output.logits.shape[1]))

    hook = model.register_forward_hook(note, with_kwargs=True)
    check_model(model)
    passes.clear()
    try:
        yield passes
    finally:
        hook.remove()


def test_the_choices_of_a_question_are_read_once_and_scored_in_one_pass(target):
    """Four choices of three questions: the questions' tokens without the last, then a tree of each."""
    decoder = SpeculativeDecoder(target, None, (), None)
    contexts = [[*range(9)], [7] * 5, [8, 9, 7, 1]]
    choices = [[4, 5, 6], [4, 5, 7, 8], [4], [9, 9]]
    pairs = [(context, choice) for choice in choices for context in contexts]
    with fed(target) as passes:
        found = decoder.score(*map(list, zip(*pairs, strict=True)))
    assert passes == [(3, 8, 1), (3, 1 + 4, 5)]  # below the root: 4, 5, 7, and 9
    for score, (context, choice) in zip(found, pairs, strict=True):
        assert score.log_probabilities == pytest.approx(by_hand(target, context, choice)[0], abs=1e-9)


def test_what_questions_have_in_common_is_read_once(target):
    """Few-shot examples, say."""
    decoder = SpeculativeDecoder(target, None, (), None)
    examples = [*range(40)]
    with fed(target) as passes:
        decoder.score([[*examples, 50, 51], [*examples, 60, 61]], [[1], [2]])
    assert passes == [(1, 40, 1), (2, 1, 1), (2, 1, 1)]


@pytest.mark.parametrize(("scored", "max_rows"), [(256, 16), (12, 3), (1, 1)])
@pytest.mark.parametrize("seed", [0, 1])
def test_any_mixture_of_prompts_and_continuations(decoder, target, monkeypatch, scored, max_rows, seed):
    """Few prompts and many continuations, some of them twice or the beginning of another; in the given order."""
    monkeypatch.setattr(specinfer.calls.scoring, "SCORED", scored)
    chance = random.Random(seed)
    prompts = [[chance.randrange(9) for _ in range(chance.randint(1, 20))] for _ in range(5)]
    pairs = [(chance.choice(prompts), [chance.randrange(3) for _ in range(chance.randint(1, 6))]) for _ in range(30)]
    with fed(target) as passes:
        found = decoder.score(*map(list, zip(*pairs, strict=True)), max_rows=max_rows)
    assert max(rows for rows, *_ in passes) <= max_rows
    assert max(rows * logits for rows, _, logits in passes) <= max(scored, max_rows)
    for score, (prompt, continuation) in zip(found, pairs, strict=True):
        wanted, greedy = by_hand(target, prompt, continuation)
        assert score.token_ids == continuation
        assert score.log_probabilities == pytest.approx(wanted, abs=1e-9)
        assert score.greedy == greedy


def test_a_model_that_scores_chains_only_reads_each_continuation_alone():
    sizes = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256, "vocab_size": 264, "eos_token_id": None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mpt", **sizes, attn_config={"alibi": True}))
    model = model.double().eval()
    found = SpeculativeDecoder(model, None, (), None).score([PROMPTS[0]] * 2, [[4, 5, 6], [4, 7]])
    for score, continuation in zip(found, ([4, 5, 6], [4, 7]), strict=True):
        assert score.log_probabilities == pytest.approx(by_hand(model, PROMPTS[0], continuation)[0], abs=1e-5)


def test_models_are_left_as_they_were():
    model = tiny_llama(attention_dropout=0.5)
    decoder = SpeculativeDecoder(model, None, (), None)
    wanted = decoder.score(PROMPTS[0], CONTINUATIONS[0])
    model.train()
    assert decoder.score(PROMPTS[0], CONTINUATIONS[0]) == wanted
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("prompt", "continuation", "message"),
    [
        ([1, 2], [], "the continuation is empty"),
        ("a", "", "the continuation is empty"),
        ([1, 2], [264], "264 is not in the target's vocabulary"),
        ([1, 2], ["a", "b"], "'a' is not in the target's vocabulary"),
        ([1, 2], 5, "must be text or token ids, not int"),
        ([[1], [2]], [[1]], "2 prompts and 1 continuations"),
        (["a", "b"], "no", "a list of continuations"),
        (["a", "b"], None, "a list of continuations"),
        ([1] * 200, [2] * 58, "exceed the target's context of 256"),
        ([], [1], "the prompt is empty"),
    ],
)
def test_what_cannot_be_scored_is_named_before_a_model_runs(decoder, target, prompt, continuation, message):
    with counted(target) as passes, pytest.raises(InputError, match=message):
        decoder.score(prompt, continuation)
    assert not passes


@pytest.mark.parametrize("length", [57, 256])
def test_the_last_token_of_a_continuation_needs_no_room_in_the_context(decoder, target, length):
    """No pass reads it: in a context of 256, 257 tokens are scored."""
    prompt, continuation = [1] * (257 - length), [*range(2, 1 + length), 5]
    found, (wanted, _) = decoder.score(prompt, continuation), by_hand(target, prompt, continuation)
    assert found.log_probabilities == pytest.approx(wanted)


def test_text_without_a_tokenizer_is_refused(target):
    with pytest.raises(InputError, match="needs a tokenizer"):
        SpeculativeDecoder(target, None, (), None).score([1], "text")


def test_a_model_whose_tokens_disturb_each_other_is_refused():
    model = tiny_llama()
    decoder = SpeculativeDecoder(model, None, (), None)
    model.model.norm.register_forward_hook(lambda module, given, output: output - output.mean(1, keepdim=True))
    with pytest.raises(UnsupportedModel, match="later tokens or other rows"):
        decoder.score([1, 2], [3])


def test_logits_that_are_no_numbers_are_named():
    model = tiny_llama()
    decoder = SpeculativeDecoder(model, None, (), None)
    with torch.no_grad():
        model.lm_head.weight[0] = float("nan")
    with pytest.raises(NumericalError, match="row 0"):
        decoder.score([1, 2], [3])


def test_padding_is_no_part_of_a_prompt(decoder):
    """As in `generate`: taken out where a mask says so, refused where it only looks like it."""
    alone = [decoder.score(ids, [7, 8]) for ids in ([3, 1, 4], [5, 9, 2, 6, 5])]
    pad = decoder.tokenizer.pad_token_id
    ids = torch.tensor([[pad, pad, 3, 1, 4], [5, 9, 2, 6, 5]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    together = decoder.score({"input_ids": ids, "attention_mask": mask}, [[7, 8]] * 2)
    assert [own.token_ids for own in together] == [own.token_ids for own in alone]
    for one, other in zip(together, alone, strict=True):
        assert one.log_probabilities == pytest.approx(other.log_probabilities, abs=1e-5)
    with pytest.raises(InputError, match="looks padded"):
        decoder.score(ids, [[7, 8]] * 2)


def test_half_a_surrogate_pair_is_refused(decoder):
    with pytest.raises(InputError, match="refuses"):
        decoder.score([3, 1], "\ud800")
