"""Plots: what is drawn, by property and not by pixel; manners; text of any kind; wrong data."""

import importlib
import re
import sys
import warnings
from collections import Counter
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from strategies import PROPERTY, token_trees

from specinfer import SpeculativeDecoder
from specinfer.errors import InputError
from specinfer.evaluation.compare.methods import METHODS
from specinfer.evaluation.inspect.inspection import StepInspection
from specinfer.evaluation.traces.statistics import CalibrationCurve, HitTable, wilson
from specinfer.results import Result, Seconds, Stats, Step
from specinfer.tree import BestFirst, Draw, TokenTree
from specinfer.viz.plots import (
    axes,
    measures,
    plot_acceptance,
    plot_calibration,
    plot_compare,
    plot_drafts,
    plot_mask,
    plot_timeline,
    plot_tree,
    trees,
)
from specinfer.viz.style import DARK, LIGHT

matplotlib.use("Agg")

from matplotlib import pyplot as plt

ODD = [
    "\n\n",
    "😀",
    "你好",
    "$x$",
    "<script>",
    "a" * 30,
    "\x00\x1b[31m",
    "\t \xa0",
    "\u202eabc",
    "",
    r"$\frac{1",
    "_{^",
    "é",
]


class OddTokenizer:
    """Decodes ids to the texts that plots stumble over."""

    convert_ids_to_tokens = staticmethod(lambda token: ODD[token % len(ODD)])
    decode = staticmethod(lambda ids: ODD[ids[0] % len(ODD)])


def two_drafts() -> TokenTree:
    """0 ── 1 (by 0 and 1) ── 2, 3 (by 1);  0 ── 4 ── 5 (by 0)."""
    nodes: dict[str, Any] = {"tokens": [10, 11, 12, 13, 14], "parents": [0, 1, 1, 0, 4]}
    draws = [(Draw(0, 0), Draw(1, 0)), (Draw(1, 0),), (Draw(1, 1),), (Draw(0, 1),), (Draw(0, 0),)]
    return TokenTree.from_nodes(9, scores=np.log([0.6, 0.5, 0.05, 0.3, 0.2]).tolist(), draws=draws, **nodes)


STEP = Step(two_drafts(), (1, 2), (10, 11, 7), (("a", "b"), ("b",), ()), Seconds(0.010, 0, 0.006, 0.003))
RESULT = Result(
    "", [10, 11, 7] * 2, [9], "length", None, Stats(6, 2, 2, (), Seconds(0.03, 0.008, 0.012, 0.006)), [STEP] * 2
)
HITS = HitTable("head", np.array([[6, 2], [2, 0], [0, 0]]), np.array([10, 5, 0]))


def curve(draft: str = "head") -> CalibrationCurve:
    accepted, count = np.array([1, 0, 5, 7]), np.array([9, 0, 10, 8])
    with np.errstate(invalid="ignore"):
        share = accepted / count
    return CalibrationCurve(draft, np.array([0.1, np.nan, 0.6, 0.9]), share, count, *wilson(accepted, count))


def gains(best: float) -> Any:
    sizes = [("chain 1", 1.5), ("chain 4", 2.0), ("tree 4", 2.0), ("tree 16", best)]
    made = [
        SimpleNamespace(tree=tree, tokens_per_pass=[value, value - 0.2, value + 0.2], speed_up=value / 2)
        for tree, value in sizes
    ]
    return SimpleNamespace(sizes=made, ideal=[4.0, 3.5, 4.5])


REPORT = SimpleNamespace(
    drafts=[SimpleNamespace(draft=name, grade="good", gains=gains(best)) for name, best in (("a", 3.0), ("$b", 2.5))],
    together=gains(3.2),
)


def comparison(*groups: dict[str, Any]) -> Any:
    return SimpleNamespace(summary=lambda: {"groups": list(groups)})


def group(name: str = "code", temperature: float = 0.0, ratios: bool = True) -> dict[str, Any]:
    ratio = {"autoregressive": [1.4, 1.2, 1.5]} if ratios else {}
    methods = {
        "autoregressive": {"tokens_per_pass": [1, 1, 1], "ratio": {}},
        "tree": {"tokens_per_pass": [2.5, 2.0, 2.6], "ratio": ratio},
        "a method of mine": {"tokens_per_pass": [1.5, 1.4, 1.6], "ratio": ratio},
    }
    return {"set": name, "temperature": temperature, "prompts": 5, "methods": methods}


