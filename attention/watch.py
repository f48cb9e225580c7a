"""What a model is made of, and whether it still is that: modules, settings, kinds of weights, hooks, patches.

Knows: what decides how a model computes, as far as can be seen from outside.  Does not know: graphs, packages, passes.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

RECORDERS = "transformers.utils.output_capturing"  # their hooks stay once hidden states were asked for, and sleep
PASSING = {  # settings that decide nothing about a pass, or are looked at apart
    *("training", "architectures", "dtype", "transformers_version", "name_or_path", "_name_or_path", "_commit_hash"),
    *("_tp_plan", "_pp_plan", "_ep_plan", "_fsdp_plan", "_is_hf_initialized", "_use_kernels", "_weight_conversions"),
    "_output_capturing_hooks_installed",
}


def architecture(model: nn.Module) -> list[Any]:
    """Return what decides how a model computes, the values of its weights apart: JSON-ready."""
    modules = [
        (name, f"{type(module).__module__}.{type(module).__qualname__}", repr(sorted(_settings(vars(module)).items())))
        for name, module in model.named_modules()
    ]
    config: Any = model.config
    return [modules, _weights(model), repr(sorted(_settings(config.to_dict()).items()))]


def altered(model: nn.Module) -> str:
    """Return what an exported graph of a model would not have, in words; nothing if all is plain."""
    if nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks:
        return "all modules have a hook"
    for name, module in model.named_modules():
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        if any(getattr(hook, "__module__", None) != RECORDERS for hook in hooks):
            return f"{name or 'the model'} has a hook"
        if "forward" in vars(module):
            return f"{name or 'the model'} has a forward of its own"
        if module.training:
            return f"{name or 'the model'} is in train mode"
        for own, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
                return f"{name}.{own} is a {type(tensor).__name__}"
            if tensor is not None and tensor.is_inference():
                return f"{name}.{own} is an inference tensor, whose changes cannot be seen"
    return ""


class Watch:
    """Sees changes of a model, quickly: modules, settings, kinds of weights, forwards, attention; keeps none alive."""

    def __init__(self, model: nn.Module) -> None:
        config: Any = model.config
        self.owners = [ref(owner) for owner in (*model.modules(), config)]
        self.weights, self.functions = _weights(model), _functions(model)
        self.settings = [
            (ref(owner), name, deepcopy(value))
            for owner in (*model.modules(), config)
            for name, value in _settings(vars(owner)).items()
        ]

    def changed(self, model: nn.Module) -> bool:
        """Whether the model is another one than when the watch began; the values of its weights do not count."""
        if [owner() for owner in self.owners] != [*model.modules(), model.config]:
            return True
        if any(vars(owner()).get(name, ...) != value for owner, name, value in self.settings):
            return True
        return _functions(model) != self.functions or _weights(model) != self.weights


def _functions(model: nn.Module) -> list[Any]:
    """Return what a model's classes run, and its attention."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

    config: Any = model.config
    return [FUNCTIONS.get(config._attn_implementation), *(type(module).forward for module in model.modules())]


def _weights(model: nn.Module) -> list[Any]:
    """Return every weight's name, that of the first one that it is tied to, shape, strides, dtype and device."""
    first: dict[tuple[int, torch.Size], str] = {}
    every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return [
        [name, first.setdefault((t.data_ptr(), t.shape), name), [*t.shape], [*t.stride()], str(t.dtype), str(t.device)]
        for name, t in every
    ]


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values that a forward may read: flags, sizes, names."""
    return {name: value for name, value in values.items() if name not in PASSING and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value) and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)
