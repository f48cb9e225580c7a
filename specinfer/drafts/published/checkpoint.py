"""Published checkpoints of drafts: a folder or a hub name, its configuration, its weights by name.

Knows: files.  Does not know: formats (one module for each family), networks.

Nothing in a checkpoint is run: no remote code, and a pickle is read with ``weights_only``.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError

import torch
from huggingface_hub import hf_hub_download, snapshot_download, try_to_load_from_cache
from safetensors.torch import load_file
from torch import Tensor, nn

from specinfer.common.files import WEIGHTS, parse_json
from specinfer.common.records import Record
from specinfer.errors import ModelError, first_names, one_line
from specinfer.loading import DTYPES, reach_hub

LISTED = 4  # names of weights in a message


@dataclass(frozen=True)
class Checkpoint:
    """A published draft: its name, its folder, its configuration."""

    name: str
    folder: Path
    config: Record

    @classmethod
    def find(cls, name: str | os.PathLike[str]) -> "Checkpoint":
        """Find a folder, or a repository of the hub: its local copy, else it is fetched.

        Raises:
            ModelError: there is none, it has no ``config.json``, or that is no JSON object.
        """
        name = os.fspath(name)
        folder = Path(os.path.expanduser(name))
        if not folder.is_dir():
            folder = _fetched(name)
        try:
            config = parse_json((folder / "config.json").read_text(encoding="utf-8"))
            if not isinstance(config, dict):
                raise ValueError("it is not a JSON object")
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read {folder / 'config.json'}: {one_line(error)}") from error
        return cls(name.rstrip("/").split("/")[-1], folder, config)

    @cached_property
    def weights(self) -> Mapping[str, Tensor]:
        """The weights by name: of safetensors if there are any, else of a pickle of tensors alone.

        Raises:
            ModelError: there are none, they are damaged, or a pickle holds more than tensors.
        """
        files = sorted(self.folder.glob("*.safetensors"))
        read: Callable[[Path], dict[str, Tensor]] = load_file
        if not files:
            files, read = sorted([*self.folder.glob("*.bin"), *self.folder.glob("*.pt")]), _unpickled
        if not files:
            raise ModelError(f"{self.folder} holds no weights: no .safetensors, .bin or .pt file")
        found: dict[str, Tensor] = {}
        for file in files:
            try:
                found |= read(file)
            except Exception as error:  # a damaged file may raise anything
                raise ModelError(f"cannot read the weights in {file}: {one_line(error)}") from error
        if wrong := [key for key, value in found.items() if not isinstance(value, Tensor)]:
            raise ModelError(f"{self.folder} holds more than tensors ({', '.join(wrong[:LISTED])})")
        return found

    def named(self, kind: str) -> bool | None:
        """Return whether the configuration says that it is of a kind; None if it says nothing."""
        if said := self.config.get("speculators_model_type"):
            return bool(said == kind)
        return kind in str(self.config.get("architectures")).lower() or None

    def refuse(self, reason: str) -> ModelError:
        """Return the error that says why this checkpoint cannot be loaded."""
        return ModelError(f"cannot load the draft {self.name}: {reason}")

    def part(self, config: Record) -> "Checkpoint":
        """Return the same with a part of its configuration for all of it."""
        return replace(self, config=config)

    def size(self, name: str, default: int | None = None) -> int:
        """Return a whole number above 0 in the configuration, or a default where there is none.

        Raises:
            ModelError: there is none, or it is something else.
        """
        value = default if self.config.get(name) is None else self.config[name]
        if type(value) is not int or value < 1:
            raise self.refuse(f"its {name} is {value!r:.40}, not a whole number above 0")
        return value


def assign(checkpoint: Checkpoint, network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a network on the meta device its weights, all of them and no others.

    Raises:
        ModelError: lists the weights that are missing, unknown, or of another shape or type.
    """
    wanted = network.state_dict()
    missing, unknown = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
    shapes = [
        f"{name} is {tuple(weights[name].shape)} and should be {tuple(weight.shape)}"
        for name, weight in wanted.items()
        if name in weights and weights[name].shape != weight.shape
    ]
    types = [
        f"{name} is {weights[name].dtype}"
        for name, weight in wanted.items()
        if name in weights and weight.is_floating_point() and weights[name].dtype not in DTYPES.values()
    ]
    kinds = {"missing": missing, "unknown": unknown, "of another shape": shapes, "of another type": types}
    if wrong := [f"{len(keys)} {kind} ({first_names(keys, LISTED)})" for kind, keys in kinds.items() if keys]:
        raise checkpoint.refuse(f"its weights are not those of its format: {', '.join(wrong)}")
    damaged = [name for name, weight in weights.items() if weight.is_floating_point() and not weight.isfinite().all()]
    if damaged:
        raise checkpoint.refuse(f"its {damaged[0]} holds numbers that are not finite")
    network.load_state_dict(dict(weights), assign=True)
    network.requires_grad_(False).eval()


def renamed(weights: Mapping[str, Tensor], rename: Callable[[str], str]) -> dict[str, Tensor]:
    """Return weights under other names."""
    return {rename(name): weight for name, weight in weights.items()}


def vocabulary(checkpoint: Checkpoint, weights: dict[str, Tensor], vocab_size: int) -> Tensor | None:
    """Return the target's ids of a reduced vocabulary, (V',), or None.

    They become ``token_ids`` in weights, in the place of ``d2t`` and ``t2d``.  ``d2t`` holds offsets: token i of the
    draft is token i + d2t[i] of the target.

    Raises:
        ModelError: they contradict each other, or name tokens that the target does not have.
    """
    offsets, used = weights.pop("d2t", None), weights.pop("t2d", None)
    if offsets is None:
        if used is not None and not bool(used.all()):
            raise checkpoint.refuse("it has t2d, a reduced vocabulary, but no d2t, which says what its tokens are")
        return None
    ids = torch.arange(len(offsets), device=offsets.device) + offsets.long()
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) < len(ids)):
        raise checkpoint.refuse(f"its d2t does not give different ids below {vocab_size}")
    if used is not None and not torch.equal(used.bool().nonzero()[:, 0], ids.sort().values):
        raise checkpoint.refuse("its d2t and t2d name different tokens")
    weights["token_ids"] = ids
    return ids


def hub_config(name: str) -> Path:
    """Return the ``config.json`` of a repository of the hub: its local copy, else it is fetched.

    Raises:
        ModelError: the hub cannot be reached.
        OSError, ValueError: it does not have the repository or the file.
    """
    found = try_to_load_from_cache(name, "config.json")
    if isinstance(found, str):
        return Path(found)
    reach_hub()
    return Path(hf_hub_download(name, "config.json"))


def _fetched(name: str) -> Path:
    """Return the folder of a repository of the hub: its local copy, if that has weights, else it is fetched."""
    try:
        folder = Path(snapshot_download(name, local_files_only=True))
        if any(any(folder.glob(kind)) for kind in WEIGHTS):
            return folder
    except (OSError, ValueError):
        pass
    reach_hub()
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", *WEIGHTS]))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"cannot find the draft {name}: there is no folder of this name; the hub says: {one_line(error)}"
        ) from error


def _unpickled(file: Path) -> dict[str, Tensor]:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError as error:  # torch's message advises to run what is in it
        raise ValueError("it is damaged, or holds more than tensors, and code in it is never run") from error
