"""Passes from a package of compiled code.

Knows: what a package holds, when it may replace a model's passes, packed weights.
Does not know: how packages are made (`compiler.making`), where they are kept (`compiler.packages`).

A package holds code and no weights: every call passes it the model's weights, those of linear layers packed.  The model
is only read.  A package is used while the model is the one it was compared with: the same modules with the same
settings, no hooks, no patched forwards.  Weights may be written or replaced; they are packed again.  If the model
changed in another way, the plain model runs, and its `Ways` say why.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from itertools import chain, groupby
from pathlib import Path
from textwrap import shorten
from threading import Lock
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from specinfer.attention.cache import TreeCache
from specinfer.attention.compiler import exported
from specinfer.attention.compiler.linear import BYTES, FORMS, ROUNDED_STATES, pack
from specinfer.attention.compiler.watch import Watch, altered, named_tensors
from specinfer.attention.forward import Forward, Inputs, Outputs
from specinfer.attention.passes.plain import TensorPass
from specinfer.attention.torch_private import load_package, writes
from specinfer.common.memory import LargePages, free_bytes
from specinfer.errors import NotCompiled

SPREAD, SAMPLED = 2, 8  # places in a weight, and entries at each, that every call compares: each is a page that is cold
SPARE = 1.2  # bytes of free memory that packing needs, per byte of packed weights
RECORD = "package.json"
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
USUAL = {
    *("input_ids", "position_ids", "attention_mask", "logits_to_keep", "words", "slots", "cache_rows", "cache_slots")
}

Group = tuple[str, tuple[str, ...]]  # kind and names of a `Source`


class CompiledPass(TensorPass):
    """A model's passes, from a package.

    Args:
        model: whose passes they are; all of its weights are read, none is written.
        folder: holds what `making.make` wrote.
        form: of its weights: see `compiler.linear`.

    Raises:
        NotCompiled: the package is damaged.
    """

    runs_modules = False
    dtype: torch.dtype

    def __init__(self, model: Forward, folder: Path, form: str) -> None:
        self.form, self.stored = form, model.dtype
        self.few_shapes = model.device.type == "cuda"  # where cuDNN's attention plans for each
        self.may_cut = not self.few_shapes
        self.network: Callable[[], Any] = ref(model.model)  # alive while it is used
        try:
            record = json.loads((folder / RECORD).read_text())
            self.aux_layers: list[int] = record["aux_layers"]
            self.layers: list[list[int]] = record["layers"]  # heads and dimension of keys, then of values
            self.dtype = DTYPES[record["dtype"]]  # that passes compute in
            self.runners = {tuple(each["extra"]): _Runner(folder, each, model.device) for each in record["variants"]}
            self.packs = bool(record["packs"])
            self.vocabulary = int(record["vocabulary"])  # how many logits a node has
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise NotCompiled(f"the package in {folder} is damaged ({shorten(str(error), 200)})") from error
        self.kinds = sorted(model.spec.windows)
        self.lock = Lock()
        self.watch = Watch(model.model)
        self.packings = 0
        self.stamps: list[tuple[int, int]] = []  # of the weights when they were packed
        self.samples: list[list[Tensor]] = []  # some bytes of each weight, as views; those of one shape together
        self.sampled: list[Tensor] = []  # what they were when the weights were packed

    def serving(self, network: Any) -> "CompiledPass":
        """Return the same passes for another network of the same architecture; code is shared, weights are not."""
        other = copy(self)
        other.network, other.watch, other.lock, other.stored = ref(network), Watch(network), Lock(), network.dtype
        other.runners = {extra: copy(runner) for extra, runner in self.runners.items()}
        other.stamps, other.samples = [], []
        return other

    def refresh(self) -> str:
        """Pack weights that changed; return why the passes cannot be used, or "" if the model is the same."""
        if reason := altered(self.network()):
            return reason
        if self.watch.changed(self.network()):
            return "the model changed since its passes were compiled"
        try:
            with self.lock:
                return self._bind()
        except (RuntimeError, ValueError) as error:
            return f"its weights cannot be packed ({shorten(str(error), 200)})"

    def _bind(self) -> str:
        """Give the runners the current weights of the model."""
        sources = {source for runner in self.runners.values() for source in runner.sources}
        names = sorted({name for source in sources for name in source.names})
        tensors = dict(named_tensors(self.network()))
        stamps = [(tensors[name].data_ptr(), writes(tensors[name])) for name in names]
        if stamps == self.stamps and all(map(torch.equal, map(torch.cat, self.samples), self.sampled)):
            return ""
        weights = {name: tensors[name].detach() for name in names}
        groups = {(source.kind, source.names) for source in sources if source.kind in FORMS}
        parts = [(weights[name], form) for form, group in groups for name in group]
        needed = SPARE * sum(weight.numel() * BYTES.get(form, weight.itemsize) for weight, form in parts)
        if needed > free_bytes():
            return f"packed weights need {needed / 1e9:.1f} GB of memory, and less is free"
        pages, packed = LargePages(), dict[Group, Tensor]()
        for form, group in groups:
            packed[form, group] = pack([weights[name] for name in group], form, pages)
        for runner in self.runners.values():
            runner.weights = [self._input(source, weights, packed) for source in runner.sources]
        samples = [_sample(weight.view(-1)) for weight in weights.values() if weight.is_contiguous()]
        self.samples = [[*group] for _, group in groupby(sorted(samples, key=_size), key=_size)]
        self.stamps, self.sampled = stamps, [*map(torch.cat, self.samples)]
        self.packings += 1
        return ""

    def _input(self, source: exported.Source, weights: Mapping[str, Tensor], packed: Mapping[Group, Tensor]) -> Tensor:
        if (source.kind, source.names) in packed:
            return packed[source.kind, source.names]
        dtype = DTYPES[source.dtype]
        if source.kind == "sizes":
            return torch.zeros(1, dtype=dtype, device="cpu").expand(source.shape)
        if source.kind == "joined":
            return torch.cat([weights[name] for name in source.names]).to(dtype)
        return weights[source.names[0]].to(dtype)

    def weights(self, model: Forward) -> tuple[int, ...]:
        """Return the addresses of the model's weights, and how often they were packed."""
        return self.packings, *super().weights(model)

    def run(self, model: Forward, inputs: Inputs, cache: TreeCache, aux_layers: Sequence[int]) -> Outputs:
        """Run the package of these inputs."""
        ids, masks = inputs["input_ids"], inputs["attention_mask"]
        columns = inputs.get("logits_to_keep")
        extra = {name: inputs[name] for name in sorted(inputs.keys() - USUAL)}
        masks = [masks] if isinstance(masks, Tensor) else [masks[kind] for kind in self.kinds]
        words = min(inputs.get("words", self.vocabulary), self.vocabulary)
        cache.open_layers(self.layers, self.dtype, ids.device)
        tensors = exported.Tensors(
            ids,
            [inputs["cache_rows"]] if self.packs else [],
            [inputs["position_ids"]] if "position_ids" in inputs else [],
            masks,
            inputs["cache_slots"] if self.packs else cache.staged(ids.device),
            torch.arange(ids.shape[1], device=ids.device) if columns is None else columns,
            torch.empty(words, dtype=torch.uint8, device=ids.device),
            *cache.buffers(),
            [value.to(self.dtype) for value in extra.values()],
        )
        outputs = self.runners[tuple(extra)](tensors)
        if not aux_layers:
            return (outputs[0],)
        indices = [self.aux_layers.index(layer) for layer in aux_layers]
        return outputs[0], outputs[1] if indices == list(range(len(self.aux_layers))) else outputs[1][:, :, indices]

    def __str__(self) -> str:
        """Say in what numbers they compute."""
        dtype = str(self.dtype).removeprefix("torch.")
        if self.form == ROUNDED_STATES:
            return f"compiled (bfloat16 products, {dtype} sums)"
        return "compiled" if self.dtype == self.stored else f"compiled ({dtype})"


