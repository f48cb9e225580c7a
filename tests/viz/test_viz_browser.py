"""The interactive page in a real browser: headless Chromium, from a file, without a network."""

import json
import re
import shutil
import time
from contextlib import contextmanager
from itertools import pairwise

import pytest
from conftest import PROMPTS, HostileTokenizer

from specinfer import BestFirst, SpeculativeDecoder, TokenTree, inspect
from specinfer.results import Contribution, Result, Seconds, Stats, Step
from specinfer.tree import Draw
from specinfer.viz import SideBySide, fragment
from specinfer.viz.description import describe

webdriver = pytest.importorskip("selenium.webdriver", reason="pip install selenium")
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,1000",
]

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="apt-get install chromium chromium-driver")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def inspection(target, near):
    """A greedy result whose every token would be markup."""
    decoder = SpeculativeDecoder(target, HostileTokenizer(), drafts=["ngram", near], tree=BestFirst(12, 5))
    return inspect(decoder, decoder.generate([*PROMPTS[2], 0, 1], max_new_tokens=16))


@pytest.fixture(scope="module")
def data(inspection):
    return describe(inspection).to_dict()


class Displayed:
    """A display on the page that the browser has open."""

    def __init__(self, browser, place=0):
        self.browser, self.place = browser, place

    @property
    def root(self):
        """Its shadow root."""
        return self.browser.find_elements("css selector", ".specinfer")[self.place].shadow_root

    def all(self, selector):
        """Every element in it."""
        return self.root.find_elements("css selector", selector)

    def one(self, selector):
        """The first element in it."""
        return self.root.find_element("css selector", selector)

    def texts(self, selector):
        """The text of every element in it."""
        script = "return [...arguments[0].querySelectorAll(arguments[1])].map(e => e.textContent)"
        return self.browser.execute_script(script, self.root, selector)

    def chip(self, node):
        """A node of the tree."""
        return self.one(f'.chip[data-node="{node}"]')

    def nodes(self):
        """The nodes that are drawn."""
        found = [chip.get_attribute("data-node") for chip in self.all(".chip")]
        return {int(node) for node in found if node.isdigit()}

    def scale(self):
        """How large the tree is drawn."""
        script = "return new DOMMatrix(getComputedStyle(arguments[0]).transform).a"
        return self.browser.execute_script(script, self.one(".plane"))

    def tree(self):
        """The window of the tree."""
        return self.one(".grown .scroll")

    def box(self, selector):
        """Where an element is in the window: x, y, width, height ..."""
        return self.browser.execute_script("return arguments[0].getBoundingClientRect().toJSON()", self.one(selector))

    @property
    def round(self):
        """The round that is shown, from 0."""
        return int(self.texts(".where b")[0]) - 1  # in one go: while it plays, elements are made anew

    def facts(self):
        """The figures shown, by name."""
        return dict(zip(self.texts(".facts dt"), self.texts(".facts dd"), strict=True))

    def go(self, number):
        """Drag the slider to a round."""
        self.slide(".track input", number)

    def slide(self, selector, value):
        """Set a slider, as dragging does."""
        script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))"
        self.browser.execute_script(script, self.one(selector), value)

    def keys(self, *keys):
        """Press keys where the focus is."""
        ActionChains(self.browser).send_keys(*keys).perform()

    def point_at(self, element):
        """Move the pointer to the middle of an element."""
        self.browser.execute_script("arguments[0].scrollIntoView({block: 'center', inline: 'center'})", element)
        ActionChains(self.browser).move_to_element(element).perform()

    def focused(self):
        """What has the focus inside: its node, its text."""
        return self.browser.execute_script("return arguments[0].activeElement", self.root)


def opened(browser, path):
    """Open a file; return its first display."""
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(path.as_uri())
    return Displayed(browser)


def until(holds):
    """Wait until something holds."""
    end = time.monotonic() + 10
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    assert holds()


