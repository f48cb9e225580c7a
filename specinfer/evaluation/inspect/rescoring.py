"""The target's view of every drafted node, computed again after the text was written.

Knows: the options that a result was made with, the target, how each verifier decides.
Does not know: how trees are changed (`inspection`), pictures.

A step keeps its tree and its path.  It does not keep the target's distributions, which are large.  A `Rescorer`
computes them again over the same prefix, in one pass a tree: they are the same up to rounding.  It checks that they
lead to the tokens that were emitted.  Where rounding decided otherwise, it says by how much.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specinfer.common.token_text import token_text
from specinfer.engine.gumbel import uniform
from specinfer.engine.options import Options
from specinfer.engine.sequence import Row, RowView
from specinfer.engine.verify import MultiStep
from specinfer.errors import InputError
from specinfer.results import Result, State, Step, states, tried
from specinfer.tree import Kind, TokenTree, top_candidates

if TYPE_CHECKING:
    from specinfer.decoder import SpeculativeDecoder

ALTERNATIVES = 5
BY_HAND = "by hand"  # who drafted a node that the user added
# The largest error of a score that rounding explains, as a share of the best score's height above the mean.
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class Alternative(NamedTuple):
    """A token that the target might have chosen."""

    token: int
    p: float
    noise: float | None  # added to log p; None without coupled noise


class Test(NamedTuple):
    """One acceptance test of multi-step sampling, passed where the coin is below the ratio."""

    coin: float | None  # u in [0, 1); None: a recorded step does not tell which
    ratio: float | None  # min(1, p / q) of the rests of both distributions; None: a recorded step does not tell

    @property
    def passed(self) -> bool:
        """Whether it is known to have passed."""
        return self.coin is not None and self.ratio is not None and self.coin < self.ratio


@dataclass(frozen=True)
class NodeInspection:
    """One node of a tree, as the target sees it."""

    node: int
    token: int
    state: State
    position: int  # of the token in the text, counted from 0; its position id in the pass
    slot: int  # of the KV cache that the pass wrote it to; if accepted, it moved to the slot of its position
    p: float | None  # the target's probability of the token after its parent, processed and warped; None at the root
    q: float | None  # the draft's, as the tree keeps it; None at the root and for nodes added by hand
    ratio: float | None  # p / q; None where q is given the noise, which p is not (ranked trees, coupled sampling)
    noise: float | None  # Gumbel noise of the token at this position; None unless coupled
    margin: float | None  # log p + noise, less the best other token's, in nats: above 0 if chosen; None if coins decide
    tests: tuple[Test, ...]  # in multi-step sampling: those of its draws, as far as known
    choice: int | None  # the target's own token after this node; None if coins decide
    top: tuple[Alternative, ...]  # the best tokens after this node, the best first


@dataclass(frozen=True)
class Difference:
    """A place where the target, asked again, chooses another token than it did."""

    step: int
    position: int  # of the token
    written: int  # the token of the text
    chosen: int  # the one chosen now
    gap: float  # how far ahead it is, in nats; for a coin, how far from its ratio
    explained: float  # how much of a gap rounding explains


class Rescored(NamedTuple):
    """The target's view of one tree."""

    path: tuple[int, ...]  # accepted nodes, root excluded
    bonus: int | None  # the target's own token after it; None where the text was cut and coins would have decided
    nodes: tuple[NodeInspection, ...]


