"""A stand-in for a GPU: tensors of the CPU that say they are on a CUDA device, and are treated as such.

Knows: which storages are on the device, what CUDA refuses, what waits for it, what is launched on it.
Does not know: speed, streams, rounding, random numbers: kernels and generators are the CPU's.

A storage is marked when its values are put on the device or computed there.  Two modes of torch see every call: one
answers what Python asks of tensors (`device`, `to`, `tolist`), the other one sees each operator.  Both end with the
`with` block; torch itself is not changed.  An operator counts as one launch, though CUDA may need several kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specinfer.attention.passes import graphs
from specinfer.errors import UnsupportedModel

DEVICE = torch.device("cuda:99")  # no machine has it: what is cached by device stays apart from a real one's
MARKER = torch.device("meta")  # stands for it where torch would look for a driver
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "bincount"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
CROSSING = {"where", "masked_fill", "masked_fill_", "fill_"}  # beside pointwise operators: these take the CPU's numbers
BARE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}  # memory alone: nothing is launched
VALUES = {torch.tensor, torch.as_tensor, torch.asarray}
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd  # of operators that are made of others
LISTS = list, tuple


def on_device(tensor: Tensor) -> bool:
    """Whether a tensor is on the stand-in."""
    return getattr(tensor.untyped_storage(), "stands_in", False)


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors among an operator's values, which may be lists (pytree would take half of all the time)."""
    if isinstance(values, Tensor):
        return [values]
    found: list[Tensor] = []
    for value in values if isinstance(values, LISTS) else ():
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, LISTS):
            found += _tensors(value)
    return found


class Traits(NamedTuple):
    """What is known of an operator."""

    name: str
    mutable: bool
    composite: bool
    takes_numbers: bool  # of the CPU, beside tensors on the device


@cache
def traits(func: Any) -> Traits:
    """Return an operator's traits."""
    name = func.overloadpacket.__name__
    takes_numbers = name in CROSSING | INDEXING or torch.Tag.pointwise in func.tags
    return Traits(name, func._schema.is_mutable, func.has_kernel_for_dispatch_key(COMPOSITE), takes_numbers)


FREE = 1 << 32  # bytes of the device's memory


class StandIn:
    """What was done on the device since the last `reset`: names, and how often."""

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()  # for values, blocking copies, and shapes that depend on values
        self.copies: Counter[str] = Counter()  # to the device, without waiting
        self.launches: Counter[str] = Counter()
        self.recorded: list[tuple[Any, ...]] | None = None  # operators, while a graph is captured

    def reset(self) -> None:
        """Start counting anew."""
        for counter in (self.waits, self.copies, self.launches):
            counter.clear()

    def wait(self, what: str) -> None:
        """Count a wait; as in CUDA, no graph can hold it."""
        if self.recorded is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing ({what})")
        self.waits[what] += 1

    def copied_in(self, what: str, non_blocking: bool) -> None:
        """Count a copy from pageable memory of the host."""
        if self.recorded is not None or not non_blocking:
            self.wait(f"{what}, blocking")
        else:
            self.copies[what] += 1

    def launch(self, name: str, call: tuple[Any, ...]) -> None:
        """Count an operator's launch, or record the operator while a graph is captured."""
        if self.recorded is None:
            self.launches[name] += 1
        else:
            self.recorded.append(call)

    def moved(self, tensor: Tensor, there: bool, dtype: Any = None, non_blocking: bool = False) -> Tensor:
        """Return a copy of a tensor at the other place."""
        if there:
            self.copied_in("to", non_blocking)
        else:
            self.wait("to")
        with _aside():
            copy = tensor.detach().to(dtype or tensor.dtype, copy=True)
        copy.untyped_storage().stands_in = there
        return copy

    def capture(self, run: graphs.Pass, inputs: graphs.Tensors) -> graphs.Replay:
        """Record a pass; return what runs its operators again over the same memory (in place of `CudaCapture`)."""
        self.recorded = recorded = []
        try:
            outputs = run(inputs)
        except RuntimeError as error:
            raise UnsupportedModel(f"a pass cannot be captured ({error}): leave out graphs") from error
        finally:
            self.recorded = None

        def replay() -> tuple[Tensor, ...]:
            self.launches["graph"] += 1
            with _aside():
                for func, args, kwargs, old in recorded:
                    for was, new in zip(old, _tensors(func(*args, **kwargs)), strict=True):
                        if was is not new:
                            was.copy_(new)
            return outputs

        return replay


