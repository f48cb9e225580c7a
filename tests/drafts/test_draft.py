"""Drafts: what a model draft says equals a fresh pass over the path, at one pass a level, whatever was committed."""

import random

import pytest
import torch
from conftest import PROMPTS, VOCAB, counted, ends, like, plain, tiny_llama

import specinfer.drafts.language_model as language_model
from specinfer import BestFirst, Chain, Expansion, ModelDraft, Sampled, SpeculativeDecoder
from specinfer.drafts.language_model import CATCH_UP, ModelDraftSession
from specinfer.drafts.lookup.ngram import NGramDraft
from specinfer.engine.draft import DraftContext
from specinfer.engine.gumbel import COUPLING, Coupling, gumbel, key
from specinfer.engine.processors import Processors
from specinfer.engine.sampling import resolve


def context(prompts, vocab=VOCAB, coupled=False, draft=0, **options):
    from transformers import GenerationConfig

    distribution = Processors.of(resolve(GenerationConfig(), max_new_tokens=64, **options), 1, torch.device("cpu"))
    seeds = [9 + i for i in range(len(prompts))]
    couplings = [Coupling(seed) for seed in seeds] if coupled else ()
    return DraftContext(prompts, 400, 400, vocab, draft, distribution.without_prefix_readers(), seeds, couplings)


