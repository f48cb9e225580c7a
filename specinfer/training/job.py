"""A training: its job, its checkpoints on disk, and the processes that share it.

Knows: settings, figures and checkpoints.  Does not know: how text is made (`text`), how a draft is trained (`train`).
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.optim import Optimizer

from specinfer.common.files import lock_settings, parse_json, read_json, weights_digest, write_whole
from specinfer.common.progress import Figures
from specinfer.common.values import installed
from specinfer.errors import InputError, one_line

if TYPE_CHECKING:
    from accelerate import PartialState

TIMEOUT = timedelta(days=7)  # of processes that wait for the one that writes the text


@dataclass(frozen=True)
class TrainingSettings:
    """How a draft is trained."""

    epochs: float = 3.0
    minutes: float | None = None  # of training, instead of epochs
    tokens_per_batch: int = 2048
    learning_rate: float = 4.5e-3  # of the matrices; a third of it for the rest
    warmup: float = 0.03  # share of the steps
    loss: str = "kl"  # or "token"
    unroll: int = 3  # successive draft steps of a head
    decay: float = 0.8  # weight of a step, relative to the step before it
    boost: float = 0.2  # weight of tokens that an earlier draft proposes first
    vocabulary: int = 12_000  # tokens a head may propose
    layers: int = 1
    held_out: float = 0.02
    seed: int = 0
    checkpoint_every: int = 200  # steps


@dataclass(frozen=True)
class TrainingJob:
    """One draft to be trained."""

    folder: Path
    arch: str
    settings: TrainingSettings
    aux_layers: Sequence[int]  # the target's hidden states in the texts, as transformers counts layers
    earlier: Sequence[Path] = ()  # folders of the drafts that this one complements
    start: Path | None = None  # folder of the head whose training goes on; None begins anew
    earlier_starts: Sequence[Path] = ()  # the same for the earlier drafts
    target: str = ""  # the target's name

    def lock_settings(self) -> None:
        """Record the settings in the folder, or check that they are the recorded ones.

        Raises:
            InputError: the folder was begun with other settings.
        """
        settings = {"arch": self.arch, "start": self.start and weights_digest(self.start), **self.used_settings()}
        if self.earlier_starts:
            settings["earlier"] = [weights_digest(folder) for folder in self.earlier_starts]
        del settings["learning_rate"], settings["checkpoint_every"]  # training may go on with others
        checkpoint = Checkpoint(self.folder)
        begun = f"{self.folder} and {checkpoint.path}"
        advice = f"take the old settings, or remove {begun} to train it anew on the same text"
        empty = not (checkpoint.path.exists() or (self.folder / "figures.json").exists())
        lock_settings(self.folder / "settings.json", settings, advice, empty)

    def used_settings(self) -> dict[str, object]:
        """Return the settings that say something."""
        return {name: value for name, value in asdict(self.settings).items() if value is not None}

    def figures(self) -> Figures | None:
        """Return the figures of a finished training, or None.

        Raises:
            InputError: the file of figures is damaged.
        """
        path = self.folder / "figures.json"
        found = read_json(path)
        if found is None or (isinstance(found, dict) and {"steps", "history", "hits"} <= found.keys()):
            return found
        raise InputError(f"{path} does not hold the figures of a training: remove it, and the draft is trained anew")


class Checkpoint:
    """The checkpoint beside a draft's folder: one file, which a new one replaces as a whole.

    Args:
        draft: the draft's folder.
    """

    def __init__(self, draft: Path) -> None:
        self.path = draft.with_name(f"{draft.name}.checkpoint.safetensors")

    def save(self, model: nn.Module, optimizers: Sequence[Optimizer], step: int, history: list[Figures]) -> None:
        """Write the checkpoint in the place of the one before.

        Raises:
            SpecinferError, InputError: the disk is full, or the folder cannot be written.
        """
        tensors = {f"model.{name}": weight for name, weight in model.state_dict().items()}
        for number, optimizer in enumerate(optimizers):
            for index, state in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{number}.{index}.{name}": value for name, value in state.items()}
        copies = {name: value.detach().clone().contiguous() for name, value in tensors.items()}  # also of tied weights
        write_whole(self.path, save(copies, {"progress": json.dumps({"step": step, "history": history})}))

    def load(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[int, list[Figures]]:
        """Return the steps done and the history, (0, []) where nothing was saved.

        Raises:
            InputError: the checkpoint is damaged.
        """
        if not self.path.exists():
            return 0, []
        weights: dict[str, Tensor] = {}
        states: list[dict[int, dict[str, Tensor]]] = [{} for _ in optimizers]
        try:
            with safe_open(self.path, "pt") as file:
                record = parse_json(file.metadata()["progress"])
            for name, tensor in load_file(self.path).items():
                kind, rest = name.split(".", 1)
                if kind == "model":
                    weights[rest] = tensor
                else:
                    number, index, field = rest.split(".", 2)
                    states[int(number)].setdefault(int(index), {})[field] = tensor
            model.load_state_dict(weights)
            for optimizer, state in zip(optimizers, states, strict=True):
                optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
            return record["step"], record["history"]
        except (SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
            advice = "remove it, and training begins anew"
            raise InputError(f"{self.path} is damaged ({one_line(error, 120)}): {advice}") from error


def processes(device: torch.device) -> "PartialState":
    """Return the processes that train together: this one, and those that a launcher started with it.

    Returns:
        accelerate's ``PartialState``.

    Raises:
        InputError: accelerate is not installed.
    """
    accelerate = installed("accelerate", "training needs accelerate")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # accelerate takes the current device
    return accelerate.PartialState(cpu=device.type == "cpu", timeout=TIMEOUT)