PLOTS = {
    "tree": lambda ax=None: plot_tree(STEP, ax=ax),
    "bare tree": lambda ax=None: plot_tree(two_drafts(), ax=ax),
    "mask": lambda ax=None: plot_mask(STEP, prefix=40, ax=ax),
    "hits": lambda ax=None: plot_acceptance(HITS, ax),
    "acceptance": lambda ax=None: plot_acceptance([RESULT], ax),
    "compare": lambda ax=None: plot_compare(comparison(group("all"), group()), ax),
    "drafts": lambda ax=None: plot_drafts(REPORT, ax),
    "timeline": lambda ax=None: plot_timeline(RESULT, ax),
    "calibration": lambda ax=None: plot_calibration([curve(), curve("ngram")], ax),
}


@pytest.fixture(autouse=True)
def _no_warnings_and_no_figures_left() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # matplotlib's own, such as a glyph that is missing
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
    plt.close("all")


def drawn(ax: Any, gid: str) -> list[Any]:
    """The artists whose gid begins so, in drawing order."""
    return ax.findobj(lambda artist: (artist.get_gid() or "").startswith(gid))


def texts(ax: Any) -> list[str]:
    return [text.get_text() for text in drawn(ax, "node-")]


def bars(ax: Any) -> list[list[float]]:
    """The heights of each container's bars."""
    return [[bar.get_height() for bar in container] for container in ax.containers]


def key(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def signs(ax: Any) -> list[str]:
    """The words below a tree."""
    return [" ".join(words.split()) for words in re.split(r"   |\n", ax.get_xlabel()) if words]


# ---- manners ----


@pytest.mark.parametrize("plot", PLOTS.values(), ids=PLOTS)
def test_draws_into_the_given_axes_and_leaves_pyplot_alone(plot: Any) -> None:
    _, (ax, current) = plt.subplots(1, 2)
    plt.sca(current)
    before = dict(matplotlib.rcParams), plt.get_fignums()
    assert plot(ax) is ax
    assert plt.gca() is current
    assert (dict(matplotlib.rcParams), plt.get_fignums()) == before
    assert not current.has_data()
    ax.figure.canvas.draw()


@pytest.mark.parametrize("plot", PLOTS.values(), ids=PLOTS)
def test_makes_one_figure_without_axes(plot: Any) -> None:
    ax = plot()
    assert plt.get_fignums() == [ax.figure.number]
    ax.figure.canvas.draw()


@pytest.mark.parametrize("plot", PLOTS.values(), ids=PLOTS)
def test_draws_into_axes_of_no_grid_and_on_no_pyplot_figure(plot: Any) -> None:
    figure = matplotlib.figure.Figure()
    ax = figure.add_axes((0.2, 0.2, 0.6, 0.6))
    assert plot(ax) is ax
    box = ax.get_position()
    assert box.y1 == pytest.approx(0.8)
    assert all(other.get_position().y0 == pytest.approx(0.2) for other in figure.axes if other is not ax)
    assert plt.get_fignums() == []
    figure.savefig(StringIO(), format="svg")


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("", ".axes", ".trees", ".measures"):
        monkeypatch.delitem(sys.modules, f"specinfer.viz.plots{module}")
    for module in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, module, None)
    plots = importlib.import_module("specinfer.viz.plots")
    calls = [(plots.plot_tree, STEP), (plots.plot_mask, STEP), (plots.plot_timeline, RESULT)]
    calls += [
        (plots.plot_acceptance, HITS),
        (plots.plot_calibration, curve()),
        (plots.plot_compare, comparison(group())),
        (plots.plot_drafts, REPORT),
    ]
    for plot, data in calls:
        with pytest.raises(InputError, match="pip install matplotlib"):
            plot(data)


# ---- trees ----


@settings(PROPERTY, max_examples=15)
@given(token_trees(drafts=(0, 1, 2)))
def test_every_node_is_drawn_once(tree: TokenTree) -> None:
    """Boxes, edges, probabilities; one mark for each draft and node; the boxes are where `tidy` puts them."""
    ax = plot_tree(tree)
    assert texts(ax) == [str(token) for token in tree.tokens.tolist()]
    assert len({text.get_position() for text in drawn(ax, "node-")}) == len(tree)
    assert len(drawn(ax, "probability-")) == tree.num_drafted
    assert len(drawn(ax, "edge-")) == tree.num_drafted
    assert len(drawn(ax, "draft-")) == sum(mask.bit_count() for mask in tree.proposers)
    plt.close("all")


