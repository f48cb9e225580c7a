"""What is shown of trees and results: the description, the page as a file, the still picture.  No browser here."""

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from conftest import PROMPTS, HostileTokenizer, like
from hypothesis import given
from strategies import PROPERTY, token_trees

from specinfer import BestFirst, Sampled, SpeculativeDecoder, TokenTree, inspect
from specinfer.results import Result, State
from specinfer.tree.drawing import visible
from specinfer.viz import fragment, page, picture
from specinfer.viz.description import describe
from specinfer.viz.html import in_script, to_json
from specinfer.viz.token_text import token_text

SVG = "{http://www.w3.org/2000/svg}"
COLUMNS = ("tokens", "parents", "q", "draws")
INSPECTED = ("p", "noise", "margin", "top", "why")  # of one that was sampled and coupled


@pytest.fixture(scope="module")
def hostile(target, near):
    """A decoder all of whose text would be markup."""
    return SpeculativeDecoder(target, HostileTokenizer(), drafts=["ngram", near], tree=BestFirst(12, 5))


@pytest.fixture(scope="module")
def things(hostile):
    """One of each thing that shows itself, by name."""
    result = hostile.generate(PROMPTS[2], max_new_tokens=16, temperature=1.0, seed=1)
    inspection = inspect(hostile, result, temperature=1.0)
    edited = inspection.step(0).with_branch(0, [1, 2])
    step = result.steps[0]
    every = [result, inspection, step, step.tree, edited]
    return {type(thing).__name__: thing for thing in every}


def described(thing):
    """What the page draws."""
    return describe(thing).to_dict()


NAMES = ["Result", "Inspection", "Step", "TokenTree", "StepInspection"]


# ---- tokens ----


def test_tokens_are_shown_as_text_with_visible_white_space(tokenizer):
    """Text as it is, bytes of a character as escapes, unknown ids by number, ids where there is no tokenizer."""
    space, euro = tokenizer(" ")["input_ids"][0], tokenizer("€")["input_ids"]
    assert token_text(tokenizer, space) == "␠"
    assert [token_text(tokenizer, token) for token in euro] == ["\\xe2", "\\x82", "\\xac"]
    assert token_text(tokenizer, 263) == "#263"
    assert token_text(None, 263) == "263"


def test_a_first_space_that_decoding_drops_is_shown():
    """Tokenizers of the SentencePiece kind write it as ▁, and bytes as <0xE2>."""

    class Pieces:
        def decode(self, ids):
            return {0: "the", 1: "\ufffd"}[ids[0]]

        def convert_ids_to_tokens(self, token):
            return {0: "▁the", 1: "<0xE2>"}[token]

    assert [token_text(Pieces(), token) for token in (0, 1)] == ["␠the", "\\xe2"]


# ---- the data ----


@pytest.mark.parametrize("name", NAMES)
def test_the_data_is_whole_and_plain_json(things, name):
    """Every column has an entry per node; every id has a text; it survives JSON."""
    data = described(things[name])
    assert json.loads(to_json(data)) == data
    assert data["shows"] == name
    assert data["steps"]
    for step in data["steps"]:
        nodes = len(step["tokens"])
        inspected = name in ("Inspection", "StepInspection")
        for column in (*COLUMNS, *(INSPECTED if inspected else ())):
            assert len(step[column]) == nodes
        assert len(step["lines"]) == nodes + (step["bonus"] is not None)
        assert (step["states"] is None) == (name == "TokenTree")
        assert {str(token) for token in [*step["tokens"], *step["emitted"]]} <= set(data["texts"])
        for draws in step["draws"][1:]:
            assert all(draft < len(data["drafts"]) for draft, _ in draws)


def test_the_data_of_a_result_is_its_steps(things):
    """Positions go on where the step before ended; what was emitted is the text."""
    result, data = things["Result"], described(things["Result"])
    assert [token for step in data["steps"] for token in step["emitted"]] == result.token_ids
    position = len(result.prompt_ids) - 1
    for step, own in zip(data["steps"], result.steps, strict=True):
        assert step["position"] == position
        assert step["states"] == [str(state) for state in own.states]
        assert step["q"][1:] == pytest.approx([own.tree.probability(i) for i in range(1, len(own.tree))], rel=1e-2)
        position += len(own.tokens)
    assert data["drafts"] == ["ngram", "LlamaForCausalLM"] or len(data["drafts"]) == 2


