"""Making drafts for a target: the target writes text, drafts learn from it one after the other, each gets a card.

    from specinfer.distill import Recipe, distill, read_prompts
    distill(model, tokenizer, read_prompts(["prompts.jsonl"]), Path("drafts"), Recipe(drafts=2))
    SpeculativeDecoder.from_pretrained("target", drafts=["drafts/1", "drafts/2"])

Knows: the order of things, and what was finished before.  Does not know: how text is made (`text`), training (`train`).
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

import torch

from specinfer.attention import TreeModel
from specinfer.common.files import lock_settings, locked, read_json, weights_digest, write_json
from specinfer.drafts.head import HeadDraft, check_fingerprint
from specinfer.errors import InputError
from specinfer.training import train
from specinfer.training.card import Data, write_card
from specinfer.training.logits import check_logits
from specinfer.training.text import (
    Prompt,
    TextSettings,
    count,
    default_aux_layers,
    lock_text_settings,
    plan_text,
    read_documents,
    read_prompts,
    write_text,
)
from specinfer.training.train import TrainingSettings

__all__ = ["Recipe", "TextSettings", "TrainingSettings", "distill", "processes", "read_documents", "read_prompts"]

ARCHITECTURES = ("head", "lm")  # an EAGLE-style head; a plain small causal LM
LOSSES = ("kl", "token")
PATIENCE = timedelta(days=7)  # of processes that wait for the one that writes the text

Progress = Callable[[str, int, int, dict[str, Any]], None]  # stage, units done, units in all, figures


@dataclass(frozen=True)
class Recipe:
    """What to make, checked."""

    drafts: int = 2
    arch: str = "head"  # or "lm"
    text: TextSettings = field(default_factory=TextSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    start: tuple[Path, ...] = ()  # folders of heads that the first drafts are trained on from, with their sizes

    def __post_init__(self) -> None:
        if self.drafts < 1:
            raise InputError(f"drafts={self.drafts} trains nothing: give at least 1")
        for name, value, known in (("arch", self.arch, ARCHITECTURES), ("loss", self.training.loss, LOSSES)):
            if value not in known:
                raise InputError(f"{name} {value!r} is unknown: choose {' or '.join(known)}")
        if self.start and (self.arch == "lm" or len(self.start) > self.drafts):
            raise InputError(
                f"{len(self.start)} heads to train on from, but {self.drafts} drafts of arch {self.arch!r}: "
                "give at most one for each draft, and arch='head'"
            )
        if self.arch == "lm" and self.drafts > 1:
            raise InputError("only EAGLE-style heads are boost-tuned, so further lm drafts would be the same: drafts=1")
        for name in ("epochs", "learning_rate", "vocabulary", "layers"):
            if not 0 < getattr(self.training, name) < inf:
                raise InputError(f"{name}={getattr(self.training, name)} trains nothing: give a finite number above 0")
        if self.arch == "head" and self.training.vocabulary < train.RANKS:
            raise InputError(f"vocabulary={self.training.vocabulary} is too small: give at least {train.RANKS}")


def distill(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    out: Path,
    recipe: Recipe = Recipe(),
    documents: Sequence[Prompt] = (),
    name: str | None = None,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Make drafts for a target, in ``out/1``, ``out/2``, ...; what was finished by an earlier call is not made again.

    Args:
        model: the target, a ``transformers`` causal LM on its device.
        tokenizer: the target's.
        prompts: what the target continues (`read_prompts`).
        out: the folder for drafts, and for the text in ``out/text``.
        recipe: what to make.
        documents: given text, learnt from as it stands (`read_documents`).
        name: what the cards call the target; the model's own name by default.
        progress: told the stage ("text", "draft 1", ...), how far it is, and figures such as the loss.

    Returns:
        ``{"out": folder, "texts": number, "tokens": number, "drafts": [{"folder": ..., **figures}]}``, the figures that
        training returned

    Raises:
        InputError: before the target runs: no tokenizer, a prompt too long, a folder of other settings, held by another
            run or not writable.
        UnsupportedModel: the target's logits do not follow from its last hidden states (`check_logits`).
        ModelError, TokenizerMismatch: what is trained on from is no head, or one of another target.
        NumericalError: a loss that is not a number; the last good checkpoint stays.
        SpecinferError: a full disk; what was finished stays.
    """
    process = processes(model.device)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if recipe.arch == "lm" and recipe.training.layers > layers:
        raise InputError(f"layers={recipe.training.layers} of an lm are more than the target's {layers}: give fewer")
    aux_layers, jobs = _plan_training(model, tokenizer, out, recipe)
    batches = plan_text(TreeModel(model), tokenizer, prompts, documents, recipe.text)
    if sum(map(len, batches)) < 2:
        raise InputError("one text is held out, so one alone leaves nothing to train on: give more prompts or samples")

    with locked(out if process.is_main_process else None):
        with process.main_process_first():  # the others find the text made
            lock_text_settings(model, tokenizer, out / "text", batches, aux_layers, recipe.text)
            for job in jobs:
                job.lock_settings()
            if any(job.figures() is None for job in jobs):
                check_logits(model)
            shards = write_text(
                model, tokenizer, batches, out / "text", aux_layers, recipe.text.new_tokens, partial(progress, "text")
            )
        texts, tokens = count(shards)
        data = Data.of(prompts, documents, texts, tokens, recipe.text)
        trained = []
        for job in jobs:
            figures = job.figures()
            if figures is None:
                figures = job.train(model, tokenizer, shards, aux_layers, progress)
            if process.is_main_process:
                write_json(job.folder / "figures.json", figures)
                made_for = name or model.name_or_path or type(model).__name__
                write_card(job.folder, made_for, job.arch, data, job.settings, figures, job.earlier, job.start)
            process.wait_for_everyone()
            trained.append({"folder": str(job.folder), **figures})
        return {"out": str(out), "texts": texts, "tokens": tokens, "drafts": trained}


