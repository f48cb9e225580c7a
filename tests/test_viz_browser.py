"""The interactive page in a real browser: headless Chromium, from a file, without a network."""

import json
import shutil
import time

import pytest
from conftest import PROMPTS, HostileTokenizer

from specinfer import BestFirst, SpeculativeDecoder, inspect
from specinfer.viz import fragment
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
    shown.slide(".head input", 4)
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


def test_it_begins_with_the_round_that_gained_most(shown, data):
    """As the command line does."""
    gains = [len(step["path"]) for step in data["steps"]]
    assert shown.round == gains.index(max(gains))


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
    shown.one('[aria-label="previous round"]').click()
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
    """The slider hides paths under a threshold, never accepted ones; a press on what stands for them shows them."""
    step = data["steps"][shown.round]
    mass = [1.0]
    for parent, q in zip(step["parents"][1:], step["q"][1:], strict=True):
        mass.append(mass[parent] * q)
    shown.slide(".head input", 5)
    likely = {str(i) for i, m in enumerate(mass) if m >= 0.1 or i in step["path"]}
    seen = {chip.get_attribute("data-node") for chip in shown.all(".chip:not(.more, .bonus)")}
    assert seen == likely
    more = shown.all('.chip[data-node="more"]')
    assert sum(int(text.removeprefix("+")) for text in shown.texts(".chip.more .text")) == len(mass) - len(likely)
    assert more
    assert shown.one(".head output").text == "under 10 %"
    shown.point_at(more[0])
    more[0].click()
    assert len(shown.all(".chip[data-node]")) > len(likely)
    shown.slide(".head input", 0)
    assert len(shown.all('.chip[data-node="more"]')) == 0


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_legible_in_light_and_dark(shown, browser, scheme):
    """It follows the system, and all text has a contrast of at least 4.5."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        time.sleep(0.5)  # transitions
        assert browser.find_element("css selector", ".specinfer").get_attribute("data-theme") == scheme
        for selector in (".figures dd", ".figures dt", ".answer .word", ".where", ".legend li", ".key span", ".mask p"):
            assert contrast(browser, shown.one(selector)) >= 4.5, selector
        for chip in shown.all(".chip"):
            assert contrast(browser, chip) >= 4.5, chip.get_attribute("class")
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


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


def test_a_narrow_page_does_not_scroll_sideways(shown, browser):
    """The tree scrolls in its own box."""
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 380, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    )
    try:
        wide = browser.execute_script("return document.documentElement.scrollWidth")
        assert wide <= 380
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


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
