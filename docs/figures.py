"""Make the pictures of README and docs, in docs/pictures/, with the default target.

    python docs/figures.py

A picture of times belongs to the machine that made it.  The interactive pages are photographed if Chromium and its
driver are installed; otherwise their pictures stay as they were.  The flow of a step, step.svg, is drawn by hand.
"""

import shutil
from base64 import b64decode
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from PIL import Image

from specinfer import BestFirst, Chain, Expansion, SpeculativeDecoder, inspect
from specinfer.evaluation.traces import Trace, calibration, hits, oracle, record, replay
from specinfer.viz import SideBySide
from specinfer.viz.plots import plot_acceptance, plot_calibration, plot_mask, plot_timeline

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
BUDGETS = {
    "chain": ([Chain(length) for length in (1, 2, 4, 6, 8)], "s--"),
    "expansion <1, 1, k, 1, ...>": ([Expansion((1, 1, k, 1, 1, 1, 1, 1)) for k in (1, 2, 3, 4, 5)], "^:"),
    "best-first": ([BestFirst(nodes, 8) for nodes in (1, 2, 4, 8, 16, 32)], "o-"),
}


def main() -> None:
    """Make all of them."""
    mpl.rcParams["svg.hashsalt"] = "specinfer"  # the same element names every time
    PICTURES.mkdir(exist_ok=True)
    tree = BestFirst(16, 8, min_probability=0.05)
    decoder = SpeculativeDecoder.from_pretrained(dtype="float32", tree=tree)
    result = decoder.generate(PROMPTS[0], max_new_tokens=64)
    result.to_svg(PICTURES / "tree.svg")
    best = max(result.steps, key=lambda step: len(step.path))
    save(plot_mask(best, decoder.tokenizer, prefix=len(result.prompt_ids)), "mask")
    chain = SpeculativeDecoder(decoder.target.model, decoder.tokenizer, drafts=decoder.drafts, tree=Chain(4))
    sequence = chain.generate(PROMPTS[0], max_new_tokens=64)
    photograph(inspect(decoder, result), SideBySide(result, sequence))
    timed = SpeculativeDecoder.from_pretrained(tree=tree)
    timed.generate(PROMPTS[0], max_new_tokens=16)  # the first call takes longer
    save(plot_timeline(timed.generate(PROMPTS[0], max_new_tokens=48)), "timeline")
    trace = record(decoder, PROMPTS, max_new_tokens=48, nodes=32, depth=8, top=8)
    save(plot_acceptance(hits(trace)), "acceptance")
    save(plot_calibration([calibration(trace, name) for name in trace.drafts]), "calibration")
    save(budgets(trace), "budgets")


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
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(0.02, 0.72))
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def save(ax: Any, name: str) -> None:
    """Write a picture."""
    ax.figure.savefig(PICTURES / f"{name}.svg", metadata={"Date": None})
    plt.close(ax.figure)


def photograph(inspection: Any, pair: Any) -> None:
    """Photograph a page at the round that gained most, the pointer on a rejected node, and two results at pass 8."""
    from selenium import webdriver
    from selenium.webdriver.common.action_chains import ActionChains

    chromium, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if not (chromium and driver):
        return
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    with TemporaryDirectory() as folder:
        for flag in (
            "headless",
            "no-sandbox",
            "disable-gpu",
            "window-size=1240,900",
            "force-prefers-reduced-motion",
            f"user-data-dir={folder}/profile",
        ):
            options.add_argument(f"--{flag}")
        browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        for name, thing in (("page", inspection), ("side_by_side", pair)):
            thing.to_html(Path(folder, f"{name}.html"))
            browser.get(Path(folder, f"{name}.html").as_uri())
            root = browser.find_element("css selector", ".specinfer").shadow_root
            if thing is pair:
                root.find_element("css selector", ".block:nth-child(8)").click()
            else:
                ActionChains(browser).move_to_element(root.find_element("css selector", ".chip.rejected")).perform()
            width, height = browser.execute_script("const e = document.body; return [e.clientWidth, e.scrollHeight]")
            clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
            shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
            picture = (
                Image.open(BytesIO(b64decode(shot["data"]))).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)
            )
            picture.save(PICTURES / f"{name}.png", optimize=True)
        browser.quit()


if __name__ == "__main__":
    main()