@dataclass(frozen=True)
class TrainingJob:
    """One draft to be trained."""

    folder: Path
    arch: str
    settings: TrainingSettings
    earlier: Sequence[Path]  # folders of those it complements
    start: Path | None  # of the head it is trained on from
    earlier_starts: Sequence[Path] = ()  # what the earlier ones are trained on from

    def lock_settings(self) -> None:
        """Pin the folder to these settings."""
        settings = {"arch": self.arch, "start": self.start and weights_digest(self.start), **asdict(self.settings)}
        if self.earlier_starts:
            settings["earlier"] = [weights_digest(folder) for folder in self.earlier_starts]
        del settings["learning_rate"], settings["checkpoint_every"]  # training may go on with others
        begun = self.folder.with_name(f"{self.folder.name}.checkpoint")
        half = begun.with_suffix(".new")  # left by a kill between the two halves of a checkpoint's swap
        advice = f"take the old settings, or remove {self.folder} and {begun} to train it anew on the same text"
        empty = not any(path.exists() for path in (begun, half, self.folder / "figures.json"))
        lock_settings(self.folder / "settings.json", settings, advice, empty)

    def figures(self) -> dict[str, Any] | None:
        """Return the figures of an earlier training, None if it was not finished.

        Raises:
            InputError: they are damaged.
        """
        path = self.folder / "figures.json"
        found = read_json(path)
        if found is None or (isinstance(found, dict) and {"steps", "history", "hits"} <= found.keys()):
            return found
        raise InputError(f"{path} does not hold the figures of a training: remove it, and the draft is trained anew")

    def train(
        self, model: Any, tokenizer: Any, shards: Sequence[Path], aux_layers: Sequence[int], progress: Progress
    ) -> dict[str, Any]:
        """Train it; return its figures."""
        told = partial(progress, f"draft {self.folder.name}")
        if self.arch == "lm":
            return train.train_causal_lm(model, tokenizer, shards, self.folder, self.settings, told)
        return train.train_head(
            model, tokenizer, shards, aux_layers, self.folder, self.settings, self.earlier, self.start, told
        )


def _plan_training(model: Any, tokenizer: Any, out: Path, recipe: Recipe) -> tuple[list[int], list[TrainingJob]]:
    """Return the target's hidden states that drafts read, and the drafts to be trained."""
    heads = [HeadDraft.load(folder) for folder in recipe.start]
    for folder, head in zip(recipe.start, heads, strict=True):
        check_fingerprint(str(folder), head.fingerprint, model, tokenizer)
        if head.aux_layers != heads[0].aux_layers:
            raise InputError(
                f"{folder} reads the target's layers {head.aux_layers}, {recipe.start[0]} {heads[0].aux_layers}, and "
                "texts are kept with one choice of states: train them on in two calls"
            )
    folders = [out / str(number) for number in range(1, recipe.drafts + 1)]
    jobs = []
    for number, folder in enumerate(folders):
        start, settings = None, recipe.training
        if number < len(heads):
            config = heads[number].head.config
            start = recipe.start[number]
            settings = replace(settings, layers=config.num_hidden_layers, vocabulary=config.vocab_size)
        jobs.append(TrainingJob(folder, recipe.arch, settings, folders[:number], start, recipe.start[:number]))
    return list(heads[0].aux_layers if heads else default_aux_layers(model)), jobs


def processes(device: torch.device) -> Any:
    """Return the processes that train together on such devices: this one, and those that a launcher started with it.

    Returns:
        accelerate's ``PartialState``.

    Raises:
        InputError: accelerate is not installed.
    """
    if find_spec("accelerate") is None:
        raise InputError("training needs accelerate: pip install accelerate")
    from accelerate import PartialState

    if device.type == "cuda":
        torch.cuda.set_device(device)  # accelerate takes the current one
    return PartialState(cpu=device.type == "cpu", timeout=PATIENCE)