@contextmanager
def _aside() -> Iterator[None]:
    """Operators are the stand-in's own: no mode sees them."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


class _Generator(torch.Generator):
    """A generator of the CPU, whatever device is asked for."""

    def __new__(cls, *_: Any) -> _Generator:
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None:
        super().__init__()


class _Calls(TorchFunctionMode):
    """What Python asks of tensors, answered as for a tensor on the device."""

    def __init__(self, device: StandIn) -> None:
        super().__init__()
        self.device = device
        self.answers: dict[Callable[..., Any], Callable[..., Any]] = {
            torch.Tensor.device.__get__: lambda tensor, *_: DEVICE,
            torch.Tensor.is_cuda.__get__: lambda tensor, *_: True,
            torch.Tensor.is_cpu.__get__: lambda tensor, *_: False,
            torch.Tensor.cpu: lambda tensor: device.moved(tensor, False),
            torch.Tensor.numpy: self._refused,
            torch.Tensor.__array__: self._refused,
            torch.Tensor.tolist: lambda tensor: device.moved(tensor, False).tolist(),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.to:
            return self._to(*args, **kwargs)
        if func in self.answers and on_device(args[0]):
            return self.answers[func](*args, **kwargs)
        if kwargs.get("device") is None or torch.device(kwargs["device"]).type != DEVICE.type:
            return func(*args, **kwargs)
        if func in VALUES:
            values = func(*args, **{**kwargs, "device": None})
            return values if on_device(values) else self.device.moved(values, True)
        return func(*args, **{**kwargs, "device": MARKER})

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        values = [*args, *kwargs.values()]
        place = next((value for value in values if isinstance(value, str | torch.device | Tensor)), None)
        if place is None:
            return tensor.to(*args, **kwargs)
        there = on_device(place) if isinstance(place, Tensor) else torch.device(place).type == DEVICE.type
        dtype = next((value for value in values if isinstance(value, torch.dtype)), tensor.dtype)
        if there == on_device(tensor):
            return tensor.to(dtype)
        non_blocking = kwargs.get("non_blocking", any(value is True for value in args))
        return self.device.moved(tensor, there, dtype, non_blocking)

    def _refused(self, *_: Any, **__: Any) -> None:
        raise TypeError("can't convert a tensor on the device to numpy: copy it to the host first")


class _Operators(TorchDispatchMode):
    """Each operator, after those made of others are taken apart."""

    def __init__(self, device: StandIn) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors, asked = _tensors([*args, *kwargs.values()]), kwargs.get("device")
        places = [on_device(tensor) for tensor in tensors]
        if not (asked == MARKER or any(places)):
            return func(*args, **kwargs)
        if asked is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if asked not in (None, MARKER):
            return func(*args, **kwargs)
        name, mutable, composite, _ = traits(func)
        if composite and asked is None:
            with self:
                return func._op_dk(COMPOSITE, *args, **kwargs)
        self._check(func, args, kwargs, [tensor for tensor, there in zip(tensors, places, strict=True) if not there])
        result = func(*args, **kwargs)
        found = _tensors(result)
        is_view = not mutable and all(map(on_device, found))  # memory that is new has no mark yet
        if not is_view:
            for tensor in found:
                tensor.untyped_storage().stands_in = True
        is_work = found or mutable  # on lists of tensors, which nothing is returned of
        if is_work and not is_view and name not in BARE:
            self.device.launch(name, (func, args, kwargs, found))
        return result

    def _check(self, func: Any, args: Any, kwargs: Any, away: list[Tensor]) -> None:
        """Count what waits; raise RuntimeError for operands on two devices, some of which are away."""
        name = traits(func).name
        if name == "copy_":
            target, _, *non_blocking = args
            if on_device(target) and away:
                self.device.copied_in(name, any(non_blocking) or kwargs.get("non_blocking", False))
            elif away:
                self.device.wait(name)
            return
        if name in INDEXING:
            indices = [index for index in args[1] if index is not None]
            fills = name != "index" and args[2].numel() == 1  # which is done by `masked_fill`
            if not fills and any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                self.device.wait("boolean index")
            if any(not on_device(index) for index in indices):
                self.device.copied_in("index", False)
            away = [tensor for tensor in away if not any(tensor is index for index in indices)]
        if name in WAITING or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.device.wait(name)
        if any(tensor.dim() or not traits(func).takes_numbers for tensor in away):
            raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got {DEVICE} and cpu")


@contextmanager
def standing_in() -> Iterator[StandIn]:
    """Stand in for a GPU within a `with` block, in this thread: models and tensors get there by ``to(DEVICE)``."""
    device = StandIn()
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.cuda, "synchronize", lambda *_: device.wait("synchronize")))
        stack.enter_context(patch.object(torch.cuda, "get_device_name", lambda *_: "stand-in"))
        stack.enter_context(patch.object(torch.cuda, "mem_get_info", lambda *_: (FREE, FREE)))
        stack.enter_context(patch.object(torch, "Generator", _Generator))
        stack.enter_context(patch.object(graphs, "CudaCapture", lambda: device.capture))
        stack.enter_context(_Operators(device))
        stack.enter_context(_Calls(device))
        yield device
