"""Type checkers and editors find the package after an editable install, from any folder."""

import importlib
import importlib.util
import site
from pathlib import Path

import pytest

modulefinder = pytest.importorskip("mypy.modulefinder")


def listed_folders() -> list[str]:
    """The folders in which a type checker looks: site-packages, and those that .pth files name.  It runs no hooks."""
    folders = site.getsitepackages()
    files = [file for folder in folders for file in Path(folder).glob("*.pth")]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [*folders, *(line for line in lines if line and not line.startswith("import"))]


@pytest.mark.parametrize("name", ["specinfer", "specinfer.decoder", "specinfer.tree", "specinfer.attention.model"])
def test_a_type_checker_finds_modules(name: str) -> None:
    paths = modulefinder.SearchPaths((), (), tuple(listed_folders()), ())
    found = modulefinder.FindModuleCache(paths, None, None).find_module(name)
    assert isinstance(found, str), found
    assert Path(found).samefile(str(importlib.import_module(name).__file__))


@pytest.mark.parametrize("name", ["tree", "attention"])
def test_folders_of_the_checkout_are_no_packages(name: str) -> None:
    """They are parts of specinfer, and `tree` is another distribution's name."""
    assert importlib.util.find_spec(name) is None
