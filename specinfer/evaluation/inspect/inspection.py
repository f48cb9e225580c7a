"""The step debugger: the target's view of a result's steps, and the outcome that other trees would have had.

Knows: a result's steps, scored again by the target; how a tree is cut, extended or grown anew.
Does not know: how scores are formed (`rescoring`), how they are drawn (`description`).

    inspection = inspect(decoder, decoder.generate(prompt, temperature=0.7, seed=1), temperature=0.7)
    step = inspection.step(3)
    print(step, step.why(2))
    print(step.compare(step.without(1)))
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isinf
from typing import Unpack

from specinfer.attention import Support, TreeModel, TreeSession, check_model, running
from specinfer.common.display import Displayed, draw
from specinfer.common.token_text import Tokenizer
from specinfer.decoder import SpeculativeDecoder
from specinfer.engine.loop import propose
from specinfer.engine.options import Options
from specinfer.engine.sessions import Openings, Sessions
from specinfer.errors import InputError, TreeError, UnsupportedModel
from specinfer.evaluation.inspect.rescoring import Difference, NodeInspection, Rescored, Rescorer, Test
from specinfer.prompts import check_ids, tokenized
from specinfer.results import Result, State, Step, drafted_by
from specinfer.tree import Draw, Kind, Policy, TokenTree

AS_DECODED = "as decoded"
CAPACITY = 64  # nodes that a step's cache can hold at first


def inspect(decoder: SpeculativeDecoder, result: Result, **options: Unpack[Options]) -> "Inspection":
    """Score every step of a finished result again with the decoder's target, one pass a step.

    Args:
        decoder: with the target and the kind of verifier that made the result.
        result: of `SpeculativeDecoder.generate` or of a stream that has ended.
        **options: those of the call that made it, as `SpeculativeDecoder.prepare` takes them: temperature, top_p,
            logits_processor, generation_config ...; the seed is the result's.

    Returns:
        Inspection: rounding may change a choice between tokens that nearly tie (16-bit models), and
            `Inspection.differences` says where and by how much.

    Raises:
        InputError: the target's choices under these options are not those of the result.
        PairingError: the decoder's verifier is not for the result's trees.
        SamplingError: an impossible option.
    """
    result = replace(result, tokenizer=decoder.tokenizer or result.tokenizer)  # a loaded one knows its own tokens only
    rescorer = Rescorer(decoder, result, options)
    row, target = rescorer.row(0), decoder.target
    steps: list[StepInspection] = []
    differences: list[Difference] = []
    length = len(row.ids) + len(result.token_ids) + max(len(step.tree) for step in result.steps)
    session = target.session(1, length)
    with running(target):
        session.prefill([row.ids[:-1]])
        for number, step in enumerate(result.steps):
            logits = session.score([step.tree]).row(0)
            differences += rescorer.differences(number, row, step, logits)
            rescored, prefix = rescorer.rescored(row, step.tree, logits, step), _Prefix(rescorer, number)
            steps.append(StepInspection(number, step.tree, *rescored, AS_DECODED, step, prefix))
            session.commit([(0, *step.path)])
            row.ids += step.tokens
    return Inspection(result, tuple(steps), tuple(differences), tuple(map(rescorer.in_words, differences)))


@dataclass(frozen=True)
class Inspection(Displayed):
    """A result, and the target's view of every node that was drafted.

    Attributes:
        result: that was inspected.
        steps: one inspection per step.
        differences: where the target, asked again, chooses another token than it did: rounding, in 16 bits.
        notes: the same in words.
    """

    result: Result = field(repr=False)
    steps: tuple["StepInspection", ...] = field(repr=False)
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]

    def step(self, number: int) -> "StepInspection":
        """Return a step, counted from 0, or from the end if negative.

        Raises:
            InputError: the result has fewer steps.
        """
        if not -len(self.steps) <= number < len(self.steps):
            raise InputError(f"there is no step {number}: this result has steps 0 to {len(self.steps) - 1}")
        return self.steps[number]

    def __str__(self) -> str:
        """Return one line a step, then the notes."""
        return "\n".join([*(f"{step.number:4}  {step.summary}" for step in self.steps), *self.notes])


@dataclass(frozen=True)
class StepInspection(Displayed):
    """One step's tree, or another tree instead of it, and the target's view of it.

    Methods that change the tree return a new inspection.  Each costs one pass of the target.  They do not check where
    the text would have ended.

    Attributes:
        number: of the step, from 0.
        tree: that was scored.
        path: the accepted nodes, root excluded.
        bonus: the target's own token after the path; None where the text was cut before it and coins would decide.
        nodes: one per node of the tree, in its order.
        change: how the tree differs from the step's own.
        step: the recorded step; None if the tree is another.
    """

    number: int
    tree: TokenTree
    path: tuple[int, ...]
    bonus: int | None
    nodes: tuple[NodeInspection, ...] = field(repr=False)
    change: str
    step: Step | None = field(repr=False)
    _prefix: "_Prefix" = field(repr=False, compare=False)

    @property
    def verdict(self) -> tuple[tuple[int, ...], int | None]:
        """The path and the bonus token."""
        return self.path, self.bonus

    @property
    def states(self) -> list[State]:
        """The fate of each node of the tree."""
        return [node.state for node in self.nodes]

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens that the step emits: the path's, then the bonus token; of a recorded step, those of the text."""
        if self.step is not None:
            return self.step.tokens
        return (*self.tree.tokens[list(self.path)].tolist(), *([] if self.bonus is None else [self.bonus]))

    @property
    def draft_names(self) -> list[str]:
        """By draft id; the last one stands for nodes added by hand."""
        return self._prefix.rescorer.draft_names

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The result's."""
        return self._prefix.rescorer.result.tokenizer

    @property
    def drafted_by(self) -> tuple[tuple[str, ...], ...]:
        """Per emitted token, the drafts that proposed it; () = the target's own."""
        return drafted_by(self.tree, self.path, self.draft_names, len(self.tokens))

    @property
    def summary(self) -> str:
        """One line: the accepted tokens, and the token that follows."""
        words = [self._name(node) for node in self.path]
        words += [] if self.bonus is None else ["+", self._prefix.rescorer.name(self.bonus)]
        return f"{len(self.path)} of {self.tree.num_drafted} drafted tokens accepted: {' '.join(words)}"

    def why(self, node: int) -> str:
        """Say in words what became of a node, and why.

        Raises:
            TreeError: the tree has no node of this number.
        """
        inspected = self.nodes[self._checked(node)]
        state = inspected.state
        if state is State.ROOT:
            return "the last committed token: its keys and values are written in this pass"
        if state is State.UNREACHED:
            rejected = [i for i in self.tree.ancestors(node) if self.nodes[i].state is State.REJECTED]
            if rejected:
                return f"not reached: node {rejected[0]} above it was rejected"
            return "not tried: a token drawn before it was accepted"
        reason = _coins(inspected.tests) if inspected.margin is None else self._choice(inspected)
        ended = ", but the text had ended" if state is State.CUT else ""
        return f"{'rejected' if state is State.REJECTED else 'accepted'}: {reason}{ended}"

    def with_branch(self, node: int, tokens: Sequence[int] | str) -> "StepInspection":
        """Return the step with tokens, one below the other, under a node; tokens that are there already are shared.

        Args:
            node: the parent of the first token.
            tokens: token ids, or text for the tokenizer.

        Raises:
            TreeError: the tree has no node of this number, or was sampled.
            InputError: no tokens, tokens that are not ids or there already, or text without a tokenizer.
            UnsupportedModel: the target can score chains only, and the tree branches.
        """
        parent, ids = self._editable(node), self._ids(tokens)
        there = self.tree.along(ids, parent)
        parent, left = there[-1], ids[len(there) - 1 :]
        if not left:
            raise InputError(f"these tokens are in the tree already, down to node {parent}: there is nothing to add")
        count, tree = self.tree.num_drafted, self.tree
        by_hand = Draw(len(self.draft_names) - 1, 0)
        longer = TokenTree.from_nodes(
            int(tree.tokens[0]),
            [*tree.tokens[1:].tolist(), *left],
            [*tree.parents[1:].tolist(), parent, *range(count + 1, count + len(left))],
            [*tree.scores[1:].tolist(), *[float(tree.scores[parent])] * len(left)],
            [*tree.draws[1:], *[(by_hand,)] * len(left)],
        )
        words = " ".join(map(self._prefix.rescorer.name, left))
        return self._with(longer, f"with {words} below node {parent}")

    def without(self, node: int) -> "StepInspection":
        """Return the step without a node and all below it.

        Raises:
            TreeError: the tree has no node of this number, or was sampled; or the node is the root.
        """
        if self._editable(node) == 0:
            raise TreeError("node 0 is the root, which is committed already: name a node below it")
        gone = self.tree.ancestor_mask()[:, node]
        # worth 1 or 0: what is worth 1 stays, in the same order
        smaller = self.tree.best(self.tree.num_drafted - int(gone.sum()), ~gone)
        return self._with(smaller, f"without node {node} ({self._name(node)})")

    def with_budget(self, nodes: int) -> "StepInspection":
        """Return the step with its likeliest paths only.

        Args:
            nodes: drafted nodes at most.

        Raises:
            TreeError: a sampled tree.
            InputError: not an integer from 0 to the nodes of the step.
        """
        self._editable(0)
        if not isinstance(nodes, int) or isinstance(nodes, bool) or not 0 <= nodes <= self.tree.num_drafted:
            raise InputError(
                f"a budget of {nodes!r} nodes cannot be cut from {self.tree.num_drafted}: give a smaller number, or "
                "grow a larger tree, with_policy(BestFirst(nodes, depth))"
            )
        return self._with(self.tree.best(nodes, self.tree.scores), f"cut to {nodes} nodes")

    def with_policy(self, policy: Policy) -> "StepInspection":
        """Return the step with the tree that the decoder's drafts grow there under another policy.

        Processors, noise and seed are the same.  The drafts read the text anew.

        Raises:
            InputError: the decoder has no drafts, or the policy is ``Auto``, which needs a run's clock.
            PairingError: the decoder's verifier is not for trees of this kind.
            UnsupportedModel: a model can work on chains only, and the tree branches.
        """
        return self._with(self._prefix.grown(policy), f"grown by {policy}")

    def compare(self, other: "StepInspection") -> str:
        """Say in words how another tree of the same step would have fared.

        Raises:
            InputError: it is of another step or result.
        """
        if other._prefix is not self._prefix:
            raise InputError("two inspections can be compared if they are of one step: change a copy of the same one")
        gain, width = len(other.path) - len(self.path), max(len(self.change), len(other.change))
        lines = [f"{step.change:<{width}}  {step.summary}" for step in (self, other)]
        return "\n".join([*lines, f"{'':{width}}  {f'{gain:+d}' if gain else 'as many'} tokens"])

    def __str__(self) -> str:
        """Draw the tree with the verdict."""
        return f"step {self.number}, {self.change}: {self.summary}\n{draw('text', self)}"

    def _name(self, node: int) -> str:
        return self._prefix.rescorer.name(int(self.tree.tokens[node]))

    def _choice(self, node: NodeInspection) -> str:
        """Say why the target's choice was this node, or not."""
        assert node.margin is not None
        rule = "argmax" if node.noise is None else "choice (log p + noise)"
        if node.state is not State.REJECTED:
            lead = "the only token that the options leave" if isinf(node.margin) else f"by {node.margin:.2f} nats"
            return f"the target's {rule}, {lead}"
        right = next((i for i in self.path if self.tree.parents[i] == self.tree.parents[node.node]), None)
        chosen = self._name(right) if right is not None else self._prefix.rescorer.name(self.bonus or 0)
        lead = f"{-node.margin:.2f} nats ahead" if node.p else "and the options rule this token out"
        return f"the target's {rule} is {chosen}, {lead}"

    def _checked(self, node: int) -> int:
        if isinstance(node, bool) or not isinstance(node, int) or not 0 <= node < len(self.tree):
            raise TreeError(f"there is no node {node!r}: this tree has nodes 0 (the root) to {len(self.tree) - 1}")
        return node

    def _editable(self, node: int) -> int:
        """Return the node of a tree that may be changed by hand.

        Raises:
            TreeError: the tree has no node of this number, or was sampled.
        """
        if self.tree.kind is not Kind.RANKED:
            raise TreeError(
                f"this tree was sampled ({self.tree.kind}) and must be verified as a unit: its coins divide by the "
                "distributions that its tokens were drawn from, so adding or leaving out any token by hand biases the "
                "output. Grow another tree, with_policy(Sampled(...)), or inspect a step with a ranked tree"
            )
        return self._checked(node)

    def _ids(self, tokens: Sequence[int] | str) -> list[int]:
        decoder = self._prefix.rescorer.decoder
        if isinstance(tokens, str) and decoder.tokenizer is None:
            raise InputError("text needs a tokenizer, and this decoder has none: give token ids")
        if isinstance(tokens, str):
            tokens = tokenized(tokens, decoder.tokenizer, add_special_tokens=False)
        if not (ids := list(tokens)):
            raise InputError("a branch needs at least one token")
        check_ids([ids], decoder.target.vocab_size)
        return ids

    def _with(self, tree: TokenTree, change: str) -> "StepInspection":
        changes = change if self.change == AS_DECODED else f"{self.change}, {change}"
        return StepInspection(self.number, tree, *self._prefix.rescored(tree), changes, None, self._prefix)


