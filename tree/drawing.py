"""The content of a drawing of a token tree, whoever paints it: the nodes, their states and marks, and the layout.

This module knows nodes, parents and the columns that a text takes.  It does not know tokenizers, colours or pixels: it
is handed a function from token id to text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple
from unicodedata import east_asian_width

from specinfer.tree.tidy import tidy
from specinfer.tree.token_tree import TokenTree

BONUS = "bonus"  # the state of the target's own token
STATES = {  # the fate of a node: its mark, and the words of a legend
    "root": ("", "root"),
    "drafted": ("", "drafted"),
    "accepted": ("✓", "accepted"),
    "cut": ("✂", "accepted after the end"),
    "rejected": ("✗", "rejected"),
    "unreached": ("", "not reached"),
    BONUS: ("+", "bonus token"),
}


class DrawnNode(NamedTuple):
    """A node, or the bonus token, as it is drawn."""

    text: str
    parent: int  # -1 at the root
    depth: int
    state: str  # a key of `STATES`
    drafts: tuple[int, ...] = ()  # ids of those that proposed it
    probability: float | None = None  # the draft's, given the parent; None at the root, by hand and of the bonus token

    @property
    def mark(self) -> str:
        """The sign of its state, which does not depend on colours."""
        return STATES[self.state][0]

    @property
    def figure(self) -> str:
        """Its probability in words."""
        return "" if self.probability is None else percent(self.probability)

    @property
    def accepted(self) -> bool:
        """Whether it is on the accepted path."""
        return self.state in ("accepted", "cut")


@dataclass(frozen=True)
class TreeDrawing:
    """The nodes of a tree in its order; the bonus token, if there is one, comes last."""

    nodes: Sequence[DrawnNode]

    @classmethod
    def of(
        cls,
        tree: TokenTree,
        text: Callable[[int], str],
        states: Sequence[str] | None = None,
        bonus: str | None = None,
        end: int = 0,
        by_hand: int | None = None,
    ) -> TreeDrawing:
        """Describe a tree.

        Args:
            tree: of N nodes.
            text: from token id to text.
            states: (N,) the nodes' fates; None = not verified yet.
            bonus: the text of the bonus token.
            end: the node that the bonus token follows.
            by_hand: the draft id of nodes that no draft proposed: they have no probability.
        """
        states = states or ["root", *["drafted"] * tree.num_drafted]
        arrays = (column.tolist() for column in (tree.tokens, tree.parents, tree.depths))
        nodes = []
        for number, (token, parent, depth, state) in enumerate(zip(*arrays, states, strict=True)):
            drafts = tuple(dict.fromkeys(draw.draft for draw in tree.draws[number]))
            drafted = drafts and by_hand not in drafts
            nodes.append(
                DrawnNode(text(token), parent, depth, state, drafts, tree.probability(number) if drafted else None)
            )
        if bonus is not None:
            nodes.append(DrawnNode(bonus, end, nodes[end].depth + 1, BONUS))
        return cls(nodes)

    @cached_property
    def lines(self) -> list[float]:
        """The line that each node stands on, by the tidy layout; the first one is 0."""
        return tidy(node.parent for node in self.nodes)[0].tolist()

    def lefts(self, widths: Sequence[float], gap: float) -> list[float]:
        """Return where the column of each depth begins, and last, a gap further, where the widest last node ends.

        Args:
            widths: of the nodes.
            gap: between two columns.
        """
        widest = [0.0] * (1 + max(node.depth for node in self.nodes))
        for node, width in zip(self.nodes, widths, strict=True):
            widest[node.depth] = max(widest[node.depth], width)
        return list(accumulate((width + gap for width in widest), initial=0.0))


def columns(text: str) -> int:
    """Return how many columns of a terminal a text takes: Chinese characters and emoji take two."""
    return sum(1 + (east_asian_width(character) in "WF") for character in text)


def percent(probability: float) -> str:
    """Return a probability in at most four characters (62%); <1% where it would round to 0 and is not."""
    return "<1%" if 0 < probability < 0.005 else f"{probability:.0%}"
