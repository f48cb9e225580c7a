"""A made-up world for adaptive trees: tokens by lot, seconds by decree, so every count is the same on any machine."""

import numpy as np
import torch

from specinfer import Auto
from specinfer.tree import DenseSource, Forest, merge

P = np.array([0.6, 0.2, 0.1, 0.05, 0.05])  # the target's distribution everywhere
BELOW = P.cumsum() / P.cumsum()[-1]  # what `choice` compares a number with, many times faster
VOCAB = 10  # the second half is never right
GOOD = [*np.log(P), *[-np.inf] * 5]
BAD = [*[-np.inf] * 5, *np.log(P)]


class World:
    """A target that draws from P, and drafts with a distribution each.

    Args:
        drafts: (V,) log-probabilities per draft.
        target: seconds of a pass over n drafted nodes.
        level: seconds of a draft's level.
    """

    def __init__(self, drafts, target, level, rows=1, policy=None):
        self.distributions, self.target, self.level, self.rows = list(drafts), target, level, rows
        self.policy, self.depth = policy or Auto(), 8
        self.chance = np.random.default_rng(0)
        self.trees, self.levels = [], []  # per step: what was scored in row 0; levels of each draft
        self.emitted, self.seconds = [], []  # per step: tokens of all rows; seconds
        self.policy.start(len(self.distributions), coupled=False, rows=rows)

    def run(self, steps):
        """Decode so many steps."""
        for _ in range(steps):
            sources = [self.source(draft) for draft in range(len(self.distributions))]
            grown = [self.policy.grow(source, self.depth).trees([0] * self.rows, source.draft) for source in sources]
            trees = [*self.policy.fit(Forest.of([merge(own) for own in zip(*grown, strict=True)]))]
            self.trees.append(trees[0])
            self.levels.append([source.asked for source in sources])
            paths, tokens = zip(*map(self.verify, trees), strict=True)
            proposing = [self.level * source.asked or 1e-9 for source in sources]
            nodes = max(tree.num_drafted for tree in trees)
            self.emitted.append(sum(map(len, tokens)))
            self.seconds.append(self.target(nodes) + sum(proposing))
            self.policy.observe(trees, paths, tokens, proposing, self.seconds[-1])
        return self

    def verify(self, tree):
        """Return accepted nodes and emitted tokens."""
        node, path, tokens = 0, [], []
        while node is not None:
            tokens.append(int(BELOW.searchsorted(self.chance.random(), "right")))
            node = tree.child(node, tokens[-1])
            path += [] if node is None else [node]
        return path, tokens

    def source(self, draft):
        """Return what a draft says, everywhere the same; it counts its levels."""
        distribution = torch.tensor(self.distributions[draft])

        def log_probs(frontier):
            source.asked += 1
            return distribution.expand(*frontier.tokens.shape, VOCAB)

        source = DenseSource(log_probs, self.rows, draft=draft)
        source.asked = 0
        return source

    def nodes(self, last):
        """Return the nodes that were scored in the last steps."""
        return [tree.num_drafted for tree in self.trees[-last:]]

    def speed(self, last):
        """Return the tokens a second of the last steps, over those of plain decoding."""
        return sum(self.emitted[-last:]) / sum(self.seconds[-last:]) * self.target(0) / self.rows

    def asked(self, draft, last):
        """Return how often a draft was asked in the last steps."""
        return sum(levels[draft] > 0 for levels in self.levels[-last:])
