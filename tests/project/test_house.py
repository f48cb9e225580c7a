"""The house: imports point one way, lazy ones included, and every folder says what lives there."""

import ast
import importlib
import os
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import specinfer
import specinfer.attention
import specinfer.tree

# What may be imported by whom: a package imports packages of its own layer or of those before.
LAYERS = [
    ["errors", "common"],
    ["tree"],
    ["attention"],
    ["checkpoints", "loading", "results", "prompts", "grammar"],
    ["adaptive"],
    ["engine"],
    ["drafts"],
    ["calls"],
    ["decoder"],
    ["training", "evaluation", "batch"],
    ["viz"],
    ["integrations", "serve"],
    ["cli"],
    ["__main__", ""],  # the last is specinfer/__init__.py
]
APART = {("training", "evaluation"), ("evaluation", "training")}  # of one layer, and no business of each other
PACKAGES = (specinfer, specinfer.tree, specinfer.attention)


def modules():
    """Return every module's path by its name below `specinfer`."""
    found = {}
    for package in PACKAGES:
        (root,) = map(Path, package.__path__)
        above = package.__name__.split(".")[1:]
        for path in root.rglob("*.py"):
            parts = [*above, *path.relative_to(root).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def below(name):
    """Return a module's name below `specinfer`."""
    return name.removeprefix("specinfer").removeprefix(".")


def imported(path):
    """Return the modules below `specinfer` that a module imports anywhere in it: at once, lazily, or for types."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {name if below(name) in MODULES else node.module for name in whole}
    return {below(name) for name in names if name.split(".")[0] == "specinfer"} & set(MODULES)


def layer(name):
    """Return the number of a module's layer."""
    return next(number for number, names in enumerate(LAYERS) if name.split(".")[0] in names)


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name):
    for other in imported(MODULES[name]) - {name}:
        packages = name.split(".")[0], other.split(".")[0]
        assert layer(other) <= layer(name), f"{name} imports {other}"
        assert packages not in APART, f"{name} imports {other}"


def test_imports_have_no_cycles():
    """A module and the packages that it is in do not count: a package's modules run while it does."""
    graph = {
        name: {other for other in imported(path) if not f"{name}.".startswith(f"{other}.")}
        for name, path in MODULES.items()
    }
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError


def test_folders_have_no_cycles():
    """Layers allow what is in one line to import each other; folders do not."""
    graph = {}
    for name, path in MODULES.items():
        folder = name.split(".")[0]
        graph.setdefault(folder, set()).update(other.split(".")[0] for other in imported(path))
    tuple(TopologicalSorter({name: others - {name} for name, others in graph.items() if name}).static_order())


def test_what_a_user_touches_is_little():
    """Eight modules beside the folders."""
    (root,) = map(Path, specinfer.__path__)
    assert len(list(root.glob("*.py"))) <= 8


def test_every_folder_says_what_it_is():
    for name, path in MODULES.items():
        if path.name == "__init__.py":
            assert (ast.get_docstring(ast.parse(path.read_text())) or "").strip(), name


IMPORTED_FIRST = """
import gc, os, sys, traceback
from contextlib import suppress
first, names = (line.split() for line in sys.stdin)

def try_each(names):
    for name in names:
        folder = name.rpartition(".")[0]
        if name in sys.modules or folder and folder not in sys.modules:  # what its folder imports; what comes later
            continue
        child = os.fork()
        if not child:
            try:
                __import__(name)
                try_each([other for other in names if other.startswith(name + ".")])
            except BaseException:
                traceback.print_exc()
                print(name, flush=True)
            os._exit(0)
        os.waitpid(child, 0)

for name in first:  # which every child then has
    with suppress(Exception):
        __import__(name)
gc.disable()  # a collection would copy every page that children share
try_each(names)
"""


def alone(*names, first=(), **options):
    """Return which modules fail when they are the first of their package that is imported, others than ours apart."""
    command, given = [sys.executable, "-P", "-c", IMPORTED_FIRST], f"{' '.join(first)}\n{' '.join(names)}\n"
    return subprocess.run(command, input=given, capture_output=True, text=True, check=True, **options).stdout.split()


def test_every_module_imports_alone():
    """In any order: in a process of its own each, in which none of ours is imported but its folders, as always."""
    names = ["specinfer", *(f"specinfer.{name}" for name in MODULES if name not in ("", "__main__"))]
    for name in names:
        importlib.import_module(name)
    others = [name for name in sys.modules if name.split(".")[0] not in ("specinfer", "__main__")]
    assert alone(*names, first=others) == []


def test_a_module_that_needs_another_one_first_is_noticed(tmp_path):
    """Two modules that import each other's names work from one side only."""
    (tmp_path / "left.py").write_text("import right\nNAME = 1\n")
    (tmp_path / "right.py").write_text("from left import NAME\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    assert alone("left", "right", env=environment) == ["left"]


def test_every_folder_of_modules_is_a_package():
    """A folder without `__init__.py` works from a checkout, and is missing from an installation."""
    assert {path.parent for path in MODULES.values()} == {
        path.parent for path in MODULES.values() if path.name == "__init__.py"
    }
