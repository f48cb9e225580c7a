"""A trained draft's model card: README.md, and a plot of its training where matplotlib is installed.

Knows: what was trained, on what, and how well it guesses held-out text.  Does not know: how any of it was done.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from specinfer.common.files import write_whole
from specinfer.training.text import Prompt, TextSettings
from specinfer.training.train import TrainingSettings

LOSS_ROWS = 12  # of the loss curve in the card
PLOT = "loss.png"
NO_PLOT = "No plot: matplotlib was not installed."
KINDS = {
    "head": "an EAGLE-style head: decoder layers on the target's hidden states that borrow its embedding and output",
    "lm": "a plain small causal language model in Hugging Face format",
}

TEMPLATE = """---
base_model: {target}
library_name: specinfer
tags: [speculative-decoding, draft-model]
---

# Draft {name} for {target}

This is {kind}.
It proposes tokens for **{target}** in speculative decoding; the target verifies every one of them, so that the text
and its distribution are the target's own. Made by `specinfer distill`.

```python
from specinfer import SpeculativeDecoder

decoder = SpeculativeDecoder.from_pretrained("{target}", drafts=["path/to/this/folder"])
```

## Data

{data}

## Training

{training}

| setting | value |
|---|---|
{settings}

| step | loss | held-out top-1 |
|---|---|---|
{losses}

{plot}

## Measured acceptance

How often the target's own choice was among the draft's k likeliest tokens, on held-out texts ({held_out:.1%} of the
texts above; other texts of the same prompts may have been trained on). In step s the draft has read s - 1 tokens of its
own proposal, as on level s of a tree.

| step | {ranks} |
|---|{rules}|
{hits}
{coverage}
## What it is not for

- Not for any other target: it was fitted to this one's choices, and an EAGLE-style head to its hidden states.
- Not for writing text by itself: nothing but the target's verification makes its tokens right.
- The rates above hold for text like the data above; they say nothing about speed, other languages or other subjects.
- What the target must not be used for, this draft must not be used for either; the target's licence applies.
"""


@dataclass(frozen=True)
class Data:
    """What a draft was trained on."""

    prompts: dict[str, int]  # prompt files' names and how many prompts of each
    documents: dict[str, int]  # given text: files' names and how many documents of each
    texts: int
    tokens: int
    settings: TextSettings

    @classmethod
    def of(
        cls, prompts: Sequence[Prompt], documents: Sequence[Prompt], texts: int, tokens: int, settings: TextSettings
    ) -> "Data":
        """Count prompts and documents by file."""
        return cls(_by_file(prompts), _by_file(documents), texts, tokens, settings)

    def __str__(self) -> str:
        """Describe it, in Markdown."""
        asked, own = self.settings, ", ".join(f"{t:g}" for t in self.settings.temperatures)
        lines = [
            f"{self.texts:,} texts, {self.tokens:,} tokens, prompts included.",
            "",
            f"- The target's own text: up to {asked.new_tokens} new tokens, temperatures {own} in turn, seed "
            f"{asked.seed}; prompts of {_listed(self.prompts)}.",
        ]
        given = f"- Given text, learnt from under the target's distribution: {_listed(self.documents)}."
        return "\n".join([*lines, given] if self.documents else lines)


def write_card(
    folder: Path,
    target: str,
    arch: str,
    data: Data,
    training: TrainingSettings,
    figures: dict[str, Any],
    earlier: Sequence[Path] = (),
    start: Path | None = None,
) -> None:
    """Write ``README.md`` and, where matplotlib is installed, ``loss.png``.

    Args:
        folder: of the draft.
        target: its name on the hub, or its folder.
        arch: "head" or "lm".
        data: what it was trained on.
        training: how.
        figures: what training returned: ``history`` (dicts of step, loss, held_out), ``hits[step][k - 1]`` and, for a
            trimmed vocabulary, ``coverage`` and ``inverse_temperature``.
        earlier: folders of the drafts that it complements.
        start: folder of the draft that it was trained on from.

    Raises:
        SpecinferError, InputError: the disk is full, or the folder cannot be written.
    """
    plotted = write_plot(folder / PLOT, figures["history"])
    hits = figures["hits"]
    text = TEMPLATE.format(
        name=folder.name,
        target=Path(target).resolve().name if Path(target).is_dir() else target,  # a machine's paths say nothing
        kind=KINDS[arch],
        data=data,
        training=_training(figures, training, earlier, start),
        settings="\n".join(f"| {name} | {value} |" for name, value in asdict(training).items()),
        losses="\n".join(_loss_rows(figures["history"])),
        plot=f"![Loss and held-out hit rates]({PLOT})" if plotted else NO_PLOT,
        held_out=training.held_out,
        ranks=" | ".join(f"top-{k}" for k in range(1, len(hits[0]) + 1)),
        rules="|".join(["---"] * len(hits[0])),
        hits="\n".join(f"| {i} | {' | '.join(f'{rate:.3f}' for rate in row)} |" for i, row in enumerate(hits, 1)),
        coverage=_vocabulary(figures),
    )
    write_whole(folder / "README.md", text)


def write_plot(path: Path, history: Sequence[dict[str, Any]]) -> bool:
    """Plot loss and held-out hit rates of the first draft step against steps; return whether there is matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    steps = [entry["step"] for entry in history]
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(steps, [entry["loss"] for entry in history], marker=".")
    left.set(xlabel="step", ylabel="training loss")
    for k, rates in enumerate(zip(*(entry["held_out"][0] for entry in history), strict=True), 1):
        right.plot(steps, rates, marker=".", label=f"top-{k}")
    right.set(xlabel="step", ylabel="held-out hit rate", ylim=(0, 1))
    right.legend(fontsize="small")
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    write_whole(path, picture.getvalue())
    return True


def _training(figures: dict[str, Any], training: TrainingSettings, earlier: Sequence[Path], start: Path | None) -> str:
    goals = {
        "kl": "the target's distribution (forward Kullback-Leibler divergence)",
        "token": "the target's chosen tokens",
    }
    text = f"{figures['steps']:,} steps on {goals[training.loss]}."
    if start:
        text += f" It was trained on from {start.name}; its weights are the mean of those before and after."
    if earlier:
        names = " and ".join(folder.name for folder in earlier)
        text += f" Boost-tuned after draft {names}: a token that one of those proposes first weighs {training.boost:g}."
    return text


def _loss_rows(history: Sequence[dict[str, Any]]) -> list[str]:
    """Return rows of the loss curve, evenly spaced, the last one among them."""
    every = -(-len(history) // LOSS_ROWS)
    chosen = history[::-1][::every][::-1]
    return [f"| {entry['step']} | {entry['loss']:.4f} | {entry['held_out'][0][0]:.3f} |" for entry in chosen]


def _vocabulary(figures: dict[str, Any]) -> str:
    if "coverage" not in figures:
        return ""
    return (
        f"\nIts vocabulary covers {figures['coverage']:.1%} of the tokens that it was trained on. When sampling, its "
        f"log-probabilities are multiplied by {figures['inverse_temperature']:g} before the target's noise is added.\n"
    )


def _by_file(prompts: Sequence[Prompt]) -> dict[str, int]:
    return dict(Counter(Path(prompt.file).name for prompt in prompts))


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} ({number:,})" for name, number in counts.items())
