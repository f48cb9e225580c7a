"""The words: names that were given up for the field's words do not come back, in code or in prose."""

import ast
import io
import keyword
import re
import tokenize
from pathlib import Path

import pytest

import specinfer
import specinfer.attention
import specinfer.tree

# Parts of identifiers, in small letters. Comments and docstrings may use these words.
PRIVATE = re.compile(
    "laws?|taps?|tapped|sharpness|shipped|own|places?|rung|lacking|look|alike|extent|opening|coalitions?|habits|"
    "paces?|hinge|witness|opinion|shown|pin|pinned|identified"
)
# Identifiers that belong to other libraries.
FOREIGN = {
    "get_window_extent": "matplotlib",
}
# Words of comments, docstrings, other strings and pages: names as they were spelt, and words in any case.
RETIRED = re.compile(
    r"(?<![A-Za-z])(?:Walk|Widths|FeatureHead|FeatureDraft|Witness|Opinion|Habits|OneLate|meet_half_way|(?i:laws?|"
    r"feature\s+heads?|taps|sharpness|shipped\s+(?:draft|head)s?|incremental|rungs?|hinges?|coalitions?))(?![A-Za-z])"
)
PACKAGES = (specinfer, specinfer.tree, specinfer.attention)
PROGRAMS = sorted({path for package in PACKAGES for root in package.__path__ for path in Path(root).rglob("*.py")})
ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/*.md", "notebooks/*.py")
    for path in ROOT.glob(pattern)
    if path.name != "api.md"  # is written from docstrings
)


def tokens(source):
    """Return the tokens of a program."""
    return tokenize.generate_tokens(io.StringIO(source).readline)


def parts(name):
    """Return the words of an identifier, in small letters: split at underscores and capitals."""
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_]+", name)]


def private_names(source):
    """Return each identifier with a private word, by line."""
    return [
        f"{token.start[0]}: {token.string}"
        for token in tokens(source)
        if token.type == tokenize.NAME
        and not keyword.iskeyword(token.string)
        and token.string not in FOREIGN
        and any(map(PRIVATE.fullmatch, parts(token.string)))
    ]


def prose(source):
    """Yield the comments and strings of a program, each with its first line."""
    for token in tokens(source):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def retired_words(texts):
    """Return each retired word in numbered texts, by line."""
    return [
        f"{line + text.count(chr(10), 0, found.start())}: {found[0]}"
        for line, text in texts
        for found in RETIRED.finditer(text)
    ]


def by_file(paths, found_in):
    """Return what is found in the texts of files, by path, of those where there is something."""
    texts = {str(path): path.read_text(encoding="utf-8") for path in paths}
    return {path: found for path, text in texts.items() if (found := found_in(text))}


def test_identifiers_are_no_private_words():
    """Say what a thing is: `row_ids`, `columns`, `capacity_left`."""
    assert by_file(PROGRAMS, private_names) == {}


def test_comments_and_strings_have_the_fields_words():
    assert by_file(PROGRAMS, lambda source: retired_words(prose(source))) == {}


@pytest.mark.skipif(not PAGES, reason="the documents are not beside the tests (an installed wheel)")
def test_pages_have_the_fields_words():
    assert by_file(PAGES, lambda text: retired_words([(1, text)])) == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("own = 1\n", ["1: own"]),
        ("x = 1\nfor own_keys in x: pass\n", ["2: own_keys"]),
        ("def f(LawOfTokens): pass\n", ["1: LawOfTokens"]),
        ("class KVTaps: pass\n", ["1: KVTaps"]),
        ("x.look(rung2=0)\n", ["1: look", "1: rung2"]),
        ("[place for place in x]\n", ["1: place", "1: place"]),
        ("x.get_window_extents()\nextent = 0\n", ["2: extent"]),
    ],
)
def test_a_private_identifier_is_found(source, found):
    assert private_names(source) == found


@pytest.mark.parametrize(
    "source",
    [
        "known = owner = placeholder = lawn = flaws = showing = 0\n",
        "axes.get_window_extent()\n",
        "x = 'own place'  # look, it is shown in its own place\n",
    ],
)
def test_other_identifiers_pass(source):
    assert private_names(source) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("# the draft's law\n", ["1: law"]),
        ('"""A page.\n\nThe taps of a model.\n"""\n', ["3: taps"]),
        ("x = f'{y} by incremental decoding'\n", ["1: incremental"]),
        ('def f():\n    """Return a feature\n    head."""\n', ["2: feature\n    head"]),
        ("x = 'Widths((1, 2))'\n", ["1: Widths"]),
        ("x['same_as_incremental'] = y  # `without_laws`\n", ["1: laws", "1: incremental"]),
        ("# a Hinge, or a coalition\n", ["1: Hinge", "1: coalition"]),
        ("x = 0  # the shipped draft's Sharpness\n", ["1: shipped draft", "1: Sharpness"]),
    ],
)
def test_a_retired_word_is_found(source, found):
    assert retired_words(prose(source)) == found


@pytest.mark.parametrize("text", ["a verifier walks the tree", "flaws", "tree widths", "a tap on the screen"])
def test_other_words_pass(text):
    assert retired_words([(1, text)]) == []
