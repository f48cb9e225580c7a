"""The gain of chains of drafted tokens: by the cost models of the literature, and replayed from a trace.

Knows: replayed chains, measured seconds.  Does not know: models, clocks.

Symbols.  A chain of g drafted tokens, each accepted with the same probability b independently of the others, yields

    E(g) = (1 - b^(g + 1)) / (1 - b)

tokens per target pass (Leviathan et al., arXiv 2211.17192, equation 1, where b is alpha and g gamma).  With seconds m
of a draft pass, M of a target pass over one token and M' of one over the chain, and p the share of drafted tokens that
are accepted, E = g p + 1, and a token costs (g m + M') / (g p + 1) seconds instead of M.  With M' = M the speed-up is
that paper's (Theorem 3.8): E / (g c + 1), c = m / M.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specinfer.common.records import Record
from specinfer.common.tables import Table, Tabular
from specinfer.errors import InputError
from specinfer.evaluation.compare.result import Comparison
from specinfer.evaluation.traces.closed_forms import Floats
from specinfer.evaluation.traces.replaying import replay
from specinfer.evaluation.traces.trace import Trace
from specinfer.tree import Chain

GRID = 10_000  # acceptance probabilities that are tried in a fit


class Costs(NamedTuple):
    """Seconds of passes, and the speed-up to check the model against, if it was measured."""

    draft: float  # m, of a draft pass
    target: float  # M, of a target pass over one token
    verify: float  # M', of a target pass over a chain
    length: int | None = None  # of the chain that was measured
    speed_up: float | None = None  # of its tokens per second to plain decoding's


@dataclass(frozen=True)
class CostModel(Tabular):
    """Chains of lengths g: replayed, fitted, and their expected gain."""

    lengths: np.ndarray  # (n,)
    tokens: Floats  # (n,) replayed tokens per target pass
    acceptance: float  # b, fitted to these
    costs: Costs

    @property
    def fitted(self) -> Floats:
        """E(g), (n,)."""
        return expected_tokens(self.acceptance, self.lengths)

    @property
    def accepted(self) -> Floats:
        """p, the share of drafted tokens that are accepted, (n,)."""
        return (self.tokens - 1) / self.lengths

    @property
    def speed_up(self) -> Floats:
        """M (g p + 1) / (g m + M'), (n,), from the replayed tokens."""
        m, target, verify, *_ = self.costs
        return target * (self.lengths * self.accepted + 1) / (self.lengths * m + verify)

    @property
    def _columns(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name) for name in ("lengths", "tokens", "fitted", "accepted", "speed_up")}

    def to_dict(self) -> dict[str, object]:
        """Return a JSON-ready dict."""
        columns = {name: column.tolist() for name, column in self._columns.items()}
        return {"acceptance": self.acceptance, "costs": self.costs._asdict(), **columns}

    def _parts(self) -> Iterator[str | Table]:
        """Yield the fit and the costs, a table by length, and the measured seconds."""
        c = self.costs
        times = f"m = {1000 * c.draft:.1f} ms, M = {1000 * c.target:.1f} ms, M' = {1000 * c.verify:.1f} ms"
        yield f"b = {self.acceptance:.3f}; {times}"
        rows = zip(*self._columns.values(), strict=True)
        cells = [[f"{length}", *(f"{figure:.2f}" for figure in figures)] for length, *figures in rows]
        yield [["g", "tokens/pass", "E(g)", "p", "speed-up"], *cells]
        if c.speed_up is not None and c.length is not None:
            yield f"measured, g = {c.length}: {c.speed_up:.2f}"


def expected_tokens(acceptance: float, lengths: np.ndarray) -> Floats:
    """Return E(g) = 1 + b + ... + b^g, (n,)."""
    return np.array([np.sum(acceptance ** np.arange(g + 1)) for g in lengths])


def cost_model(trace: Trace, costs: Costs, lengths: Sequence[int] | None = None, draft: int | str = 0) -> CostModel:
    """Replay chains of a draft and fit b to their tokens per target pass, by least squares.

    Args:
        trace: of `record`.
        costs: measured seconds; `measured` reads them from a comparison.
        lengths: g; by default 1 to the depth recorded.
        draft: which of the recorded drafts, by name or index.

    Raises:
        InputError: a length or the draft was not recorded.
    """
    lengths = list(range(1, trace.settings["depth"] + 1)) if lengths is None else list(lengths)
    if not lengths or min(lengths) < 1:
        raise InputError(f"lengths {lengths}: give at least one, each at least 1")
    tokens = np.array([replay(trace, Chain(g), drafts=[draft]).tokens_per_pass[0] for g in lengths])
    tried = np.linspace(0, 1, GRID + 1)
    powers = tried[:, None] ** np.arange(max(lengths) + 1)
    errors = (powers.cumsum(1)[:, lengths] - tokens) ** 2
    return CostModel(np.array(lengths), tokens, float(tried[errors.sum(1).argmin()]), costs)


def measured(comparison: Comparison, draft: str, temperature: float = 0.0) -> Costs:
    """Return the costs that a comparison of "sequence" and "autoregressive" measured, over all its prompts.

    Raises:
        InputError: it has no records of both at this temperature, decoded several prompts at a time, timed another
            draft, or the draft makes no passes.
    """
    groups = [group for group in comparison.summary()["groups"] if group["temperature"] == temperature]
    methods = groups[0]["methods"] if groups else {}  # of all sets together
    if not {"sequence", "autoregressive"} <= methods.keys():
        raise InputError(
            f"the comparison has no prompt at temperature {temperature:g} with both sequence and autoregressive"
        )
    if (rows := comparison.settings["max_rows"]) > 1:
        raise InputError(f"the comparison decoded {rows} prompts at a time, which share passes: compare one at a time")
    plain, chain, length = methods["autoregressive"], methods["sequence"], comparison.settings["depth"]
    models = {drafted["draft"] for drafted in chain["drafts"] if drafted["passes"]}
    if models and models != {draft}:
        raise InputError(
            f"the comparison timed passes of {', '.join(sorted(models))}, not of {draft} alone: replay the draft that "
            "was timed, or compare with this one"
        )
    passes = chain["draft_passes_per_target_pass"]
    if not 0 < passes <= length:
        raise InputError(
            f"{draft} made {passes:.1f} passes a step for {length} levels, and the cost model has a pass a level: "
            "compare with a draft that is a model"
        )

    def per_step(figures: Record, stage: str) -> float:
        return float(figures["ms_per_token"][stage] * figures["tokens_per_pass"][0] / 1000)

    plain_token, chain_token = (m["ms_per_token"]["total"] - m["ms_per_token"]["prefill"] for m in (plain, chain))
    return Costs(
        draft=per_step(chain, "draft") / passes,
        target=per_step(plain, "target"),
        verify=per_step(chain, "target"),
        length=length,
        speed_up=plain_token / chain_token,
    )
