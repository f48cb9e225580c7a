"""What the records of a comparison amount to: per set and over all, with bootstrap intervals, as a dict or as text.

Knows: counts and seconds.  Does not know: models, or how anything was measured.

Intervals are percentile bootstraps over prompts (Efron 1979) from a fixed seed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specinfer.common.tables import aligned, interval
from specinfer.evaluation.published import ALL, SPECINFER_TABLE_1

Record = dict[str, Any]

BASELINES = ("autoregressive", "generate", "assisted", "prompt-lookup")  # whose tokens per second others are divided by
STAGES = ("prefill", "target", "draft", "bookkeeping")
RESAMPLES = 2000


def summarise(settings: dict[str, Any], records: Sequence[Record]) -> dict[str, Any]:
    """Return what `Comparison.summary` describes."""
    groups = []
    for temperature in dict.fromkeys(record["temperature"] for record in records):
        rows = [record for record in records if record["temperature"] == temperature]
        sets = list(dict.fromkeys(row["set"] for row in rows))
        groups += [_group(ALL, temperature, rows)] if len(sets) > 1 else []
        groups += [_group(name, temperature, [row for row in rows if row["set"] == name]) for name in sets]
    skipped = {name: reason for record in records for name, reason in record["skipped"].items()}
    return {"settings": settings, "records": len(records), "skipped": skipped, "groups": groups}


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
    names = [method for method in records[0]["methods"] if all(method in record["methods"] for record in records)]
    records = [{**record, "methods": {method: record["methods"][method] for method in names}} for record in records]
    methods = {method: _method(method, records) for method in names}
    group: dict[str, Any] = {"set": name, "temperature": temperature, "prompts": len(records), "methods": methods}
    if {"tree", "sequence"} <= methods.keys():
        counts = np.stack([_counts(method, records) for method in ("tree", "sequence")], 1)  # (prompts, methods, 2)
        group["tree_to_sequence"] = bootstrap(counts, lambda c: np.divide(*np.moveaxis(_tau(c), -1, 0)))
    if "hits" in records[0]:
        group["hits"] = [_hit_rates(rows) for rows in zip(*(r["hits"] for r in records), strict=True)]
    published = SPECINFER_TABLE_1.get(temperature, {}).get(name)
    return {**group, "specinfer_table_1": list(published)} if published else group


def _method(name: str, records: Sequence[Record]) -> dict[str, Any]:
    own = [record["methods"][name] for record in records]
    speed = _speed(name, records)
    ratios = {base: speed / _speed(base, records) for base in BASELINES if base in records[0]["methods"]}
    counts = _counts(name, records)
    figures: dict[str, Any] = {
        "tokens_per_pass": bootstrap(counts, _tau),
        "tokens_per_second": float(np.median(speed)),
        "ratio": {base: bootstrap(r, lambda v: np.median(v, axis=-1)) for base, r in ratios.items() if base != name},
        "draft_passes_per_target_pass": sum(row["draft_passes"] for row in own) / int(counts[:, 1].sum()),
    }
    if "autoregressive" in ratios and name != "autoregressive":
        ratio = ratios["autoregressive"]
        both = np.column_stack((counts, ratio))
        figures["worst_to_autoregressive"] = float(ratio.min())
        figures["overhead"] = bootstrap(both, lambda b: _tau(b[..., :2]) / np.median(b[..., 2], axis=-1) - 1)
    if "same_as_autoregressive" in own[0]:
        reference = [record["methods"]["autoregressive"]["tokens"] for record in records]
        same = [row["same_as_autoregressive"] for row in own]
        equal = [s == row["tokens"] == r for s, row, r in zip(same, own, reference, strict=True)]
        figures |= {"identical": float(np.mean(equal)), "same_as_autoregressive": float(np.mean(same))}
    if gaps := [row["gap"] for row in own if "gap" in row]:
        figures["largest_gap"] = max(gaps)
    return figures | (_stages(own) if "bookkeeping" in own[0]["seconds"] else {})


def _counts(method: str, records: Sequence[Record]) -> np.ndarray:
    """Return each prompt's tokens and target passes, (prompts, 2)."""
    rows = [record["methods"][method] for record in records]
    return np.array([(row["tokens"], row["target_passes"]) for row in rows])


