"""Several texts of a prompt (`num_return_sequences`), and log-probabilities of their tokens (`logprobs`)."""

from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PROMPTS, byte_tokenizer, counted, like, oracle, tiny_llama

from specinfer import BestFirst, Result, Sampled, SpeculativeDecoder, custom_generate
from specinfer.errors import InputError, SamplingError

SAMPLED: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.9, "seed": 5}
TREES = {"ranked": BestFirst(6, 3), "sampled": Sampled((2, 1)), "plain": None}
CONTRASTIVE = {"max_new_tokens": 12, "penalty_alpha": 0.6, "top_k": 3}


@pytest.fixture(scope="module", params=TREES)
def decoder(request: pytest.FixtureRequest) -> SpeculativeDecoder:
    model = tiny_llama()
    return SpeculativeDecoder(model, byte_tokenizer(), [like(model)], TREES[request.param])


# ---- several texts of a prompt ----


def test_each_sequence_is_what_its_seed_gives(decoder: SpeculativeDecoder) -> None:
    results = decoder.generate("abc", num_return_sequences=3, **SAMPLED)
    assert [result.seed for result in results] == [5, 6, 7]
    assert len({tuple(result.token_ids) for result in results}) == 3
    for result in results:
        again = decoder.generate("abc", **{**SAMPLED, "seed": result.seed})
        assert (again.text, again.token_ids) == (result.text, result.token_ids)


def test_a_batch_has_the_sequences_of_a_prompt_together(decoder: SpeculativeDecoder) -> None:
    results = decoder.generate(PROMPTS[:2], num_return_sequences=2, **{**SAMPLED, "seed": [5, 70]})
    assert [result.prompt_ids for result in results] == [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]]
    assert [result.seed for result in results] == [5, 6, 70, 71]


def test_without_a_seed_every_sequence_has_another(target: Any) -> None:
    results = SpeculativeDecoder(target).generate([1], num_return_sequences=20, max_new_tokens=2, do_sample=True)
    assert len({result.seed for result in results}) == 20


def test_the_last_seed_is_followed_by_the_first(target: Any) -> None:
    options = {"num_return_sequences": 2, "max_new_tokens": 2, "do_sample": True}
    assert [result.seed for result in SpeculativeDecoder(target).generate([1], seed=2**64 - 1, **options)][1] == 0


@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"penalty_alpha": 0.6, "top_k": 4}], ids=str)
def test_sequences_of_greedy_decoding_are_refused(target: Any, options: dict[str, Any]) -> None:
    with counted(target) as passes, pytest.raises(SamplingError, match=r"the same text .* temperature above 0"):
        SpeculativeDecoder(target).generate([1], num_return_sequences=2, **options)
    assert not passes


def test_streams_and_many_prompts_take_one_sequence(target: Any, tokenizer: Any) -> None:
    decoder = SpeculativeDecoder(target, tokenizer)
    with pytest.raises(InputError, match="one prompt, for one text"):
        decoder.stream("abc", num_return_sequences=2, **SAMPLED)
    with pytest.raises(InputError, match="several texts"):
        decoder.generate_many(["abc"], num_return_sequences=2, **SAMPLED)


def test_sequences_in_transformers_call_are_ours(target: Any, near: Any) -> None:
    ids, options = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 8, "do_sample": True, "num_return_sequences": 2}
    found = target.generate(
        ids, custom_generate=custom_generate, draft_model=near, seed=5, pad_token_id=0, top_k=0, **options
    )
    ours = SpeculativeDecoder(target, drafts=[near]).generate([5, 6, 7], seed=5, top_k=0, **options)
    assert found[:, 3:].tolist() == [result.token_ids for result in ours]
    assert found[0].tolist() != found[1].tolist()


# ---- log-probabilities ----


def test_transformers_call_has_log_probabilities(target: Any, near: Any) -> None:
    options = {"max_new_tokens": 6, "return_dict_in_generate": True, "logprobs": True, "pad_token_id": 0}
    found = target.generate(torch.tensor([[5, 6]]), custom_generate=custom_generate, draft_model=near, **options)
    ours = SpeculativeDecoder(target, drafts=[near]).generate([5, 6], max_new_tokens=6, logprobs=True)
    assert found.results[0].logprobs == pytest.approx(ours.logprobs)


