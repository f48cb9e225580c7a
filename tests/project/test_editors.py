"""Type checkers and editors find the package after an editable install, and know its calls."""

import importlib
import importlib.machinery
import inspect
import re
import site
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from transformers import GenerationConfig

from specinfer import SpeculativeDecoder
from specinfer.engine import sampling
from specinfer.engine.options import ChatOptions, ConfigOptions, Inputs, Options, PerRow, UsualOptions, names
from specinfer.grammar.asked import GrammarOptions

modulefinder = pytest.importorskip("mypy.modulefinder")

# fields of `GenerationConfig` that describe a file, or belong to assisted decoding and compiling, and change no text
OTHERS = {"_from_model_config", "transformers_version", "is_assistant", "disable_compile"}
OTHERS |= {"assistant_lookbehind", "target_lookbehind"}
METHODS = {"generate", "generate_many", "stream", "open", "prepare"}
CHECKED = """
from typing import Any, assert_type

from specinfer import BestFirst, Result, SpeculativeDecoder
from specinfer.calls.run import Run
from specinfer.calls.scoring import Score
from specinfer.calls.text_stream import TextStream
from specinfer.engine.requests import Request

decoder = SpeculativeDecoder(object(), None, ["ngram"], BestFirst(4, 2), compile=False)
decoder.generate("a", max_new_tokens=4, temperature=0.5, top_p=0.9, top_k=5, seed=1, stop_strings=["b"], max_rows=2)
decoder.generate(["a", "b"], temperature=[0.7, 0], seed=[1, 2], repetition_penalty=1.1, tools=None, raw=True)
assert_type(decoder.generate("a"), Result)
assert_type(decoder.generate([1, 2]), Result)
assert_type(decoder.generate([{"role": "user", "content": "a"}]), Result)
assert_type(decoder.generate(["a", "b"], max_rows=4), list[Result])
assert_type(decoder.generate([[1, 2], [3]]), list[Result])
assert_type(decoder.generate("a", num_return_sequences=2, temperature=1.0), Any)
assert_type(decoder.generate(input_ids=[1]), Any)
assert_type(decoder.score("a", "b"), Score)
assert_type(decoder.score(["a"], ["b"], raw=True), list[Score])
assert_type(decoder.stream("a", seed=1), TextStream)
assert_type(decoder.open("a", logprobs=True), Run)
assert_type(decoder.scheduler(4).add(decoder.prepare("a", seed=1)), Request)
assert_type(next(iter(decoder.generate_many(["a"], seed=1))).result, Result | None)
decoder.generate("a", max_new_token=4)  # refused
decoder.generate("a", max_new_tokens="4")  # refused
decoder.generate("a", num_beams=4)  # refused
decoder.stream("a", temprature=0.5)  # refused
decoder.stream("a", top_k=0.5)  # refused
decoder.prepare("a", topk=5)  # refused
decoder.open("a", tools="weather", enable_thinking=3)  # refused
decoder.generate_many(["a"], streamer=None)  # refused
decoder.score("a", "b", temperature=1.0)  # refused
SpeculativeDecoder(object(), None, ["ngram"], BestFirst(4, 2), None)  # refused
SpeculativeDecoder.from_pretrained("target", "ngram", "auto", None)  # refused
"""
CONFIGURATION = """
[mypy]
follow_imports = silent
[mypy-torch.*,transformers.*,numpy.*,networkx.*,huggingface_hub.*]
follow_imports = skip
"""


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
    paths = [path for path in sys.path if "tests" not in Path(path).parts]
    assert importlib.machinery.PathFinder.find_spec(name, paths) is None


def test_a_type_checker_knows_options_and_results(tmp_path: Path) -> None:
    """It refuses what would raise when it ran, and nothing else; results have the types that they have then."""
    from mypy import api

    (tmp_path / "checked.py").write_text(CHECKED)
    (tmp_path / "mypy.ini").write_text(CONFIGURATION)
    said, errors, _ = api.run(
        [str(tmp_path / "checked.py"), f"--config-file={tmp_path / 'mypy.ini'}", f"--cache-dir={tmp_path}"]
    )
    assert not errors
    found = {int(line.split(":")[1]): line for line in said.splitlines() if ": error: " in line}
    refused = [number for number, line in enumerate(CHECKED.splitlines(), 1) if line.endswith("# refused")]
    assert sorted(found) == refused, said


def named(table: Sequence[tuple[Any, ...]]) -> set[str]:
    """The options of one of the engine's tables."""
    return {name for names, *_ in table for name in names.split()}


def test_options_are_what_the_engine_honours() -> None:
    """Every field of transformers' configuration is taken, refused with a reason, or known to change nothing."""
    checked, refused = named(sampling._POSSIBLE) | named(sampling._TOKENS), named(sampling._REFUSED)
    fields = vars(GenerationConfig()).keys()
    typed = {*names(UsualOptions), *names(ConfigOptions), "num_return_sequences"} - {"seed"}
    assert typed == checked
    assert typed == fields - refused - OTHERS
    assert fields >= typed | OTHERS
    assert not refused & {*names(Options)}
    kinds = [PerRow[int], PerRow[float], PerRow[bool]]
    per_row = {name for name, hint in get_type_hints(Options).items() if hint in kinds}
    assert per_row == {*sampling.PER_ROW}


@pytest.mark.parametrize("name", sorted(METHODS | {"score"}))
def test_signatures_show_options(name: str) -> None:
    """To `help` and notebooks, as to type checkers."""
    shown = inspect.signature(getattr(SpeculativeDecoder, name)).parameters
    assert {"tools", "enable_thinking", "raw"} <= shown.keys()
    assert ({*names(UsualOptions)} <= shown.keys()) == (name in METHODS)
    assert (shown.keys() >= {*names(Options)} - {*names(ConfigOptions)}) == (name in METHODS)
    assert ("ConfigOptions" in str(shown.get("options"))) == (name in METHODS)


def test_every_option_is_documented() -> None:
    """Each in the docstring of its type, in the type's order."""
    texts = [
        inspect.getdoc(kind) or ""
        for kind in (UsualOptions, GrammarOptions, ChatOptions, Inputs, ConfigOptions, Options)
    ]
    told = [name for text in texts for name in re.findall(r"^    (\w+): ", text.split("Attributes:")[1], re.M)]
    assert told == names(Options)