@contextmanager
def sized(browser, width):
    """A window of some width, in pixels."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    yield
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def written(text, tokenizer, drafted=4):
    """A result that emitted a text in steps of some drafted tokens and the target's own, drafted by a, b or both."""
    prompt, ids = (tokenizer(said)["input_ids"] for said in ("Say it.", text))
    authors = [[Draw(0, 0)], [Draw(1, 0)], [Draw(0, 0), Draw(1, 0)]]
    steps, root = [], prompt[-1]
    for start in range(0, len(ids), drafted + 1):
        *chain, bonus = ids[start : start + drafted + 1]
        draws = [authors[(start + i) % 3] for i in range(len(chain))]
        tree = TokenTree.from_nodes(
            root, chain, list(range(len(chain))), [-0.5 * (i + 1) for i in range(len(chain))], draws
        )
        names = tuple(tuple("ab"[draw.draft] for draw in each) for each in draws)
        steps.append(Step(tree, tuple(range(1, len(tree))), (*chain, bonus), (*names, ()), Seconds(0.1)))
        root = bonus
    drafts = tuple(Contribution(name, 0, 0, 0, 0.0) for name in "ab")
    stats = Stats(len(ids), len(steps), 0, (), Seconds(1.2345), drafts=drafts)
    made = {"target": "tiny", "drafts": ["a", "b"], "tree": f"Chain(length={drafted})", "verifier": "ExactMatch()"}
    made |= {"sampling": {"temperature": 0.7}, "dtype": "float32", "device": "cpu"}
    made |= {"versions": {"specinfer": "1", "torch": "2"}}
    return Result(text, ids, prompt, "length", 3, stats, steps, made, tokenizer)


def step_of(nodes):
    """A step with a tree of some nodes, three under each but the leaves, and its likeliest path accepted."""
    count = nodes - 1
    scores = [-0.4]
    parents = [0, *((i - 1) // 3 + 1 for i in range(1, count))]
    for i in range(1, count):
        scores.append(scores[parents[i] - 1] - 0.3 - 0.5 * ((i - 1) % 3))
    tree = TokenTree.from_nodes(1000, list(range(count)), parents, scores, [[Draw(i % 2, i % 3)] for i in range(count)])
    path = [0]
    while children := tree.children(path[-1]):
        path.append(int(children[0]))
    tokens = (*tree.tokens[path[1:]].tolist(), 2000)
    return Step(tree, tuple(path[1:]), tokens, ((),) * len(tokens))


def image_of(thing):
    """The still picture that a page holds, as an address."""
    return re.search(r'<img [^>]*src="([^"]*)"', thing.to_html())[1]


@pytest.fixture
def shown(browser, inspection, tmp_path):
    inspection.to_html(tmp_path / "page.html")
    return opened(browser, tmp_path / "page.html")


def percent(text):
    """A probability that the page wrote, give or take its last digit."""
    number, sign = text.split()
    assert sign == "%"
    value = 0.05 if number == "<0.1" else float(number)
    return pytest.approx(value / 100, abs=0.006 if value >= 10 else 0.0006)


# ---- quiet, and on its own ----


def test_it_opens_without_a_word_on_the_console_or_the_wire(shown, browser):
    """No error, no warning, no request but for the file itself, also after everything was used."""
    shown.one("button").click()  # plays: rounds go on by themselves, and their elements are made anew ...
    shown.one("button").click()  # ... until it pauses
    shown.go(0)
    shown.slide(".head input", 0)
    shown.point_at(shown.chip(0))
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    asked = {each["request"]["url"] for each in sent if each["documentURL"] == browser.current_url}  # not a start page
    assert {url for url in asked if not url.startswith("data:")} == {browser.current_url}
    assert browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)") in (
        [],
        ["data:,"],
    )


def test_hostile_text_stays_text(shown, browser, data):
    """Prompt, tokens and reasons full of markup show as they are, and nothing of them runs."""
    for number, step in enumerate(data["steps"]):
        shown.go(number)
        texts = shown.texts(".chip:not(.bonus) .text")
        assert sorted(texts) == sorted(data["texts"][str(token)] for token in step["tokens"])
    assert browser.execute_script("return typeof window.hacked") == "undefined"
    assert shown.all("script, img, b b, iframe, a") == []
    assert "<script>window.hacked = 1</script>" in shown.one(".prompt pre").get_attribute("textContent")
    assert shown.texts(".answer .word") == [
        data["texts"][str(token)] for step in data["steps"] for token in step["emitted"]
    ]
    assert browser.title == f"16 tokens in {len(data['steps'])} target passes"


