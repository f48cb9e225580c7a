"""How far the probabilities that choose trees are from the accepted shares: those of drafts, and those of `auto`.

Knows: recorded best-first trees, the steps over a text, what adaptive trees learn from steps.
Does not know: how it is learnt, costs, models.

An edge is a drafted node whose parent was accepted, or is the root: of the others nobody knows whether the target would
have chosen them.  Its probability is the draft's q of the token, given the noise when sampling, or what `auto` makes of
it: q corrected by what was accepted before in the trace, text after text (`Acceptance`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, isnan

import numpy as np

from specinfer.adaptive.experience import DEPTHS, Acceptance
from specinfer.common.tables import Table, Tabular
from specinfer.engine.verify import ExactMatch
from specinfer.evaluation.traces.replaying import check_recorded, chosen_drafts, decode_steps
from specinfer.evaluation.traces.statistics import CalibrationCurve, curve
from specinfer.evaluation.traces.trace import Trace
from specinfer.tree import BestFirst, Forest

GROUPS = [*map(str, range(1, DEPTHS)), f"{DEPTHS} and deeper"]


@dataclass(frozen=True)
class EdgeCalibration(Tabular):
    """Probabilities of edges against how often they were accepted.

    Attributes:
        temperature: of the texts; 0 is greedy.
        curves: by estimate, "q" and "auto", and by group of depths, "1", "2", ... and "all".
    """

    temperature: float
    curves: dict[str, dict[str, CalibrationCurve]]

    def to_dict(self) -> dict[str, object]:
        """Return the expected calibration errors and numbers of edges, JSON-ready."""
        made: dict[str, object] = {"temperature": self.temperature}
        for name, groups in self.curves.items():
            made[name] = {
                g: {"edges": int(found.count.sum()), "error": found.error if found.count.any() else None}
                for g, found in groups.items()
            }
        return made

    def _parts(self) -> Iterator[str | Table]:
        """Yield the table of errors."""
        how = f"T = {self.temperature:g}" if self.temperature else "greedy"
        yield (
            f"expected calibration error of edges whose parents were accepted, by depth, {how};\n"
            "by chance: about what it would be if the probabilities were right"
        )
        groups = self.curves["auto"]
        yield [
            ["", *groups],
            *([name, *(_cell(found.error) for found in curves.values())] for name, curves in self.curves.items()),
            ["by chance", *(_cell(found.chance) for found in groups.values())],
            ["edges", *(str(found.count.sum()) for found in groups.values())],
        ]


def _cell(error: float) -> str:
    """Return an error as text, "-" where there are no edges."""
    return "-" if isnan(error) else f"{error:.3f}"


def edge_calibration(
    trace: Trace, policy: BestFirst, *, drafts: Sequence[int | str] | None = None, bins: int = 10
) -> EdgeCalibration:
    """Replay best-first trees, and compare the probabilities of edges with how often these were accepted.

    Args:
        trace: of `record`.
        policy: no larger than the recorded trees.
        drafts: which of the recorded drafts propose, by name or index; all by default.
        bins: of equal width, by probability.

    Raises:
        InputError: as `replay`.
    """
    indices = chosen_drafts(trace, drafts)
    check_recorded(trace, policy, ExactMatch(), indices, coupled=True)
    acceptance, found = Acceptance(), list[tuple[float, float, bool, int]]()
    for text in trace.texts:
        ahead = text.token_ids
        for forest, accepted in decode_steps(text, policy, indices, trace.settings["max_new_tokens"]):
            emitted, ahead = ahead[: accepted + 1], ahead[accepted + 1 :]
            found += _edges(forest, emitted, acceptance.path(forest.nodes))
            acceptance.observe(forest, [emitted])
    q, corrected, right, depths = np.array(found, np.float64).reshape(-1, 4).T
    masks = {group: np.minimum(depths, DEPTHS) == depth for depth, group in enumerate(GROUPS, 1)}
    masks["all"] = depths > 0
    names = " and ".join(trace.drafts[draft] for draft in indices)
    curves = {
        name: {group: curve(f"{names}: {name}", values[inside], right[inside], bins) for group, inside in masks.items()}
        for name, values in (("q", q), ("auto", corrected))
    }
    return EdgeCalibration(trace.settings["temperature"], curves)


def _edges(
    forest: Forest, emitted: Sequence[int], reached: Sequence[float]
) -> Iterator[tuple[float, float, bool, int]]:
    """Yield q, the corrected probability, whether it was accepted, and the depth of each edge of one row's tree."""
    nodes, accepted = forest.nodes, {0}
    columns = zip(nodes.tokens, nodes.parents, nodes.depths, nodes.scores - nodes.scores[nodes.parents], strict=True)
    for node, (token, parent, depth, log_q) in enumerate(columns):
        if parent in accepted and depth <= len(emitted):
            right = bool(token == emitted[depth - 1])
            accepted |= {node} if right else set()
            yield exp(log_q), reached[node] / reached[parent], right, int(depth)