@pytest.mark.parametrize(
    "options", [SAMPLED, {"max_new_tokens": 12}, CONTRASTIVE], ids=["sampled", "greedy", "contrast"]
)
def test_log_probabilities_are_those_of_a_plain_pass(decoder: SpeculativeDecoder, options: dict[str, Any]) -> None:
    """Whatever the sampling: they are the target's own."""
    if "penalty_alpha" in options and isinstance(decoder.policy, Sampled):
        pytest.skip("contrastive search takes no sampled trees")
    result = decoder.generate([5, 9, 17], logprobs=True, repetition_penalty=1.2, **options)
    assert len(result.logprobs) == len(result.token_ids)
    with torch.inference_mode():
        logits = decoder.target.model(result.sequences).logits[0, 2:-1].log_softmax(-1)
    assert result.logprobs == pytest.approx(logits[range(12), result.token_ids].tolist(), abs=1e-9)
    assert result.logprobs == pytest.approx(decoder.score([5, 9, 17], result.token_ids).log_probabilities, abs=1e-9)


def test_log_probabilities_end_where_the_text_does(target: Any) -> None:
    decoder = SpeculativeDecoder(target, drafts=[oracle(target)], tree=BestFirst(6, 3))
    end = decoder.generate(PROMPTS[0], max_new_tokens=8).token_ids[1]
    result = decoder.generate(PROMPTS[0], max_new_tokens=8, eos_token_id=end, logprobs=True)
    (step,) = result.steps
    assert len(step.path) > len(step.tokens) == 2  # the text ends within its path
    assert len(result.logprobs or ()) == 2


def test_there_are_none_unless_asked_for(decoder: SpeculativeDecoder) -> None:
    assert decoder.generate("abc", **SAMPLED).logprobs is None
    for wrong in (-1, "yes", 2.5):
        with pytest.raises(InputError, match="is neither True nor False, nor a count of the likeliest tokens"):
            decoder.generate("abc", logprobs=wrong)


@pytest.mark.parametrize("options", [SAMPLED, {"max_new_tokens": 12}], ids=["sampled", "greedy"])
def test_the_likeliest_tokens_are_those_of_a_plain_pass(decoder: SpeculativeDecoder, options: dict[str, Any]) -> None:
    """On every tree, alone and in a batch, and in scores of the same text."""
    results = decoder.generate(PROMPTS, logprobs=3, repetition_penalty=1.2, **options)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.top_logprobs is not None
        assert len(result.top_logprobs) == len(result.token_ids)
        with torch.inference_mode():
            logits = decoder.target.model(result.sequences).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        wanted = logits.topk(3)
        assert [[token for token, _ in top] for top in result.top_logprobs] == wanted.indices.tolist()
        found = torch.tensor([[value for _, value in top] for top in result.top_logprobs], dtype=torch.float64)
        assert torch.allclose(found, wanted.values, atol=1e-4, rtol=0)
        score = decoder.score(prompt, result.token_ids, top_logprobs=3)
        assert [[token for token, _ in top] for top in score.top_logprobs] == wanted.indices.tolist()
        assert [
            top[0][1] == chosen for top, chosen in zip(score.top_logprobs, score.log_probabilities, strict=True)
        ] == (score.greedy)


def test_more_than_the_vocabulary_is_all_of_it(target: Any) -> None:
    result = SpeculativeDecoder(target, drafts=[]).generate([5, 6], max_new_tokens=1, logprobs=10**6)
    (top,) = result.top_logprobs or ()
    assert sorted(token for token, _ in top) == list(range(target.config.vocab_size))


@pytest.mark.parametrize("name", ["output_scores", "output_logits"])
def test_transformers_names_are_refused_with_ours(target: Any, name: str) -> None:
    with pytest.raises(SamplingError, match="give logprobs=True"):
        SpeculativeDecoder(target).generate([1], **{name: True})


def test_log_probabilities_are_kept(decoder: SpeculativeDecoder, tmp_path: Path) -> None:
    result = decoder.generate("abc", logprobs=2, **SAMPLED)
    result.save(tmp_path / "file")
    kept = Result.load(tmp_path / "file")
    assert (kept.logprobs, kept.top_logprobs) == (result.logprobs, result.top_logprobs)
    assert result.to_dict()["logprobs"] == result.logprobs


def test_a_data_frame_has_the_targets_and_the_drafts_probabilities(decoder: SpeculativeDecoder) -> None:
    pytest.importorskip("pandas")
    result = decoder.generate("abc", logprobs=True, **SAMPLED)
    frame = result.to_pandas()
    assert frame["p"].tolist() == pytest.approx([exp(value) for value in result.logprobs or ()])
    nodes = [(step.tree, node) for step in result.steps for node in step.path[: len(step.tokens)]]
    assert frame["q"].dropna().tolist() == [tree.probability(node) for tree, node in nodes]
    assert frame["q"].isna().tolist() == frame["depth"].isna().tolist()
    assert decoder.generate("abc", **SAMPLED).to_pandas()["p"].isna().all()