def test_displays_on_one_page_do_not_meet(browser, inspection, data, tmp_path):
    """Two results, one of them twice, under a notebook's most insistent style: each has its own round and look."""
    fragments = [fragment(inspection), fragment(inspection), fragment(inspection.result)]
    style = "<style>div, span { color: red !important; display: none } .chip { left: 0 !important }</style>"
    style += "<style>.specinfer { display: block !important }</style>"
    (tmp_path / "notebook.html").write_text(f"<!doctype html>{style}{''.join(fragments)}", encoding="utf-8")
    first = opened(browser, tmp_path / "notebook.html")
    others = [Displayed(browser, 1), Displayed(browser, 2)]
    before = [other.round for other in others]
    first.go(0)
    first.go(1)
    assert first.round == 1
    assert [other.round for other in others] == before
    for display in (first, *others):
        assert display.chip(0).is_displayed()
        assert display.chip(0).value_of_css_property("color") != "rgba(255, 0, 0, 1)"
    assert browser.get_log("browser") == []


# ---- rounds ----


def test_it_begins_with_the_step_to_look_at_first(shown, inspection):
    """As the command line and the still picture do."""
    assert inspection.result.steps[shown.round] is inspection.result.best_step


def test_the_scrubber_shows_each_round(shown, data):
    """The tree, its states and the words of the answer are the round's."""
    for number, step in enumerate(data["steps"]):
        shown.go(number)
        assert shown.round == number
        assert len(shown.all(".chip[data-node]")) == len(step["tokens"]) + (step["bonus"] is not None)
        assert len(shown.all(".chip.accepted")) == step["states"].count("accepted")
        assert len(shown.all(".edge.accepted")) == step["states"].count("accepted")
        assert len(shown.all(".chip.bonus")) == (step["bonus"] is not None)
        assert shown.texts(".answer .word.now") == [data["texts"][str(token)] for token in step["emitted"]]


def test_arrow_keys_and_buttons_go_from_round_to_round(shown, data):
    """Left, right, home and end, wherever the focus is inside; no further than the ends."""
    shown.one(".rounds button").click()  # gives the focus, and starts playing
    shown.one(".rounds button").click()
    shown.keys(Keys.HOME)
    assert shown.round == 0
    shown.keys(Keys.ARROW_LEFT)
    assert shown.round == 0
    shown.keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert shown.round == 2
    shown.one('[aria-label="previous step"]').click()
    assert shown.round == 1
    shown.keys(Keys.END)
    assert shown.round == len(data["steps"]) - 1


def test_it_plays_and_pauses(shown):
    """From a round to the next by itself; the text to come is faint meanwhile."""
    shown.go(0)
    shown.one('[aria-label="play"]').click()
    assert shown.all(".playing .word.later")
    until = time.monotonic() + 10
    while shown.round == 0 and time.monotonic() < until:
        time.sleep(0.1)
    assert shown.round > 0
    shown.one('[aria-label="pause"]').click()
    stopped = shown.round
    time.sleep(1.3)
    assert shown.round == stopped
    assert not shown.all(".playing")


def test_a_word_leads_to_its_round(shown, data):
    """By pointer and by keyboard, where arrows walk along the words."""
    words = shown.all(".answer .word")
    rounds = [number for number, step in enumerate(data["steps"]) for _ in step["emitted"]]
    words[-1].click()
    assert shown.round == rounds[-1]
    shown.keys(Keys.HOME, Keys.ARROW_RIGHT, Keys.ENTER)
    assert shown.round == rounds[1]


# ---- text: copied, found, joined ----

SAID = "def f(x):\n\treturn  x  # 🙂 €\n\n§ done"


@pytest.fixture
def said(browser, tmp_path, tokenizer):
    """The page of a text of bytes, whose characters are split over tokens and over steps."""
    written(SAID, tokenizer).to_html(tmp_path / "said.html")
    return opened(browser, tmp_path / "said.html")


def clipboard(browser):
    """What was copied."""
    permissions = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    browser.execute_cdp_cmd("Browser.grantPermissions", permissions)
    return browser.execute_async_script("navigator.clipboard.readText().then(arguments[0], e => arguments[0](`${e}`))")


def test_what_is_copied_is_the_text(said, browser):
    """By the button, by a selection of the answer, and by one of the whole page: no sign for white space is text."""
    said.one(".copy").click()
    assert clipboard(browser) == SAID
    assert said.one(".copy").text == "Copied"
    browser.execute_script("getSelection().selectAllChildren(arguments[0])", said.one(".answer"))
    said.keys(Keys.CONTROL, "c")
    assert clipboard(browser).strip() == SAID
    browser.execute_script("getSelection().removeAllRanges()")
    browser.find_element("css selector", "body").send_keys(Keys.CONTROL, "a")
    said.keys(Keys.CONTROL, "c")
    everything = clipboard(browser)
    assert SAID in everything
    assert not set("␠␣⏎⇥") & set(everything)


