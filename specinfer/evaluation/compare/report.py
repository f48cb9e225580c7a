"""The summary of a comparison's records, per set and over all, with bootstrap intervals: a dict, prose and tables.

Knows: counts and seconds.  Does not know: models, how anything was measured.

Intervals are percentile bootstraps over prompts (Efron 1979) from a fixed seed.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from specinfer.common.records import Record
from specinfer.common.tables import Table, interval
from specinfer.evaluation.paper_figures import ALL, SPECINFER_TABLE_1

Rows = Sequence[Record]  # one method's or one draft's part of each record

BASELINES = ("autoregressive", "generate", "assisted", "prompt-lookup")  # whose tokens per second others are divided by
STAGES = ("total", "prefill", "target", "draft", "bookkeeping")
SIZES = ("nodes_per_step", "levels_per_step")
RESAMPLES = 2000
REFUSALS = 5  # prompts named under a table


def summarise(settings: dict[str, object], records: Sequence[Record]) -> Record:
    """Return the summary, as `Comparison.summary` describes it."""
    bad = {(record["set"], record["place"]): record for record in records if "error" in record}
    refused = [{name: record[name] for name in ("set", "id", "error")} for record in bad.values()]
    records, groups = [record for record in records if "error" not in record], []
    for temperature in dict.fromkeys(record["temperature"] for record in records):
        rows = [record for record in records if record["temperature"] == temperature]
        sets = list(dict.fromkeys(row["set"] for row in rows))
        groups += [_group(ALL, temperature, rows)] if len(sets) > 1 else []
        groups += [_group(name, temperature, [row for row in rows if row["set"] == name]) for name in sets]
    skipped = {name: reason for record in records for name, reason in record["skipped"].items()}
    return {"settings": settings, "records": len(records), "skipped": skipped, "refused": refused, "groups": groups}


def bootstrap(values: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]) -> list[float]:
    """Return a statistic of values and the bounds of its 95 % interval.

    Args:
        values: (prompts, ...).
        statistic: maps (resamples, prompts, ...) to (resamples,).
    """
    draws = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(statistic(values[draws]), [0.025, 0.975])
    return [float(statistic(values[None])[0]), float(low), float(high)]


def _group(name: str, temperature: float, records: Sequence[Record]) -> dict[str, object]:
    names = [method for method in records[0]["methods"] if all(method in record["methods"] for record in records)]
    rows: dict[str, Rows] = {method: [record["methods"][method] for record in records] for method in names}
    methods = {method: _method(method, rows) for method in names}
    group: dict[str, object] = {"set": name, "temperature": temperature, "prompts": len(records), "methods": methods}
    if {"tree", "sequence"} <= methods.keys():
        counts = np.stack([_counts(rows[method]) for method in ("tree", "sequence")], 1)  # (prompts, methods, 2)
        group["tree_to_sequence"] = bootstrap(counts, lambda c: np.divide(*np.moveaxis(ratio_of_sums(c), -1, 0)))
    if "hits" in records[0]:
        group["hits"] = [_hit_rates(drafts) for drafts in zip(*(r["hits"] for r in records), strict=True)]
    published = SPECINFER_TABLE_1.get(temperature, {}).get(name)
    return {**group, "specinfer_table_1": list(published)} if published else group


def _method(name: str, methods: dict[str, Rows]) -> Record:
    rows, counts = methods[name], _counts(methods[name])
    speeds = {m: np.array([row["tokens"] / row["seconds"]["total"] for row in methods[m]]) for m in methods}
    ratios = {base: speeds[name] / speeds[base] for base in BASELINES if base in methods and base != name}
    figures: Record = {
        "tokens_per_pass": bootstrap(counts, ratio_of_sums),
        "tokens_per_second": float(np.median(speeds[name])),
        "ratio": {base: bootstrap(ratio, lambda v: np.median(v, axis=-1)) for base, ratio in ratios.items()},
        "draft_passes_per_target_pass": _sum(rows, "draft_passes") / int(counts[:, 1].sum()),
    }
    if "autoregressive" in ratios:
        ratio = ratios["autoregressive"]
        both = np.column_stack((counts, ratio))
        figures["worst_to_autoregressive"] = float(ratio.min())
        figures["overhead"] = bootstrap(both, lambda b: ratio_of_sums(b[..., :2]) / np.median(b[..., 2], axis=-1) - 1)
    if "same_as_autoregressive" in rows[0]:
        same = [row["same_as_autoregressive"] for row in rows]
        pairs = zip(same, rows, methods["autoregressive"], strict=True)
        equal = [shared == row["tokens"] == reference["tokens"] for shared, row, reference in pairs]
        figures |= {"identical": float(np.mean(equal)), "same_as_autoregressive": float(np.mean(same))}
    if gaps := [row["gap"] for row in rows if "gap" in row]:
        figures["largest_gap"] = max(gaps)
    return figures | (_stages(rows) if "bookkeeping" in rows[0]["seconds"] else {})


def _sum(rows: Rows, name: str) -> float:
    return sum(row[name] for row in rows)


def _counts(rows: Rows) -> np.ndarray:
    """Return each prompt's tokens and target passes, (prompts, 2)."""
    return np.array([(row["tokens"], row["target_passes"]) for row in rows])


