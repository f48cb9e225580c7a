"""What the records of `bench` amount to: per set and over all, with bootstrap intervals, as a dict or as tables.

Knows: counts and seconds.  Does not know: models, or how anything was measured.

Intervals are percentile bootstraps over prompts (Efron 1979) from a fixed seed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Record = dict[str, Any]

BASELINES = ("generate", "assisted", "prompt-lookup", "plain")  # whose tokens per second others are divided by
STAGES = ("prefill", "target", "draft", "bookkeeping")
RESAMPLES = 2000

# How often LLaMA-68M ranks the choice of LLaMA-7B among its k = 1 ... 5 likeliest tokens (greedy), and how often
# verification accepts one of k (stochastic, at T = 1): SpecInfer, arXiv 2305.09781v4, Table 1.
SPECINFER_TABLE_1 = {
    0.0: {
        "alpaca": (0.68, 0.77, 0.81, 0.84, 0.85),
        "cp": (0.69, 0.79, 0.83, 0.86, 0.87),
        "webqa": (0.62, 0.72, 0.77, 0.80, 0.82),
        "cip": (0.70, 0.81, 0.85, 0.88, 0.89),
        "piqa": (0.63, 0.75, 0.79, 0.83, 0.85),
    },
    1.0: {
        "alpaca": (0.54, 0.81, 0.91, 0.95, 0.97),
        "cp": (0.56, 0.82, 0.92, 0.95, 0.97),
        "webqa": (0.52, 0.80, 0.90, 0.94, 0.96),
        "cip": (0.57, 0.84, 0.92, 0.95, 0.97),
        "piqa": (0.55, 0.82, 0.91, 0.95, 0.97),
    },
}


def summarise(settings: dict[str, Any], records: Sequence[Record]) -> dict[str, Any]:
    """Return settings, the number of records, and one entry per temperature and set, before them all sets together.

    An entry's methods each have: ``tokens_per_pass`` and, by baseline, ``ratio`` (of tokens per second; median over
    prompts), both as [value, low, high] with a 95 % interval; ``worst_to_plain``, the smallest such ratio to plain
    decoding; ``tokens_per_second`` (median); ``identical``, the share of prompts with plain decoding's ids, and
    ``same_as_plain``, how many tokens they share from the start on average; ``ms_per_token`` by stage; ``bookkeeping``,
    its share of the time after prefill; ``choices``, the trees' size, and ``drafts``, each one's contribution, as
    `results.Choices` and `results.Contribution`, for all prompts.  What was not measured is left out.
    """
    groups = []
    for temperature in dict.fromkeys(record["temperature"] for record in records):
        rows = [record for record in records if record["temperature"] == temperature]
        sets = list(dict.fromkeys(row["set"] for row in rows))
        groups += [_group("all", temperature, rows)] if len(sets) > 1 else []
        groups += [_group(name, temperature, [row for row in rows if row["set"] == name]) for name in sets]
    return {"settings": settings, "records": len(records), "groups": groups}


def bootstrap(values: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]) -> list[float]:
    """Return a statistic of values and the bounds of its 95 % interval.

    Args:
        values: (prompts, ...).
        statistic: maps (resamples, prompts, ...) to (resamples,).
    """
    draws = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(statistic(values[draws]), [0.025, 0.975])
    return [float(statistic(values[None])[0]), float(low), float(high)]


def _group(name: str, temperature: float, records: Sequence[Record]) -> dict[str, Any]:
    methods = {method: _method(method, records) for method in records[0]["methods"]}
    group = {"set": name, "temperature": temperature, "prompts": len(records), "methods": methods}
    if "hits" in records[0]:
        group["hits"] = [_hit_rates(rows) for rows in zip(*(r["hits"] for r in records), strict=True)]
    published = SPECINFER_TABLE_1.get(temperature, {}).get(name)
    return {**group, "specinfer_table_1": list(published)} if published else group


def _method(name: str, records: Sequence[Record]) -> dict[str, Any]:
    own = [record["methods"][name] for record in records]
    speed = _speed(name, records)
    ratios = {base: speed / _speed(base, records) for base in BASELINES if base in records[0]["methods"]}
    counts = np.array([(row["tokens"], row["target_passes"]) for row in own])
    figures: dict[str, Any] = {
        "tokens_per_pass": bootstrap(counts, lambda c: c[..., 0].sum(-1) / c[..., 1].sum(-1)),
        "tokens_per_second": float(np.median(speed)),
        "ratio": {base: bootstrap(r, lambda v: np.median(v, axis=-1)) for base, r in ratios.items() if base != name},
        "draft_passes_per_target_pass": sum(row["draft_passes"] for row in own) / int(counts[:, 1].sum()),
    }
    if "plain" in ratios:
        figures["worst_to_plain"] = float(ratios["plain"].min())
    if "same_as_plain" in own[0]:
        plain = [record["methods"]["plain"]["tokens"] for record in records]
        same = [row["same_as_plain"] for row in own]
        equal = [s == row["tokens"] == p for s, row, p in zip(same, own, plain, strict=True)]
        figures |= {"identical": float(np.mean(equal)), "same_as_plain": float(np.mean(same))}
    return figures | (_stages(own) if "bookkeeping" in own[0]["seconds"] else {})


def _speed(method: str, records: Sequence[Record]) -> np.ndarray:
    """Return each prompt's tokens per second, (prompts,)."""
    rows = [record["methods"][method] for record in records]
    return np.array([row["tokens"] / row["seconds"]["total"] for row in rows])


