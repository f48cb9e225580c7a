"""Models that accelerate's hooks run: their layers lie on several devices, in memory or on disk.

Knows: where the modules of these models execute, and where their weights are meanwhile.
Does not know: passes, caches, how a model is loaded.

transformers loads a model this way if its ``device_map`` names several devices, or "disk".  Then every module has a
hook.  Before the module runs, its hook moves inputs to where it executes and fetches weights that
are offloaded; until then these are on the "meta" device, without values.  Logits come back to where the token ids were.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from specinfer.attention.packed.modules import PackedEmbedding, PackedLinear
from specinfer.attention.packed.products import rows_of
from specinfer.attention.torch_private import with_parameters
from specinfer.common.ranks import whole
from specinfer.errors import ModelError

# by module: an offloaded weight is fetched once, and kept while its module is
_fetched: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()
_turns: WeakKeyDictionary[nn.Module, RLock] = WeakKeyDictionary()


def is_dispatched(model: nn.Module) -> bool:
    """Whether hooks run a model."""
    return hasattr(model, "_hf_hook")


def device_of(model: Any) -> torch.device:
    """Return where a model's token ids must be: where its embedding executes."""
    embedding = model.get_input_embeddings()
    return next(_execution_devices(embedding), getattr(embedding, "weight", model).device)  # a later stage has none


def spans_devices(model: nn.Module) -> bool:
    """Whether hooks run a model's modules on several devices."""
    return len({device for module in model.modules() for device in _execution_devices(module)}) > 1


def value_of(module: nn.Module, name: str) -> Tensor:
    """Return a module's own parameter or buffer, detached; if it is offloaded, a copy where the module executes.

    Raises:
        ModelError: it has no values, and no hook has them.
    """
    tensor: Tensor = getattr(module, name).detach()
    if tensor.device.type != "meta":
        return tensor
    for hook in _hooks(module):
        with suppress(KeyError):  # `in` would read it as well
            values = (getattr(hook, "weights_map", None) or {})[name]
            return values.detach().to(next(_execution_devices(module), values.device), tensor.dtype)
    advice = "load the model with its weights, or with transformers' device_map"
    raise ModelError(f"the {name} of a {type(module).__name__} has no values (device meta): {advice}")


def weight_of(module: Any) -> Tensor:
    """Return a module's weight, detached; if it is offloaded, a copy for whatever borrows it.

    Raises:
        ModelError: as `value_of`; or it is packed, and nothing else reads it.
    """
    if isinstance(module, PackedLinear | PackedEmbedding):
        raise ModelError("the target's weights are packed: take one in bfloat16 or float32, or a draft with its own")
    if module.weight.device.type != "meta":
        return whole(module.weight).detach()
    if module not in _fetched:
        _fetched[module] = value_of(module, "weight")
    return _fetched[module]


def embedded(module: Any, ids: Tensor) -> Tensor:
    """Return the rows of a module's matrix for token ids: see `weight_of`, but it may be packed."""
    if isinstance(module, PackedLinear | PackedEmbedding):
        return rows_of(ids, module.packed, module.inputs)
    return weight_of(module)[ids]


def resident(module: Any) -> Any:
    """Return a module; if its weight is offloaded, a copy without hooks that holds it.

    Raises:
        ModelError: as `value_of`.
    """
    if module.weight.device.type != "meta":
        return module
    names = [name for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)]
    values = {name: value_of(module, name) for name in names}
    held = with_parameters(module, {**values, "weight": weight_of(module)})
    for name in ("_hf_hook", "_old_forward", "forward"):  # what a hook adds
        vars(held).pop(name, None)
    return held


def its_turn(model: nn.Module) -> AbstractContextManager[object]:
    """Return what lets one thread at a time run a model that hooks run: they keep weights in its modules."""
    return _turns.setdefault(model, RLock()) if is_dispatched(model) else nullcontext()


def _hooks(module: object) -> Iterator[object]:
    """Yield a module's hooks; several are in a sequence."""
    hook = getattr(module, "_hf_hook", None)
    yield from getattr(hook, "hooks", () if hook is None else (hook,))


def _execution_devices(module: object) -> Iterator[torch.device]:
    """Yield where a module executes, if its hooks say so."""
    for hook in _hooks(module):
        if (device := getattr(hook, "execution_device", None)) is not None:
            yield torch.device(device)
