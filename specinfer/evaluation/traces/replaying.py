"""Replaying a trace: what a tree policy and a verifier would have made of the recorded texts.  No model runs.

Knows: recorded trees and distributions, the engine's rules for where a step ends.
Does not know: models, files.

Ranked trees with `ExactMatch` are replayed exactly, because the text is the same with any tree.  Best-first trees are
looked up where a step begins, and followed as far as the text goes.  `Expansion` needs no trees: a step accepts as long
as one draft ranks the text's next tokens within the widths.

Sampled trees would have led to other texts.  But their verifiers emit exactly the target's distribution, so the
recorded text is as likely under them.  Given the text, the probability that a token was an accepted draw is known
(`closed_forms`), and independent from node to node.  The expected number of steps over the text follows without any
simulation.  Beside it stands what the best rule would accept at each node (`transport`).

All of this is true of drafts whose proposals depend on the text alone.  Of others the recorded proposals are replayed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from math import log

import numpy as np

from specinfer.common.tables import interval
from specinfer.common.values import checked_flag, plain
from specinfer.engine.verify import ExactMatch, MultiStep, Verifier, chosen_verifier
from specinfer.errors import InputError
from specinfer.evaluation.compare.report import bootstrap, ratio_of_sums
from specinfer.evaluation.traces.closed_forms import Floats, alive, multi_step, naive
from specinfer.evaluation.traces.trace import Trace, TraceText
from specinfer.tree import BestFirst, Chain, Draw, Expansion, Forest, Policy, Sampled, TokenTree
from specinfer.tree.nodes import depths_of

EXACT = "exact"
EXPECTED = "teacher-forced expectation"
BOUND = "bound in hindsight"
RECORDED = "of this recording alone"
SIZES = {
    "depth": "levels",
    "nodes": "nodes of best-first trees",
    "top": "candidates per node",
    "draws": "draws under a node",
}

# text -> (n, D + 1), the probability that a step at each position accepts 0 ... D tokens
Lengths = Callable[[TraceText], Floats]


@dataclass(frozen=True)
class Bound:
    """The share that multi-step sampling accepts at the nodes that it visits, and the most that any rule could accept.

    Expected over the target's tokens, so a little off the replayed share of steps.  Every rule means those that emit
    the target's distribution; below the root, those that decide node by node.
    """

    accepted: Floats  # (depth,) the share of steps that accept a token at depth 1, 2, ...
    most: Floats  # (depth,) the same by the best rule
    share: list[float]  # accepted over most, of all depths, and the bounds of its 95 % interval


@dataclass(frozen=True)
class Replay:
    """The outcome of a policy and a verifier on a trace."""

    policy: str
    verifier: str
    drafts: tuple[str, ...]
    how: str  # EXACT: what a run would do; EXPECTED: the mean of what runs would do, given the recorded texts; BOUND;
    # RECORDED: one of the drafts would have proposed other tokens in a run (`Trace.by_run`)
    tokens: np.ndarray  # (texts,) new tokens
    steps: np.ndarray  # (texts,) target passes, or their expectation
    accepted: np.ndarray  # (depth,) the share of steps that accept 1, 2, ... tokens or more
    bound: Bound | None = None  # of sampled trees, if it is known for as many draws

    @property
    def tokens_per_pass(self) -> list[float]:
        """The acceptance length tau over all texts, and the bounds of its 95 % bootstrap interval over texts."""
        return ratio(self.tokens, self.steps)

    def to_dict(self) -> dict[str, object]:
        """Return a JSON-ready dict."""
        return plain(asdict(self)) | {"drafts": list(self.drafts), "tokens_per_pass": self.tokens_per_pass}

    def __str__(self) -> str:
        share = f"; accepts {interval(self.bound.share)} of what any rule could" if self.bound else ""
        tokens = f"{interval(self.tokens_per_pass)} tokens per target pass"
        return f"{self.policy}, {self.verifier}: {tokens} ({self.how}{share})"


def ratio(above: np.ndarray, below: np.ndarray) -> list[float]:
    """Return the ratio of two sums over texts, (texts,) each, and the bounds of its 95 % bootstrap interval."""
    return bootstrap(np.stack([above, below], 1), ratio_of_sums)


def replay(
    trace: Trace,
    policy: Policy,
    verifier: Verifier | None = None,
    *,
    drafts: Sequence[int | str] | None = None,
    coupled: bool = True,
) -> Replay:
    """Return the outcome of a policy and a verifier on a trace's texts.

    Args:
        trace: of `record`.
        policy: `BestFirst`, `Expansion`, `Chain` or `Sampled`, no larger than the recorded trees.
        verifier: by default the one that is exact for the policy's trees, as in `SpeculativeDecoder`.  `ExactMatch` on
            trees drawn with replacement is SpecInfer's naive sampling.
        drafts: which of the recorded drafts propose, by name or index; all by default, and exactly one if sampled.
        coupled: drafts rank by the noise that the target chooses with.  False, on `Expansion`: they rank by their own
            distribution, as in systems without shared noise; the target's distribution is the same.

    Raises:
        InputError: the trace cannot answer this: a policy that depends on clocks, a tree larger than recorded,
            distributions that were not recorded.
        PairingError: the verifier would be biased on this policy's trees.
    """
    if not isinstance(trace, Trace):
        raise InputError(f"trace={trace!r:.60} is not a Trace: record one, or read one with Trace.load")
    coupled = checked_flag("coupled", coupled) or not trace.sampling
    if not hasattr(policy, "kind") or isinstance(policy, type):
        raise InputError(f"policy={policy!r:.60} is not a growth policy: use BestFirst, Expansion, Chain or Sampled")
    verifier = chosen_verifier(verifier, policy.kind)
    indices, how = chosen_drafts(trace, drafts), EXACT
    check_recorded(trace, policy, verifier, indices, coupled)
    lengths: Lengths
    bounds: Callable[[TraceText], Floats] | None = None
    if isinstance(policy, Sampled):
        lengths = partial(_sampled, policy=policy, verifier=verifier, draft=indices[0])
        if isinstance(verifier, MultiStep):
            bounds = partial(_bounds, policy=policy, verifier=verifier, draft=indices[0])
        how = EXPECTED
    elif isinstance(policy, Expansion):
        widths = policy.expansion  # a step follows the draft whose own tree goes furthest
        lengths = lambda text: _accepted(_hits(text, widths, indices, coupled).cumprod(2).max(0))  # noqa: E731
    else:
        assert isinstance(policy, BestFirst)
        lengths = partial(_followed, policy=policy, drafts=indices, budget=trace.settings["max_new_tokens"])
    rule = repr(verifier) + ("" if coupled else ", not coupled")
    return _replayed(trace, policy, rule, indices, how, lengths, bounds)


def oracle(trace: Trace, policy: Policy, *, drafts: Sequence[int | str] | None = None) -> Replay:
    """Return the bound for trees of a policy's size: in hindsight, the best tree of what was recorded.

    A step accepts as long as the text's next token is among the candidates that some draft has after the tokens before
    it, or in its recorded tree, up to the policy's depth and nodes.

    Raises:
        InputError: the policy is deeper than the recorded trees.
    """
    indices = chosen_drafts(trace, drafts)
    _check_size(policy, "depth", policy.max_depth, trace.settings["depth"])
    widths = [np.inf] * min(policy.max_depth, policy.max_nodes)

    def lengths(text: TraceText) -> Floats:
        in_trees = [_in_trees(text, draft, len(widths)) for draft in indices]  # which may have more children of a node
        return _accepted((_hits(text, widths, indices) | np.stack(in_trees)).max(0))

    return _replayed(trace, policy, "oracle", indices, BOUND, lengths)


def chosen_drafts(trace: Trace, drafts: Sequence[int | str] | None) -> list[int]:
    """Return the indices of drafts given by name or index, of all if None."""
    if not isinstance(drafts, Sequence | None):
        raise InputError(f"drafts={drafts!r:.60} is not a list of drafts: give their names or indices")
    return [trace.draft(draft) for draft in (range(len(trace.drafts)) if drafts is None else drafts)]


# ---- steps over a text ----


def _replayed(
    trace: Trace,
    policy: Policy,
    rule: str,
    drafts: Sequence[int],
    how: str,
    lengths: Lengths,
    bounds: Callable[[TraceText], Floats] | None = None,
) -> Replay:
    tables = [lengths(text) for text in trace.texts]
    visits = [_visits(table) for table in tables]
    at_least = [table[:, ::-1].cumsum(1)[:, ::-1] for table in tables]
    reached = np.array([begun @ table[:, 1:] for begun, table in zip(visits, at_least, strict=True)])  # (texts, depth)
    steps = np.array([begun.sum() for begun in visits])
    bound = None
    if bounds is not None:
        pairs = np.array([begun @ bounds(text) for begun, text in zip(visits, trace.texts, strict=True)])
        accepted, most = pairs[:, 0], pairs[:, 1]  # (texts, depth) each
        if (told := most.sum(1) > 0).any():  # not if it is unknown
            share = ratio(accepted[told].sum(1), most[told].sum(1))  # of texts in which anything was drafted
            bound = Bound(accepted.sum(0) / steps.sum(), most.sum(0) / steps.sum(), share)
    tokens = np.array([len(text.token_ids) for text in trace.texts])
    names = tuple(trace.drafts[draft] for draft in drafts)
    how = how if trace.by_run.isdisjoint(drafts) else RECORDED
    return Replay(repr(policy), rule, names, how, tokens, steps, reached.sum(0) / steps.sum(), bound)


def _visits(lengths: Floats) -> Floats:
    """Return the probability that a step begins at each position, (n,), given those of accepting 0 ... D tokens."""
    n, width = lengths.shape
    visits = np.zeros(n + width)
    visits[0] = 1.0
    for position in range(n):
        visits[position + 1 : position + 1 + width] += visits[position] * lengths[position]
    return visits[:n]


# ---- ranked trees ----


def _hits(text: TraceText, widths: Sequence[float], drafts: Sequence[int], coupled: bool = True) -> np.ndarray:
    """Return whether each draft ranks token i + j below the level's width, (drafts, n, levels)."""
    ranks = np.stack([text.ranks(draft, coupled)[:, : len(widths)] for draft in drafts])
    return (ranks >= 0) & (ranks < np.array(widths))


