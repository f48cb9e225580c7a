"""Candidate lattices: best-first over them is a heap over all paths, and they answer level by level alike."""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

import numpy as np
import pytest
import torch
from torch import Tensor

from specinfer.drafts.depths import LatticeSession
from specinfer.engine.draft import DraftContext
from specinfer.engine.gumbel import Coupling
from specinfer.engine.processors import Processors
from specinfer.errors import NumericalError
from specinfer.tree import BestFirst, Chain, Expansion, Frontier, Lattice, Sampled
from specinfer.tree import lattice as module
from specinfer.tree.policies import LatticeSource, grow_best_first

SEEDS = range(200)
VOCAB = 1000


@dataclass
class Raw:
    """A random lattice before it is sorted: whole quarters, so that sums are exact and many paths tie."""

    candidates: Tensor  # (B, D, K)
    log_probs: Tensor  # (B, D, A, K)
    made: Lattice = field(init=False)

    def __post_init__(self):
        self.made = Lattice.of(self.candidates, self.log_probs)

    def children(self, row, depth, above):
        """The children at a depth of a token, sorted: log-probability and token."""
        candidates, lists = self.candidates[row, depth - 1].tolist(), self.log_probs[row, depth - 1]
        known = self.candidates[row, depth - 2].tolist() if depth > 1 and len(lists) > 1 else []
        which = known.index(above) if known else 0
        scored = zip(lists[which].tolist(), candidates, strict=True)
        return sorted(((p, token) for p, token in scored if p > -inf), key=lambda item: (-item[0], item[1]))


def random_lattice(seed, rows=1, scored=None):
    chance = np.random.default_rng(seed)
    width, depth = (int(chance.integers(1, most + 1)) for most in (32, 16))
    scored = bool(seed % 2) if scored is None else scored
    candidates = np.stack([chance.permutation(VOCAB)[:width] for _ in range(rows * depth)]).reshape(rows, depth, width)
    log_probs = -chance.integers(0, 12, (rows, depth, width if scored else 1, width)) / 4
    log_probs[chance.random(log_probs.shape) < 0.1] = -inf
    return Raw(torch.from_numpy(candidates), torch.from_numpy(log_probs).float())


def by_heap(raw, row, max_nodes, max_depth, least=-inf):
    """Every child of a popped path is pushed: token, parent, score; the root is the first."""
    depth, order, nodes = min(max_depth, raw.candidates.shape[1]), 0, []
    heap = [(0.0, 0, 0, 0, ())]  # -score, depth, rank of the parent, rank among siblings, path
    while heap and len(nodes) <= max_nodes:
        score, at, parent, _, path = heappop(heap)
        nodes.append((path[-1] if path else None, parent, -score))
        if at < depth:
            found = raw.children(row, at + 1, path[-1] if path else None)
            for rank, (log_prob, token) in enumerate(found):
                if -score + log_prob >= least:
                    heappush(heap, (score - log_prob, at + 1, order, rank, (*path, token)))
        order += 1
    return [(-1, -1, 0.0), *nodes[1:]]


def listed(growth):
    """The nodes of the first row as `by_heap` gives them."""
    columns = (column[0].tolist() for column in (growth.tokens, growth.parents, growth.scores, growth.valid))
    return [node[:3] for node in zip(*columns, strict=True) if node[3]]


def limits(seed):
    chance = np.random.default_rng([seed, 1])
    return int(chance.integers(1, 65)), int(chance.integers(1, 18)), -float(chance.integers(1, 20)) / 4


@pytest.mark.parametrize("seed", SEEDS)
def test_best_first_is_a_heap_over_all_paths(seed):
    raw, (nodes, depth, least) = random_lattice(seed), limits(seed)
    assert listed(raw.made.best_first(nodes, depth)) == by_heap(raw, 0, nodes, depth)
    assert listed(raw.made.best_first(nodes, depth, least)) == by_heap(raw, 0, nodes, depth, least)


def test_the_lattices_tie_and_are_of_all_sizes():
    """What is compared has power: most trees hold equal scores, and sizes reach their ends."""
    ties, shapes = 0, set()
    for seed in SEEDS:
        raw = random_lattice(seed)
        scores = [score for *_, score in listed(raw.made.best_first(64, 16))]
        ties += len(set(scores)) < len(scores)
        shapes.add(tuple(raw.log_probs.shape[1:]))
    assert ties > 150
    assert {depth for depth, _, _ in shapes} == set(range(1, 17))
    assert {width for _, _, width in shapes} >= {1, 2, 31, 32}


