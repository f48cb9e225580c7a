"""What the packages import is what the distribution declares, in versions that the tests run with."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import specinfer
import specinfer.attention
import specinfer.tree

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = ROOT / "constraints.txt"


def normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub("[-_.]+", "-", name).lower()


def requirements(extras: bool) -> list[Requirement]:
    groups = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"].values() if extras else ())]
    return [Requirement(line) for group in groups for line in group]


def imported(statements: list[ast.stmt], everywhere: bool) -> Iterator[str]:
    """Yield the top-level names that statements import: in functions and for type checkers, too, or when they run."""
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (alias.name.split(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and not statement.level:
            yield (statement.module or "").split(".")[0]
        elif everywhere or not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.If):
            yield from imported([n for n in ast.iter_child_nodes(statement) if not isinstance(n, ast.expr)], everywhere)


@pytest.mark.parametrize("everywhere", [False, True], ids=["at once", "when needed"])
def test_what_is_imported_is_declared(everywhere):
    """Modules that cannot be imported without a distribution need it always; what functions import, an extra has.

    So does what the server imports: nothing but its command imports it.
    """
    folders = {path for package in (specinfer, specinfer.tree, specinfer.attention) for path in package.__path__}
    files = {file for folder in folders for file in Path(folder).rglob("*.py")}
    files = {file for file in files if everywhere or file.parent.name != "serve"}
    names = {n for file in files for n in imported(ast.parse(file.read_text(encoding="utf-8")).body, everywhere)}
    declared = {normal(own.name) for own in requirements(extras=everywhere)}
    assert {"torch", "safetensors"} <= names
    assert {normal(name) for name in names - sys.stdlib_module_names - {"specinfer"}} <= declared


@pytest.mark.skipif(not CONSTRAINTS.exists(), reason="the wheel comes without")
def test_the_versions_that_the_tests_run_with_are_allowed():
    settings = dict(line.split("==") for line in CONSTRAINTS.read_text().splitlines() if "==" in line)
    versions = {normal(name): version for name, version in settings.items()}
    for own in requirements(extras=True):
        version = versions.get(normal(own.name))  # none is settings of what the tests do without
        assert version is None or own.specifier.contains(version), own
    assert {normal(own.name) for own in requirements(extras=False)} <= versions.keys()


@pytest.mark.skipif(not CONSTRAINTS.exists(), reason="the wheel comes without")
@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_no_versions_are_allowed_beyond_the_oldest_and_the_newest_that_are_tested(name: str) -> None:
    """`make test-oldest` and `make test-newest` run with them; the versions of all tests are between."""
    (requirement,) = (each for each in requirements(extras=False) if each.name == name)
    oldest, newest = map(Version, re.findall(rf"\b{name}==(\S+)", (ROOT / "Makefile").read_text()))
    (usual,) = map(Version, re.findall(rf"^{name}==(\S+)", CONSTRAINTS.read_text(), re.MULTILINE))
    bounds = {each.operator: Version(each.version) for each in requirement.specifier}
    assert bounds == {">=": oldest, "<": Version(f"{newest.major}.{newest.minor + 1}")}
    assert oldest < usual <= newest
