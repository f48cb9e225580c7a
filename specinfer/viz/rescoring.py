"""The target's rescored of every drafted node, worked out again after the text was written.

Knows: the options that a result was made with, the target, how each verifier decides.
Does not know: how trees are changed (`inspection`), pictures.

A step keeps its tree and its path, not the target's distributions, which are large.  Scored again over the same prefix
they are the same up to rounding, so a `Rescorer` recomputes them one pass a tree, checks that they lead to the tokens
that were emitted, and says by how much where rounding decided otherwise.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from specinfer.engine.gumbel import uniform
from specinfer.engine.sequence import Row
from specinfer.engine.target_view import RowView
from specinfer.engine.verify import MultiStep
from specinfer.errors import InputError
from specinfer.results import Result, State, Step, states, tried
from specinfer.tree import Kind, TokenTree, top_candidates
from specinfer.viz.token_text import token_text

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
    ratio: float | None  # min(1, p / q) of what was left of both distributions; None: a recorded step does not tell


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
    tests: tuple[Test, ...]  # multi-step sampling: of its draws, as far as known
    choice: int | None  # what the target itself says after this node; None if coins decide
    top: tuple[Alternative, ...]  # what it nearly said after this node, the nearest first


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
    """What the target says of one tree."""

    path: tuple[int, ...]  # accepted nodes, root excluded
    bonus: int | None  # the target's own token after it; None where the text was cut and coins would have decided
    nodes: tuple[NodeInspection, ...]


class Rescorer:
    """A finished result, the decoder that made it, and the options.

    Args:
        decoder: with the target, and the kind of verifier, that made the result.
        result: at least one step of it is there.
        options: of the call, as `SpeculativeDecoder.open` takes them; ``max_new_tokens`` may be left out.

    Raises:
        InputError: a result without steps or of another vocabulary, or options that sample where it was greedy.
        PairingError: the decoder's verifier is not for these trees.
        SamplingError: an impossible option.
    """

    def __init__(self, decoder: "SpeculativeDecoder", result: Result, options: Mapping[str, Any]) -> None:
        if not result.steps:
            raise InputError("this result has no steps to inspect: nothing was decoded")
        self.decoder, self.result = decoder, result
        self.options = {name: value for name, value in options.items() if name != "seed"}  # the result has it
        if not {"max_new_tokens", "max_length", "generation_config"} & self.options.keys():
            self.options["max_new_tokens"] = len(result.token_ids)
        for kind in {step.tree.kind for step in result.steps if step.tree.num_drafted}:
            decoder.verifier.check(kind)
        sampling = self.row(0).sampling
        if sampling != (result.seed is not None):
            was, now = ("greedy", "sample") if sampling else (f"sampled with seed {result.seed}", "are greedy")
            raise InputError(
                f"the result was {was}, but these options {now}: give the options of the call that made it"
            )

    @property
    def draft_names(self) -> list[str]:
        """By draft id; the last one is nobody's, for nodes that are added."""
        return [*(draft.draft for draft in self.result.stats.drafts), BY_HAND]

    def row(self, step: int) -> Row:
        """Return the row as it was before a step."""
        row = self.decoder.open(self.result.prompt_ids, seed=self.result.seed or 0, **self.options).rows[0]
        row.ids += [token for earlier in self.result.steps[:step] for token in earlier.tokens]
        return row

    def rescored(self, row: Row, tree: TokenTree, logits: Tensor, record: Step | None = None) -> Rescored:
        """Return what the target says of a tree.

        Args:
            row: before the step.
            tree: of N nodes.
            logits: (N or more, V) of the target after its nodes.
            record: what was decided when the text was written; without it, the verifier decides now.
        """
        view, verifier = _Watched(row, tree, logits), self.decoder.verifier
        coins, tests = isinstance(verifier, MultiStep), {}
        bonus: int | None
        if record is None:
            path, bonus = verifier.verify(tree, view)
            kept = len(path)
        else:
            path, bonus, kept = record.path, record.bonus, len(record.tokens)
            if bonus is None and not coins:
                bonus = view.choice((0, *path)[-1])
        if coins:
            tests = _run_tests(tree, path, view.tests) if record is None else _recorded_tests(view, path)
        after = [_After.of(view, node, not coins) for node in range(len(tree))]
        nobody = len(self.draft_names) - 1
        fates = states(tree, path, kept, tests if coins else tried(tree, path))
        nodes = [_node(view, i, fate, after, tuple(tests.get(i, ())), nobody) for i, fate in enumerate(fates)]
        return Rescored(path, bonus, tuple(nodes))

    def differences(self, number: int, row: Row, step: Step, logits: Tensor) -> list[Difference]:
        """Return where the target's choices, made again, are not those of a step; arguments as `rescored`.

        Raises:
            InputError: rounding does not explain one.
        """
        view = RowView(row, step.tree, logits)
        compare = _other_coins if isinstance(self.decoder.verifier, MultiStep) else _other_choices
        found = [Difference(number, *difference) for difference in compare(view, step)]
        for difference in found:
            if not difference.gap <= difference.explained:
                raise InputError(
                    f"step {number}: {self.told(difference)}, and rounding explains {difference.explained:.2g}. Give "
                    "the target and the options (temperature, top_p, logits_processor ...) that the result was made "
                    "with"
                )
        return found

    def told(self, difference: Difference) -> str:
        """Return a difference in words."""
        if difference.written == difference.chosen:
            return (
                f"at position {difference.position} the coin for {self.name(difference.written)} is "
                f"{difference.gap:.2g} on the other side of its ratio"
            )
        return (
            f"at position {difference.position} the target chooses {self.name(difference.chosen)}, not "
            f"{self.name(difference.written)}, by {difference.gap:.2g} nats"
        )

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
    values: Tensor  # (V,) what a choice maximises
    best: list[int]  # the tokens of the largest values, descending
    chooses: bool  # or else coins decide

    @classmethod
    def of(cls, view: RowView, node: int, chooses: bool) -> "_After":
        log_p = view.scores(node).log_softmax(-1)
        noise = view.noise(node) if chooses else None
        values = log_p if noise is None else log_p + noise
        return cls(log_p, noise, values, top_candidates(values, ALTERNATIVES)[0].tolist(), chooses)

    def alternative(self, token: int) -> Alternative:
        return Alternative(
            token, float(self.log_p[token].exp()), None if self.noise is None else float(self.noise[token])
        )

    def lead(self, token: int) -> float | None:
        rival = next(other for other in self.best if other != token)
        return float(self.values[token] - self.values[rival]) if self.chooses else None


