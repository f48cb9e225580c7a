"""Make the pictures that README and docs show, in docs/pictures/, from the default target.

    python docs/figures.py

A picture of times is of the machine that made it.  The interactive page is photographed if Chromium and its driver are
there, and left as it was otherwise.
"""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from specinfer import BestFirst, Chain, Result, SpeculativeDecoder, Trace, Widths, inspect, record, replay
from specinfer.plots import plot_acceptance, plot_calibration, plot_mask, plot_timeline
from specinfer.traces import calibration, hits, oracle

PICTURES = Path(__file__).with_name("pictures")
PROMPTS = [
    "Write a Python function that adds two numbers, then one that subtracts them.",
    "List five fruits. Then list the same five fruits again, in reverse order.",
    "Why is the sky blue? Answer in two sentences.",
    "Write an email to a friend about a walk by the sea.",
    "What is a good breakfast for a cold morning?",
    "Explain to a child how a bicycle stays upright.",
    "A baker sells 12 loaves in the morning and twice as many in the afternoon. How many in all?",
    "Name three capitals of Europe, and one thing that each is known for.",
]
FRUITS = PROMPTS[1]
BUDGETS = {
    "chain": ([Chain(length) for length in (1, 2, 4, 6, 8)], "s--"),
    "widths <1, 1, k, 1, ...>": ([Widths((1, 1, k, 1, 1, 1, 1, 1)) for k in (1, 2, 3, 4, 5)], "^:"),
    "best-first": ([BestFirst(nodes, 8) for nodes in (1, 2, 4, 8, 16, 32)], "o-"),
}


def main() -> None:
    """Make all of them."""
    mpl.rcParams["svg.hashsalt"] = "specinfer"  # the same names inside, whenever it is made
    PICTURES.mkdir(exist_ok=True)
    decoder = SpeculativeDecoder.from_pretrained(dtype="float32", tree=BestFirst(16, 8, min_probability=0.05))
    decoder.generate(PROMPTS[0], max_new_tokens=64).to_svg(PICTURES / "tree.svg")
    result = decoder.generate(FRUITS, max_new_tokens=32)
    save(plot_mask(best(result).tree, decoder.tokenizer, prefix=40), "mask")
    page(inspect(decoder, result))
    timed = SpeculativeDecoder.from_pretrained()
    timed.generate(PROMPTS[0], max_new_tokens=96)  # it learns what passes cost
    save(plot_timeline(timed.generate(PROMPTS[0], max_new_tokens=64)), "timeline")
    trace = record(decoder, PROMPTS, max_new_tokens=48, nodes=32, depth=8, top=8)
    save(plot_acceptance(hits(trace)), "acceptance")
    save(plot_calibration([calibration(trace, name) for name in trace.drafts]), "calibration")
    save(budgets(trace), "budgets")


def best(result: Result) -> Any:
    """Return the step that gained most."""
    return max(result.steps, key=lambda step: len(step.path))


def budgets(trace: Trace) -> Any:
    """Draw tokens per target pass against the nodes of a tree, with the first of the drafts."""
    _, ax = plt.subplots(figsize=(6, 3.8), layout="constrained")
    for name, (policies, style) in BUDGETS.items():
        values = [replay(trace, policy, drafts=[0]).tokens_per_pass[0] for policy in policies]
        ax.plot([policy.max_nodes for policy in policies], values, style, label=name)
    bound = oracle(trace, BestFirst(32, 8), drafts=[0]).tokens_per_pass[0]
    ax.axhline(bound, color="gray", lw=1, label="oracle: the right path, if it was among the candidates")
    ax.set(xscale="log", xlabel="drafted nodes", ylabel="tokens per target pass", ylim=(1, None))
    ax.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"], minor=False)
    ax.minorticks_off()
    ax.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 0.93))
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def save(ax: Any, name: str) -> None:
    """Write a picture."""
    ax.figure.savefig(PICTURES / f"{name}.svg", metadata={"Date": None})
    plt.close(ax.figure)


def page(inspection: Any) -> None:
    """Photograph the interactive page, which opens at the round that gained most, with the pointer on a rejected node."""
    from selenium import webdriver

    chromium, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if not (chromium and driver):
        return
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    with TemporaryDirectory() as folder:
        flags = ("headless", "no-sandbox", "disable-gpu", "hide-scrollbars", "window-size=1000,800")
        for flag in (*flags, f"user-data-dir={folder}"):
            options.add_argument(f"--{flag}")
        browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        photograph(browser, inspection, Path(folder, "page.html"))
        browser.quit()


def photograph(browser: Any, inspection: Any, path: Path) -> None:
    """Open an inspection's page in a browser, and keep what it shows."""
    from selenium.webdriver.common.action_chains import ActionChains

    inspection.to_html(path)
    browser.get(path.as_uri())
    browser.set_window_size(1000, browser.execute_script("return document.documentElement.scrollHeight"))
    root = browser.find_element("css selector", ".specinfer").shadow_root
    ActionChains(browser).move_to_element(root.find_element("css selector", ".chip.rejected")).perform()
    browser.save_screenshot(str(PICTURES / "page.png"))


if __name__ == "__main__":
    main()