def fixed(raw):
    """A session whose lattice is given."""
    rows, depths, _ = raw.candidates.shape

    class Fixed(LatticeSession):
        depth = depths

        def predict(self):
            return torch.zeros(rows, depths, VOCAB)

        def lattice(self, width):
            return raw.made

        def top(self, frontier, k):
            """By the lattice as it was before it was sorted."""
            answers = torch.zeros(2, *frontier.tokens.shape, k)
            answers[1] = -inf
            for row, node in zip(*np.nonzero(frontier.valid.numpy()), strict=True):
                found = raw.children(row, frontier.depth + 1, int(frontier.tokens[row, node]))[:k]
                for rank, (log_prob, token) in enumerate(found):
                    answers[:, row, node, rank] = torch.tensor([token, log_prob])
            return answers[0].long(), answers[1]

    prompts, seeds = [[7]] * rows, [0] * rows
    return Fixed(DraftContext(prompts, 8, 8, VOCAB, 0, Processors([]), seeds))


def every(frontier, _scores):
    """Ask about every node of a level."""
    return frontier.tokens.shape[1]


def nodes_of(growth, row):
    """The nodes of a row as a set of paths with scores: level by level they come in pool order."""
    paths = []
    tokens, parents, scores, valid = (getattr(growth, name)[row].tolist() for name in growth._fields[:4])
    columns = list(zip(tokens, parents, scores, valid, strict=True))
    for token, parent, _, real in columns:
        paths.append(() if parent < 0 else (*paths[parent], token) if real else None)
    return {path: score for path, (_, _, score, real) in zip(paths, columns, strict=True) if real}


@pytest.mark.parametrize("seed", SEEDS)
def test_level_by_level_gives_the_same_trees_in_every_row(seed):
    raw, (nodes, depth, _) = random_lattice(seed, rows=1 + seed % 3), limits(seed)
    session = fixed(raw)
    assert isinstance(session, LatticeSource)
    depth = min(depth, session.depth)
    at_once, by_level = (grow_best_first(session, nodes, depth, 1e-4, wanted) for wanted in (None, every))
    for row in range(session.batch):
        assert nodes_of(at_once, row) == nodes_of(by_level, row)
    whole, asked = (growth.trees([7] * session.batch) for growth in (at_once, by_level))
    for one, other in zip(whole, asked, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.parents.tolist() == other.parents.tolist()


def test_children_are_as_many_as_asked_for():
    session = session_of(Plain)
    session.propose(Chain(1), ROOTS, 3)
    one = torch.tensor([[5, 6], [5, 6]])
    tokens, log_probs = session.top(Frontier(one, torch.zeros_like(one), one >= 0, 1), 2)
    assert tokens.shape == log_probs.shape == (2, 2, 2)
    assert tokens[0, 0].tolist() == tokens[0, 1].tolist() == LOGITS[0, 1].topk(2).indices.tolist()


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("nodes", [1, 8, 64])
def test_a_node_pushes_its_next_sibling_and_its_first_child_alone(scored, nodes, monkeypatch):
    """The heap stays small, whatever the width: two pushes for each node that is taken."""
    pushed = []
    monkeypatch.setattr(module, "heappush", lambda heap, item: (pushed.append(item), heappush(heap, item)))
    raw = random_lattice(20, scored=scored)
    assert len(listed(raw.made.best_first(nodes, 16))) == 1 + nodes
    assert len(pushed) <= 1 + 2 * nodes


def test_what_is_no_number_is_refused():
    raw = random_lattice(4)
    raw.log_probs[0, 0, 0, 0] = torch.nan
    with pytest.raises(NumericalError, match="not a number"):
        Lattice.of(raw.candidates, raw.log_probs)


@pytest.mark.parametrize("scored", [False, True])
def test_a_lattice_waits_for_its_device_once(scored, waits):
    raw = random_lattice(4, rows=2, scored=scored)
    waits.clear()
    Lattice.of(raw.candidates, raw.log_probs)
    assert waits == ["cpu"]


@pytest.mark.parametrize(("nodes", "depth"), [(0, 4), (4, 0)])
def test_nothing_is_grown_where_nothing_fits(nodes, depth):
    assert listed(random_lattice(4).made.best_first(nodes, depth)) == [(-1, -1, 0.0)]


# ---- sessions: from logits to lattices ----

LOGITS = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(3))  # two rows, three depths
ROOTS = [5, 9]
SCORES = torch.randn(12, 12, generator=torch.Generator().manual_seed(4))  # of a parent and a child


class Plain(LatticeSession):
    """A session with made-up logits."""

    depth = 3

    def predict(self):
        """Return them."""
        return LOGITS[: self.batch]


class Scored(Plain):
    """... and made-up scores of neighbours, among four candidates of each depth."""

    width = 4

    def pairs(self, parents, children, depths):
        """Look them up."""
        return SCORES[parents[..., None], children[:, :, None]]


def session_of(kind, couplings=(), processors=()):
    return kind(DraftContext([[root] for root in ROOTS], 8, 8, 12, 0, Processors(list(processors)), [0, 1], couplings))


def noise_at(couplings, depth):
    return torch.stack([coupling.at(1 + depth, 12, torch.device("cpu")) for coupling in couplings])


