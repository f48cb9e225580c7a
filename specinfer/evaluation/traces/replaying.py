"""Replaying a trace: what a tree policy and a verifier would have made of the recorded texts.  No model runs.

Knows: recorded trees and distributions, the engine's rules for where a step ends.
Does not know: models, files.

Ranked trees with `ExactMatch` are replayed exactly: the text is the same with any tree, so each step's tree is looked
up where the step begins, and followed as far as the text goes.  Sampled trees would have led to other texts.  But since
their verifiers emit exactly the target's distribution, the recorded text is as likely as under them, and given the
text, whether each token was an accepted draw has a known probability (`acceptance`), independent from node to node.
The expected number of steps over the text follows without any simulation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import log
from typing import Any

import numpy as np

from specinfer.common.tables import interval
from specinfer.common.values import checked_flag
from specinfer.engine.verify import ExactMatch, MultiStep, Verifier, chosen_verifier
from specinfer.errors import InputError
from specinfer.evaluation.compare.report import bootstrap
from specinfer.evaluation.traces.acceptance import Floats, multi_step, naive, survival
from specinfer.evaluation.traces.trace import Drafted, Text, Trace
from specinfer.tree import BestFirst, Chain, Draw, Expansion, Kind, Policy, Sampled, TokenTree, merge

EXACT = "exact"
EXPECTED = "teacher-forced expectation"
BOUND = "bound in hindsight"

# what would happen to a step at each position of a text: (n, D + 1), the probability that it accepts 0 ... D tokens
Lengths = Callable[[Text], Floats]


@dataclass(frozen=True)
class Replay:
    """What a policy and a verifier would have made of a trace."""

    policy: str
    verifier: str
    drafts: tuple[str, ...]
    how: str  # EXACT: what a run would do; EXPECTED: the mean of what runs would do, given the recorded texts; BOUND
    tokens: np.ndarray  # (texts,) new tokens
    steps: np.ndarray  # (texts,) target passes, or their expectation
    accepted: np.ndarray  # (depth,) the share of steps that accept 1, 2, ... tokens or more

    @property
    def tokens_per_pass(self) -> list[float]:
        """The acceptance length tau over all texts, and the bounds of its 95 % bootstrap interval over texts."""
        return ratio(self.tokens, self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {
            "policy": self.policy,
            "verifier": self.verifier,
            "drafts": list(self.drafts),
            "how": self.how,
            "tokens_per_pass": self.tokens_per_pass,
            "tokens": self.tokens.tolist(),
            "steps": self.steps.tolist(),
            "accepted": self.accepted.tolist(),
        }

    def __str__(self) -> str:
        return f"{self.policy}, {self.verifier}: {interval(self.tokens_per_pass)} tokens per target pass ({self.how})"


def ratio(above: np.ndarray, below: np.ndarray) -> list[float]:
    """Return the ratio of two sums over texts, (texts,) each, and the bounds of its 95 % bootstrap interval."""
    return bootstrap(np.stack([above, below], 1), lambda pairs: pairs[..., 0].sum(-1) / pairs[..., 1].sum(-1))


def replay(
    trace: Trace,
    policy: Policy,
    verifier: Verifier | None = None,
    *,
    drafts: Sequence[int | str] | None = None,
    coupled: bool = True,
) -> Replay:
    """Return what a policy and a verifier would have made of a trace's texts.

    Args:
        trace: of `record`.
        policy: `BestFirst`, `Expansion`, `Chain` or `Sampled`, no larger than what was recorded.
        verifier: by default the one that is exact for the policy's trees, as in `SpeculativeDecoder`.  `ExactMatch` on
            trees drawn with replacement is SpecInfer's naive sampling.
        drafts: which of the recorded drafts propose, by name or place; all by default, and exactly one if sampled.
        coupled: drafts rank by the noise that the target chooses with.  False, on `Expansion`: by their own
            distribution, as in systems without shared noise; the target's distribution is the same.

    Raises:
        InputError: the trace cannot answer this: a policy that depends on clocks, a tree larger than recorded,
            distributions that were not recorded.
        PairingError: the verifier would be biased on this policy's trees.
    """
    if not isinstance(trace, Trace):
        raise InputError(f"trace={trace!r:.60} is no Trace: record one, or read one with Trace.load")
    coupled = checked_flag("coupled", coupled)
    if not hasattr(policy, "kind") or isinstance(policy, type):
        raise InputError(f"policy={policy!r:.60} is no growth policy: use BestFirst, Expansion, Chain or Sampled")
    verifier = chosen_verifier(verifier, policy.kind)
    if not isinstance(drafts, Sequence | None):
        raise InputError(f"drafts={drafts!r:.60} are no list of drafts: give their names or places")
    places = [trace.draft(draft) for draft in (range(len(trace.drafts)) if drafts is None else drafts)]
    _check(trace, policy, verifier, places, coupled)
    ranked = policy.kind is Kind.RANKED
    lengths: Lengths
    if not ranked:
        assert isinstance(policy, Sampled)
        lengths = partial(_sampled, policy=policy, verifier=verifier, draft=places[0])
    else:
        budget = trace.settings["max_new_tokens"]
        source = _tree if coupled or not trace.sampling else _uncoupled_tree
        lengths = partial(_followed, policy=policy, drafts=places, budget=budget, source=source)
    shown = repr(verifier) if coupled or not trace.sampling else f"{verifier!r}, not coupled"
    return _replayed(trace, repr(policy), shown, places, EXACT if ranked else EXPECTED, lengths)


def oracle(trace: Trace, policy: Policy, *, drafts: Sequence[int | str] | None = None) -> Replay:
    """Return the bound for trees of a policy's size: in hindsight, the best tree of the recorded candidates.

    A step accepts as long as the text's next token is among the candidates that some draft has after the tokens before
    it, up to the policy's depth and nodes.

    Raises:
        InputError: the policy is deeper than what was recorded.
    """
    places = [trace.draft(draft) for draft in (range(len(trace.drafts)) if drafts is None else drafts)]
    _check_depth(trace, policy)
    reach = min(policy.max_depth, policy.max_nodes)

    def lengths(text: Text) -> Floats:
        found = np.any([text.ranks(place) >= 0 for place in places], axis=0)[:, :reach]
        return _certain(found.cumprod(1).sum(1), reach)

    return _replayed(trace, repr(policy), "oracle", places, BOUND, lengths)


# ---- steps over a text ----


def _replayed(trace: Trace, policy: str, verifier: str, drafts: Sequence[int], how: str, lengths: Lengths) -> Replay:
    tables = [lengths(text) for text in trace.texts]
    visits = [_visits(table) for table in tables]
    reached = [own @ table[:, ::-1].cumsum(1)[:, ::-1] for own, table in zip(visits, tables, strict=True)]
    steps = np.array([own.sum() for own in visits])
    tokens = np.array([len(text.token_ids) for text in trace.texts])
    names = tuple(trace.drafts[draft] for draft in drafts)
    return Replay(policy, verifier, names, how, tokens, steps, np.sum(reached, axis=0)[1:] / steps.sum())


def _visits(lengths: Floats) -> Floats:
    """Return the probability that a step begins at each position, (n,), given those of accepting 0 ... D tokens."""
    n, width = lengths.shape
    visits = np.zeros(n + width)
    visits[0] = 1.0
    for place in range(n):
        visits[place + 1 : place + 1 + width] += visits[place] * lengths[place]
    return visits[:n]


def _certain(lengths: np.ndarray, most: int) -> Floats:
    """Return the table of lengths (n,) that are known."""
    return np.eye(most + 1)[lengths]


# ---- ranked trees ----


def _followed(
    text: Text, policy: Policy, drafts: Sequence[int], budget: int, source: Callable[..., TokenTree]
) -> Floats:
    """ExactMatch from the text's beginning; positions where no step begins stay zero."""
    n, place = len(text.token_ids), 0
    lengths = np.zeros((n, policy.max_depth + 1))
    while place < n:
        depth = min(policy.max_depth, budget - place - 1) if policy.max_nodes else 0
        (tree,) = policy.fit([merge([source(text, draft, place, policy, depth) for draft in drafts])])
        node: int | None = 0
        accepted = -1
        while node is not None:
            accepted += 1
            end = place + accepted == n
            node = None if end else tree.child(node, text.token_ids[place + accepted])
        lengths[place, accepted] = 1.0
        place += accepted + 1
    return lengths