def fresh(model, ids):
    """Log-probabilities after the ids, by one plain pass."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)


def check_tree(model, ids, tree, tolerance=1e-5):
    """Every node's score is the sum of a fresh pass's log-probabilities along its path."""
    assert int(tree.tokens[0]) == ids[-1]
    for node in range(1, len(tree)):
        parent = int(tree.parents[node])
        edge = float(tree.scores[node] - tree.scores[parent])
        wanted = fresh(model, [*ids, *tree.path(parent)])[int(tree.tokens[node])]
        assert edge == pytest.approx(float(wanted), abs=tolerance)


POLICIES = [BestFirst(8, 4), Expansion((3, 2, 1)), Chain(4)]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_distributions_are_those_of_a_fresh_pass_after_many_commits(far, policy):
    """Ragged rows, random commits (on and off the tree, short and long, rows retired): every edge is right."""
    rng = random.Random(1)
    rows = [list(prompt) for prompt in PROMPTS]
    session = ModelDraft(far).open(context(rows))
    for step in range(12):
        trees = session.propose(policy, ends(rows), policy.max_depth)
        committed = []
        for ids, tree in zip(rows, trees, strict=True):
            check_tree(far, ids, tree)
            node = rng.randrange(len(tree))
            bonus = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 2, 5]))]  # others' nodes, too
            committed.append([*tree.path(node), *bonus])
        if step in (4, 8):
            committed[rng.randrange(len(rows))] = None
        session.commit(committed)
        kept = zip(rows, committed, strict=True)
        rows = [ids + new for ids, new in kept if new is not None]
        session.session.cache.check_integrity()
        assert session.batch == len(rows)


@pytest.mark.parametrize("length", [CATCH_UP - 1, CATCH_UP + 1, 3 * CATCH_UP])
def test_many_tokens_behind_are_caught_up(far, length):
    """A draft that lacks many tokens prefills them; what it says is the same."""
    rows = [list(prompt) for prompt in PROMPTS[:2]]
    session = ModelDraft(far).open(context(rows))
    session.propose(Chain(2), ends(rows), 2)
    new = [[(3 * i) % 50 for i in range(length)], [7]]
    session.commit(new)
    for ids, more, tree in zip(rows, new, session.propose(Chain(3), ends(new), 3), strict=True):
        check_tree(far, ids + more, tree)


def test_steps_without_a_proposal_lose_nothing(far):
    """Commits without a tree in between (a bare root) pile up and are fed later."""
    ids = list(PROMPTS[0])
    session = ModelDraft(far).open(context([ids]))
    for new in ([4, 5], [6], [7, 8, 9]):
        session.commit([new])
        ids += new
    check_tree(far, ids, session.propose(Chain(2), ids[-1:], 2)[0])


@pytest.mark.parametrize("policy", [*POLICIES, Sampled((2, 2))], ids=str)
def test_a_tree_costs_one_pass_a_level(far, policy):
    """The root's pass catches up as well, so d levels cost d passes; prompts are prefilled apart.

    Best-first may look one level below the tree it keeps before it knows that nothing there is better.
    """
    slack = isinstance(policy, BestFirst)

    rows = [[9] * (CATCH_UP + 8), [5, 4]]
    session = ModelDraft(far).open(context(rows))
    with counted(far) as passes:
        trees = session.propose(policy, ends(rows), policy.max_depth)
    assert 0 <= session.passes - max(tree.depth for tree in trees) <= slack
    assert len(passes) == session.passes + 1  # the long prompt's prefill
    for _ in range(4):
        session.commit([[*tree.path(len(tree) - 1), 3] for tree in trees])
        before = session.passes
        with counted(far) as passes:
            trees = session.propose(policy, [3, 3], policy.max_depth)
        assert len(passes) == session.passes - before <= policy.max_depth
        assert 0 <= len(passes) - max(tree.depth for tree in trees) <= slack
    assert session.seconds > 0
    assert session.prefill_seconds > 0


def test_no_level_costs_no_pass(far):
    """A bare root asks the model nothing."""
    session = ModelDraft(far).open(context(PROMPTS))
    with counted(far) as passes:
        trees = session.propose(Chain(3), ends(PROMPTS), 0)
    assert not passes
    assert [len(tree) for tree in trees] == [1] * 4


@pytest.mark.parametrize("own", [VOCAB + 40, VOCAB - 40])
def test_vocabularies_of_other_sizes(target, own):
    """No token beyond the target's vocabulary is proposed; tokens beyond the draft's own do not stop it."""
    model = like(target, vocab=own)
    rows = [[VOCAB - 1, VOCAB - 2, 5], [VOCAB - 1]]
    session = ModelDraft(model).open(context(rows))
    for _ in range(3):
        trees = session.propose(BestFirst(12, 3), ends(rows), 3)
        assert all(int(tree.tokens[1:].max()) < min(own, VOCAB) for tree in trees)
        rows = [[VOCAB - 1, 3], [VOCAB - 3]]
        session.commit(rows)
    tree = ModelDraft(model).open(context([[5]])).propose(Sampled((3, 2)), [5], 2)[0]
    for distribution in tree.distributions.values():
        assert distribution.shape == (VOCAB,)
        assert distribution[min(own, VOCAB) :].sum() == 0
        assert distribution.sum() == pytest.approx(1)


def test_sampled_laws_are_the_warped_law_of_a_fresh_pass(far):
    """q is what the tokens are drawn from: after temperature and top-k, in float64."""
    session = ModelDraft(far).open(context([PROMPTS[0]], temperature=0.7, top_k=6))
    tree = session.propose(Sampled((3, 2)), PROMPTS[0][-1:], 2)[0]
    for (node, draft), distribution in tree.distributions.items():
        logits = fresh(far, [*PROMPTS[0], *tree.path(node)]) / 0.7
        logits[logits < logits.topk(6).values[-1]] = -torch.inf
        assert draft == 0
        assert torch.allclose(torch.from_numpy(distribution.copy()), logits.softmax(-1), atol=1e-9)
        assert distribution.dtype == "float64"


@pytest.mark.parametrize("inverse_temperature", [1.0, 1.5])
def test_coupled_candidates_are_ranked_by_the_targets_own_noise(far, inverse_temperature):
    """The first child is argmax(s log q + g) with the noise of the position it would have."""
    ids = list(PROMPTS[0])
    session = ModelDraft(far).open(context([ids], coupled=True, temperature=1.0, top_k=0))
    session.inverse_temperature = inverse_temperature
    tree = session.propose(Chain(3), ids[-1:], 3)[0]
    for token in tree.path(len(tree) - 1):
        noise = gumbel(key(9, COUPLING, len(ids)), VOCAB)
        assert token == int((inverse_temperature * fresh(far, ids) + noise).argmax())
        ids.append(int(token))


def test_rows_of_a_batch_draft_as_alone(far):
    """Ranked trees of a ragged batch are those of each row alone, up to rounding in the scores."""
    together = ModelDraft(far).open(context(PROMPTS)).propose(BestFirst(10, 4), ends(PROMPTS), 4)
    for prompt, tree in zip(PROMPTS, together, strict=True):
        alone = ModelDraft(far).open(context([prompt])).propose(BestFirst(10, 4), prompt[-1:], 4)[0]
        assert tree.tokens.tolist() == alone.tokens.tolist()
        assert tree.parents.tolist() == alone.parents.tolist()


def test_what_two_drafts_propose_is_kept_apart(target, near, far):
    """Each draft of several keeps its own cache: its nodes' scores stay those of its own fresh passes."""
    ids = list(PROMPTS[0])
    result = SpeculativeDecoder(target, drafts=[near, far], tree=Expansion((2, 1))).generate(ids, max_new_tokens=16)
    assert result.token_ids == plain(target, ids, 16)
    for step in result.steps:
        for node in step.tree.children(0):
            models = [(near, far)[draw.draft] for draw in step.tree.draws[node]]
            scores = [float(fresh(model, ids)[int(step.tree.tokens[node])]) for model in models]
            assert float(step.tree.scores[node]) == pytest.approx(max(scores), abs=1e-5)
        ids += step.tokens


