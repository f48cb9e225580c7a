"""Trees that adapt, in a made-up world: tokens by lot, seconds by decree, so every count is the same on any machine."""

import copy
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY, token_trees
from world import BAD, GOOD, P, World

from specinfer import Auto
from specinfer.adaptive.experience import ALLOWANCE, REMEMBERED, STAKE, Acceptance, Average, DraftRecord, Line, Seconds
from specinfer.adaptive.policy import FIRST_NODES, MAX_NODES, MOST, PLAIN_AGAIN
from specinfer.errors import PolicyError
from specinfer.tree import DenseSource, Draw, Forest, Frontier, Kind, TokenTree, merge


def flat(seconds, node=0.0):
    """A pass that costs so much, whatever it scores."""
    return lambda nodes: seconds + node * nodes


# ---- sizes ----


@pytest.mark.parametrize(("rows", "first"), [(1, FIRST_NODES), (2, FIRST_NODES // 2), (16, 1)])
def test_the_first_steps_are_small_and_one_is_plain(rows, first):
    """Until costs are known: trees of different sizes, no pass twice as large as the one before."""
    one, two, plain, three = World([GOOD], flat(0.1), 0.001, rows).run(4).nodes(4)
    assert one == first < two < three
    assert plain == 0
    assert two + 1 <= 2 * (one + 1)
    assert three + 1 <= 2 * (two + 1)


@pytest.mark.parametrize("rows", [1, 16])
def test_an_expensive_target_and_a_good_draft_make_large_trees(rows):
    world = World([GOOD], flat(0.1, 0.0001), 0.001, rows).run(100)
    assert np.mean(world.nodes(50)) > 20
    assert np.mean([levels for (levels,) in world.levels[-50:]]) > 4


def steps_to(world, nodes, most=120):
    """Return after how many steps a tree of so many nodes was scored; `most` if none was."""
    world.run(most)
    return next((step for step, tree in enumerate(world.trees) if tree.num_drafted >= nodes), most)


def test_where_nodes_cost_nothing_trees_grow_step_by_step():
    """Weights that are fetched in every pass: no tree is more than twice as large as any before it, 31 nodes apart."""
    world = World([GOOD], flat(3.0, 0.0001), 0.001)
    assert steps_to(world, 250) < 60
    sizes = [tree.num_drafted for tree in world.trees]
    assert max(sizes) <= MOST
    assert all(size <= max(MAX_NODES, 2 * max(sizes[:step], default=0) + 1) for step, size in enumerate(sizes))
    assert max(sizes[:20]) >= MAX_NODES


@pytest.mark.parametrize("rows", [1, 16])
def test_no_pass_is_more_than_twice_as_large_as_any_before(rows):
    """Seconds are noisy: a few of them may promise that nodes cost nothing."""
    sizes = [tree.num_drafted + 1 for tree in World([GOOD], flat(0.1), 0.001, rows).run(20).trees]
    assert all(size <= 2 * max(sizes[:step]) for step, size in enumerate(sizes) if step)
    assert max(sizes) == MOST + 1


@pytest.mark.parametrize("node", [0.05, 0.1, 0.5])
def test_where_nodes_are_dear_no_larger_tree_is_tried(node):
    """At 0.05, 31 nodes cost 1.5 times what none do."""
    assert steps_to(World([GOOD], flat(3.0, node), 0.001), MAX_NODES + 1) == 120


def test_trees_shrink_again_where_a_larger_size_turns_out_to_be_dear():
    """Free up to 31 nodes, and dear beyond."""
    world = World([GOOD], lambda nodes: 3.0 + 0.0001 * nodes + 0.2 * max(0, nodes - MAX_NODES), 0.001).run(200)
    assert max(world.nodes(200)) <= 2 * MAX_NODES + 1
    assert np.mean(np.array(world.nodes(100)) > MAX_NODES) < 0.2


def test_bounds_that_are_given_hold_however_cheap_nodes_are():
    world = World([GOOD], flat(3.0), 0.001, policy=Auto(12, 3)).run(60)
    assert max(world.nodes(60)) == 12
    assert max(tree.depths.max() for tree in world.trees) == 3


def test_chains_get_deeper_where_passes_are_dear():
    """A draft that is sure: without a bound on levels it drafts as many as there may be nodes."""
    sure = [0.0, *[-np.inf] * 9]
    world = World([sure], flat(3.0), 0.00001)
    world.verify = lambda tree: ([*range(1, len(tree))], [0] * len(tree))
    world.depth = 300
    world.run(40)
    assert max(tree.depths.max() for tree in world.trees) > 100


def test_nodes_that_cost_much_make_small_trees():
    large = World([GOOD], flat(0.1, 0.0005), 0.001).run(100)
    small = World([GOOD], flat(0.1, 0.02), 0.001).run(100)
    assert 0 < np.mean(small.nodes(50)) < 6 < np.mean(large.nodes(50))


def test_levels_that_cost_much_make_shallow_trees():
    shallow, deep = (
        np.mean([levels for (levels,) in World([GOOD], flat(0.1, 0.001), cost).run(100).levels[-50:]])
        for cost in (0.06, 0.001)
    )
    assert 0 < shallow < 2.5
    assert deep > 4


@pytest.mark.parametrize("rows", [1, 3])
def test_a_target_as_cheap_as_its_draft_decodes_plainly(rows):
    world = World([GOOD], flat(0.01), 0.02, rows).run(200)
    assert world.nodes(100).count(0) >= 85
    assert world.asked(0, 100) <= 15


def test_nodes_that_cost_more_than_they_gain_are_not_scored():
    """One token more, at best, for twice the seconds: the draft is idle, too."""
    world = World([GOOD], lambda nodes: 0.1 if nodes == 0 else 0.4, 0.0001).run(200)
    assert world.nodes(100).count(0) >= 85


@pytest.mark.parametrize("rows", [4, 8, 16])
def test_where_every_token_of_a_pass_costs_many_rows_decode_as_fast_as_plainly(rows):
    """A processor that computes all the time: a node costs what it gains, and drafts come on top of that."""
    world = World([GOOD], lambda nodes: 0.006 + 0.0017 * rows * (nodes + 1), 0.0035, rows).run(600)
    assert world.speed(600) > 0.96
    assert world.speed(300) > 0.98


def best_speed(target, level, most=100):
    """Return the speed of the best fixed size of a best-first tree of P, over that of plain decoding."""
    paths, mass, depth, speeds = [(-p, 1) for p in P], 1.0, 0, [1.0]
    for nodes in range(1, most):
        path = min(paths)
        paths.remove(path)
        paths += [(path[0] * p, path[1] + 1) for p in P]
        mass, depth = mass - path[0], max(depth, path[1])
        speeds.append(mass * target(0) / (target(nodes) + level * depth))
    return max(speeds)


@pytest.mark.parametrize(("experts", "chosen", "share", "rows"), [
    (8, 2, 0.2, 1), (8, 2, 0.6, 4), (64, 8, 0.6, 1), (64, 8, 0.8, 4), (128, 8, 0.2, 4), (128, 8, 0.8, 1),
])  # fmt: skip
def test_where_tokens_wake_experts_trees_are_nearly_of_the_best_size(experts, chosen, share, rows):
    """A pass reads each expert once that one of its tokens chooses, at random; a token also costs 3 % of a pass."""

    def target(nodes):
        tokens = rows * (nodes + 1)
        woken = experts / chosen * (1 - (1 - chosen / experts) ** tokens)  # 1 for a single token
        return 0.01 * (1 - share + share * woken) + 0.0003 * tokens

    world = World([GOOD], target, 0.0005, rows).run(600)
    assert world.speed(300) > 0.92 * best_speed(target, 0.0005)


def test_drafts_are_judged_anew_when_half_of_the_rows_are_left():
    """What never pays for many rows may pay for few; it is tried when a few steps show that these go on."""
    world = World([GOOD], lambda nodes: 0.006 + 0.0017 * 16 * (nodes + 1), 0.0035, 16).run(400)
    assert world.asked(0, 100) < 10
    world.rows, world.target = 2, lambda nodes: 0.02 + 0.0001 * nodes
    assert world.run(8).asked(0, 8) == 0
    assert world.run(42).asked(0, 20) > 18


def test_rows_share_one_number_of_nodes():
    policy = Auto()
    world = World([GOOD], flat(0.1, 0.002), 0.001, rows=3, policy=policy).run(40)
    sizes = [len(tree) for tree in policy.fit(Forest.of([source_tree(world, row) for row in range(3)]))]
    assert len(set(sizes)) == 1


def source_tree(world, row):
    return world.policy.grow(world.source(0), 8).trees([0] * world.rows)[row]


def test_plain_steps_are_measured_again():
    world = World([GOOD], flat(0.1), 0.001).run(6 * PLAIN_AGAIN)
    assert 4 <= world.nodes(3 * PLAIN_AGAIN).count(0) <= 6  # two in a row, of which the second is timed


def test_trees_are_measured_again():
    """A machine that was busy while the first trees were timed is not for ever too slow for trees."""
    world = World([GOOD], None, 0.003)
    world.target = lambda nodes: 0.03 + 0.0006 * nodes + (0.06 if nodes and len(world.trees) <= 40 else 0)
    assert np.mean(np.array(world.run(40).nodes(30)) == 0) > 0.7
    assert min(sorted(world.run(100).nodes(20))[2:]) > 0


def test_trees_that_never_pay_are_hardly_measured():
    world = World([GOOD], lambda nodes: 0.1 if nodes == 0 else 0.4, 0.0001).run(20 + 4 * PLAIN_AGAIN)
    assert np.count_nonzero(world.nodes(4 * PLAIN_AGAIN)) > 0
    assert world.speed(4 * PLAIN_AGAIN) > 0.98


def test_a_draft_that_was_slow_for_a_while_works_again():
    """While it idles it is timed seldom, so what is timed counts for all that was."""
    world = World([GOOD], flat(0.03, 0.0006), 0.036).run(60)
    assert world.asked(0, 20) < 8
    world.level = 0.003
    assert world.run(90).asked(0, 30) >= 28


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize(("worth", "asked"), [(1.1, 2), (0.9, 0)])
def test_a_level_must_gain_more_than_it_costs(rows, worth, asked):
    """Two nodes of each row."""
    auto = World([GOOD], flat(0.1), 0.001, rows).policy
    auto.costs.plain[rows], auto.costs.levels[0] = Seconds(), Seconds()
    auto.costs.plain[rows].add(0.1)
    nodes = torch.ones(rows, 2, dtype=torch.long)
    for depth in (1, 2):
        gained = 2 * rows * 0.4 * auto.acceptance.family(0, depth)
        auto.costs.levels[0].value = gained / worth / auto.costs.price(rows)
        frontier = Frontier(nodes, nodes, nodes > 0, depth)
        assert auto.wanted_nodes(0, frontier, torch.full((rows, 2), 0.4).log()) == asked


# ---- which drafts work ----


@pytest.mark.parametrize("cost", [0.02, 0.1])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_draft_that_is_never_right_idles_and_is_tried_again(rows, cost):
    """The more rows and the dearer it is, the longer it idles: what a trial costs is allowed first."""
    world = World([BAD], flat(0.1), cost, rows).run(1200)
    lost = cost / 0.1 * rows**0.5  # by a step that asks it
    allowed = STAKE[0] / rows**0.5 + ALLOWANCE * (REMEMBERED**0.5 + (1200 - REMEMBERED) / (2 * REMEMBERED**0.5))
    assert 2 < world.asked(0, 1200) <= allowed / lost + 5  # the last step, and those before costs are known
    assert world.asked(0, 300) > 0


@pytest.mark.parametrize("rows", [1, 16])
def test_a_step_without_nodes_gains_nothing_however_fast_it_was(rows):
    world = World([GOOD], lambda nodes: 0.1 + 0.5 * rows * nodes, 0.005, rows).run(40)
    (record,) = world.policy.records
    record.credit, record.idle, world.target = 2.0, False, lambda nodes: 0.08 + 0.5 * rows * nodes
    world.policy.asked, world.policy.since_trees = 1, 0  # and no tree is due, which would be measured
    world.run(1)
    assert world.asked(0, 1) == 1
    assert world.nodes(1) == [0]
    assert record.credit < 2.0


def test_a_draft_that_becomes_good_is_noticed():
    world = World([BAD], flat(0.1), 0.02).run(200)
    world.distributions[0] = GOOD
    assert world.run(600).asked(0, 50) >= 48


def test_a_plain_step_after_a_tree_is_not_what_plain_decoding_costs():
    """Drafts and trees displace weights from the processor's caches, and the next pass fetches them again."""
    world = World([GOOD], None, 0.003)
    world.target = lambda nodes: 0.03 + 0.001 * nodes + (0.006 if nodes or world.policy.quiet == 0 else 0)
    world.run(200)
    assert world.policy.costs.plain[1].value == pytest.approx(0.03)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("draft", "asked"), [(BAD, 0), (GOOD, 4)])
def test_a_draft_that_lost_more_than_it_gained_is_idle_when_a_text_begins(draft, rows, asked):
    world = World([draft], flat(0.1), 0.02, rows).run(300)
    world.policy.start(1, coupled=False, rows=rows)
    assert world.run(4).asked(0, 4) == asked


def test_a_draft_that_gained_lately_has_a_trial_in_every_text_and_waits_in_those_that_it_fails_in():
    world = World([GOOD], flat(0.1), 0.02).run(100)
    for _ in range(3):
        world.policy.start(1, coupled=False)
        world.distributions = [BAD]
        world.run(30)
        assert 0 < world.asked(0, 30) < 15
        assert world.asked(0, 5) == 0


@pytest.mark.parametrize("rows", [1, 8])
def test_a_wait_goes_on_in_the_next_texts(rows):
    """So trials do not come with every text."""
    world, asked = World([BAD], flat(0.1), 0.02, rows=rows).run(300), 0
    for _ in range(20):
        world.policy.start(1, coupled=False, rows=rows)
        asked += world.run(30).asked(0, 30)
    assert 1 <= asked <= 30


def test_a_prompt_that_was_long_to_read_counts_for_the_next_texts():
    """A draft reads the prompt in a text's first step.  If that costs more than it gains, it is idle in later texts."""
    world = World([GOOD], flat(0.03, 0.0006), 0.003)
    for _ in range(6):
        world.policy.start(1, coupled=False)
        world.level = 2.0
        world.run(1)
        world.level = 0.003
        world.run(6)
    world.policy.start(1, coupled=False)
    assert world.run(5).asked(0, 5) == 0


def test_a_wait_among_many_texts_survives_that_most_of_them_end():
    """Few rows are judged by themselves, as nodes cost something else there."""
    world = World([BAD], flat(0.1), 0.02, rows=16).run(300)
    (known,) = copy.deepcopy(world.policy.learnt.records[1, 5])
    for rows in (8, 4, 2):
        world.rows = rows
        world.run(10)
    (record,) = world.policy.learnt.records[1, 5]
    assert known.idle
    assert record.idle
    assert record.steps - known.steps <= 1
    assert 0 <= record.credit - known.credit < 0.1
    world.rows = 16
    world.policy.start(1, coupled=False, rows=16)
    assert world.run(30).asked(0, 30) == 0


@pytest.mark.parametrize("rows", [1, 16])
def test_a_draft_is_asked_for_one_level_until_its_cost_is_known(rows):
    world = World([GOOD], flat(3.0), 0.001, rows).run(2)
    assert [asked for (asked,) in world.levels] == [1] * 2
    assert max(asked for (asked,) in world.run(4).levels) > 4


def test_an_idle_policy_says_so():
    """Then no draft is asked to propose."""
    world = World([BAD], flat(0.1), 0.02).run(60)
    assert world.policy.idle == (not world.policy.asked)
    found = set()
    for _ in range(100):
        idle = world.policy.idle
        found.add((idle, world.run(1).asked(0, 1) > 0))
    assert found == {(True, False), (False, True)}


def test_packed_trees_are_chosen_among_all_rows():
    """A node goes where it is worth most, and a row that has none costs nothing."""
    auto = World([GOOD], flat(0.1, 0.01), 0.001, rows=2).run(40).policy
    sure, unsure = (
        TokenTree.from_nodes(0, [1, 2], [0, 1], [score, 2 * score], [[Draw(0, 0)]] * 2) for score in (-0.01, -6.0)
    )
    sizes = {}
    for packed in (True, False):
        auto.start(1, coupled=False, rows=2, packed=packed)
        sizes[packed] = [tree.num_drafted for tree in auto.fit(Forest.of([sure, unsure]))]
    assert sizes[True] == [2, 0]
    assert sizes[False][0] == sizes[False][1]


def test_a_draft_that_became_good_is_noticed_in_short_batches_too():
    world = World([BAD], flat(0.1), 0.02, rows=8).run(300)
    world.distributions = [GOOD]
    for _ in range(12):
        world.policy.start(1, coupled=False, rows=8)
        world.run(32)
    assert world.asked(0, 32) > 16


def test_the_good_draft_works_and_the_bad_one_idles():
    world = World([BAD, GOOD], flat(0.1), 0.01).run(300)
    assert world.asked(1, 100) >= 98
    assert world.asked(0, 100) <= 15


def test_of_equal_drafts_one_works():
    world = World([GOOD, GOOD], flat(0.1), 0.02).run(300)
    assert min(world.asked(draft, 200) for draft in (0, 1)) <= 20
    assert sum(world.asked(draft, 200) for draft in (0, 1)) >= 198


def test_drafts_that_cover_different_tokens_work_together():
    first, rest = np.array([0.6, *[0] * 9]), np.array([0, *P[1:], *[0] * 5])
    world = World(
        [np.log(distribution / distribution.sum() + 1e-9) for distribution in (first, rest)], flat(0.1), 0.0001
    ).run(200)
    assert min(world.asked(draft, 100) for draft in (0, 1)) >= 98


def test_reasons_name_costs_and_idle_drafts():
    world = World([GOOD, BAD], flat(0.1, 0.001), 0.01).run(200)
    text = world.policy.reasons(["head", "ngram"], rows=1)
    assert text.startswith("a plain step costs 100.0 ms, one with trees ")
    assert "a level of head 10.0 ms, a level of ngram 10.0 ms" in text
    assert text.endswith("ngram is idle") == (not world.policy.asked >> 1 & 1)
    assert any(not levels[1] for levels in world.levels)


def test_reasons_name_the_rows_and_figures_of_another_load():
    """Costs of a batch are not those of a text, and trees that cost less than none were timed at another time."""
    policy = World([GOOD], flat(0.1, 0.001), 0.01, rows=3).run(60).policy
    assert policy.reasons(["head"], 3).startswith("a plain step of 3 rows costs 100.0 ms, one with trees ")
    assert "faster then" not in policy.reasons(["head"], 3)
    policy.costs.plain[3].value = 9.0
    assert "when they were timed, the machine being faster then" in policy.reasons(["head"], 3)


def test_an_observer_of_nothing_is_calm():
    """No drafts at all: plain steps, and notes without a draft."""
    policy = Auto()
    policy.start(0, coupled=True)
    for _ in range(20):
        trees = policy.fit(Forest.of([TokenTree.root_only(3)]))
        policy.observe(trees, [()], [(5,)], [], 0.1)
    assert policy.reasons([], 1).startswith("a plain step costs 100.0 ms")


# ---- which nodes ----


def learn(acceptance, tree, tokens):
    """Let rates see what became of a tree."""
    acceptance.observe(Forest.of([tree]), [tokens])


def family(parents, scores, tokens=None, draft=0):
    tokens = tokens or list(range(len(parents)))
    return TokenTree.from_nodes(9, tokens, parents, scores, [[Draw(draft, 0)] for _ in parents])


@PROPERTY
@given(token_trees(kind=Kind.RANKED), st.integers(0, 8))
def test_best_is_the_best_of_all_closed_sets(tree, count):
    """Brute force over every set of nodes that holds its own ancestors."""
    worth = np.exp(tree.scores)
    kept = tree.best(count, worth)
    assert kept.num_drafted == min(count, tree.num_drafted)
    paths = {tuple(tree.path(node)): worth[node] for node in range(1, len(tree))}
    gained = sum(paths[tuple(kept.path(node))] for node in range(1, len(kept)))
    nodes = range(1, len(tree))
    closed = [some for some in combinations(nodes, kept.num_drafted) if {*tree.parents[list(some)]} <= {0, *some}]
    assert gained == pytest.approx(max(worth[list(some)].sum() for some in closed))


@pytest.mark.parametrize(("base", "node"), [(0.02, 0.001), (0.05, 0.01), (0.01, 0.03), (0.2, 0.05)])
def test_fit_maximises_tokens_less_the_price_of_seconds(base, node):
    """Brute force over the number of nodes, with a price and costs that are given."""
    chance = np.random.default_rng(3)
    policy = Auto()
    policy.costs.plain[2] = Seconds()
    policy.costs.plain[2].add(0.05)
    for nodes in (2, 5, 9, 14):
        policy.costs.trees.add(2 * (nodes + 1), base + node * 2 * (nodes + 1))
    trees = [family([0, 0, 1, 1, 2], np.log(chance.uniform(0.1, 0.9, 5)) - [0, 0, 3, 3, 3]) for _ in range(2)]
    price = 2 / 0.05
    gains = np.sort(np.exp([tree.scores[1:] for tree in trees]), 1)[:, ::-1].sum(0)
    values = [gains[:n].sum() - price * (policy.costs.trees.at(2 * (n + 1)) if n else 0.05) for n in range(6)]
    assert [tree.num_drafted for tree in policy.fit(Forest.of(trees))] == [int(np.argmax(values))] * 2


def test_nodes_that_several_drafts_propose_are_trusted_by_experience():
    """Two drafts of the same claims: what both say turns out right, what one says wrong."""
    acceptance = Acceptance()
    both = merge([family([0], [-1.0], [1], draft=0), family([0, 0], [-1.0, -1.0], [1, 2], draft=1)])
    for _ in range(100):
        learn(acceptance, both, [1])
    accepted = dict(zip(both.tokens.tolist(), acceptance.path(both.nodes), strict=True))
    assert accepted[1] > 0.9
    assert accepted[2] < 0.1
    assert np.exp(-1) * acceptance.edge(1, 1) == pytest.approx(0.5, abs=0.05)  # of draft 1, whoever agrees


# ---- what is learnt ----


@pytest.mark.parametrize("rate", [0.3, 1.0, 1.5])
@pytest.mark.parametrize("depth", [1, 2])
def test_rates_are_recovered(rate, depth):
    """Tokens of probability q that are accepted with probability rate q."""
    chance, acceptance = np.random.default_rng(1), Acceptance()
    for q in chance.uniform(0.05, 0.6, 2000):
        chain = family(list(range(depth)), [-0.0] * (depth - 1) + [np.log(q)])
        right = chance.random() < rate * q
        learn(acceptance, chain, [*range(depth - 1), depth - 1 if right else 8])
    if depth == 1:
        assert acceptance.family(0, 0) == pytest.approx(0.325 * rate, abs=0.06)
    assert acceptance.edge(0, depth) == pytest.approx(rate, rel=0.2)


def test_the_rate_of_the_third_level_is_that_of_all_below():
    acceptance = Acceptance()
    for depth, rate in enumerate((0.9, 0.8, 0.5), 1):
        learnt = acceptance.edges[1, depth]
        learnt.accepted = rate * learnt.expected
    for depth, wanted in {2: 0.9 * 0.8, 3: 0.9 * 0.8 * 0.5, 6: 0.9 * 0.8 * 0.5**4}.items():
        assert acceptance.along(0, depth) == pytest.approx(wanted)
        assert acceptance.along(1, depth) == 1  # another draft's


def test_without_experience_a_probability_is_taken_at_its_word():
    tree = family([0, 1, 2], np.log([0.5, 0.25, 0.2]))
    assert Acceptance().path(tree.nodes) == pytest.approx([1, 0.5, 0.25, 0.2])


def test_what_was_observed_is_forgotten():
    acceptance, tree = Acceptance(), family([0], np.log([0.5]))
    for tokens in ([8], [0]):
        for _ in range(5 * REMEMBERED):
            learn(acceptance, tree, tokens)
        assert acceptance.path(tree.nodes)[1] == pytest.approx(float(tokens == [0]), abs=0.02)


def test_nodes_that_were_not_scored_teach_too():
    """The token that the target chose is known, whether its node was in the pass or not."""
    acceptance = Acceptance()
    tree = family([0, 0], np.log([0.5, 0.3]))
    for _ in range(100):
        learn(acceptance, tree, [1])  # as after a plain step
    assert acceptance.family(0, 0) > 0.9
    assert acceptance.edge(0, 1) == pytest.approx(1 / 0.8, rel=0.05)


def test_greedy_and_coupled_texts_are_learnt_apart():
    world = World([GOOD], flat(0.1), 0.001).run(50)
    world.policy.start(1, coupled=True)
    assert not world.policy.acceptance.edges
    world.policy.start(1, coupled=False)
    assert world.policy.acceptance.edges


def test_reading_what_was_missed_is_no_part_of_a_drafts_cost():
    """The first time that a draft is asked again it is slow; only then."""
    policy = Auto()
    policy.start(1, coupled=False)
    for step in range(12):
        policy.asked, policy.levels[0] = 1, 1
        tree = TokenTree.from_nodes(0, [1], [0], [-0.1], [[Draw(0, 0)]])
        policy.grown = Forest.of([tree])
        policy.observe([tree], [(1,)], [(1, 2)], [9.0 if step == 0 else 1.0], 10.0)
    assert policy.costs.levels[0].value == pytest.approx(1.0, rel=0.01)


def test_drafts_are_chosen_for_those_that_are_about_to_join():
    """What did not pay with as many rows is not asked while they come."""
    world = World([GOOD], flat(1.0), 0.01, rows=4)
    policy, trees = world.policy, [TokenTree.root_only(0)] * 4
    with_all = policy.learnt.records[1, (16).bit_length()] = [DraftRecord(0.0)]
    with_all[0].wait()
    for coming, idle in ((0, False), (12, True), (20, True), (0, False)):
        policy.fit(Forest.of(trees))
        policy.observe(trees, [()] * 4, [(9,)] * 4, [0.0], None, coming)
        assert policy.idle == idle
        assert (policy.records is with_all) == idle


def test_a_step_that_read_a_prompt_too_teaches_what_is_accepted_and_no_costs():
    world = World([GOOD], flat(1.0), 0.01)
    policy = world.policy
    (tree,) = policy.grow(world.source(0), 8).trees([0], 0)
    before = policy.acceptance.edge(0, 1)
    policy.fit(Forest.of([tree]))
    policy.observe([tree], [()], [(9,)], [1.0], None)
    assert policy.acceptance.edge(0, 1) < before
    assert not policy.costs.plain
    assert not policy.costs.levels
    assert not policy.costs.trees.count


def test_a_draft_is_timed_while_another_is_idle_and_not_after_its_own_end():
    policy = Auto()
    policy.start(2, coupled=False)
    policy.asked, policy.warm, policy.levels[1] = 0b10, 0b10, 1
    policy._time(1, 4, [1e-6, 0.004], 0.05)
    policy.levels.clear()
    policy._time(1, 4, [1e-6, 1e-6], 0.05)
    assert {draft: level.value for draft, level in policy.costs.levels.items()} == {1: pytest.approx(0.004)}


def test_lines_are_recovered_whatever_interrupts():
    line = Line()
    for turn in range(200):
        nodes = (turn * 7) % 30
        line.add(nodes, (0.04 + 0.001 * nodes) * (50 if turn % 40 == 39 else 1))
    assert line.at(0) == pytest.approx(0.04, rel=0.1)
    assert line.at(30) == pytest.approx(0.07, rel=0.1)


def test_lines_of_one_size_have_a_usual_slope():
    line = Line()
    for _ in range(50):
        line.add(16, 0.03)
    assert line.at(16) == pytest.approx(0.03)
    assert line.at(16) < line.at(64) < np.inf


def test_rows_that_leave_do_not_flatten_a_line():
    """Fewer tokens are cheaper because they are fewer, not because the machine is faster."""
    line = Line()
    for rows in [8] * 30 + [7, 6, 6, 5, 4, 4, 3, 3, 2, 2]:
        line.add(2 * rows, 0.006 + 0.0018 * 2 * rows)
    assert line.at(64) == pytest.approx(0.121, rel=0.2)


@pytest.mark.parametrize("turns", [1, 2, 3, 10])
def test_a_large_pass_that_is_dear_makes_small_ones_no_dearer(turns):
    line = Line()
    for size in [16] * 30 + [256, 16] * turns:
        line.add(size, 0.006 + 0.0018 * size)
    assert line.at(16) == pytest.approx(0.035, rel=0.1)
    assert turns == 1 or line.at(256) == pytest.approx(0.467, rel=0.2)


def test_costs_that_stay_high_are_believed():
    line = Line()
    for seconds in [0.01] * 30 + [0.03] * 60:
        line.add(5, seconds)
    assert line.at(5) > 0.02


def test_averages_forget():
    average = Average()
    for figure in [1.0] * 20 + [3.0] * 100:
        average.add(figure)
    assert average.value == pytest.approx(3.0, rel=0.05)


def test_a_slow_step_is_an_interruption_and_two_are_a_load():
    average = Seconds(4)
    for seconds, believed in [(9, 9), *[(1, 1)] * 20, (5, 1), (1, 1), (4, 1), (4, 4), (4, 4), (1, 1)]:
        average.add(seconds)
        assert average.value == pytest.approx(believed)


def test_off_the_host_levels_go_by_averages():
    """What grows is known before the source is asked, and one policy stands for many costs."""
    world = World([GOOD], flat(0.1), 0.001, rows=2).run(100)
    reached = [world.policy.acceptance.expected(0, depth) for depth in range(4)]
    assert reached[0] == 1
    assert sorted(reached, reverse=True) == reached
    source = DenseSource(lambda _: pytest.fail("it was asked"), 2, device=torch.device("meta"))
    settled = world.policy.settled(source, None)
    assert settled.max_depth > 1
    assert world.policy.settled(source, 1) == replace(settled, max_depth=1)
    assert settled.min_probability in {2.0**-power for power in range(40)}
    dear = World([GOOD], flat(0.1), 0.5, rows=2).run(100)
    dear.policy.asked = 1
    assert dear.policy.settled(source, None).max_depth == 1
    dear.policy.asked = 0
    assert dear.policy.settled(source, None).max_depth == 0


@pytest.mark.parametrize(("first", "further", "levels", "speed"), [
    (0.0022, 0.0003, (6, 8), 1.7),  # on a GPU: what is launched at once is waited for once
    (0.0, 0.0007, (4, 8), 1.7), (0.0, 0.01, (0, 0.5), 0.98), (0.02, 0.0001, (0, 0.5), 0.98),
])  # fmt: skip
def test_off_the_host_levels_that_cost_little_beside_the_first_are_found(first, further, levels, speed):
    world = World([GOOD], lambda nodes: 0.0027 if nodes else 0.0024, 0.0)
    policy, observe = world.policy, world.policy.observe

    def timed(trees, paths, tokens, proposing, seconds):
        proposing = [first + further * count if count else 1e-9 for count in world.levels[-1]]
        world.seconds[-1] += sum(proposing)
        observe(trees, paths, tokens, proposing, world.seconds[-1])

    policy.observe = timed
    policy.grow = lambda source, depth: policy.settled(source, depth).grow(source)
    world.run(300)
    least, most = levels
    assert least <= np.mean([count for (count,) in world.levels[-200:]]) <= most
    assert world.speed(200) > speed


@pytest.mark.parametrize("sizes", [{"max_nodes": -1}, {"max_depth": 1.5}, {"max_nodes": True}])
def test_sizes_that_are_none_are_refused(sizes):
    with pytest.raises(PolicyError, match="whole number"):
        Auto(**sizes)
