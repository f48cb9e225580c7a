"""Private parts of torch: all that this package uses of them, a function for each.

Knows: names that torch may change in any version, and what stands behind them.
Does not know: models, trees, passes, what its callers are for.

Each function, or the heading of its group, says why no public one does.  All were tried with torch 2.11.0, 2.13.0
and 2.14.1: the first and the last are the oldest and the newest that ``pyproject.toml`` allows.
``tests/attention/test_torch_private.py`` tries each on a CPU, and names the one that a version of torch broke.  No
other module uses private names; the same tests look for them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor, fx, nn

if TYPE_CHECKING:
    from torch._inductor.ir import IRNode, _IntLike
    from torch._ops import OpOverloadPacket

Module = TypeVar("Module", bound=nn.Module)
Value: TypeAlias = "IRNode"  # a tensor that compiled code will compute
Size: TypeAlias = "_IntLike"  # a number or a symbol

# Settings of Inductor, whose public interface (`torch.compile`) makes no packages.  Code uses as many threads as torch
# has when it runs.  No header is compiled in advance, which pays only where many packages are made.
COMPILER_OPTIONS = {"cpp.dynamic_threads": True, "aot_inductor.precompile_headers": False}

# ---- tensors and modules ----


def writes(tensor: Tensor) -> int:
    """Return how often a tensor was written to; writes through ``.data`` hide.

    Torch counts them for autograd, and shows the count nowhere else.

    Raises:
        RuntimeError: it is an inference tensor, whose writes are not counted.
    """
    return tensor._version


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors of one type into others.

    Torch has this in one GPU launch, but only for its optimisers.
    """
    torch._foreach_copy_(targets, sources)


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return a model's modules, each once.

    ``model.modules()`` does the same, and takes three times as long.
    """
    found: dict[nn.Module, None] = {}  # in order
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and module not in found:
            found[module] = None
            waiting += module._modules.values()
    return [*found]


def direct_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers of a module by name, without those of the modules in it.

    ``named_parameters`` and ``named_buffers`` do the same, and take five times as long.
    """
    pairs = (*module._parameters.items(), *module._buffers.items())
    return [(name, tensor) for name, tensor in pairs if tensor is not None]


def with_parameters(module: Module, values: Mapping[str, Tensor]) -> Module:
    """Return a copy of a module with other parameters, and all else shared.

    `copy.deepcopy` would copy the weights.  To register a parameter in a shallow copy would change the original.
    """
    copied = copy(module)
    copied._parameters = {name: nn.Parameter(value, requires_grad=False) for name, value in values.items()}
    return copied


def forward_hooks(module: nn.Module) -> list[tuple[int, object]]:
    """Return the hooks that a module calls before and after its forward, with their numbers.

    Torch uses each number once.  Hooks can be registered and removed in public, but not listed.
    """
    return [*module._forward_pre_hooks.items(), *module._forward_hooks.items()]


def global_forward_hooks() -> list[int]:
    """Return the numbers of the hooks that every module calls; they cannot be listed in public."""
    registry = nn.modules.module
    return [*registry._global_forward_pre_hooks, *registry._global_forward_hooks]


# ---- exported graphs ----


def sizes_may_be_one() -> AbstractContextManager[object]:
    """Return the context in which `torch.export` treats 1 as a size like others.

    Without it, an exported graph holds for 1 only, or for all sizes but 1.  No argument of ``export`` says so.
    """
    from torch.fx.experimental import _config

    settings: Any = _config
    return settings.patch(backed_size_oblivious=True)


def run_time_check(node: fx.Node) -> str | None:
    """Return what a check in an exported graph compares, "" for one of dtypes; None for a node that is no check.

    The checks are operators with private names.  ``export`` has no option that leaves them out.
    """
    if node.target is torch.ops.aten._assert_scalar.default:
        return str(node.args[1])
    return "" if node.target is torch.ops.aten._assert_tensor_metadata.default else None


# ---- products of packed weights on a CPU ----


