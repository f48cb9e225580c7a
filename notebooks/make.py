"""Make each notebook from the text beside it, run it, and keep what it shows.

    python notebooks/make.py [notebooks/1_quick_start.py ...]

The texts are Python with cells (jupytext's py:percent).  A notebook runs in an empty folder; an error in a cell stops.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
SECONDS = 600  # for one cell


def made(source: Path) -> Any:
    """Return the notebook of a text, run."""
    notebook = jupytext.read(source)
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
    with TemporaryDirectory() as folder:
        NotebookClient(
            notebook, timeout=SECONDS, record_timing=False, resources={"metadata": {"path": folder}}
        ).execute()
    notebook.metadata["language_info"] = {"name": "python"}  # without the version that ran it
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]  # progress bars
    return notebook


if __name__ == "__main__":
    for source in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(FOLDER.glob("[0-9]*.py")):
        print(source.stem, flush=True)
        nbformat.write(made(source), source.with_suffix(".ipynb"))
