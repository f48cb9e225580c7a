"""Heads that learn while they serve: text never changes, what is kept is right and bounded, nothing gets worse."""

import copy
import threading

import pytest
import torch
from conftest import PROMPTS, VOCAB, like, tiny_llama
from test_heads import draft_for, states_of

from specinfer import BestFirst, Chain, Sampled, SpeculativeDecoder
from specinfer.drafts import examples, online
from specinfer.drafts.examples import Example, ExampleBuffer, example_loss
from specinfer.drafts.head import HeadDraft
from specinfer.drafts.lookup.ngram import NGramDraft
from specinfer.drafts.online import Budget, OnlineHead
from specinfer.errors import InputError, ModelError

TREE = BestFirst(12, 4)
TASK = {"max_new_tokens": 24}


@pytest.fixture(scope="module")
def target():
    return tiny_llama(spread=0.5).float()


def decoder_of(target, drafts=None, tree=TREE, share=1.0, units=5, **options):
    """An online decoder whose heads do so many steps and comparisons after every call, whatever the clock says."""
    decoder = SpeculativeDecoder(target, None, [draft_for(target)] if drafts is None else drafts, tree, online=share)
    for head in heads(decoder):
        head.budget = Allowance(units)
    return decoder


class Allowance(Budget):
    """Work in units, not in seconds."""

    def __init__(self, units):
        super().__init__(1.0)
        self.units, self.left = units, 0

    def earn(self, seconds):
        """Begin a call."""
        self.left = self.units

    def fits(self, kind, earned, guess):
        """Whether the call has units left."""
        self.left -= 1
        return self.left >= 0