def _in_trees(text: TraceText, draft: int, levels: int) -> np.ndarray:
    """Return whether a draft's recorded tree of each position holds token i + j and all before it, (n, levels)."""
    drafted, ids = text.drafted[draft], text.token_ids
    found = np.zeros((len(ids), levels), bool)
    for position, (first, end) in enumerate(pairwise(drafted.first.tolist())):
        node, depth, most = 0, 0, min(levels, len(ids) - position)
        nodes = zip(drafted.tree_tokens[first:end].tolist(), drafted.tree_parents[first:end].tolist(), strict=True)
        for number, (token, parent) in enumerate(nodes, 1):
            if depth < most and parent == node and token == ids[position + depth]:
                found[position, depth] = True
                node, depth = number, depth + 1
    return found


def _accepted(hits: np.ndarray) -> Floats:
    """Return a table of `Lengths` for steps that accept all tokens before the first False, given (n, levels) bool."""
    return np.eye(hits.shape[1] + 1)[hits.cumprod(1).sum(1)]


def _followed(text: TraceText, policy: BestFirst, drafts: Sequence[int], budget: int) -> Floats:
    """Follow the text with `ExactMatch` from its beginning; positions where no step begins stay zero."""
    n, position = len(text.token_ids), 0
    lengths = np.zeros((n, policy.max_depth + 1))
    for _, accepted in decode_steps(text, policy, drafts, budget):
        lengths[position, accepted] = 1.0
        position += accepted + 1
    return lengths