def test_text_is_found_across_tokens(said, browser):
    """As one reads it; signs are not found."""

    def found(text):
        browser.execute_script("getSelection().removeAllRanges()")
        return browser.execute_script("return window.find(arguments[0], true)", text)

    assert all(map(found, ("def f(x):", "return  x", "# 🙂 €", "§ done")))
    assert not any(map(found, ("f␣", "⏎", "\\xf0", "nothing of it")))


def test_bytes_join_into_characters(said, tokenizer):
    """The token that ends a character shows it; those before show their bytes, as signs that are no text."""
    assert "".join(said.texts(".answer .word")) == SAID
    words = said.all(".answer .word")
    assert len(words) == len(SAID.encode())
    signs = [
        sign.get_attribute("data-sign") for word in words for sign in word.find_elements("css selector", ".unseen")
    ]
    assert [sign for sign in signs if sign.startswith("\\x")] == ["\\xf0", "\\x9f", "\\x99", "\\xe2", "\\x82", "\\xc2"]
    for number in range(len(written(SAID, tokenizer).steps)):
        said.go(number)
        assert {"🙂", "€", "§"} >= {text for text in said.texts(".chip .text") if text and not text.isascii()}
    assert said.texts(".mask g text")[0] == said.texts(".chip .text")[0]


def test_a_switch_shows_accepted_tokens_in_colour(said):
    """On at first; off, the answer is plain."""

    def colours():
        names = ("background-color", "border-bottom-color")
        return {
            tuple(word.value_of_css_property(name) for name in names) for word in said.all(".answer .word:not(.now)")
        }

    assert len(colours()) > 1
    said.one('.tools input[type="checkbox"]').click()
    until(lambda: len(colours()) == 1)


def test_marks_of_two_drafts_stand_side_by_side(said, browser):
    """In the text, in the bars and in the tree: a half each, and a shape each in its own colour."""
    both, first, second = (
        said.one(f".answer .word{which}") for which in (".many", ".by0:not(.many)", ".by1:not(.many)")
    )
    lines = [word.value_of_css_property("border-bottom-color") for word in (first, second)]
    painted = both.value_of_css_property("border-image-source")
    assert all(line.removeprefix("rgba(").removeprefix("rgb(").split(", ")[0] in painted for line in lines)
    chip = said.one(".chip.many")
    shapes = chip.find_elements("css selector", ".who span")
    assert [shape.text for shape in shapes] == ["●", "▲"]
    assert len({shape.value_of_css_property("color") for shape in shapes}) == 2
    assert "linear-gradient" in chip.value_of_css_property("background-image")
    assert "linear-gradient" in said.one(".bar i.many").value_of_css_property("background-image")


def test_the_page_says_what_made_the_result(said):
    """Models, tree, arithmetic, versions; the prompt is shown, and figures have three digits."""
    made = dict(zip(said.texts(".made dt"), said.texts(".made dd"), strict=True))
    assert made == {
        "target": "tiny",
        "drafts": "a, b",
        "tree": "Chain(length=4)",
        "verification": "ExactMatch()",
        "sampling": "temperature 0.7, seed 3",
        "arithmetic": "float32 on cpu",
        "versions": "specinfer 1, torch 2",
    }
    assert said.one(".prompt pre").is_displayed()
    assert said.one(".prompt pre").text == "Say it."
    figures = dict(zip(said.texts(".figures dt"), said.texts(".figures dd"), strict=True))
    assert figures["tokens/s"] == f"{len(SAID.encode()) / 1.2345:.1f}"
    assert figures["seconds"] == "1.23"


# ---- the tree: zoom, pan, many nodes ----


@pytest.fixture
def large(browser, tmp_path):
    """The page of a step with 255 drafted nodes."""
    step_of(256).to_html(tmp_path / "large.html")
    return opened(browser, tmp_path / "large.html")


def scrolled(display):
    """How far the tree is scrolled."""
    return display.browser.execute_script("const e = arguments[0]; return [e.scrollLeft, e.scrollTop]", display.tree())


def test_a_tree_of_256_nodes_is_folded_and_opens_as_a_whole(large):
    """Some dozens are shown at first, the accepted path among them; the others are a slider away."""
    nodes, hidden = large.nodes(), sum(int(text.removeprefix("+")) for text in large.texts(".chip.more .text"))
    assert 48 <= len(nodes) < 60
    assert len(nodes) + hidden == 256
    assert len(large.all(".chip.accepted")) == len(large.all(".edge.accepted")) > 2
    assert "hidden nodes left out" in large.one(".mask p").text
    large.slide(".head input", large.one(".head input").get_attribute("max"))
    assert large.nodes() == set(range(256))
    assert len(large.all(".mask g")) == 256