def _node(
    view: RowView, node: int, state: State, after: Sequence[_After], tests: tuple[Test, ...], nobody: int
) -> NodeInspection:
    """Return a node, given what follows each node, and the draft id of nodes that no draft proposed."""
    tree, own = view.tree, after[node]
    token, root = int(tree.tokens[node]), view.base - 1
    p = q = ratio = noise = margin = None
    if node > 0:
        before = after[tree.parents[node]]
        _, p, noise = before.alternative(token)
        margin = before.lead(token)
        if any(draw.draft != nobody for draw in tree.draws[node]):
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
        choice=own.best[0] if own.chooses else None,
        top=tuple(own.alternative(token) for token in own.best),
    )


# ---- acceptance tests of multi-step sampling ----


def _run_tests(tree: TokenTree, path: Sequence[int], tests: Sequence[Test]) -> dict[int, list[Test]]:
    """Return by node the tests of a verification that was watched."""
    by_node: defaultdict[int, list[Test]] = defaultdict(list)
    left = iter(tests)
    for node, accepted in zip((0, *path), (*path, None), strict=True):
        for _, child in tree.draws_under(node):
            by_node[child].append(test := next(left))
            if child == accepted and _passed(test):
                break
    return by_node


def _recorded_tests(view: RowView, path: Sequence[int]) -> dict[int, list[Test]]:
    """Return by node the tests of a recorded step, whose distributions are gone.

    Coins are counted off in the order of the tests; only a node's first one has a ratio that p and q tell.  Where a
    token was drawn several times and one of its tests passed, which one may be unknown, and with it all later coins.
    """
    by_node: defaultdict[int, list[Test]] = defaultdict(list)
    tosses: int | None = 0  # so far, if known
    for node, accepted in zip((0, *path), (*path, None), strict=True):
        draws = [child for _, child in view.tree.draws_under(node)]
        for turn, child in enumerate(draws):
            coin = ratio = None
            if tosses is not None:
                tosses += 1
                coin, ratio = uniform(view.coins, tosses), _first_ratio(view, node, child) if turn == 0 else None
            by_node[child].append(test := Test(coin, ratio))
            if child != accepted:
                continue
            if child not in draws[turn + 1 :] or _passed(test):
                break
            if test.ratio is None:  # this draw of the token passed, or a later one
                tosses = None
                break
    return by_node


def _passed(test: Test) -> bool:
    """Return whether a test is known to have passed."""
    return test.coin is not None and test.ratio is not None and test.coin < test.ratio


def _first_ratio(view: RowView, node: int, child: int) -> float | None:
    """Return min(1, p / q) of a family's first test; None where several drafts met, as a tree keeps their largest q."""
    tree = view.tree
    if any(len({draw.draft for draw in tree.draws[own]}) > 1 for own in (node, child)):
        return None
    return min(1.0, float(view.distribution(node)[tree.tokens[child]]) / max(tree.probability(child), 1e-300))


def _other_coins(view: RowView, step: Step) -> list[tuple[int, int, int, float, float]]:
    """Return where the first test of a family would have gone another way than the record says."""
    tests, tree = _recorded_tests(view, step.path), view.tree
    found = []
    for node, accepted in zip((0, *step.path), (*step.path, None), strict=True):
        children = [child for _, child in tree.draws_under(node)]
        coin, ratio = tests[children[0]][0] if children else Test(None, None)
        if coin is None or ratio is None:
            continue
        later = children[0] in children[1:]  # then it may have passed there
        if (coin < ratio) != (children[0] == accepted) and not (later and coin >= ratio):
            token = int(tree.tokens[children[0]])
            explained = ratio * _rounding(view, node)
            found.append((view.base + int(tree.depths[node]), token, token, abs(coin - ratio), explained))
    return found


def _other_choices(view: RowView, step: Step) -> list[tuple[int, int, int, float, float]]:
    """Return where the target's choice along a step is not the token that was emitted."""
    found = []
    for depth, (node, token) in enumerate(zip((0, *step.path), step.tokens, strict=False)):
        after = _After.of(view, node, chooses=True)
        if after.best[0] != token:
            gap = float(after.values[after.best[0]] - after.values[token])
            found.append((view.base + depth, token, after.best[0], gap, _rounding(view, node)))
    return found


def _rounding(view: RowView, node: int) -> float:
    """Return the gap between two scores after a node, in nats, that rounding explains."""
    scores = view.scores(node)
    some = scores[scores.isfinite()]
    return ROUNDING.get(view.logits.dtype, 0.0) * float(some.max() - some.mean())
