"""The committed notebooks are made from their texts, and are fit to be read on the web.  Nothing is executed here."""

import json
import re
import runpy
from base64 import b64decode
from io import BytesIO
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))
BYTES = 1_500_000  # of all notebooks

pytestmark = pytest.mark.skipif(not SOURCES, reason="the notebooks are not beside the tests (an installed wheel)")
each_notebook = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def notebook(source):
    """The notebook that was made from a text."""
    return json.loads(source.with_suffix(".ipynb").read_text(encoding="utf-8"))


def outputs(source):
    """What its cells show, in order."""
    return [output for cell in notebook(source)["cells"] for output in cell.get("outputs", ())]


def test_there_are_six_and_each_has_its_text():
    """No notebook without a text, no text without a notebook."""
    assert len(SOURCES) == 6
    assert sorted(FOLDER.glob("*.ipynb")) == [source.with_suffix(".ipynb") for source in SOURCES]


def test_they_are_small():
    """A clone does not wait for them."""
    assert sum(path.stat().st_size for path in FOLDER.glob("*.ipynb")) < BYTES


@each_notebook
def test_the_cells_are_the_texts(source):
    """`make notebooks` was run after the last edit."""
    text = runpy.run_path(str(FOLDER / "make.py"))["read"](source)
    made = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook(source)["cells"]]
    assert made == [(cell.cell_type, cell.source) for cell in text.cells], "run make notebooks"


@each_notebook
def test_every_cell_ran_in_order(source):
    """From the first to the last, once."""
    counts = [cell["execution_count"] for cell in notebook(source)["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))


@each_notebook
def test_outputs_are_fit_to_be_read(source):
    """No error, no noise, no path of the machine that ran it."""
    shown = outputs(source)
    assert {output["output_type"] for output in shown} <= {"stream", "display_data", "execute_result"}
    assert {output.get("name") for output in shown} <= {None, "stdout"}
    texts = ["".join(text) for o in shown for text in (o.get("text", ""), o.get("data", {}).get("text/plain", ""))]
    assert [found for text in texts for found in re.findall(r"(?:/home|/root|/tmp|/usr|/work|/Users)/\S*", text)] == []
    assert [text for text in texts if "%|" in text or "Warning" in text or " at 0x" in text] == []


@each_notebook
def test_tables_are_not_wrapped(source):
    """A notebook's page takes 100 columns; prose may be wrapped, columns of figures may not."""
    lines = [line for output in outputs(source) for line in "".join(output.get("text", "")).split("\n")]
    assert [line for line in lines if len(line) > 100 and len(re.findall(r"\S {2,}(?=\S)", line)) > 2] == []


@each_notebook
def test_pictures_can_be_seen_on_dark_pages(source):
    """They bring their own background."""
    image = pytest.importorskip("matplotlib.image")
    for output in outputs(source):
        if picture := output.get("data", {}).get("image/png"):
            pixels = image.imread(BytesIO(b64decode(picture)))
            assert pixels.shape[2] == 3 or pixels[..., 3].min() == 1


@each_notebook
def test_it_installs_what_it_needs(source):
    """In the first cell below the title, and only where it is missing."""
    first = next(cell for cell in notebook(source)["cells"] if cell["cell_type"] == "code")
    assert re.search(r"^except ImportError:.*\n    %pip install", "".join(first["source"]), re.MULTILINE)
    assert first["outputs"] == []


@each_notebook
def test_a_reader_without_scripts_sees_pictures(source):
    """Pictures are images; what needs a script comes with text that needs none."""
    data = [output["data"] for output in outputs(source) if "data" in output]
    assert sum("image/png" in own for own in data) >= 2
    for own in data:
        if "text/html" in own:
            assert re.search(r"<pre[^>]*>\s*\S", "".join(own["text/html"]))
