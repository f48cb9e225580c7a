"""Verification: its rules on scripted targets, and the engine's own chance (`RowView`) against the distributions.

Monte-Carlo tests are chi-square tests with fixed seeds.  ALARM is the chance that a correct implementation
fails such a test, once, when seeds or noise change; as seeds are fixed, one that passes passes always.
Reused chance and a broken rule must fail the same tests: that is their power.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import GenerationConfig

from specinfer.drafts.rows import draw_rows
from specinfer.engine.gumbel import DRAFT, Coupling, key
from specinfer.engine.sampling import resolve
from specinfer.engine.sequence import Row, RowView
from specinfer.engine.verify import ExactMatch, MultiStep, Verdict, Verifier, residual
from specinfer.errors import NumericalError, PairingError, TreeError
from specinfer.evaluation.certification import NoResidual
from specinfer.tree import Draw, Kind, TokenTree

ALARM = 1e-6
SAMPLES = 4000


class Scripted:
    """A target whose answers are written down: distributions and choices by node, coins in the order of tossing."""

    def __init__(self, distributions=(), choices=(), coins=()):
        self.distributions, self.choices, self.coins = (
            [np.array(distribution, float) for distribution in distributions],
            choices,
            list(coins),
        )
        self.odds, self.drawn = [], []

    def distribution(self, node):
        """Return the distribution written down."""
        return self.distributions[node]

    def choice(self, node):
        """Return the choice written down."""
        return self.choices[node]

    def accepts(self, probability):
        """Toss the next coin."""
        self.odds.append(probability)
        return self.coins.pop(0) < probability

    def draw(self, distribution):
        """Take the likeliest token."""
        self.drawn.append(distribution)
        return int(distribution.argmax())


def family(distributions, draws, kind=Kind.WITHOUT_REPLACEMENT):
    """A tree of one level: the distributions q of the drafts, and (draft, token) in order of drawing."""
    orders = Counter()
    nodes = []
    for draft, token in draws:
        nodes.append((token, (Draw(draft, orders[draft]),), float(np.log(distributions[draft][token]))))
        orders[draft] += 1
    tokens, own, scores = zip(*nodes, strict=True)
    claimed = {(0, draft): np.array(distributions[draft], float) for draft in orders}
    return TokenTree.from_nodes(9, tokens, [0] * len(nodes), scores, own, claimed, kind)


def ranked(*paths):
    """A ranked tree that holds these paths."""
    tokens, parents, scores = [], [], []
    for path in paths:
        for depth, token in enumerate(path):
            parents.append(len(tokens) if depth else 0)
            scores.append(-1.0 - depth)
            tokens.append(token)
    return TokenTree.from_nodes(9, tokens, parents, scores, [(Draw(0, 0),)] * len(tokens))


# --- ExactMatch ---


def test_walk_follows_choices_and_ends_with_the_first_that_was_not_drafted():
    tree = ranked((1, 2), (3, 4))
    choices = {0: 3, tree.child(0, 3): 4, tree.child(tree.child(0, 3), 4): 7}
    assert ExactMatch().verify(tree, Scripted(choices=choices)) == Verdict((3, 4), 7)
    assert ExactMatch().verify(tree, Scripted(choices={0: 5})) == Verdict((), 5)
    assert ExactMatch().verify(TokenTree.root_only(9), Scripted(choices={0: 2})) == Verdict((), 2)


def test_walk_asks_no_coin_and_never_looks_at_laws():
    tree = family([[0.5, 0.5]], [(0, 1), (0, 0)])
    target = Scripted(choices={0: 0, tree.child(0, 0): 1})
    assert ExactMatch().verify(tree, target).token == 1
    assert not target.odds
    assert not target.drawn


# --- MultiStep ---


def test_without_replacement_q_is_renormalised_and_p_becomes_the_residual():
    p, q = [0.4, 0.3, 0.2, 0.1], [0.6, 0.25, 0.1, 0.05]
    target = Scripted([p], coins=[0.9, 0.99])
    verdict = MultiStep().verify(family([q], [(0, 0), (0, 1)]), target)
    first = np.array([0, 0.05, 0.1, 0.05]) / 0.2
    second = np.array([0, 0.625, 0.25, 0.125])
    assert target.odds == pytest.approx([2 / 3, first[1] / second[1]])
    left = np.maximum(first - second, 0)
    assert target.drawn[0] == pytest.approx(left / left.sum())
    assert verdict == Verdict((), 2)


def test_with_replacement_q_stays_and_a_token_drawn_twice_is_tried_twice():
    p, q = [0.2, 0.8], [0.9, 0.1]
    tree = family([q], [(0, 0), (0, 0)], Kind.IID)
    assert len(tree) == 2
    target = Scripted([p], coins=[0.5, 0.0])
    assert MultiStep(replacement=True).verify(tree, target) == Verdict((), 1)
    assert target.odds == pytest.approx([2 / 9, 0.0])  # nothing is left of it, and a coin of 0.0 is not below


def test_accepted_draws_end_the_family_and_the_next_node_is_asked():
    q = np.array([0.5, 0.5])
    tree = TokenTree.from_nodes(
        9, [0, 1], [0, 1], np.log([0.5, 0.25]), [(Draw(0, 0),)] * 2, {(0, 0): q, (1, 0): q}, Kind.IID
    )
    target = Scripted([[0.5, 0.5], [0.25, 0.75], [0.9, 0.1]], coins=[0.5, 0.5])
    assert MultiStep(replacement=True).verify(tree, target) == Verdict((1, 2), 0)
    assert target.drawn[0].tolist() == [0.9, 0.1]  # all accepted: the bonus token is drawn from p itself


def test_every_draft_is_tested_with_its_own_q_in_its_own_order():
    p, distributions = [0.5, 0.2, 0.3], [[0.8, 0.1, 0.1], [0.6, 0.1, 0.3]]
    tree = family(distributions, [(1, 1), (1, 0), (0, 0), (0, 1)])  # both drew tokens 0 and 1: two nodes, four draws
    assert tree.num_drafted == 2
    target = Scripted([p], coins=[0.99] * 4)
    assert MultiStep().verify(tree, target) == Verdict((), 2)
    after = np.array([0, 1, 2]) / 3  # of p, once draft 0's token 0 is rejected; q is then [0, 0.5, 0.5]
    assert target.odds == pytest.approx([0.5 / 0.8, after[1] / 0.5, 0, 0])


def test_drafts_stand_in_for_each_other_with_what_is_left_of_p():
    p, distributions = [0.3, 0.3, 0.4], [[0.8, 0.1, 0.1], [0.1, 0.7, 0.2]]
    target = Scripted([p] * 3, coins=[0.99, 0.5])
    tree = family(distributions, [(0, 0), (1, 1)])
    assert MultiStep().verify(tree, target).path == (tree.child(0, 1),)
    assert target.odds == pytest.approx([0.3 / 0.8, 0.4 / 0.7])  # p is [0, 0.4, 0.6] by then


@pytest.mark.parametrize("replacement", [True, False])
def test_one_hot_laws_never_divide_by_zero(replacement):
    kind = Kind.IID if replacement else Kind.WITHOUT_REPLACEMENT
    rule, one, two = MultiStep(replacement), [1.0, 0.0, 0.0], [0.0, 0.5, 0.5]
    with np.errstate(all="raise"):
        sure = Scripted([one, two], coins=[1 - 2**-53])
        assert rule.verify(family([one], [(0, 0)], kind), sure).path == (1,)  # p = q one-hot: always accepted
        never = Scripted([two], coins=[0.0])
        assert rule.verify(family([one], [(0, 0)], kind), never) == Verdict((), 1)  # p = 0: u = 0 is rejected
        certain = Scripted([one, two], coins=[0.999, 0.999])
        tree = family([[0.5, 0.25, 0.25]], [(0, 1), (0, 0)], kind)
        assert rule.verify(tree, certain).path == (tree.child(0, 0),)


def test_draws_that_exhaust_q_leave_what_p_has_beyond_it():
    p, q = [0.1, 0.2, 0.7], [0.5, 0.5, 0.0]
    target = Scripted([p], coins=[0.99, 0.99])
    with np.errstate(all="raise"):
        assert MultiStep().verify(family([q], [(0, 0), (0, 1)]), target) == Verdict((), 2)
    assert target.drawn[0].tolist() == [0.0, 0.0, 1.0]


def test_verification_leaves_the_trees_laws_alone():
    tree = family([[0.6, 0.4]], [(0, 0), (0, 1)])
    before = tree.distributions[0, 0].copy()
    MultiStep().verify(tree, Scripted([[0.1, 0.9]] * 3, coins=[0.9, 0.9]))
    assert (tree.distributions[0, 0] == before).all()


def test_residual_is_what_q_leaves_of_p_and_p_where_nothing_is_left():
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    assert residual(p, q).tolist() == [1.0, 0.0, 0.0]
    assert residual(p, p) is p
    assert residual(p, p + 0.1) is p
    assert residual(p, np.zeros(3)) == pytest.approx(p)


# --- Pairing ---


@pytest.mark.parametrize(
    ("rule", "exact"),
    [
        (ExactMatch(), set(Kind)),
        (MultiStep(), {Kind.WITHOUT_REPLACEMENT}),
        (MultiStep(replacement=False), {Kind.WITHOUT_REPLACEMENT}),
        (MultiStep(replacement=True), {Kind.IID}),
    ],
)
@pytest.mark.parametrize("kind", Kind)
def test_a_pair_that_would_be_biased_is_refused_with_the_way_out(rule, exact, kind):
    assert rule.kinds == exact
    if kind in exact:
        rule.check(kind)
        return
    with pytest.raises(PairingError, match=f"on a {kind} tree") as caught:
        rule.check(kind)
    assert "Use ExactMatch() for ranked trees" in str(caught.value)


def test_a_verifier_must_say_for_which_kinds_it_is_exact():
    silent = type("Silent", (Verifier,), {"verify": ExactMatch.verify})
    with pytest.raises(TypeError, match="kinds"):
        silent()


# --- The engine's chance ---

P = np.array([0.4, 0.25, 0.0, 0.2, 0.1, 0.05])
Q = np.array([0.1, 0.3, 0.2, 0.2, 0.2, 0.0])
HALVES = np.array([0.5, 0.1, 0.1, 0.1, 0.1, 0.1])


def row(seed, sampling=True):
    options = {"top_k": 0} if sampling else {}
    settings = resolve(GenerationConfig(), do_sample=sampling, max_new_tokens=9, **options)
    return Row(0, [1, 2], settings, 9, seed, torch.device("cpu"), draft_names=["draft"])


@pytest.fixture(scope="module")
def base():
    return row(0)


def view(base, tree, distributions, seed, kind=RowView):
    """The engine's view of one row at a tree whose nodes have these target distributions."""
    base.seed, base.coupling = seed, Coupling(seed)
    return kind(base, tree, torch.from_numpy(np.array(distributions)).log())


