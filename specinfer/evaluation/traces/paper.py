"""SpecInfer's Tables 1 to 3 (arXiv 2305.09781) for any pair of target and draft: ours beside the paper's figures.

Knows: what the tables count.  Does not know: how traces are recorded or replayed.

    Table 1   how often the target's choice is among k of a draft's tokens, at the first level
    Table 2   tokens verified per step with trees <1, 1, k, 1, 1, 1, 1, 1>: "speculation length 8"
    Table 3   the same at k = 5: naive sampling against multi-step speculative sampling (MSS)

Sampling is at T = 1 from the whole distribution.  The paper's stochastic figures are of MSS.  Beside them stand coupled
sampling, which is our default, and draws without replacement.  Intervals are 95 % bootstraps over prompts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from specinfer.common.files import locked
from specinfer.common.progress import Progress
from specinfer.common.records import Record
from specinfer.common.tables import Table, Tabular, interval
from specinfer.common.versions import versions
from specinfer.decoder import SpeculativeDecoder
from specinfer.engine.verify import ExactMatch
from specinfer.errors import InputError
from specinfer.evaluation.paper_figures import ALL, SPECINFER_TABLE_1, SPECINFER_TABLE_2, SPECINFER_TABLE_3
from specinfer.evaluation.traces.recording import record
from specinfer.evaluation.traces.replaying import ratio, replay
from specinfer.evaluation.traces.trace import Trace, TraceText
from specinfer.prompts import OnePrompt
from specinfer.tree import BestFirst, Expansion, Policy, Sampled

LENGTH, WIDTHS = 8, (1, 2, 3, 4, 5)
TITLES = {
    1: "Table 1: the target's choice is among k of the draft's tokens",
    2: "Table 2: tokens per step, trees <1,1,k,1,1,1,1,1>",
    3: "Table 3: tokens per step, trees <1,1,5,1,1,1,1,1>, T = 1",
}
RULES = ("naive", "MSS", "without replacement", "coupled")  # columns of Table 3


@dataclass(frozen=True)
class PaperTables(Tabular):
    """The three tables.

    Attributes:
        settings: target, draft, sizes.
        rows: in the order of the tables: ``table``, ``set``, ``temperature``, ``rule``, ``columns``, ``ours`` (per
            column [value, low, high]) and ``paper`` (per column a figure or None; None where the paper has no row).
    """

    settings: Record
    rows: list[Record]

    def to_dict(self) -> Record:
        """Return everything, JSON-ready."""
        return {"settings": self.settings, "rows": self.rows}

    def _parts(self) -> Iterator[str | Table]:
        """Yield the settings, then each table under its title."""
        s = self.settings
        yield (
            f"{s['target']}, draft {s['draft']}, {s['dtype']}, {s['max_new_tokens']} new tokens; "
            f"prompts: {', '.join(f'{name} {count}' for name, count in s['prompts'].items())}; [95 % intervals]\n"
            "paper: SpecInfer, arXiv 2305.09781, LLaMA-68M for LLaMA-7B\n"
        )
        for number, title in TITLES.items():
            yield title
            yield self._table(number)

    def _table(self, number: int) -> Table:
        rows = [row for row in self.rows if row["table"] == number]
        columns = rows[0]["columns"]
        lines = [["", *(columns if number == 3 else [f"k = {column}" for column in columns])]]
        for row in rows:
            name = row["set"] if number == 3 else f"{row['set']}, {row['rule']}"
            lines.append([name, *map(interval, row["ours"])])
            if row["paper"]:
                lines.append(["  paper", *("" if figure is None else f"{figure:.2f}" for figure in row["paper"])])
        return lines


def paper_tables(
    decoder: SpeculativeDecoder,
    sets: Mapping[str, Sequence[OnePrompt]],
    *,
    max_new_tokens: int = 64,
    batch: int = 4,
    out: str | Path | None = None,
    progress: Progress = lambda *_: None,
) -> PaperTables:
    """Record the target's greedy and sampled texts of every set, and the first draft's proposals along them.

    Args:
        decoder: holds target, tokenizer and drafts.
        sets: name -> prompts; names that `published` has are compared with the paper's.
        max_new_tokens: per prompt.
        batch: texts at a time.
        out: folder of the traces, ``SET/greedy`` and ``SET/sampled``; texts that they hold are not recorded again.
        progress: as `record`'s; the stage is the trace, "SET/greedy" or "SET/sampled".

    Raises:
        InputError: an empty set, another run writes to the folder, or what `record` raises.
    """
    if not sets or not all(sets.values()) or any(isinstance(prompts, str) for prompts in sets.values()):
        raise InputError(f"sets {list(sets)}: give at least one, and to each a list of at least one prompt")
    if ALL in sets:
        raise InputError(f"a set of prompts is called {ALL!r}, as all of them together are: rename it")
    first = SpeculativeDecoder(decoder.target.model, decoder.tokenizer, decoder.drafts[:1], BestFirst(1, 1))

    def recorded(name: str, temperature: float, folder: Path) -> Trace:
        stage = f"{name}/{'sampled' if temperature else 'greedy'}"
        return record(
            first,
            list(sets[name]),
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            nodes=0,
            depth=LENGTH,
            draws=max(WIDTHS),
            batch=batch,
            out=folder / stage,
            progress=lambda _, *done: progress(stage, *done),
        )

    with locked(out) as folder:
        return tables({name: [recorded(name, temperature, folder) for temperature in (0.0, 1.0)] for name in sets})


def tables(traces: Mapping[str, Sequence[Trace]]) -> PaperTables:
    """Return the tables of recorded traces: set -> (greedy, sampled), at least 8 levels deep and 5 wide."""
    first = next(iter(traces.values()))[0].settings
    settings = {
        "target": first["model"],
        "draft": first["drafts"][0]["name"],
        **{name: first[name] for name in ("dtype", "max_new_tokens", *versions())},
        "prompts": {name: len(greedy.texts) for name, (greedy, _) in traces.items()},
    }
    pairs = zip(*traces.values(), strict=True)
    pooled = [Trace(same[0].settings, [text for trace in same for text in trace.texts]) for same in pairs]
    sets = {ALL: pooled, **traces} if len(traces) > 1 else traces
    makers = (_table_1, _table_2, _table_3)
    return PaperTables(settings, [row for make in makers for name, (g, s) in sets.items() for row in make(name, g, s)])


def _row(table: int, name: str, temperature: float, rule: str, ours: list[list[float]]) -> Record:
    """Return a row of Table 1 or 2; the paper has figures of greedy decoding and of MSS."""
    published = (SPECINFER_TABLE_1 if table == 1 else SPECINFER_TABLE_2)[temperature].get(name)
    row = {"table": table, "set": name, "temperature": temperature, "rule": rule, "columns": list(WIDTHS)}
    return {**row, "ours": ours, "paper": list(published) if published and rule != "coupled" else None}


def _table_1(name: str, greedy: Trace, sampled: Trace) -> list[Record]:
    """Every position of a text counts, except the last one where nothing is drafted there."""

    def shares(trace: Trace, accepted: Callable[[TraceText], np.ndarray]) -> list[list[float]]:
        """Return the share of positions that accept one of k tokens, given that of each position, (n, k)."""
        asked = [trace.asked(text)[:, 0] for text in trace.texts]
        pairs = zip(trace.texts, asked, strict=True)
        sums = np.array([accepted(text)[positions].sum(0) for text, positions in pairs])  # (texts, k)
        count = np.array([positions.sum() for positions in asked])
        return [ratio(column, count) for column in sums.T]

    def within(text: TraceText) -> np.ndarray:
        ranks = text.ranks(0)[:, :1]
        return (ranks >= 0) & (ranks < WIDTHS)

    def multi_step(text: TraceText) -> np.ndarray:
        drafted = text.drafted[0]
        tests = drafted.tests[:, 0, : len(WIDTHS)]
        return np.minimum(1, tests * (drafted.probability[:, 0] / text.probability)[:, None])

    return [
        _row(1, name, 0.0, "greedy", shares(greedy, within)),
        _row(1, name, 1.0, "MSS", shares(sampled, multi_step)),
        _row(1, name, 1.0, "coupled", shares(sampled, within)),
    ]


def _table_2(name: str, greedy: Trace, sampled: Trace) -> list[Record]:
    def row(trace: Trace, rule: str, policy: Callable[[tuple[int, ...]], Policy]) -> Record:
        ours = [replay(trace, policy(expansion(k))).tokens_per_pass for k in WIDTHS]
        return _row(2, name, trace.settings["temperature"], rule, ours)

    drawn = partial(Sampled, replacement=True)
    return [row(greedy, "greedy", Expansion), row(sampled, "MSS", drawn), row(sampled, "coupled", Expansion)]


def _table_3(name: str, _: Trace, sampled: Trace) -> list[Record]:
    widths = expansion(max(WIDTHS))
    drawn = Sampled(widths, replacement=True)
    ways = ((drawn, ExactMatch()), (drawn, None), (Sampled(widths), None), (Expansion(widths), None))
    ours = [replay(sampled, policy, rule).tokens_per_pass for policy, rule in ways]
    published = SPECINFER_TABLE_3.get(name)
    row = {"table": 3, "set": name, "temperature": 1.0, "rule": "all", "columns": list(RULES), "ours": ours}
    return [{**row, "paper": [*published, None, None] if published else None}]


def expansion(k: int) -> tuple[int, ...]:
    """Return <1, 1, k, 1, ...>, 8 levels: SpecInfer's expansion configuration of tree width k."""
    return (1, 1, k, *[1] * (LENGTH - 3))