def _tree(text: Text, draft: int, place: int, policy: Policy, depth: int) -> TokenTree:
    """Return the tree that a draft would have grown at a position; of `Expansion`, what may lie on the text."""
    drafted = text.drafted[draft]
    if isinstance(policy, BestFirst):
        return _best_first(text, drafted, draft, place, policy, depth)
    assert isinstance(policy, Expansion)
    return _spine(text, draft, place, policy.expansion[:depth], drafted.tokens[place], drafted.log_probs[place])


def _uncoupled_tree(text: Text, draft: int, place: int, policy: Expansion, depth: int) -> TokenTree:
    """Return the tree of `Expansion` that a draft would have grown by its own distribution."""
    drafted = text.drafted[draft]
    with np.errstate(divide="ignore"):
        values = np.log(drafted.distribution_probs[place])
    return _spine(text, draft, place, policy.expansion[:depth], drafted.distribution_tokens[place], values)


def _best_first(text: Text, drafted: Drafted, draft: int, place: int, policy: BestFirst, max_depth: int) -> TokenTree:
    own = slice(*drafted.first[place : place + 2])
    parents, scores = drafted.tree_parents[own].tolist(), drafted.tree_scores[own]
    least = np.float32(log(policy.min_probability)) if policy.min_probability else -np.inf
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    keep = [node for node, depth in enumerate(depths) if depth <= max_depth and scores[node] >= least]
    keep = keep[: policy.max_nodes]
    new = {node: i for i, node in enumerate([-1, *keep])}
    tokens = drafted.tree_tokens[own][keep].tolist()
    draws = [[Draw(draft, turn)] for turn in range(len(keep))]
    above = [new[parents[node]] for node in keep]
    return TokenTree.from_nodes(text.root(place), tokens, above, scores[keep].tolist(), draws)


