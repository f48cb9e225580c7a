"""SpecInfer's Tables 1 to 3 (arXiv 2305.09781) for any pair of target and draft: ours beside the paper's figures.

Knows: what the tables count.  Does not know: how traces are recorded or replayed.

    Table 1   how often the target's choice is among k of a draft's tokens, at the first level
    Table 2   tokens verified per step with trees <1, 1, k, 1, 1, 1, 1, 1>: "speculation length 8"
    Table 3   the same at k = 5: naive sampling against multi-step speculative sampling (MSS)

Sampling is at T = 1 from the whole distribution.  The paper's stochastic figures are MSS's; beside them stand coupled
sampling, which is our default, and draws without replacement.  Intervals are 95 % bootstraps over prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specinfer.common.files import locked
from specinfer.common.tables import aligned, interval
from specinfer.decoder import SpeculativeDecoder
from specinfer.engine.verify import ExactMatch
from specinfer.errors import InputError
from specinfer.evaluation.published import ALL, SPECINFER_TABLE_1, SPECINFER_TABLE_2, SPECINFER_TABLE_3
from specinfer.evaluation.traces.recording import Progress, record
from specinfer.evaluation.traces.replaying import Replay, ratio, replay
from specinfer.evaluation.traces.trace import Trace
from specinfer.tree import BestFirst, Expansion, Sampled

LENGTH, WIDTHS = 8, (1, 2, 3, 4, 5)
TITLES = {
    1: "Table 1: the target's choice is among k of the draft's tokens",
    2: "Table 2: tokens per step, trees <1,1,k,1,1,1,1,1>",
    3: "Table 3: tokens per step, trees <1,1,5,1,1,1,1,1>, T = 1",
}
RULES = ("naive", "MSS", "without replacement", "coupled")  # columns of Table 3


@dataclass(frozen=True)
class PaperTables:
    """The three tables.

    Attributes:
        settings: target, draft, sizes.
        rows: in the order of the tables: ``table``, ``set``, ``temperature``, ``rule``, ``columns``, ``ours`` (per
            column [value, low, high]) and ``paper`` (per column a figure or None; None without such a row).
    """

    settings: dict[str, Any]
    rows: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Return everything, JSON-ready."""
        return {"settings": self.settings, "rows": self.rows}

    def __str__(self) -> str:
        s = self.settings
        head = (
            f"{s['target']}, draft {s['draft']}, {s['dtype']}, {s['max_new_tokens']} new tokens; "
            f"prompts: {', '.join(f'{name} {count}' for name, count in s['prompts'].items())}; [95 % intervals]\n"
            "paper: SpecInfer, arXiv 2305.09781, LLaMA-68M for LLaMA-7B"
        )
        return "\n\n".join([head, *("\n".join(self._table(number)) for number in TITLES)])

    def _table(self, number: int) -> list[str]:
        rows = [row for row in self.rows if row["table"] == number]
        lines = [["", *(column if number == 3 else f"k = {column}" for column in rows[0]["columns"])]]
        for row in rows:
            name = row["set"] if number == 3 else f"{row['set']}, {row['rule']}"
            lines.append([name, *map(interval, row["ours"])])
            if row["paper"]:
                lines.append(["  paper", *("" if own is None else f"{own:.2f}" for own in row["paper"])])
        return [TITLES[number], *(f"  {line}" for line in aligned(lines))]


def paper_tables(
    decoder: SpeculativeDecoder,
    sets: Mapping[str, Sequence[Any]],
    *,
    max_new_tokens: int = 64,
    batch: int = 4,
    out: str | Path | None = None,
    progress: Progress = lambda batches, _: batches,
) -> PaperTables:
    """Record the target's greedy and sampled texts of every set, and what the decoder's first draft makes of them.

    Args:
        decoder: holds target, tokenizer and drafts.
        sets: name -> prompts; names that `published` has are compared with the paper's.
        max_new_tokens: per prompt.
        batch: texts at a time.
        out: folder of the traces, ``SET/greedy`` and ``SET/sampled``; what they hold is not recorded again.
        progress: as `record`'s; it is called once per trace.

    Raises:
        InputError: an empty set, another run writes to the folder, or what `record` raises.
    """
    if not sets or not all(sets.values()) or any(isinstance(prompts, str) for prompts in sets.values()):
        raise InputError(f"sets {list(sets)}: give at least one, and to each a list of at least one prompt")
    if ALL in sets:
        raise InputError(f"a set of prompts is called {ALL!r}, as all of them together are: rename it")
    own = SpeculativeDecoder(decoder.target.model, decoder.tokenizer, decoder.drafts[:1], BestFirst(1, 1))
    with locked(out):
        traces = {
            name: tuple(
                record(
                    own,
                    list(prompts),
                    max_new_tokens=max_new_tokens,
                    temperature=temperature,
                    nodes=0,
                    depth=LENGTH,
                    draws=max(WIDTHS),
                    batch=batch,
                    out=None if out is None else Path(out) / name / how,
                    progress=progress,
                )
                for temperature, how in ((0.0, "greedy"), (1.0, "sampled"))
            )
            for name, prompts in sets.items()
        }
    return tables(traces)


