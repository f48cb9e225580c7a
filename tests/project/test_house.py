"""The house: imports point one way, lazy ones included, and every folder says what lives there."""

import ast
from graphlib import CycleError, TopologicalSorter
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


IMPORTED = {name: imported(path) for name, path in MODULES.items()}


def layer(name):
    """Return the number of a module's layer."""
    return next(number for number, names in enumerate(LAYERS) if name.split(".")[0] in names)


def test_imports_point_one_way():
    for name, others in IMPORTED.items():
        for other in others - {name}:
            packages = name.split(".")[0], other.split(".")[0]
            assert layer(other) <= layer(name), f"{name} imports {other}"
            assert packages not in APART, f"{name} imports {other}"


def above(name):
    """Return a module and the packages that it is in, whose `__init__.py` run before it."""
    parts = name.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts) + 1)}


def in_order(graph):
    """Return modules so that each stands behind those that it imports, the packages of these included.

    Then every module can be the first of all that is imported.  A package's own modules run while it does.

    Raises:
        CycleError: there is no such order.
    """
    needed = {name: {each for other in others if other for each in above(other)} for name, others in graph.items()}
    return [*TopologicalSorter({name: others - above(name) for name, others in needed.items()}).static_order()]


def test_every_module_can_be_imported_first():
    assert {*in_order(IMPORTED)} == {*IMPORTED}


@pytest.mark.parametrize(
    "graph",
    [
        {"left": {"right"}, "right": {"left"}},
        {"one": {"two.part"}, "one.part": set(), "two": {"one.part"}, "two.part": set()},  # through its package
    ],
)
def test_a_module_that_needs_another_one_first_is_noticed(graph):
    with pytest.raises(CycleError):
        in_order(graph)


def test_folders_have_no_cycles():
    """Layers allow what is in one line to import each other; folders do not."""
    graph = {}
    for name, others in IMPORTED.items():
        graph.setdefault(name.split(".")[0], set()).update(other.split(".")[0] for other in others)
    tuple(TopologicalSorter({name: others - {name} for name, others in graph.items() if name}).static_order())


def test_what_a_user_touches_is_little():
    """Eight modules beside the folders."""
    (root,) = map(Path, specinfer.__path__)
    assert len(list(root.glob("*.py"))) <= 8


def test_every_folder_says_what_it_is():
    for name, path in MODULES.items():
        if path.name == "__init__.py":
            assert (ast.get_docstring(ast.parse(path.read_text())) or "").strip(), name


def test_every_folder_of_modules_is_a_package():
    """A folder without `__init__.py` works from a checkout, and is missing from an installation."""
    assert {path.parent for path in MODULES.values()} == {
        path.parent for path in MODULES.values() if path.name == "__init__.py"
    }
