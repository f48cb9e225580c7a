"""The public surface: every name is there, documented, and importing the package costs next to nothing."""

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import specinfer
import specinfer.attention
import specinfer.tree
from specinfer import errors

PACKAGES = [specinfer, specinfer.tree, specinfer.attention]


def modules():
    """Every module of the three packages."""
    names = {package.__name__ for package in PACKAGES}
    for package in PACKAGES:
        names |= {f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__)}
    return sorted(names)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_all_is_sorted_and_every_name_imports(package):
    """`from package import *` works and lists names in order, none twice."""
    assert list(package.__all__) == sorted(set(package.__all__))
    for name in package.__all__:
        assert getattr(package, name) is not None


def test_the_top_level_is_small_and_type_checkers_see_it():
    """Whoever needs more imports it from where it lives; `dir` and the imports for type checkers name the same."""
    assert len(specinfer.__all__) <= 20
    assert dir(specinfer) == specinfer.__all__
    tree = ast.parse(Path(specinfer.__file__).read_text(encoding="utf-8"))
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    aliases = [(node.module, alias) for node in imports for alias in node.names if alias.asname]
    imported = {alias.asname: f"{module}.{alias.name}" for module, alias in aliases}
    assert imported == {name: f"{specinfer._HOME[name]}.{name}" for name in specinfer.__all__}


def test_names_come_from_where_they_are_said_to_live():
    """A name of the top level is its home module's object; another one is there, and an error says so."""
    for name, module in specinfer._HOME.items():
        thing = getattr(importlib.import_module(module), name)
        if name in specinfer.__all__:
            assert getattr(specinfer, name) is thing
        else:
            with pytest.raises(AttributeError, match=rf"specinfer\.{name} is {module}\.{name}: import it from there"):
                getattr(specinfer, name)


def test_unknown_names_are_attribute_errors():
    """A misspelt name says which."""
    with pytest.raises(AttributeError, match="SpeculativeDecoderr"):
        specinfer.SpeculativeDecoderr  # noqa: B018


@pytest.mark.parametrize("module", ["specinfer", "specinfer.errors", "specinfer.cli"])
def test_importing_is_light(module):
    """Neither torch nor transformers nor numpy is imported before it is needed."""
    code = (
        f"import sys; before = set(sys.modules); import {module}; new = set(sys.modules) - before; "
        "heavy = {'torch', 'transformers', 'numpy', 'networkx', 'scipy', 'tokenizers'} & new; "
        "assert not heavy, heavy; print(len(new))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < (60 if module == "specinfer" else 500)


@pytest.mark.parametrize("name", modules())
def test_everything_public_is_documented(name):
    """Modules, public classes, functions, methods and properties have docstrings."""
    module = importlib.import_module(name)
    assert inspect.getdoc(module)
    for own, value in vars(module).items():
        if own.startswith("_") or getattr(value, "__module__", None) != name:
            continue
        if inspect.isfunction(value):
            assert inspect.getdoc(value), own
        if inspect.isclass(value):
            assert value.__doc__, own
            for member, method in vars(value).items():
                if not member.startswith("_") and (inspect.isfunction(method) or isinstance(method, property)):
                    assert inspect.getdoc(method), f"{own}.{member}"


def test_every_error_is_a_specinfer_error():
    """One base class catches everything, and each has a docstring that says when."""
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    assert len(classes) > 8
    for error in classes:
        assert issubclass(error, specinfer.SpecinferError)
        assert error.__doc__
        assert error.__name__ in errors.__doc__ or error is specinfer.SpecinferError


def test_the_version_is_the_distributions():
    """`specinfer.__version__` is what is installed."""
    from importlib.metadata import version

    assert specinfer.__version__ == version("specinfer")


UNINSTALLED = """
import importlib.metadata as metadata, sys
found = metadata.Distribution.from_name

def hidden(name):
    if name == "specinfer":
        raise metadata.PackageNotFoundError(name)
    return found(name)

metadata.Distribution.from_name = hidden
from specinfer import cli
from specinfer.common.versions import versions
print("specinfer", versions()["specinfer"])
sys.argv = ["specinfer", "--version"]
cli.main()
"""


def test_a_tree_that_is_not_installed_knows_its_version():
    """Results name it, and so does the command; there is no metadata to ask."""
    done = subprocess.run([sys.executable, "-c", UNINSTALLED], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"specinfer {specinfer.__version__}"] * 2
