"""Certificates: the exact distribution of the text of speculative decoding, by enumeration, against the target's own.

Knows: policies, `merge`, verifiers and candidate lattices, the same objects that the engine uses; made-up models of a
few tokens.  Does not know: real models, caches, random numbers.  Certificates do not show that the engine hands a
verifier the right distributions and fair coins: tests do, of `engine.sequence`, `engine.processors` and `attention`.

How: nothing random happens.  Whatever draws, tosses or chooses asks an `EnumeratedChance`.  A run is repeated for every
sequence of answers, in depth-first order, each with its exact probability in float64.  The distribution is joint over
several tokens, so that a dependence between steps shows.  Trees grow no deeper than `loop.propose` lets them.

What is lossless, and why: arXiv 2211.17192 and 2302.01318 (chains), 2305.09781 (SpecInfer: i.i.d. draws, naive
sampling), 2402.12374 (Sequoia: without replacement), 2408.07978 (coupled sampling).  The broken pairs are mistakes that
somebody really made.  They show that the enumeration has the power to notice.

Anything with ``verify(tree, target) -> Verdict`` can be certified:

    >>> from specinfer import Sampled
    >>> from specinfer.evaluation.certification import certify_verifier
    >>> from specinfer.engine.verify import Verdict
    >>> class AcceptLikely:
    ...     def verify(self, tree, target):
    ...         for child in tree.children(0):
    ...             if target.distribution(0)[tree.tokens[child]] > 0.3:
    ...                 return Verdict((child,), target.draw(target.distribution(child)))
    ...         return Verdict((), target.draw(target.distribution(0)))
    >>> certify_verifier(AcceptLikely(), Sampled((1, 1))).lossless
    False
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import cache, partial
from itertools import chain, product
from math import prod
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from specinfer.common.progress import Progress, tracked
from specinfer.drafts.depths import LatticeSession
from specinfer.drafts.rows import DraftRows
from specinfer.engine.draft import Committed, DraftContext, DraftSession
from specinfer.engine.processors import Processors
from specinfer.engine.verify import ExactMatch, MultiStep, Probabilities, TargetView, Verdict
from specinfer.errors import InputError
from specinfer.tree import BestFirst, Chain, Draw, Expansion, Forest, Frontier, Policy, Sampled, Source, TokenTree
from specinfer.tree.candidates import top_candidates

EXACT = 1e-12  # total variation that rounding in float64 may cause
BROKEN = 1e-3  # total variation that a mistake must exceed to be seen
MODELS = 6  # made-up targets and drafts that a user's verifier is tried on: one alone may hide its mistake

_ELSEWHERE = (
    "a replayed run asked other questions than before, so its probabilities mean nothing: it must take all "
    "its chance from the target's accepts, draw and choice"
)

Context = tuple[int, ...]  # the tokens emitted so far
Result = TypeVar("Result")


# --- Enumeration ---


class EnumeratedChance:
    """Answers random questions as a script says, and beyond its end by the first option."""

    def __init__(self, script: tuple[int, ...] = ()) -> None:
        self.script = script  # the option to take at each question
        self.asked = 0  # questions so far
        self.probability = 1.0  # of all answers so far
        self.others: list[tuple[int, ...]] = []  # scripts of the options not taken, the first ones last

    def choose(self, weights: Probabilities) -> int:
        """Return an index, each with probability proportional to its weight; weight 0 is no option."""
        options = weights.nonzero()[0]
        if self.asked == len(self.script):
            self.others += [(*self.script, option) for option in range(len(options) - 1, 0, -1)]
            self.script += (0,)
        taken = self.script[self.asked]
        if taken >= len(options):
            raise InputError(_ELSEWHERE)
        self.asked += 1
        self.probability *= float(weights[options[taken]] / weights.sum())
        return int(options[taken])


def outcomes(run: Callable[[EnumeratedChance], Result]) -> Iterator[tuple[float, Result]]:
    """Yield every result of a run with its probability; the run's only chance is its argument.

    Raises:
        InputError: the run took chance from elsewhere.
    """
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        chance = EnumeratedChance(scripts.pop())
        result = run(chance)
        if chance.asked < len(chance.script):
            raise InputError(_ELSEWHERE)
        yield chance.probability, result
        scripts += chance.others


# --- Models, and the drafts' behaviour ---


class RandomModels:
    """A target (model 0) and drafts (models 1, 2, ...) with a random distribution for every context.

    Most have full support, some have zeros, some are one-hot.  Where a text begins, however, each draft underrates all
    tokens but one, another one per draft.  A rejection then leaves V - 1 tokens in the residual, and every mistake
    below shows whatever the seed.
    """

    def __init__(self, vocabulary: int, seed: int) -> None:
        self.vocabulary, self.seed = vocabulary, seed
        self.distribution = cache(self._distribution)

    def _distribution(self, model: int, context: Context) -> Probabilities:
        """Return a model's distribution of the next token, float64 (V,)."""
        chance = np.random.default_rng([self.seed, model, len(context), *context])
        weights = chance.exponential(size=self.vocabulary)
        if context:
            zeros = chance.choice([0, 1, self.vocabulary - 1], p=[0.6, 0.3, 0.1])
            weights[chance.permutation(self.vocabulary)[:zeros]] = 0.0
        elif model:
            weights = self.distribution(0, ()) * chance.uniform(0.3, 0.9, self.vocabulary)
            weights[(model - 1) % self.vocabulary] += 1.0 - weights.sum()
        else:
            weights += 1.0
        return weights / weights.sum()


