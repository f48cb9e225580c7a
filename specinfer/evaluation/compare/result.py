"""The result of a comparison: its settings and records, and their summary.

Knows: where its parts come from.  Does not know: how anything was measured (`runner`) or is computed (`report`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from specinfer.common.display import draw
from specinfer.common.files import expanded
from specinfer.common.records import Record
from specinfer.common.tables import Table, Tabular
from specinfer.common.values import installed
from specinfer.errors import InputError, one_line
from specinfer.evaluation.compare.prompts import records_of
from specinfer.evaluation.compare.report import parts, summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame


@dataclass(frozen=True)
class Comparison(Tabular):
    """Methods side by side.

    Attributes:
        settings: that all records share: models, methods, sizes, prompts, machine.
        records: one per prompt and temperature.  ``error`` says why a prompt could not be used.  The others have by
            method: tokens, passes and seconds; ``same_as_autoregressive``, the number of tokens shared with
            autoregressive decoding from the start; and ``gap``, the difference in logits, where greedy ids first differ
            from it, between the target's two likeliest tokens in a plain pass.
    """

    settings: Record
    records: list[Record] = field(repr=False)

    @classmethod
    def read(cls, folder: str | Path) -> "Comparison":
        """Load the folder's settings and records; nothing runs.

        Raises:
            InputError: the folder holds no comparison, or a damaged one.
        """
        found = cls(*records_of(expanded(folder)).read())
        try:
            found.table()
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {one_line(error, 80)}"
            raise InputError(f"{folder} holds damaged records ({reason}): compare again into another folder") from error
        return found

    def __repr__(self) -> str:
        return f"Comparison({len(self.records)} records)"

    def summary(self) -> Record:
        """Return settings, the number of records, ``skipped``, ``refused`` and ``groups``, JSON-ready.

        ``skipped`` is method -> reason; ``refused`` are prompts that could not be used: set, id and error.

        There is a group per temperature and set; with more than one set, a group ``"all"`` comes first.  A group has
        ``set``, ``temperature``, ``prompts``, ``methods``, ``hits`` by draft, and ``tree_to_sequence``, the ratio of
        their tokens per pass.  Each of its methods has

        - ``tokens_per_pass``: tokens per target pass, bonus included, prefill not counted;
        - ``draft_passes_per_target_pass``;
        - ``tokens_per_second``: the median over prompts;
        - ``ratio``: by baseline, the ratio of tokens per second, the median over prompts;
        - ``worst_to_autoregressive``: the smallest ratio to autoregressive decoding;
        - ``overhead``: tokens_per_pass / ratio to autoregressive - 1, the cost of a step beyond an autoregressive one;
        - ``identical``: the share of prompts with autoregressive decoding's ids;
        - ``same_as_autoregressive``: how many tokens they share from the start, on average;
        - ``largest_gap``: the largest of the records' gaps; a tiny one is rounding;
        - ``ms_per_token`` by stage, and ``bookkeeping``, its share of the time after prefill;
        - ``tree_sizes``, and ``drafts``, each one's contribution, of all prompts together.

        Intervals are [value, low, high] at 95 %.  Figures that were not measured are left out.
        """
        return self._summary

    def table(self) -> str:
        """Return the summary as text."""
        return str(self)

    def _parts(self) -> Iterator[str | Table]:
        """Yield the summary's prose and tables."""
        return parts(self._summary)

    def to_dict(self) -> Record:
        """Return settings and records, JSON-ready: ``Comparison(**comparison.to_dict())`` is equal."""
        return {"settings": self.settings, "records": self.records}

    def to_pandas(self) -> "DataFrame":
        """Return a data frame: a row per set, temperature and method, figures as named in `summary`.

        An interval is three columns: ``tokens_per_pass``, ``tokens_per_pass_low``, ``tokens_per_pass_high``.

        Raises:
            InputError: pandas is not installed.
        """
        pandas = installed("pandas", "a data frame needs pandas (or use summary())")
        return pandas.DataFrame(
            {"set": group["set"], "temperature": group["temperature"], "prompts": group["prompts"], "method": method}
            | dict(_columns(figures))
            for group in self._summary["groups"]
            for method, figures in group["methods"].items()
        )

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw tokens per target pass and speed-up of every method (`plots.plot_compare`); return the Axes.

        Raises:
            InputError: matplotlib is not installed.
        """
        return draw("plot_compare", self, ax=ax)

    @cached_property
    def _summary(self) -> Record:
        return summarise(self.settings, self.records)


def _columns(figures: Record, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield a method's figures by column; contributions of drafts are left out."""
    for name, value in figures.items():
        column = prefix + name
        if isinstance(value, dict):
            yield from _columns(value, f"{column}_")
        elif name != "drafts" and isinstance(value, list):
            yield from zip((column, f"{column}_low", f"{column}_high"), value, strict=True)
        elif name != "drafts":
            yield column, value