def _spine(
    text: Text, draft: int, place: int, widths: Sequence[int], candidates: np.ndarray, log_probs: np.ndarray
) -> TokenTree:
    """Return the children of the nodes on the text, level by level, of what is known there, both (D, k)."""
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    above, score = 0, 0.0
    for level, width in enumerate(widths):
        first = len(tokens)
        for token, value in zip(candidates[level, :width].tolist(), log_probs[level, :width].tolist(), strict=True):
            if token >= 0 and value > -np.inf:
                tokens.append(token)
                parents.append(above)
                scores.append(score + value)
        wanted = [*text.token_ids, -1][min(place + level, len(text.token_ids))]
        if wanted not in tokens[first:]:
            break
        above = tokens.index(wanted, first) + 1
        score = scores[above - 1]
    draws = [[Draw(draft, turn)] for turn in range(len(tokens))]
    return TokenTree.from_nodes(text.root(place), tokens, parents, scores, draws)


# ---- sampled trees ----


def _sampled(text: Text, policy: Sampled, verifier: Verifier, draft: int) -> Floats:
    """Return how likely each position's step accepts 0 ... D tokens, given the text."""
    drafted, n = text.drafted[draft], len(text.token_ids)
    depth = policy.max_depth
    q = drafted.probability.astype(np.float64)
    padded = np.concatenate([text.probability.astype(np.float64), np.ones(depth)])

    def level(j: int, draws: int) -> Floats:
        if isinstance(verifier, ExactMatch):
            return naive(q[:, j], draws)
        if policy.replacement:
            return multi_step(padded[j : n + j], q[:, j], drafted.tests[:, j].astype(np.float64), draws)
        accepted = drafted.without_replacement[:, j, draws - 1].astype(np.float64)
        return np.stack([1 - accepted, accepted], 1)  # a token is drawn once at most

    reached = np.concatenate([np.ones((n, 1)), survival(policy.expansion, level, n), np.zeros((n, 1))], 1)
    return reached[:, :-1] - reached[:, 1:]


# ---- what a trace can answer ----


def _check(trace: Trace, policy: Policy, verifier: Verifier, drafts: Sequence[int], coupled: bool) -> None:
    """Raise `InputError` where the trace does not hold what a replay needs."""
    _check_depth(trace, policy)
    if type(policy) not in (BestFirst, Expansion, Chain, Sampled) or type(verifier) not in (ExactMatch, MultiStep):
        raise InputError(
            f"{policy!r} with {verifier!r} cannot be replayed: trees must be BestFirst, Expansion, Chain or Sampled, "
            "which depend on distributions alone, and the verifier ExactMatch or MultiStep"
        )
    if isinstance(policy, BestFirst):
        if policy.max_nodes > trace.settings["nodes"]:
            _refuse(policy, f"best-first trees of at most {trace.settings['nodes']} nodes were recorded", "nodes")
        if not coupled and trace.sampling:
            raise InputError(f"{policy!r} was recorded with drafts that know the noise: use Expansion for others")
    elif isinstance(policy, Sampled):
        _check_sampled(trace, policy, verifier, drafts)
    elif isinstance(policy, Expansion):
        kept = getattr(
            trace.texts[0].drafted[0], "tokens" if coupled or not trace.sampling else "distribution_tokens"
        ).shape[2]
        if max(policy.expansion, default=0) > kept:
            _refuse(policy, f"{kept} candidates per node were recorded", "top")


def _check_sampled(trace: Trace, policy: Sampled, verifier: Verifier, drafts: Sequence[int]) -> None:
    if len(drafts) != 1:
        raise InputError(f"{policy!r} is replayed with one draft: choose drafts=[...] among {', '.join(trace.drafts)}")
    if not trace.sampling:
        raise InputError(
            f"{policy!r} needs a trace with a temperature: along greedy texts no distributions are recorded"
        )
    if isinstance(verifier, ExactMatch) and not policy.replacement:
        raise InputError(f"{policy!r} cannot be replayed with ExactMatch(): draw with replacement, or use MultiStep")
    most = int(np.prod(policy.expansion)) if policy.replacement else max(policy.expansion, default=0)
    if isinstance(verifier, MultiStep) and most > trace.settings["draws"]:
        why = f"it may draw {most} times under a node, and {trace.settings['draws']} draws were recorded"
        _refuse(policy, why, "draws")


def _check_depth(trace: Trace, policy: Policy) -> None:
    if policy.max_depth > trace.settings["depth"]:
        _refuse(policy, f"{trace.settings['depth']} levels were recorded", "depth")


def _refuse(policy: Policy, why: str, size: str) -> None:
    raise InputError(f"{policy!r} cannot be replayed: {why}; record again with a larger {size}")
