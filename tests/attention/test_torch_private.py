"""Private parts of torch: each is tried, and named if a version of torch changed it; no module uses others."""

import ast
import functools
import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.export import Dim, export

import specinfer
import specinfer.attention
import specinfer.tree
from specinfer.attention import torch_private as private
from specinfer.attention.compiler.exported import EXPECTED
from specinfer.attention.compiler.packages import missing_compiler

CPU = torch.device("cpu")
EXPORT: dict[str, Any] = {"strict": False, "prefer_deferred_runtime_asserts_over_guards": True}
TRIED: set[str] = set()  # functions that a test here tries


def tries(*functions: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a test name the function that failed: of these, the innermost one at work, or all if none was."""

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(test)
        def named(*args: Any, **options: Any) -> Any:
            try:
                return test(*args, **options)
            except (Exception, pytest.fail.Exception) as error:
                at_work = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
                inside = [code.co_qualname for code in at_work if code.co_filename == private.__file__]
                names = inside[-1].split(".")[0] if inside else ", ".join(functions)
                message = f"torch {torch.__version__} changed what attention/torch_private.py: {names} relies on"
                raise AssertionError(f"{message}: {type(error).__name__}: {error}") from error

        TRIED.update(functions)
        return named

    return decorate


# ---- tensors and modules ----


class Block(nn.Module):
    """Two parameters (one of them empty), a buffer, and a module that is in it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_parameter("bias", None)
        self.register_buffer("scale", torch.ones(()))
        self.first = self.second = nn.Linear(2, 2)

    def forward(self, states: Tensor) -> Tensor:
        """Multiply by all of them."""
        return self.second(self.first(states * self.weight))


@tries("writes")
def test_writes_are_counted() -> None:
    weight = nn.Parameter(torch.zeros(3))
    count = private.writes(weight)
    with torch.no_grad():
        weight.add_(1)
        weight[0] = 2
    assert private.writes(weight) == count + 2
    with torch.inference_mode(), pytest.raises(RuntimeError, match="version counter"):
        private.writes(torch.zeros(3))


@tries("copy_all")
def test_copies_are_made_of_all() -> None:
    targets, sources = [torch.zeros(3), torch.zeros(2, 2)], [torch.arange(3.0), torch.eye(2).T[:, :2]]
    private.copy_all(targets, sources)
    assert all(map(torch.equal, targets, sources))


@tries("modules_of")
def test_modules_are_those_of_torch() -> None:
    model = nn.Sequential(Block(), nn.ModuleList([nn.Linear(2, 2)]), Block())
    model.register_module("nothing", None)
    found = private.modules_of(model)
    assert len(found) == 7
    assert {*found} == {*model.modules()}


@tries("direct_tensors")
def test_direct_tensors_are_those_of_torch() -> None:
    block = Block()
    found = dict(private.direct_tensors(block))
    assert found == {**dict(block.named_parameters(recurse=False)), **dict(block.named_buffers(recurse=False))}
    assert [*found] == ["weight", "scale"]


@tries("with_parameters")
def test_a_copy_has_other_parameters_and_the_original_none_of_them() -> None:
    block = Block()
    before = dict(block.named_parameters())
    copied = private.with_parameters(block, {"weight": torch.full((2,), 2.0)})
    states = torch.ones(1, 2)
    assert torch.equal(copied(states), block(2 * states))
    assert copied.first is block.first
    assert all(found is before[name] for name, found in block.named_parameters())
    assert not copied.weight.requires_grad


@tries("forward_hooks")
def test_hooks_of_a_module_are_listed() -> None:
    block = Block()
    assert private.forward_hooks(block) == []

    def before(*_: Any) -> None: ...

    def after(*_: Any) -> None: ...

    handles = block.register_forward_pre_hook(before), block.register_forward_hook(after)
    assert private.forward_hooks(block) == [(handles[0].id, before), (handles[1].id, after)]
    for handle in handles:
        handle.remove()
    assert private.forward_hooks(block) == []


@tries("global_forward_hooks")
@pytest.mark.parametrize("kind", ["pre_hook", "hook"])
def test_hooks_of_all_modules_are_listed(kind: str) -> None:
    assert private.global_forward_hooks() == []
    handle = getattr(nn.modules.module, f"register_module_forward_{kind}")(lambda *_: None)
    found = private.global_forward_hooks()
    handle.remove()
    assert found == [handle.id]


# ---- exported graphs ----


class Narrow(nn.Module):
    """The first entries of one tensor, as many as another one has, in float64."""

    def forward(self, slots: Tensor, nodes: Tensor) -> Tensor:
        """Return them."""
        return slots.narrow(0, 0, nodes.shape[0]).to(torch.float64)


def exported(slots: int, nodes: int) -> fx.GraphModule:
    """Return the graph of `Narrow`, for any number of slots and of nodes."""
    shapes = ({0: Dim("slots", min=1)}, {0: Dim("nodes", min=1)})
    given = torch.zeros(slots), torch.zeros(nodes)
    return export(Narrow().eval(), given, dynamic_shapes=shapes, **EXPORT).module(check_guards=False)


@tries("sizes_may_be_one")
def test_a_graph_from_a_size_of_one_holds_for_others() -> None:
    with private.sizes_may_be_one():
        graph = exported(4, 1)
    assert [len(graph(torch.ones(5), torch.ones(nodes))) for nodes in (1, 3)] == [1, 3]
    with pytest.raises(Exception, match="specialized it to be a constant"):  # so it is still needed
        exported(4, 1)


@tries("run_time_check")
def test_checks_in_a_graph_are_told_from_other_nodes() -> None:
    with private.sizes_may_be_one():
        graph = exported(4, 2).graph
    found = [(node, private.run_time_check(node)) for node in graph.nodes]
    (message,) = (message for _, message in found if message)
    assert EXPECTED.search(message)
    assert [message for _, message in found].count("") == 1
    assert all(not node.users for node, message in found if message is not None)


# ---- products of packed weights, and the compiler ----


@tries("has_packed_products", "pack_weight")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_is_packed_where_products_of_its_type_are(dtype: torch.dtype) -> None:
    """What is in it, the package's products tell."""
    if private.has_packed_products(dtype):
        assert private.pack_weight(torch.ones(6, 4, dtype=dtype), 16).dtype == dtype


@tries("has_packed_products")
def test_products_of_other_types_are_not_packed() -> None:
    assert not private.has_packed_products(torch.float64)
    assert private.has_packed_products(torch.float32) == torch.backends.mkl.is_available()


HEADER = r"""
#pragma once
struct Matrix {
    float* data;
    int64_t *sizes, *strides;
    explicit Matrix(AtenTensorHandle handle) {
        aoti_torch_get_data_ptr(handle, (void**)&data);
        aoti_torch_get_sizes(handle, &sizes);
        aoti_torch_get_strides(handle, &strides);
    }
    float& at(int64_t i, int64_t j) { return data[i * strides[0] + j * strides[1]]; }
};
inline AOTITorchError aoti_torch_specinfer_tests_scaled(
    AtenTensorHandle results, AtenTensorHandle values, AtenTensorHandle shifts, double factor) {
    Matrix to(results), from(values), by(shifts);
    for (int64_t i = 0; i < to.sizes[0]; i++)
        for (int64_t j = 0; j < to.sizes[1]; j++) to.at(i, j) = factor * from.at(i, j) + by.data[i * to.sizes[1] + j];
    return 0;
}
"""
library = torch.library.Library("specinfer_tests", "DEF")
library.define("product(Tensor states, Tensor packed, Tensor like, Tensor bias) -> Tensor")
library.define("scaled(Tensor values, Tensor shifts, float factor) -> Tensor")
operators = torch.ops.specinfer_tests


@torch.library.register_fake("specinfer_tests::product", lib=library)
def product_shape(states: Tensor, _packed: Tensor, like: Tensor, _bias: Tensor) -> Tensor:
    return states.new_empty(states.shape[0], like.shape[0])


@torch.library.register_fake("specinfer_tests::scaled", lib=library)
def scaled_shape(values: Tensor, _shifts: Tensor, _factor: float) -> Tensor:
    rows, columns = values.shape
    return values.new_empty(columns, rows).T


def teach_compiler(header: Path) -> None:
    """Tell Inductor about both operators."""
    private.lowering(operators.product)(private.packed_product)

    @private.lowering(operators.scaled)
    def lower(values: Any, shifts: Any, factor: float) -> Any:
        rows, columns = private.sizes_of(values)
        flat = private.reshaped(private.in_memory(shifts), [rows * columns])
        inputs = [private.with_contiguous_rows(values), private.contiguous(flat)]
        name = "aoti_torch_specinfer_tests_scaled"
        return private.call_of_header(header, name, inputs, [rows, columns], [factor], [1, rows])


class Pass(nn.Module):
    """A product of each pair of states and weight, and three views of their results that a header scales."""

    def forward(self, states: list[Tensor], packed: list[Tensor], like: list[Tensor], bias: list[Tensor]) -> Any:
        """Return all of them."""
        products = [operators.product(*each) for each in zip(states, packed, like, bias, strict=True)]
        wide = states[0]
        parts = wide[:, 1:3], wide[:, ::2], wide.sin()[:, 2:]
        return [*products, *(operators.scaled(each, wide[:, :2] + 1, 3.0) for each in parts)]


@pytest.mark.skipif(bool(missing_compiler()), reason="no C++ compiler, so no compiled passes")
@tries(
    *("compile_package", "load_package", "lowering", "sizes_of", "reshaped", "in_memory", "contiguous"),
    *("with_contiguous_rows", "packed_product", "call_of_header"),
)
def test_a_package_computes_products_and_calls_a_header(tmp_path: Path) -> None:
    """One package for all that compiles, which takes seconds; its inputs have other sizes than the example."""
    header, path = tmp_path / "scaled.h", tmp_path / "pass.pt2"
    header.write_text(HEADER)
    dtypes = [each for each in (torch.float32, torch.bfloat16) if private.has_packed_products(each)]
    torch.manual_seed(0)
    weights = [torch.randn(6, 4).to(dtype) for dtype in dtypes]
    biases = [torch.randn(6).to(dtype) for dtype in dtypes]
    like = [torch.zeros(1).to(dtype).expand(6, 4) for dtype in dtypes]

    def states(rows: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(rows)
        return [torch.randn(rows, 4, generator=generator).to(dtype) for dtype in dtypes or [torch.float32]]

    teach_compiler(header)
    shapes: Any = ([{0: Dim("rows", min=1)}] * len(states(3)), *[[{}] * len(dtypes)] * 3)
    with torch.no_grad(), private.sizes_may_be_one():
        program = export(Pass().eval(), (states(3), weights, like, biases), dynamic_shapes=shapes, **EXPORT)
    module = program.module(check_guards=False)
    for node in reversed(module.graph.nodes):
        if private.run_time_check(node) is not None:
            module.graph.erase_node(node)
    module.graph.set_codegen(fx.graph.CodeGen())
    private.compile_package(fx.GraphModule(module, module.graph), path)
    run = private.load_package(path, CPU)
    packed = [private.pack_weight(weight, 16) for weight in weights]
    for rows in (1, 5):
        given = states(rows)
        found = run([*given, *packed, *like, *biases])
        pairs = zip(found, given, weights, biases, strict=False)
        for result, each, weight, bias in pairs:
            torch.testing.assert_close(result.float(), (each.float() @ weight.float().T + bias), atol=0.05, rtol=0.02)
        wide = given[0]
        parts = wide[:, 1:3], wide[:, ::2], wide.sin()[:, 2:]
        for result, part in zip(found[-3:], parts, strict=True):
            torch.testing.assert_close(result, 3 * part + wide[:, :2] + 1)


@pytest.mark.skipif(bool(missing_compiler()), reason="no C++ compiler, so no compiled passes")
@tries("compile_kernels", "load_kernels")
def test_a_file_of_kernels_computes_what_its_graph_does(tmp_path: Path) -> None:
    """What a GPU is given, here for a CPU; for other sizes than the example's, and for one of each."""
    with torch.no_grad(), private.sizes_may_be_one():
        program = export(Products(), (torch.ones(3, 4), torch.ones(4, 5)), dynamic_shapes=({0: Dim("rows", min=1)}, {}))
    graph = program.module(check_guards=False).graph
    graph.set_codegen(fx.graph.CodeGen())
    private.compile_kernels(fx.GraphModule({}, graph), tmp_path / "kernels")
    run = private.load_kernels(tmp_path / "kernels")
    for rows in (1, 7):
        states, weight = torch.randn(rows, 4), torch.randn(4, 5)
        (found,) = run([states, weight])
        torch.testing.assert_close(found, (states @ weight).relu())


class Products(nn.Module):
    """A product, and what follows it in the same kernel."""

    def forward(self, states: Tensor, weight: Tensor) -> tuple[Tensor]:
        """Return them."""
        return ((states @ weight).relu(),)


# ---- all of them, and no others ----

PACKAGES = (specinfer, specinfer.tree, specinfer.attention)
PROGRAMS = sorted({path for package in PACKAGES for root in package.__path__ for path in Path(root).rglob("*.py")})
INSTANCES = (torch.zeros(()), nn.Linear(1, 1), fx.symbolic_trace(nn.Identity()), fx.Graph())
PRIVATE = re.compile(r"_(?!_)")
MEMBERS = {name for one in INSTANCES for name in (*dir(type(one)), *vars(one)) if PRIVATE.match(name)}
TORCH = ("torch", "nn", "fx", "aten", "dist", "functional")  # what modules call torch and its parts


def private_uses(source: str) -> Iterator[str]:
    """Yield the private parts of torch that a program uses: modules, what is in them, members of its objects."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            before = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from (
                name
                for name in (before + alias.name for alias in node.names)
                if name.split(".")[0] == "torch" and any(map(PRIVATE.match, name.split(".")))
            )
        elif isinstance(node, ast.Attribute) and PRIVATE.match(node.attr):
            root = ast.unparse(node.value).split(".")[0]
            if root in TORCH or (node.attr in MEMBERS and root not in ("self", "cls", "super()")):
                yield ast.unparse(node)


def test_every_function_is_tried() -> None:
    functions = inspect.getmembers(private, inspect.isfunction)
    assert {name for name, function in functions if function.__module__ == private.__name__} == TRIED


def test_other_modules_use_nothing_private_of_torch() -> None:
    """What one of them uses becomes a function of torch_private.py."""
    found = {path: [*private_uses(path.read_text(encoding="utf-8"))] for path in PROGRAMS}
    assert [path.name for path, uses in found.items() if uses] == ["torch_private.py"], found


@pytest.mark.parametrize(
    "source",
    [
        "from torch._inductor import ir",
        "import torch._dynamo",
        "from torch.fx.experimental import _config",
        "torch._C.has_mkl",
        "nn.modules.module._global_forward_hooks",
        "aten._to_copy.default",
        "weight._version",
        "model.layers[0]._modules.items()",
        "module.graph._codegen = None",
    ],
)
def test_a_private_use_is_found(source: str) -> None:
    assert len([*private_uses(source)]) == 1


@pytest.mark.parametrize("source", ["self._buffers", "torch.__version__", "row._replace(x=1)", "import specinfer._x"])
def test_other_names_pass(source: str) -> None:
    assert not [*private_uses(source)]


def test_what_breaks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a name that torch had, and with one that does something else."""
    registry = nn.modules.module
    with monkeypatch.context() as patch:
        patch.delattr(registry, "_global_forward_hooks")
        with pytest.raises(AssertionError, match=r"torch_private.py: global_forward_hooks relies on: AttributeError"):
            tries("global_forward_hooks")(private.global_forward_hooks)()
    monkeypatch.setattr(private, "writes", lambda _: 0)
    with pytest.raises(AssertionError, match=r"torch_private.py: writes relies on"):
        test_writes_are_counted()
