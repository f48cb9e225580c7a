"""The likeliest tokens: those of a sort, with and without a compiler."""

from math import inf, nan

import pytest
import torch
from conftest import tiny_llama
from hypothesis import given
from hypothesis import strategies as st

from specinfer import SpeculativeDecoder
from specinfer.drafts import ranking


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(ranking, "library", lambda: None)
    elif ranking.library() is None:
        pytest.skip("no C++ compiler")
    return request.param


@pytest.mark.parametrize(("vocab", "k"), [(1, 1), (100, 200), (8191, 3), (8192, 33), (49_152, 16), (151_936, 1)])
def test_the_largest_are_those_of_a_sort(vocab, k):
    """Of a part of a tensor; some have no chance, where fewer than k are left."""
    scores = torch.randperm(2 * 3 * (vocab + 5), generator=torch.Generator().manual_seed(k)).float() / vocab
    scores = scores.view(2, 3, -1)[..., :vocab]
    scores[0, 0, k:] = -inf
    for part in (scores, 30 * scores, scores[:1, 1:2], scores.transpose(0, 1), scores[..., ::2]):
        wanted, places = part.sort(dim=-1, descending=True, stable=True)
        indices, values, total = ranking.largest(part, k)
        assert torch.equal(values, wanted[..., :k])
        real = values > -inf
        assert torch.equal(indices[real], places[..., :k][real])
        assert torch.equal(part.gather(-1, indices), values)
        assert torch.allclose(total, part.logsumexp(-1, keepdim=True), rtol=1e-6)


@given(st.integers(1, 300), st.integers(1, 9), st.integers(0, 9999))
def test_of_equal_tokens_the_smaller_comes_first(vocab, k, seed):
    scores = torch.randint(-2, 1, (3, vocab), generator=torch.Generator().manual_seed(seed)).float()
    indices, values, _ = ranking.largest(scores, k)
    assert torch.equal(values, scores.sort(dim=-1, descending=True).values[:, :k])
    assert (indices.diff()[values.diff() == 0] > 0).all()


def test_what_is_no_number_is_in_the_total():
    scores = torch.zeros(3, 100)
    scores[0, 70], scores[1, 70] = nan, inf
    _, values, total = ranking.largest(scores, 3)
    assert (values - total)[:2].isnan().any(-1).all()
    assert torch.allclose(total[2], torch.tensor(100.0).log())


def test_other_types_are_ranked_by_torch():
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    for dtype in (torch.float64, torch.bfloat16):
        indices, values, _ = ranking.largest(scores.to(dtype), 3)
        assert indices.tolist() == [[1, 2, 3]]
        assert values.dtype == dtype


def test_it_is_compiled_with_a_decoder_and_not_in_its_first_step(monkeypatch):
    made = []
    monkeypatch.setattr(ranking, "library", lambda: made.append("library"))
    SpeculativeDecoder(tiny_llama(), drafts=[], tree=None)
    assert not made
    SpeculativeDecoder(tiny_llama(), drafts=["ngram"])
    assert made