def test_what_an_inspection_adds_is_in_the_data(things):
    """Rounded to three digits, node by node."""
    inspection, data = things["Inspection"], described(things["Inspection"])
    assert data["rule"] == "coupled"
    for step, own in zip(data["steps"], inspection.steps, strict=True):
        for i, node in enumerate(own.nodes):
            for column in ("p", "q", "noise", "margin"):
                value = getattr(node, column)
                finite = value is not None and abs(value) < 1e300
                assert step[column][i] == (pytest.approx(value, rel=1e-2) if finite else None)
            assert step["why"][i] == own.why(i)


@pytest.mark.parametrize(("options", "rule"), [({}, "greedy"), ({"temperature": 1.0, "seed": 1}, "coins")])
def test_the_rule_is_told_by_the_nodes(target, near, options, rule):
    """Greedy choices or coins."""
    decoder = SpeculativeDecoder(target, drafts=[near], tree=Sampled((2, 1)) if rule == "coins" else BestFirst(4, 2))
    result = decoder.generate(PROMPTS[0], max_new_tokens=4, **options)
    options.pop("seed", None)
    assert described(inspect(decoder, result, **options))["rule"] == rule
    assert described(result)["rule"] is None


def test_states_of_a_step():
    """Accepted, rejected, not reached; in a sampled tree what comes after an accepted draw was not tried."""
    from specinfer.results import Step
    from specinfer.tree import Draw, Kind

    def step(kind, path):
        nodes = [5, 6, 7], [0, 0, 1], [-0.1, -0.2, -0.3], [[Draw(0, 0)], [Draw(0, 1)], [Draw(0, 0)]]
        tree = TokenTree.from_nodes(1, *nodes, kind=kind)
        return Step(tree, path, (*tree.tokens[list(path)].tolist(), 9), ((),))

    first, below, second = 1, 2, 3
    ranked = step(Kind.RANKED, (first,)).states
    assert [ranked[i] for i in (0, first, below, second)] == [
        State.ROOT,
        State.ACCEPTED,
        State.REJECTED,
        State.REJECTED,
    ]
    assert step(Kind.IID, (first,)).states[second] is State.UNREACHED
    assert step(Kind.IID, (second,)).states[first] is State.REJECTED
    assert step(Kind.RANKED, (second,)).states[below] is State.UNREACHED


# ---- the page ----


class Page(HTMLParser):
    """Counts tags and remembers attributes and scripts, as a browser would read them."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.scripts, self.text = [], [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        """Take note of an element."""
        self.tags.append(tag)
        self.attributes += [(name, value) for name, value in attrs]
        self.scripts += [""] if tag == "script" else []

    def handle_data(self, data):
        """Take note of text, or of a script's source."""
        if self.tags and self.tags[-1] == "script" and self.cdata_elem == "script":
            self.scripts[-1] += data
        else:
            self.text += data


@pytest.mark.parametrize("name", NAMES)
def test_no_text_of_a_model_becomes_markup(things, name):
    """The page has its own tags and no others, and the data inside its one script is the model's."""
    data = described(things[name])
    read = Page(page(things[name]))
    own = ["html", "head", "meta", "meta", "meta", "link", "title", "style", "body", "div", "pre", "script"]
    assert read.tags == own
    assert not [name for name, _ in read.attributes if name.startswith("on") or name == "src"]
    assert [value for name, value in read.attributes if name == "href"] == ["data:,"]
    call = read.scripts[0][read.scripts[0].rindex("\nfillAll(") :]
    assert not set("<>&\u2028\u2029") & set(call)
    arguments = call.strip().removeprefix("fillAll(").removesuffix("})();").strip().removesuffix(");")
    assert json.loads(f"[{arguments}]")[2] == data