def _stages(rows: Sequence[Record]) -> dict[str, Any]:
    """Return where the time goes, how large trees were, and what each draft gave."""
    seconds = {stage: sum(row["seconds"][stage] for row in rows) for stage in ("total", *STAGES)}
    tokens = sum(row["tokens"] for row in rows)
    steps = [row["target_passes"] for row in rows]
    sizes = {
        size: float(np.average([row["choices"][size] for row in rows], weights=steps))
        for size in ("nodes_per_step", "levels_per_step")
    }
    return {
        "ms_per_token": {stage: 1000 * spent / tokens for stage, spent in seconds.items()},
        "bookkeeping": seconds["bookkeeping"] / (seconds["total"] - seconds["prefill"]),
        "choices": {**sizes, "plain_steps": sum(row["choices"]["plain_steps"] for row in rows)},
        "drafts": [_added(own) for own in zip(*(row["drafts"] for row in rows), strict=True)],
    }


def _added(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one draft's contributions to several prompts as one."""
    sums = {name: sum(row[name] for row in rows) for name in ("tokens", "only", "passes", "seconds")}
    return {"draft": rows[0]["draft"], **sums}


def _hit_rates(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    positions = sum(row["positions"] for row in rows)
    rates = [sum(hits) / positions for hits in zip(*(row["hits"] for row in rows), strict=True)]
    return {"draft": rows[0]["draft"], "positions": positions, "rates": rates}


# ---- text ----


def tables(report: dict[str, Any]) -> str:
    """Return a report as text."""
    settings = report["settings"]
    lines = [
        f"{settings['target']}, drafts: {settings['drafts']}, assistant: {settings['assistant']}, {settings['dtype']}, "
        f"{settings['max_new_tokens']} new tokens, {settings['nodes']} nodes",
        f"{settings['device']}, {settings['cpu']}, {settings['threads']} threads, torch {settings['torch']}, "
        f"transformers {settings['transformers']}",
        "tokens per target pass, then median ratios of tokens/s, [95 % intervals over prompts]",
        "",
    ]
    for group in report["groups"]:
        name = "all sets" if group["set"] == "all" else group["set"]
        lines += [f"{name}, T = {group['temperature']:g}, {group['prompts']} prompts"]
        blocks = (_method_lines(group["methods"]), _stage_lines(group["methods"]), _hit_lines(group))
        lines += [line for block in blocks if block for line in (*block, "")]
    return "\n".join(lines[:-1])


def _method_lines(methods: dict[str, Any]) -> list[str]:
    bases = [base for base in BASELINES if base in methods]
    ends = ("worst x plain", "same ids", "common prefix")
    rows = [["method", "tokens/pass", "tokens/s", *(f"x {base}" for base in bases), *ends]]
    for name, figures in methods.items():
        ratios = [_interval(figures["ratio"].get(base)) for base in bases]
        speed = f"{figures['tokens_per_second']:.1f}"
        shapes = {"worst_to_plain": "{:.2f}", "identical": "{:.0%}", "same_as_plain": "{:.1f}"}
        told = [shape.format(figures[field]) if field in figures else "" for field, shape in shapes.items()]
        rows.append([name, _interval(figures["tokens_per_pass"]), speed, *ratios, *told])
    return _aligned(rows)


def _stage_lines(methods: dict[str, Any]) -> list[str]:
    rows = [["ms per token", "total", *STAGES, "bookkeeping share", "nodes", "levels", "tokens by draft (only by it)"]]
    for name, figures in methods.items():
        if "ms_per_token" not in figures:
            continue
        stages = [f"{figures['ms_per_token'][stage]:.2f}" for stage in ("total", *STAGES)]
        sizes = [f"{figures['choices'][size]:.1f}" for size in ("nodes_per_step", "levels_per_step")]
        drafts = [f"{d['draft']} {d['tokens']} ({d['only']})" for d in figures["drafts"]]
        rows.append([name, *stages, f"{figures['bookkeeping']:.1%}", *sizes, ", ".join(drafts)])
    return _aligned(rows) if len(rows) > 1 else []


def _hit_lines(group: dict[str, Any]) -> list[str]:
    if "hits" not in group:
        return []
    named = [(f"{row['draft']}, {row['positions']} positions", row["rates"]) for row in group["hits"]]
    if "specinfer_table_1" in group:
        how = ", by multi-step sampling" if group["temperature"] else ""
        named.append((f"SpecInfer's Table 1, LLaMA-68M for 7B{how}", group["specinfer_table_1"]))
    header = ["target's choice among the draft's", *(f"top {k}" for k in range(1, 1 + len(named[0][1])))]
    return _aligned([header, *([name, *(f"{rate:.2f}" for rate in rates)] for name, rates in named)])


def _interval(values: Sequence[float] | None) -> str:
    return "" if values is None else "{:.2f} [{:.2f}, {:.2f}]".format(*values)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (
        [cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        for row in rows
    )
    return ["  " + "  ".join(cells).rstrip() for cells in padded]
