"""The certificates themselves: lossless pairs are exact, known mistakes show, and the enumeration adds up."""

import doctest
import sys
from itertools import product

import numpy as np
import pytest

import specinfer.evaluation.certification  # noqa: F401  (the package shows its function of the same name)
from specinfer.engine.verify import ExactMatch, MultiStep, Verdict
from specinfer.errors import InputError
from specinfer.tree import Chain, Expansion, Sampled

module = sys.modules["specinfer.evaluation.certification"]
EXACT, VISIBLE = 1e-12, 1e-3  # total variation: rounding in float64, and a bias that a test must notice


def named(pairs):
    return [pytest.param(pair, id=f"{pair.tree} | {pair.rule} | {len(pair.behaviours)}") for pair in pairs]


@pytest.mark.parametrize("pair", named(module.lossless_pairs()))
def test_lossless_pairs_emit_the_targets_law(pair):
    (certificate,) = module.certify([pair])
    assert certificate.total_variation <= EXACT
    assert certificate.lossless
    assert certificate.passed
    assert certificate.tokens >= 2


@pytest.mark.parametrize(("seed", "vocabulary"), [(0, 3), (1, 4), (2, 3), (3, 4)])
@pytest.mark.parametrize("pair", named(module.broken_pairs()))
def test_power_every_mistake_is_seen_whatever_the_seed(pair, seed, vocabulary):
    (certificate,) = module.certify([pair], vocabulary, tokens=2, seed=seed)
    assert certificate.total_variation > VISIBLE
    assert not certificate.lossless
    assert certificate.passed


@pytest.mark.parametrize("seed", [1, 2])
def test_other_models_and_another_vocabulary_are_lossless_too(seed):
    cheap = [pair for pair in module.lossless_pairs() if pair.policy.max_nodes < 5 and len(pair.behaviours) < 3]
    for certificate in module.certify(cheap, vocabulary=3, seed=seed):
        assert certificate.total_variation <= EXACT, certificate


class Published:
    """The distributions for which the biases of mistakes were computed independently, in the first position."""

    vocabulary = 4

    def distribution(self, model, context):
        """Return the same distribution in every context."""
        return np.array([[0.4, 0.3, 0.2, 0.1], [0.6, 0.25, 0.1, 0.05], [0.1, 0.2, 0.3, 0.4]])[model]


@pytest.mark.parametrize(
    ("pair", "bias"),
    list(zip(module.broken_pairs(), [0.3, 0.267, 0.075, 0.03, 0.199, 0.131, 0.105], strict=False)),
    ids=lambda value: getattr(value, "tree", None),
)
def test_mistakes_are_as_large_as_an_independent_enumeration_found(pair, bias):
    emitted = module.output_distribution(pair, Published(), tokens=2).sum(1)  # the distribution of the first token
    target = Published().distribution(0, ())
    assert module.total_variation(emitted, target) == pytest.approx(bias, abs=5e-4)


def test_reused_noise_shows_in_the_joint_law_only():
    pair = module.Pair(Expansion((2, 2)), ExactMatch(), (module.favours,), module.Choices.REUSED)
    models = module.RandomModels(4, seed=0)
    emitted, target = module.output_distribution(pair, models, 3), module.target_distribution(pair, models, 3)
    assert module.total_variation(emitted.sum((1, 2)), target.sum((1, 2))) <= EXACT
    assert module.total_variation(emitted, target) > 0.1


@pytest.mark.parametrize("pair", [module.lossless_pairs()[0], *module.broken_pairs()])
def test_probabilities_sum_to_one(pair):
    models = module.RandomModels(3, seed=0)
    assert module.output_distribution(pair, models, 3).sum() == pytest.approx(1, abs=EXACT)
    assert module.target_distribution(pair, models, 3).sum() == pytest.approx(1, abs=EXACT)


def test_enumeration_meets_every_outcome_once_with_its_probability():
    def run(chance):
        first = chance.choose(np.array([0.5, 0.0, 0.5]))
        return (first, chance.choose(np.array([0.1, 0.2, 0.7]))) if first else (first,)

    assert {result: weight for weight, result in module.outcomes(run)} == {
        (0,): 0.5,
        (2, 0): pytest.approx(0.05),
        (2, 1): pytest.approx(0.1),
        (2, 2): pytest.approx(0.35),
    }


def test_the_models_have_zeros_one_hots_and_disagree():
    models = module.RandomModels(4, seed=0)
    texts = [text for n in range(3) for text in product(range(4), repeat=n)]
    distributions = [
        (models.distribution(0, text), models.distribution(draft, text)) for text in texts for draft in (1, 2, 3)
    ]
    assert any(((p > 0) & (q == 0)).any() for p, q in distributions)
    assert any(((p == 0) & (q > 0)).any() for p, q in distributions)
    assert any(p.max() == 1 for p, _ in distributions)
    assert any(q.max() == 1 for _, q in distributions)
    assert all(np.abs(p - q).max() > 1e-3 for p, q in distributions if max(p.max(), q.max()) < 1)
    assert all((models.distribution(model, ()) > 0).all() for model in range(4))


