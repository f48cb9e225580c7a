"""What to train: a draft's settings, its folder, and the records in that folder.

Knows: settings, records, what a finished training leaves.  Does not know: how text is made, how a draft is trained.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from specinfer.common.files import lock_settings, read_json, weights_digest
from specinfer.errors import InputError
from specinfer.training.checkpoint import Checkpoint

TIMEOUT = timedelta(days=7)  # of processes that wait for the one that writes the text
ProgressCallback = Callable[[str, int, int, dict[str, Any]], None]  # stage, units done, units in all, figures


@dataclass(frozen=True)
class TrainingSettings:
    """How a draft is trained."""

    epochs: float = 3.0
    tokens_per_batch: int = 2048
    learning_rate: float = 4.5e-3  # of the matrices; a third of it for the rest
    warmup: float = 0.03  # share of the steps
    loss: str = "kl"  # or "token"
    unroll: int = 3  # chained draft steps of a head
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
    arch: str  # "head" or "lm"
    settings: TrainingSettings
    aux_layers: Sequence[int]  # the target's hidden states in the texts, as transformers counts layers
    earlier: Sequence[Path] = ()  # folders of the drafts that this one complements
    start: Path | None = None  # folder of the head whose training goes on; None begins anew
    earlier_starts: Sequence[Path] = ()  # the same for the earlier drafts

    def lock_settings(self) -> None:
        """Record the settings in the folder, or check that they are the recorded ones.

        Raises:
            InputError: the folder was begun with other settings.
        """
        settings = {"arch": self.arch, "start": self.start and weights_digest(self.start), **asdict(self.settings)}
        if self.earlier_starts:
            settings["earlier"] = [weights_digest(folder) for folder in self.earlier_starts]
        del settings["learning_rate"], settings["checkpoint_every"]  # training may go on with others
        checkpoint = Checkpoint(self.folder)
        begun = f"{self.folder} and {checkpoint.folder}"
        advice = f"take the old settings, or remove {begun} to train it anew on the same text"
        empty = not (checkpoint.exists() or (self.folder / "figures.json").exists())
        lock_settings(self.folder / "settings.json", settings, advice, empty)

    def figures(self) -> dict[str, Any] | None:
        """Return the figures of a finished training, or None.

        Raises:
            InputError: the file of figures is damaged.
        """
        path = self.folder / "figures.json"
        found = read_json(path)
        if found is None or (isinstance(found, dict) and {"steps", "history", "hits"} <= found.keys()):
            return found
        raise InputError(f"{path} does not hold the figures of a training: remove it, and the draft is trained anew")


def processes(device: torch.device) -> Any:
    """Return the processes that train together: this one, and those that a launcher started with it.

    Returns:
        accelerate's ``PartialState``.

    Raises:
        InputError: accelerate is not installed.
    """
    if find_spec("accelerate") is None:
        raise InputError("training needs accelerate: pip install accelerate")
    from accelerate import PartialState

    if device.type == "cuda":
        torch.cuda.set_device(device)  # accelerate takes the current device
    return PartialState(cpu=device.type == "cpu", timeout=TIMEOUT)