@pytest.mark.parametrize("nodes", [27, 48, 61])
def test_labels_of_the_mask_do_not_overlap(browser, tmp_path, nodes):
    """Each row has a label, apart from the next."""
    step_of(nodes).to_html(tmp_path / "page.html")
    display = opened(browser, tmp_path / "page.html")
    if display.all(".head input"):
        display.slide(".head input", display.one(".head input").get_attribute("max"))
    script = "return [...arguments[0].querySelectorAll('.mask g text')].map(e => e.getBBox()).map(b => [b.y, b.height])"
    labels = browser.execute_script(script, display.root)
    assert len(labels) == nodes
    size = float(display.one(".mask g text").value_of_css_property("font-size").removesuffix("px"))
    assert all(below - above > size for (above, _), (below, _) in pairwise(labels))


def test_the_tree_opens_at_its_root_and_fits_the_width(shown, large, browser):
    """Nothing of it is to the right of its window, at any width where it can still be read."""

    def at_root():
        root, window = large.box(".chip.root"), large.box(".grown .scroll")
        across = window["left"] <= root["left"] < root["right"] <= window["right"]
        return across and window["top"] <= root["top"] < root["bottom"] <= window["bottom"]

    for width in (390, 1280, 700):
        with sized(browser, width):
            fits = "right" if width > 390 else "left"  # on a phone it would be too small to be read
            until(lambda fits=fits: large.box(".plane svg")[fits] <= large.box(".grown .scroll")["right"])
            until(at_root)
            assert 0.6 <= large.scale() <= 1


def test_a_fitted_tree_stays_still(browser, tmp_path):
    """Where its scroll bar comes and goes with its scale, too: it is not fitted again and again."""
    step_of(30).to_html(tmp_path / "page.html")
    script = """
        const [tree, done] = arguments;
        const frames = count => (count ? requestAnimationFrame(() => frames(count - 1)) : end());
        let changes = 0;
        const watch = new MutationObserver(list => { changes += list.length; });
        watch.observe(tree, { attributes: true });
        const end = () => { watch.disconnect(); done(changes); };
        frames(12);
    """
    for width in range(440, 480, 2):
        with sized(browser, width):
            display = opened(browser, tmp_path / "page.html")
            assert browser.execute_async_script(script, display.one(".tree")) <= 1


def test_zoom_by_buttons_and_keys(large):
    """Plus and minus, and back to the width; the page's own zoom stays the browser's."""
    fitted = large.scale()
    large.one('[aria-label="zoom in"]').click()
    assert large.scale() == pytest.approx(1.25 * fitted)
    large.one('[aria-label="zoom out"]').click()
    assert large.scale() == pytest.approx(fitted)
    large.chip(0).click()
    large.keys("++")
    assert large.scale() == pytest.approx(1.25**2 * fitted)
    large.keys("-")
    assert large.scale() == pytest.approx(1.25 * fitted)
    large.keys("0")
    assert large.scale() == pytest.approx(fitted)
    for _ in range(20):
        large.one('[aria-label="zoom in"]').click()
    assert large.scale() == pytest.approx(3)


def test_zoom_by_wheel_keeps_what_is_under_the_pointer(large, browser):
    """With Ctrl; without, the wheel scrolls."""
    before, fitted = large.box(".chip.root"), large.scale()
    x, y = before["x"] + before["width"] / 2, before["y"] + before["height"] / 2
    wheel = {"type": "mouseWheel", "x": x, "y": y, "deltaX": 0, "deltaY": -120}
    browser.execute_cdp_cmd("Input.dispatchMouseEvent", {**wheel, "modifiers": 2})
    until(lambda: large.scale() > 1.3 * fitted)
    after = large.box(".chip.root")
    assert after["y"] + after["height"] / 2 == pytest.approx(y, abs=2)
    zoomed, top = large.scale(), scrolled(large)[1]
    browser.execute_cdp_cmd("Input.dispatchMouseEvent", wheel)
    until(lambda: scrolled(large)[1] < top)
    assert large.scale() == zoomed