def ratio_of_sums(pairs: np.ndarray) -> np.ndarray:
    """Return the ratio of sums over prompts, (resamples, ...), of pairs (resamples, prompts, ..., 2)."""
    sums = pairs.sum(1)
    return sums[..., 0] / sums[..., 1]


def _stages(rows: Rows) -> Record:
    """Return the time of each stage, the trees' sizes, and the contribution of each draft."""
    seconds = {stage: _sum([row["seconds"] for row in rows], stage) for stage in STAGES}
    trees, steps = [row["tree_sizes"] for row in rows], [row["target_passes"] for row in rows]
    sizes = {size: float(np.average([tree[size] for tree in trees], weights=steps)) for size in SIZES}
    drafts = zip(*(row["drafts"] for row in rows), strict=True)
    summed = ("tokens", "only", "passes", "seconds")
    return {
        "ms_per_token": {stage: 1000 * spent / _sum(rows, "tokens") for stage, spent in seconds.items()},
        "bookkeeping": seconds["bookkeeping"] / (seconds["total"] - seconds["prefill"]),
        "tree_sizes": {**sizes, "plain_steps": _sum(trees, "plain_steps")},
        "drafts": [{"draft": of[0]["draft"], **{name: _sum(of, name) for name in summed}} for of in drafts],
    }


def _hit_rates(rows: Rows) -> dict[str, object]:
    positions = _sum(rows, "positions")
    rates = [sum(hits) / positions for hits in zip(*(row["hits"] for row in rows), strict=True)]
    return {"draft": rows[0]["draft"], "positions": positions, "rates": rates}


# ---- prose and tables ----


def parts(report: Record) -> Iterator[str | Table]:
    """Yield a report's prose and tables: those of each set, whether tree beats sequence, what was left out and why."""
    yield _head(report)
    for group in report["groups"]:
        yield f"{_title(group)}, {group['prompts']} prompt{'s' if group['prompts'] > 1 else ''}"
        blocks = _method_rows(group["methods"]), _stage_rows(group["methods"]), _hit_rows(group)
        yield from (rows for rows in blocks if len(rows) > 1)
    yield "\n".join(_foot(report))


def _head(report: Record) -> str:
    """Return the settings, and the meaning of the figures."""
    settings = (
        "{target}, drafts: {drafts}, assistant: {assistant}, {dtype}, {max_new_tokens} new tokens, {nodes} nodes, "
        "depth {depth}, prompts at a time: {max_rows}\n{device}, {cpu}, {threads} threads, torch {torch}, transformers "
        "{transformers}".format(**report["settings"])
    )
    several = any(group["prompts"] > 1 for group in report["groups"])
    intervals = ", [95 % intervals over prompts]" if several else ""
    figures = f"tokens per target pass, then median ratios of tokens/s{intervals}"
    texts = "same ids: as without speculation; prefix: tokens until they differ; gap: of the two best logits there"
    return f"{settings}\n{figures}\n{texts}\n"


