"""Penalties of presence and frequency: exact on every tree, and counted in the text alone."""

from typing import Any

import pytest
import torch
from conftest import PROMPTS, like, tiny_llama

from specinfer import BestFirst, Sampled, SpeculativeDecoder
from specinfer.engine.penalties import FrequencyPenalty, PresencePenalty

NEW = 16


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_llama()


def penalised(target: Any, prompt: list[int], presence: float, frequency: float) -> list[int]:
    """Decode greedily, one plain pass a token, with the definition of OpenAI's reference."""
    ids = list(prompt)
    for _ in range(NEW):
        with torch.inference_mode():
            scores = target(torch.tensor([ids])).logits[0, -1].tolist()
        for token in set(ids[len(prompt) :]):
            scores[token] -= presence + frequency * ids[len(prompt) :].count(token)
        ids.append(scores.index(max(scores)))
    return ids[len(prompt) :]


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0), (0, 1.5), (-2, 0.7)])
@pytest.mark.parametrize("tree", [None, BestFirst(8, 4)], ids=str)
def test_they_are_those_of_the_definition(target: Any, tree: Any, presence: float, frequency: float) -> None:
    decoder = SpeculativeDecoder(target, drafts=[like(target), "ngram"] if tree else [], tree=tree)
    changed = 0
    for prompt in PROMPTS:
        made = [PresencePenalty(presence, len(prompt)), FrequencyPenalty(frequency, len(prompt))]
        found = decoder.generate(prompt, max_new_tokens=NEW, temperature=0, logits_processor=made).token_ids
        assert found == penalised(target, prompt, presence, frequency)
        changed += found != decoder.generate(prompt, max_new_tokens=NEW, temperature=0).token_ids
    assert changed


@pytest.mark.parametrize("tree", [BestFirst(8, 4), Sampled((2, 1))], ids=str)
def test_a_seed_gives_one_text(target: Any, tree: Any) -> None:
    """With and without speculation, for ranked trees; for sampled trees, the text repeats itself."""
    options = {"max_new_tokens": NEW, "temperature": 1, "seed": 3}
    options |= {"logits_processor": [PresencePenalty(0.8, 5), FrequencyPenalty(0.4, 5)]}
    speculating = SpeculativeDecoder(target, drafts=[like(target)], tree=tree)
    other = SpeculativeDecoder(target, drafts=[], tree=None) if isinstance(tree, BestFirst) else speculating
    found, wanted = (decoder.generate(PROMPTS[0], **options).token_ids for decoder in (speculating, other))
    assert found == wanted