def test_pan_by_mouse_and_keys(large, browser):
    """Between the nodes the mouse drags the tree; with the focus on its window arrows move it, and no round."""
    for _ in range(3):
        large.one('[aria-label="zoom in"]').click()
    browser.execute_script("arguments[0].scrollLeft = 0", large.tree())
    left, top = scrolled(large)
    below = int(large.box(".chip.root")["height"])
    actions = ActionChains(browser).move_to_element_with_offset(large.chip(0), 0, below).click_and_hold()
    actions.move_by_offset(-50, -40).release().perform()
    assert scrolled(large) == [left + 50, top + 40]
    browser.execute_script("arguments[0].focus()", large.tree())
    large.keys(Keys.ARROW_RIGHT, Keys.ARROW_UP)
    assert scrolled(large) == [left + 110, top - 20]


def test_two_fingers_zoom(large, browser):
    """As on a phone; the page stays as it is."""
    fitted, window = large.scale(), large.box(".grown .scroll")
    x, y = window["x"] + 200, window["y"] + 200

    def touch(kind, *xs):
        points = [{"x": x + each, "y": y, "id": number} for number, each in enumerate(xs)]
        browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True, "maxTouchPoints": 2})
    try:
        touch("touchStart", -40, 40)
        touch("touchMove", -60, 60)
        touch("touchMove", -80, 80)
        touch("touchEnd")
    finally:
        browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})
    assert large.scale() == pytest.approx(2 * fitted, rel=0.05)
    assert browser.execute_script("return visualViewport.scale") == 1


# ---- two results on one text ----


@pytest.fixture
def pair(browser, tmp_path, tokenizer):
    """A tree's result against a sequence's."""
    both = SideBySide(written(SAID, tokenizer, 7), written(SAID, tokenizer, 3))
    both.to_html(tmp_path / "pair.html")
    return opened(browser, tmp_path / "pair.html")


def test_two_results_go_on_pass_by_pass(pair, browser, tokenizer):
    """Both are at the same pass: what each has emitted so far is seen, and the other text is faint."""
    first, second = written(SAID, tokenizer, 7), written(SAID, tokenizer, 3)
    for number in (0, 2, len(first.steps) - 1, len(first.steps), len(second.steps) - 1):
        pair.go(number)
        assert pair.texts(".where b") == [str(number + 1)]
        gained = [sum(result.accept_lengths[: number + 1]) for result in (first, second)]
        sides = pair.all(".side")
        for side, done in zip(sides, gained, strict=True):
            words = side.find_elements("css selector", ".answer .word")
            assert len(words) - len(side.find_elements("css selector", ".answer .word.later")) == done
            assert str(done) in side.find_element("css selector", ".count b").text
        assert len(pair.all(".block.now")) == 2
    assert len(pair.all(".block")) == len(first.steps) + len(second.steps)
    widths = [
        [block.size["width"] for block in lane.find_elements("css selector", ".block")] for lane in pair.all(".lane")
    ]
    assert sum(widths[0]) == pytest.approx(sum(widths[1]), abs=2)
    assert browser.get_log("browser") == []


def test_words_blocks_and_keys_lead_both_sides(pair):
    """To the pass of a word or a block, on both sides."""
    pair.all(".lane")[1].find_elements("css selector", ".block")[3].click()
    assert pair.texts(".where b") == ["4"]
    pair.all(".side")[0].find_elements("css selector", ".answer .word")[0].click()
    assert pair.texts(".where b") == ["1"]
    pair.one('[aria-label="next pass"]').click()
    pair.keys(Keys.ARROW_RIGHT)
    assert pair.texts(".where b") == ["3"]
    assert [len(side.find_elements("css selector", ".chip.root")) for side in pair.all(".side")] == [1, 1]


# ---- without scripts ----


@pytest.mark.parametrize("what", ["result", "pair"])
def test_without_scripts_a_picture_and_the_text_stay(browser, tmp_path, tokenizer, what):
    """As where a notebook is not trusted; with scripts, the display stands in their place."""
    result = written(SAID, tokenizer)
    thing = result if what == "result" else SideBySide(result, written(SAID, tokenizer, 2))
    thing.to_html(tmp_path / "page.html")
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get((tmp_path / "page.html").as_uri())
        image = browser.find_element("css selector", ".specinfer img")
        assert image.is_displayed()
        assert browser.find_element("css selector", ".specinfer pre").get_property("textContent") == SAID
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    opened(browser, tmp_path / "page.html")
    assert browser.find_elements("css selector", ".specinfer img, .specinfer pre") == []
    read = "const i = new Image(); i.onload = () => arguments[1](i.naturalWidth); i.onerror = () => arguments[1](0);"
    assert browser.execute_async_script(f"{read} i.src = arguments[0]", image_of(thing)) > 100


