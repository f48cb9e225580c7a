"""Contrastive search by tree gives the ids of a plain reference, with and without drafts."""

from collections import deque
from functools import cache
from typing import Any

import pytest
import torch
from conftest import PROMPTS, Scripted, byte_tokenizer, counted, following, like, plain
from torch.nn.functional import normalize
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

import specinfer
from specinfer import BestFirst, Sampled, SpeculativeDecoder
from specinfer.attention import Support
from specinfer.errors import InputError, SamplingError, UnsupportedModel
from specinfer.viz.description import describe

NEW = 10


@cache
def text(model: Any, prompt: tuple[int, ...], alpha: float, k: int, new: int, eos: int, process: Any) -> list[int]:
    """Contrastive search by its definition (arXiv 2202.06417): fresh passes over the whole text, without a cache."""

    def read(*rows: list[int]) -> tuple[Any, Any]:
        with torch.inference_mode():
            out = model(torch.tensor(rows), output_hidden_states=True)
        return out.logits[:, -1], normalize(out.hidden_states[-1], dim=-1)

    ids = list(prompt)
    while len(ids) < len(prompt) + new and eos not in ids[len(prompt) :]:
        logits, (before,) = read(ids)
        scores = (process(torch.tensor([ids]), logits.clone()) if process else logits)[0]
        probabilities, tokens = scores.softmax(-1).topk(k)
        _, after = read(*([*ids, token] for token in tokens.tolist()))
        penalties = (after[:, -1] @ before.T).amax(1)
        ids.append(int(tokens[((1 - alpha) * probabilities - alpha * penalties).argmax()]))
    return ids[len(prompt) :]


def reference(
    model: Any, prompt: Any, alpha: float, k: int, new: int = NEW, eos: int = -1, process: Any = None
) -> list[int]:
    return text(model, tuple(prompt), alpha, k, new, eos, process)


def ids_of(results: Any) -> list[list[int]]:
    return [result.token_ids for result in results]


DRAFTS = {
    "none": lambda near: ((), None),
    "no tree": lambda near: ((), BestFirst(0, 0)),
    "ngram": lambda near: (["ngram"], "auto"),
    "model": lambda near: ([near], BestFirst(64, 4)),
    "both": lambda near: ([near, "ngram"], "auto"),
}


@pytest.mark.parametrize(("alpha", "k"), [(0.0, 3), (0.3, 2), (0.6, 4), (0.6, 1), (1.0, 8)])
@pytest.mark.parametrize("drafts", DRAFTS)
def test_ids_are_those_of_a_plain_reference(target, near, drafts, alpha, k):
    """Ragged rows, and one alone."""
    decoder = SpeculativeDecoder(target, None, *DRAFTS[drafts](near))
    expected = [reference(target, prompt, alpha, k) for prompt in PROMPTS]
    assert ids_of(decoder.generate(PROMPTS, max_new_tokens=NEW, penalty_alpha=alpha, top_k=k)) == expected
    assert decoder.generate(PROMPTS[2], max_new_tokens=NEW, penalty_alpha=alpha, top_k=k).token_ids == expected[2]


def tiny_gpt2() -> Any:
    torch.manual_seed(3)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.25}
    return GPT2LMHeadModel(GPT2Config(vocab_size=80, bos_token_id=None, eos_token_id=None, **sizes)).double().eval()


def tiny_qwen2() -> Any:
    """With a sliding window in one layer, shorter than the prompts."""
    torch.manual_seed(4)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=80, initializer_range=0.25, bos_token_id=None, eos_token_id=None, **sizes, **window)
    return Qwen2ForCausalLM(config).double().eval()


@pytest.mark.parametrize("build", [tiny_gpt2, tiny_qwen2])
def test_other_architectures(build):
    model = build()
    prompts = [[5, 9, 17, 5, 9, 3, 3, 8], [40]]
    decoder = SpeculativeDecoder(model, None, [like(model)], BestFirst(24, 3))
    results = decoder.generate(prompts, max_new_tokens=NEW, penalty_alpha=0.5, top_k=3)
    assert ids_of(results) == [reference(model, prompt, 0.5, 3) for prompt in prompts]