class Rescorer:
    """A finished result, the decoder that made it, and the options.

    Args:
        decoder: with the target, and the kind of verifier, that made the result.
        result: at least one step of it is there.
        options: of the call, as `SpeculativeDecoder.prepare` takes them; ``max_new_tokens`` may be left out.

    Raises:
        InputError: a result without steps or of another vocabulary, or options that sample where it was greedy.
        PairingError: the decoder's verifier is not for these trees.
        SamplingError: an impossible option.
    """

    def __init__(self, decoder: "SpeculativeDecoder", result: Result, options: Options) -> None:
        if not result.steps:
            raise InputError("this result has no steps to inspect: nothing was decoded")
        self.decoder, self.result = decoder, result
        self.options = options | Options(seed=result.seed or 0)
        if not {"max_new_tokens", "max_length", "generation_config"} & self.options.keys():
            self.options["max_new_tokens"] = len(result.token_ids)
        for kind in {step.tree.kind for step in result.steps if step.tree.num_drafted}:
            decoder.verifier.check(kind)
        self.coins = isinstance(decoder.verifier, MultiStep)  # they decide; else the target's choices
        if self.row(0).contrast.alpha:
            raise InputError("contrastive search chooses by hidden states, and this scores logits: see result.steps")
        sampling = self.row(0).sampling
        if sampling != (result.seed is not None):
            was, now = ("greedy", "sample") if sampling else (f"sampled with seed {result.seed}", "are greedy")
            raise InputError(f"the result was {was}, but these options {now}: give the options of its own call")

    @property
    def draft_names(self) -> list[str]:
        """By draft id; the last one is for nodes that a user adds."""
        return [*(draft.draft for draft in self.result.stats.drafts), BY_HAND]

    def row(self, step: int) -> Row:
        """Return the row as it was before a step."""
        row: Row = self.decoder.prepare(self.result.prompt_ids, **self.options).row
        row.ids += [token for earlier in self.result.steps[:step] for token in earlier.tokens]
        return row

    def rescored(self, row: Row, tree: TokenTree, logits: Tensor, record: Step | None = None) -> Rescored:
        """Return the target's view of a tree.

        Args:
            row: before the step.
            tree: of N nodes.
            logits: (N, V) of the target after its nodes.
            record: of the decisions when the text was written; without it, the verifier decides now.
        """
        view = _Watched(row, tree, logits)
        bonus: int | None
        if record is None:
            path, bonus = self.decoder.verifier.verify(tree, view)
            kept, watched = len(path), view.tests
        else:
            path, bonus, kept, watched = record.path, record.bonus, len(record.tokens), None
            if bonus is None and not self.coins:
                bonus = view.choice((0, *path)[-1])
        tests = _tests(view, path, watched) if self.coins else {}
        found = states(tree, path, kept, tests if self.coins else tried(tree, path))
        after = [_After.of(view, node, self.coins) for node in range(len(tree))]
        nodes = (self._node(view, i, state, after, tuple(tests.get(i, ()))) for i, state in enumerate(found))
        return Rescored(path, bonus, tuple(nodes))

    def _node(
        self, view: RowView, node: int, state: State, after: Sequence["_After"], tests: tuple[Test, ...]
    ) -> NodeInspection:
        """Return a node, given the tokens that follow each node."""
        tree, here, root = view.tree, after[node], view.base - 1
        token = int(tree.tokens[node])
        p = q = ratio = noise = margin = None
        if node > 0:
            before = after[tree.parents[node]]
            _, p, noise = before.alternative(token)
            margin = None if self.coins else before.lead(token)
            if any(draw.draft < len(self.draft_names) - 1 for draw in tree.draws[node]):
                q = tree.probability(node)
                ratio = None if tree.kind is Kind.RANKED and noise is not None else p / max(q, 1e-300)
        return NodeInspection(
            node=node,
            token=token,
            state=state,
            position=root + int(tree.depths[node]),
            slot=root + node,
            p=p,
            q=q,
            ratio=ratio,
            noise=noise,
            margin=margin,
            tests=tests,
            choice=None if self.coins else here.best[0],
            top=tuple(here.alternative(token) for token in here.best),
        )

    def differences(self, number: int, row: Row, step: Step, logits: Tensor) -> list[Difference]:
        """Return where the target's choices, made again, are not those of a step; arguments as `rescored`.

        Raises:
            InputError: rounding does not explain one.
        """
        compare = _other_coins if self.coins else _other_choices
        found = [Difference(number, *each) for each in compare(RowView(row, step.tree, logits), step)]
        for difference in found:
            if not difference.gap <= difference.explained:
                raise InputError(
                    f"step {number}: {self.in_words(difference)}, and rounding explains {difference.explained:.2g}. "
                    "Give the target and the options (temperature, top_p, logits_processor ...) that the result was "
                    "made with"
                )
        return found

    def in_words(self, difference: Difference) -> str:
        """Return a difference in words."""
        written, at = self.name(difference.written), f"at position {difference.position}"
        if difference.written == difference.chosen:
            return f"{at} the coin for {written} is {difference.gap:.2g} on the other side of its ratio"
        return f"{at} the target chooses {self.name(difference.chosen)}, not {written}, by {difference.gap:.2g} nats"

    def name(self, token: int) -> str:
        """Return a token as it is drawn: its text with visible white space, or its id without a tokenizer."""
        return token_text(self.result.tokenizer, token)


class _Watched(RowView):
    """A view that remembers the acceptance tests it was asked for."""

    def __init__(self, row: Row, tree: TokenTree, logits: Tensor) -> None:
        super().__init__(row, tree, logits)
        self.tests: list[Test] = []

    def accepts(self, probability: float) -> bool:
        """Toss the row's coin."""
        passed = super().accepts(probability)
        self.tests.append(Test(uniform(self.coins, self.tosses), probability))
        return passed


