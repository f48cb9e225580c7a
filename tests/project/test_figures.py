"""The pages' figures are those of docs/figures/, and each is of a command that is there."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
FILES = sorted((ROOT / "docs" / "figures").glob("*.json"))

pytestmark = pytest.mark.skipif(not BENCHMARKS.exists(), reason="the benchmarks are not beside the tests (a wheel)")


@pytest.fixture(scope="module")
def script():
    """What `benchmarks/figures.py` defines."""
    return runpy.run_path(str(BENCHMARKS / "figures.py"))


def test_pages_say_what_the_files_say(script):
    """`python benchmarks/figures.py --pages` would write what is there."""
    pages = {path: path.read_text() for path in script["PAGES"]}
    assert [path.name for path, text in pages.items() if script["page"](text) != text] == []
    shown = [found[1] for text in pages.values() for found in script["BLOCK"].finditer(text)]
    assert sorted(shown) == sorted([*script["FIGURES"], "speed-summary"])


def test_a_changed_number_changes_its_page(script, monkeypatch):
    """In its block, and nowhere else."""
    (run,) = script["kept"]("turns")
    changed = [{**run, "rows": [{**run["rows"][0], "ms": 123_456}]}]
    monkeypatch.setitem(script["page"].__globals__, "kept", lambda name: changed if name == "turns" else [])
    text = "before\n<!-- figure: turns -->\nold\n<!-- end -->\nafter 470 ms\n"
    written = script["page"](text)
    assert "after 123,456 ms" in written
    assert "old" not in written
    assert written.startswith("before\n<!-- figure: turns -->\n")
    assert written.endswith("\n<!-- end -->\nafter 470 ms\n")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_figure_names_its_command_and_no_place_of_a_machine(path, script):
    runs = json.loads(path.read_text())
    assert {run["run"] for run in runs} <= {*script["FIGURES"][path.stem].runs}
    for run in runs:
        assert {"command", "machine", "versions", "commit", "date", "rows"} <= {*run}
        assert (ROOT / re.match(r"python (benchmarks/\w+\.py)\b", run["command"])[1]).exists()
        assert run["rows"]
    assert re.findall(r'(?:^|[\s"=:])(?:~|/[\w.]|[A-Z]:\\)\S*', path.read_text(), re.M) == []


def test_commands_take_the_options_that_they_are_given(script):
    """Each script of a figure's run knows them, and prints rows for programs."""
    for figure in script["FIGURES"].values():
        for run in figure.runs.values():
            own = (BENCHMARKS / run.script).read_text()
            known = own + (BENCHMARKS / "common.py").read_text()
            options = re.findall(r"(?<=\s)--[a-z-]+", " " + re.sub(r'"[^"]*"', "", run.command(fast=True)))
            assert [name for name in options if f'"{name}"' not in known] == []
            assert "--json" in options or '"--json"' not in own


def test_plots_are_there_for_both_papers(script):
    plots = [name for name, figure in script["FIGURES"].items() if figure.plot]
    wanted = {f"{name}-{paper}.svg" for name in plots for paper in ("light", "dark")}
    assert {path.name for path in (ROOT / "docs" / "figures").glob("*.svg")} == wanted
    assert sum((ROOT / "docs" / "figures" / name).stat().st_size for name in wanted) < 400_000


def test_what_is_missing_is_named(script, monkeypatch, tmp_path):
    """A variable, then the files in its folder; nothing where a run needs only the default target."""
    for name in script["PLACES"].values():
        monkeypatch.delenv(name, raising=False)
    lacking, options = script["lacking"], "--target MODELS/a.gguf --llama LLAMA MODELS/b.gguf"
    assert lacking("--rounds 9") == []
    assert lacking(options) == ["FIGURES_MODELS", "FIGURES_LLAMA"]
    monkeypatch.setenv("FIGURES_MODELS", str(tmp_path))
    monkeypatch.setenv("FIGURES_LLAMA", sys.executable)
    (tmp_path / "b.gguf").touch()
    assert lacking(options) == ["MODELS/a.gguf"]
