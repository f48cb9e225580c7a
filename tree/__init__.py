"""Token trees: what one is, and how to grow, merge and draw it.  No models, no text."""

from .forest import Forest, merge
from .grow import (
    BestFirst,
    Chain,
    DenseSource,
    Frontier,
    Growth,
    Policy,
    Sampled,
    Source,
    Widths,
    draw_candidates,
    grow_best_first,
    top_candidates,
)
from .nodes import Nodes, ancestors
from .render import render
from .tidy import tidy
from .token_tree import Draw, Kind, TokenTree

__all__ = [
    "BestFirst",
    "Chain",
    "DenseSource",
    "Draw",
    "Forest",
    "Frontier",
    "Growth",
    "Kind",
    "Nodes",
    "Policy",
    "Sampled",
    "Source",
    "TokenTree",
    "Widths",
    "ancestors",
    "draw_candidates",
    "grow_best_first",
    "merge",
    "render",
    "tidy",
    "top_candidates",
]
