"""The report of `check_draft`: figures by draft and by size of the tree, as data, and as prose and tables.

Knows: figures.  Does not know: how anything was measured, what is concluded (`verdict`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from specinfer.common.display import draw
from specinfer.common.tables import Table, Tabular
from specinfer.evaluation.doctor.pass_costs import PassCosts

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Expected:
    """Expected figures of steps of one tree size."""

    tree: str  # "chain 4", "tree 16": best-first
    nodes: float  # drafted, on average
    tokens_per_pass: list[float]  # with the bounds of the 95 % interval over texts
    milliseconds: float  # of a step
    speed_up: float  # of tokens per second, to plain decoding


@dataclass(frozen=True)
class Gains(Tabular):
    """The expected gain of a draft, or of several that are merged, by size of the tree."""

    sizes: list[Expected]
    ideal: list[float]  # tokens per pass if the right one of the candidates were always in the tree (`oracle`)
    level: float  # milliseconds of a level of the longest chain

    @property
    def best(self) -> Expected | None:
        """The size with the most tokens per second; None if plain decoding has as many."""
        found = max(self.sizes, key=lambda size: size.speed_up)
        return found if found.speed_up > 1 else None

    @property
    def advice(self) -> str:
        """The best size in words."""
        if self.best is None:
            return "On this machine no size pays: plain decoding is faster."
        return f"Best on this machine: {self.best.tree}, {self.best.speed_up:.2f} times plain decoding expected."

    def _parts(self) -> Iterator[str | Table]:
        """Yield a table with a column per size, under what bounds it."""
        ideal = f"an ideal choice among 16 candidates a node: {self.ideal[0]:.2f} tokens/pass"
        yield f"{ideal}; a level of a chain: {self.level:.1f} ms"
        kinds, sizes = zip(*(size.tree.split() for size in self.sizes), strict=True)
        named = [kind if kind not in kinds[:index] else "" for index, kind in enumerate(kinds)]
        yield [
            ["", *named],
            ["nodes", *sizes],
            ["tokens/pass", *(f"{size.tokens_per_pass[0]:.2f}" for size in self.sizes)],
            ["ms/step", *(f"{size.milliseconds:.1f}" for size in self.sizes)],
            ["speed-up", *(f"{size.speed_up:.2f}" for size in self.sizes)],
        ]


@dataclass(frozen=True)
class DraftCheck(Tabular):
    """The findings about one draft."""

    draft: str
    grade: str  # good, weak or bad: whether it fits, whatever it costs
    words: str
    positions: list[int]  # of the texts, that have a token at depth 1, 2, ...
    hits: dict[str, list[float]]  # by depth, the share of these with the target's token among the top 1, 4, 16
    covered: float  # the share of the target's tokens that are in the draft's vocabulary
    gains: Gains
    agreements: list[tuple[str, list[float]]]  # convention, top-1 agreement by depth; the one in use first

    def _parts(self) -> Iterator[str | Table]:
        """Yield the verdict, hits and conventions by depth, and the expected gain."""
        yield f"{self.draft}: {self.grade}. {self.words} {self.gains.advice}\n"
        depths = [str(depth) for depth in range(1, 1 + len(self.positions))]
        hits = [[name, *_percents(rates)] for name, rates in self.hits.items()]
        yield [["depth", *depths], *hits, ["positions", *map(str, self.positions)]]
        if self.agreements:
            blank = [""] * len(depths)
            rows = [[f"{words:.50}", *[*_percents(rates), *blank][: len(depths)]] for words, rates in self.agreements]
            yield [["convention", *depths], *rows]
        yield from self.gains._parts()


@dataclass(frozen=True)
class DraftReport(Tabular):
    """How well each draft of a decoder fits its target, and the expected gain of its trees on this machine.

    Attributes:
        target, dtype, device: what was measured.
        texts, tokens: how many texts, and new tokens of all.
        passes: milliseconds of the target's passes.
        drafts: one per draft.
        together: all drafts merged; None if there is one.
    """

    target: str
    dtype: str
    device: str
    texts: int
    tokens: int
    passes: PassCosts
    drafts: list[DraftCheck]
    together: Gains | None

    def to_dict(self) -> dict[str, object]:
        """Return a JSON-ready dict."""
        drafts = [asdict(check) | {"agreements": list(map(list, check.agreements))} for check in self.drafts]
        best = [check.gains.best and check.gains.best.tree for check in self.drafts]
        found = asdict(self) | {"passes": self.passes._asdict()}
        return found | {"drafts": [each | {"best": size} for each, size in zip(drafts, best, strict=True)]}

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw tokens per pass and speed-up by size of the tree (`plots.plot_drafts`); return the Axes.

        Raises:
            InputError: matplotlib is not installed.
        """
        return draw("plot_drafts", self, ax=ax)

    def _parts(self) -> Iterator[str | Table]:
        """Yield the costs of passes, the findings about each draft, and the expected gain of all together."""
        yield (
            f"{self.target} in {self.dtype} on {self.device}: {self.tokens} tokens of {self.texts} texts; "
            f"a plain step takes {self.passes.step(0):.1f} ms\n"
        )
        nodes, target, rest = self.passes
        rows = [[name, *(f"{ms:.1f}" for ms in column)] for name, column in (("target ms", target), ("rest ms", rest))]
        yield [["nodes", *map(str, nodes)], *rows]
        for check in self.drafts:
            yield from check._parts()
        if self.together is not None:
            count = "both" if len(self.drafts) == 2 else f"all {len(self.drafts)}"
            yield f"{count} drafts together: {self.together.advice}\n"
            yield from self.together._parts()


def _percents(rates: Sequence[float]) -> list[str]:
    return [f"{rate:.0%}" for rate in rates]