def tables(traces: Mapping[str, Sequence[Trace]]) -> PaperTables:
    """Return the tables of recorded traces: set -> (greedy, sampled), at least 8 levels deep and 5 wide."""
    first = next(iter(traces.values()))[0].settings
    settings = {
        "target": first["model"],
        "draft": first["drafts"][0]["name"],
        **{name: first[name] for name in ("dtype", "max_new_tokens", "versions")},
        "prompts": {name: len(greedy.texts) for name, (greedy, _) in traces.items()},
    }
    together = [Trace(own[0].settings, sum((t.texts for t in own), ())) for own in zip(*traces.values(), strict=True)]
    sets = {ALL: together, **traces} if len(traces) > 1 else traces
    makers = (_table_1, _table_2, _table_3)
    return PaperTables(settings, [row for make in makers for name, (g, s) in sets.items() for row in make(name, g, s)])


def _row(
    table: int, name: str, temperature: float, rule: str, columns: Sequence[Any], ours: Sequence[Any]
) -> dict[str, Any]:
    row = {"table": table, "set": name, "temperature": temperature, "rule": rule, "columns": list(columns)}
    return {**row, "ours": list(ours), "paper": None}


def _table_1(name: str, greedy: Trace, sampled: Trace) -> list[dict[str, Any]]:
    """Every position of a text counts, but the last one if nothing is drafted there."""

    def shares(trace: Trace, rule: str) -> dict[str, Any]:
        asked = [trace.asked(text)[:, 0] for text in trace.texts]
        places = [text.ranks(0)[:, 0][own] for text, own in zip(trace.texts, asked, strict=True)]
        within = [[((own >= 0) & (own < k)).sum() for own in places] for k in WIDTHS]
        count = np.array([own.sum() for own in asked])
        ours = [ratio(np.array(own), count) for own in within]
        return _row(1, name, trace.settings["temperature"], rule, WIDTHS, ours)

    asked = [sampled.asked(text)[:, 0] for text in sampled.texts]
    accepted = [
        np.minimum(1, text.drafted[0].tests[:, 0] * (text.drafted[0].probability[:, 0] / text.probability)[:, None])[
            own
        ]
        for text, own in zip(sampled.texts, asked, strict=True)
    ]
    sums = np.array([own.sum(0) for own in accepted])  # (texts, k)
    count = np.array([own.sum() for own in asked])
    mss = _row(1, name, 1.0, "MSS", WIDTHS, [ratio(sums[:, k - 1], count) for k in WIDTHS])
    rows = [shares(greedy, "greedy"), mss, shares(sampled, "coupled")]
    return _beside_paper(rows, SPECINFER_TABLE_1)


def _table_2(name: str, greedy: Trace, sampled: Trace) -> list[dict[str, Any]]:
    def row(temperature: float, rule: str, replays: list[Replay]) -> dict[str, Any]:
        return _row(2, name, temperature, rule, WIDTHS, [own.tokens_per_pass for own in replays])

    rows = [
        row(0.0, "greedy", [replay(greedy, Expansion(expansion(k))) for k in WIDTHS]),
        row(1.0, "MSS", [replay(sampled, Sampled(expansion(k), replacement=True)) for k in WIDTHS]),
        row(1.0, "coupled", [replay(sampled, Expansion(expansion(k))) for k in WIDTHS]),
    ]
    return _beside_paper(rows, SPECINFER_TABLE_2)


def _table_3(name: str, _: Trace, sampled: Trace) -> list[dict[str, Any]]:
    widths = expansion(max(WIDTHS))
    replays = (
        replay(sampled, Sampled(widths, replacement=True), ExactMatch()),
        replay(sampled, Sampled(widths, replacement=True)),
        replay(sampled, Sampled(widths)),
        replay(sampled, Expansion(widths)),
    )
    row = _row(3, name, 1.0, "all", RULES, [own.tokens_per_pass for own in replays])
    published = SPECINFER_TABLE_3.get(name)
    return [{**row, "paper": [*published, None, None] if published else None}]


def _beside_paper(
    rows: list[dict[str, Any]], published: Mapping[float, Mapping[str, Sequence[float]]]
) -> list[dict[str, Any]]:
    """Add the paper's figures to the rows that count what it counts: greedy, and MSS."""
    return [
        {**row, "paper": list(published[row["temperature"]][row["set"]])}
        if row["rule"] != "coupled" and row["set"] in published[row["temperature"]]
        else row
        for row in rows
    ]


def expansion(k: int) -> tuple[int, ...]:
    """Return <1, 1, k, 1, ...>, 8 levels: SpecInfer's expansion configuration of tree width k."""
    return (1, 1, k, *[1] * (LENGTH - 3))