def p_value(tokens, distribution):
    """Chi-square of counts against a distribution; a token of probability zero fails at once."""
    counts = np.bincount(tokens, minlength=distribution.size)
    if counts[distribution.ravel() == 0].any():
        return 0.0
    some = distribution.ravel() > 0
    return float(chisquare(counts[some], distribution.ravel()[some] * len(tokens)).pvalue)


class Reused(RowView):
    """Chance that forgets what it belongs to: one noise for all positions, one number for all coins."""

    tosses = property(lambda self: 0, lambda self, value: None)

    def choice(self, node):
        """Choose by the noise of the root's position."""
        self.base -= int(self.tree.depths[node])
        token = super().choice(node)
        self.base += int(self.tree.depths[node])
        return token


def chosen(base, kind):
    """Two tokens by the target's choice along a tree that has every first token."""
    tree = ranked(*((token,) for token in range(6)))
    pairs = []
    for seed in range(SAMPLES):
        target = view(base, tree, [P] + [HALVES] * 6, seed, kind)
        first = target.choice(0)
        pairs.append(first * 6 + target.choice(tree.child(0, first)))
    return pairs


def drawn(base, kind):
    """Two draws from different distributions by one view."""
    pairs = []
    for seed in range(SAMPLES):
        target = view(base, TokenTree.root_only(9), [P], seed, kind)
        pairs.append(target.draw(P) * 6 + target.draw(HALVES))
    return pairs


