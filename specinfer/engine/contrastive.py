"""Contrastive search by tree: the likeliest tokens are nodes of one pass, and their hidden states decide.

Contrastive search (Su et al., "A Contrastive Framework for Neural Text Generation", arXiv 2202.06417, section 4.2)
takes, of the k likeliest tokens v after x_<t, the one with the largest

    (1 - alpha) p(v | x_<t)  -  alpha max over j < t of cos(h_v, h_j)

where h is the last hidden state, and h_v is that of v, fed after x_<t.  All tokens before v count, the prompt's too.
p is the target's distribution after the logits processors.  A token that they rule out is no candidate.

    root            the last token; its candidates are known, because the step before scored it as a candidate
    candidates      the nodes below the root: the pass gives their states, and so the choice among them
    drafted nodes   below a candidate: if all of the target's own candidates were drafted there, the choice goes on

A step emits the chosen tokens.  The last one is the root of the next step.

Knows: the rule, the order of a step, which trees it needs.  Does not know: attention, caches, how drafts guess.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, log
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import normalize

from specinfer.attention import TreeSession
from specinfer.common.tensors import on_device
from specinfer.engine.draft import DraftSession
from specinfer.engine.loop import Schedule, T_co
from specinfer.engine.sequence import Row, RowView, target_views
from specinfer.engine.sessions import Sessions
from specinfer.engine.verify import Verdict
from specinfer.errors import SamplingError
from specinfer.tree import Draw, Forest, Frontier, Growth, Kind, Policy, Source, TokenTree

# Children drafted below a node, for each candidate that the target will have there.  All must be among them: with 4
# candidates and the bundled head they were at 22 % of the nodes with 2, at 39 % with 4, at 59 % with 8.
GUESSES = 8


class Candidates(NamedTuple):
    """The likeliest tokens after a node, the likeliest first, and the target's probabilities of them."""

    tokens: list[int]
    probabilities: list[float]

    @classmethod
    def after(cls, view: RowView, node: int) -> "Candidates":
        """Return the candidates of the view's row after a node of its tree."""
        scores = view.scores(node)
        best = scores.topk(min(view.row.contrast.candidates, len(scores)))
        possible = int((best.values > -inf).sum())
        probabilities = scores.softmax(-1)[best.indices[:possible]]
        return cls(best.indices[:possible].tolist(), probabilities.tolist())


@dataclass(frozen=True)
class CandidateTrees(Policy):
    """A growth policy: a path below the root's likeliest candidate, and more children of each node of the path.

    Args:
        most: candidates of a row, at most.
        width: children of each node of the path; it goes on below the likeliest one.
        levels: nodes of the path; 0 drafts nothing.
        known: per row, the candidates below the root in this step.
    """

    most: int
    width: int
    levels: int
    known: Sequence[Candidates] = ()
    kind = Kind.RANKED  # of the class: no field
    prescribes = True

    @property
    def max_nodes(self) -> int:  # type: ignore[override]
        """The most nodes that a tree of one draft has, candidates included and root excluded."""
        return self.most + self.levels * self.width

    @property
    def max_depth(self) -> int:  # type: ignore[override]
        """The number of levels below the root."""
        return 1 + self.levels

    def __str__(self) -> str:
        drafted = f"and {self.levels} * {self.width} drafted nodes " if self.levels else ""
        return f"contrastive search: {self.most} candidates {drafted}a step, at most"

    def grow(self, source: Source, max_depth: int | None = None) -> Growth:
        """Grow the path, asking the source once at the root, whose candidates are known, and once per level."""
        roots = Frontier.roots(source.batch, source.device)
        source.top(roots, 1)
        tokens = on_device([row.tokens[:1] for row in self.known], source.device)
        scores = on_device([[_log(row.probabilities[0])] for row in self.known], source.device)
        levels = [(roots.tokens, roots.parents, torch.zeros_like(scores)), (tokens, torch.zeros_like(tokens), scores)]
        node, size = torch.ones_like(tokens), 2  # the node whose children are next, and nodes so far
        for depth in range(1, self.max_depth if max_depth is None else min(self.max_depth, max_depth)):
            children, log_probs = source.top(Frontier.chain(tokens, depth, scores > -inf), self.width)
            children, paths = children[:, 0], scores + log_probs[:, 0].clamp(max=0)
            levels.append((children, node.expand_as(children), paths))
            scores, best = paths.max(1, keepdim=True)
            tokens, node, size = children.gather(1, best), best + size, size + children.shape[1]
        tokens, parents, scores = (torch.cat(column, 1) for column in zip(*levels, strict=True))
        return Growth(tokens, parents, scores, scores > -inf, self.kind)

    def hidden_layers(self, layers: int) -> Sequence[int]:
        """Return the last layer: its states are compared."""
        return (layers,)