def decode_steps(
    text: TraceText, policy: BestFirst, drafts: Sequence[int], budget: int
) -> Iterator[tuple[Forest, int]]:
    """Yield the merged tree of each step over the text with `ExactMatch`, and how many tokens the step accepts.

    The target scores what the policy keeps of the tree.  A step that reaches the text's end may accept all of it.
    """
    n, position = len(text.token_ids), 0
    while position < n:
        depth = min(policy.max_depth, budget - position - 1)
        grown = Forest.merged([[_tree(text, draft, position, policy, depth)] for draft in drafts])
        (tree,) = policy.fit(grown)
        accepted = len(tree.along(text.token_ids[position:])) - 1
        yield grown, accepted
        position += accepted + 1


def _tree(text: TraceText, draft: int, position: int, policy: BestFirst, max_depth: int) -> TokenTree:
    """Return the tree that a draft would have grown at a position: the recorded nodes that the policy keeps."""
    drafted = text.drafted[draft]
    recorded = slice(*drafted.first[position : position + 2])
    parents, scores = drafted.tree_parents[recorded], drafted.tree_scores[recorded]
    least = np.float32(log(policy.min_probability)) if policy.min_probability else -np.inf
    depths = depths_of(np.append(-1, parents))[1:]
    keep = np.flatnonzero((depths <= max_depth) & (scores >= least))[: policy.max_nodes]
    tokens, above = drafted.tree_tokens[recorded][keep], np.append(0, keep + 1).searchsorted(parents[keep])
    draws = [[Draw(draft, turn)] for turn in range(len(keep))]
    return TokenTree.from_nodes(text.root(position), tokens.tolist(), above.tolist(), scores[keep].tolist(), draws)


# ---- sampled trees ----