def _tau(counts: np.ndarray) -> np.ndarray:
    """Return tokens per target pass, (resamples, ...), of counts (resamples, prompts, ..., 2)."""
    sums = counts.sum(1)
    return sums[..., 0] / sums[..., 1]


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
        size: float(np.average([row["tree_sizes"][size] for row in rows], weights=steps))
        for size in ("nodes_per_step", "levels_per_step")
    }
    return {
        "ms_per_token": {stage: 1000 * spent / tokens for stage, spent in seconds.items()},
        "bookkeeping": seconds["bookkeeping"] / (seconds["total"] - seconds["prefill"]),
        "tree_sizes": {**sizes, "plain_steps": sum(row["tree_sizes"]["plain_steps"] for row in rows)},
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
    """Return a report as text: a block per set, then whether tree beats sequence, then what was left out and why."""
    settings = report["settings"]
    lines = [
        f"{settings['target']}, drafts: {settings['drafts']}, assistant: {settings['assistant']}, {settings['dtype']}, "
        f"{settings['max_new_tokens']} new tokens, {settings['nodes']} nodes, depth {settings['depth']}",
        f"{settings['device']}, {settings['cpu']}, {settings['threads']} threads, torch {settings['torch']}, "
        f"transformers {settings['transformers']}",
        "tokens per target pass, then median ratios of tokens/s, [95 % intervals over prompts]",
        "",
    ]
    for group in report["groups"]:
        lines.append(f"{_title(group)}, {group['prompts']} prompts")
        blocks = (_method_lines(group["methods"]), _stage_lines(group["methods"]), _hit_lines(group))
        lines += [line for block in blocks if block for line in (*block, "")]
    lines += _verdict_lines([group for group in report["groups"] if "tree_to_sequence" in group])
    lines += [f"left out: {name}: {reason}" for name, reason in report["skipped"].items()]
    return "\n".join(lines).rstrip()


def _title(group: dict[str, Any]) -> str:
    return f"{'all sets' if group['set'] == 'all' else group['set']}, T = {group['temperature']:g}"


def _method_lines(methods: dict[str, Any]) -> list[str]:
    bases = [base for base in BASELINES if base in methods]
    shapes = {  # header -> field, format
        "worst x": ("worst_to_autoregressive", "{:.2f}"),
        "same ids": ("identical", "{:.0%}"),
        "common prefix": ("same_as_autoregressive", "{:.1f}"),
        "largest gap": ("largest_gap", "{:.3g}"),
    }
    columns = ["tokens/pass", "draft passes", "tokens/s", *(f"x {base}" for base in bases), "overhead", *shapes]
    rows = [["method", *columns]]
    for name, figures in methods.items():
        passes, speed = f"{figures['draft_passes_per_target_pass']:.1f}", f"{figures['tokens_per_second']:.1f}"
        ratios = [interval(figures["ratio"].get(base)) for base in bases]
        told = [shape.format(figures[field]) if field in figures else "" for field, shape in shapes.values()]
        overhead = interval(figures.get("overhead"))
        rows.append([name, interval(figures["tokens_per_pass"]), passes, speed, *ratios, overhead, *told])
    return _table(rows)


def _verdict_lines(groups: Sequence[dict[str, Any]]) -> list[str]:
    """Say of each set whether tree beats sequence in tokens per target pass, and what both spent on drafting."""
    if not groups:
        return []
    told, ahead, level = [], 0, 0
    for group in groups:
        tree, sequence = (group["methods"][name] for name in ("tree", "sequence"))
        taus = tree["tokens_per_pass"][0], sequence["tokens_per_pass"][0]
        passes = [figures["draft_passes_per_target_pass"] for figures in (tree, sequence)]
        sign = ">" if taus[0] > taus[1] else "<" if taus[0] < taus[1] else "="
        ahead, level = ahead + (sign == ">"), level + (passes[0] <= passes[1])
        told.append(
            f"  {_title(group)}: tree {taus[0]:.2f} {sign} sequence {taus[1]:.2f}, "
            f"at {passes[0]:.1f} and {passes[1]:.1f} draft passes a step; x {interval(group['tree_to_sequence'])}"
        )
    head = f"tree beats sequence in tokens per target pass in {ahead} of {len(groups)} rows, "
    return [f"{head}with no more draft passes a step in {level}:", *told, ""]


def _stage_lines(methods: dict[str, Any]) -> list[str]:
    names = ("total", "prefill", "verify", "draft", "bookkeeping", "its share", "nodes", "levels")
    rows = [["ms per token", *names, "tokens by draft (only by it)"]]
    for name, figures in methods.items():
        if "ms_per_token" not in figures:
            continue
        stages = [f"{figures['ms_per_token'][stage]:.2f}" for stage in ("total", *STAGES)]
        sizes = [f"{figures['tree_sizes'][size]:.1f}" for size in ("nodes_per_step", "levels_per_step")]
        drafts = [f"{d['draft']} {d['tokens']} ({d['only']})" for d in figures["drafts"]]
        rows.append([name, *stages, f"{figures['bookkeeping']:.1%}", *sizes, ", ".join(drafts)])
    return _table(rows) if len(rows) > 1 else []


def _hit_lines(group: dict[str, Any]) -> list[str]:
    if "hits" not in group:
        return []
    named = [(f"{row['draft']}, {row['positions']} positions", row["rates"]) for row in group["hits"]]
    if "specinfer_table_1" in group:
        how = ", by multi-step sampling" if group["temperature"] else ""
        named.append((f"SpecInfer's Table 1, LLaMA-68M for 7B{how}", group["specinfer_table_1"]))
    header = ["target's choice among the draft's", *(f"top {k}" for k in range(1, 1 + len(named[0][1])))]
    return _table([header, *([name, *(f"{rate:.2f}" for rate in rates)] for name, rates in named)])


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"  {line}" for line in aligned(rows)]