def _coins(tests: Sequence[Test]) -> str:
    """Say which coins were tossed for a node."""
    words = []
    for coin, ratio in tests:
        if coin is None:
            words.append(
                "a coin that is not known: a token above was drawn more than once, and steps keep no distributions"
            )
        elif ratio is None:
            words.append(f"coin {coin:.3f}, against a ratio of distributions that steps do not keep")
        else:
            words.append(f"coin {coin:.3f} {'<' if coin < ratio else '≥'} p/q {ratio:.3f}")
    return "; then ".join(words) or "a later draw above it decided"


class _Prefix:
    """The text before a step.  The target reads it when the first tree is scored; each tree then takes one pass."""

    def __init__(self, rescorer: Rescorer, number: int) -> None:
        self.rescorer, self.number = rescorer, number

    @cached_property
    def session(self) -> TreeSession:
        """The target, with the text but its last token."""
        ids = self.rescorer.row(self.number).ids
        session = self.rescorer.decoder.target.session(1, len(ids) + CAPACITY, sys.maxsize)
        session.prefill([ids[:-1]])
        return session

    def rescored(self, tree: TokenTree) -> Rescored:
        """Return the target's view of a tree after this text.

        Raises:
            UnsupportedModel: it can score chains only.
        """
        target = self.rescorer.decoder.target
        _check_branches([target], tree)
        with running(target):
            logits = self.session.score([tree]).row(0)
            self.session.commit([()])
        return self.rescorer.rescored(self.rescorer.row(self.number), tree, logits)

    def grown(self, policy: Policy) -> TokenTree:
        """Return the tree that the drafts grow here.  Raises as `StepInspection.with_policy`."""
        decoder = self.rescorer.decoder
        if not isinstance(policy, Policy) or policy.adapts:
            raise InputError(
                f"tree={policy!r} has no size of its own (Auto's is chosen by a run's clock): give a policy of a fixed "
                "size, for example BestFirst(16, 8)"
            )
        if not decoder.drafts:
            raise InputError("this decoder has no drafts to grow a tree: build it with some, or use with_branch")
        decoder.verifier.check(policy.kind)
        row = self.rescorer.row(self.number)
        with running(*decoder.networks):
            tree = propose(Sessions(Openings(decoder, policy), [row]).drafts, policy, [row])[0]
        _check_branches(decoder.language_models, tree)
        return tree


def _check_branches(models: Sequence[TreeModel], tree: TokenTree) -> None:
    """Refuse a tree that branches to models that can work on chains only."""
    if len(tree) == tree.depth + 1:
        return
    for model in models:
        check = check_model(model.model)
        if check.support is not Support.EXACT:
            raise UnsupportedModel(f"{check.model} can work on chains only ({check.reason}), and this tree branches")