def _sampled(text: TraceText, policy: Sampled, verifier: Verifier, draft: int) -> Floats:
    """Return the probability that each position's step accepts 0 ... D tokens, given the text."""
    reached = np.stack([sum(ends.values()) for ends in _alive(text, policy, verifier, draft)], 1)
    return -np.diff(reached, axis=1, append=0.0)


def _bounds(text: TraceText, policy: Sampled, verifier: Verifier, draft: int) -> Floats:
    """Return the probability that each position's step reaches a depth and accepts a draw there, (2, n, D).

    Of multi-step sampling, and of the best rule; NaN where the trace has no bound for as many draws.
    """
    drafted = text.drafted[draft]
    accepted, best = 1 - np.diff(drafted.tests), drafted.best
    if not policy.replacement:
        accepted, best = drafted.accepted_without_replacement, drafted.best_without_replacement
    known = best.shape[2]
    pairs = np.stack([accepted[:, :, :known], best]).astype(np.float64)
    total = np.zeros((2, len(text.token_ids), policy.max_depth))
    for depth, ends in enumerate(_alive(text, policy, verifier, draft)[:-1]):
        for draws, share in ends.items():
            total[:, :, depth] += share * pairs[:, :, depth, draws - 1] if draws <= known else np.nan
    return total


def _alive(text: TraceText, policy: Sampled, verifier: Verifier, draft: int) -> list[dict[int, Floats]]:
    """Return how likely each position's step is to reach depth 0, 1, ... with the policy's draws: see `alive`."""
    drafted, n = text.drafted[draft], len(text.token_ids)
    q = drafted.probability.astype(np.float64)
    padded = np.concatenate([text.probability.astype(np.float64), np.ones(policy.max_depth)])

    def level(j: int, draws: int) -> Floats:
        if isinstance(verifier, ExactMatch):
            return naive(q[:, j], draws)
        if policy.replacement:
            return multi_step(padded[j : n + j], q[:, j], drafted.tests[:, j].astype(np.float64), draws)
        accepted = drafted.without_replacement[:, j, draws - 1].astype(np.float64)
        return np.stack([1 - accepted, accepted], 1)  # a token is drawn at most once

    return alive(policy.expansion, level, n)


# ---- what a trace can answer ----


def check_recorded(trace: Trace, policy: Policy, verifier: Verifier, drafts: Sequence[int], coupled: bool) -> None:
    """Raise `InputError` where the trace lacks data that a replay needs."""
    _check_size(policy, "depth", policy.max_depth, trace.settings["depth"])
    if type(policy) not in (BestFirst, Expansion, Chain, Sampled) or type(verifier) not in (ExactMatch, MultiStep):
        raise InputError(
            f"{policy!r} with {verifier!r} cannot be replayed: trees must be BestFirst, Expansion, Chain or Sampled, "
            "which depend on distributions only, and the verifier ExactMatch or MultiStep"
        )
    if isinstance(policy, BestFirst):
        _check_size(policy, "nodes", policy.max_nodes, trace.settings["nodes"])
        if not coupled:
            raise InputError(f"{policy!r} was recorded with drafts that know the noise: use Expansion for others")
    elif isinstance(policy, Sampled):
        _check_sampled(trace, policy, verifier, drafts)
    elif isinstance(policy, Expansion):
        kept = trace.texts[0].drafted[0].candidates(coupled).shape[2]
        _check_size(policy, "top", max(policy.expansion, default=0), kept)


def _check_sampled(trace: Trace, policy: Sampled, verifier: Verifier, drafts: Sequence[int]) -> None:
    if len(drafts) != 1:
        raise InputError(f"{policy!r} is replayed with one draft: choose drafts=[...] among {', '.join(trace.drafts)}")
    if not trace.sampling:
        raise InputError(f"{policy!r} needs a trace with a temperature: of greedy texts no distributions are recorded")
    if isinstance(verifier, MultiStep):
        most = int(np.prod(policy.expansion)) if policy.replacement else max(policy.expansion, default=0)
        _check_size(policy, "draws", most, trace.settings["draws"])
    elif not policy.replacement:
        raise InputError(f"{policy!r} cannot be replayed with ExactMatch(): draw with replacement, or use MultiStep")


def _check_size(policy: Policy, size: str, needed: int, recorded: int) -> None:
    """Raise `InputError` if a policy needs more of a size than was recorded."""
    if needed > recorded:
        raise InputError(
            f"{policy!r} cannot be replayed: it needs {needed} {SIZES[size]}, and {recorded} were recorded; record "
            f"again with a larger {size}"
        )
