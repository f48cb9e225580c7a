"""What is shown of trees and results: the description, the page as a file, the still picture.  No browser here."""

import json
import re
import xml.etree.ElementTree as ET
from base64 import b64decode
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from conftest import PROMPTS, HostileTokenizer, like
from hypothesis import given
from strategies import PROPERTY, token_trees

from specinfer import BestFirst, Sampled, SpeculativeDecoder, TokenTree, inspect
from specinfer.common.token_text import token_text
from specinfer.errors import InputError
from specinfer.results import Contribution, Result, Seconds, State, Stats, Step
from specinfer.tree import Draw, Kind
from specinfer.viz import SideBySide, fragment, page, picture
from specinfer.viz.description import describe
from specinfer.viz.html import in_script, to_json
from specinfer.viz.style import DARK, STYLES

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


def still_picture(source):
    """The picture that an image holds."""
    return b64decode(source.removeprefix("data:image/svg+xml;base64,"), validate=True).decode()


@pytest.mark.parametrize("name", NAMES)
def test_no_text_of_a_model_becomes_markup(things, name):
    """The page has its own tags and no others, and the data inside its one script is the model's."""
    data = described(things[name])
    thing = things[name]
    read = Page(page(thing))
    own = ["html", "head", "meta", "meta", "meta", "link", "title", "style", "body", "div", "img", "pre", "script"]
    assert read.tags == own
    assert not [name for name, _ in read.attributes if name.startswith("on")]
    assert [still_picture(value) for name, value in read.attributes if name == "src"] == [picture(thing)]
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

    scripts = [file for file in files("specinfer.viz").joinpath("page").iterdir() if file.name.endswith(".js")]
    assert scripts
    source = "".join(script.read_text(encoding="utf-8") for script in scripts)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|</", source)


def test_a_page_of_128_tokens_is_small(target, near):
    """Under 350 kB, inspected, with full trees."""
    decoder = SpeculativeDecoder(target, HostileTokenizer(), drafts=[near], tree=BestFirst(16, 8))
    result = decoder.generate(PROMPTS[0], max_new_tokens=128)
    assert len(inspect(decoder, result).to_html().encode()) < 350_000
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
    assert set(texts.values()) <= set(HostileTokenizer.TEXTS)


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_show_a_fragment(things, name):
    """One element and one script, with picture and text for where scripts do not run; equal things, equal fragments."""
    shown = things[name]._repr_html_()
    assert Page(shown).tags == ["div", "img", "pre", "script"]
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


# ---- characters over several tokens ----


def chain(root, tokens):
    """A tree that is one path."""
    count = len(tokens)
    draws = [[Draw(0, 0)] for _ in tokens]
    return TokenTree.from_nodes(root, tokens, list(range(count)), [-0.1 * (i + 1) for i in range(count)], draws)


def spelled(tokenizer, text, *, prompt="."):
    """A result that emitted a text of bytes, in steps of two accepted tokens and the target's own."""
    ids, before = (tokenizer(said)["input_ids"] for said in (text, prompt))
    steps = []
    for start in range(0, len(ids), 3):
        emitted, root = ids[start : start + 3], [*before, *ids][len(before) + start - 1]
        tree = chain(root, emitted[:-1])
        steps.append(Step(tree, tuple(range(1, len(tree))), tuple(emitted), ((),) * len(emitted)))
    stats = Stats(len(ids), len(steps), 0, (), Seconds(1.0), drafts=(Contribution("a", 0, 0, 0, 0.0),))
    return Result(text, ids, before, "length", None, stats, steps, {"target": "tiny"}, tokenizer)


@pytest.mark.parametrize("text", ["🙂 €", "é漢字", "🙂🙃😉"])
def test_bytes_join_into_characters_over_steps(tokenizer, text):
    """What the nodes of the accepted paths show is the text, and nothing of a character is shown twice."""
    data = described(spelled(tokenizer, text))
    shown = ""
    for step in data["steps"]:
        for node in [*step["path"], len(step["tokens"])]:
            token = (*step["tokens"], step["bonus"])[node]
            shown += step.get("split", {}).get(str(node), [data["texts"][str(token)]])[0]
    assert shown == text
    assert json.loads(to_json(data)) == data


def words_of(svg):
    """The texts of a picture."""
    return [text.text for text in ET.fromstring(svg).iter(f"{SVG}text")]


def test_a_character_that_never_ends_is_shown_as_bytes(tokenizer):
    """Neither lost nor joined with what follows."""
    first, _, last = tokenizer("€")["input_ids"]
    (letter,) = tokenizer("x")["input_ids"]
    step = Step(chain(first, [letter, last]), (1, 2), (letter, last, letter), ((),) * 3)
    words = words_of(picture(step, tokenizer=tokenizer))
    assert [word for word in words if word in ("\\xe2", "x", "\\xac")] == ["\\xe2", "x", "\\xac", "x"]