def tossed(base, kind):
    """Two coins and what they show: 0 to 3."""
    shows = []
    for seed in range(SAMPLES):
        target = view(base, TokenTree.root_only(9), [P], seed, kind)
        shows.append(2 * target.accepts(0.3) + target.accepts(0.6))
    return shows


def verified(base, kind, rule=MultiStep(), children=2):  # noqa: B008  (rules have no state)
    """The first token that multi-step sampling emits, the draft's draws by the engine's own generator."""
    tokens, logits, replacement = [], torch.from_numpy(Q)[None, None].log(), rule.replacement
    for seed in range(SAMPLES):
        draws = draw_rows(logits, children, replacement, [key(seed, DRAFT, 0, 1, 0)])
        order = [(0, token) for token in draws[0].flatten().tolist()]
        tree = family([Q], order, Kind.IID if replacement else Kind.WITHOUT_REPLACEMENT)
        target = view(base, tree, [P] + [HALVES] * (len(tree) - 1), seed, kind)
        verdict = rule.verify(tree, target)
        tokens.append(int(tree.tokens[verdict.path[0]]) if verdict.path else verdict.token)
    return tokens


COINS = np.outer([0.7, 0.3], [0.4, 0.6])
CHANCES = [
    pytest.param(chosen, np.outer(P, HALVES), id="gumbel choices at two positions"),
    pytest.param(drawn, np.outer(P, HALVES), id="two draws"),
    pytest.param(tossed, COINS, id="two coins"),
    pytest.param(verified, P, id="multi-step sampling, without replacement"),
]


