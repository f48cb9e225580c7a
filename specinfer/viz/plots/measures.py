"""Measurements: acceptance, methods side by side, where the time went, calibration.

Knows: figures, by attribute.  Does not know: how they came about, matplotlib's figures and legends (`axes`).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from specinfer.errors import InputError
from specinfer.evaluation.paper_figures import ALL
from specinfer.results import Result, counts_by_depth
from specinfer.tree.drawing import percent
from specinfer.viz.plots import axes as draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from specinfer.common.records import Record
    from specinfer.evaluation.compare.result import Comparison
    from specinfer.evaluation.doctor.draft_report import DraftReport, Gains
    from specinfer.evaluation.traces.statistics import CalibrationCurve, HitTable


def plot_acceptance(hits: Any, ax: Axes | None = None) -> Axes:
    """Draw how often drafted tokens are accepted, by depth and, of a `HitTable`, by rank among siblings.

    Args:
        hits: a `HitTable`, which becomes a heat map, depth by rank; or a `Result` or several, which become bars by
            depth: the share of the steps that had a node to accept there, with 95 % Wilson intervals and counts.
        ax: where to draw.

    Raises:
        InputError: results without any drafted token, another type, or matplotlib is not installed.
    """
    if hasattr(hits, "rates"):
        return _acceptance_by_rank(hits, ax)
    results = [hits] if isinstance(hits, Result) else list(hits) if isinstance(hits, Iterable) else [hits]
    if not all(hasattr(result, "steps") for result in results):
        raise InputError("plot_acceptance draws a HitTable, a Result or a list of results")
    counts = np.array(counts_by_depth(step for result in results for step in result.steps))
    if not len(counts):
        raise InputError("nothing was drafted in these results: there is no acceptance to draw; decode with a draft")
    return _acceptance_by_depth(counts, ax)


def _acceptance_by_rank(hits: HitTable, ax: Axes | None) -> Axes:
    depths, ranks = hits.counts.shape
    if not hits.counts.size:
        raise InputError(f"the hit table of {hits.draft} is empty: there is no acceptance to draw")
    ax = draw.axes_of(ax, 1.6 + 0.62 * ranks, 1.0 + 0.4 * depths)
    rates = np.ma.masked_invalid(np.where(hits.tried[:, None] > 0, hits.rates, np.nan))
    top = float(rates.max()) if rates.count() else 1.0
    edges = np.arange(ranks + 1) + 0.5, np.arange(depths + 1) + 0.5
    ax.pcolormesh(*edges, rates, cmap="Blues", vmin=0, vmax=top or 1.0, edgecolors="white", linewidth=1, gid="rates")
    for (row, column), rate in np.ndenumerate(rates.filled(np.nan)):
        ink = "white" if rate > 0.6 * top else "black"
        label = "–" if np.isnan(rate) else percent(rate)
        ax.text(column + 1, row + 1, label, ha="center", va="center", fontsize=draw.FONT, color=ink)
    ax.set_xticks(range(1, ranks + 1))
    ax.set_yticks(range(1, depths + 1), [f"{d}  (n = {n})" for d, n in enumerate(hits.tried.tolist(), start=1)])
    ax.set(ylim=(depths + 0.5, 0.5), xlabel="rank among siblings", ylabel="depth")
    ax.set_title(f"hits of {draw.drawable(hits.draft, 40)}", fontsize="medium", **draw.PLAIN)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return ax


def _acceptance_by_depth(counts: np.ndarray, ax: Axes | None) -> Axes:
    from specinfer.evaluation.traces.statistics import wilson

    accepted, tried = counts.T
    depths, shares = np.arange(1, len(counts) + 1), accepted / tried
    low, high = wilson(accepted, tried)
    ax = draw.axes_of(ax, min(1.5 + 0.5 * len(counts), draw.WIDEST), 3.2)
    ax.bar(depths, shares, 0.7, color=draw.STAGES["target"][1], ec="black", lw=0.6, gid="shares")
    ax.vlines(depths, low, high, color="black", lw=1)
    for depth, (top, of) in enumerate(zip(high, counts.tolist(), strict=True), start=1):
        ax.text(depth, top + 0.02, "{}/{}".format(*of), ha="center", va="bottom", fontsize=draw.FONT - 1)
    ax.set(xlabel="depth", ylabel="accepted, of steps that got there", ylim=(0, 1.12), xticks=depths)
    ax.set_yticks(np.linspace(0, 1, 6))
    draw.open_frame(ax)
    return ax


def plot_compare(comparison: Comparison, ax: Axes | None = None) -> Axes:
    """Draw, per set and method, tokens per target pass, and below the ratio of tokens/s to autoregressive decoding.

    Both have 95 % intervals.  The upper Axes is returned; the lower one takes a part of its space.

    Args:
        comparison: of `compare`; its `summary()` is drawn.
        ax: where to draw.

    Raises:
        InputError: not a comparison, an empty one, or matplotlib is not installed.
    """
    if not hasattr(comparison, "summary"):
        raise InputError(f"plot_compare draws what `compare` returns, not a {type(comparison).__name__}")
    groups = comparison.summary()["groups"]
    methods = list(dict.fromkeys(method for group in groups for method in group["methods"]))
    if not methods:
        raise InputError("the comparison is empty: there is nothing to draw; run it on at least one prompt")
    width = min(max(1.6 + len(groups) * (0.2 + 0.17 * len(methods)), 4.0), draw.WIDEST)
    ax, lower = draw.upper_and_lower(ax, width, 4.8, 0.8)
    ax.set(ylabel="tokens per target pass", xlim=(-0.5, len(groups) - 0.5))
    lower.set_ylabel("tokens/s, ratio\nto autoregressive")
    lower.axhline(1, color="black", lw=0.8, ls="--", zorder=1)
    handles, width, others = [], 0.84 / len(methods), cycle(draw.OTHERS)
    for i, method in enumerate(methods):
        left = (i + 0.5) * width - 0.42
        rows = [(at + left, g["methods"][method]) for at, g in enumerate(groups) if method in g["methods"]]
        handles.append(_draw_method(ax, lower, method, rows, width, draw.METHODS.get(method) or next(others)))
    if not any(len(handle) > 1 for handle in handles):
        words = "not measured: compare with autoregressive"
        lower.text(0.5, 0.5, words, transform=lower.transAxes, ha="center", va="top")
    warm = len({group["temperature"] for group in groups}) > 1
    names = [_group_name(group, warm) for group in groups]
    lower.set_xticks(range(len(groups)), names, fontsize=draw.FONT, **draw.PLAIN)
    lower.margins(y=0.15)
    for axes in (ax, lower):
        axes.tick_params(axis="x", length=0)
    draw.legend(ax, handles)
    return ax


def _draw_method(
    ax: Axes, lower: Axes, method: str, rows: list[tuple[float, Record]], width: float, style: tuple[str, str, str]
) -> list[object]:
    """Draw a method's bars and, where it was compared with autoregressive decoding, its ratios; return the handles.

    Rows are where a bar stands, and its figures.
    """
    colour, hatch, mark = style
    x, (value, low, high) = [at for at, _ in rows], np.array([figures["tokens_per_pass"] for _, figures in rows]).T
    bars = ax.bar(x, value, width, color=colour, hatch=hatch, ec="black", lw=0.6, label=method)
    ax.vlines(x, low, high, color="black", lw=1)
    ratios = [(at, figures["ratio"]["autoregressive"]) for at, figures in rows if "autoregressive" in figures["ratio"]]
    if not ratios:
        return [bars]
    x, (value, low, high) = [at for at, _ in ratios], np.array([ratio for _, ratio in ratios]).T
    lower.vlines(x, low, high, color="black", lw=1)
    dots: draw.Options = {"color": colour, "mec": "black", "mew": 0.6, "ms": 5, "gid": f"ratio-{method}"}
    return [bars, *lower.plot(x, value, mark, **dots)]


def _group_name(group: Record, warm: bool) -> str:
    lines = ["all sets" if group["set"] == ALL else draw.drawable(group["set"], 20), f"n = {group['prompts']}"]
    return "\n".join([*lines, f"T = {group['temperature']:g}"] if warm else lines)


def plot_drafts(report: DraftReport, ax: Axes | None = None) -> Axes:
    """Draw, by size of the tree, the tokens per target pass to expect of each draft, and below the speed-up.

    Tokens per pass have 95 % intervals.  A faint line is the most that an ideal choice among a draft's candidates would
    give.  The upper Axes is returned; the lower one takes a part of its space.

    Args:
        report: of `check_draft`.
        ax: where to draw.

    Raises:
        InputError: not a report, or matplotlib is not installed.
    """
    if not hasattr(report, "together"):
        raise InputError(f"plot_drafts draws what `check_draft` returns, not a {type(report).__name__}")
    lines = [(f"{check.draft} ({check.grade})", check.gains) for check in report.drafts]
    lines += [("all drafts", report.together)] if report.together else []
    ax, lower = draw.upper_and_lower(ax, 6.4, 5.2, 0.7)
    ax.set_ylabel("tokens per target pass")
    lower.set_ylabel("speed-up to expect,\nagainst plain decoding")
    lower.axhline(1, color="black", lw=0.8, ls="--", zorder=1)
    shifts = 0.1 * (np.arange(len(lines)) - (len(lines) - 1) / 2)  # side by side, so that intervals can be told apart
    numbered = enumerate(zip(lines, shifts, strict=True))
    handles = [_draw_gains(ax, lower, *line, i, shift) for i, (line, shift) in numbered]
    handles += ax.plot([], [], color=draw.GREY, lw=0.7, label="ideal choice")
    labels = [size.tree.replace(" ", "\n") for size in lines[0][1].sizes]
    lower.set_xticks(range(len(labels)), labels, fontsize=draw.FONT)
    for axes in (ax, lower):
        axes.set_ylim(bottom=0)
        axes.tick_params(axis="x", length=0)
    draw.legend(ax, handles)
    return ax


def _draw_gains(ax: Axes, lower: Axes, label: str, gains: Gains, number: int, shift: float) -> object:
    """Draw one draft's tokens per pass and speed-ups, chains and trees apart; return the handle."""
    colour, mark, style, _ = draw.DRAFTS[number % len(draw.DRAFTS)]
    value, low, high = np.array([size.tokens_per_pass for size in gains.sizes]).T
    speeds = np.array([size.speed_up for size in gains.sizes])
    kinds = np.array([size.tree.split()[0] for size in gains.sizes])
    handle: object = None
    for kind in dict.fromkeys(kinds):
        of_kind = np.flatnonzero(kinds == kind)
        x = of_kind + shift
        options: draw.Options = {"marker": mark, "color": colour, "ms": 5, "lw": 1.2}
        (handle,) = ax.plot(x, value[of_kind], style, label=draw.drawable(label, 40), gid=f"tokens-{number}", **options)
        ax.vlines(x, low[of_kind], high[of_kind], color=colour, lw=1)
        lower.plot(x, speeds[of_kind], style, gid=f"speed-{number}", **options)
    ax.axhline(gains.ideal[0], color=colour, ls=style, lw=0.7, alpha=0.5, zorder=0, gid=f"ideal-{number}")
    return handle


