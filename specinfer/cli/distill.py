"""``specinfer distill``: drafts for a target.

Knows: the options.  Does not know: how drafts are trained (`training`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from specinfer.cli import options
from specinfer.cli.terminal import loading, print_json, resumable, show
from specinfer.common.progress import Bars, busy
from specinfer.common.records import Record
from specinfer.errors import InputError

if TYPE_CHECKING:
    from specinfer.loading import Loaded
    from specinfer.training import TextSettings, TrainingSettings


@dataclass(frozen=True)
class Written:
    """What the target writes."""

    samples: Annotated[int | None, Option(help="Texts that the target writes.", show_default="one per prompt")] = None
    new_tokens: Annotated[int, Option(help="New tokens per text at most.")] = 144
    temperatures: Annotated[str, Option(help="Temperatures of the texts, in turn; 0 = greedy.")] = "0,0.7,1"

    def settings(self, seed: int) -> "TextSettings":
        """Return them as training takes them."""
        from specinfer.training import TextSettings

        sampled_at = options.numbers("--temperatures", self.temperatures, float, "numbers like 0,0.7,1")
        return TextSettings(self.samples, self.new_tokens, sampled_at, seed)


@dataclass(frozen=True)
class Steps:
    """How a draft is trained."""

    epochs: Annotated[float | None, Option(help="Times that every text is seen.", show_default="3")] = None
    time: Annotated[
        float | None, Option(help="Minutes to train each draft for, instead of --epochs.", show_default="none")
    ] = None
    layers: Annotated[int, Option(help="Layers of a head without --start, or of the small causal LM.")] = 1
    vocabulary: Annotated[int, Option(help="Most frequent tokens, which a head without --start may propose.")] = 12_000
    learning_rate: Annotated[float, Option(help="Learning rate of the matrices (Muon), at its peak.")] = 4.5e-3
    loss: Annotated[str, Option(help="kl (the target's distribution) or token (its choices).")] = "kl"

    def settings(self, seed: int) -> "TrainingSettings":
        """Return them as training takes them."""
        from specinfer.training import TrainingSettings

        if self.time is not None and self.epochs is not None:
            raise InputError("--epochs and --time both say how long to train: give one of them")
        given = {name: value for name, value in vars(self).items() if name not in ("epochs", "time")}
        return TrainingSettings(3.0 if self.epochs is None else self.epochs, self.time, seed=seed, **given)


def distill(
    prompts: Annotated[
        list[Path], Option(help='JSON lines with "prompt" (and "split": only train), or .txt by line. Repeat.')
    ],
    out: Annotated[Path, Option(help="Folder for drafts and text; the same command resumes.")],
    target: options.Target = None,
    text: Annotated[
        list[Path] | None, Option(help="Files of text to learn from as well: each block or line is a document. Repeat.")
    ] = None,
    drafts: Annotated[
        int | None, Option(help="Heads, each tuned on what the earlier ones miss.", show_default="2, of an lm 1")
    ] = None,
    start: Annotated[
        list[str] | None,
        Option(help="Heads to train on from, sizes and all: folders, or bundled. Repeat.", show_default="none"),
    ] = None,
    arch: Annotated[str, Option(help="head (reads the target's states) or lm (a small LM).")] = "head",
    *,
    written: Written,
    steps: Steps,
    seed: Annotated[int, Option(help="Seed of texts and training.")] = 0,
    device: options.Device,
    as_json: options.Json = False,
) -> None:
    """Train drafts for a target on text that the target writes."""
    options.check_paths(target)
    with loading():
        from specinfer import training
        from specinfer.loading import load

    number = (2 if arch == "head" else 1) if drafts is None else drafts
    recipe = training.Recipe(number, arch, written.settings(seed), steps.settings(seed))
    asked, documents = training.read_prompts(prompts), training.read_documents(text or ())
    with loading(target):
        loaded = load(target, device.dtype, device.device)
    with busy("reading the prompts"), resumable(out):
        recipe = replace(recipe, start=_folders(start or (), loaded))
        first = training.processes(loaded.model.device).is_main_process
        progress = Bars() if first else lambda *_: None
        made = training.distill(loaded.model, loaded.tokenizer, asked, out, recipe, documents, loaded.name, progress)
    if first and as_json:
        print_json(made)
    elif first:
        show([_row(draft) for draft in made["drafts"]])


def _row(draft: Record) -> dict[str, object]:
    """Return a draft's line of the table."""
    rates = {f"top-{k}": f"{rate:.3f}" for k, rate in enumerate(draft["hits"][0], 1)}
    return {"draft": draft["folder"], "steps": draft["steps"], **rates}


def _folders(start: Sequence[str], loaded: "Loaded") -> tuple[Path, ...]:
    """Return the folders of the heads to train on from; "bundled" becomes the folders of those."""
    from specinfer.drafts.bundled import bundled_folders

    bundled = [*bundled_folders(loaded.model, loaded.tokenizer)] if "bundled" in start else []
    if "bundled" in start and not bundled:
        raise InputError(f"--start bundled: no heads for {loaded.name} come with the package; leave it out")
    return tuple(path for name in start for path in (bundled if name == "bundled" else [Path(expanduser(name))]))