@pytest.mark.parametrize(("experiment", "distribution"), CHANCES)
def test_the_engines_chance_has_the_law_it_claims(base, experiment, distribution):
    assert p_value(experiment(base, RowView), distribution) > ALARM


def test_the_engines_chance_has_the_law_it_claims_with_replacement(base):
    assert p_value(verified(base, RowView, MultiStep(replacement=True), children=3), P) > ALARM


@pytest.mark.parametrize(("experiment", "distribution"), CHANCES)
def test_power_chance_that_is_reused_fails_the_same_test(base, experiment, distribution):
    assert p_value(experiment(base, Reused), distribution) < ALARM


def test_power_a_biased_rule_fails_the_same_test(base):
    assert p_value(verified(base, RowView, NoResidual()), P) < ALARM


def test_greedy_rows_choose_the_argmax_and_their_law_is_a_point_mass():
    target = view(row(0, sampling=False), TokenTree.root_only(9), [HALVES], seed=3)
    assert target.choice(0) == 0
    assert target.distribution(0).tolist() == [1.0, 0, 0, 0, 0, 0]


def test_a_distribution_and_a_probability_wait_for_their_device_once_each(waits):
    target = view(row(0), TokenTree.root_only(9), [HALVES], seed=3)
    distribution = target.distribution(0)
    assert waits == ["cpu"]
    assert target.probability(0, 1) == pytest.approx(distribution[1])
    assert waits == ["cpu", "__float__"]


@pytest.mark.parametrize("spoilt", [[0, float("nan")], [0, float("inf")], [-float("inf")] * 2])
@pytest.mark.parametrize("ask", [lambda target: target.distribution(0), lambda target: target.probability(0, 0)])
def test_scores_that_nothing_can_be_drawn_from_have_no_distribution(spoilt, ask):
    target = view(row(0), TokenTree.root_only(9), [[0.5, 0.5]], seed=3)
    target.logits = torch.tensor([spoilt])
    with pytest.raises(NumericalError, match="NaN, infinite or all -inf"):
        ask(target)


def test_the_same_seed_gives_the_same_chance_and_another_seed_another(base):
    def everything(seed):
        target = view(base, TokenTree.root_only(9), [HALVES], seed)
        return [target.choice(0), *(target.draw(HALVES) for _ in range(20))]

    assert everything(5) == everything(5)
    assert everything(5) != everything(6)
    assert key(5, 1, 2) != key(5, 2, 1)


def test_a_choice_does_not_depend_on_the_tree(base):
    bare, full = TokenTree.root_only(9), ranked((0, 1), (3,))
    for seed in range(50):
        assert view(base, bare, [P], seed).choice(0) == view(base, full, [P] * 4, seed).choice(0)


def test_draws_never_take_a_token_of_probability_zero(base):
    for distribution in (np.eye(6)[2], np.array([0, 0.5, 0, 0.5, 0, 0])):
        drawn_tokens = {view(base, TokenTree.root_only(9), [P], seed).draw(distribution) for seed in range(300)}
        assert drawn_tokens == set(distribution.nonzero()[0])


def test_coins_keep_their_ends(base):
    target = view(base, TokenTree.root_only(9), [P], 0)
    assert all(target.accepts(1.0) for _ in range(1000))
    assert not any(target.accepts(0.0) for _ in range(1000))


@pytest.mark.parametrize("size", [1, 4])
def test_a_law_over_another_vocabulary_is_refused(size):
    """One of a single token would even be subtracted from all of p."""
    with pytest.raises(TreeError, match=f"draft 0 drew from {size} tokens, .* 2"):
        MultiStep().verify(family([np.eye(size)[0]], [(0, 0)]), Scripted([[0.5, 0.5]], coins=[0.9]))


def test_records_without_laws_cannot_be_verified_by_mistake():
    tree = family([[0.5, 0.5]], [(0, 0)]).without_distributions()
    with pytest.raises(PairingError, match="distributions"):
        MultiStep().verify(tree, Scripted([[0.5, 0.5]], coins=[0.5]))
