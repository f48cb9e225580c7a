"""What a model is made of, and whether it still is that: modules, settings, kinds of weights, hooks, patches.

Knows: what decides how a model computes, as far as can be seen from outside.  Does not know: graphs, packages, passes.
"""

from collections.abc import Callable, Mapping, Sequence
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
    """Sees changes of a model, quickly: modules, settings, kinds of weights, forwards, hooks, attention.

    It keeps no part of the model alive.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = modules_of(model)
        configs = _configs(modules)
        owners = [*modules, *configs]
        self.owners = [ref(owner) for owner in owners]
        self.forwards = [_reference(vars(module).get("forward")) for module in modules]
        self.functions, self.tensors = _functions(modules, configs), _tensors(modules)
        self.settings = [
            (ref(owner), name, deepcopy(value)) for owner in owners for name, value in _settings(vars(owner)).items()
        ]

    def changed(self, model: nn.Module) -> bool:
        """Whether the model is another one than when the watch began; values of weights and train mode do not count."""
        modules = modules_of(model)
        configs = _configs(modules)
        if [owner() for owner in self.owners] != [*modules, *configs]:
            return True
        if [forward() for forward in self.forwards] != [vars(module).get("forward") for module in modules]:
            return True
        if any(vars(owner()).get(name, ...) != value for owner, name, value in self.settings):
            return True
        return _functions(modules, configs) != self.functions or _tensors(modules) != self.tensors

    def settle(self) -> None:
        """Take no notice any more of settings that changed since the watch began, such as what counts passes."""
        self.settings = [own for own in self.settings if vars(own[0]()).get(own[1], ...) == own[2]]


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return a model's modules, each once; ``model.modules()`` takes several times as long."""
    found: dict[int, nn.Module] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            waiting += [child for child in module._modules.values() if child is not None]
    return [*found.values()]


def _configs(modules: Sequence[nn.Module]) -> list[Any]:
    """Return the configurations that modules hold, each once."""
    held = {id(own): own for module in modules if (own := module.__dict__.get("config")) is not None}
    return [config for config in held.values() if hasattr(config, "_attn_implementation")]


def _reference(forward: Any) -> Callable[[], Any]:
    """Return what returns an instance's own forward while that lives; nothing for none."""
    return (lambda: None) if forward is None else ref(forward)


def _functions(modules: Sequence[nn.Module], configs: Sequence[Any]) -> list[Any]:
    """Return what modules run: attention, hooks (by number), classes and the classes' forwards."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

    everywhere = nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks
    return [
        *(FUNCTIONS.get(config._attn_implementation) for config in configs),
        *map(tuple, everywhere),
        *((type(module), type(module).forward, *_hooks(module)) for module in modules),
    ]


def _hooks(module: nn.Module) -> list[int]:
    """Return the numbers of a module's hooks, which torch gives once."""
    return [
        number
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
        for number, hook in hooks.items()
        if getattr(hook, "__module__", None) != RECORDERS
    ]


def _tensors(modules: Sequence[nn.Module]) -> list[Any]:
    """Return every weight's name, the number of those it is tied to, shape, strides, dtype and device."""
    first: dict[tuple[int, torch.Size], int] = {}
    return [
        (name, first.setdefault((t.data_ptr(), t.shape), len(first)), t.shape, t.stride(), t.dtype, t.device)
        for module in modules
        for held in (module._parameters, module._buffers)
        for name, t in held.items()
        if t is not None
    ]


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