@pytest.fixture(scope="module")
def taught(target):
    """A decoder that learnt from one task, then stopped; and how many passes each call took."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(online, "LEARNING_RATE", 3e-3)
        decoder = decoder_of(target, units=10)
        counts = [passes(decoder.generate(PROMPTS, **TASK)) for _ in range(3)]
    heads(decoder)[0].budget.units = 0
    return decoder, counts


def heads(decoder):
    return [draft for draft in decoder.drafts if isinstance(draft, OnlineHead)]


def ids_of(results):
    return [result.token_ids for result in results]


def passes(results):
    return sum(result.stats.target_passes for result in results)


# ---- text ----


@pytest.mark.parametrize("tree", [TREE, Chain(3), "auto"], ids=str)
@pytest.mark.parametrize("temperature", [0, 1])
def test_ids_are_those_without_learning(target, tree, temperature):
    """Two heads that learn and n-grams, ragged rows, one call after the other: learning changes drafts, never text."""
    options = {"max_new_tokens": 10, "temperature": temperature, "seed": [3, 4, 5, 6]}
    wanted = ids_of(SpeculativeDecoder(target, None, [], None).generate(PROMPTS, **options))
    drafts = [draft_for(target, "a"), NGramDraft(), draft_for(target, "b", seed=1)]
    decoder = decoder_of(target, drafts, tree)
    for _ in range(2):
        assert ids_of(decoder.generate(PROMPTS, **options)) == wanted
    assert all(head.swaps for head in heads(decoder))


def test_a_head_of_sampled_trees_learns_too(target):
    decoder = decoder_of(target, tree=Sampled((2, 1)))
    for seed in range(3):
        result = decoder.generate(PROMPTS[0], max_new_tokens=16, temperature=1, seed=seed)
        assert len(result.token_ids) == 16
    assert heads(decoder)[0].buffer.added == 3


def test_random_numbers_and_modes_of_torch_stay(target):
    decoder = decoder_of(target)
    state = torch.get_rng_state()
    with torch.no_grad():
        decoder.generate(PROMPTS, max_new_tokens=12, seed=0)
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        decoder.generate(PROMPTS, max_new_tokens=12, seed=0)
        assert torch.is_inference_mode_enabled()
    assert heads(decoder)[0].swaps
    assert torch.equal(torch.get_rng_state(), state)


def test_text_survives_an_error_of_learning(target, monkeypatch):
    decoder = decoder_of(target)
    wanted = ids_of(decoder.generate(PROMPTS, max_new_tokens=12))

    def fail(self, batch):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(online.Student, "step", fail)
    results = decoder.generate(PROMPTS, max_new_tokens=12)
    assert ids_of(results) == wanted
    assert "draft head could not learn from this call: out of memory" in results[0].stats.notes
    monkeypatch.undo()
    assert "could not learn" not in str(decoder.generate(PROMPTS, max_new_tokens=12)[0].stats.notes)


# ---- what is learnt ----


def test_a_head_that_learns_needs_fewer_passes(target, taught):
    """A head of random weights, one task over and over: the frozen one stays as bad as it was."""
    decoder, counts = taught
    frozen = SpeculativeDecoder(target, None, [draft_for(target)], TREE)
    before = passes(frozen.generate(PROMPTS, **TASK))
    assert counts[0] == before == passes(frozen.generate(PROMPTS, **TASK))
    assert passes(decoder.generate(PROMPTS, **TASK)) < 0.85 * before


def test_weights_are_swapped_only_if_they_are_better(target, monkeypatch):
    found = []

    def compare(self, held_out):
        with torch.no_grad():
            before = float(example_loss(self.model.model, held_out))
            right(self, held_out)
            found.append((before, float(example_loss(self.model.model, held_out))))

    right = OnlineHead._compare
    monkeypatch.setattr(OnlineHead, "_compare", compare)
    decoder = decoder_of(target, units=10)
    decoder.generate(PROMPTS, max_new_tokens=12)
    for rate in (3e-4, 10.0, 1e20, 3e-4):  # the second and the third are ruinous
        monkeypatch.setattr(online, "LEARNING_RATE", rate)
        heads(decoder)[0].student.restart()
        swaps = heads(decoder)[0].swaps
        decoder.generate(PROMPTS[0], max_new_tokens=2)
        assert (heads(decoder)[0].swaps > swaps) == (rate < 1)
    assert len(found) == 10
    assert all(after <= before for before, after in found)
    assert any(after == before for before, after in found)


def test_the_callers_head_and_other_decoders_do_not_change(target):
    draft = draft_for(target)
    before = copy.deepcopy(draft.head.state_dict())
    decoder, other = decoder_of(target, [draft]), SpeculativeDecoder(target, None, [draft], TREE)
    counts = passes(other.generate(PROMPTS, max_new_tokens=12))
    decoder.generate(PROMPTS, max_new_tokens=12)
    learnt = heads(decoder)[0].model.model.state_dict()
    assert not any(torch.equal(weight, learnt[name]) for name, weight in before.items() if weight.ndim == 2)
    assert all(torch.equal(weight, draft.head.state_dict()[name]) for name, weight in before.items())
    assert passes(other.generate(PROMPTS, max_new_tokens=12)) == counts


def test_text_under_way_keeps_the_weights_that_it_began_with(target):
    decoder, options = decoder_of(target), {"max_new_tokens": 12}
    undisturbed = SpeculativeDecoder(target, None, [draft_for(target)], TREE).generate(PROMPTS[0], **options)
    run = decoder.open(PROMPTS[0], **options)
    steps = iter(run)
    next(steps)
    decoder.generate(PROMPTS[1:], **options)
    assert heads(decoder)[0].swaps
    for _ in steps:
        pass
    (result,) = run.results()
    assert result.token_ids == undisturbed.token_ids
    assert [step.tree for step in result.steps] == [step.tree for step in undisturbed.steps]


def test_threads_share_a_head_that_learns(target):
    decoder, found = decoder_of(target), {}
    wanted = [SpeculativeDecoder(target, None, [], None).generate(prompt, max_new_tokens=8) for prompt in PROMPTS]

    def serve(number):
        found[number] = [decoder.generate(PROMPTS[number], max_new_tokens=8).token_ids for _ in range(3)]

    threads = [threading.Thread(target=serve, args=[number]) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [result.token_ids] * 3 for number, result in enumerate(wanted)}
    assert heads(decoder)[0].buffer.added == 12


# ---- examples ----


@pytest.mark.parametrize("new", [12, 50])
def test_examples_hold_what_the_target_said(target, new, monkeypatch):
    """Ids, states and distributions are those of one pass over the whole text; long texts are several windows."""
    monkeypatch.setattr(examples, "CONTEXT", 8)
    monkeypatch.setattr(online, "LONGEST", 24)
    decoder = decoder_of(target, units=0)
    results = decoder.generate(PROMPTS, max_new_tokens=new)
    head = heads(decoder)[0]
    kept = [*head.buffer.examples(True), *head.buffer.examples(False)]
    assert len(kept) == head.buffer.added == (13 if new == 50 else 4)
    texts = [[*prompt, *result.token_ids] for prompt, result in zip(PROMPTS, results, strict=True)]
    for ids, states, tokens, log_probs, weights in kept:
        text, start = found_in(texts, ids.tolist())
        part = slice(start, start + len(ids))
        torch.testing.assert_close(states, states_of(target, text)[0, part].bfloat16(), rtol=2e-2, atol=2e-2)
        with torch.no_grad():
            logits = target(torch.tensor([text])).logits[0, :-1, head.model.model.token_ids]
        wanted = logits.log_softmax(-1)[start + len(ids) - len(weights) - 1 : start + len(ids) - 1]
        torch.testing.assert_close(log_probs, wanted.topk(examples.KEPT).values, rtol=1e-3, atol=1e-3)
        assert torch.equal(tokens, wanted.topk(examples.KEPT).indices)
        assert len(weights) < len(ids) <= 24 + TREE.max_depth
    learnt = sum(len(example.weights) for example in kept)
    last = sum(len(result.steps[-1].tokens) for result in results)  # no states were asked for
    assert learnt == len(PROMPTS) * new - last


def found_in(texts, ids):
    """Return the text that has the ids as a part, and where they begin."""
    starts = ((text, start) for text in texts for start in range(len(text) - len(ids) + 1))
    return next((text, start) for text, start in starts if text[start : start + len(ids)] == ids)


def test_tokens_that_the_head_proposed_weigh_less(target):
    decoder = decoder_of(target, [draft_for(target, ids=range(VOCAB))], BestFirst(48, 2), units=0)
    result = decoder.generate(PROMPTS[0], max_new_tokens=40)
    (example,) = heads(decoder)[0].buffer.examples(True)
    steps = result.steps[:-1]
    assert (example.weights < 1).sum() == sum(len(step.tokens) - 1 for step in steps) > 0
    assert (example.weights == 1).sum() == len(steps)


def test_the_loss_is_cross_entropy_where_all_tokens_are_kept(target, monkeypatch):
    monkeypatch.setattr(examples, "KEPT", VOCAB)
    monkeypatch.setattr(examples, "UNROLL", 1)
    decoder = decoder_of(target, units=0)
    decoder.generate(PROMPTS, max_new_tokens=12)
    head = heads(decoder)[0]
    for example in [*head.buffer.examples(True), *head.buffer.examples(False)]:
        n, columns = len(example.weights), torch.arange(len(example.ids) - 1)
        mask = (columns[:, None] >= columns)[None, None]
        with torch.no_grad():
            network = head.model.model
            output = network(example.ids[None, :-1], mask, columns[None], None, example.states[None, :-1])
            log_q = output.logits[0, -n:].log_softmax(-1).gather(1, example.tokens)
            wanted = (-(example.log_probs.exp() * log_q).sum(-1) * example.weights).sum() / example.weights.sum()
            assert float(example_loss(network, [example])) == pytest.approx(float(wanted), rel=1e-4)


def test_padding_does_not_count(target):
    decoder = decoder_of(target, units=0)
    decoder.generate(PROMPTS, max_new_tokens=12)
    head = heads(decoder)[0]
    kept = [*head.buffer.examples(True), *head.buffer.examples(False)]
    with torch.no_grad():
        alone = [float(example_loss(head.model.model, [example])) for example in kept]
        together = float(example_loss(head.model.model, kept))
    weights = [float(example.weights.sum()) for example in kept]
    wanted = sum(a * w for a, w in zip(alone, weights, strict=True)) / sum(weights)
    assert together == pytest.approx(wanted, rel=1e-4)


def test_the_buffer_is_bounded_and_holds_out_every_eighth():
    one = Example(
        torch.zeros(4).long(), torch.zeros(4, 2, 8), torch.zeros(2, 3).long(), torch.zeros(2, 3), torch.ones(2)
    )
    buffer = ExampleBuffer(capacity=20 * one.nbytes)
    for number in range(100):
        buffer.add(one._replace(ids=torch.full((4,), number)))
        assert buffer.nbytes == one.nbytes * min(number + 1, 20)
    numbers = [[int(example.ids[0]) for example in buffer.examples(held_out)] for held_out in (True, False)]
    assert numbers == [[80, 88, 96], [n for n in range(80, 100) if n % 8]]
    buffer.add(one._replace(states=torch.zeros(4000, 2, 8)))  # larger than the whole buffer
    assert buffer.nbytes == 0


# ---- time ----


def test_work_that_does_not_fit_is_not_begun():
    budget = Budget(0.05)
    assert not budget.fits("step", budget.earned, 0.1)
    budget.earn(1.0)
    budget.earn(2.0)
    assert budget.earned == pytest.approx(0.15)
    assert budget.fits("step", budget.earned, 0.1)
    assert not budget.fits("step", budget.earned, 0.2)
    budget.times["step"].append(0.01)  # what was measured counts, not the guess
    assert budget.fits("step", budget.earned, 0.2)
    budget.spent = 0.145
    assert not budget.fits("step", budget.earned, 0.2)
    with budget.spending("step"):
        pass
    assert budget.spent > 0.145
    assert len(budget.times["step"]) == 2


def test_the_time_of_learning_is_in_the_stats(target):
    decoder = decoder_of(target)
    results = decoder.generate(PROMPTS, max_new_tokens=12)
    assert results[0].stats.seconds.learning >= heads(decoder)[0].budget.spent > 0
    assert "learning" in results[0].stats.seconds.to_dict()


def test_nothing_is_learnt_in_no_time(target):
    decoder = SpeculativeDecoder(target, None, [draft_for(target)], TREE, online=1e-12)
    network = decoder.drafts[0].model.model
    for _ in range(3):
        decoder.generate(PROMPTS, max_new_tokens=12)
    assert decoder.drafts[0].budget.spent == 0
    assert decoder.drafts[0].model.model is network


# ---- saved; refused ----


def test_what_was_learnt_is_saved_as_a_head(target, taught, tmp_path):
    decoder, counts = taught
    decoder.save_drafts(tmp_path / "learnt")
    decoder.save_drafts(tmp_path / "learnt")  # later ones replace it
    loaded = HeadDraft.load(tmp_path / "learnt")
    weights = loaded.head.state_dict()
    learnt = heads(decoder)[0].model.model.state_dict()
    assert all(torch.equal(weight.bfloat16(), learnt[name].bfloat16()) for name, weight in weights.items())
    assert loaded.inverse_temperature == heads(decoder)[0].inverse_temperature
    after = passes(SpeculativeDecoder(target, None, [loaded], TREE).generate(PROMPTS, **TASK))
    assert after < 0.9 * counts[0]


def test_several_heads_are_saved_in_folders(target, tmp_path):
    decoder = decoder_of(target, [draft_for(target, "a"), NGramDraft(), draft_for(target, "b", seed=1)])
    decoder.save_drafts(tmp_path)
    assert [HeadDraft.load(tmp_path / number).name for number in "12"] == ["a", "b"]


def test_a_folder_of_something_else_is_not_overwritten(target, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match="is not empty and holds no head"):
        decoder_of(target).save_drafts(tmp_path)
    with pytest.raises(InputError, match="no draft of this decoder learns"):
        SpeculativeDecoder(target, None, [draft_for(target)]).save_drafts(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("share", [2, -0.1, 0, float("nan"), "yes", None])
def test_a_bad_share_is_refused(target, share):
    with pytest.raises(InputError, match="is not a share of time"):
        SpeculativeDecoder(target, None, [draft_for(target)], online=share)


def test_drafts_that_cannot_learn_are_named(target):
    with pytest.raises(InputError, match=r"none of these drafts can learn \(ngram, draft\)"):
        SpeculativeDecoder(target, None, ["ngram", like(target)], online=True)
    with pytest.raises(InputError, match=r"can learn \(no drafts\)"):
        SpeculativeDecoder(target, None, [draft_for(target)], None, online=True)
    decoder = SpeculativeDecoder(target, None, [draft_for(target), "ngram"], online=True)
    assert "online: head learns, ngram does not" in decoder.notes
    assert decoder.drafts[0].share == online.SHARE
    both = SpeculativeDecoder(target, None, [draft_for(target, "a"), draft_for(target, "b")], online=0.2)
    assert [head.share for head in both.drafts] == [0.1, 0.1]  # the time is one
    with pytest.raises(ModelError, match="attach it to one"):
        OnlineHead(draft_for(target)).open(None)