def test_what_became_of_a_node_is_told_by_mark_and_line() -> None:
    ax = plot_tree(STEP, drafts=["head", "ngram"])
    assert texts(ax) == ["9", "10 ✓", "11 ✓", "12 ✗", "13 ✗", "14", "7 +"]
    boxes = [text.get_bbox_patch() for text in drawn(ax, "node-")]
    looks = [(box.get_linestyle(), box.get_linewidth()) for box in boxes]
    assert (looks[1], looks[3]) == (looks[2], looks[4])
    assert len(set(looks)) == 5, "root, accepted, rejected, unreached, bonus"
    assert signs(ax) == ["● head", "▲ ngram", "✓ accepted", "✗ rejected", "┄ not reached", "+ bonus token"]
    by_draft = drawn(ax, "draft-")
    assert Counter(shape.get_text() for shape in by_draft) == {"●": 3, "▲": 3}
    assert len({shape.get_position() for shape in by_draft}) == 6, "no shape hides another"


def test_accepted_nodes_beyond_the_end_of_the_text_are_cut() -> None:
    ax = plot_tree(replace(STEP, tokens=(10,), drafted_by=(("a", "b"),)))
    assert texts(ax) == ["9", "10 ✓", "11 ✂", "12 ✗", "13 ✗", "14"]


def test_edges_are_as_wide_as_probable() -> None:
    tree = two_drafts()
    widths = np.array([edge.get_linewidth() for edge in drawn(plot_tree(tree), "edge-")])
    order = np.argsort([tree.probability(node) for node in range(1, 6)])
    assert (np.diff(widths[order]) >= 0).all()
    assert len(set(widths)) > 1


def test_an_inspection_brings_its_tokenizer_and_names() -> None:
    nodes = tuple(SimpleNamespace(state=state, position=4) for state in STEP.states)
    result = SimpleNamespace(tokenizer=OddTokenizer())
    prefix: Any = SimpleNamespace(rescorer=SimpleNamespace(draft_names=["head", "ngram", "by hand"], result=result))
    ax = plot_tree(StepInspection(0, STEP.tree, STEP.path, 7, nodes, "as decoded", STEP, prefix))
    assert "▲ ngram" in signs(ax)
    assert texts(ax)[1] == r"$\frac{1 ✓"


def test_figures_grow_with_the_tree_and_text_shrinks_with_the_axes() -> None:
    wide = TokenTree.from_nodes(
        0, list(range(63)), [0] * 63, [-1.0 - i for i in range(63)], [(Draw(0, i),) for i in range(63)]
    )
    small, large = plot_tree(two_drafts()), plot_tree(wide)
    assert large.figure.get_figheight() > 4 * small.figure.get_figheight()
    assert drawn(large, "node-")[1].get_fontsize() == drawn(small, "node-")[1].get_fontsize()
    _, ax = plt.subplots()
    assert drawn(plot_tree(wide, ax=ax), "node-")[1].get_fontsize() < drawn(small, "node-")[1].get_fontsize()
    assert plot_mask(wide).figure.get_figwidth() > plot_mask(two_drafts()).figure.get_figwidth()


def test_lines_of_a_tree_keep_their_distance_over_a_long_legend() -> None:
    ax = plot_tree(STEP, drafts=["a draft with a long name, " * 4] * 2)
    ax.figure.canvas.draw()
    lines = ax.get_window_extent().height / ax.figure.dpi / abs(np.diff(ax.get_ylim()))
    assert lines > 0.2, "inches"


def test_a_long_chain_has_a_figure_that_can_be_drawn() -> None:
    chain = TokenTree.from_nodes(0, [1] * 400, list(range(400)), [-1.0 * i for i in range(400)], [(Draw(0, 0),)] * 400)
    assert max(plot_tree(chain).figure.get_size_inches()) <= 60


@pytest.mark.parametrize("plot", [plot_tree, plot_mask])
def test_odd_tokens(plot: Any) -> None:
    """No mathtext, no glyph that fonts lack, no control characters, white space visible, nothing long."""
    count = len(ODD)
    draws = [(Draw(0, i),) for i in range(count)]
    tree = TokenTree.from_nodes(0, list(range(count)), [0] * count, [-1.0 * i for i in range(count)], draws)
    ax = plot(Step(tree, (), (4,), ((),)), OddTokenizer())
    shown = texts(ax)[1:-1] if plot is plot_tree else [label.get_text() for label in ax.get_xticklabels()][1:]
    shown = [text.removesuffix(" ✗") for text in shown]
    assert shown[0] == "⏎⏎"
    assert shown[3:6] == ["$x$", "<script>", "a" * 14 + "…"]
    assert shown[6:8] == [r"\x00\x1b[31m", r"⇥␣\xa0"]
    assert shown[9] == "∅"
    assert all(text.isprintable() for text in shown)
    picture = StringIO()
    ax.figure.savefig(picture, format="svg")
    assert "<script" not in picture.getvalue()