def test_branches_join_with_their_own_path(tokenizer):
    """Two characters that begin alike: each branch ends in its own, in the still picture, too."""
    smile, cry = (tokenizer(text)["input_ids"] for text in ("🙂", "😢"))
    assert smile[:2] == cry[:2]
    tokens, parents, draws = [smile[1], *smile[2:], *cry[2:]], [0, 1, 2, 1, 4], [[Draw(0, i)] for i in (0, 0, 0, 1, 0)]
    tree = TokenTree.from_nodes(smile[0], tokens, parents, [-0.1, -0.2, -0.3, -0.4, -0.5], draws)
    step = Step(tree, (), (65,), ((),))
    assert {"🙂", "😢"} <= set(words_of(picture(step, tokenizer=tokenizer)))


# ---- what made a result ----


def test_a_result_says_what_made_it_and_keeps_it(things, hostile, tmp_path):
    """Models, tree, rule, options, arithmetic and versions, in the page's data and in a saved result."""
    result = things["Result"]
    made = result.made_by
    assert made["drafts"] == [draft.name for draft in hostile.drafts]
    assert (made["tree"], made["verifier"]) == (str(hostile.policy), str(hostile.verifier))
    assert made["sampling"] == {"temperature": 1.0, "top_k": 50}
    assert (made["dtype"], made["device"]) == ("float64", "cpu")
    assert set(made["versions"]) == {"specinfer", "torch", "transformers"}
    result.save(tmp_path / "result.json")
    loaded = Result.load(tmp_path / "result.json")
    assert loaded.made_by == made == described(loaded)["made_by"]
    assert hostile.generate(PROMPTS[0], max_new_tokens=2).made_by["sampling"] == {}


def test_an_inspection_of_a_loaded_result_has_words_for_every_token(things, hostile, tmp_path):
    """What the target nearly said is no token of the result: the decoder's tokenizer knows it."""
    things["Result"].save(tmp_path / "result.json")
    inspection = inspect(hostile, Result.load(tmp_path / "result.json"), temperature=1.0)
    assert described(inspection)["texts"] == described(things["Inspection"])["texts"]


def test_a_result_without_steps_shows_its_text(tokenizer):
    """In a notebook; there is no page or picture of it."""
    empty = replace(spelled(tokenizer, "<b>"), steps=[])
    assert empty._repr_html_() == "<pre>&lt;b&gt;</pre>"
    for draw in (empty.to_html, empty.to_svg, SideBySide(empty, empty).to_html):
        with pytest.raises(InputError, match="no step was decoded"):
            draw()


# ---- two results ----


def test_two_results_side_by_side_are_two_results(tokenizer):
    """Each side's data is the result's own; where the texts part, a note says so."""
    first, second = spelled(tokenizer, "one text"), spelled(tokenizer, "one test")
    data = json.loads(SideBySide(first, second, ("a", "b")).to_json())
    assert data["names"] == ["a", "b"]
    assert data["sides"] == [json.loads(side.to_json()) for side in (first, second)]
    assert data["notes"] == ["The texts part after 6 tokens."]
    assert json.loads(SideBySide(first, first).to_json())["notes"] == []


def test_other_things_and_other_prompts_are_refused(tokenizer, things):
    """Before anything is drawn."""
    result = spelled(tokenizer, "one")
    with pytest.raises(InputError, match="TokenTree and Result are not two results"):
        SideBySide(things["TokenTree"], result)
    with pytest.raises(InputError, match="different prompts"):
        SideBySide(result, spelled(tokenizer, "one", prompt="other"))


def test_the_picture_of_two_results_has_a_lane_each(tokenizer):
    """A part for each token and each of its drafts; hostile names stay text."""
    result = spelled(tokenizer, "one text")
    pair = SideBySide(result, result, ("<b>", "&"))
    boxes = list(ET.fromstring(pair.to_svg()).iter(f"{SVG}rect"))
    assert len(boxes) == 1 + 2 * len(result.token_ids)
    assert any(word.startswith("<b>: ") for word in words_of(pair.to_svg()))
    assert [name for name, _ in Page(pair.to_html()).attributes if name.startswith("on")] == []


# ---- one language ----


def test_the_page_takes_its_looks_from_the_styles(things):
    """Every state has a rule on the page, and every picture the same colours."""
    text = page(things["Step"])
    for state, look in STYLES.items():
        rule = re.search(rf"\.chip\.{state}\{{(.*?)\}}", text)[1]
        assert f"border:{look.width}px {'dashed' if look.dashes else 'solid'} var(--{look.line or 'by'})" in rule
        assert f"background:var(--{look.fill})" in rule
    assert all(colour in text and colour in picture(things["Step"]) for colour in DARK.values())
