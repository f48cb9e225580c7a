"""What a text may repeat (`prediction`): fewer passes, and the same text."""

from typing import Any

import pytest
from conftest import PROMPTS, byte_tokenizer, tiny_llama

from specinfer import BestFirst, SpeculativeDecoder
from specinfer.errors import InputError

NEW = 40
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "temperature": 0}
SAMPLED: dict[str, Any] = {"max_new_tokens": NEW, "temperature": 0.9, "seed": 3}


def made(draft: str) -> SpeculativeDecoder:
    return SpeculativeDecoder(tiny_llama(), byte_tokenizer(), [draft], BestFirst(8, 8), compile=False)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft", ["suffix", "ngram"])
def test_a_text_that_is_predicted_takes_fewer_passes(draft: str, options: dict[str, Any]) -> None:
    """Some tokens of it are not as predicted; from there it goes on with those that are."""
    decoder = made(draft)
    for prompt in PROMPTS:
        alone = decoder.generate(prompt, **options)
        prediction = list(alone.token_ids)
        prediction[20] = (prediction[20] + 1) % 256
        found = decoder.generate(prompt, prediction=prediction, **options)
        assert found.token_ids == alone.token_ids
        assert found.stats.target_passes < min(alone.stats.target_passes, NEW / 2)


def test_a_prediction_is_of_its_own_request() -> None:
    """Another one beside it drafts as it would alone."""
    decoder = made("suffix")
    first, second = (decoder.generate(prompt, **GREEDY) for prompt in PROMPTS[:2])
    scheduler = decoder.scheduler()
    predicted = scheduler.add(decoder.prepare(PROMPTS[0], prediction=first.token_ids, **GREEDY))
    other = scheduler.add(decoder.prepare(PROMPTS[1], **GREEDY))
    while not scheduler.idle:
        scheduler.step()
    assert (predicted.result.token_ids, other.result.token_ids) == (first.token_ids, second.token_ids)
    assert predicted.result.stats.target_passes < first.stats.target_passes
    assert other.result.stats.target_passes == second.stats.target_passes


def test_a_prediction_may_be_text() -> None:
    decoder = made("suffix")
    ids = decoder.tokenizer("what will be said, and more of it")["input_ids"]
    prompt = decoder.tokenizer("what will be")["input_ids"]
    by_ids, by_text = (
        decoder.generate(prompt, prediction=given, **GREEDY) for given in (ids, "what will be said, and more of it")
    )
    assert [step.tree.num_drafted for step in by_ids.steps] == [step.tree.num_drafted for step in by_text.steps]
    assert by_ids.steps[0].tree.num_drafted > decoder.generate(prompt, **GREEDY).steps[0].tree.num_drafted


def test_an_id_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="token id 9999"):
        made("suffix").generate([1], prediction=[9999], **GREEDY)


@pytest.mark.parametrize("prediction", [3, ["one", "two"], [[1], [2]], [1.5]])
def test_a_prediction_is_one_for_all_prompts(prediction: Any) -> None:
    decoder = made("suffix")
    with pytest.raises(InputError, match=r"^prediction=.*give one text, or its token ids, for all prompts"):
        decoder.generate(PROMPTS[:2], prediction=prediction, **GREEDY)
    assert len(decoder.generate(PROMPTS[:2], prediction="a text", **GREEDY)) == 2