def test_bare_root() -> None:
    tree = TokenTree.root_only(3)
    assert texts(plot_tree(tree)) == ["3"]
    assert texts(plot_tree(Step(tree, (), (5,), ((),)))) == ["3", "5 +"]
    assert drawn(plot_mask(tree), "mask")[0].get_array().tolist() == [[2]]


@settings(PROPERTY, max_examples=15)
@given(token_trees())
def test_mask(tree: TokenTree) -> None:
    """Its cells are the ancestor mask, and its rows are the tree's text."""
    ax = plot_mask(tree)
    (cells,) = drawn(ax, "mask")
    assert (np.asarray(cells.get_array()) > 0).tolist() == tree.ancestor_mask().tolist()
    assert np.argwhere(np.asarray(cells.get_array()) == 2).tolist() == [[i, i] for i in range(len(tree))]
    assert "\n".join(label.get_text().rstrip() for label in ax.get_yticklabels()) == str(tree)
    assert [label.get_text() for label in ax.get_xticklabels()] == [str(token) for token in tree.tokens.tolist()]
    plt.close("all")


def test_mask_with_a_prefix() -> None:
    ax = plot_mask(two_drafts(), prefix=40)
    (prefix,) = drawn(ax, "prefix")
    assert prefix.get_x() + prefix.get_width() < -0.5
    assert prefix.get_height() == len(two_drafts())
    assert ax.get_xticklabels()[0].get_text() == "prefix"
    assert any("40" in label for label in key(ax))
    assert drawn(plot_mask(two_drafts()), "prefix") == []


# ---- figures ----


