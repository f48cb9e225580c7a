"""Checkpoints in safetensors: one file, or several with an index; what their headers say, and their tensors.

Knows: which files of a folder belong together.  Does not know: what tensors mean, models.

safetensors compares a header with its file, and reads a tensor's bytes when somebody asks for it.
"""

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from specinfer.errors import ModelError, one_line

# not weights, but tables that models compute, and that files of older versions hold: causal masks, rotary frequencies
CONSTANTS = re.compile(r"\b(attn|attention)\.(bias|masked_bias|causal_mask)$|\binv_freq$|\bposition_ids$")
# weights of all experts of a mixture in one tensor, and the layers whose rows stand there by turns
JOINED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)_(blocks|scales|bias)$")
LAYERS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Stored(NamedTuple):
    """A tensor of a file, or a part of one: its type, as safetensors names it, and its shape."""

    dtype: str
    shape: tuple[int, ...]
    file: Any  # open
    name: str  # there
    part: tuple[int, slice] | None = None  # an expert, and which rows of it


def _of_experts(name: str, whole: Stored) -> Iterator[tuple[str, Stored]]:
    """Yield the parts of a tensor by expert and layer, if it is one of all experts, or else itself."""
    if (joined := JOINED.match(name)) is None or len(whole.shape) < 2:
        yield name, whole
        return
    experts, rows, *rest = whole.shape
    path, which, leaf = joined.groups()
    for expert, (turn, layer) in product(range(experts), enumerate(LAYERS[which])):
        every = slice(turn, rows, len(LAYERS[which]))
        part = whole._replace(shape=(len(range(rows)[every]), *rest), part=(expert, every))
        yield f"{path}.{expert}.{layer}.{leaf}", part


class Shards:
    """The files of a checkpoint.

    Args:
        folder: where they are.

    Raises:
        ModelError: they cannot be read, are damaged, or do not belong together.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, Stored] = {}
        for name in self._files():
            self._open(name)

    def read(self, name: str) -> Tensor:
        """Return a tensor."""
        stored = self.tensors[name]
        if stored.part is None:
            return stored.file.get_tensor(name)
        expert, rows = stored.part
        return stored.file.get_slice(stored.name)[expert][rows]

    def refusal(self, what: str, advice: str = "get the whole checkpoint, and the config.json of it") -> ModelError:
        """Return an error to raise."""
        return ModelError(f"{what}; {advice}")

    def _files(self) -> list[str]:
        """Return the files of a checkpoint: those of its index, or one."""
        if (index := self.folder / INDEX).exists():
            try:
                files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
                raise self.refusal(f"its {INDEX} cannot be read ({one_line(error)})") from error
            if any(not isinstance(name, str) or Path(name).name != name for name in files):
                raise self.refusal(f"its {INDEX} names files of other folders")
            return files
        found = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if SINGLE in found or len(found) == 1:
            return [SINGLE if SINGLE in found else found[0]]
        raise self.refusal(f"it has {len(found)} files in safetensors, and no {INDEX} that says which belong together")

    def _open(self, name: str) -> None:
        """Read the header of a file."""
        try:
            file = safe_open(self.folder / name, framework="pt")
            parts = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  (it is no dict)
        except (OSError, SafetensorError) as error:
            raise self.refusal(f"{name} cannot be read ({one_line(error)})") from error
        if both := self.tensors.keys() & parts:
            raise self.refusal(f"{name} has a tensor that another file has as well ({min(both)})")
        for key, part in parts.items():
            self.tensors |= _of_experts(key, Stored(part.get_dtype(), tuple(part.get_shape()), file, key))