@pytest.mark.parametrize("couplings", [(), (Coupling(3), Coupling(4))], ids=["greedy", "coupled"])
@pytest.mark.parametrize("kind", [Plain, Scored])
def test_scores_are_those_of_the_formulas(kind, couplings):
    """softmax of logits (+ noise); with pairs softmax of their sums, times what the candidates have of the depth."""
    trees = session_of(kind, couplings).propose(Expansion((2, 2, 2)), ROOTS, 3)
    for row, (tree, root) in enumerate(zip(trees, ROOTS, strict=True)):
        assert len(tree) == 15
        for node in range(1, 15):
            depth, parent, token = int(tree.depths[node]) - 1, int(tree.parents[node]), int(tree.tokens[node])
            noise = noise_at(couplings, depth)[row] if couplings else 0.0
            log_probs = (LOGITS[row, depth] + noise).log_softmax(-1)
            if kind is Scored:
                kept = log_probs.topk(4).indices
                sums = LOGITS[row, depth] + SCORES[int(tree.tokens[parent]) if parent else root] + noise
                share = log_probs[kept].logsumexp(-1)
                log_probs = torch.full((12,), -inf).scatter(0, kept, sums[kept].log_softmax(-1) + share)
            assert float(tree.scores[node] - tree.scores[parent]) == pytest.approx(float(log_probs[token]), abs=1e-5)
            assert token in log_probs.topk(2).indices


def test_pairs_are_scored_after_tokens_that_are_no_candidates():
    """As texts that are gone through hold them: level by level, every token's own score counts."""
    session = session_of(Scored)
    session.propose(Chain(1), ROOTS, 3)
    (other, *_) = (token for token in range(12) if token not in LOGITS[0, 0].topk(4).indices)
    one = torch.tensor([[other], [other]])
    tokens, log_probs = session.top(Frontier(one, torch.zeros_like(one), one >= 0, 1), 4)
    kept = LOGITS[0, 1].topk(4).indices
    sums = (LOGITS[0, 1] + SCORES[other])[kept].log_softmax(-1) + LOGITS[0, 1].log_softmax(-1)[kept].logsumexp(-1)
    assert tokens[0, 0].tolist() == kept[sums.argsort(descending=True)].tolist()
    assert log_probs[0, 0].tolist() == pytest.approx(sums.sort(descending=True).values.tolist(), abs=1e-5)


@pytest.mark.parametrize("kind", [Plain, Scored])
def test_draws_come_from_the_distributions_that_are_stated(kind):
    session = session_of(kind)
    (tree, *_) = session.propose(Sampled((2, 2)), ROOTS, 3)
    for (node, _), q in tree.distributions.items():
        depth, token = int(tree.depths[node]), int(tree.tokens[node]) if node else 5
        wanted = LOGITS[0, depth].softmax(-1)
        if kind is Scored:
            kept = LOGITS[0, depth].topk(4).indices
            joint = (LOGITS[0, depth] + SCORES[token])[kept].softmax(-1)
            wanted = torch.zeros(12).scatter(0, kept, joint)
        assert torch.tensor(np.asarray(q)).float().allclose(wanted, atol=1e-6)
        assert all(q[int(tree.tokens[child])] > 0 for child in tree.children(node))


def test_a_session_predicts_once_a_step_and_only_if_asked():
    calls = []

    class Counting(Plain):
        def predict(self):
            calls.append(1)
            return super().predict()

    session = session_of(Counting)
    session.propose(BestFirst(0, 4), ROOTS, 3)
    assert len(calls) == 0
    for policy in (BestFirst(8, 4), Expansion((2, 2)), Sampled((2, 2))):
        session.propose(policy, ROOTS, 3)
    assert len(calls) == 3


def test_nothing_to_predict_from_gives_bare_roots():
    class Silent(Plain):
        def levels_left(self):
            return [0, 0]

    for policy in (BestFirst(8, 4), Expansion((2, 2)), Sampled((2, 2))):
        assert [tree.num_drafted for tree in session_of(Silent).propose(policy, ROOTS, 3)] == [0, 0]


def test_logits_that_are_no_numbers_are_named():
    class Broken(Plain):
        def predict(self):
            return LOGITS * torch.nan

    for policy in (BestFirst(8, 4), Expansion((2, 2))):
        with pytest.raises(NumericalError, match=r"draft 0 .*not a number"):
            session_of(Broken).propose(policy, ROOTS, 3)


def test_a_frontier_below_the_last_depth_is_not_asked_for():
    """A tree is no deeper than what is predicted."""
    trees = session_of(Plain).propose(Expansion((1, 1, 1, 1, 1)), ROOTS, 9)
    assert [int(tree.depths.max()) for tree in trees] == [3, 3]
    found = session_of(Plain).top(Frontier(*[torch.zeros(2, 1, dtype=torch.long)] * 3, 2), 2)
    assert found[0].shape == (2, 1, 2)
