"""Our processors that exclude tokens answer as transformers' do, and a caller's own takes the place of ours."""

import pytest
import torch
from transformers import GenerationConfig, generation

from specinfer.engine.excluded import MinLength, MinNewTokens, SuppressTokens
from specinfer.engine.processors import Processors
from specinfer.engine.sampling import resolve

VOCAB = 11
IDS = [[3], [0, 10], [5, 5], [2, VOCAB, 400], [VOCAB], []]  # some beyond the vocabulary
CASES = {
    "min_length": lambda kind, ids: kind(6, torch.tensor(ids), "cpu"),
    "min_new_tokens": lambda kind, ids: kind(2, 4, torch.tensor(ids), "cpu"),
    "suppress_tokens": lambda kind, ids: kind(ids, "cpu"),
}
KINDS = {
    "min_length": (MinLength, generation.MinLengthLogitsProcessor),
    "min_new_tokens": (MinNewTokens, generation.MinNewTokensLengthLogitsProcessor),
    "suppress_tokens": (SuppressTokens, generation.SuppressTokensLogitsProcessor),
}


@pytest.mark.parametrize("option", CASES)
@pytest.mark.parametrize("ids", IDS, ids=str)
@pytest.mark.parametrize("length", [1, 5, 6, 9])
def test_scores_are_those_of_transformers(option: str, ids: list[int], length: int) -> None:
    ours, theirs = (CASES[option](kind, ids) for kind in KINDS[option])
    path, scores = torch.ones(2, length, dtype=torch.long), torch.randn(2, VOCAB)
    assert torch.equal(ours(path, scores.clone()), theirs(path, scores.clone()))


@pytest.mark.parametrize("option", CASES)
def test_a_callers_own_takes_the_place_of_ours(option: str) -> None:
    ours, theirs = KINDS[option]
    value = [3] if option == "suppress_tokens" else 5
    own = CASES[option](theirs, [4])
    for processors, kinds in ((None, [ours]), ([own], [theirs])):
        settings = resolve(
            GenerationConfig(), vocab_size=VOCAB, logits_processor=processors, eos_token_id=1, **{option: value}
        )
        chain = Processors.of(settings, 2, torch.device("cpu")).chain
        assert [type(each.function) for each in chain] == kinds