def sized(policy: Policy, rows: Sequence[Row]) -> Policy:
    """Return the policy that these rows need: the given one, or if they ask for contrastive search one of its size.

    Raises:
        SamplingError: they ask for it, and the policy's trees are sampled.
    """
    if not any(row.contrast.alpha for row in rows):
        return policy
    if policy.kind is not Kind.RANKED:
        raise SamplingError("penalty_alpha ranks candidates, and trees of draws are not ranked: use another tree")
    most, nodes = max(row.contrast.candidates for row in rows), policy.max_nodes
    width = min(GUESSES * most, nodes)
    return CandidateTrees(most, width, min(policy.max_depth, nodes // width) if width > most else 0)


def search(schedule: Schedule[T_co], sessions: Sessions, rows: Sequence[Row]) -> Generator[T_co]:
    """Decode rows to their ends by contrastive search, as `loop.decode` does; no row joins them.

    One more pass, over the last tokens of the prompts, gives the first candidates.  It is no step.

    Args:
        schedule, sessions: as `loop.decode`.  The policy is of `CandidateTrees`; the last of the target's auxiliary
            states are its last hidden ones.
        rows: the sequences.

    Raises:
        NumericalError: the target's logits, or a draft's, are not numbers.
    """
    target, drafts, policy = sessions.target, sessions.drafts, cast(CandidateTrees, sessions.policy)
    texts = dict(zip(rows, _begun(target, policy, rows, sessions.states), strict=True))
    while rows := schedule.admit():
        known = replace(policy, known=[texts[row].known for row in rows])
        trees = _propose(drafts, known, rows)
        views = target_views(rows, trees, target.score(trees))
        fed = map(_directions, target.aux_states[-1])
        emitted = [
            (view.row, view.row.advance(partial(texts[view.row].verify, fed=row), view))
            for view, row in zip(views, fed, strict=True)
        ]
        kept = target.commit([None if row.finished else (0, *step.path) for row, step in emitted])
        committed = [None if row.finished else step.tokens for row, step in emitted]
        for draft in drafts:
            draft.commit(committed, kept, views)
        yield schedule.finish(emitted)


def _begun(target: TreeSession, policy: Policy, rows: Sequence[Row], states: Sequence[Tensor | None]) -> list["_Text"]:
    """Return the rows' texts before the first step, by a pass over bare roots that nothing is kept of."""
    roots = Forest(policy.kind, [row.ids[-1] for row in rows])
    views = target_views(rows, roots, target.score(roots))
    none = target.aux_states[-1].row(0)[:0]
    target.commit([()] * len(rows))
    return [
        _Text(_directions(none if before is None else before), _first(view))
        for view, before in zip(views, states, strict=True)
    ]


def _first(view: RowView) -> Candidates:
    """Return the candidates of a text's first token; a row in which that fails leaves with the first step."""
    try:
        return Candidates.after(view, 0)
    except Exception as error:
        view.row.fail(error)
        return Candidates([view.row.ids[-1]], [1.0])  # of which nothing is chosen


def _propose(drafts: Sequence[DraftSession], policy: CandidateTrees, rows: Sequence[Row]) -> Forest:
    """Return one tree per row: its candidates and what drafts grow below them, as deep as the row may emit."""
    roots, depths = [row.ids[-1] for row in rows], [row.max_depth + 1 for row in rows]
    asked = drafts if policy.levels and max(depths) > 1 else ()
    grown = [draft.propose(policy, roots, max(depths)) for draft in asked]
    drafted = Forest.merged([Forest(policy.kind, roots), *grown])
    others = [_undrafted(*row) for row in zip(drafted, rows, policy.known, strict=True)]
    trees = Forest.merged([drafted, others]).pruned(depths)
    return Forest.of([_decidable(*row) for row in zip(trees, rows, policy.known, strict=True)])


def _undrafted(tree: TokenTree, row: Row, known: Candidates) -> TokenTree:
    """Return the candidates that no draft has below the root; their draws have the id that follows the drafts'."""
    pairs = [pair for pair in zip(*known, strict=True) if tree.child(0, pair[0]) is None]
    scores, draws = [_log(probability) for _, probability in pairs], [Draw(len(row.draft_names), 0)]
    return TokenTree.from_nodes(
        row.ids[-1], [token for token, _ in pairs], [0] * len(pairs), scores, [draws] * len(pairs)
    )


def _decidable(tree: TokenTree, row: Row, known: Candidates) -> TokenTree:
    """Return the tree without the nodes that no choice can reach.

    Those are the root's children that are no candidates, children that are fewer than the candidates, and all below.
    """
    keep = [True]
    for node in range(1, len(tree)):
        parent = int(tree.parents[node])
        enough = len(tree.children(parent)) >= row.contrast.candidates
        keep.append(keep[parent] and (enough if parent else int(tree.tokens[node]) in known.tokens))
    return tree.best(sum(keep) - 1, torch.tensor(keep, device="cpu").double().numpy())


@dataclass
class _Text:
    """What a row's choices depend on, beside its tree."""

    states: Tensor  # (n, H) directions of the last hidden states at all tokens before the root
    known: Candidates  # after the root

    def verify(self, tree: TokenTree, view: RowView, fed: Tensor) -> Verdict:
        """Choose in the tree as long as the candidates are there.

        Args:
            tree: of the row, N nodes.
            view: the target at them.
            fed: (N, H) directions of the last hidden states at the nodes.
        """
        alpha, path = view.row.contrast.alpha, [0]
        penalties = self.penalties(tree, fed[: len(tree)])
        while True:
            found = [tree.child(path[-1], token) for token in self.known.tokens]
            children = [child for child in found if child is not None]
            if len(children) < len(found):
                break
            pairs = zip(self.known.probabilities, children, strict=True)
            values = [(1 - alpha) * probability - alpha * penalties[child] for probability, child in pairs]
            path.append(children[values.index(max(values))])
            self.known = Candidates.after(view, path[-1])
        self.states = torch.cat([self.states, fed[on_device(path[:-1], fed.device)]])
        return Verdict(tuple(path[1:-1]), int(tree.tokens[path[-1]]))

    def penalties(self, tree: TokenTree, fed: Tensor) -> list[float]:
        """Return, per node, the largest cosine of its state and those of all tokens before it; -1 at least."""
        before = torch.tensor(tree.ancestor_mask(), device=fed.device).fill_diagonal_(False)
        within = (fed @ fed.T).masked_fill(~before, -1).amax(1)
        if not len(self.states):
            return within.tolist()
        return (fed @ self.states.T).amax(1).maximum(within).tolist()


def _directions(states: Tensor) -> Tensor:
    """Return the last of auxiliary hidden states (..., K, H) as unit vectors (..., H), in float32 at least."""
    last = states[..., -1, :]
    return normalize(last.to(torch.promote_types(last.dtype, torch.float32)), dim=-1)


def _log(probability: float) -> float:
    """Return the logarithm of a probability, finite also where it is too small for its type."""
    return log(max(probability, 1e-300))