@pytest.mark.parametrize("text", [*HostileTokenizer.TEXTS, "plain", "é漢🙂"])
def test_what_stands_in_a_script_is_equal_json_without_markup(text):
    """Escapes change how it is written, not what it is."""
    written = in_script({text: [text]})
    assert json.loads(written) == {text: [text]}
    assert not set("<>&\u2028\u2029") & set(written)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_fetched_from_anywhere(things, name):
    """No address but the name of a namespace; no imports, no requests."""
    text = page(things[name]) + picture(things[name])
    assert set(re.findall(r"https?://[^\s\"'`<)]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(|<link[^>]+stylesheet", text)


def test_templates_hold_no_markup_from_strings():
    """The script makes elements and text nodes; it never parses a string as markup or code."""
    from importlib.resources import files

    source = files("specinfer.viz").joinpath("page.js").read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|</", source)


def test_a_page_of_128_tokens_is_small(target, near):
    """Under 300 kB, inspected, with full trees."""
    decoder = SpeculativeDecoder(target, HostileTokenizer(), drafts=[near], tree=BestFirst(16, 8))
    result = decoder.generate(PROMPTS[0], max_new_tokens=128)
    assert len(inspect(decoder, result).to_html().encode()) < 300_000
    assert len(result.to_html().encode()) < 200_000


@pytest.mark.parametrize("name", NAMES)
def test_files_hold_what_is_returned(things, name, tmp_path):
    """to_html, to_svg and to_json write what they return, in UTF-8."""
    for method in ("to_html", "to_svg", "to_json"):
        path = tmp_path / method
        text = getattr(things[name], method)(path)
        assert path.read_text(encoding="utf-8") == text == getattr(things[name], method)()


def test_a_tokenizer_can_be_given_to_what_has_none(things, tokenizer):
    """A tree that belongs to no result knows ids only."""
    tree = TokenTree.from_dict(things["TokenTree"].to_dict())
    assert described(tree)["texts"] == {str(token): str(token) for token in tree.tokens.tolist()}
    texts = json.loads(tree.to_json(tokenizer=HostileTokenizer()))["texts"]
    assert set(texts.values()) <= set(map(visible, HostileTokenizer.TEXTS))


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_show_a_fragment(things, name):
    """One element and one script, with text for where scripts do not run; equal things have equal fragments."""
    shown = things[name]._repr_html_()
    assert Page(shown).tags == ["div", "pre", "script"]
    assert shown == things[name]._repr_html_() == fragment(things[name])
    if name == "Result":
        assert things[name].text.replace("\x00", "") in Page(shown).text.replace("\x00", "")


def test_a_result_without_tokenizer_or_drafts_is_shown_too(target):
    """Ids, and trees that are bare roots."""
    result = SpeculativeDecoder(target, tree=None).generate(PROMPTS[0], max_new_tokens=3)
    assert isinstance(result, Result)
    data = described(result)
    assert data["drafts"] == []
    assert [step["tokens"] for step in data["steps"]] == [[step.tree.tokens[0]] for step in result.steps]
    assert ET.fromstring(picture(result)) is not None


# ---- the still picture ----


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_is_well_formed_and_inert(things, name):
    """XML with hostile text in it, no script, no event, and styles that name their own class only."""
    root = ET.fromstring(picture(things[name]))
    assert root.tag == f"{SVG}svg"
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {
        "svg",
        "title",
        "style",
        "rect",
        "path",
        "text",
    }
    assert not [key for element in root.iter() for key in element.attrib if key.startswith("on")]
    style = root.findtext(f"{SVG}style")
    rules = re.findall(r"([^{}]+)\{[^{}]*\}", style.removeprefix("@media (prefers-color-scheme:dark){"))
    assert rules
    assert all(rule.startswith(".specinfer-svg ") for rule in rules)


@PROPERTY
@given(token_trees())
def test_every_node_is_in_the_picture_and_none_overlap(tree):
    """A box per node and one for the paper, apart from each other and inside the picture."""
    root = ET.fromstring(picture(tree))
    paper, *boxes = [{k: float(b.get(k)) for k in ("x", "y", "width", "height")} for b in root.iter(f"{SVG}rect")]
    assert len(boxes) == len(tree)
    for i, box in enumerate(boxes):
        assert 0 < box["x"] < box["x"] + box["width"] < paper["width"]
        assert 0 < box["y"] < box["y"] + box["height"] < paper["height"]
        for other in boxes[:i]:
            apart_x = box["x"] >= other["x"] + other["width"] or other["x"] >= box["x"] + box["width"]
            assert apart_x or abs(box["y"] - other["y"]) > box["height"]


def test_the_picture_of_a_result_is_its_best_step(target, near, tokenizer):
    """Marks say what became of each node, not colours alone."""
    decoder = SpeculativeDecoder(target, tokenizer, drafts=[like(target, noise=0.01)], tree=BestFirst(6, 3))
    result = decoder.generate(PROMPTS[0], max_new_tokens=12)
    best = max(result.steps, key=lambda step: len(step.path))
    words = [text.text for text in ET.fromstring(result.to_svg()).iter(f"{SVG}text")][:-1]  # the last is the legend
    assert words.count("✓") == len(best.path) > 0
    assert words.count("✗") == best.states.count(State.REJECTED)
    assert words.count("+") == 1
