"""Making drafts for a target: the target writes text, drafts learn from it one after the other, each gets a card.

    from specinfer.training import Recipe, distill, read_prompts
    distill(model, tokenizer, read_prompts(["prompts.jsonl"]), Path("drafts"), Recipe(drafts=2))
    SpeculativeDecoder.from_pretrained("target", drafts=["drafts/1", "drafts/2"])

Knows: the order of the work, and what was finished before.  Does not know: how text is made (`text`) or learnt
(`train`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import inf
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specinfer.attention import TreeModel, is_dispatched
from specinfer.attention.packed.modules import is_packed
from specinfer.common.files import expanded, locked, write_json
from specinfer.common.progress import Figures, Progress
from specinfer.drafts.head import HeadDraft, check_fingerprint
from specinfer.errors import InputError, UnsupportedModel
from specinfer.training import train
from specinfer.training.card import ARCHITECTURES, LOSSES, describe_data, write_card
from specinfer.training.job import TrainingJob, TrainingSettings, processes
from specinfer.training.logits import check_logits
from specinfer.training.losses import RANKS
from specinfer.training.recorded_text import (
    TextFolder,
    TextSettings,
    TrainingPrompt,
    default_aux_layers,
    plan_text,
    read_documents,
    read_prompts,
)

__all__ = ["Recipe", "TextSettings", "TrainingSettings", "distill", "processes", "read_documents", "read_prompts"]


@dataclass(frozen=True)
class Recipe:
    """What to make.

    Raises:
        InputError: a setting is unknown or makes nothing.
    """

    drafts: int = 2
    arch: str = "head"  # or "lm"
    text: TextSettings = field(default_factory=TextSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    start: tuple[Path, ...] = ()  # folders of heads whose training the first drafts go on with; sizes stay

    def __post_init__(self) -> None:
        if self.drafts < 1:
            raise InputError(f"drafts={self.drafts} trains nothing: give at least 1")
        for name, value, known in (("arch", self.arch, ARCHITECTURES), ("loss", self.training.loss, LOSSES)):
            if value not in known:
                raise InputError(f"{name} {value!r} is unknown: choose {' or '.join(known)}")
        if self.start and (self.arch != "head" or len(self.start) > self.drafts):
            raise InputError(
                f"{len(self.start)} heads to train on from, but {self.drafts} drafts of arch {self.arch!r}: "
                "give at most one for each draft, and arch='head'"
            )
        if self.arch == "lm" and self.drafts > 1:
            raise InputError("only heads are boost-tuned, so further drafts of arch 'lm' would be the same: drafts=1")
        for name in ("epochs", "minutes", "learning_rate", "vocabulary", "layers"):
            value = getattr(self.training, name)
            if value is not None and not 0 < value < inf:
                raise InputError(f"{name}={value} trains nothing: give a finite number above 0")
        if self.arch == "head" and self.training.vocabulary < RANKS:
            raise InputError(f"vocabulary={self.training.vocabulary} is too small: give at least {RANKS}")


def distill(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[TrainingPrompt],
    out: Path,
    recipe: Recipe = Recipe(),
    documents: Sequence[TrainingPrompt] = (),
    name: str | None = None,
    progress: Progress = lambda *_: None,
) -> Figures:
    """Make drafts for a target, in ``out/1``, ``out/2``, ...; drafts that an earlier call finished are not made again.

    Args:
        model: the target, a ``transformers`` causal LM on its device.
        tokenizer: the target's.
        prompts: that the target continues (`read_prompts`).
        out: the folder for drafts, and for the text in ``out/text``.
        recipe: what to make.
        documents: given text to learn from (`read_documents`).
        name: of the target, in the cards; the model's own by default.
        progress: gets the stage ("text", "draft 1", ...), units done, units in all, and figures: the loss, for example.

    Returns:
        ``{"out": folder, "texts": number, "tokens": number, "drafts": [{"folder": ..., **figures}]}`` with the figures
        that training returned

    Raises:
        InputError: before the target runs: no tokenizer, a prompt is too long, or the folder has other settings, is
            held by another run or cannot be written.
        UnsupportedModel: the target's logits do not follow from its last hidden states (`check_logits`), or it was
            loaded with a ``device_map``, its weights are packed, or an lm cannot be made of so many of its layers.
        ModelError, TokenizerMismatch: a draft to train on from is no head, or belongs to another target.
        NumericalError: the loss is not a number; the last good checkpoint stays.
        SpecinferError: the disk is full; finished drafts stay.
    """
    _check_target(model, recipe)
    out = expanded(out)
    process = processes(model.device)
    name = name or model.name_or_path or type(model).__name__
    name = Path(name).resolve().name if Path(name).exists() else name  # no paths of this machine
    jobs = _plan_training(model, tokenizer, out, recipe, name)
    batches = plan_text(TreeModel(model), tokenizer, prompts, documents, recipe.text)
    texts = sum(map(len, batches))
    if texts < 2:
        raise InputError("one text is held out, so one alone leaves nothing to train on: give more prompts or samples")
    text_folder = TextFolder(out / "text", model, tokenizer, jobs[0].aux_layers, recipe.text, batches)
    with locked(out if process.is_main_process else None):
        with process.main_process_first():  # the other processes find the text made
            text_folder.lock_settings()
            for job in jobs:
                job.lock_settings()
            if any(job.figures() is None for job in jobs):
                check_logits(model)
            shards, tokens = text_folder.write(progress)
        data = describe_data(prompts, documents, texts, tokens, recipe.text)
        trained = [_train(model, tokenizer, shards, job, data, progress) for job in jobs]
    return {"out": str(out), "texts": texts, "tokens": tokens, "drafts": trained}


def _check_target(model: PreTrainedModel, recipe: Recipe) -> None:
    if is_dispatched(model):
        raise UnsupportedModel("a target loaded with a device_map cannot be trained for: load it on one device")
    if is_packed(model):
        advice = "train on the unquantised model, whose drafts fit this one as well"
        raise UnsupportedModel(f"the target's weights are packed, and training reads them as numbers: {advice}")
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if recipe.arch == "lm" and recipe.training.layers > layers:
        raise InputError(f"layers={recipe.training.layers} of an lm are more than the target's {layers}: give fewer")
    if recipe.arch == "lm":
        train.outer_layers(model, recipe.training.layers)  # before hours of text are made


def _train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    shards: Sequence[Path],
    job: TrainingJob,
    data: str,
    progress: Progress,
) -> Figures:
    """Train one draft unless that was done; return its folder and figures."""
    process = processes(model.device)
    train_draft = train.train_head if job.arch == "head" else train.train_causal_lm
    figures = job.figures() or train_draft(model, tokenizer, shards, job, progress)
    if process.is_main_process:
        write_json(job.folder / "figures.json", figures)
        write_card(job, data, figures)
    process.wait_for_everyone()
    return {"folder": str(job.folder), **figures}


def _plan_training(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path, recipe: Recipe, target: str
) -> list[TrainingJob]:
    """Return the drafts to be trained; heads that are trained on keep their sizes and auxiliary hidden states."""
    heads = [HeadDraft.load(folder) for folder in recipe.start]
    for folder, head in zip(recipe.start, heads, strict=True):
        check_fingerprint(str(folder), head.fingerprint, model, tokenizer)
        if head.aux_layers != heads[0].aux_layers:
            raise InputError(
                f"{folder} reads the target's layers {head.aux_layers}, {recipe.start[0]} {heads[0].aux_layers}, and "
                "texts are kept with one choice of states: train them on in two calls"
            )
    aux_layers = heads[0].aux_layers if heads else default_aux_layers(model)
    folders = [out / str(number) for number in range(1, recipe.drafts + 1)]
    jobs = []
    for index, (folder, start, head) in enumerate(zip_longest(folders, recipe.start, heads)):
        settings = recipe.training
        if head:
            config = head.head.config
            settings = replace(settings, layers=config.num_hidden_layers, vocabulary=config.vocab_size)
        earlier, earlier_starts = folders[:index], recipe.start[:index]
        jobs.append(TrainingJob(folder, recipe.arch, settings, aux_layers, earlier, start, earlier_starts, target))
    return jobs