class _After(NamedTuple):
    """The target's distribution after one node."""

    log_p: Tensor  # (V,)
    noise: Tensor | None  # (V,), if it counts
    values: Tensor  # (V,) that a choice maximises
    best: list[int]  # the tokens of the largest values, descending

    @classmethod
    def of(cls, view: RowView, node: int, coins: bool = False) -> "_After":
        log_p = view.scores(node).log_softmax(-1)
        noise = None if coins else view.noise(node)
        values = log_p if noise is None else log_p + noise
        return cls(log_p, noise, values, top_candidates(values, ALTERNATIVES)[0].tolist())

    def alternative(self, token: int) -> Alternative:
        noise = None if self.noise is None else float(self.noise[token])
        return Alternative(token, float(self.log_p[token].exp()), noise)

    def lead(self, token: int) -> float:
        rival = next(other for other in self.best if other != token)
        return float(self.values[token] - self.values[rival])


# ---- acceptance tests of multi-step sampling ----


def _tests(view: RowView, path: Sequence[int], watched: Sequence[Test] | None = None) -> dict[int, list[Test]]:
    """Return by node the tests of a verification: those that were watched, or those of a recorded step.

    The distributions of a recorded step are gone.  Its coins are counted off in the order of the tests, and only the
    first test below a node has a ratio that p and q tell.  Where a token was drawn several times and one of its tests
    passed, it may be unknown which one.  Then all later coins are unknown as well.
    """
    by_node: defaultdict[int, list[Test]] = defaultdict(list)
    tosses, known = 0, True
    for node, accepted in zip((0, *path), (*path, None), strict=True):
        draws = [child for _, child in view.tree.draws_under(node)]
        for turn, child in enumerate(draws):
            tosses += 1
            if watched is not None:
                test = watched[tosses - 1]
            elif known:
                test = Test(uniform(view.coins, tosses), None if turn else _first_ratio(view, node, child))
            else:
                test = Test(None, None)
            by_node[child].append(test)
            if child != accepted:
                continue
            if child not in draws[turn + 1 :] or test.passed:
                break
            if test.ratio is None:  # this draw of the token passed, or a later one
                known = False
                break
    return by_node


def _first_ratio(view: RowView, node: int, child: int) -> float | None:
    """Return min(1, p / q) of a family's first test; None after several drafts: a tree keeps their largest q."""
    tree = view.tree
    if any(len({draw.draft for draw in tree.draws[each]}) > 1 for each in (node, child)):
        return None
    return min(1.0, float(view.distribution(node)[tree.tokens[child]]) / max(tree.probability(child), 1e-300))


# Position, token written, token chosen, gap, and the gap that rounding explains: see `Difference`.
_Found = Iterator[tuple[int, int, int, float, float]]


def _other_coins(view: RowView, step: Step) -> _Found:
    """Find where the first test of a family would have gone another way than the record says."""
    tests, tree = _tests(view, step.path), view.tree
    for node, accepted in zip((0, *step.path), (*step.path, None), strict=True):
        first, *later = [child for _, child in tree.draws_under(node)] or [0]
        coin, ratio = tests[first][0] if first else Test(None, None)
        if coin is None or ratio is None:
            continue
        if (coin < ratio) != (first == accepted) and not (first in later and coin >= ratio):  # it may have passed later
            token, explained = int(tree.tokens[first]), ratio * _rounding(view.scores(node), view.logits.dtype)
            yield view.base + int(tree.depths[node]), token, token, abs(coin - ratio), explained


def _other_choices(view: RowView, step: Step) -> _Found:
    """Find where the target's choice along a step is not the token that was emitted."""
    for depth, (node, token) in enumerate(zip((0, *step.path), step.tokens, strict=False)):
        after = _After.of(view, node)
        if (chosen := after.best[0]) != token:
            ahead = float(after.values[chosen] - after.values[token])
            gaps = [(ahead, _rounding(view.scores(node), view.logits.dtype))]
            gaps += [_beyond_edge(view, node, token, chosen)] if view.row.sampling else []
            yield view.base + depth, token, chosen, *next((pair for pair in gaps if pair[0] <= pair[1]), gaps[0])


def _beyond_edge(view: RowView, node: int, written: int, chosen: int) -> tuple[float, float]:
    """Return how far a token is from the edge of what top_k, top_p ... keep, and how much of it rounding explains.

    Rounding may have put the written token beyond the edge now, or the chosen one then: the nearer one counts.
    """
    logits, kept = view.logits[node], view.scores(node).isfinite()
    gaps = [inf if kept[written] else logits[kept].min() - logits[written]]
    gaps += [inf if kept.all() else logits[chosen] - logits[~kept].max()]
    return min(abs(float(gap)) for gap in gaps), _rounding(logits, logits.dtype)


def _rounding(scores: Tensor, computed: torch.dtype) -> float:
    """Return the gap between two scores (of V), in nats, that rounding explains in the type that logits have."""
    finite = scores[scores.isfinite()]
    return ROUNDING.get(computed, 0.0) * float(finite.max() - finite.mean())