# ---- nodes ----


def test_pointing_at_a_node_shows_its_figures(shown, inspection):
    """p, q, ratio, position and cache slot are the inspection's; leaving brings the round back."""
    for number in (0, shown.round):
        shown.go(number)
        step = inspection.step(number)
        for node in step.nodes[1:4]:
            shown.point_at(shown.chip(node.node))
            facts = shown.facts()
            assert (node.p, node.q) == (percent(facts["target p"]), percent(facts["draft q"]))
            assert float(facts["p / q"]) == pytest.approx(node.ratio, abs=0.01, rel=0.01)
            assert facts["position"] == str(node.position)
            assert facts["cache slot"].split(",")[0] == str(node.slot)
            assert facts["token id"] == str(node.token)
            assert "nats" in facts["margin"]
            assert step.why(node.node) in shown.one(".facts p").get_attribute("textContent")
            assert len(shown.all(".facts .rank .figure")) == len(node.top)
    shown.point_at(shown.one(".figures"))
    assert "drafted" in shown.facts()


def test_the_keyboard_walks_the_tree(shown, inspection):
    """Right to a child, left to its parent; figures follow the focus and stay when the pointer is elsewhere."""
    step = inspection.step(shown.round)
    shown.chip(0).click()
    shown.keys(Keys.ARROW_RIGHT)
    assert shown.focused().get_attribute("data-node") == str(step.tree.children(0)[0])
    shown.point_at(shown.one(".figures"))
    assert shown.facts()["token id"] == str(step.tree.tokens[1])
    assert "draft" in shown.focused().get_attribute("aria-label")
    shown.keys(Keys.ARROW_DOWN)
    assert shown.focused().get_attribute("data-node") == str(step.tree.children(0)[1])
    shown.keys(Keys.ARROW_UP, Keys.ARROW_LEFT)
    assert shown.focused().get_attribute("data-node") == "0"
    shown.keys(Keys.ESCAPE)
    assert "drafted" in shown.facts()


def test_the_target_s_own_token_has_figures(shown, inspection):
    """It comes after the accepted path and has no slot yet."""
    step = inspection.step(shown.round)
    shown.point_at(shown.one(".chip.bonus"))
    facts = shown.facts()
    assert facts["token id"] == str(step.bonus)
    assert facts["position"] == str(step.nodes[0].position + len(step.path) + 1)


def test_a_row_of_the_mask_lights_its_node_and_ancestors(shown, inspection):
    """And a node lights its row; cells are the ancestors and the node itself."""
    tree = inspection.step(shown.round).tree
    rows = shown.all(".mask g")
    assert len(rows) == len(tree)
    for node in (int(tree.depths.argmax()), 1, len(tree) - 1):
        assert len(rows[node].find_elements("css selector", ".cell")) == len(tree.ancestors(node))
        shown.point_at(rows[node].find_element("css selector", ".hit"))
        lit = {chip.get_attribute("data-node") for chip in shown.all(".chip.lit")}
        assert lit == {str(i) for i in tree.ancestors(node)}
    shown.point_at(shown.chip(1))
    assert shown.all(".mask g.lit") == [rows[1]]


def test_unlikely_paths_fold_away_and_come_back(shown, data):
    """The slider hides all but the likeliest, never accepted ones; a press on what stands for them shows them."""
    step = data["steps"][shown.round]
    mass = [1.0]
    for parent, q in zip(step["parents"][1:], step["q"][1:], strict=True):
        mass.append(mass[parent] * q)
    assert not shown.all(".chip.more")
    shown.slide(".head input", 0)
    assert shown.one(".head output").text == "8 likeliest"
    ranked = sorted(range(len(mass)), key=lambda i: -mass[i])
    assert shown.nodes() == {*ranked[:9], *step["path"]}
    hidden = len(mass) - len(shown.nodes())
    assert sum(int(text.removeprefix("+")) for text in shown.texts(".chip.more .text")) == hidden > 0
    assert len(shown.all(".mask g")) == len(shown.nodes())
    before = shown.nodes()
    shown.point_at(shown.one(".chip.more"))
    assert "hidden" in shown.one(".facts h2").text
    shown.one(".chip.more").click()
    assert shown.nodes() > before
    shown.slide(".head input", 1)
    assert not shown.all(".chip.more")


# ---- light and dark ----