def has_packed_products(dtype: torch.dtype) -> bool:
    """Whether products of a weight that `pack_weight` packed are fast on this processor.

    ``torch.backends`` says whether there are MKL and oneDNN, but not which types oneDNN supports.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float32:
        return torch.backends.mkl.is_available()
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def pack_weight(weight: Tensor, rows: int) -> Tensor:
    """Return a weight (N, K) in the order in which MKL (float32) or oneDNN (16 bits) reads it.

    Inductor packs weights while it compiles, if they are a part of the code.  Nothing public does.

    Args:
        weight: contiguous.
        rows: the number of states that its products are tuned for.
    """
    if weight.dtype == torch.float32:
        return torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


# ---- the compiler: packages ----


def compile_package(graph: fx.GraphModule, path: Path) -> None:
    """Compile a graph, whose placeholders have example values in ``meta["val"]``, into a package.

    Even the documented function has a private name (``torch._inductor.aoti_compile_and_package``).  It takes exported
    programs only, whose weights become a part of the package.

    For a GPU the package holds kernels and the Python that launches them, which a CUDA graph does once.  Packages of
    AOTInductor ended the process that loaded them, in ``std::regex``: even one of ``relu(x @ w)`` did, on the one
    machine that was tried, with torch 2.11 (docs/gpu.md).

    Args:
        graph: with tensors as inputs and outputs.
        path: of the package, a file.  On a CPU, what the compiler writes meanwhile is in the same folder; kernels for
            a GPU also stay in torch's own cache, which `CompiledArtifact` needs.
    """
    from torch._inductor import aot_compile
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list
    from torch._inductor.package import package_aoti
    from torch._inductor.utils import fresh_cache

    inputs = tuple(node.meta["val"] for node in graph.graph.find_nodes(op="placeholder"))
    if inputs[0].device.type == "cuda":
        compile_kernels(graph, path)
        return
    valid_vec_isa_list()  # what the compiler can write for this processor, tried once: torch's own cache remembers it
    with torch.no_grad(), fresh_cache(dir=str(path.parent)), warnings.catch_warnings(action="ignore"):
        files: Any = aot_compile(graph, inputs, options={**COMPILER_OPTIONS, "aot_inductor.package": True})
        package_aoti(str(path), files)


def compile_kernels(graph: fx.GraphModule, path: Path) -> None:
    """Compile a graph as `compile_package` does for a GPU."""
    from torch._inductor import standalone_compile

    for node in graph.graph.nodes:
        node.meta["example_value"] = node.meta.get("val")  # whose sizes are symbols: the code is for all sizes
    inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        standalone_compile(graph, inputs, dynamic_shapes="from_graph").save(path=str(path), format="binary")


def load_kernels(path: Path) -> Callable[[list[Tensor]], list[Tensor]]:
    """Return the function that `compile_kernels` wrote, as `load_package` does for a GPU."""
    from torch._inductor import CompiledArtifact

    artifact = CompiledArtifact.load(path=str(path), format="binary")
    return lambda tensors: artifact(*tensors)


def load_package(path: Path, device: torch.device) -> Callable[[list[Tensor]], list[Tensor]]:
    """Return the function that a package holds, from its graph's inputs to its outputs.

    Even the documented function has a private name (``torch._inductor.aoti_load_package``).  What it returns takes
    inputs as the traced function did, and flattens them in every call.

    Args:
        path: of what `compile_package` wrote.
        device: to run on; a GPU runs it in the current stream.

    Raises:
        RuntimeError: the package is damaged, or of another version.
    """
    if device.type == "cuda":
        return load_kernels(path)
    return torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1).run


# ---- the compiler: how an operator is compiled ----
#
# A `Value` stands for a tensor that compiled code will compute.  In public, an operator can be given to Inductor as a
# function in Python or as kernels in Triton (`torch.library`); a package on a CPU can call neither.


def lowering(operator: OpOverloadPacket) -> Callable[[Callable[..., Value]], Callable[..., Value]]:
    """Return a decorator of what compiles an operator: a function from values, numbers and strings to a value."""
    from torch._inductor.lowering import register_lowering

    return register_lowering(operator, type_promotion_kind=None)


def sizes_of(value: Value) -> list[Size]:
    """Return a value's shape, of numbers and symbols."""
    return [*value.get_size()]


def reshaped(value: Any, sizes: Sequence[Size]) -> Value:
    """Return a value in another shape, in which one size may be -1."""
    from torch._inductor.lowering import view

    return view(value, [*sizes])


def in_memory(value: Value) -> Value:
    """Return a value that is computed into memory of its own, or is an input; its strides are as they come."""
    from torch._inductor import ir

    return ir.ExternKernel.realize_input(value)


def contiguous(value: Value) -> Value:
    """Return the same, contiguous."""
    from torch._inductor import ir

    return ir.ExternKernel.require_contiguous(in_memory(value))


def with_contiguous_rows(value: Value) -> Value:
    """Return the same, made contiguous unless its last dimension already is."""
    given = in_memory(value)
    return given if given.get_stride()[-1] == 1 else contiguous(given)


def packed_product(states: Value, packed: Value, like: Value, bias: Value | None) -> Value:
    """Return states (M, K) times a weight (N, K) that `pack_weight` packed, plus a bias (N,) or None: (M, N).

    MKL's product takes any number of states, whatever number its weight was packed for.  Torch's operator compares the
    two numbers, so it is given the current one.
    """
    from torch._inductor import ir, mkldnn_ir

    given, added = in_memory(states), None if bias is None else in_memory(bias)
    if states.get_dtype() == torch.float32:
        given = contiguous(given)
        result = mkldnn_ir.MKLPackedLinear.create(given, packed, like, added, sizes_of(given)[0])
    else:
        result = mkldnn_ir.LinearUnary.create(given, packed, added, "none", [], "")
    return ir.TensorBox.create(result)


def call_of_header(
    header: Path,
    function: str,
    inputs: Sequence[Value],
    sizes: Sequence[Size],
    constants: Sequence[float] = (),
    strides: Sequence[Size] | None = None,
) -> Value:
    """Return the float32 value that a function of a C++ header fills; the header becomes a part of the compiled code.

    Args:
        header: its file.
        function: takes the result, the inputs (`AtenTensorHandle` each) and the constants; its name begins with
            ``aoti_torch_``.
        inputs: in memory; the first one's device is the result's.
        sizes: of the result.
        constants: numbers.
        strides: of the result; contiguous if none are given.
    """
    from torch._inductor import ir

    class Call(ir.ExternKernelOut):
        def codegen(self, wrapper: Any) -> None:
            wrapper.include_extra_header(str(header))
            super().codegen(wrapper)

    layout = ir.FixedLayout(inputs[0].get_device_or_error(), torch.float32, [*sizes], strides and [*strides])
    return ir.TensorBox.create(Call(layout, [*inputs], tuple(constants), cpp_kernel_name=function))
