"""Token trees: the data structure, and how to grow, merge and lay it out.  No models, no text."""

from specinfer.tree.candidates import draw_candidates, top_candidates
from specinfer.tree.forest import Forest, Frontier, Growth, Slots, merge
from specinfer.tree.lattice import Lattice
from specinfer.tree.nodes import Nodes
from specinfer.tree.policies import BestFirst, Chain, DenseSource, Expansion, Policy, Sampled, Source, grow_best_first
from specinfer.tree.token_tree import Draw, Kind, TokenTree

__all__ = [
    "BestFirst",
    "Chain",
    "DenseSource",
    "Draw",
    "Expansion",
    "Forest",
    "Frontier",
    "Growth",
    "Kind",
    "Lattice",
    "Nodes",
    "Policy",
    "Sampled",
    "Slots",
    "Source",
    "TokenTree",
    "draw_candidates",
    "grow_best_first",
    "merge",
    "top_candidates",
]