# How a draft behaves: (the distribution q that it claims, of what is left to draw; the target's choice) -> the weights
# that it really ranks by or draws from
Behaviour = Callable[[Probabilities, int], Probabilities]
UNKNOWN = -1  # a choice that a draft cannot know


def honest(q: Probabilities, choice: int) -> Probabilities:
    """Draw from the claimed distribution."""
    return q


def sharpened(q: Probabilities, choice: int) -> Probabilities:
    """Draw at half the temperature, claim the raw q (huggingface/transformers#47932)."""
    return q**2


def likeliest(q: Probabilities, choice: int) -> Probabilities:
    """Take the likeliest token and claim that it was drawn (llama.cpp's tree example)."""
    return np.eye(len(q))[q.argmax()]


def favours(q: Probabilities, choice: int) -> Probabilities:
    """Rank the token that the target will choose first."""
    return q / 2 + np.eye(len(q))[choice]


def avoids(q: Probabilities, choice: int) -> Probabilities:
    """Never propose the token that the target will choose."""
    return q * (1 - np.eye(len(q))[choice])


def whims(q: Probabilities, choice: int) -> Probabilities:
    """Favour some choices, avoid the others."""
    return favours(q, choice) if choice % 2 else avoids(q, choice)


def shared_only(q: Probabilities, choice: int) -> Probabilities:
    """Draw among the tokens that both know, all but the first, and claim the whole q."""
    shared = q * (np.arange(len(q)) > 0)
    return shared if shared.any() else q


def peeks(q: Probabilities, choice: int) -> Probabilities:
    """Take the token that the target will choose and claim that it was drawn from q."""
    return np.eye(len(q))[choice if q[choice] > 0 else q.argmax()]


@dataclass
class Enumerated:
    """One draft below one context, and the random numbers that decide."""

    models: RandomModels
    behaviour: Behaviour
    choice: Callable[[Context], int]
    chance: EnumeratedChance
    root: Context
    draft: int