def test_ids_that_a_text_does_not_use_are_not_proposed(far, monkeypatch):
    """As many ids as the last tokens ask for: these ask for 16 until higher ones are committed."""
    monkeypatch.setattr(language_model, "FEWEST", 16)
    session = ModelDraft(far).open(context([[1, 5, 9, 12, 3]]))
    trees = [session.propose(BestFirst(12, 3), [3], 3)[0]]
    check_tree_of_first(far, [1, 5, 9, 12, 3], trees[0], 16)
    session.commit([list(range(VOCAB - 8, VOCAB))])
    trees += [session.propose(BestFirst(12, 3), [VOCAB - 1], 3)[0]]
    assert max(trees[0].tokens) < 16 <= max(trees[1].tokens)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.0, "seed": 3}])
def test_texts_are_the_targets_whatever_ids_a_draft_leaves_out(target, near, monkeypatch, options):
    monkeypatch.setattr(language_model, "FEWEST", 16)
    monkeypatch.setattr(language_model, "_bound", lambda _: 16)
    plain_ids, own = (
        SpeculativeDecoder(target, None, drafts, tree).generate([3, 4, 5], max_new_tokens=16, **options).token_ids
        for drafts, tree in (([], None), ([ModelDraft(near)], BestFirst(8, 3)))
    )
    assert own == plain_ids


def check_tree_of_first(model, ids, tree, words):
    """Scores are log-probabilities among the first ids."""
    first = fresh(model, ids)[:words].log_softmax(-1)
    for node in range(1, len(tree)):
        if tree.parents[node] == 0:
            assert abs(float(tree.scores[node]) - float(first[int(tree.tokens[node])])) < 1e-5


def test_names(far):
    """Results name drafts by what they were loaded as, or as they were called."""
    assert ModelDraft(far, name="mine").name == "mine"
    assert ModelDraft(far).name == "draft"
    named = tiny_llama(7)
    named.config._name_or_path = "somewhere/small-model/"
    assert ModelDraft(named).name == "small-model"
    assert NGramDraft().name == "ngram"
    assert isinstance(ModelDraft(far).open(context([[1]])), ModelDraftSession)