class _Runner:
    """One compiled graph, and the model's tensors that every call passes to it."""

    def __init__(self, folder: Path, record: Mapping[str, Any], device: torch.device) -> None:
        path = folder / record["file"]
        if hashlib.sha256(path.read_bytes()).hexdigest() != record["sha256"]:
            raise ValueError(f"{path.name} is not the file that was written")
        self.sources = [
            exported.Source(kind, tuple(names), tuple(shape), dtype) for kind, names, shape, dtype in record["sources"]
        ]
        self.weights: list[Tensor] = []
        self.run, self.lock = load_package(path, device), Lock()

    def __call__(self, tensors: exported.Tensors) -> Outputs:
        parts = (part if isinstance(part, list) else [part] for part in tensors)
        given = [tensor.contiguous() for tensor in chain(*parts)]
        with self.lock:
            return tuple(self.run([*given, *self.weights]))


def _sample(weight: Tensor) -> Tensor:
    """Return bytes of some entries of a weight (N,), from its first to its last ones, as a view (places, bytes)."""
    step = max((len(weight) - SAMPLED) // (SPREAD - 1), 1)
    return weight.unfold(0, min(len(weight), SAMPLED), step).view(torch.uint8)


def _size(sample: Tensor) -> tuple[int, str]:
    """Return what samples have in common that one call can join: bytes at a place, device."""
    return sample.shape[1], str(sample.device)