@dataclass
class EnumeratedDraft(Enumerated, DraftSession):
    """A `Source` that takes its draws from an `EnumeratedChance`."""

    known: list[Context] = field(default_factory=list)  # all frontier nodes so far
    batch = 1
    device = torch.device("cpu")

    def distribution(self, context: Context) -> Probabilities:
        """Return the distribution that the draft claims, float64 (V,)."""
        return self.models.distribution(1 + self.draft, context)

    def top(self, frontier: Frontier, k: int) -> tuple[Tensor, Tensor]:
        """Rank the vocabulary by what the draft really does; both (1, W, min(k, V))."""
        contexts = self._contexts(frontier)
        weights = np.array([[self.behaviour(self.distribution(c), self.choice(c)) for c in contexts]])
        tokens, values = top_candidates(torch.from_numpy(weights), k)
        return tokens, (values / torch.from_numpy(weights).sum(-1, keepdim=True).clamp(min=1e-300)).log()

    def draw(self, frontier: Frontier, k: int, replacement: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Draw as the draft really does; tokens and log-probabilities (1, W, k), and what it claims (1, W, V)."""
        contexts = self._contexts(frontier)
        distributions = np.array([self.distribution(context) for context in contexts])

        def weights(node: int, q: Probabilities) -> Probabilities:
            return self.behaviour(q, self.choice(contexts[node]))

        return _drawn(distributions, frontier, k, replacement, self.chance, weights)

    def source(self, roots: Sequence[int]) -> Source:
        """Return the draft itself."""
        return self

    def commit(self, tokens: Committed, states: Sequence[object] = (), scored: Sequence[object] = ()) -> None:
        """Keep nothing: every step has a draft of its own."""

    def _contexts(self, frontier: Frontier) -> list[Context]:
        """Return the tokens up to each frontier node, and remember them as parents of later ones."""
        nodes = zip(frontier.parents[0].tolist(), frontier.tokens[0].tolist(), strict=True)
        new = [(*self.known[parent], token) for parent, token in nodes] if frontier.depth else [self.root]
        self.known += new
        return new


class EnumeratedIntersection(EnumeratedDraft):
    """A draft with another tokenizer: its distribution over the tokens that both know, all but one a draft."""

    word = "shared tokens only"

    def distribution(self, context: Context) -> Probabilities:
        """Return what a session with a smaller vocabulary says that it draws from, float64 (V,)."""
        q = super().distribution(context)
        rows = DraftRows(DraftContext([context], 1, 1, len(q), self.draft, Processors([]), [0]))
        shared = torch.tensor([token for token in range(len(q)) if token != self.draft % len(q)], device="cpu")
        rows.token_ids = shared
        logits = torch.from_numpy(q + 1e-3).log()[shared]
        return rows.warped(logits[None, None])[0, 0].softmax(-1).numpy()


def _drawn(
    distributions: Probabilities,
    frontier: Frontier,
    k: int,
    replacement: bool,
    chance: EnumeratedChance,
    weights: Callable[[int, Probabilities], Probabilities] = lambda node, q: q,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw k tokens at each frontier node: tokens and log-probabilities (1, W, k), and the distributions (1, W, V).

    Args:
        distributions: (W, V), as claimed.
        frontier, k, replacement: as `Source.draw`.
        chance: decides.
        weights: of a node's number and what is left of its distribution; what a draft really draws from.
    """
    tokens, values = np.zeros((len(distributions), k), np.int64), np.zeros((len(distributions), k))
    for node, valid in enumerate(frontier.valid[0].tolist()):
        left = distributions[node] * valid
        for turn in range(k):
            if left.any():
                tokens[node, turn] = token = chance.choose(weights(node, left / left.sum()))
                values[node, turn] = distributions[node, token]
                left[token] *= replacement
    found, probabilities, claimed = (torch.from_numpy(array)[None] for array in (tokens, values, distributions))
    return found, probabilities.log(), claimed


def _root(context: Context) -> int:
    """Return the token that a tree after a context grows from."""
    return context[-1] if context else 0


@dataclass
class EnumeratedLattice(Enumerated, LatticeSession):
    """A draft that predicts all depths at once: they depend on the depth alone.

    Its prediction for a depth is its model's distribution after that many tokens 0; below the first depth, no token is
    certain.
    """

    depth = 3  # levels that are predicted
    word = "lattice of marginals"

    def __post_init__(self) -> None:
        context = DraftContext([[_root(self.root)]], 1, 1, self.models.vocabulary, self.draft, Processors([]), [0])
        LatticeSession.__init__(self, context)

    def predict(self) -> Tensor:
        """Return logits (1, D, V), by what the draft really does."""
        contexts = [(*self.root, *[0] * depth) for depth in range(self.depth)]
        mean = 1 / self.models.vocabulary
        claimed = [self.models.distribution(1 + self.draft, context) for context in contexts]
        claimed[1:] = [(q + mean) / 2 for q in claimed[1:]]
        weights = [self.behaviour(q, self.choice(c)) for q, c in zip(claimed, contexts, strict=True)]
        kept = [real if real.any() else q for real, q in zip(weights, claimed, strict=True)]
        return torch.from_numpy(np.array([kept])).log()

    def draw(self, frontier: Frontier, k: int, replacement: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Draw as the session does, but from an `EnumeratedChance`."""
        self.frontier = frontier
        return super().draw(frontier, k, replacement)

    def drawn(self, log_probs: Tensor, k: int, replacement: bool, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """Take draws, and what they are drawn from, in float64."""
        distributions = log_probs[0].double().softmax(-1).numpy()
        return _drawn(distributions, self.frontier, k, replacement, self.chance)


class EnumeratedPairs(EnumeratedLattice):
    """... and on the token above, among three candidates of each depth."""

    width = 3
    word = "lattice of pairs"

    def pairs(self, parents: Tensor, children: Tensor, depths: slice) -> Tensor:
        """Return made-up scores of each child after each parent, (1, D, A, K)."""
        chance = np.random.default_rng([self.models.seed, self.draft, *self.root])
        scores = torch.from_numpy(chance.normal(size=(self.models.vocabulary,) * 2))
        return scores[parents[..., None], children[:, :, None]]


# --- Certified pairs ---


class Choices(StrEnum):
    """Where the target's choices come from."""

    GREEDY = "greedy"  # its argmax
    SAMPLING = "sampling"  # draws that nobody can foresee
    COUPLED = "coupled"  # noise of each position, shared by all contexts there and known to the drafts
    REUSED = "coupled, the same noise at every position"  # a mistake


class AnyVerifier(Protocol):
    """Anything that verifies a tree; its only chance must be that of ``target``."""

    def verify(self, tree: TokenTree, target: TargetView) -> Verdict:
        """Decide the accepted path and the bonus token."""


@dataclass(frozen=True)
class Pair:
    """A way to grow trees and a way to verify them."""

    policy: Policy
    verifier: AnyVerifier
    behaviours: tuple[Behaviour, ...] = (honest,)  # one per draft
    choices: Choices = Choices.SAMPLING
    draft: type[EnumeratedDraft | EnumeratedLattice] = EnumeratedDraft  # how it predicts
    edit: Callable[[TokenTree], TokenTree] | None = None  # of the merged tree
    expected_lossless: bool = True
    tokens: int | None = None  # emitted, if other than asked for

    @property
    def tree(self) -> str:
        """How trees grow, in words."""
        behaviours = dict.fromkeys(behaviour.__name__ for behaviour in self.behaviours if behaviour is not honest)
        edit = [self.edit.__name__.replace("_", " ")] if self.edit else []
        word = [self.draft.word] if issubclass(self.draft, EnumeratedLattice | EnumeratedIntersection) else []
        return ", ".join([str(self.policy), *word, *(f"draft {behaviour}" for behaviour in behaviours), *edit])

    @property
    def rule(self) -> str:
        """How they are verified, in words."""
        options = [f"{name}={value}" for name, value in getattr(self.verifier, "__dict__", {}).items()]
        return f"{type(self.verifier).__name__}({', '.join(options)}), {self.choices}"


@dataclass(frozen=True)
class Certificate:
    """How far a pair's text is from the target's distribution."""

    tree: str
    verifier: str
    drafts: int
    vocabulary: int
    tokens: int  # the distribution is joint over this many first tokens
    total_variation: float  # 0 = the same distribution, 1 = never the same text
    expected_lossless: bool

    @property
    def lossless(self) -> bool:
        """Whether the distributions are equal up to rounding in float64."""
        return self.total_variation <= EXACT

    @property
    def passed(self) -> bool:
        """Whether the enumeration agrees with theory."""
        return self.lossless if self.expected_lossless else self.total_variation > BROKEN

    def to_dict(self) -> dict[str, object]:
        """Return everything for JSON."""
        return asdict(self) | {"lossless": self.lossless, "passed": self.passed}


def certify(
    pairs: Iterable[Pair] | None = None,
    vocabulary: int = 4,
    tokens: int = 3,
    seed: int = 0,
    progress: Progress = lambda *_: None,
) -> list[Certificate]:
    """Certify pairs by exact enumeration; by default all that should be lossless, and the known mistakes.

    Args:
        pairs: of trees and verifiers to certify.
        vocabulary: number of tokens, 3 or more for the mistakes to show; work grows with a power of it.
        tokens: the distribution is joint over this many emitted tokens, unless a pair sets its own number.
        seed: of the made-up models.
        progress: called with "pairs", how many are done, and of how many, once and after each.

    Returns:
        One certificate per pair, in order; all are expected to have ``passed``.
    """
    models = RandomModels(vocabulary, seed)
    todo = list(lossless_pairs() + broken_pairs() if pairs is None else pairs)
    return [_certificate(pair, models, pair.tokens or tokens) for pair in tracked(todo, "pairs", progress)]


def certify_verifier(
    verifier: AnyVerifier, policy: Policy, drafts: int = 1, vocabulary: int = 4, tokens: int = 3, seed: int = 0
) -> Certificate:
    """Certify your own verifier on the trees of a policy: see the example at the top of this module.

    Args:
        verifier: has ``verify(tree, target) -> Verdict`` and takes all its chance from ``target``.
        policy: how trees grow.
        drafts: how many drafts propose; their trees are merged.
        vocabulary, tokens: as `certify`.
        seed: of the first of `MODELS` made-up targets and drafts; the certificate is that of the largest bias.

    Raises:
        InputError: the verifier took chance from elsewhere, and that was noticed.
    """
    pair = Pair(policy, verifier, (honest,) * drafts)
    found = [_certificate(pair, RandomModels(vocabulary, model), tokens) for model in range(seed, seed + MODELS)]
    return max(found, key=lambda certificate: certificate.total_variation)


def _certificate(pair: Pair, models: RandomModels, tokens: int) -> Certificate:
    drafts, vocabulary = len(pair.behaviours), models.vocabulary
    distance = total_variation(output_distribution(pair, models, tokens), target_distribution(pair, models, tokens))
    return Certificate(pair.tree, pair.rule, drafts, vocabulary, tokens, distance, pair.expected_lossless)


# --- The two distributions ---


def total_variation(one: np.ndarray, other: np.ndarray) -> float:
    """Return half the L1 distance of two distributions."""
    return float(np.abs(one - other).sum()) / 2


def target_distribution(pair: Pair, models: RandomModels, tokens: int) -> np.ndarray:
    """Return the target's own distribution of the first tokens, float64 (V,) * tokens."""
    distribution = _target(pair, models)
    shape = (models.vocabulary,) * tokens
    table = [prod(float(distribution(text[:i])[token]) for i, token in enumerate(text)) for text in np.ndindex(*shape)]
    return np.array(table).reshape(shape)


def output_distribution(pair: Pair, models: RandomModels, tokens: int) -> np.ndarray:
    """Return the distribution of the first tokens that a pair emits, float64 (V,) * tokens.

    It sums over the outcomes of a decode step, each followed by the distribution of what comes after it.  With coupled
    choices it also sums over the noise of every position, which fixes the target's choice in every context there.
    """
    distribution, coupled = _target(pair, models), pair.choices in (Choices.COUPLED, Choices.REUSED)

    def choose(noise: Sequence[float], context: Context) -> int:
        if not coupled:
            return UNKNOWN
        p = distribution(context)
        number = noise[len(context) - tokens]  # counted from the end, where all noise ends
        return min(int(p.cumsum().searchsorted(number, "right")), int(p.nonzero()[0][-1]))

    def step(context: Context, tree: TokenTree, noise: Sequence[float], chance: EnumeratedChance) -> Context:
        chosen = partial(choose, noise) if coupled else None
        return _emitted(pair, EnumeratedTarget(distribution, context, tree, chance, chosen))

    @cache
    def trees(context: Context, noise: tuple[float, ...]) -> list[tuple[float, TokenTree]]:
        return list(_trees(pair, models, context, len(noise) - 1, partial(choose, noise)))

    @cache
    def rest(context: Context, noise: tuple[float, ...]) -> np.ndarray:
        """Return the distribution after a context, given the noise of the positions that are left."""
        left = len(noise)
        table = np.zeros((models.vocabulary,) * left) if left else np.ones(())
        for weight, tree in trees(context, (*noise[:-1], 0.0)) if left else ():  # no tree reaches the last position
            for probability, emitted in outcomes(partial(step, context, tree, noise)):
                new = emitted[:left]
                table[new] += weight * probability * rest(context + new, noise[len(new) :])
        return table

    noises = _noises(pair, models, tokens) if coupled else [(1.0, (0.0,) * tokens)]
    return np.sum([weight * rest((), noise) for weight, noise in noises], axis=0)


def _noises(pair: Pair, models: RandomModels, tokens: int) -> list[tuple[float, tuple[float, ...]]]:
    """Return the noise of all positions, as far as it makes a difference, each with its probability.

    Noise is one number u in [0, 1) per position, and a choice inverts the cumulative distribution at u.  The engine
    takes an argmax over Gumbel numbers instead.  Either way all contexts share the noise, and drafts may know it.
    """
    texts = [product(range(models.vocabulary), repeat=n) for n in range(tokens)]
    distributions = [list(map(_target(pair, models), same)) for same in texts]
    if pair.choices is Choices.REUSED:
        return [(length, (u,) * tokens) for length, u in _intervals([*chain.from_iterable(distributions)])]
    by_position = product(*map(_intervals, distributions))
    return [(prod(length for length, _ in some), tuple(u for _, u in some)) for some in by_position]


def _intervals(distributions: Sequence[Probabilities]) -> list[tuple[float, float]]:
    """Return the lengths and middles of the intervals of [0, 1] in which u changes the choice of no distribution."""
    ends = np.unique([0.0, 1.0, *np.cumsum(distributions, axis=1).clip(max=1.0).flat])
    return list(zip(np.diff(ends).tolist(), ((ends[:-1] + ends[1:]) / 2).tolist(), strict=True))


def _target(pair: Pair, models: RandomModels) -> Callable[[Context], Probabilities]:
    """Return the distribution that the pair should emit: the target's, or a point mass on its argmax."""
    if pair.choices is Choices.GREEDY:
        return lambda context: np.eye(models.vocabulary)[models.distribution(0, context).argmax()]
    return lambda context: models.distribution(0, context)


def _trees(
    pair: Pair,
    models: RandomModels,
    context: Context,
    max_depth: int,
    choice: Callable[[Context], int] = lambda context: UNKNOWN,
) -> Iterator[tuple[float, TokenTree]]:
    """Yield every tree that may be proposed after a context, with its probability: see `loop.propose`."""

    def grow(draft: int, chance: EnumeratedChance) -> TokenTree:
        source = pair.draft(models, pair.behaviours[draft], choice, chance, context, draft)
        return source.propose(pair.policy, [_root(context)], max_depth)[0]

    for proposals in product(*(outcomes(partial(grow, draft)) for draft in range(len(pair.behaviours)))):
        (tree,) = pair.policy.fit(Forest.merged([[tree] for _, tree in proposals]))
        yield prod(weight for weight, _ in proposals), pair.edit(tree) if pair.edit else tree


@dataclass
class EnumeratedTarget:
    """A `TargetView` that takes its chance from an `EnumeratedChance`, and its choices from noise if there is any."""

    target: Callable[[Context], Probabilities]
    context: Context
    tree: TokenTree
    chance: EnumeratedChance
    chosen: Callable[[Context], int] | None = None

    def __post_init__(self) -> None:
        self.draw = self.chance.choose
        # the same whenever asked
        self._chosen = cache(self.chosen or (lambda context: self.draw(self.target(context))))

    def distribution(self, node: int) -> Probabilities:
        """Return the target's distribution after a node."""
        return self.target((*self.context, *self.tree.path(node)))

    def choice(self, node: int) -> int:
        """Return the target's choice after a node."""
        return self._chosen((*self.context, *self.tree.path(node)))

    def accepts(self, probability: float) -> bool:
        """Toss a coin."""
        return self.chance.choose(np.array([1.0 - probability, probability])) == 1


def _emitted(pair: Pair, target: EnumeratedTarget) -> Context:
    """Return the tokens that one verified tree emits."""
    verdict = pair.verifier.verify(target.tree, target)
    return (*target.tree.tokens[list(verdict.path)].tolist(), verdict.token)


# --- Lossless pairs ---


def lossless_pairs() -> list[Pair]:
    """Return every verifier with every policy it is exact for, with one to three drafts."""
    ranked: list[Policy] = [Chain(0), Chain(3), Expansion((2, 2)), BestFirst(5, 3), BestFirst(5, 3, 0.2)]
    widths = [(1,), (2,), (3,), (1, 1), (2, 2), (1, 2, 1)]
    sampled = [(Sampled(w, r), MultiStep(r)) for r in (True, False) for w in widths]
    several = [(Sampled(w, r), MultiStep(r)) for r in (True, False) for w in ((2,), (1, 1))]
    two, three, insiders = (honest,) * 2, (honest,) * 3, (favours, avoids, whims)
    pairs = [Pair(p, ExactMatch(), choices=c) for p in ranked for c in (Choices.GREEDY, Choices.SAMPLING)]
    pairs += [Pair(p, ExactMatch(), drafts) for p in ranked[1:] for drafts in (two, three)]
    pairs += [Pair(p, ExactMatch(), (behaviour,), Choices.COUPLED) for p in ranked for behaviour in insiders]
    pairs += [Pair(p, ExactMatch(), insiders, Choices.COUPLED) for p in ranked[1:]]
    pairs += [Pair(p, ExactMatch()) for p, _ in several]
    pairs += [Pair(p, rule, tokens=4 if p.max_depth == 3 else None) for p, rule in sampled]
    pairs += [Pair(p, rule, choices=Choices.GREEDY) for p, rule in several]
    pairs += [Pair(p, rule, two) for p, rule in several]
    pairs += [Pair(p, rule, three, tokens=1 + p.max_depth) for p, rule in several]
    return pairs + intersection_pairs() + lattice_pairs()


def intersection_pairs() -> list[Pair]:
    """Return the rules on drafts that know some of the target's tokens, ranked and drawn, alone and merged."""
    drawn = [(Sampled(widths, r), MultiStep(r)) for r in (True, False) for widths in ((2,), (1, 1))]
    draft = EnumeratedIntersection
    pairs = [Pair(BestFirst(5, 3), ExactMatch(), choices=c, draft=draft) for c in (*Choices,)[:2]]
    pairs += [Pair(Expansion((2, 2)), ExactMatch(), (b,), Choices.COUPLED, draft) for b in (favours, avoids)]
    return pairs + [Pair(p, rule, (honest,) * drafts, draft=draft) for p, rule in drawn for drafts in (1, 2)]


def lattice_pairs() -> list[Pair]:
    """Return the rules on drafts that predict all depths at once, ranked and drawn, alone and merged."""
    ranked: list[Policy] = [Chain(3), Expansion((2, 2)), BestFirst(5, 3)]
    drawn = [(Sampled(widths, r), MultiStep(r)) for r in (True, False) for widths in ((2,), (2, 1))]
    pairs = []
    for draft in (EnumeratedLattice, EnumeratedPairs):
        pairs += [Pair(p, ExactMatch(), choices=c, draft=draft) for p in ranked for c in (*Choices,)[:2]]
        pairs += [Pair(p, ExactMatch(), (b,), Choices.COUPLED, draft) for p in ranked for b in (favours, avoids)]
        pairs += [Pair(p, rule, draft=draft) for p, rule in drawn]
        pairs += [Pair(p, rule, (honest,) * 2, draft=draft) for p, rule in drawn if p.max_depth == 1]
    return pairs


# --- Broken pairs ---


class NoResidual(MultiStep):
    """Draws the bonus token from p even after rejections, so that rejected tokens come back too often."""

    def verify(self, tree: TokenTree, target: TargetView) -> Verdict:
        """Accept as `MultiStep` does, and ignore the residual."""
        path = super().verify(tree, target).path
        return Verdict(path, target.draw(target.distribution(path[-1] if path else 0)))


def duplicates_tried_once(tree: TokenTree) -> TokenTree:
    """Forget all draws of a node but the first, with its q (SpecInfer's Definition 3.2 merges sets)."""
    return _with_draws(tree, [draws[:1] for draws in tree.draws])


def tried_likeliest_first(tree: TokenTree) -> TokenTree:
    """Reorder draws by probability, which is the order of siblings."""
    return _with_draws(tree, [[Draw(d.draft, node) for d in draws] for node, draws in enumerate(tree.draws)])


def likeliest_two_kept(tree: TokenTree) -> TokenTree:
    """Drop all children but the likeliest two after drawing (re-ranking as in EAGLE-2, arXiv 2406.16858)."""
    keep = {child for node in range(len(tree)) for child in tree.children(node)[:2]}
    return _with_draws(tree, [draws if node in keep else () for node, draws in enumerate(tree.draws)])


def unlikely_dropped(tree: TokenTree) -> TokenTree:
    """Drop tokens with a small q after drawing them (a confidence threshold)."""
    return _with_draws(tree, [draws if tree.probability(node) > 0.2 else () for node, draws in enumerate(tree.draws)])


def first_q_for_all_drafts(tree: TokenTree) -> TokenTree:
    """Claim that all draws under a node came from its first draft's q."""
    return _with_distributions(tree, lambda distributions: distributions[0])


def mean_q_for_all_drafts(tree: TokenTree) -> TokenTree:
    """Claim that all draws under a node came from the mean of the drafts' q."""
    return _with_distributions(tree, lambda distributions: np.mean(distributions, axis=0))


def first_q_for_a_whole_depth(tree: TokenTree) -> TokenTree:
    """Claim that all draws of a depth came from one q, as if they did not depend on the token above."""
    depths = tree.depths.tolist()
    first = {depths[key[0]]: tree.distributions[key] for key in sorted(tree.distributions, reverse=True)}
    distributions = {key: np.maximum(first[depths[key[0]]], 1e-300) for key in tree.distributions}
    return TokenTree(tree.tokens, tree.parents, tree.scores, tree.draws, distributions, tree.kind)


def _with_draws(tree: TokenTree, draws: Sequence[Sequence[Draw]]) -> TokenTree:
    """Return the tree with other draws; nodes left without any are dropped with all that is below."""
    renumbered = {0: 0}
    for node, parent in enumerate(tree.parents.tolist()):
        if draws[node] and parent in renumbered:
            renumbered[node] = len(renumbered)
    nodes = list(renumbered)[1:]
    parents = [renumbered[parent] for parent in tree.parents[nodes].tolist()]
    kept = [draws[node] for node in nodes]
    used = {(int(tree.parents[node]), draw.draft) for node in nodes for draw in draws[node]}
    distributions = {(renumbered[node], draft): tree.distributions[node, draft] for node, draft in used}
    tokens, scores = tree.tokens[nodes].tolist(), tree.scores[nodes].tolist()
    return TokenTree.from_nodes(int(tree.tokens[0]), tokens, parents, scores, kept, distributions, tree.kind)


def _with_distributions(tree: TokenTree, combine: Callable[[list[Probabilities]], Probabilities]) -> TokenTree:
    """Return the tree with one distribution under each node, kept positive so that the test can divide by it."""
    keys = sorted(tree.distributions)
    under = {node: combine([tree.distributions[key] for key in keys if key[0] == node]) for node, _ in keys}
    distributions = {key: np.maximum(under[key[0]], 1e-300) for key in keys}
    return TokenTree(tree.tokens, tree.parents, tree.scores, tree.draws, distributions, tree.kind)


def broken_pairs() -> list[Pair]:
    """Return mistakes that change the distribution."""
    once, twice = Sampled((1,), replacement=True), Sampled((2,), replacement=True)
    chain_of_two, children = Sampled((1, 1)), Sampled((2,))
    fixed, renormalised = MultiStep(replacement=True), MultiStep(replacement=False)
    mistakes = [
        Pair(children, fixed, (likeliest,)),  # a deterministic tree, verified as if it was drawn
        Pair(children, renormalised, (likeliest,)),
        Pair(children, fixed),  # q not renormalised after a rejection
        Pair(twice, fixed, edit=duplicates_tried_once),
        Pair(children, renormalised, edit=tried_likeliest_first),
        Pair(Sampled((3,)), renormalised, edit=likeliest_two_kept),
        Pair(Sampled((1,)), renormalised, edit=unlikely_dropped),
        Pair(once, fixed, (honest, honest), edit=duplicates_tried_once),
        Pair(once, fixed, (honest, honest), edit=first_q_for_all_drafts),
        Pair(once, fixed, (honest, honest), edit=mean_q_for_all_drafts),
        Pair(chain_of_two, renormalised, (sharpened,)),
        Pair(chain_of_two, NoResidual()),
        Pair(children, NoResidual()),
        Pair(chain_of_two, renormalised, (peeks,), Choices.COUPLED),
        Pair(chain_of_two, renormalised, (shared_only,)),
        Pair(Expansion((2, 2)), ExactMatch(), (favours,), Choices.REUSED),
        Pair(Sampled((2, 1)), renormalised, draft=EnumeratedPairs, edit=first_q_for_a_whole_depth, tokens=3),
    ]
    return [replace(mistake, expected_lossless=False) for mistake in mistakes]