def test_hits_are_a_heat_map() -> None:
    ax = plot_acceptance(HITS)
    (cells,) = drawn(ax, "rates")
    np.testing.assert_allclose(cells.get_array().filled(-1), [[0.6, 0.2], [0.4, 0], [-1, -1]])
    assert [text.get_text() for text in ax.texts] == ["60%", "20%", "40%", "0%", "–", "–"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["1  (n = 10)", "2  (n = 5)", "3  (n = 0)"]
    assert ax.yaxis_inverted()


def test_acceptance_of_results(target: Any, near: Any) -> None:
    """The bars of one result are its own figures; those of several are pooled."""
    decoder = SpeculativeDecoder(target, drafts=[near], tree=BestFirst(8, 3))
    results = decoder.generate([[5, 9, 17, 5, 9], [40]], max_new_tokens=8)
    for result in results:
        (heights,) = bars(plot_acceptance(result))
        np.testing.assert_allclose(heights, result.stats.acceptance_by_depth)
    ax = plot_acceptance(results)
    drafted = sum(step.tree.num_drafted > 0 for result in results for step in result.steps)
    assert ax.texts[0].get_text().endswith(f"/{drafted}")


def test_comparison() -> None:
    ax = plot_compare(comparison(group("all"), group(temperature=1.0)))
    assert bars(ax) == [[1, 1], [2.5, 2.5], [1.5, 1.5]]
    assert len({container[0].get_hatch() or "" for container in ax.containers}) > 1
    assert key(ax) == ["autoregressive", "tree", "a method of mine"]
    (lower,) = [other for other in ax.figure.axes if other is not ax]
    assert [line.get_ydata().tolist() for line in drawn(lower, "ratio-")] == [[1.4, 1.4]] * 2
    assert [label.get_text() for label in lower.get_xticklabels()] == ["all sets\nn = 5\nT = 0", "code\nn = 5\nT = 1"]
    places = sorted(bar.get_x() for container in ax.containers for bar in container)
    assert (np.diff(places) >= ax.containers[0][0].get_width() - 1e-9).all(), "no bar hides another"


def test_comparison_without_incremental_decoding() -> None:
    alone = group(ratios=False)
    del alone["methods"]["autoregressive"]
    ax = plot_compare(comparison(alone))
    assert "not measured" in ax.figure.axes[1].texts[0].get_text()


def test_drafts_are_drawn_by_size() -> None:
    """A line for chains and one for trees of each draft; tokens above, speed-ups below, the bound faint."""
    ax = plot_drafts(REPORT)
    lower = next(other for other in ax.figure.axes if other is not ax)
    assert [line.get_ydata().tolist() for line in drawn(ax, "tokens-0")] == [[1.5, 2.0], [2.0, 3.0]]
    assert [line.get_ydata().tolist() for line in drawn(lower, "speed-2")] == [[0.75, 1.0], [1.0, 1.6]]
    assert len(drawn(ax, "ideal-")) == 3
    assert key(ax) == ["a (good)", "$b (good)", "all drafts", "ideal choice"]


def test_timeline() -> None:
    """The bars add up to the result's seconds, prompt first; the tokens above them to its tokens."""
    ax = plot_timeline(RESULT)
    heights = np.array(bars(ax))
    assert heights.shape == (4, 3)
    assert heights.sum() == pytest.approx(30)
    np.testing.assert_allclose(heights[:, 1], [0, 6, 3, 1])
    assert heights[:, 0].tolist() == pytest.approx([8, 0, 0, 2])
    assert sum(int(text.get_text()) for text in ax.texts) == RESULT.stats.new_tokens
    assert len({container[0].get_hatch() for container in ax.containers}) == 4


def test_calibration() -> None:
    ax = plot_calibration([curve(), curve("ngram")])
    lines = drawn(ax, "curve-")
    for line in lines:
        np.testing.assert_allclose(line.get_xdata(), [0.1, 0.6, 0.9])
        np.testing.assert_allclose(line.get_ydata(), [1 / 9, 1 / 2, 7 / 8])
    assert len({(line.get_marker(), line.get_linestyle()) for line in lines}) == 2
    (lower,) = [other for other in ax.figure.axes if other is not ax]
    assert bars(lower) == [[9, 10, 8]] * 2
    assert key(ax)[1] == f"head: ECE {curve().error:.3f}, n = 27"
    assert len(drawn(plot_calibration(curve()), "curve-")) == 1


# ---- wrong data ----

EMPTY = replace(RESULT, steps=[])
UNDRAFTED = replace(RESULT, steps=[Step(TokenTree.root_only(1), (), (2,), ((),))])


@pytest.mark.parametrize(
    ("plot", "arguments", "message"),
    [
        (plot_tree, (RESULT,), "result.steps"),
        (plot_tree, ([STEP],), "not a list"),
        (plot_tree, (STEP, "gpt2"), "str is not a tokenizer"),
        (plot_mask, (HITS,), "not a HitTable"),
        (plot_mask, (STEP, None, -1), "prefix is -1"),
        (plot_acceptance, (STEP,), "a HitTable, a Result"),
        (plot_acceptance, ([],), "nothing was drafted"),
        (plot_acceptance, (EMPTY,), "nothing was drafted"),
        (plot_acceptance, (UNDRAFTED,), "nothing was drafted"),
        (plot_acceptance, (replace(HITS, counts=np.zeros((0, 5), int), tried=np.zeros(0, int)),), "is empty"),
        (plot_compare, (RESULT,), "not a Result"),
        (plot_compare, (comparison(),), "is empty"),
        (plot_drafts, (RESULT,), "not a Result"),
        (plot_timeline, ([RESULT],), "not a list"),
        (plot_timeline, (EMPTY,), "no steps"),
        (plot_calibration, ([],), "CalibrationCurve"),
        (plot_calibration, (HITS,), "CalibrationCurve"),
        (plot_calibration, (replace(curve(), count=np.zeros(4, int)),), "observations"),
    ],
)
def test_wrong_data(plot: Any, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plot(*arguments)
    assert plt.get_fignums() == []


def test_every_method_has_looks_of_its_own():
    """In every picture the same, and no two alike."""
    assert axes.METHODS.keys() == set(METHODS)
    assert len({(colour, hatch) for colour, hatch, _ in axes.METHODS.values()}) == len(METHODS)


def test_colours_are_those_of_every_picture():
    """Of the palette that page, SVG and terminal have; but for black."""
    shared = {*LIGHT.values(), *DARK.values(), "black"}
    kinds = [*axes.METHODS.values(), *axes.STAGES.values(), *axes.OTHERS, *axes.DRAFTS]
    assert shared > {part for kind in kinds for part in kind if part.startswith("#") or part == "black"}
    for module in (axes, measures, trees):
        assert not re.search(r"#[0-9A-Fa-f]{6}", Path(module.__file__).read_text())