def test_the_penalty_matters(target):
    """The tests have power: other weights and other counts give other texts."""
    texts = [reference(target, PROMPTS[2], alpha, k) for alpha, k in ((0.0, 4), (0.6, 4), (0.6, 2), (1.0, 4))]
    assert len(set(map(tuple, texts))) == 4


def test_without_drafts_a_step_scores_the_candidates_and_emits_one_token(target):
    """And one more pass at the start, after the prompt's."""
    with counted(target) as passes:
        result = SpeculativeDecoder(target, None, ()).generate(PROMPTS[0], max_new_tokens=6, penalty_alpha=0.6, top_k=5)
    assert [step.tree.num_drafted for step in result.steps] == [5] * 6
    assert result.accept_lengths == [1] * 6
    assert len(passes) == 1 + 1 + 6
    assert result.seed is None


def test_a_draft_that_is_the_target_makes_several_steps_in_one_pass(target):
    """With alpha 0 the likeliest candidate is chosen, and the path is always right: a level is a token."""
    decoder = SpeculativeDecoder(target, None, [target], BestFirst(48, 3))
    result = decoder.generate(PROMPTS[0], max_new_tokens=12, penalty_alpha=1e-9, top_k=2)
    assert result.token_ids == plain(target, PROMPTS[0], 12)
    assert result.accept_lengths == [4, 4, 4]
    assert result.stats.drafts[0].tokens == result.stats.drafts[0].only == 9  # a step's last token is the target's own
    assert all(step.drafted_by[-1] == () for step in result.steps)
    assert result.stats.target_passes == len(result.steps) == 3
    assert "contrastive search: 2 candidates and 3 * 16 drafted nodes a step, at most" in result.stats.notes


def test_what_a_draft_proposes_and_no_choice_can_reach_is_not_scored(target):
    """A chain offers one child where four are needed, and one below the root that is no candidate."""
    expected = reference(target, PROMPTS[0], 0.6, 4)
    rest = {tuple(PROMPTS[0] + expected[:i]): expected[i:] for i in range(NEW)}
    decoder = SpeculativeDecoder(target, None, [Scripted(lambda row: rest[tuple(row)])], BestFirst(64, 4))
    result = decoder.generate(PROMPTS[0], max_new_tokens=NEW, penalty_alpha=0.6, top_k=4)
    assert result.token_ids == expected
    assert {step.tree.num_drafted for step in result.steps} == {4}


@pytest.mark.parametrize("new", [1, 2, 3])
def test_lengths(target, near, new):
    decoder = SpeculativeDecoder(target, None, [near], BestFirst(24, 4))
    for prompt in PROMPTS:
        result = decoder.generate(prompt, max_new_tokens=new, penalty_alpha=0.3, top_k=2)
        assert result.token_ids == reference(target, prompt, 0.3, 2, new)
        assert result.finish_reason == "length"


@pytest.mark.parametrize("drafts", DRAFTS)
def test_rows_end_at_their_own_ends_of_sequence(target, near, drafts):
    """The end is in the middle of a step's tokens for some, and rows retire at different steps."""
    eos = reference(target, PROMPTS[0], 0.3, 2)[4]
    expected = [reference(target, prompt, 0.3, 2, eos=eos) for prompt in PROMPTS]
    decoder = SpeculativeDecoder(target, None, *DRAFTS[drafts](near))
    results = decoder.generate(PROMPTS, max_new_tokens=NEW, penalty_alpha=0.3, top_k=2, eos_token_id=eos)
    assert ids_of(results) == expected
    assert results[0].finish_reason == "eos"
    assert len(results[0].token_ids) <= 5
    assert {len(result.token_ids) for result in results} != {len(results[0].token_ids)}


