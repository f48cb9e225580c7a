"""Loading a model from a quantised checkpoint in safetensors: integers stay at the size that they have there.

Knows: which tensors are a module's, which of them change nothing.
Does not know: how a method stores a matrix, the packed layout, how models are found.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from specinfer.attention.packed.modules import PackedLinear
from specinfer.attention.packed.schemes.base import FLOATS, Expected, Layer, Scheme, Settings, parts
from specinfer.attention.packed.schemes.compressed import compressed_tensors
from specinfer.attention.packed.schemes.floats import fp8, mxfp4
from specinfer.attention.packed.schemes.words import awq, gptq
from specinfer.checkpoints.filling import HEAD, Filling
from specinfer.checkpoints.shards import CONSTANTS, Shards
from specinfer.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

METHODS: dict[str, Callable[[Settings], Scheme]] = {
    "awq": awq,
    "compressed-tensors": compressed_tensors,
    "fp8": fp8,
    "gptq": gptq,
    "mxfp4": mxfp4,
}


def method_of(config: PreTrainedConfig) -> str | None:
    """Return the method of `METHODS` that a model's weights are stored by, None if it is another one or none."""
    settings = getattr(config, "quantization_config", None)
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    return method if method in METHODS else None


def load_quantised(
    folder: Path, config: PreTrainedConfig, dtype: torch.dtype | None, usual: torch.dtype, **options: Any
) -> PreTrainedModel | None:
    """Load a model from a folder.

    The model is transformers' own, on the CPU.  Linear layers that the checkpoint holds as integers are
    `PackedLinear`, whose numbers are those of the checkpoint; all else is dense, and then float32.

    Args:
        folder: where the files are.
        config: the model's, with a `quantization_config` of a method of `METHODS`.
        dtype: what is asked for; None if it may be chosen.
        usual: what is chosen if no layer is packed.
        **options: of the model's `from_config`.

    Returns:
        None if the model is none like Llama's: transformers may know how to fill it.

    Raises:
        ModelError: files cannot be read or are damaged, a setting, a tensor or a shape is not known, or the weights do
            not fit into memory.  Nothing is decoded before that is known.  Or scales or zero points that a matrix
            cannot have, or another dtype than float32 for packed layers.
    """
    settings = config.quantization_config
    config = copy.deepcopy(config)
    del config.quantization_config  # the model's weights are those of its modules
    files = Shards(folder)
    if any(name.startswith(f"{HEAD}.") for name in files.tensors):
        config.tie_word_embeddings = False
    filling = Filling(config, files.tensors, files.refusal, **options)
    if not filling.can_finish():
        return None
    given = Settings(settings)
    scheme = METHODS[settings["quant_method"]](given)
    given.check_all_used()
    if not scheme.packs:
        filling.compute_in(dtype or usual)
    elif dtype not in (None, torch.float32):
        advice = "its states are float32, and its integers as files have them: leave dtype out"
        raise files.refusal(f"{dtype} is not possible for it", advice)
    layers = _layers(filling.model, scheme, files)
    wanted = _wanted(filling, layers, files)
    _check(filling, wanted, scheme, files)
    for layer in layers:
        _fill(filling, layer, files)
    for name in wanted.keys() - {f"{layer.path}.{leaf}" for layer in layers for leaf in layer.tensors}:
        filling.set(name, files.read(name))
    return filling.finish()


class _Quantised(NamedTuple):
    """A linear layer (N, K) that a checkpoint holds quantised."""

    path: str
    layer: Layer
    shape: tuple[int, int]
    tensors: dict[str, Expected]  # by the last part of their names; without optional ones that the checkpoint lacks


def _layers(model: PreTrainedModel, scheme: Scheme, files: Shards) -> list[_Quantised]:
    """Return the layers that have tensors other than a dense layer's."""
    paths = {
        path
        for path, _, leaf in (name.rpartition(".") for name in files.tensors)
        if leaf not in {"weight", "bias", *scheme.unused} or files.tensors[f"{path}.{leaf}"].dtype not in FLOATS
    }
    found = []
    for path, module in model.named_modules():
        if type(module) is nn.Linear and path in paths and (layer := scheme.layer(path)) is not None:
            shape = module.out_features, module.in_features
            with _naming(path):
                expected = layer.tensors(*shape)
            there = {
                leaf: what for leaf, what in expected.items() if not what.optional or f"{path}.{leaf}" in files.tensors
            }
            found.append(_Quantised(path, layer, shape, there))
    return found


def _wanted(filling: Filling, layers: Sequence[_Quantised], files: Shards) -> dict[str, Expected]:
    """Return what a checkpoint should hold."""
    wanted = {name: Expected(FLOATS, shape) for name, shape in filling.wanted().items()}
    for path, _, (outputs, _), tensors in layers:
        del wanted[f"{path}.weight"]
        wanted |= {f"{path}.{leaf}": what for leaf, what in tensors.items()}
        if (bias := f"{path}.bias") in files.tensors:  # some programs write zeros for layers that have none
            wanted[bias] = Expected(FLOATS, (outputs,))
    return wanted


def _check(filling: Filling, wanted: Mapping[str, Expected], scheme: Scheme, files: Shards) -> None:
    """Raise `ModelError` unless a checkpoint's tensors are those that are wanted, and fit into memory."""
    ignored = filling.model._keys_to_ignore_on_load_unexpected or ()
    unused = [re.compile(pattern) for pattern in (*ignored, CONSTANTS)]
    found = {
        name: stored
        for name, stored in files.tensors.items()
        if name in wanted or not (name.rpartition(".")[2] in scheme.unused or any(each.search(name) for each in unused))
    }
    shapes = {name: stored.shape for name, stored in found.items()}
    for name in shapes.keys() & wanted.keys():
        if math.prod(shapes[name]) == math.prod(wanted[name].shape) == 1:  # a number has any shape
            shapes[name] = wanted[name].shape
    filling.check_shapes({name: what.shape for name, what in wanted.items()}, shapes)
    for name, what in wanted.items():
        if (dtype := found[name].dtype) not in what.dtypes:
            raise files.refusal(f"{name} is of type {dtype}, and should be {' or '.join(what.dtypes)}")
    kept, others = {"I32": 4, "I8": 1, "U8": 1}, filling.model.dtype.itemsize  # bytes of integers, and of numbers
    filling.check_memory(sum(math.prod(each.shape) * kept.get(each.dtype, others) for each in found.values()))


def _fill(filling: Filling, given: _Quantised, files: Shards) -> None:
    """Give a layer its matrix: packed, or as numbers."""
    path, layer, shape, tensors = given
    with _naming(path):
        read = {leaf: files.read(f"{path}.{leaf}").view(what.shape) for leaf, what in tensors.items()}
        found = layer.read(read, *shape)
        if isinstance(found, Tensor):
            filling.set(f"{path}.weight", found)
            return
        new = PackedLinear(shape[1], shape[0], f"{path}.bias" in files.tensors, found.order)
        filling.set_packed(path, new, parts(found, shape[0]), shape)


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Say of which module an error is."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
