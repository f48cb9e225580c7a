"""A made-up machine for adaptive trees: texts by lot, seconds by decree, load when told; no models, no clocks."""

import numpy as np
import torch

from specinfer.tree import DenseSource, Forest, merge

VOCAB = 12  # of which the first half is ever right
TOKENS = (1, 2, 4, 8, 16, 24, 32)  # fed in a pass ...
PASS = (32.7, 31.6, 35.8, 37.9, 46.6, 56.0, 63.8)  # ... and its milliseconds: SmolLM2-135M on two cores
LEVELS = (2.9, 0.3)  # milliseconds of a level: of a head, of a look-up
EASE = {"easy": (0.5, 0.3, 0.2), "usual": (0.25, 0.4, 0.35), "hard": (0.0, 0.2, 0.8)}  # shares of `SHARP`
SHARP = (0.9, 0.6, 0.3)  # the target's probability of its likeliest token, in steps that are easy, middling, hard


def quiet(tokens):
    """Nobody else runs."""
    return 1.0


def evenly(factor):
    """Everything is so many times slower."""
    return lambda tokens: factor


def threads(tokens):
    """Others hold one core: a pass over one token is 1.8 times slower, one over eight or more, in threads, 4 times."""
    return 1.8 + 2.2 * min(1.0, (tokens - 1) / 7)


class Machine:
    """Decodes one row with a policy and two drafts, a head and a look-up.

    Args:
        policy: what is tried.
        seed: of texts, noise and spikes.
        load: how many times slower a pass over so many tokens is; may be set between steps.
        noise: standard deviation of the logarithm of all times.
        right: the drafts know the target's distribution; else they are never right.
    """

    def __init__(self, policy, seed=0, load=quiet, noise=0.03, spikes=0.01):
        self.policy, self.load, self.noise, self.spikes = policy, load, noise, spikes
        self.chance = np.random.default_rng(seed)
        self.clock = np.random.default_rng(seed + 1000)
        self.nodes, self.tokens, self.seconds, self.plain, self.levels = [], [], [], [], []  # by step

    def text(self, steps, ease="usual"):
        """Decode so many steps of a new text; return the machine."""
        if hasattr(self.policy, "start"):
            self.policy.start(2, coupled=False)
        return self.text_on(steps, ease)

    def text_on(self, steps, ease="usual"):
        """Go on with the text; return the machine."""
        kind = 1
        for _ in range(steps):
            if self.chance.random() < 0.4:  # or as the step before
                kind = self.chance.choice(3, p=EASE.get(ease, EASE["usual"]))
            self._step(self._distribution(SHARP[kind]), wrong=ease == "wrong", repeats=self.chance.random() < 0.2)
        return self

    def speed(self, last=None):
        """Return the tokens a second of the last steps over those of plain decoding at the same load."""
        last = last or len(self.tokens)
        return sum(self.tokens[-last:]) / sum(self.seconds[-last:]) * np.mean(self.plain[-last:])

    def _distribution(self, sharp):
        """Return the target's distribution: five tokens in any order, and a sixth that no draft ever proposes."""
        return np.array(
            [*self.chance.permutation([sharp, *(1 - sharp) * np.array([0.35, 0.2, 0.1, 0.05])]), 0.3 * (1 - sharp)]
        )

    def _step(self, distribution, wrong, repeats):
        given = np.log([*distribution[:5], 1e-12, *np.full(6, distribution[5] / 6)])
        found = np.full(VOCAB, -np.inf)
        found[int(distribution.argmax())] = -0.1
        distributions = [given, found if repeats else np.full(VOCAB, -np.inf)]
        if wrong:
            distributions = [np.roll(np.where(np.arange(VOCAB) < 6, own, -np.inf), 6) for own in distributions]
        sources = [self._source(draft, own) for draft, own in enumerate(distributions)]
        grown = [self.policy.grow(source, 8).trees([0], source.draft) for source in sources]
        (tree,) = self.policy.fit(Forest.of([merge(own) for own in zip(*grown, strict=True)]))
        path, emitted, node = [], [], 0
        while node is not None:
            emitted.append(int(self.chance.choice(6, p=distribution)))
            node = tree.child(node, emitted[-1])
            path += [] if node is None else [node]
        asked = [source.asked for source in sources]
        proposing = [
            1e-3 * self._noisy(levels * own) * self.load(1) + 1e-7 for levels, own in zip(asked, LEVELS, strict=True)
        ]
        rest = 1e-3 * self._noisy(np.interp(len(tree), TOKENS, PASS)) * self.load(len(tree)) + 1e-3 * (2 + any(asked))
        self.nodes.append(tree.num_drafted)
        self.tokens.append(len(emitted))
        self.levels.append(asked)
        self.seconds.append(rest + sum(proposing))
        self.plain.append(1e-3 * (PASS[0] * self.load(1) + 2))
        if hasattr(self.policy, "observe"):
            self.policy.observe([tree], [path], [emitted], proposing, self.seconds[-1])

    def _noisy(self, figure):
        spike = self.clock.uniform(2, 5) if self.clock.random() < self.spikes else 1.0
        return figure * spike * np.exp(self.clock.normal(0, self.noise))

    def _source(self, draft, distribution):
        distribution = torch.tensor(distribution)

        def log_probs(frontier):
            source.asked += 1
            return distribution.expand(*frontier.tokens.shape, VOCAB)

        source = DenseSource(log_probs, 1, draft=draft)
        source.asked = 0
        return source