@pytest.mark.parametrize("drafts", DRAFTS)
def test_candidates_are_ranked_after_the_processors(target, near, drafts):
    """One that reads the text: tokens that were there before become less likely."""

    def penalise(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter_add(1, ids, torch.full(ids.shape, -2.0, dtype=scores.dtype))

    decoder = SpeculativeDecoder(target, None, *DRAFTS[drafts](near))
    results = decoder.generate(PROMPTS, max_new_tokens=NEW, penalty_alpha=0.6, top_k=3, logits_processor=[penalise])
    assert ids_of(results) == [reference(target, prompt, 0.6, 3, process=penalise) for prompt in PROMPTS]


def test_what_processors_rule_out_is_no_candidate(target, near):
    """Even if its penalty would be the smallest."""
    script = [7, 1, 7, 7, 3, 2, 9, 9]
    decoder = SpeculativeDecoder(target, None, [near])
    options = {"penalty_alpha": 1.0, "top_k": 4, "logits_processor": following(script, len(PROMPTS[0]))}
    assert decoder.generate(PROMPTS[0], max_new_tokens=8, **options).token_ids == script


def test_rows_may_differ_and_some_be_greedy(target, near):
    decoder = SpeculativeDecoder(target, None, [near], BestFirst(24, 4))
    alphas, counts = [0.6, 0.0, 0.3, 1.0], [4, 4, 2, 1]
    results = decoder.generate(PROMPTS, max_new_tokens=NEW, penalty_alpha=alphas, top_k=counts)
    rows = zip(PROMPTS, alphas, counts, strict=True)
    assert ids_of(results) == [reference(target, *row) for row in rows]
    for row in (1, 3):
        assert results[row].token_ids == plain(target, PROMPTS[row], NEW)


def test_rows_may_search_beside_others_that_are_sampled(target, near):
    """Each has the ids that it has alone, in a batch and of many prompts."""
    decoder = SpeculativeDecoder(target, None, [near], BestFirst(24, 4))
    search, sample = {"penalty_alpha": 0.6, "top_k": 4}, {"temperature": 0.9, "seed": 5, "top_k": 20}
    alone = [
        decoder.generate(ids, max_new_tokens=NEW, **options).token_ids
        for ids, options in zip(PROMPTS, (search, sample, search, sample), strict=True)
    ]
    assert alone[0] == reference(target, PROMPTS[0], 0.6, 4)
    together = decoder.generate(
        PROMPTS,
        max_new_tokens=NEW,
        penalty_alpha=[0.6, None, 0.6, None],
        do_sample=[False, True, False, True],
        temperature=[None, 0.9, None, 0.9],
        top_k=[4, 20, 4, 20],
        seed=5,
    )
    assert ids_of(together) == alone
    prompts = [
        {"prompt": ids, **search} if row in (0, 2) else {"prompt": ids, **sample} for row, ids in enumerate(PROMPTS)
    ]
    found = {done.number: done.result.token_ids for done in decoder.generate_many(prompts, max_new_tokens=NEW)}
    assert found == dict(enumerate(alone))


def test_options_may_come_from_a_configuration_and_neutral_ones_are_greedy(target):
    """Naming penalty_alpha in a call overrides a checkpoint that samples."""
    decoder, prompt = SpeculativeDecoder(target, None, ()), PROMPTS[2]
    config = GenerationConfig(penalty_alpha=0.6, top_k=4, max_new_tokens=NEW)
    assert decoder.generate(prompt, generation_config=config).token_ids == reference(target, prompt, 0.6, 4)
    sampling = GenerationConfig(do_sample=True, top_k=20, max_new_tokens=NEW)
    result = decoder.generate(prompt, generation_config=sampling, penalty_alpha=0.6, top_k=4)
    assert result.token_ids == reference(target, prompt, 0.6, 4)
    for neutral in ({"penalty_alpha": 0, "top_k": 4}, {"penalty_alpha": 0.6, "top_k": 1}):
        assert decoder.generate(prompt, max_new_tokens=NEW, **neutral).token_ids == plain(target, prompt, NEW)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"do_sample": True}, "do_sample=True"),
        ({"top_k": 0}, "top_k=0"),
        ({"penalty_alpha": 1.5}, "penalty_alpha=1.5"),
        ({"penalty_alpha": -0.1}, "penalty_alpha=-0.1"),
        ({"temperature": 0.7}, "temperature=0.7 has no effect in contrastive search"),
        ({"top_p": 0.9}, "top_p=0.9"),
        ({"num_beams": 2}, "num_beams=2"),
        ({"do_sample": [True, False]}, "do_sample=True"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(target, options, words):
    decoder = SpeculativeDecoder(target)
    with counted(target) as passes, pytest.raises(SamplingError, match=words):
        decoder.generate(PROMPTS[:2], **{"penalty_alpha": 0.6, "top_k": 4, **options})
    assert not passes


def test_sampled_trees_and_models_that_score_chains_only_are_refused(target, near, monkeypatch):
    options = {"penalty_alpha": 0.6, "top_k": 4}
    with pytest.raises(SamplingError, match="another tree"):
        SpeculativeDecoder(target, None, [near], Sampled((2, 2))).generate(PROMPTS[0], **options)
    checked, chains = specinfer.check_model, {"support": Support.CHAIN_ONLY, "reason": "so"}
    monkeypatch.setattr(specinfer.decoder, "check_model", lambda model: checked(model)._replace(**chains))
    with pytest.raises(UnsupportedModel, match=r"chains only.*penalty_alpha"):
        SpeculativeDecoder(target, None, ()).generate(PROMPTS[0], **options)


def test_streams_and_what_displays_results(target, near):
    """Candidates that no draft drew have the target's name; `inspect` says why it cannot score such steps again."""
    decoder = SpeculativeDecoder(target, None, [near], BestFirst(24, 4))
    options = {"max_new_tokens": NEW, "penalty_alpha": 0.3, "top_k": 2}
    received: deque[int] = deque()
    streamer = type("Streamer", (), {"put": lambda _, ids: received.extend(ids.flatten().tolist()), "end": lambda _: 0})
    result = decoder.generate(PROMPTS[0], streamer=streamer(), **options)
    assert list(received) == [*PROMPTS[0], *result.token_ids]
    assert describe(result).drafts == ["draft", "target"]
    assert "<svg" in result.steps[0].to_svg()
    with pytest.raises(InputError, match="contrastive search"):
        specinfer.inspect(decoder, result, **options)


def test_two_streams_of_one_decoder_do_not_disturb_each_other(target, near):
    decoder = SpeculativeDecoder(target, None, [near, "ngram"])
    runs = [decoder.open(p, max_new_tokens=NEW, penalty_alpha=0.6, top_k=3) for p in (PROMPTS[0], PROMPTS[2])]
    steps = [iter(run) for run in runs]
    for _ in range(NEW + 1):
        for run in steps:
            next(run, None)
    texts = [run.results()[0].token_ids for run in runs]
    assert texts == [reference(target, p, 0.6, 3) for p in (PROMPTS[0], PROMPTS[2])]


def test_heads_read_their_own_layers_beside_the_last(target):
    """The target's states have one more column, and a head takes its own."""
    from test_heads import draft_for

    head = draft_for(target, aux_layers=[0, 1], ids=range(264))
    decoder = SpeculativeDecoder(target, byte_tokenizer(), [head], BestFirst(24, 3))
    results = decoder.generate(PROMPTS, max_new_tokens=NEW, penalty_alpha=0.6, top_k=2, eos_token_id=-1)
    assert ids_of(results) == [reference(target, prompt, 0.6, 2) for prompt in PROMPTS]


def test_inside_transformers(target):
    """Its own call, which refuses contrastive search since 5.0 unless somebody else decodes."""
    ids = torch.tensor([PROMPTS[0]])
    options = {"max_new_tokens": NEW, "penalty_alpha": 0.6, "top_k": 4, "do_sample": False, "pad_token_id": 0}
    found = target.generate(
        ids, attention_mask=torch.ones_like(ids), custom_generate=specinfer.custom_generate, **options
    )
    assert found[0, len(PROMPTS[0]) :].tolist() == reference(target, PROMPTS[0], 0.6, 4)
