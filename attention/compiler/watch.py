"""Whether a model changed: its modules, settings, kinds of weights, hooks, patches.

Knows: what decides how a model computes, as far as this can be seen from outside.
Does not know: graphs, packages, passes.
"""

import platform
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import filterfalse
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from specinfer.attention.torch_private import direct_tensors, forward_hooks, global_forward_hooks, modules_of

# of a weight: the number of the first one that it is tied to, shape, strides, dtype, device
Kind = tuple[int, torch.Size, tuple[int, ...], torch.dtype, torch.device]
RECORDERS = "transformers.utils.output_capturing"  # its hooks stay after hidden states were asked for, and do nothing
IGNORED = {  # settings that do not affect a pass, or are compared in another way
    *("training", "architectures", "dtype", "transformers_version", "name_or_path", "_name_or_path", "_commit_hash"),
    *("_tp_plan", "_pp_plan", "_ep_plan", "_fsdp_plan", "_is_hf_initialized", "_use_kernels", "_weight_conversions"),
    "_output_capturing_hooks_installed",
}


def architecture(model: nn.Module) -> list[object]:
    """Return what decides how a model computes, except the values of its weights, for JSON."""
    modules = [
        (name, f"{type(module).__module__}.{type(module).__qualname__}", repr(sorted(_settings(vars(module)).items())))
        for name, module in model.named_modules()
    ]
    config: Any = model.config
    names, tensors = zip(*named_tensors(model), strict=True)
    weights = [
        [name, names[tied], *([] if name.endswith(".packed") else (shape, strides)), str(dtype), str(device)]
        for name, (tied, shape, strides, dtype, device) in zip(names, _kinds_of(tensors), strict=True)
    ]  # a packed matrix says itself what it holds
    return [modules, weights, repr(sorted(_settings(config.to_dict()).items()))]


def machine(device: torch.device) -> list[str]:
    """Return what the results and the code of a pass depend on: the processor's instructions, or the GPU's kind."""
    if device.type == "cuda":
        return [torch.cuda.get_device_name(device), torch.version.cuda or ""]
    instructions = sorted(name for name, has in torch.cpu.get_capabilities().items() if has is True)
    return [platform.machine(), platform.system(), torch.backends.cpu.get_cpu_capability(), *instructions]


def attentions(model: nn.Module) -> dict[str, object]:
    """Return the attention functions of a model's layers by name; without "eager", which is each model's own."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

    names = {str(config._attn_implementation) for config in _configs(modules_of(model))}
    return {name: FUNCTIONS[name] for name in sorted(names) if name in FUNCTIONS}


def altered(model: nn.Module) -> str:
    """Return, in words, a change of the model that an exported graph would not have; "" if there is none."""
    if global_forward_hooks():
        return "all modules have a hook"
    for module in modules_of(model):
        if found := _altered(module):
            names = {other: name for name, other in model.named_modules()}
            return f"{names[module] or 'the model'}{found}"
    return ""


def _altered(module: nn.Module) -> str:
    """Return what is altered of a module beside its own modules, to follow its name; "" if nothing is."""
    if _hooks(module):
        return " has a hook"
    if "forward" in vars(module):
        return " has a patched forward"
    if module.training:
        return " is in train mode"
    for weight, tensor in direct_tensors(module):
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
            return f".{weight} is a {type(tensor).__name__}"
        if tensor.is_inference():
            return f".{weight} is an inference tensor, whose changes cannot be seen"
    return ""


class Watch:
    """Detects changes of a model quickly: modules, settings, kinds of weights, forwards, hooks, attention.

    It does not keep any part of the model alive.
    """

    def __init__(self, model: nn.Module) -> None:
        self.state = _state(model)
        modules = modules_of(model)
        self.settings = [
            (ref(owner), name, deepcopy(value))
            for owner in (*modules, *_configs(modules))
            for name, value in _settings(vars(owner)).items()
        ]

    def changed(self, model: nn.Module) -> bool:
        """Whether the model changed since the watch began.  Values of weights and train mode do not count."""
        return _state(model) != self.state or any(map(_has_changed, self.settings))

    def settle(self) -> None:
        """Ignore settings that changed since the watch began, such as counters of passes."""
        self.settings = [*filterfalse(_has_changed, self.settings)]


def _has_changed(setting: tuple[ref[object], str, object]) -> bool:
    owner, name, value = setting
    return vars(owner()).get(name, ...) != value


def _configs(modules: Sequence[nn.Module]) -> list[PreTrainedConfig]:
    """Return the configurations of modules, each once."""
    configs = {id(config): config for module in modules if (config := vars(module).get("config"))}
    return [config for config in configs.values() if hasattr(config, "_attn_implementation")]


def _state(model: nn.Module) -> list[object]:
    """Return what a model runs: modules, settings, patched forwards, attention, hooks, classes, kinds of weights."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

    modules = modules_of(model)
    configs = _configs(modules)
    return [
        *map(ref, (*modules, *configs)),
        *(ref(vars(module).get("forward", type(module))) for module in modules),
        *(FUNCTIONS.get(config._attn_implementation) for config in configs),
        global_forward_hooks(),
        *((type(module), type(module).forward, *_hooks(module)) for module in modules),
        *_kinds_of(tensor for module in modules for _, tensor in direct_tensors(module)),
    ]


def _hooks(module: nn.Module) -> list[int]:
    """Return the numbers of a module's hooks; torch uses each number once."""
    return [number for number, hook in forward_hooks(module) if getattr(hook, "__module__", None) != RECORDERS]


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return all parameters and buffers by name; tied ones under each of their names."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _kinds_of(weights: Iterable[Tensor]) -> list[Kind]:
    first: dict[tuple[int, torch.Size], int] = {}
    return [
        (first.setdefault((t.data_ptr(), t.shape), number), t.shape, t.stride(), t.dtype, t.device)
        for number, t in enumerate(weights)
    ]


def _settings(values: Mapping[str, object]) -> dict[str, object]:
    """Return the plain values that a forward may read: flags, sizes, names."""
    return {name: value for name, value in values.items() if name not in IGNORED and _is_plain(value)}


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return bool(value) and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)