@pytest.mark.parametrize("draft", [module.EnumeratedLattice, module.EnumeratedPairs])
def test_lattices_depend_on_the_depth_and_pairs_on_the_token_above_too(draft):
    """Pairs never propose what is no candidate, so the residual has work."""
    pair = module.Pair(Sampled((2, 1)), MultiStep(), draft=draft)
    models = module.RandomModels(4, seed=0)
    found = [tree for _, tree in module._trees(pair, models, (1,), 2)]
    assert len(found) > 10
    below, zeros = {}, 0
    for tree in found:
        for (node, _), q in tree.distributions.items():
            below.setdefault((int(tree.depths[node]), int(tree.tokens[node])), set()).add(tuple(q))
            zeros += int((q == 0).sum())
    assert all(len(alike) == 1 for alike in below.values())
    children = {q for (depth, _), alike in below.items() if depth for q in alike}
    paired = draft is module.EnumeratedPairs
    assert len(children) == (3 if paired else 1)  # one for each candidate
    assert (zeros > 0) is paired
    assert "lattice of " + ("pairs" if paired else "marginals") in pair.tree


def test_coupled_lattices_know_the_noise():
    pair = module.Pair(Chain(2), ExactMatch(), (module.favours,), module.Choices.COUPLED, module.EnumeratedLattice)
    models = module.RandomModels(4, seed=0)
    chains = {
        tuple(tree.tokens.tolist())
        for choice in range(4)
        for _, tree in module._trees(pair, models, (1,), 2, lambda _, choice=choice: choice)
    }
    assert len(chains) > 2


class LikeWalk:
    """A verifier that shares no code with the library's."""

    def verify(self, tree, target):
        """Verify."""
        path, token = [], target.choice(0)
        while (child := tree.child(path[-1] if path else 0, token)) is not None:
            path.append(child)
            token = target.choice(child)
        return Verdict(tuple(path), token)


class Careless(LikeWalk):
    """Accepts the first child always."""

    def verify(self, tree, target):
        """Verify."""
        if len(tree) == 1:
            return super().verify(tree, target)
        return Verdict((1,), target.choice(1))


class AcceptLikely(LikeWalk):
    """Accepts a drafted token if the target finds it likely; where it does not, nothing shows."""

    def verify(self, tree, target):
        """Verify."""
        if len(tree) > 1 and target.distribution(0)[tree.tokens[1]] > 0.3:
            return Verdict((1,), target.choice(1))
        return Verdict((), target.choice(0))


def test_a_mistake_that_one_made_up_target_hides_is_found_by_another():
    pair = module.Pair(Chain(2), AcceptLikely(), (module.honest,))
    assert module._certificate(pair, module.RandomModels(4, 0), 2).lossless
    assert not module.certify_verifier(AcceptLikely(), Chain(2), tokens=2).lossless


def test_a_verifier_of_ones_own():
    good = module.certify_verifier(LikeWalk(), Expansion((2, 1)), drafts=2, vocabulary=3)
    assert (good.lossless, good.passed, good.drafts, good.vocabulary, good.tokens) == (True, True, 2, 3, 3)
    assert good.verifier.startswith("LikeWalk()")
    bad = module.certify_verifier(Careless(), Chain(2))
    assert bad.total_variation > VISIBLE
    assert not bad.passed


class Elsewhere:
    """Takes chance from elsewhere: every other time, it asks for one draw more."""

    calls = 0

    def verify(self, tree, target):
        """Verify."""
        self.calls += 1
        if self.calls % 2:
            target.draw(target.distribution(0))
        return Verdict((), target.draw(target.distribution(0)))


def test_chance_from_elsewhere_is_an_error_not_a_number():
    with pytest.raises(InputError, match="all its chance from the target"):
        module.certify_verifier(Elsewhere(), Chain(1))


def test_certificates_are_json_ready_and_progress_sees_every_pair():
    seen = []
    pairs = [module.Pair(Sampled((1,)), MultiStep()), module.Pair(Chain(1), ExactMatch())]
    certificates = module.certify(pairs, tokens=2, progress=lambda *told: seen.append(told))
    assert seen == [("pairs", done, 2, {}) for done in range(3)]
    first = certificates[0].to_dict()
    assert first["tree"] == "Sampled(expansion=(1,), replacement=False)"
    assert first["verifier"] == "MultiStep(replacement=False), sampling"
    assert (first["lossless"], first["expected_lossless"], first["passed"]) == (True, True, True)
    assert first["total_variation"] <= EXACT


def test_the_documented_example_runs():
    result = doctest.testmod(module)
    assert result.attempted > 3
    assert result.failed == 0
