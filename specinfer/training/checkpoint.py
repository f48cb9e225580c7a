"""The checkpoint of a training: weights, optimizers and history, in safetensors and JSON.

Knows: its files, and how they replace older ones.  Does not know: what is trained, or when to save.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specinfer.common.files import read_json, storing, sync, write_json
from specinfer.errors import InputError


class Checkpoint:
    """The checkpoint beside a draft's folder.  A new one replaces the old one as a whole.

    Args:
        draft: the draft's folder.
    """

    def __init__(self, draft: Path) -> None:
        self.folder = draft.with_name(f"{draft.name}.checkpoint")
        self.fresh = self.folder.with_suffix(".new")  # only while a checkpoint is replaced

    def exists(self) -> bool:
        """Whether a training was begun: a kill during the replacement may leave the fresh folder alone."""
        return self.folder.exists() or self.fresh.exists()

    def save(self, model: nn.Module, optimizers: Sequence[Any], step: int, history: list[Any]) -> None:
        """Write a fresh folder, then rename it.

        Raises:
            SpecinferError, InputError: the disk is full, or the folder cannot be written.
        """
        tensors = {f"model.{name}": weight for name, weight in model.state_dict().items()}
        for number, optimizer in enumerate(optimizers):
            for index, state in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{number}.{index}.{name}": value for name, value in state.items()}
        copies = {name: value.detach().clone().contiguous() for name, value in tensors.items()}  # tied weights, too
        with storing(self.folder):
            shutil.rmtree(self.fresh, ignore_errors=True)
            self.fresh.mkdir(parents=True)
            save_file(copies, self.fresh / "state.safetensors")
            sync(self.fresh / "state.safetensors")
            write_json(self.fresh / "state.json", {"step": step, "history": history})  # last: it makes the folder valid
            shutil.rmtree(self.folder, ignore_errors=True)
            self.fresh.rename(self.folder)

    def load(self, model: nn.Module, optimizers: Sequence[Any]) -> tuple[int, list[Any]]:
        """Return the steps done and the history, (0, []) where nothing was saved.

        Raises:
            InputError: what was saved is damaged.
        """
        if not self.folder.exists() and (self.fresh / "state.json").exists():
            self.fresh.rename(self.folder)  # killed after the old checkpoint was removed
        if not (self.folder / "state.json").exists():
            return 0, []
        weights: dict[str, Tensor] = {}
        states: list[dict[int, dict[str, Tensor]]] = [{} for _ in optimizers]
        try:
            record = read_json(self.folder / "state.json")
            for name, tensor in load_file(self.folder / "state.safetensors").items():
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
            reason = " ".join(str(error).split())[:120]
            raise InputError(f"{self.folder} is damaged ({reason}): remove it, and training begins anew") from error