def _foot(report: Record) -> list[str]:
    """Return the verdict, and what was left out and why."""
    lines = _verdict_lines([group for group in report["groups"] if "tree_to_sequence" in group])
    lines += [f"left out: {name}: {reason}" for name, reason in report["skipped"].items()]
    lines += [f"refused: {refusal['error']}" for refusal in report["refused"][:REFUSALS]]
    if more := len(report["refused"][REFUSALS:]):
        lines.append(f"refused: {more} more, which the records name")
    return lines


def _title(group: dict[str, object]) -> str:
    return f"{'all sets' if group['set'] == ALL else group['set']}, T = {group['temperature']:g}"


def _method_rows(methods: Record) -> list[list[str]]:
    bases = [base for base in BASELINES if base in methods]
    shapes = {  # header -> field, format; a field that was not measured is left blank
        "worst x": ("worst_to_autoregressive", "{:.2f}"),
        "same ids": ("identical", "{:.0%}"),
        "prefix": ("same_as_autoregressive", "{:.1f}"),
        "gap": ("largest_gap", "{:.3g}"),
    }
    columns = ["tokens/pass", "draft passes", "tokens/s", *(f"x {base}" for base in bases), "overhead", *shapes]
    rows = [["method", *columns]]
    for name, figures in methods.items():
        passes, speed = f"{figures['draft_passes_per_target_pass']:.1f}", f"{figures['tokens_per_second']:.1f}"
        ratios = [interval(figures["ratio"].get(base)) for base in bases]
        others = [shape.format(figures[field]) if field in figures else "" for field, shape in shapes.values()]
        overhead = interval(figures.get("overhead"))
        rows.append([name, interval(figures["tokens_per_pass"]), passes, speed, *ratios, overhead, *others])
    return rows


def _verdict_lines(groups: Sequence[Record]) -> list[str]:
    """Say of each set whether tree beats sequence in tokens per target pass, and how much both spent on drafting."""
    if not groups:
        return []
    lines, ahead, level = [], 0, 0
    for group in groups:
        both = [group["methods"][name] for name in ("tree", "sequence")]
        tree, sequence = (figures["tokens_per_pass"][0] for figures in both)
        passes = [figures["draft_passes_per_target_pass"] for figures in both]
        sign = ">" if tree > sequence else "<" if tree < sequence else "="
        ahead, level = ahead + (tree > sequence), level + (passes[0] <= passes[1])
        lines.append(
            f"  {_title(group)}: tree {tree:.2f} {sign} sequence {sequence:.2f}, "
            f"at {passes[0]:.1f} and {passes[1]:.1f} draft passes; x {interval(group['tree_to_sequence'])}"
        )
    head = f"tree beats sequence in tokens per target pass in {ahead} of {len(groups)} rows, "
    return [f"{head}with no more draft passes a step in {level}:", *lines, ""]


def _stage_rows(methods: Record) -> list[list[str]]:
    names = ("total", "prefill", "verify", "draft", "bookkeeping", "its share", "nodes", "levels")
    rows = [["ms per token", *names, "tokens by draft (fewer without it)"]]
    for name, figures in methods.items():
        if "ms_per_token" in figures:
            stages = [f"{figures['ms_per_token'][stage]:.2f}" for stage in STAGES]
            sizes = [f"{figures['tree_sizes'][size]:.1f}" for size in SIZES]
            drafts = [f"{d['draft']} {d['tokens']} ({d['only']})" for d in figures["drafts"]]
            rows.append([name, *stages, f"{figures['bookkeeping']:.1%}", *sizes, ", ".join(drafts)])
    return rows


def _hit_rows(group: Record) -> list[list[str]]:
    rows = [[f"{row['draft']}, {row['positions']} positions", row["rates"]] for row in group.get("hits", ())]
    if rows and "specinfer_table_1" in group:
        how = ", by multi-step sampling" if group["temperature"] else ""
        rows.append([f"SpecInfer's Table 1, LLaMA-68M for 7B{how}", group["specinfer_table_1"]])
    header = ["target's choice among the draft's", *(f"top {k}" for k in range(1, 1 + len(rows[0][1])))] if rows else []
    return [header, *([name, *(f"{rate:.2f}" for rate in rates)] for name, rates in rows)]