def contrast(browser, element):
    """The WCAG contrast of an element's text with what lies behind it."""
    script = """
        const rgb = text => text.match(/[\\d.]+/g).map(Number);
        let behind = [255, 255, 255];
        for (let e = arguments[0]; e; e = e.parentElement ?? e.getRootNode().host) {
            const [r, g, b, a = 1] = rgb(getComputedStyle(e).backgroundColor);
            if (a > 0.5) { behind = [r, g, b]; break; }
        }
        return [rgb(getComputedStyle(arguments[0]).color).slice(0, 3), behind];
    """

    def luminance(colour):
        channels = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), channels, strict=True))

    dark, light = sorted(map(luminance, browser.execute_script(script, element)))
    return (light + 0.05) / (dark + 0.05)


@contextmanager
def preferring(browser, scheme):
    """A system in light or dark."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    yield
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_legible_in_light_and_dark(shown, browser, scheme):
    """It follows the system, and all text has a contrast of at least 4.5."""
    with preferring(browser, scheme):
        time.sleep(0.5)  # transitions
        assert browser.find_element("css selector", ".specinfer").get_attribute("data-theme") == scheme
        texts = (".figures dd", ".figures dt", ".answer .word", ".where", ".legend li", ".key span", ".mask p")
        for selector in (
            *texts,
            ".prompt pre",
            ".tools label",
            ".tools button",
            ".made dt",
            ".made dd",
            ".zooms button",
        ):
            assert contrast(browser, shown.one(selector)) >= 4.5, selector
        for chip in shown.all(".chip"):
            assert contrast(browser, chip) >= 4.5, chip.get_attribute("class")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_two_results_and_large_trees_are_legible_too(browser, tmp_path, tokenizer, scheme):
    """Side by side, and folded."""

    def legible(element):
        until(lambda: contrast(browser, element) >= 4.5)

    SideBySide(written(SAID, tokenizer, 7), written(SAID, tokenizer, 3)).to_html(tmp_path / "pair.html")
    step_of(256).to_html(tmp_path / "large.html")
    with preferring(browser, scheme):
        pair = opened(browser, tmp_path / "pair.html")
        for selector in (".side h2", ".count", ".count b", ".lanes p", ".lanes b", ".legend span span", ".chip.many"):
            legible(pair.one(selector))
        large = opened(browser, tmp_path / "large.html")
        for selector in (".chip.more", ".chip.unreached", ".head output", ".depth"):
            legible(large.one(selector))


def test_it_follows_a_notebooks_theme(shown, browser):
    """JupyterLab and others say on the body what they look like, whatever the system's wish."""
    host = browser.find_element("css selector", ".specinfer")
    for attribute, value, theme in (
        ("data-jp-theme-light", "false", "dark"),
        ("data-jp-theme-light", "true", "light"),
        ("data-vscode-theme-kind", "vscode-dark", "dark"),
    ):
        browser.execute_script("document.body.setAttribute(arguments[0], arguments[1])", attribute, value)
        time.sleep(0.1)
        assert host.get_attribute("data-theme") == theme
        browser.execute_script("document.body.removeAttribute(arguments[0])", attribute)


@pytest.mark.parametrize("width", [390, 700, 1280])
def test_no_page_scrolls_sideways(shown, browser, tmp_path, tokenizer, width):
    """The tree scrolls in its own box."""
    SideBySide(written(SAID, tokenizer, 7), written(SAID, tokenizer, 3)).to_html(tmp_path / "pair.html")
    with sized(browser, width):
        for name in ("page", "pair"):
            opened(browser, tmp_path / f"{name}.html")
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("what", ["result", "step", "tree", "edited"])
def test_everything_else_that_shows_itself_opens_too(browser, inspection, tmp_path, what):
    """A result that was not inspected, a step, a bare tree, a tree changed by hand."""
    step = inspection.result.steps[0]
    edited = inspection.step(0).with_branch(0, [1, 2])
    thing = {"result": inspection.result, "step": step, "tree": step.tree, "edited": edited}[what]
    thing.to_html(tmp_path / "page.html", HostileTokenizer())
    display = opened(browser, tmp_path / "page.html")
    display.point_at(display.chip(1))
    facts = display.facts()
    assert facts["token id"] == display.chip(1).get_attribute("data-node") or facts["token id"].isdigit()
    assert ("target p" in facts) == (what == "edited")
    assert bool(display.all(".track")) == (what == "result")
    assert browser.get_log("browser") == []
