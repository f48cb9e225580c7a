"""Pictures of token trees, their masks, and measurements, on matplotlib (``pip install -e ".[plots]"``).

Knows: Axes, and the data that it is given.  Does not know: models, or how anything was measured.

Every function takes its data first.  It draws into `ax` or, without one, into a new pyplot figure that is as large as
the data needs, and returns the Axes.  None calls `show` or changes rcParams.  Given an `ax`, none touches pyplot's
state.  What differs in colour differs in line, hatch or mark too.  The colours are those of `specinfer.viz.style`.
Tokens are drawn in matplotlib's monospace font or, where that lacks a character, in the fonts of
``rcParams["font.family"]``.  A character that is in none of them is shown as its escape.
"""

from specinfer.viz.plots.measures import plot_acceptance, plot_calibration, plot_compare, plot_drafts, plot_timeline
from specinfer.viz.plots.trees import plot_mask, plot_tree

__all__ = [
    "plot_acceptance",
    "plot_calibration",
    "plot_compare",
    "plot_drafts",
    "plot_mask",
    "plot_timeline",
    "plot_tree",
]