def plot_timeline(result: Result, ax: Axes | None = None) -> Axes:
    """Draw where the time of each step went, in milliseconds, and above it the tokens that the step gained.

    The first bar, `prompt`, is the time before the first step.  In a batch, the seconds are those of all its rows.

    Args:
        result: of `generate`.
        ax: where to draw.

    Raises:
        InputError: not a result, one without steps, or matplotlib is not installed.
    """
    if not hasattr(result, "steps") or not hasattr(result, "stats"):
        raise InputError(f"plot_timeline draws a Result, not a {type(result).__name__}: of a batch, one row's")
    if not result.steps:
        raise InputError("the result has no steps: there is no time to draw; decode at least one new token")
    spent = np.array([[getattr(step.seconds, stage) for stage in draw.STAGES] for step in result.steps])
    total = np.array([getattr(result.stats.seconds, stage) for stage in draw.STAGES])
    milliseconds = 1000 * np.vstack((np.maximum(total - spent.sum(0), 0), spent)).T  # (stages, 1 + steps)
    count = len(result.steps)
    ax = draw.axes_of(ax, min(max(1.5 + 0.3 * count, 5.0), draw.WIDEST), 3.4)
    x, bottom = np.arange(count + 1), np.zeros(count + 1)
    handles = []
    for (name, colour, hatch), heights in zip(draw.STAGES.values(), milliseconds, strict=True):
        handles.append(ax.bar(x, heights, 0.8, bottom, color=colour, hatch=hatch, ec="black", lw=0.5, label=name))
        bottom += heights
    size = min(draw.FONT, draw.WIDEST * 72 / count * 0.7)
    for at, step in enumerate(result.steps, start=1):
        ax.text(at, bottom[at], f"+{len(step.tokens)}", ha="center", va="bottom", fontsize=size)
    every = 1 + (count - 1) // 24
    numbers = range(every, count + 1, every)
    ax.set_xticks([0, *numbers], ["prompt", *map(str, numbers)], fontsize=draw.FONT)
    ax.set(xlabel="step, and +tokens that it gained", ylabel="milliseconds", xlim=(-0.6, count + 0.6))
    ax.margins(y=0.12)
    draw.open_frame(ax)
    draw.legend(ax, handles)
    return ax


def plot_calibration(curve: CalibrationCurve | Iterable[CalibrationCurve], ax: Axes | None = None) -> Axes:
    """Draw a reliability diagram: the drafts' probabilities against the share accepted, and below how many there were.

    A calibrated draft lies on the diagonal; ECE is the expected calibration error.  Bars are 95 % Wilson intervals.
    The upper Axes is returned; the lower one takes a part of its space.

    Args:
        curve: a `CalibrationCurve`, or one per draft.
        ax: where to draw.

    Raises:
        InputError: not a curve, one without observations, or matplotlib is not installed.
    """
    curves = list(curve) if isinstance(curve, Iterable) else [curve]
    if not curves or not all(hasattr(each, "accepted") and np.sum(each.count) for each in curves):
        raise InputError("plot_calibration draws a CalibrationCurve, or a list of them, each with observations")
    ax, lower = draw.upper_and_lower(ax, 4.2, 4.6, 0.25)
    handles: list[object] = [*ax.plot([0, 1], [0, 1], color=draw.GREY, lw=0.9, ls="--", zorder=0, label="calibrated")]
    width = 0.7 / max(len(each.count) for each in curves) / len(curves)
    for i, each in enumerate(curves):
        handles.append(_draw_curve(ax, lower, each, i, (i + 0.5 - len(curves) / 2) * width, width))
    ax.set(ylabel="share accepted", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    lower.set(xlabel="draft probability", ylabel="nodes", yscale="log")
    lower.set_ylim(bottom=0.7)
    draw.legend(ax, handles, ncols=1)
    return ax


def _draw_curve(
    ax: Axes, lower: Axes, curve: CalibrationCurve, number: int, shift: float, width: float
) -> list[object]:
    """Draw one draft's curve and counts; return the handles."""
    counted = curve.count > 0
    x, y, low, high = (getattr(curve, name)[counted] for name in ("probability", "accepted", "low", "high"))
    colour, mark, style, hatch = draw.DRAFTS[number % len(draw.DRAFTS)]
    label = f"{draw.drawable(curve.draft, 30)}: ECE {curve.error:.3f}, n = {curve.count.sum()}"
    (line,) = ax.plot(x, y, style, marker=mark, color=colour, ms=5, lw=1.2, label=label, gid=f"curve-{number}")
    ax.vlines(x, low, high, color=colour, lw=1)
    bars = lower.bar(x + shift, curve.count[counted], width, color=colour, hatch=hatch, ec="black", lw=0.4)
    return [line, bars]
